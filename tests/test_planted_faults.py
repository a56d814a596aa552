"""Deliberate errors, each patched in, each turning named tests red that are green without it.

A fault goes in at the seams of the portable backend (its module's functions), at the layouts, or at FP4Tensor, so what
is tried is the suite: a row that stays green here means that nothing above would have noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import by_hand
import test_layouts
import test_linear
import test_linear_module
import test_ops
import test_ops_matmul
import test_ops_rows
import test_tensor
import test_transforms
from quarterturn import FP4Tensor, Transform, layouts
from quarterturn.backends import any_torch

NAME = any_torch.NAME
BLOCKED_TYPE = type(layouts.BLOCKED_128x4)
QUANTIZERS = ("rotate_quantize", "rotate_quantize_dequantize")
Patch = Callable[[pytest.MonkeyPatch], None]


def wrap(patch: pytest.MonkeyPatch, owner: object, names: tuple[str, ...] | str, change: Callable) -> None:
    """Replace owner.name by change(original)."""
    for name in (names,) if isinstance(names, str) else names:
        patch.setattr(owner, name, change(getattr(owner, name)))


def on_blocks(change: Callable) -> Patch:
    """A fault in the transform, wherever the backend applies one."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        def around(original):
            return lambda x, blocks, *rest: original(x, None if blocks is None else change(blocks), *rest)

        wrap(patch, any_torch, (*QUANTIZERS, "rotate"), around)

    return fault


def on_codes(change: Callable) -> Patch:
    """A fault in (codes, scale, tensor_scale) of rotate_quantize; change also gets x and the quantizer."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        def around(original):
            def call(x, blocks, quantizer, scale_layout):
                return change(x, quantizer, *original(x, blocks, quantizer, scale_layout))

            return call

        wrap(patch, any_torch, "rotate_quantize", around)

    return fault


def on_input(change: Callable) -> Patch:
    def fault(patch: pytest.MonkeyPatch) -> None:
        wrap(patch, any_torch, QUANTIZERS, lambda original: lambda x, *rest: original(change(x), *rest))

    return fault


def on_matmul(**changes: Callable) -> Patch:
    """A fault in one argument of the product, by its position in the backend protocol."""
    order = ["x", "x_block_scale", "x_tensor_scale", "weight", "bias", "out_dtype"]

    def fault(patch: pytest.MonkeyPatch) -> None:
        def around(original):
            def call(*args):
                return original(
                    *(changes.get(name, lambda v: v)(value) for name, value in zip(order, args, strict=True))
                )

            return call

        wrap(patch, any_torch, "matmul", around)

    return fault


def on(owner: object, name: str, change: Callable) -> Patch:
    return lambda patch: wrap(patch, owner, name, change)


def swapped(codes: torch.Tensor) -> torch.Tensor:
    return (codes >> 4) | (codes << 4)


def swap_weight(weight):
    return dataclasses.replace(weight, data=swapped(weight.data) if weight.data.dtype == torch.uint8 else weight.data)


def swap_tensor(original):
    def dequantize(self, *args, **kwargs):
        return original(dataclasses.replace(self, codes=swapped(self.codes)), *args, **kwargs)

    return dequantize


def invert_weight_scale(weight):
    return dataclasses.replace(weight, tensor_scale=1 / weight.tensor_scale)


def one_scale_for_all(weight):
    return dataclasses.replace(weight, tensor_scale=weight.tensor_scale.amax().expand_as(weight.tensor_scale))


def as_identity(blocks):
    return dataclasses.replace(blocks, matrix=torch.eye(blocks.matrix.shape[0]), factor=1.0)


def twice(original):
    def call(x, blocks, *rest):
        return original(x if blocks is None else any_torch.rotate(x, blocks, x.dtype), blocks, *rest)

    return call


def recode(x, quantizer, codes, scale, tensor_scale, s_of: Callable):
    """NVFP4 codes again, from the block scale that s_of(encode * amax / 6) gives."""
    if quantizer.format.name != "nvfp4" or codes.shape[-1] * 2 != x.shape[-1]:
        return codes, scale, tensor_scale
    groups = x.float().reshape(*x.shape[:-1], -1, 16)
    step = s_of(groups.abs().amax(-1) / 6 / tensor_scale) * tensor_scale
    again = by_hand.e2m1_codes((groups / step[..., None].clamp_min(1e-30)).reshape(x.shape).numpy())
    return torch.from_numpy(by_hand.pack(again)), scale, tensor_scale


def with_bytes(change: Callable) -> Patch:
    def edit(x, quantizer, codes, scale, tensor_scale):
        return codes, change(scale.view(torch.uint8)).view(scale.dtype), tensor_scale

    return on_codes(edit)


def drop_last_group(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([codes[..., :-8], torch.zeros_like(codes[..., -8:])], dim=-1)


def unswizzled(original):
    def forward(self, scales: torch.Tensor) -> torch.Tensor:
        stored = torch.zeros_like(original(self, scales))
        stored.view(torch.uint8).view(-1)[: scales.numel()] = scales.reshape(-1).view(torch.uint8)
        return stored

    return forward


def dirty_padding(original):
    def forward(self, scales: torch.Tensor) -> torch.Tensor:
        stored = original(self, scales).clone()
        flat = stored.view(torch.uint8).view(-1)
        flat[flat == 0] = 0x7F
        return stored

    return forward


def lost_nan(scale: torch.Tensor) -> torch.Tensor:
    return torch.where((scale == 0x7F) | (scale == 255), 0x38, scale)


def overwrites(original):
    def call(x, *rest):
        result = original(x, *rest)
        x.mul_(2)
        return result

    return call


def of_the_batch(original):
    """A tensor scale from the whole batch, where every row has its own."""

    def call(x, blocks, quantizer, *rest):
        *parts, scale = original(x, blocks, quantizer, *rest)
        return (*parts, scale.amin().expand_as(scale) if scale.numel() > 1 else scale)

    return call


# the named tests, each with arguments that it is also run with on its own
LAYER = (
    "a layer",
    lambda: test_linear.test_equals_the_reference("nvfp4", "fp4", torch.float32, "random hadamard", "none", NAME),
)
OUTPUT = ("an output side", lambda: test_linear.test_the_bias_comes_once_and_is_turned(torch.float32, "bf16", NAME))
HAND = ("a layer by hand", lambda: test_linear.test_a_layer_by_hand(NAME))
RANGES = ("q/k/v", lambda: test_linear.test_fused_q_k_v_keep_a_scale_each("bf16", False, NAME))
FOUR = ("the 4 x 4 case", lambda: [test_ops.test_the_four_by_four_case(way, NAME) for way in (False, True)])
TIES = ("ties", lambda: test_ops.test_ties_both_neighbours_and_signed_zeros("nvfp4", NAME))
SCALES = ("scale ties and saturation", lambda: test_ops.test_e4m3_ties_and_saturation(NAME))
PLAIN = ("codes of plain input", lambda: test_ops.test_without_a_transform("nvfp4", 7, 48, torch.float32, NAME, None))
MX = ("codes of MXFP4", lambda: test_ops.test_without_a_transform("mxfp4", 7, 160, torch.float32, NAME, None))
NAN = ("NaN groups", lambda: test_ops.test_a_group_that_is_not_finite("nvfp4", float("nan"), torch.float32, NAME))
ZEROS = ("zero groups", lambda: test_ops.test_zeros_and_scales_that_underflow("nvfp4", NAME))
PRODUCT = (
    "the product of codes",
    lambda: test_ops_matmul.test_w4a4_of_codes_exact(7, 16, 96, False, torch.float32, "nvfp4", NAME),
)
BYTES = ("every byte", lambda: test_tensor.test_every_byte_of_codes_with_every_finite_scale("nvfp4"))
BLOCKED = ("blocked scales", lambda: test_layouts.test_blocked_whole_buffer(129, 6, torch.uint8, None))
BLOCKED_OP = (
    "blocked scales of the op",
    lambda: test_ops_rows.test_blocked_scales_are_the_linear_ones_moved("nvfp4", 7, 96, NAME, None),
)
UNTOUCHED = (
    "inputs unchanged",
    lambda: test_ops_rows.test_inputs_are_unchanged_and_not_aliased(lambda: (None, 1.0), torch.float32, NAME),
)
ROWS = (
    "rows alone",
    lambda: test_ops_rows.test_a_row_does_not_depend_on_its_batch(
        "nvfp4", "token", lambda: (None, 1.0), torch.float32, NAME
    ),
)
RELOAD = (
    "reload",
    lambda: test_linear_module.test_reloading_in_place_equals_a_fresh_layer("load_state_dict", "decoded", NAME),
)
FOLD = (
    "input folding",
    lambda: test_transforms.test_the_input_side_cancels(test_transforms.TRANSFORMS["matrix with a factor"]),
)
FOLD_OUT = (
    "output folding",
    lambda: test_transforms.test_the_output_side_cancels_with_its_bias(test_transforms.TRANSFORMS["random_hadamard32"]),
)

FAULTS: dict[str, tuple[Patch, list[tuple[str, Callable]]]] = {
    "T transposed": (on_blocks(lambda b: dataclasses.replace(b, transpose=not b.transpose)), [LAYER, FOUR]),
    "T's direction ignored": (on_blocks(lambda b: dataclasses.replace(b, transpose=False)), [FOUR]),
    "T's factor forgotten": (on_blocks(lambda b: dataclasses.replace(b, factor=1.0)), [LAYER]),
    "T left out": (on_blocks(as_identity), [LAYER, FOUR, OUTPUT]),
    "T applied twice": (lambda patch: wrap(patch, any_torch, QUANTIZERS, twice), [LAYER, FOUR]),
    "nibbles of x swapped": (on_codes(lambda x, q, c, s, t: (swapped(c), s, t)), [PLAIN, TIES]),
    "nibbles of w swapped": (on_matmul(weight=swap_weight), [PRODUCT]),
    "nibbles swapped on reading": (on(FP4Tensor, "dequantize", swap_tensor), [BYTES]),
    "linear scales to a blocked consumer": (on(BLOCKED_TYPE, "forward", unswizzled), [BLOCKED, BLOCKED_OP]),
    "padding not zeroed": (on(BLOCKED_TYPE, "forward", dirty_padding), [BLOCKED, BLOCKED_OP]),
    "ties away from zero": (on_input(lambda x: x * (1 + 2.0**-20)), [TIES]),
    "ties toward zero": (on_input(lambda x: x * (1 - 2.0**-20)), [TIES]),
    "tensor scale of x inverted": (on_matmul(x_tensor_scale=lambda s: None if s is None else 1 / s), [PRODUCT, LAYER]),
    "tensor scale of w inverted": (on_matmul(weight=invert_weight_scale), [PRODUCT, LAYER, HAND]),
    "encode scale taken for a multiplier": (
        lambda patch: wrap(patch, any_torch, QUANTIZERS, lambda original: lambda x, b, q, *rest: original(
            x, b, dataclasses.replace(q, encode_scale=None if q.encode_scale is None else 1 / q.encode_scale), *rest)),
        [PLAIN, LAYER],
    ),
    "one tensor scale for all ranges": (on_matmul(weight=one_scale_for_all), [RANGES, HAND]),
    "last group dropped": (on_codes(lambda x, q, c, s, t: (drop_last_group(c), s, t)), [PLAIN]),
    "last group of the product dropped": (on_matmul(x=drop_last_group), [PRODUCT, LAYER]),
    "bias skipped": (on_matmul(bias=lambda b: None), [LAYER, OUTPUT, HAND, PRODUCT]),
    "bias added twice": (on_matmul(bias=lambda b: None if b is None else b * 2), [LAYER, OUTPUT, HAND, PRODUCT]),
    "codes from the unrounded scale": (on_codes(lambda *a: recode(*a, s_of=lambda s: s)), [PLAIN]),
    "scale over 448 is a NaN byte": (with_bytes(lambda b: torch.where(b == 0x7E, 0x7F, b)), [SCALES]),
    "NaN lost": (with_bytes(lost_nan), [NAN]),
    "codes of a zero group left at -0": (on_codes(lambda x, q, c, s, t: (torch.where(c == 0, 0x88, c), s, t)), [ZEROS]),
    "E8M0 with bias 125": (with_bytes(lambda b: b - 2), [MX]),
    "E4M3 rounded up": (with_bytes(lambda b: torch.where(b < 0x7E, b + 1, b)), [SCALES, PLAIN]),
    "one token scale for the batch": (lambda patch: wrap(patch, any_torch, QUANTIZERS, of_the_batch), [ROWS]),
    "input overwritten": (lambda patch: wrap(patch, any_torch, QUANTIZERS, overwrites), [UNTOUCHED]),
    "weight turned as x is": (on(Transform, "fold_input_weight", lambda f: lambda self, w: self.apply(w)), [FOLD]),
    "bias not folded": (on(Transform, "fold_output_bias", lambda f: lambda self, b: b.double()), [FOLD_OUT]),
    "decoded weights not made again": (
        on(test_linear.FP4Linear, "_load_from_state_dict", lambda f: lambda self, state, prefix, *rest: f(
            self, {k: getattr(self, k.removeprefix(prefix)).clone() for k in state}, prefix, *rest)),
        [RELOAD],
    ),
}  # fmt: skip
ROWS_OF_TABLE = [(fault, name, check) for fault, (_, checks) in FAULTS.items() for name, check in checks]


@pytest.mark.parametrize(
    ("fault", "name", "check"), ROWS_OF_TABLE, ids=[f"{fault} / {name}" for fault, name, _ in ROWS_OF_TABLE]
)
def test_a_planted_fault_turns_its_test_red(fault: str, name: str, check: Callable) -> None:
    torch.manual_seed(5)
    check()  # green without the fault
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault][0](patch)
        torch.manual_seed(5)
        with pytest.raises(AssertionError):
            check()
    torch.manual_seed(5)
    check()  # and green again once it is gone
