"""What `quantize` writes: other software reads it, our loader runs it the same, and it appears whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import quarterturn
from quarterturn.checkpoint.write import stored_matrix, transform_type
from quarterturn.errors import Refusal
from quarterturn.linear import FP4Linear
from quarterturn.quantize import quantize, save_checkpoint
from quarterturn.transforms import Transform, hadamard, matrix, random_hadamard
from tiny_models import tiny_model, tiny_tokenizer, tokens

DENSE = torch.rand(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 0.1 + torch.eye(32)
VARIANTS: dict[str, tuple[str, Any, str]] = {
    "nvfp4": ("nvfp4", None, "fp4"),
    "nvfp4-hadamard16": ("nvfp4", "hadamard:16", "fp4"),
    "nvfp4-random32": ("nvfp4", "random-hadamard:32", "fp4"),
    "nvfp4-transposed": ("nvfp4", Transform(random_hadamard(16, 9).matrix, 0.25, transpose=True), "fp4"),
    "nvfp4-full": ("nvfp4", "random-hadamard:full", "fp4"),
    "nvfp4a16-dense": ("nvfp4", DENSE, "bf16"),
    "mxfp4-dense": ("mxfp4", DENSE, "fp4"),
    "mxfp4a16-random32": ("mxfp4", "random-hadamard:32", "bf16"),
}


def make(folder: Path, kind: str = "llama", variant: str = "nvfp4-random32", **options: Any) -> Any:
    format, transform, activations = VARIANTS[variant]
    model = tiny_model(kind, options.pop("dtype", torch.float32))
    return quantize(
        model, format, transform, activations, tokens(2, 48), output=folder, progress=False, **options
    )  # fmt: skip


def run(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def fp4_layers(model: nn.Module) -> dict[str, FP4Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, FP4Linear)}


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def listing(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2", "qwen3_moe", "mixtral"])
def test_our_loader_gives_the_same_logits(kind: str, variant: str, tmp_path: Path) -> None:
    model, ids = make(tmp_path / "out", kind, variant), tokens(seed=5)
    loaded = quarterturn.load(tmp_path / "out", device="cpu")
    assert fp4_layers(loaded).keys() == fp4_layers(model).keys()
    assert torch.equal(run(loaded, ids), run(model, ids))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("variant", ["nvfp4-random32", "mxfp4-dense", "nvfp4-full"])
@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2"])
def test_compressed_tensors_decompresses_to_the_same_weights(kind: str, variant: str, tmp_path: Path) -> None:
    """Through Transformers' own reader, which is compressed-tensors': bf16 weights bit for bit."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model = make(tmp_path / "out", kind, variant, dtype=torch.bfloat16)
    plain, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    # What a model in floating point has no place for: the transform, and (where it says so, as 5.24) input scales.
    assert all("_input.weight" in key or key.endswith(".input_global_scale") for key in info["unexpected_keys"])
    for name, layer in fp4_layers(model).items():
        other = plain.get_submodule(name)
        assert other.weight.dtype == torch.bfloat16
        assert torch.equal(other.weight, layer.weight_tensor().dequantize(torch.bfloat16)), name
        assert (other.bias is None) == (layer.bias is None)


@pytest.mark.parametrize("variant", ["nvfp4-random32", "mxfp4-dense"])
def test_compressed_tensors_decompresses_experts(variant: str, tmp_path: Path) -> None:
    """Tensor by tensor with its compressors: Transformers' fused reading of experts leaves out their global scale."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = make(tmp_path / "out", "qwen3_moe", variant, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    scheme = parsed.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(parsed.format)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layers = fp4_layers(model)
    assert len([name for name in layers if ".experts." in name]) == 2 * 4 * 3
    for name, layer in layers.items():
        own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        weight = compressor.decompress(own, scheme)["weight"]
        assert torch.equal(weight, layer.weight_tensor().dequantize(torch.bfloat16)), name


def test_config_says_what_producers_say(tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.transform import TransformConfig

    make(tmp_path / "out", "qwen3_moe", "nvfp4-transposed")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    entry = config["quantization_config"]
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["dtype"] == "float32"
    assert entry["quant_method"] == "compressed-tensors"
    assert entry["format"] == entry["config_groups"]["group_0"]["format"] == "nvfp4-pack-quantized"
    assert entry["ignore"] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]
    parsed = QuantizationConfig.model_validate(entry)
    scheme = parsed.config_groups["group_0"]
    assert (scheme.weights.group_size, scheme.weights.num_bits, scheme.weights.strategy) == (16, 4, "tensor_group")
    assert scheme.input_activations.dynamic == "local"
    (transform,) = TransformConfig.model_validate(entry["transform_config"]).config_groups.values()
    assert (transform.type, transform.head_dim) == ("random-hadamard", 16)
    assert [(a.location, a.inverse, a.targets) for a in transform.apply] == [
        ("input", True, ["Linear"]), ("weight_input", False, ["Linear"]),
    ]  # fmt: skip


def test_the_matrix_is_stored_once(tmp_path: Path) -> None:
    make(tmp_path / "one", variant="nvfp4-random32")
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        stored = [name for name in file.keys() if name.endswith("_input.weight")]  # noqa: SIM118
        assert stored == ["model.layers.0.self_attn.q_proj.v_input.weight"]
        assert torch.equal(file.get_tensor(stored[0]), random_hadamard(32).matrix)
    make(tmp_path / "two", variant="nvfp4-full")
    stored = [name for name in load_file(tmp_path / "two" / "model.safetensors") if name.endswith("_input.weight")]
    assert sorted(stored) == [
        "model.layers.0.mlp.down_proj.v2_input.weight",
        "model.layers.0.self_attn.q_proj.v_input.weight",
    ]


def test_transform_types() -> None:
    """+-1 and orthogonal is a Hadamard, whatever it is called; a reader would invert any other wrongly."""
    assert transform_type(hadamard(16)) == "hadamard"
    assert transform_type(hadamard(12)) == transform_type(random_hadamard(16)) == "random-hadamard"
    assert transform_type(Transform(hadamard(16).matrix)) == "random-matrix"
    signs = Transform(hadamard(16).matrix.tril() + torch.ones(16, 16).triu(1), 0.25)
    assert transform_type(signs) == "random-matrix"
    turned = Transform(DENSE, 0.5, transpose=True)
    assert torch.equal(stored_matrix(turned), 0.5 * DENSE.T)
    assert transform_type(matrix(DENSE)) == "random-matrix"


def test_saving_again_gives_the_same_bytes(tmp_path: Path) -> None:
    """From memory, from a loaded model, and by Transformers' own save_pretrained."""
    model = make(tmp_path / "out", "qwen3_moe")
    want, config = load_file(tmp_path / "out/model.safetensors"), json.loads((tmp_path / "out/config.json").read_text())
    save_checkpoint(model, tmp_path / "again")
    save_checkpoint(quarterturn.load(tmp_path / "out", device="cpu"), tmp_path / "loaded")
    model.save_pretrained(tmp_path / "transformers")
    for name in ("again", "loaded", "transformers"):
        assert_same_tensors(load_file(tmp_path / name / "model.safetensors"), want)
        assert json.loads((tmp_path / name / "config.json").read_text()) == config


def test_shards_above_a_size(tmp_path: Path) -> None:
    make(tmp_path / "whole")
    model = make(tmp_path / "parts", max_shard_size="20KB")
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert {f.name for f in files} == set(index["weight_map"].values())
    assert all(f.stat().st_size < 32_000 for f in files)
    merged: dict[str, Tensor] = {}
    for file in files:
        merged |= load_file(file)
    assert merged.keys() == index["weight_map"].keys()
    assert_same_tensors(merged, load_file(tmp_path / "whole" / "model.safetensors"))
    assert torch.equal(run(quarterturn.load(tmp_path / "parts", device="cpu"), tokens()), run(model, tokens()))


def test_from_folder_to_folder(tmp_path: Path) -> None:
    """The tokenizer's files are copied, byte for byte; nothing else but safetensors and json comes along."""
    source = tmp_path / "source"
    original = tiny_model()
    original.generation_config.top_k = 7
    original.generation_config.do_sample = True
    original.save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    (source / "modeling_evil.py").write_text("raise SystemExit")
    model = quantize(source, "nvfp4", "hadamard:16", output=tmp_path / "out", samples=2, progress=False)
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(listing(tmp_path / "out")) == names
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    loaded = quarterturn.load(tmp_path / "out", device="cpu")
    assert loaded.generation_config.top_k == 7
    assert torch.equal(run(loaded, tokens()), run(model, tokens()))
    with pytest.raises(Refusal, match="quantized already"):
        quantize(tmp_path / "out", "nvfp4", progress=False)
    with pytest.raises(Refusal, match="folder of the original model"):
        quantize(source, "mxfp4", output=source, overwrite=True, progress=False)
    with pytest.raises(Refusal, match="no language model"):
        quantize(tmp_path / "nothing", "mxfp4", progress=False)


def test_a_taken_target_is_refused_before_the_work(tmp_path: Path) -> None:
    target = tmp_path / "out"
    make(target)
    before, model = listing(target), tiny_model()
    with pytest.raises(Refusal, match=r"nothing is written here(.|\n)*overwrite=True"):
        quantize(model, "mxfp4", output=target, progress=False)
    assert not fp4_layers(model)
    assert listing(target) == before
    quantize(model, "mxfp4", output=target, overwrite=True, progress=False)
    assert "mxfp4" in (target / "config.json").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("all of it")
    with pytest.raises(Refusal, match=r"without config\.json"):
        save_checkpoint(model, tmp_path / "precious", overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path / "out")
    before = listing(tmp_path / "out")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    for target, overwrite in ((tmp_path / "new", False), (tmp_path / "out", True)):
        with pytest.raises(OSError, match="no space"):
            save_checkpoint(model, target, overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert listing(tmp_path / "out") == before


KILLED = """
import os, signal, sys, safetensors.torch
from tiny_models import tiny_model
from quarterturn.quantize import atomic, quantize

save, calls = safetensors.torch.save_file, []

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def second_shard(tensors, file, metadata):
    if calls:
        open(file, "wb").write(b"half")
        die()
    calls.append(file)
    save(tensors, file, metadata)

for moment in ("second shard", "rename"):
    for target in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            if moment == "second shard":
                safetensors.torch.save_file = second_shard
            else:
                atomic._put_in_place = die
            quantize(tiny_model(), "mxfp4", output=target, overwrite=True, max_shard_size="20KB", progress=False)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
"""


def test_a_killed_run_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    """Killed while the second shard is written, and just before the folder takes its place."""
    make(tmp_path / "old")
    before = listing(tmp_path / "old")
    here = [str(Path(quarterturn.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "new"), str(tmp_path / "old")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(here)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == [str(signal.SIGKILL.value)] * 4, ended.stderr
    assert not (tmp_path / "new").exists()
    assert listing(tmp_path / "old") == before
    # Each run clears what an earlier one to the same place left behind, so the last one's remains are there.
    assert len([p for p in tmp_path.iterdir() if p.name.startswith(".")]) == 2
    make(tmp_path / "new")
    make(tmp_path / "old", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old"]


def test_what_the_format_cannot_say_is_refused(tmp_path: Path) -> None:
    model = quantize(tiny_model(), "mxfp4", progress=False)
    model.model.layers[1].mlp.up_proj.rule = "floor"
    with pytest.raises(Refusal, match=r"layer model\.layers\.1\.mlp\.up_proj\n.*'even'.*'floor'"):
        save_checkpoint(model, tmp_path / "out")
    with pytest.raises(Refusal, match="no 4-bit layer"):
        save_checkpoint(tiny_model(), tmp_path / "out")
    assert not list(tmp_path.iterdir())
