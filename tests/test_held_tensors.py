"""The tensors an FP4Linear is given, by hand or by a state dict, fit it or are refused: C kernels read their memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from comparing import assert_same_bits
from cpu_cases import packed
from quarterturn import FP4Linear, FP4Tensor, hadamard
from quarterturn.errors import Refusal

N, K = 32, 64
NO_SCALES = [0.0, -1.0, float("inf"), float("nan"), 1e-40]


def weight_of(seed: int = 0, format: str = "nvfp4") -> FP4Tensor:
    torch.manual_seed(seed)
    return packed(N, K, format)


def layer_of(seed: int = 0, format: str = "nvfp4", **options) -> FP4Linear:
    if format == "nvfp4":
        options.setdefault("input_encode_scale", 900.0)
    return FP4Linear.from_tensor(weight_of(seed, format), **{"name": "some.layer", **options})


def replaced(**parts) -> Callable[[], FP4Linear]:
    return lambda: FP4Linear.from_tensor(
        dataclasses.replace(weight_of(), **parts), input_encode_scale=900.0, name="some.layer"
    )


CONSTRUCTED = {
    "bias": (lambda: layer_of(bias=torch.zeros(5)), "bias (32,)"),
    "integer bias": (lambda: layer_of(bias=torch.zeros(N, dtype=torch.int32)), "floating-point bias"),
    "block_scale": (lambda: replaced(block_scale=weight_of().block_scale[:2])(), "block_scale"),
    "block_scale's dtype": (lambda: replaced(block_scale=weight_of().block_scale.float())(), "block_scale"),
    "codes' dtype": (lambda: replaced(codes=weight_of().codes.int())(), "codes uint8"),
    "encode scales of ranges": (replaced(output_sizes=(16, 16)), "one tensor scale per range"),
    "input scales": (lambda: layer_of(input_encode_scale=torch.ones(2)), "input_encode_scale float32, one element"),
}


@pytest.mark.parametrize(("make", "needed"), CONSTRUCTED.values(), ids=CONSTRUCTED)
def test_construction(make: Callable[[], FP4Linear], needed: str) -> None:
    with pytest.raises(Refusal) as caught:
        make()
    assert needed in str(caught.value)
    assert "layer some.layer" in str(caught.value)


def no_bias(layer: FP4Linear) -> None:
    layer.bias = nn.Parameter(torch.zeros(5), False)


def smaller(name: str, rows: int) -> Callable[[FP4Linear], None]:
    return lambda layer: setattr(layer, name, getattr(layer, name)[:rows].clone())


HELD = {
    "bias": (no_bias, "bias (32,)"),
    "codes": (smaller("codes", 4), "block_scale"),
    "block_scale": (smaller("block_scale", 1), "block_scale"),
    "both": (lambda layer: (smaller("codes", 4)(layer), smaller("block_scale", 4)(layer)), "that sum to 4"),
    "encode_scale": (lambda layer: setattr(layer, "encode_scale", torch.ones(2)), "one tensor scale per range"),
    "input_encode_scale": (lambda layer: setattr(layer, "input_encode_scale", None), "input_encode_scale"),
    "its dtype": (lambda layer: setattr(layer, "input_encode_scale", torch.ones(1).double()), "input_encode_scale"),
}


@pytest.mark.parametrize("backend", ["cpu_native", "any_torch"])
@pytest.mark.parametrize(("change", "needed"), HELD.values(), ids=HELD)
@torch.no_grad()
def test_tensors_in_the_place_of_others(change: Callable[[FP4Linear], None], needed: str, backend: str) -> None:
    layer, x = layer_of(bias=torch.zeros(N), backend=backend), torch.randn(3, K)
    layer(x)
    change(layer)
    for call in (lambda: layer(x), layer.refresh):
        with pytest.raises(Refusal) as caught:
            call()
        assert needed in str(caught.value)
        assert "layer some.layer" in str(caught.value)


@torch.no_grad()
def test_a_transform_that_does_not_divide() -> None:
    layer = layer_of(input_transform=hadamard(16))
    layer.input_transform = hadamard(128)
    with pytest.raises(Refusal, match="its transform's 128"):
        layer.refresh()


@pytest.mark.parametrize("value", NO_SCALES)
@torch.no_grad()
def test_numbers_that_are_no_scales(value: float) -> None:
    scale = torch.tensor([value])
    with pytest.raises(Refusal, match="input_encode_scale finite and positive"):
        layer_of(input_encode_scale=value)
    with pytest.raises(Refusal, match="encode_scale finite and positive"):
        FP4Linear.from_tensor(
            FP4Tensor.from_encode(weight_of().codes, weight_of().block_scale, scale, "nvfp4"), activations="bf16"
        )
    x = torch.randn(3, K)
    for name in ("encode_scale", "input_encode_scale"):
        layer = layer_of()
        want = layer(x)
        state = {**layer.state_dict(), name: scale}
        with pytest.raises(Refusal, match="finite and positive"):
            layer.load_state_dict(state)
        assert_same_bits(layer(x), want, "nothing was changed")
        getattr(layer, name).copy_(scale)
        with pytest.raises(Refusal, match=f"{name} finite and positive"):
            layer(x)


def test_a_layer_moved_before_it_is_filled() -> None:
    """Memory that holds anything at all is no reason to refuse a move."""
    layer = layer_of().to("meta").to_empty(device="cpu")
    layer.encode_scale.fill_(float("nan"))
    layer.to(torch.bfloat16)
    with torch.no_grad(), pytest.raises(Refusal, match="encode_scale finite and positive"):
        layer(torch.randn(3, K))
    layer.load_state_dict(layer_of(1).state_dict())
    x = torch.randn(3, K)
    assert_same_bits(layer(x), layer_of(1)(x))


E8M0 = torch.float8_e8m0fnu
SAME = {
    "uint8 for E4M3": ("nvfp4", "block_scale", lambda t: t.view(torch.uint8)),
    "E8M0 for uint8": ("mxfp4", "block_scale", lambda t: t.view(E8M0)),
    "int8 codes": ("nvfp4", "codes", lambda t: t.view(torch.int8)),
    "float64 encode": ("nvfp4", "encode_scale", lambda t: t.double()),
    "float64 input encode": ("nvfp4", "input_encode_scale", lambda t: t.double()),
    "bf16 input encode": ("nvfp4", "input_encode_scale", lambda t: t.bfloat16()),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("format", "name", "change"), SAME.values(), ids=SAME)
@torch.no_grad()
def test_state_dicts_of_other_dtypes(format: str, name: str, change: Callable[[Tensor], Tensor], assign: bool) -> None:
    options = {"input_encode_scale": 512.0} if format == "nvfp4" else {}
    layer, other, x = layer_of(0, format, **options), layer_of(1, format, **options), torch.randn(3, K)
    state = other.state_dict()
    state[name] = change(state[name])
    layer.load_state_dict(state, assign=assign)
    assert_same_bits(layer(x), other(x))
    assert getattr(layer, name).dtype == getattr(other, name).dtype


REFUSED = {
    "codes": lambda t: t.int(),
    "block_scale": lambda t: t.float(),
    "encode_scale": lambda t: t.int(),
    "bias": lambda t: t.int(),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_state_dicts_that_are_refused(name: str, assign: bool) -> None:
    layer, x = layer_of(bias=torch.zeros(N)), torch.randn(3, K)
    want, model = layer(x), nn.ModuleDict({"part": layer})
    state = nn.ModuleDict({"part": layer_of(1, bias=torch.ones(N))}).state_dict()
    state[f"part.{name}"] = REFUSED[name](state[f"part.{name}"])
    with pytest.raises(Refusal) as caught:
        model.load_state_dict(state, assign=assign)
    assert f"part.{name} in" in str(caught.value)
    assert "layer some.layer" in str(caught.value)
    assert_same_bits(layer(x), want, "nothing was changed")
