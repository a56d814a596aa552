"""Quantizing a model in memory: layers, transforms, calibration, what stays as it is, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quarterturn.errors import Refusal
from quarterturn.linear import FP4Linear
from quarterturn.quantize import builtin_text, calibrate, quantize
from quarterturn.quantize.calibration import share_amax, token_batches
from quarterturn.quantize.rtn import encode_scale
from quarterturn.quantize.walk import expert_siblings, plan_transforms, shared_groups
from quarterturn.transforms import Transform, hadamard, matrix, random_hadamard
from tiny_models import tiny_model, tiny_tokenizer, tokens

DENSE = torch.rand(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 0.2 + torch.eye(16)
TRANSFORMS: dict[str, Any] = {
    "none": None,
    "hadamard:16": "hadamard:16",
    "random-hadamard:32": "random-hadamard:32",
    "full": "hadamard:full",
    "dense": DENSE,
    "transposed": Transform(random_hadamard(32, 5).matrix, 32**-0.5, transpose=True),
}


def run(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def fp4_layers(model: nn.Module) -> dict[str, FP4Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, FP4Linear)}


def input_amax(model: nn.Module, ids: Tensor, turn: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, float]:
    """An independent recording: the largest |turn(x)| of every linear layer, in float64."""
    found: dict[str, float] = {}

    def hook(name: str) -> Any:
        def record(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            value = float(turn(args[0].double()).abs().max())
            found[name] = max(found.get(name, 0.0), value)

        return record

    handles = [m.register_forward_pre_hook(hook(n)) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("transform", list(TRANSFORMS))
def test_the_folded_weight_undoes_the_transform(transform: str, format: str) -> None:
    """W4A16: every layer computes x V (W V^-T)^T with the decoded weight, so unfolding that weight gives the model."""
    original, ids = tiny_model(), tokens()
    quantized = quantize(copy.deepcopy(original), format, TRANSFORMS[transform], "bf16", progress=False)
    unfolded = copy.deepcopy(original)
    for name, layer in fp4_layers(quantized).items():
        weight, exact = layer.weight_tensor().dequantize().double(), original.get_submodule(name).weight.detach()
        if layer.input_transform is not None:
            weight = layer.input_transform.unfold_input_weight(weight)
        # 4-bit rounding of Gaussian weights is some 10% off; one left folded would be 50% (dense) to 140% off.
        assert float((weight - exact).norm() / exact.norm()) < 0.17, name
        unfolded.get_submodule(name).weight.data = weight.float()
    # fp32 products of the same values, turned or not, through 14 layers: some 2^-22 of the logits, which are about 1.
    torch.testing.assert_close(run(quantized, ids), run(unfolded, ids), rtol=0, atol=2.0**-18)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "tied"])
def test_names_biases_and_embeddings_stay(kind: str) -> None:
    model = tiny_model(kind)
    names = [name for name, _ in model.named_modules()]
    head, embedding = model.lm_head, model.model.embed_tokens
    before = {n: p.clone() for n, p in model.named_parameters() if "proj" not in n or n.endswith("bias")}
    assert quantize(model, "mxfp4", "hadamard", progress=False) is model
    assert [n for n, _ in model.named_modules() if not n.endswith("v_input")] == names
    assert model.lm_head is head
    assert (head.weight is embedding.weight) == (kind == "tied")
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert len(fp4_layers(model)) == 14


def test_fused_layers_share_a_tensor_scale() -> None:
    original, model = tiny_model(), tiny_model()
    quantize(model, "nvfp4", "hadamard:16", "bf16", progress=False)
    for prefix, parts in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
        names = [f"model.layers.1.{prefix}.{part}" for part in parts]
        folded = [hadamard(16).fold_input_weight(original.get_submodule(n).weight.detach()).float() for n in names]
        amax = max(float(w.abs().max()) for w in folded)
        assert len({float(w.abs().max()) for w in folded}) == len(parts)
        for name in names:
            assert model.get_submodule(name).encode_scale.item() == encode_scale(amax).item()
    assert model.model.layers[1].self_attn.o_proj.encode_scale != model.model.layers[1].self_attn.q_proj.encode_scale


def test_mxfp4_needs_no_calibration_and_has_no_tensor_scale() -> None:
    model = quantize(tiny_model(), "mxfp4", progress=False)
    for layer in fp4_layers(model).values():
        assert layer.encode_scale is None
        assert layer.input_encode_scale is None
        assert layer.activations == "fp4"


def test_input_scales_of_a_bf16_model() -> None:
    """Products in fp32 there: some bf16 units of 2^-8 from the model's own, and the model computes as before."""
    model, ids = tiny_model(dtype=torch.bfloat16), tokens()
    want, seen = run(model, ids), input_amax(model, ids)
    (amax,) = calibrate(model, [None], ids, progress=False)
    assert amax == pytest.approx({name: seen[name] for name in amax}, rel=8 * 2.0**-8)
    assert torch.equal(run(model, ids), want)


@pytest.mark.parametrize("transform", [None, "random-hadamard:32"])
def test_input_scales_are_those_of_the_turned_inputs(transform: str | None) -> None:
    original, ids = tiny_model(), tokens(3, 40)
    turned = random_hadamard(32, 7)
    seen = input_amax(original, ids, turned.apply if transform else lambda x: x)
    model = quantize(copy.deepcopy(original), "nvfp4", transform, calibration=ids, seed=7, progress=False)
    for name, layer in fp4_layers(model).items():
        want = 2688 / seen[name]
        # z and the quotient are rounded to fp32 once each.
        assert layer.input_encode_scale.item() == pytest.approx(want, rel=2.1 * 2.0**-24), name


def test_several_transforms_are_calibrated_in_one_run() -> None:
    model, ids = tiny_model(), tokens()
    specs = [None, "hadamard:16", DENSE]
    found = calibrate(model, specs, ids, progress=False)
    assert all(isinstance(m, nn.Linear) for m in (model.lm_head, model.model.layers[0].mlp.up_proj))
    for spec, amax in zip(specs, found, strict=True):
        one = quantize(tiny_model(), "nvfp4", spec, calibration=ids, progress=False)
        given = quantize(tiny_model(), "nvfp4", spec, calibration=amax, progress=False)
        for name, layer in fp4_layers(one).items():
            assert torch.equal(layer.input_encode_scale, given.get_submodule(name).input_encode_scale)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_w4a4_layers_are_close_to_the_original(format: str) -> None:
    """Each layer on the input it really gets: two roundings that know nothing of each other, 10% each (NVFP4) or 12%
    (MXFP4), and more where a dense transform's inverse carries the weight's: 1.3 times at most for the one here."""
    original, ids = tiny_model(), tokens()
    for transform in TRANSFORMS.values():
        model = quantize(copy.deepcopy(original), format, transform, calibration=ids, progress=False)
        layers = fp4_layers(model)

        def check(layer: FP4Linear, args: tuple[Tensor, ...], output: Tensor, name: str) -> None:
            want = original.get_submodule(name)(args[0])
            rounding = {"nvfp4": 0.10, "mxfp4": 0.125}[format]
            assert float((output - want).norm() / want.norm()) < 1.3 * rounding * 2**0.5, name

        for name, layer in layers.items():
            layer.register_forward_hook(partial(check, name=name))
        run(model, ids)


def test_texts_and_the_builtin_text() -> None:
    tokenizer, original = tiny_tokenizer(), tiny_model()
    texts = ["Emma Woodhouse, handsome, clever, and rich", "", "x"]
    ids = tokenizer(texts[0])["input_ids"]
    scales = []
    for calibration in (texts, None, torch.tensor(ids)):
        model = quantize(
            copy.deepcopy(original), "nvfp4", calibration=calibration, tokenizer=tokenizer, samples=3, progress=False
        )
        scales.append(model.model.layers[0].mlp.down_proj.input_encode_scale.item())
    assert scales[0] <= scales[2] * 1.0000001
    assert len(set(scales)) >= 2
    assert len(builtin_text()) > 100_000
    batches = token_batches(None, tokenizer, 96, samples=3, length=20)
    assert [tuple(b.shape) for b in batches] == [(1, 20)] * 3


def test_targets_and_ignore() -> None:
    model = quantize(
        tiny_model(), "mxfp4", targets=["re:.*proj$"], ignore=["re:.*layers.0.*", "model.layers.1.mlp.down_proj"],
        progress=False,
    )  # fmt: skip
    names = set(fp4_layers(model))
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    assert names == {f"model.layers.1.{part}" for part in parts}
    assert type(model.lm_head) is nn.Linear


def test_the_output_head_is_left_alone_unless_named() -> None:
    model = quantize(tiny_model(), "mxfp4", ignore=(), progress=False)
    assert type(model.lm_head) is nn.Linear
    assert any("lm_head" in note for note in model.quantization_notes)
    named = quantize(tiny_model(), "mxfp4", targets=("Linear", "lm_head"), ignore=(), progress=False)
    assert isinstance(named.lm_head, FP4Linear)
    with pytest.raises(Refusal, match="shares its weight with the input embeddings"):
        quantize(tiny_model("tied"), "mxfp4", targets=("lm_head",), ignore=(), progress=False)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "size": (
        {"transform": "hadamard:64"},
        r"layer model\.layers\.0\.mlp\.down_proj\n.*96; found 64\n.*2, 4, 8, 16, 32",
    ),
    "size of a matrix": ({"transform": torch.eye(24)}, r"layer model\.layers\.0\.self_attn\.q_proj"),
    "order": ({"transform": "hadamard:23"}, r"hadamard|divides"),
    "kind": ({"transform": "fourier:16"}, "there is no such transform"),
    "zero size": ({"transform": "hadamard:0"}, "there is no such transform"),
    "singular": ({"transform": torch.ones(16, 16)}, "invertible"),
    "no tokenizer": ({"calibration": None}, "a tokenizer"),
    "texts, no tokenizer": ({"calibration": ["a"]}, "a tokenizer"),
    "no tokens": ({"calibration": torch.zeros(0, dtype=torch.long)}, "no tokens"),
    "floats": ({"calibration": torch.rand(2, 5)}, "no token ids"),
    "foreign tokens": ({"calibration": torch.tensor([[5, 96]])}, "0 to 95; found 5 to 96"),
    "no layer": ({"targets": ["Embedding"]}, "no layer is left"),
    "no linear": ({"targets": ["model.embed_tokens"]}, r"torch\.nn\.Linear; found Embedding"),
    "format": ({"format": "int4"}, "no 4-bit format"),
    "activations": ({"activations": "fp8"}, "no such width"),
    "calibration of fewer layers": (
        {"calibration": {"model.layers.0.mlp.up_proj": 3.0}},
        "no calibration token reached",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refusals_change_nothing(case: str) -> None:
    arguments, message = REFUSED[case]
    model = tiny_model().train()
    classes = {name: type(m) for name, m in model.named_modules()}
    with pytest.raises(Refusal, match=message) as caught:
        quantize(model, **({"calibration": tokens(), "progress": False} | arguments))
    assert "\n  do " in str(caught.value)
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = bad
    with pytest.raises(Refusal, match=r"layers\.1\.mlp"):
        quantize(model, "mxfp4", progress=False)
    model = tiny_model()
    model.model.embed_tokens.weight.data[5] = bad
    with pytest.raises(Refusal, match=r"not finite on the calibration(.|\n)*layers\.0"):
        quantize(model, calibration=torch.tensor([[4, 5, 6]]), progress=False)


def test_a_quantized_model_is_not_quantized_again() -> None:
    model = quantize(tiny_model(), "mxfp4", progress=False)
    with pytest.raises(Refusal, match="quantized already"):
        quantize(model, "mxfp4", progress=False)


def test_width_without_whole_groups_is_refused() -> None:
    with pytest.raises(Refusal, match=r"mlp\.down_proj\n.*multiple of 32; found 80"):
        quantize(tiny_model(intermediate_size=80), "mxfp4", progress=False)


def test_default_and_full_sizes() -> None:
    layers = {name: m for name, m in tiny_model().named_modules() if isinstance(m, nn.Linear)}
    from quarterturn.formats import MXFP4, NVFP4

    for format in (NVFP4, MXFP4):
        assert {t.size for t in plan_transforms("hadamard", layers, format).values()} == {format.group_size}
    full = plan_transforms("random-hadamard:full", layers, NVFP4)
    assert {layers[name].in_features for name in layers} == {t.size for t in full.values()} == {64, 96}
    same = plan_transforms("random-hadamard:16", layers, NVFP4, seed=1)
    assert len({id(t) for t in same.values()}) == 1
    other = plan_transforms("random-hadamard:16", layers, NVFP4, seed=2)
    assert not torch.equal(same["lm_head"].matrix, other["lm_head"].matrix)
    assert plan_transforms(matrix(DENSE, 0.5), layers, NVFP4)["lm_head"].factor == 1.0


def test_shared_groups_and_siblings() -> None:
    names = ["a.q_proj", "a.k_proj", "b.q_proj", "a.o_proj", "e.experts.0.w1", "e.experts.0.w3", "e.experts.0.w2"]
    assert shared_groups(names) == [
        ["a.q_proj", "a.k_proj"], ["b.q_proj"], ["a.o_proj"], ["e.experts.0.w1", "e.experts.0.w3"], ["e.experts.0.w2"],
    ]  # fmt: skip
    experts = ["l.1.experts.0.w1", "l.1.experts.10.w1", "l.1.experts.0.w2", "l.2.experts.0.w1"]
    assert expert_siblings("l.1.experts.3.w1", experts) == ["l.1.experts.0.w1", "l.1.experts.10.w1"]
    assert share_amax({"a.q_proj": 1.0, "a.k_proj": 3.0, "b.q_proj": 2.0}, names[:3]) == (
        {"a.q_proj": 3.0, "a.k_proj": 3.0, "b.q_proj": 2.0}, [],
    )  # fmt: skip
    shared, notes = share_amax({"l.1.experts.0.w1": 2.0}, ["l.1.experts.0.w1", "l.1.experts.3.w1"])
    assert shared == {"l.1.experts.0.w1": 2.0, "l.1.experts.3.w1": 2.0}
    assert len(notes) == 1


def test_progress_is_shown_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    quantize(tiny_model(), "mxfp4", progress=False)
    assert capsys.readouterr().out == ""
    quantize(tiny_model(), calibration=tokens(), progress=True)
    assert "quantizing" in capsys.readouterr().out
