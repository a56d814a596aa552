"""Two ranks against one, tensor and pipeline parallel: with biases, key-value heads that are fewer than ranks, experts,
the matrix that is stored under the first layer alone, and a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_checks import SHARED, VOCABULARY, Run, agree, prompts, written

KINDS = {"qwen2 with bias": ("qwen2", "nvfp4", "hadamard:16")}
MORE = {
    "llama": ("llama", "nvfp4", "random-hadamard:16"),
    "llama with every bias": ("llama", "nvfp4", "random-hadamard:16"),
    "experts": ("qwen3_moe", "nvfp4", "random-hadamard:16"),
}
STAGES = {name: MORE[name] for name in ("llama", "experts")}
CUT = ("llama", "mxfp4", "hadamard:32")  # K of down_proj is 96: two shards of 48 are no whole blocks of 32
OUTPUTS = ("llama-mxfp4a16-quip-vu-hadamard32", "llama-nvfp4-quip-vu-random-hadamard64")
BIASED = {"attention_bias": True, "mlp_bias": True}
"""o_proj and down_proj, which are cut along K, have a bias too: it must be added once."""
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
IN_TURN = TWO | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
# On a CPU a stage has a place for what the one before it sends only if it was warmed up, as traced models alone are.
IN_TURN |= {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
WARM = {"VLLM_CPU_CI_ENV": "0"}

Results = dict[str, tuple[Any, Any]]


def both(
    run_engine: Run,
    folder: Path,
    kinds: dict[str, tuple[str, str, str]],
    alone: tuple[str, ...] = (),
    two: dict[str, Any] = TWO,
    **environment: str,
) -> Results:
    """(one rank, two ranks) of each kind; those of `alone` on two ranks only."""
    paths = {
        name: written(folder / name.replace(" ", "-"), *kind, changes=BIASED if "every bias" in name else None)
        for name, kind in kinds.items()
    }
    jobs = {name: {"path": str(path), "ids": prompts(VOCABULARY)} for name, path in paths.items()}
    first = {name: job for name, job in jobs.items() if name not in alone}
    one = dict(zip(first, run_engine(list(first.values())), strict=True))
    ranks = [job | {"options": two} for job in jobs.values()]
    found = run_engine(ranks, VLLM_CPU_OMP_THREADS_BIND="0|1", **environment)
    return {name: (one.get(name), result) for name, result in zip(jobs, found, strict=True)}


@pytest.fixture(scope="module")
def results(run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return both(run_engine, tmp_path_factory.mktemp("parallel"), KINDS | {"cut": CUT}, alone=("cut",))


@pytest.fixture(scope="module")
def more(run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return both(run_engine, tmp_path_factory.mktemp("more"), MORE)


@pytest.fixture(scope="module")
def stages(run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return both(run_engine, tmp_path_factory.mktemp("stages"), STAGES, two=IN_TURN, **WARM)


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


@pytest.mark.every
@pytest.mark.parametrize("name", STAGES)
def test_two_stages_agree_with_one(stages: Results, name: str) -> None:
    """Pipeline parallel: the second rank has layer 1, whose matrix the file holds under layer 0."""
    agreed(*stages[name])


@pytest.mark.every
def test_two_ranks_agree_with_one_behind_output_transforms(run_engine: Run) -> None:
    """Files of llm-compressor whose q, k, v, gate and up are turned behind the product, each shard by itself."""
    folders = [SHARED / name for name in OUTPUTS]
    if not all(folder.is_dir() for folder in folders):
        pytest.skip(f"{SHARED} is not here: output transforms are not cut in two")
    jobs = [{"path": str(folder), "ids": prompts(320)} for folder in folders]
    one = run_engine(jobs)
    two = run_engine([job | {"options": TWO} for job in jobs], VLLM_CPU_OMP_THREADS_BIND="0|1")
    for before, after in zip(one, two, strict=True):
        agreed(before, after)


def test_a_shard_that_cuts_a_block_is_refused_with_the_reason(results: Results) -> None:
    _, two = results["cut"]
    assert "error" in two
    for word in ("down_proj", "tensor parallelism over 2", "whole blocks", "pipeline parallelism"):
        assert word in two["log"], (word, two["log"][-3000:])
