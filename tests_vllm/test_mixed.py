"""A file of several formats: FP4 layers are ours, FP8 layers, unquantized layers and an FP8 KV cache are vLLM's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quarterturn
from engine_checks import VOCABULARY, Run, agree, expected, prompts, tiny_model, tokens, written
from quarterturn.checkpoint import open_checkpoint

pytestmark = pytest.mark.every
EIGHT = {"num_bits": 8, "type": "float", "symmetric": True, "observer": None, "group_size": None, "actorder": None}
DOWN = "mlp.down_proj.weight"


def mixed(folder: Path, kv_cache: bool) -> Path:
    """down_proj of layer 0 in FP8 (weights by row, inputs by token), of layer 1 unquantized, all else NVFP4."""
    ignore = ("lm_head", "re:.*down_proj")
    written(folder, "llama", "nvfp4", "hadamard:16", ignore=ignore)
    stored = load_file(folder / "model.safetensors")
    weight = stored[f"model.layers.0.{DOWN}"].float()
    scale = weight.abs().amax(1, keepdim=True) / 448
    stored[f"model.layers.0.{DOWN}"] = (weight / scale).to(torch.float8_e4m3fn)
    stored[f"model.layers.0.{DOWN}_scale"] = scale
    if kv_cache:
        for i in range(2):
            for name in "kv":
                stored[f"model.layers.{i}.self_attn.{name}_scale"] = torch.tensor([0.25])
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    entry = config["quantization_config"]
    entry["config_groups"]["eight"] = {
        "targets": ["re:.*layers.0.mlp.down_proj"],
        "format": "float-quantized",
        "weights": EIGHT | {"strategy": "channel", "dynamic": False},
        "input_activations": EIGHT | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    entry["format"], entry["ignore"] = "mixed-precision", ["lm_head", "model.layers.1.mlp.down_proj"]
    entry["kv_cache_scheme"] = EIGHT | {"strategy": "tensor", "dynamic": False} if kv_cache else None
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rotated(folder: Path) -> Path:
    """down_proj and o_proj unquantized behind transforms: the decoded weights of an FP4 file, which asks for them."""
    written(folder, "qwen2", "nvfp4", "random-hadamard:16")
    stored = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    for name in [name for name in checkpoint.layers if name.endswith(("down_proj", "o_proj"))]:
        stored[f"{name}.weight"] = checkpoint.weight(name).dequantize()
        for kind in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"):
            del stored[f"{name}.{kind}"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:.*down_proj", "re:.*o_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_eight(layer: torch.nn.Linear) -> None:
    """FP8 weights and inputs in an ordinary layer, as the file's group says: the reference of this test."""
    scale = layer.weight.abs().amax(1, keepdim=True) / 448
    layer.weight = torch.nn.Parameter((layer.weight / scale).to(torch.float8_e4m3fn).float() * scale, False)

    def rounded(_: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        step = arguments[0].abs().amax(-1, keepdim=True) / 448
        return ((arguments[0] / step).to(torch.float8_e4m3fn).float() * step,)

    layer.register_forward_pre_hook(rounded)


@pytest.fixture(scope="module")
def results(run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mixed")
    paths = [mixed(folder / f"kv{kv}", kv) for kv in (False, True)]
    ids = prompts(VOCABULARY)
    jobs = [{"path": str(path), "ids": ids, "scales": True, "options": {"dtype": "bfloat16"}} for path in paths]
    behind = rotated(folder / "rotated")
    found = run_engine([*jobs, {"path": str(behind), "ids": ids}])
    found[-1]["path"] = behind
    return found


def reference(tmp_path: Path, eight: bool) -> list[list[float]]:
    """Log-probabilities of the library, with or without FP8 in down_proj of layer 0."""
    ignore = ("lm_head", "re:.*down_proj")
    options: dict[str, Any] = {"transform": "hadamard:16", "ignore": ignore, "calibration": tokens(4, 32, seed=7)}
    quarterturn.quantize(tiny_model(), "nvfp4", output=tmp_path / "plain", progress=False, **options)
    model = quarterturn.load(tmp_path / "plain", dtype="float32", device="cpu")
    if eight:
        in_eight(model.model.layers[0].mlp.down_proj)
    found = []
    with torch.no_grad():
        for prompt in prompts(VOCABULARY):
            x = torch.tensor([prompt])
            log = model(x).logits.log_softmax(-1)[0, :-1]
            found.append(log.gather(-1, x[0, 1:, None])[:, 0].tolist())
    return found


def test_fp8_layers_run_beside_ours(results: list[dict[str, Any]], tmp_path: Path) -> None:
    """bf16, which vLLM's FP8 kernel asks for: so a mean and no maximum, and a scale to compare it with."""
    result = results[0]
    assert "error" not in result, result
    got = torch.tensor([v for row in result["logprobs"] for v in row])
    want = torch.tensor([v for row in reference(tmp_path, True) for v in row])
    assert (got - want).abs().mean() < 0.25 * want.std(), ((got - want).abs().mean(), want.std())


def test_an_fp8_cache_takes_the_files_scales(results: list[dict[str, Any]]) -> None:
    """The cache is vLLM's own; what it rounds to is not judged, but that it is asked for, with these scales."""
    plain, cached = results[0], results[1]
    assert "error" not in cached, cached
    assert cached["scales"] == [0.25, 0.25]
    assert plain["scales"] == [1.0, 1.0]
    assert cached["logprobs"] != plain["logprobs"]


def test_layers_of_the_engines_own_are_rotated_where_the_file_asks(results: list[dict[str, Any]]) -> None:
    result = results[-1]
    assert "error" not in result, result
    agree(result["logprobs"], expected(result["path"], prompts(VOCABULARY)))
