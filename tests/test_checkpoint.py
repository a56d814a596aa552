"""What is refused when a checkpoint is opened: each fault is one edit of a good file, and the message must name it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quarterturn as qt
from altered import Change, altered, make_checkpoint, shard
from quarterturn.checkpoint import describe, open_checkpoint, recognise

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("good") / "nvfp4")


@pytest.fixture(scope="module")
def good_mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("good") / "mxfp4", format="mxfp4")


def set_group(**changes: object) -> Change:
    return lambda config, _: config["quantization_config"]["config_groups"]["group_0"].update(changes)


def set_weights(**changes: object) -> Change:
    return lambda config, _: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)


def set_inputs(**changes: object) -> Change:
    return lambda config, _: config["quantization_config"]["config_groups"]["group_0"]["input_activations"].update(
        changes
    )


def set_quant(**changes: object) -> Change:
    return lambda config, _: config["quantization_config"].update(changes)


def scheme(config: dict) -> dict:
    return next(iter(config["quantization_config"]["transform_config"]["config_groups"].values()))


def online(config: dict) -> dict:
    return next(apply for apply in scheme(config)["apply"] if apply["location"] == "input")


def stored_matrix(tensors: dict) -> str:
    return next(name for name in tensors if name.endswith("_input.weight"))


def drop(name: str) -> Change:
    return lambda _, tensors: tensors.__delitem__(name)


def replace(name: str, make) -> Change:
    def change(_: dict, tensors: dict) -> None:
        tensors[name] = make(tensors[name])

    return change


def poke(name: str, value: float) -> Change:
    def change(_: dict, tensors: dict) -> None:
        tensors[name].view(-1)[0] = value

    return change


def rename(old: str, new: str) -> Change:
    def change(_: dict, tensors: dict) -> None:
        tensors[new] = tensors.pop(old)

    return change


FAULTS: dict[str, tuple[Change, list[str]]] = {
    "another format in a group": (set_group(format="float-quantized"), ["group_0", "float-quantized", "nvfp4-pack"]),
    "int weights": (set_weights(type="int"), ["group_0", "type int"]),
    "another group size": (set_weights(group_size=32), ["group_size 16", "32"]),
    "asymmetric": (set_weights(symmetric=False), ["symmetric"]),
    "eight-bit activations": (set_inputs(num_bits=8), ["input activations", "num_bits 8"]),
    "static block scales": (set_inputs(dynamic=False), ["dynamic local", "False"]),
    "quantized outputs": (
        lambda c, _: set_group(output_activations=c["quantization_config"]["config_groups"]["group_0"]["weights"])(
            c, _
        ),
        ["outputs"],
    ),
    "kv cache": (
        set_quant(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}),
        ["KV cache"],
    ),
    "sparsity": (set_quant(sparsity_config={"format": "sparse-24-bitmask"}), ["sparse-24-bitmask"]),
    "modelopt": (set_quant(quant_method="modelopt"), ["ModelOpt"]),
    "fp-quant": (set_quant(quant_method="fp_quant"), ["FP-Quant"]),
    "not quantized": (lambda c, _: c.__delitem__("quantization_config"), ["unquantized"]),
    "k_cache": (lambda c, _: online(c).update(location="k_cache"), ["k_cache"]),
    "q_attn": (lambda c, _: online(c).update(location="q_attn"), ["q_attn"]),
    "an unknown transform": (lambda c, _: scheme(c).update(type="fourier"), ["fourier"]),
    "an unknown location": (lambda c, _: online(c).update(location="middle"), ["middle"]),
    "no matrix": (
        lambda _, t: t.__delitem__(stored_matrix(t)),
        ["no matrix", "32 x 32", "model.layers.0.mlp.down_proj"],
    ),
    "a matrix of another size": (lambda c, _: scheme(c).update(head_dim=16), ["(16, 16)", "(32, 32)"]),
    "a matrix with NaN": (lambda c, t: poke(stored_matrix(t), float("nan"))(c, t), ["NaN", "_input.weight"]),
    "a matrix with no scheme": (set_quant(transform_config={}), ["_input.weight", "config explains", Q]),
    "a missing weight scale": (drop(f"{DOWN}.weight_scale"), [f"{DOWN}.weight_scale", "no such tensor"]),
    "a missing tensor scale": (drop(f"{DOWN}.weight_global_scale"), [f"{DOWN}.weight_global_scale"]),
    "a missing input scale": (drop(f"{DOWN}.input_global_scale"), [f"{DOWN}.input_global_scale", "W4A4"]),
    "a tensor scale of zero": (poke(f"{DOWN}.weight_global_scale", 0.0), [DOWN, "positive number", "0.0"]),
    "an infinite input scale": (poke(f"{DOWN}.input_global_scale", float("inf")), [DOWN, "inf"]),
    "a negative tensor scale": (poke(f"{DOWN}.weight_global_scale", -1.0), [DOWN, "-1.0"]),
    "a scale of the wrong shape": (
        replace(f"{DOWN}.weight_scale", lambda t: t[:, :-1].clone()),
        [f"{DOWN}.weight_scale", "(64, 6)", "(64, 5)"],
    ),
    "a scale of the wrong dtype": (
        replace(f"{DOWN}.weight_scale", lambda t: t.float()),
        [f"{DOWN}.weight_scale", "F8_E4M3", "F32"],
    ),
    "codes in three dimensions": (replace(f"{DOWN}.weight_packed", lambda t: t[None].clone()), ["(1, 64, 48)"]),
    "both weights": (
        lambda _, t: t.update({f"{DOWN}.weight": torch.zeros(64, 96)}),
        ["config and tensors disagree", DOWN],
    ),
    "ignored but packed": (set_quant(ignore=["lm_head", DOWN]), ["in ignore", DOWN]),
    "targeted by no group": (set_group(targets=["re:.*self_attn.*"]), ["model.layers.0.mlp", "self_attn"]),
    "a tensor nobody explains": (
        lambda _, t: t.update({f"{DOWN}.weight_zero_point": torch.zeros(1)}),
        ["weight_zero_point", DOWN],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name(fault: str, good: Path, tmp_path: Path) -> None:
    change, words = FAULTS[fault]
    folder = altered(good, tmp_path / "bad", change)
    with pytest.raises(qt.CheckpointRefusal) as caught:
        qt.load(folder)
    text = str(caught.value)
    for word in [*words, "\n  needs ", "; found ", "\n  do "]:
        assert word in text, text


@pytest.mark.parametrize(("suffix", "value", "word"), [("weight_scale", 0x7F, "0x7f"), ("weight_scale", 0xFF, "0x7f")])
def test_nan_scale_bytes_are_refused(good: Path, tmp_path: Path, suffix: str, value: int, word: str) -> None:
    def change(_: dict, tensors: dict) -> None:
        tensors[f"{DOWN}.{suffix}"].view(torch.uint8)[1, 1] = value

    with pytest.raises(qt.Refusal, match=f"(?s){DOWN}.*{word}"):
        qt.load(altered(good, tmp_path / "bad", change))


def test_nan_byte_of_e8m0_is_refused(good_mxfp4: Path, tmp_path: Path) -> None:
    def change(_: dict, tensors: dict) -> None:
        tensors[f"{DOWN}.weight_scale"][1, 1] = 255

    with pytest.raises(qt.Refusal, match=f"(?s){DOWN}.*0xff"):
        qt.load(altered(good_mxfp4, tmp_path / "bad", change))


def test_nan_in_an_unquantized_tensor_is_refused(good: Path, tmp_path: Path) -> None:
    folder = altered(good, tmp_path / "bad", poke("model.norm.weight", float("nan")))
    with pytest.raises(qt.CheckpointRefusal, match=r"model\.norm\.weight"):
        qt.load(folder)


def test_an_unquantized_layer_that_a_group_targets_is_refused(good: Path, tmp_path: Path) -> None:
    def change(_: dict, tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith(f"{DOWN}.")]:
            del tensors[name]
        tensors[f"{DOWN}.weight"] = torch.zeros(64, 96)

    with pytest.raises(qt.CheckpointRefusal, match=DOWN):
        qt.load(altered(good, tmp_path / "bad", change))


def test_a_missing_unquantized_tensor_is_refused(good: Path, tmp_path: Path) -> None:
    with pytest.raises(qt.CheckpointRefusal, match=r"(?s)missing.*model\.norm\.weight"):
        qt.load(altered(good, tmp_path / "bad", drop("model.norm.weight")))


def test_a_size_that_is_not_the_models_is_refused(good: Path, tmp_path: Path) -> None:
    with pytest.raises(qt.CheckpointRefusal, match=r"(?s)size is not the model's.*\(64, 128\)"):
        qt.load(altered(good, tmp_path / "bad", lambda c, _: c.update(intermediate_size=128)))


def test_code_in_a_checkpoint_is_not_run(good: Path, tmp_path: Path) -> None:
    def change(config: dict, _: dict) -> None:
        config.update(model_type="evil", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})

    folder = altered(good, tmp_path / "bad", change)
    (folder / "evil.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(qt.CheckpointRefusal, match="code in a checkpoint is not run"):
        qt.load(folder)


def test_files_that_are_cut_off_missing_or_pickled(good: Path, tmp_path: Path) -> None:
    whole = (good / "model.safetensors").read_bytes()
    for i, (length, word) in enumerate([(len(whole) - 1, "cut off"), (100, "cut off"), (4, "cut off"), (0, "cut off")]):
        folder = altered(good, tmp_path / str(i), lambda *_: None)
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(qt.CheckpointRefusal, match=word):
            open_checkpoint(folder)
    folder = altered(good, tmp_path / "longer", lambda *_: None)
    (folder / "model.safetensors").write_bytes(whole + b"x")
    with pytest.raises(qt.CheckpointRefusal, match="longer"):
        open_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(qt.CheckpointRefusal, match=r"only pytorch_model\.bin"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(qt.CheckpointRefusal, match=r"config\.json"):
        open_checkpoint(folder)
    with pytest.raises(qt.CheckpointRefusal, match="nothing there"):
        open_checkpoint(tmp_path / "nowhere")


def test_an_index_that_points_outside_the_folder(good: Path, tmp_path: Path) -> None:
    folder = shard(good, tmp_path / "sharded")
    original = json.loads((folder / INDEX).read_text())
    for elsewhere in ("../good/model.safetensors", "/etc/passwd", "..\\x.safetensors", "a/../../x.safetensors"):
        changed = {"weight_map": dict(original["weight_map"]) | {"model.norm.weight": elsewhere}}
        (folder / INDEX).write_text(json.dumps(changed))
        with pytest.raises(qt.CheckpointRefusal, match="outside the folder"):
            open_checkpoint(folder)


def test_an_index_and_files_that_disagree(good: Path, tmp_path: Path) -> None:
    folder = shard(good, tmp_path / "sharded")
    original = json.loads((folder / INDEX).read_text())
    shards = sorted(set(original["weight_map"].values()))
    swapped = original["weight_map"] | {
        "model.norm.weight": next(s for s in shards if s != original["weight_map"]["model.norm.weight"])
    }
    for weight_map in (swapped, {k: v for k, v in original["weight_map"].items() if k != "model.norm.weight"}):
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(qt.CheckpointRefusal, match=r"(?s)disagree.*model\.norm\.weight"):
            open_checkpoint(folder)
    (folder / INDEX).write_text(json.dumps(original))
    (folder / shards[1]).unlink()
    with pytest.raises(qt.CheckpointRefusal, match="missing"):
        open_checkpoint(folder)


def test_recognise(good: Path, good_mxfp4: Path, tmp_path: Path) -> None:
    assert recognise(good) == "compressed-tensors nvfp4-pack-quantized"
    assert recognise(good_mxfp4) == "compressed-tensors mxfp4-pack-quantized"
    for i, (change, kind) in enumerate([
        (set_quant(quant_method="modelopt"), "modelopt"),
        (set_quant(quant_method="fp_quant"), "fp_quant"),
        (lambda c, _: c.__delitem__("quantization_config"), "unquantized"),
    ]):  # fmt: skip
        assert recognise(altered(good, tmp_path / str(i), change)) == kind


def test_a_checkpoint_tells_its_layers(good: Path) -> None:
    checkpoint = open_checkpoint(good)
    spec = checkpoint.layers[Q]
    assert (spec.n, spec.k, spec.format.name, spec.activations, spec.has_bias) == (64, 64, "nvfp4", "fp4", False)
    assert spec.input_transform is not None
    assert spec.input_transform.size == 32
    assert spec.output_transform is None
    shared = {id(s.input_transform) for s in checkpoint.layers.values()}
    assert len(shared) == 1, "the matrix is stored once and used by every layer"
    assert checkpoint.notes == []


def test_a_label_that_lies_is_noted_and_the_stored_matrix_used(good: Path, tmp_path: Path) -> None:
    def change(_: dict, tensors: dict) -> None:
        name = stored_matrix(tensors)
        tensors[name] = tensors[name] * 1.5

    checkpoint = open_checkpoint(altered(good, tmp_path / "lying", change))
    assert any("not +-1" in note for note in checkpoint.notes)
    expected = (
        load_file(good / "model.safetensors")[stored_matrix(load_file(good / "model.safetensors"))] * 1.5 / 32**0.5
    )
    transform = checkpoint.layers[Q].input_transform
    assert transform is not None
    assert torch.allclose(transform.activation_matrix(), expected.double(), rtol=1e-15)


@pytest.mark.parametrize(
    ("value", "word"), [(1e-30, "become zeros"), (1e-3, "become zeros"), (1e30, "cut off"), (2688.0, None)]
)
def test_input_scales_that_no_activation_fits_are_noted(
    value: float, word: str | None, good: Path, tmp_path: Path
) -> None:
    def change(_: dict, tensors: dict) -> None:
        for name in tensors:
            if name.endswith("input_global_scale"):
                tensors[name] = torch.full_like(tensors[name], value)

    notes = open_checkpoint(altered(good, tmp_path / "odd", change)).notes
    assert len(notes) == (word is not None)
    assert all(word in note and " more: " in note for note in notes if word)


@pytest.mark.parametrize(("format", "bits"), [("nvfp4", 4.5), ("mxfp4", 4.25)])
def test_bits_a_weight_are_the_formats_with_biases_too(format: str, bits: float, tmp_path: Path) -> None:
    found = describe(str(make_checkpoint(tmp_path / "made", "qwen2", format)))
    assert any(row["bias"] for row in found["layers"])
    weights = sum(row["n"] * row["k"] * row["count"] for row in found["layers"])
    # NVFP4: two fp32 scales a layer beside.
    scales = 2 * 4 * found["fp4_layers"] if format == "nvfp4" else 0
    assert found["fp4_bytes"] == weights * bits / 8 + scales
    assert found["bits_per_weight"] == round(bits + 8 * scales / weights, 3)
