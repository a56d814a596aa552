"""Checkpoints that the plugin refuses: the engine does not start, and says what was found and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_checks import VOCABULARY, Run, prompts, written


def changed(folder: Path, **entry: Any) -> Path:
    """A checkpoint of ours with other words in its quantization entry."""
    written(folder, "llama", "nvfp4", "hadamard:16")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= entry
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def results(run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("refused")
    attention = {"location": "k_cache", "targets": ["re:.*self_attn$"], "ignore": [], "inverse": False}
    scheme = {"type": "hadamard", "head_dim": 32, "randomize": False, "apply": [attention]}
    eight = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "format": "float-quantized", "weights": eight}
    paths = {
        "a rotation of keys": changed(folder / "keys", transform_config={"config_groups": {"R3": scheme}}),
        "no FP4, ours asked for": changed(folder / "eight", format="float-quantized", config_groups={"g": group}),
        "a backend of vLLM's": changed(folder / "backend"),
        "a packed layer that is ignored": changed(folder / "ignored", ignore=["lm_head", "re:.*q_proj"]),
    }
    ignore = ("lm_head", "re:.*experts.1.up_proj")
    paths["an expert that is not FP4"] = written(folder / "mixture", "qwen3_moe", "nvfp4", "hadamard:16", ignore=ignore)
    options = {"no FP4, ours asked for": {"quantization": "quarterturn"}}
    options["a backend of vLLM's"] = {"kernel_config": {"linear_backend": "marlin"}}
    jobs = [{"path": str(p), "ids": prompts(VOCABULARY), "options": options.get(n, {})} for n, p in paths.items()]
    return {name: result.get("error", "it ran") for name, result in zip(paths, run_engine(jobs), strict=True)}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a rotation of keys", ("'R3' applies to 'k_cache'", "config.json", "do make the checkpoint without")),
        ("no FP4, ours asked for", ("--quantization quarterturn was asked for", "do leave --quantization out")),
        ("a backend of vLLM's", ("this --linear-backend is not one of ours", "marlin", "torch, triton")),
        (
            "an expert that is not FP4",
            ("these experts are not run", "every expert in FP4", "experts.1.up_proj", "do load the file with"),
        ),
        (
            "a packed layer that is ignored",
            ("config and tensors disagree", "q_proj", "do take the layer out of ignore"),
        ),
    ],
)
def test_what_is_refused_says_why_and_what_to_do(results: dict[str, str], what: str, words: tuple[str, ...]) -> None:
    for word in words:
        assert word in results[what], results[what]
