"""Tensor parallel 2 against 1, with a bias, key-value heads that are fewer than ranks, experts, and a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_checks import VOCABULARY, Run, agree, prompts, written

KINDS = {
    "llama": ("llama", "nvfp4", "random-hadamard:16"),
    "qwen2 with bias": ("qwen2", "nvfp4", "hadamard:16"),
    "experts": ("qwen3_moe", "nvfp4", "random-hadamard:16"),
}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(scope="module")
def results(run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    folder = tmp_path_factory.mktemp("parallel")
    paths = [written(folder / name.replace(" ", "-"), *KINDS[name]) for name in KINDS]
    # K of down_proj is 96: blocks of 32 are whole, and two shards of 48 are not.
    paths.append(written(folder / "uncut", "llama", "mxfp4", "hadamard:32"))
    jobs = [{"path": str(path), "ids": prompts(VOCABULARY)} for path in paths]
    one = run_engine(jobs[:-1])
    two = run_engine([job | {"options": TWO} for job in jobs], VLLM_CPU_OMP_THREADS_BIND="0|1")
    return dict(zip([*KINDS, "uncut"], zip([*one, None], two, strict=True), strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_agree_with_one(results: dict[str, tuple[Any, Any]], name: str) -> None:
    one, two = results[name]
    assert "error" not in one, one
    assert "error" not in two, two
    agree(two["logprobs"], one["logprobs"])


def test_a_shard_that_cuts_a_block_is_refused_with_the_reason(results: dict[str, tuple[Any, Any]]) -> None:
    _, two = results["uncut"]
    assert "error" in two
    for word in ("down_proj", "tensor parallelism over 2", "whole blocks", "pipeline parallelism"):
        assert word in two["log"], (word, two["log"][-3000:])


def test_a_checkpoint_that_is_not_ours_is_refused_by_name(run_engine: Run, tmp_path: Path) -> None:
    from tiny_models import tiny_model

    tiny_model().save_pretrained(tmp_path / "plain")
    (result,) = run_engine(
        [{"path": str(tmp_path / "plain"), "ids": prompts(VOCABULARY), "options": {"quantization": "quarterturn"}}]
    )
    assert "error" in result
