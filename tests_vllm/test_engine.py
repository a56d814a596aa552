"""The engine on a CPU in float32 against quarterturn.load: teacher-forced log-probabilities of prompts.

The tolerance is 1e-3 for 99 of 100 tokens and 0.05 for each: the two run the same products in another order, and an
activation next to a tie of FP4 may fall the other way. A transform left out, a scale of another shard or a bias added
twice moves them by tenths: the planted faults below hold that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_checks import SHARED, VOCABULARY, Run, agree, expected, prompts, written

CHECKPOINTS = {
    "nvfp4 w4a4, random hadamard": ("llama", "nvfp4", "random-hadamard:16", "fp4"),
    "mxfp4 w4a4, tied": ("tied", "mxfp4", "hadamard:32", "fp4"),
    "nvfp4 w4a16": ("llama", "nvfp4", "hadamard:32", "bf16"),
    "mxfp4 w4a16": ("qwen2", "mxfp4", "random-hadamard:32", "bf16"),
    "bias": ("qwen2", "nvfp4", "random-hadamard:16", "fp4"),
    "no transform": ("llama", "nvfp4", None, "fp4"),
    "experts": ("qwen3_moe", "nvfp4", "random-hadamard:32", "fp4"),
    "experts of the Mixtral kind": ("mixtral", "mxfp4", "hadamard:32", "fp4"),
}


NAMED = "--linear-backend torch"
"""The first checkpoint by another backend, which is named."""


@pytest.fixture(scope="module")
def results(run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    jobs, names = [], []
    for name, (kind, format, transform, activations) in CHECKPOINTS.items():
        path = written(folder / name.replace(" ", "-").replace(",", ""), kind, format, transform, activations)
        job = {"path": str(path), "ids": prompts(VOCABULARY), "dense": "experts" in name}
        jobs.append(job | {"reload": name in ("bias", "experts")})
        names.append(name)
    named = {"kernel_config": {"linear_backend": "torch"}}
    jobs.append({"path": jobs[0]["path"], "ids": prompts(VOCABULARY), "options": named})
    names.append(NAMED)
    found = run_engine(jobs)
    return {name: result | {"path": job["path"]} for name, result, job in zip(names, found, jobs, strict=True)}


@pytest.mark.parametrize("name", [*CHECKPOINTS, NAMED])
def test_logprobs_are_those_of_the_library(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    assert "error" not in result, result
    agree(result["logprobs"], expected(result["path"], prompts(VOCABULARY)))


@pytest.mark.parametrize("name", ["bias", "experts"])
def test_a_sleeping_engines_weights_give_the_same_bits(results: dict[str, dict[str, Any]], name: str) -> None:
    """All memory of the layers is written over and comes back (level 1), or is lost and reloaded (level 2)."""
    result = results[name]
    assert "error" not in result, result
    assert result["scrambled"]["logprobs"] != result["logprobs"], "nothing was written over"
    for way in ("given back", "reloaded"):
        assert result[way]["logprobs"] == result["logprobs"], way
        assert result[way]["tokens"] == result["tokens"], way


def test_the_log_says_what_runs(results: dict[str, dict[str, Any]]) -> None:
    log = results["bias"]["log"]
    for arithmetic in ("W4A4 nvfp4, input transform 16", "W4A16 mxfp4, input transform 32", "W4A4 nvfp4"):
        assert f"quarterturn: {arithmetic} by " in log


def test_the_backend_that_is_named_runs(results: dict[str, dict[str, Any]]) -> None:
    assert "W4A4 nvfp4, input transform 16 by any_torch" in results[NAMED]["log"]


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if "experts" in name])
def test_experts_in_a_graph_give_what_they_give_by_a_loop(results: dict[str, dict[str, Any]], name: str) -> None:
    """Every token by every expert, of which what was routed is taken."""
    agree(results[name]["dense"]["logprobs"], results[name]["logprobs"])


def test_the_tolerance_sees_a_transform_left_out(results: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """The same weights without their transform, by the library: what the engine would give if it dropped it."""
    import json
    import shutil

    result = results["nvfp4 w4a4, random hadamard"]
    bare = tmp_path / "bare"
    shutil.copytree(result["path"], bare)
    config = json.loads((bare / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {}
    (bare / "config.json").write_text(json.dumps(config))
    from safetensors.torch import load_file, save_file

    kept = {k: v for k, v in load_file(bare / "model.safetensors").items() if not k.endswith("_input.weight")}
    save_file(kept, bare / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError):
        agree(result["logprobs"], expected(bare, prompts(VOCABULARY)))


@pytest.mark.every
@pytest.mark.parametrize("name", ["bias", "experts"])
def test_compiled_by_the_engine_it_says_the_same(
    run_engine: Run, results: dict[str, dict[str, Any]], name: str
) -> None:
    """torch.compile as vLLM uses it, batches padded; and reloaded weights reach what was compiled."""
    eager = results[name]
    job = {"path": eager["path"], "ids": prompts(VOCABULARY), "reload": True, "options": {"enforce_eager": False}}
    (compiled,) = run_engine([job])
    assert "error" not in compiled, compiled
    agree(compiled["logprobs"], eager["logprobs"])
    assert compiled["scrambled"]["logprobs"] != compiled["logprobs"]
    assert compiled["given back"]["logprobs"] == compiled["logprobs"]
    assert compiled["reloaded"]["logprobs"] == compiled["logprobs"]


@pytest.mark.every
def test_the_shared_checkpoints(run_engine: Run) -> None:
    """Every folder of checkpoints made by llm-compressor, where this clone lies beside them."""
    folders = sorted(p for p in SHARED.iterdir() if p.is_dir()) if SHARED.is_dir() else []
    if not folders:
        pytest.skip(f"{SHARED} is not here: checkpoints of llm-compressor for {len(CHECKPOINTS)} kinds are not run")
    ids = prompts(320)
    found = run_engine([{"path": str(folder), "ids": ids} for folder in folders])
    for folder, result in zip(folders, found, strict=True):
        assert "error" not in result, (folder.name, result["error"])
        agree(result["logprobs"], expected(folder, ids))
