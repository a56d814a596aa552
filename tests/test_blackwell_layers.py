"""Whole layers by blackwell_triton against the reference, and mistakes of convention that must turn these tests red.

As in test_linear.py, x holds small integers behind matrices that are exact, so that codes are the reference's codes
and only the sum is left to bound.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

import by_hand
import test_linear
from blackwell_cases import MARKS, NAME
from comparing import FP32_UNIT, assert_same_bits, assert_within
from gpu_cases import DEVICE
from quarterturn import NVFP4, FP4Linear, random_hadamard, reference
from quarterturn.backends import BackendRefusal, blackwell_launch, blackwell_triton, compose
from quarterturn.layouts import BLOCKED_128x4
from test_linear import expected, integers, make, quantized
from test_renewal import reload

pytestmark = MARKS
SIDES = [("none", "none"), ("random hadamard", "none"), ("its transpose", "its transpose"),
         ("signed permutation", "random hadamard")]  # fmt: skip


def on_blackwell(layer: FP4Linear) -> FP4Linear:
    layer.requested_backend = NAME
    layer = layer.to(DEVICE).refresh()
    assert layer.explain().backend == NAME
    return layer


def assert_layer(layer: FP4Linear, x: torch.Tensor, in_t=None, out_t=None) -> torch.Tensor:
    want, bound = expected(layer, x, "fp4", in_t, out_t)
    y = on_blackwell(layer)(x.to(DEVICE)).cpu()
    assert y.dtype == x.dtype
    assert_within(y, want, bound, "y")
    return y


@pytest.mark.parametrize(("in_t", "out_t"), SIDES, ids=[f"in {i}, out {o}" for i, o in SIDES])
@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(("nvfp4", "mxfp4"), test_linear.DTYPES)])
def test_equals_the_reference(name: str, dtype: torch.dtype, in_t: str, out_t: str) -> None:
    first, second = test_linear.TRANSFORMS[in_t](), test_linear.TRANSFORMS[out_t]()
    layer = make(name, input_transform=first, output_transform=second, dtype=dtype)
    x = integers(9, 96, dtype=dtype) / (2 if dtype == torch.float16 else 1)
    assert_layer(layer, x, first, second)


def test_fused_q_k_v_keep_a_scale_each() -> None:
    values = torch.randn(64, 96) * torch.tensor([0.02, 0.2, 2.0]).repeat_interleave(torch.tensor([32, 16, 16]))[:, None]
    t, bias = random_hadamard(16), torch.randn(64)
    layer = FP4Linear.from_tensor(
        quantized("nvfp4", values, (32, 16, 16)), bias=bias, input_encode_scale=torch.tensor([50.0]), input_transform=t
    )
    assert len(set(layer.weight_tensor().encode_scale.tolist())) == 3
    assert_layer(layer, integers(7, 96), t)


@pytest.mark.parametrize("recipe", ["token", "qutlass"])
def test_recipes_without_a_stored_scale(recipe: str) -> None:
    layer = make("nvfp4", recipe=recipe, bias=False)
    x = integers(5, 96) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 2.0])[:, None]
    codes, scale, tensor_scale = reference.rotate_quantize(x, None, format=NVFP4, recipe=recipe)
    a = by_hand.values(codes.numpy(), by_hand.numpy(scale), "nvfp4") * tensor_scale.double().numpy().reshape(-1, 1)
    w = layer.weight_tensor().dequantize().double().numpy()
    y = on_blackwell(layer)(x.to(DEVICE)).cpu()
    assert_within(y, a @ w.T, 100 * FP32_UNIT * (np.abs(a) @ np.abs(w).T) + 1e-30)


def test_qutlass_mxfp4_has_its_factor_of_three_in_alpha() -> None:
    layer, x = make("mxfp4", recipe="qutlass", bias=False), integers(5, 96)
    codes, scale, tensor_scale = reference.rotate_quantize(x, None, format=layer.format, recipe="qutlass")
    a = by_hand.values(codes.numpy(), by_hand.numpy(scale), "mxfp4") / 3
    assert_same_bits(tensor_scale, torch.tensor([1 / 3], dtype=torch.float32), "tensor scale")
    w = layer.weight_tensor().dequantize().double().numpy()
    y = on_blackwell(layer)(x.to(DEVICE)).cpu()
    assert_within(y, a @ w.T, 100 * FP32_UNIT * (np.abs(a) @ np.abs(w).T))


def test_shapes_of_x_and_strides() -> None:
    t = random_hadamard(16)
    layer = make("nvfp4", input_transform=t, output_transform=t)
    x = integers(2, 3, 4, 96)
    want, bound = expected(layer, x, "fp4", t, t)
    layer = on_blackwell(layer)
    for pick in [(), (0,), (0, 0), (0, 0, 0)]:
        assert_within(layer(x[pick].to(DEVICE)), want[pick], bound[pick], f"{4 - len(pick)} dimensions")
    for shape in [(0, 96), (2, 0, 96)]:
        assert tuple(layer(torch.zeros(shape, device=DEVICE)).shape) == (*shape[:-1], 48)
    big = integers(12, 200).to(DEVICE)
    for view in (big[:, :96], big[::2, 100:196]):
        kept = view.clone()
        assert_same_bits(layer(view), layer(kept.contiguous()), "strided input")
        assert_same_bits(view.contiguous(), kept.contiguous(), "x after the call")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_row_with_nan_is_nan_and_alone(name: str) -> None:
    layer = on_blackwell(make(name, input_transform=random_hadamard(16)))
    x = integers(4, 96).to(DEVICE)
    clean = layer(x)
    x[2, 5] = float("nan")
    y = layer(x)
    assert torch.isnan(y[2]).all()
    assert_same_bits(y[[0, 1, 3]], clean[[0, 1, 3]], "the other rows")


def test_new_weights_are_moved_into_their_layout_again() -> None:
    layer, other = on_blackwell(make("nvfp4")), on_blackwell(make("nvfp4"))
    x = integers(5, 96).to(DEVICE)
    first, want = layer(x), other(x)
    layer.load_state_dict(other.state_dict())
    assert not torch.equal(first, want)
    assert_same_bits(layer(x), want, "y")


def test_weights_written_over_without_a_trace_are_moved_again() -> None:
    """As an engine reloads them: see test_renewal.py."""
    layer, other = on_blackwell(make("mxfp4")), on_blackwell(make("mxfp4"))
    x = integers(5, 96).to(DEVICE)
    first, want = layer(x), other(x)
    reload(layer, other)
    assert not torch.equal(first, want)
    assert_same_bits(layer(x), want, "y")


def test_the_layout_is_made_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    made, original = [], blackwell_triton.scaled_weight
    monkeypatch.setattr(blackwell_triton, "scaled_weight", lambda *a: made.append(1) or original(*a))
    layer = on_blackwell(make("nvfp4"))
    for m in (1, 3):
        layer(integers(m, 96).to(DEVICE))
    assert len(made) == 1


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_decoded_weights_are_the_same_layer(name: str) -> None:
    """They leave no codes to multiply: gpu_triton's way, in which x is quantized all the same."""
    layer = make(name, weights="decoded")
    x = integers(9, 96)
    assert_layer(layer, x)
    assert layer.explain().weights == "decoded to bfloat16"


def test_w4a16_is_refused_with_what_to_choose() -> None:
    layer = make("nvfp4", "bf16")
    with pytest.raises(BackendRefusal, match=r"(?s)needs FP4 activations \(W4A4\), found bf16.*gpu_triton"):
        on_blackwell(layer)


# ---- mistakes of convention, planted where the adapter puts its operands together


def fault(owner: object, name: str, change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def multiplied(**changes: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in an argument of the product."""
    order = ["codes", "block_scale", "tensor_scale", "weight", "out_dtype", "family"]

    def around(original: Callable) -> Callable:
        def call(*arguments: object) -> torch.Tensor:
            given = zip(order, arguments, strict=True)
            return original(*(changes.get(name, lambda v: v)(value) for name, value in given))

        return call

    return fault(blackwell_triton, "multiply", around)


def weighted(**changes: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in a part of the weight that is kept."""

    def edit(weight: blackwell_launch.ScaledWeight) -> blackwell_launch.ScaledWeight:
        return dataclasses.replace(weight, **{name: change(getattr(weight, name)) for name, change in changes.items()})

    return multiplied(weight=edit)


def swapped(codes: torch.Tensor) -> torch.Tensor:
    return (codes >> 4) | (codes << 4)


def linear(rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The scales of (rows, 96) one row behind the other, where the reader wants tiles."""

    def move(stored: torch.Tensor) -> torch.Tensor:
        moved = torch.zeros_like(stored)
        moved.view(-1)[: rows * 6] = BLOCKED_128x4.inverse(stored, rows, 6).reshape(-1)
        return moved

    return move


def layer_check() -> None:
    """NVFP4 of two ranges behind a transform, with bias: 9 rows, K = 96."""
    t = random_hadamard(16, seed=1)
    assert_layer(make("nvfp4", sizes=(16, 32), input_transform=t), integers(9, 96), t)


FAULTS = {
    "nibbles of x swapped": multiplied(codes=swapped),
    "nibbles of w swapped": weighted(codes=swapped),
    "linear scales of x to a blocked reader": multiplied(block_scale=linear(9)),
    "linear scales of w to a blocked reader": weighted(block_scale=linear(48)),
    "x's divisor for its multiplier": multiplied(tensor_scale=lambda s: 1 / s),
    "w's divisor for its multiplier": weighted(tensor_scale=lambda s: 1 / s),
    "one tensor scale for all ranges": weighted(tensor_scale=lambda s: s.amax().view(1)),
    "bias skipped": weighted(bias=lambda b: None),
    "bias twice": weighted(bias=lambda b: 2 * b),
    "a group of x dropped": multiplied(codes=lambda c: torch.cat([c[:, :-8], torch.zeros_like(c[:, -8:])], 1)),
    "x not turned": fault(
        blackwell_triton, "rotate_quantize", lambda original: lambda x, blocks, *rest: original(x, None, *rest)
    ),
    "T transposed": fault(
        blackwell_triton, "rotate_quantize", lambda original: lambda x, blocks, *rest: original(
            x, dataclasses.replace(blocks, transpose=not blocks.transpose), *rest)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_turns_a_layer_red(name: str) -> None:
    torch.manual_seed(5)
    layer_check()
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name](patch)
        torch.manual_seed(5)
        with pytest.raises(AssertionError):
            layer_check()


def test_it_is_called_as_a_whole_layer() -> None:
    """Through compose, as the plans and the operator do."""
    layer = on_blackwell(make("nvfp4"))
    plan = layer.current_plan(torch.float32)
    assert plan is not None
    made = compose.operand(blackwell_triton, integers(3, 96).to(DEVICE), plan.layer)  # type: ignore[arg-type]
    assert made.form == blackwell_triton.BLOCKED_CODES
    assert made.block_scale is not None
    assert made.block_scale.shape == (128, 8)
