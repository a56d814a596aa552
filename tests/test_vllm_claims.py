"""The parts of the vLLM plugin that need no vLLM: what is claimed, who runs it, names of fused layers, shards."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import quarterturn
from quarterturn import BackendRefusal, CheckpointRefusal
from quarterturn.integrations import vllm as plugin
from quarterturn.integrations.vllm.claims import Machine, claims, our_backend
from quarterturn.integrations.vllm.contents import Contents, check_shard
from tiny_models import tiny_model, tokens

CPU = Machine("cpu")
HOPPER, BLACKWELL = Machine("cuda", (9, 0)), Machine("cuda", (10, 0))
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def entry(format: str = "nvfp4", quantizes: bool = True, location: str | None = None) -> dict[str, Any]:
    """A quantization entry as far as claims look."""
    scheme = {"v": {"type": "hadamard", "apply": [{"location": location, "targets": ["Linear"]}]}}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{format}-pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "input_activations": {"num_bits": 4} if quantizes else None}},
        "transform_config": {"config_groups": scheme} if location else {},
    }


@pytest.mark.parametrize(
    ("what", "machine", "claimed"),
    [
        (entry(), CPU, True),
        (entry(), HOPPER, True),
        (entry(), BLACKWELL, False),
        (entry(location="input"), BLACKWELL, True),
        (entry(location="weight_input"), BLACKWELL, False),
        (entry(quantizes=False), HOPPER, False),
        (entry(quantizes=False), CPU, True),
        (entry("mxfp4"), BLACKWELL, False),
        (entry("mxfp4"), HOPPER, True),
        (entry("mxfp4", quantizes=False), BLACKWELL, True),
        (entry("mxfp4", quantizes=False), HOPPER, False),
        (entry(), Machine("TPU"), False),
        (entry("float"), CPU, False),
    ],
)
def test_what_vllm_would_not_run_is_claimed(what: dict[str, Any], machine: Machine, claimed: bool) -> None:
    assert claims(what, None, machine) is claimed


def test_another_method_is_never_overruled_and_ours_is_obeyed() -> None:
    assert not claims(entry(), "compressed-tensors", CPU)
    assert claims(entry(), "quarterturn", BLACKWELL)
    assert not claims(entry("float"), "quarterturn", CPU)


@pytest.mark.parametrize(
    "other",
    [None, {}, [], "text", {"quant_method": "gptq"}, {"quant_method": "compressed-tensors"},
     {"quant_method": "compressed-tensors", "config_groups": []},
     {"quant_method": "compressed-tensors", "config_groups": {"g": None}},
     {"quant_method": "modelopt", "config_groups": {"g": {"format": "nvfp4-pack-quantized"}}}],
)  # fmt: skip
def test_any_other_config_is_left_alone(other: Any) -> None:
    assert not claims(other, None, CPU)
    assert not claims(other, "quarterturn", CPU)


@pytest.mark.parametrize(
    "transforms",
    [[1], "x", 3, {"config_groups": [1]}, {"config_groups": "x"}, {"config_groups": {"v": [1]}},
     *({"config_groups": {"v": {"apply": apply}}} for apply in (3, "x", [3], {"location": "input"}, None)),
     {"config_groups": {"v": {"apply": [{"location": ["input"]}]}}}],
)  # fmt: skip
def test_malformed_transforms_are_no_reason_to_claim(transforms: Any) -> None:
    malformed = entry() | {"transform_config": transforms}
    assert not claims(malformed, None, BLACKWELL)
    assert claims(malformed, "quarterturn", BLACKWELL)
    assert claims(malformed, None, CPU)


def test_the_engines_backends_are_ours_or_refused() -> None:
    assert our_backend("auto") == "auto"
    assert our_backend("torch") == "any_torch"
    assert our_backend("triton") == "gpu_triton"
    with pytest.raises(BackendRefusal, match="marlin"):
        our_backend("marlin")
    for word in (["x"], {}, 3, None):
        with pytest.raises(BackendRefusal, match="not one of ours"):
            our_backend(word)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.32.0", True), ("0.33.1+cpu", True), ("0.31.9", False), ("0.34.0", False), ("0.320", False)],
)
def test_versions(version: str, known: bool) -> None:
    assert plugin.supported(version) is known


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm") / "model"
    quarterturn.quantize(
        tiny_model("qwen2"), "nvfp4", transform="random-hadamard:16", calibration=tokens(), output=path, progress=False
    )
    return path


def test_fused_layers_are_the_files_own(folder: Path) -> None:
    contents = pickle.loads(pickle.dumps(Contents(folder)))
    names = contents.parts("model.layers.1.self_attn.qkv_proj", FUSED)
    assert names == [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    specs = contents.specs("model.layers.1.self_attn.qkv_proj", names)
    assert [spec.n for spec in specs] == [64, 32, 32]
    assert all(spec.has_bias for spec in specs)
    assert specs[0].input_transform is specs[1].input_transform, "one matrix for all layers"
    other = contents.specs("x", ["model.layers.0.mlp.down_proj"])[0]
    assert other.input_transform is specs[0].input_transform
    assert contents.parts("lm_head", FUSED) == ["lm_head"]
    assert contents.specs("lm_head", ["lm_head"]) is None


def test_names_follow_the_engines_mapping(folder: Path) -> None:
    contents = Contents(folder)
    contents.rename(lambda name: name.replace("model.", "language_model.model.", 1))
    names = contents.parts("language_model.model.layers.0.mlp.gate_up_proj", FUSED)
    assert names == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]


def test_tensors_of_other_files_in_the_folder_are_told(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert Contents(copy).stray_tensors() == {}
    save_file({"beside": torch.zeros(1)}, copy / "expected.safetensors")
    assert Contents(copy).stray_tensors() == {"beside": "expected.safetensors"}


def altered(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy with changes of the quantization entry."""
    import shutil

    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] |= changes
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_other_formats_are_left_to_the_engine_and_refused_by_the_library(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    eight = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["re:.*down_proj"], "format": "float-quantized", "weights": eight}
    group["input_activations"] = eight | {"strategy": "token", "dynamic": True}
    groups = config["config_groups"] | {"eight": group}
    kv_cache = eight | {"strategy": "tensor"}
    copy = altered(folder, tmp_path / "mixed", config_groups=groups, kv_cache_scheme=kv_cache)
    contents = Contents(copy)
    assert [other.name for other in contents.checkpoint.quant.others] == ["eight"]
    assert not any("down_proj" in name for name in contents.checkpoint.layers), "packed, but not FP4"
    assert contents.specs("down", ["model.layers.0.mlp.down_proj"]) is None
    with pytest.raises(CheckpointRefusal, match="KV cache"):
        quarterturn.load(copy)


def test_fused_layers_must_be_quantized_alike(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    eight = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["re:.*q_proj"], "format": "float-quantized", "weights": eight}
    copy = altered(folder, tmp_path / "mixed", config_groups=config["config_groups"] | {"eight": group})
    contents = Contents(copy)
    names = contents.parts("model.layers.0.self_attn.qkv_proj", FUSED)
    with pytest.raises(CheckpointRefusal, match=r"qkv_proj[\s\S]*q_proj: not FP4"):
        contents.specs("model.layers.0.self_attn.qkv_proj", names)


def test_a_layer_that_the_config_wants_packed_is_not_run_unquantized(folder: Path) -> None:
    with pytest.raises(CheckpointRefusal, match=r"no model\.layers\.7\.mlp\.down_proj\.weight_packed"):
        Contents(folder).specs("x", ["model.layers.7.mlp.down_proj"])


@pytest.mark.parametrize(("n", "k", "word"), [(64, 48, None), (64, 24, "groups of 16"), (64, 40, "blocks")])
def test_a_shard_holds_whole_groups_and_blocks(folder: Path, n: int, k: int, word: str | None) -> None:
    spec = Contents(folder).checkpoint.layers["model.layers.0.mlp.down_proj"]
    if word is None:
        check_shard(spec, n, k, 2, row_parallel=True)
        return
    with pytest.raises(CheckpointRefusal, match=rf"down_proj[\s\S]*{word}[\s\S]*pipeline parallelism"):
        check_shard(spec, n, k, 2, row_parallel=True)
