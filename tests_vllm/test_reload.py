"""Weights of another checkpoint into a running engine: the bits of a fresh load, or a refusal that changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine_checks import VOCABULARY, Run, prompts, written


def other_weights(path: Path, to: Path) -> Path:
    """The same model with the signs of all packed weights turned, and gate's with another scale."""
    shutil.copytree(path, to)
    stored = load_file(to / "model.safetensors")
    for name in stored:
        if name.endswith("weight_packed"):
            stored[name] = stored[name] ^ 0x88
        if name.endswith("gate_proj.weight_global_scale"):
            stored[name] = stored[name] * 1.25
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    return to


def other_rotations(path: Path, to: Path) -> Path:
    """The same file with a column of the rotation turned round."""
    shutil.copytree(path, to)
    stored = load_file(to / "model.safetensors")
    for name in stored:
        if "_input." in name:
            stored[name][:, 3] *= -1
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    return to


def without_rotations(path: Path, to: Path) -> Path:
    """The same weights without the transforms."""
    shutil.copytree(path, to)
    stored = {n: t for n, t in load_file(to / "model.safetensors").items() if "_input." not in n}
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {}
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3_moe", marks=pytest.mark.every)])
def results(request: Any, run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reload")
    first = written(folder / "first", request.param, "nvfp4", "random-hadamard:16")
    second = other_weights(first, folder / "second")
    turned = other_rotations(first, folder / "turned")
    bare = without_rotations(first, folder / "bare")
    ids = prompts(VOCABULARY)
    sources = [{"path": str(path)} for path in (second, turned, bare, first)]
    # As a trainer sends them: no path, but tensors.
    sources += [{"tensors": str(path / "model.safetensors")} for path in (second, turned)]
    jobs = [{"path": str(first), "ids": ids, "reload_from": sources}, {"path": str(second), "ids": ids}]
    running, fresh = run_engine(jobs)
    assert "error" not in running, running
    assert "error" not in fresh, fresh
    names = ("second", "turned", "bare", "first", "streamed", "turned stream")
    return {"start": running, "fresh": fresh} | dict(zip(names, running["reloads"], strict=True))


def test_other_weights_give_the_bits_of_a_fresh_load(results: dict[str, Any]) -> None:
    assert results["fresh"]["logprobs"] != results["start"]["logprobs"]
    for name in ("second", "streamed"):
        assert results[name]["logprobs"] == results["fresh"]["logprobs"], name
        assert results[name]["tokens"] == results["fresh"]["tokens"], name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("turned", ("only for the transforms and formats", "the matrix of the first load", "start the")),
        ("bare", ("only for the transforms and formats", "quantization_config", "start the engine anew")),
        ("turned stream", ("only for the transforms and formats", "another")),
    ],
)
def test_other_rotations_are_refused(results: dict[str, Any], name: str, words: tuple[str, ...]) -> None:
    for word in words:
        assert word in results[name]["error"], results[name]


def test_after_a_refusal_weights_can_be_reloaded(results: dict[str, Any]) -> None:
    assert results["first"]["logprobs"] == results["start"]["logprobs"]
