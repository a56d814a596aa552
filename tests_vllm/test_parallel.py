"""Tensor parallel 2 against 1, with a bias, key-value heads that are fewer than ranks, experts, and a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_checks import VOCABULARY, Run, agree, prompts, written

KINDS = {"qwen2 with bias": ("qwen2", "nvfp4", "hadamard:16")}
MORE = {"llama": ("llama", "nvfp4", "random-hadamard:16"), "experts": ("qwen3_moe", "nvfp4", "random-hadamard:16")}
CUT = ("llama", "mxfp4", "hadamard:32")  # K of down_proj is 96: two shards of 48 are no whole blocks of 32
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


Results = dict[str, tuple[Any, Any]]


def both(run_engine: Run, folder: Path, kinds: dict[str, tuple[str, str, str]], alone: tuple[str, ...] = ()) -> Results:
    """(one rank, two ranks) of each kind; those of `alone` on two ranks only."""
    paths = {name: written(folder / name.replace(" ", "-"), *kind) for name, kind in kinds.items()}
    jobs = {name: {"path": str(path), "ids": prompts(VOCABULARY)} for name, path in paths.items()}
    first = {name: job for name, job in jobs.items() if name not in alone}
    one = dict(zip(first, run_engine(list(first.values())), strict=True))
    two = run_engine([job | {"options": TWO} for job in jobs.values()], VLLM_CPU_OMP_THREADS_BIND="0|1")
    return {name: (one.get(name), found) for name, found in zip(jobs, two, strict=True)}


@pytest.fixture(scope="module")
def results(run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return both(run_engine, tmp_path_factory.mktemp("parallel"), KINDS | {"cut": CUT}, alone=("cut",))


@pytest.fixture(scope="module")
def more(run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return both(run_engine, tmp_path_factory.mktemp("more"), MORE)


def agreed(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert "error" not in one, one
    assert "error" not in two, two
    agree(two["logprobs"], one["logprobs"])


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_agree_with_one(results: Results, name: str) -> None:
    agreed(*results[name])


@pytest.mark.every
@pytest.mark.parametrize("name", MORE)
def test_two_ranks_agree_with_one_on_more_kinds(more: Results, name: str) -> None:
    agreed(*more[name])


def test_a_shard_that_cuts_a_block_is_refused_with_the_reason(results: Results) -> None:
    _, two = results["cut"]
    assert "error" in two
    for word in ("down_proj", "tensor parallelism over 2", "whole blocks", "pipeline parallelism"):
        assert word in two["log"], (word, two["log"][-3000:])
