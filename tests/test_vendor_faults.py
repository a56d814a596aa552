"""Mistakes in a vendor's conventions, each planted in the adapters, each turning a whole-layer test red.

The stand-ins are told apart from the adapters by these: one that computed by the adapter's conventions, instead of the
vendor's, would stay green.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import test_vendor_layers
from quarterturn import hadamard, layouts, random_hadamard
from quarterturn.backends import (
    any_torch,
    blackwell_cublas,
    blackwell_flashinfer,
    blackwell_qutlass,
    vendor,
    vendor_ops,
)
from test_planted_faults import BLOCKED_TYPE, dirty_padding, swapped, unswizzled, wrap
from test_vendor_layers import check, normal
from vendor_door import ADAPTERS, layer_of, opened

Patch = Callable[[pytest.MonkeyPatch], None]
PLAIN = ("cublas", "flashinfer", "flashinfer trtllm", "qutlass dense", "qutlass 128x4")
QUTLASS = ("qutlass dense", "qutlass 128x4")
OURS = ("cublas", "flashinfer", *QUTLASS)


def on(owner: object, name: str, change: Callable) -> Patch:
    return lambda patch: wrap(patch, owner, name, change)


def nvfp4(name: str) -> None:
    """N that no kernel takes, K of a half tile of scales: sliced, padded."""
    with opened(name):
        check(layer_of(name, "nvfp4", 42, 96, input_transform=hadamard(32)), normal(5, 96), 1)


def whole_tiles(name: str, fmt: str) -> None:
    """Nothing to pad: only where the scales lie can be wrong."""
    with opened(name):
        check(layer_of(name, fmt, 128, 256), normal(128, 256), 1)


def mxfp4(name: str) -> None:
    with opened(name):
        check(layer_of(name, "mxfp4", 42, 96, input_transform=hadamard(32)), normal(5, 96), 1)


def ranges(name: str) -> None:
    with opened(name):
        check(layer_of(name, "nvfp4", 104, 96, sizes=(48, 24, 32)), normal(5, 96), 1)


def biased(name: str) -> None:
    with opened(name):
        layer = layer_of(name, "nvfp4", 48, 96, bias=True)
        check(layer, normal(5, 96), ADAPTERS[name].roundings)


def recipe_of_nvfp4(name: str) -> None:
    with opened(name):
        check(layer_of(name, "nvfp4", 48, 96, recipe="qutlass", input_transform=hadamard(16)), normal(5, 96), 1)


def recipe_of_mxfp4(name: str) -> None:
    with opened(name):
        check(layer_of(name, "mxfp4", 48, 192, recipe="qutlass", input_transform=hadamard(64)), normal(5, 192), 1)


def directions(name: str) -> None:
    with opened(name):
        turn = dataclasses.replace(random_hadamard(32, seed=4), transpose=True)
        check(layer_of(name, "nvfp4", 48, 96, input_transform=turn), normal(5, 96), 1)


def not_finite(name: str) -> None:
    test_vendor_layers.test_a_row_that_is_not_finite_is_nan(name, "nvfp4", float("nan"))


def empty(name: str) -> None:
    test_vendor_layers.test_an_empty_batch_launches_nothing(name, "nvfp4")


def strided(name: str) -> None:
    test_vendor_layers.test_strided_and_unaligned_inputs_equal_others(name, "nvfp4")


def inverted(original):
    return lambda quantizer, device: 1 / original(quantizer, device)


def without(factor: float):
    """A constant of QuTLASS's recipe forgotten: its tensor scale comes out `factor` times too large."""

    def change(original):
        return lambda quantizer, device: original(quantizer, device) * factor

    return change


def swapped_codes(original):
    def quantize(*arguments):
        codes, *rest = original(*arguments)
        return (swapped(codes), *rest)

    return quantize


def swapped_parts(original):
    return lambda *args, **options: tuple(
        part._replace(codes=swapped(part.codes)) for part in original(*args, **options)
    )


def unaligned(original):
    return lambda weight, align, **options: original(weight, 1, **options)


def unsliced(original):
    return lambda results, parts: results[0].contiguous()


def one_scale(original):
    def parts_of(weight, *args, **options):
        scale = weight.tensor_scale.amax().expand_as(weight.tensor_scale)
        return original(dataclasses.replace(weight, tensor_scale=scale), *args, **options)

    return parts_of


def with_column_padding_only_for_weights(original):
    return lambda codes, scale, tensor_scale, x, quantizer: vendor.Operand(
        codes, scale, tensor_scale, x.shape[0], x.dtype, vendor.FORM
    )


def no_bias(original):
    return lambda y, layer, dtype: original(y, dataclasses.replace(layer, bias=None), dtype)


def bias_twice(original):
    return lambda y, layer, dtype: original(original(y, layer, dtype), layer, dtype)


def no_epilogue_bias(original):
    return lambda acc, scale, weight, bias, dtype: original(acc, scale, weight, None, dtype)


def untransposed(original):
    return lambda blocks, quantizer: original(dataclasses.replace(blocks, transpose=False), quantizer)


def no_factor(original):
    return lambda quantizer, factor, device: original(quantizer, 1.0, device)


def six_for_all(original):
    return lambda quantizer, factor, device: torch.full((1,), 6.0 * factor)


def never_empty(original):
    """The rows counted wrongly: an empty batch is launched."""
    return lambda *args: dataclasses.replace(original(*args), rows=1)


def read_dense(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vendor_ops, "gives_blocked_scales", lambda quantizer: False)


def padded_rows(original):
    """Dense scales read as if their rows were padded, as the shape of their buffer says."""

    def quantize(x, matrix, global_scale):
        module, groups = vendor_ops.qutlass(), x.shape[1] // (32 if global_scale is None else 16)
        quantizer = module.fusedQuantizeMx if global_scale is None else module.fusedQuantizeNv
        extra = () if global_scale is None else (global_scale,)
        codes, scale = quantizer(x, matrix, *extra, method="abs_max")
        return codes, scale.view(torch.uint8)[: x.shape[0], :groups].clone()

    return quantize


class Operators:
    """torch.ops with one of our operators replaced by a Python function."""

    def __init__(self, name: str, function: Callable) -> None:
        self.quarterturn_vendor = self
        setattr(self, name, function)

    def __getattr__(self, name: str):
        return getattr(torch.ops.quarterturn_vendor, name)


def operator(name: str, change: Callable) -> Patch:
    def fault(patch: pytest.MonkeyPatch) -> None:
        replaced = Operators(name, change(getattr(torch.ops.quarterturn_vendor, name)))
        fake = type("torch", (), {"__getattr__": lambda self, key: getattr(torch, key), "ops": replaced})()
        patch.setattr(blackwell_qutlass, "torch", fake)
        patch.setattr(blackwell_flashinfer, "torch", fake)

    return fault


def unshuffled(original):
    return lambda part: part._replace(block_scale=layouts.BLOCKED_128x4.forward(part.block_scale))


FAULTS: dict[str, tuple[Patch, Callable[[str], None], tuple[str, ...]]] = {
    "divisor for multiplier, x": (on(vendor, "activation_scale", inverted), nvfp4, PLAIN[1:]),
    "divisor for multiplier, w": (
        on(vendor, "parts_of", lambda f: lambda *a, **o: tuple(
            part._replace(tensor_scale=1 / part.tensor_scale) for part in f(*a, **o))), nvfp4, PLAIN),
    "linear scales to a blocked reader, NVFP4": (
        on(BLOCKED_TYPE, "forward", unswizzled), lambda name: whole_tiles(name, "nvfp4"), PLAIN),
    "linear scales to a blocked reader, MXFP4": (
        on(BLOCKED_TYPE, "forward", unswizzled), lambda name: whole_tiles(name, "mxfp4"), OURS),
    "padding of scales not zero": (on(BLOCKED_TYPE, "forward", dirty_padding), nvfp4, PLAIN),
    "nibbles of x swapped": (on(any_torch, "rotate_quantize", swapped_codes), mxfp4, OURS),
    "nibbles of the fused codes swapped": (operator("qutlass_quantize", swapped_codes), nvfp4, QUTLASS),
    "nibbles of w swapped": (on(vendor, "parts_of", swapped_parts), nvfp4, PLAIN),
    "forgotten factor 6": (on(vendor, "activation_scale", without(6.0)), recipe_of_nvfp4, (*QUTLASS, "flashinfer")),
    "forgotten factor 3": (on(vendor, "activation_scale", without(3.0)), recipe_of_mxfp4, (*QUTLASS, "flashinfer")),
    "factor 3 undone twice": (on(vendor, "activation_scale", without(1 / 3)), recipe_of_mxfp4, QUTLASS),
    "6 in place of the file's scale": (on(blackwell_qutlass, "_global_scale", six_for_all), nvfp4, QUTLASS),
    "the transform's factor forgotten": (on(blackwell_qutlass, "_global_scale", no_factor), nvfp4, QUTLASS),
    "the direction ignored": (on(blackwell_qutlass, "_matrix", untransposed), directions, QUTLASS),
    "128x4 scales read as dense": (read_dense, nvfp4, ("qutlass 128x4",)),
    "dense scales read as padded": (operator("qutlass_quantize", padded_rows), nvfp4, ("qutlass dense",)),
    "NaN left to the quantizer": (
        on(blackwell_qutlass, "_mark_not_finite", lambda f: lambda *a: None), not_finite, QUTLASS),
    "strided rows handed over": (
        operator("qutlass_quantize", lambda f: lambda x, *rest: f(x.T.contiguous().T, *rest)), strided, QUTLASS),
    "an odd address handed over": (on(vendor, "aligned", lambda f: lambda t: t.contiguous()), strided, QUTLASS),
    "N not padded": (on(vendor, "parts_of", unaligned), nvfp4, PLAIN),
    "the result not sliced": (on(vendor, "joined", unsliced), nvfp4, PLAIN),
    "K of x not padded": (on(vendor, "as_operand", with_column_padding_only_for_weights), nvfp4, PLAIN),
    "one tensor scale for all ranges": (on(vendor, "parts_of", one_scale), ranges, PLAIN[1:]),
    "bias skipped": (on(vendor, "finished", no_bias), biased, PLAIN[1:]),
    "bias skipped by the epilogue": (on(blackwell_cublas, "epilogue", no_epilogue_bias), biased, ("cublas",)),
    "bias added twice": (on(vendor, "finished", bias_twice), biased, PLAIN[1:]),
    "an empty batch launched": (on(vendor, "as_operand", never_empty), empty, PLAIN),
    "trtllm's weights not shuffled": (on(blackwell_flashinfer, "_shuffled", unshuffled), nvfp4, ("flashinfer trtllm",)),
    "alpha of cuBLAS left out": (
        on(blackwell_cublas, "_nvfp4", lambda f: lambda o, p, s, dtype: f(o, p, None, dtype)), nvfp4, ("cublas",)),
    "cuBLAS's tensor scale of x inverted": (
        on(blackwell_cublas, "_nvfp4", lambda f: lambda o, p, s, dtype: f(o, p, 1 / s, dtype)), nvfp4, ("cublas",)),
}  # fmt: skip
ROWS = [(fault, name) for fault, (_, _, names) in FAULTS.items() for name in names]


@pytest.mark.parametrize(("fault", "name"), ROWS, ids=[f"{fault} / {name}" for fault, name in ROWS])
def test_a_planted_fault_turns_the_layer_red(fault: str, name: str) -> None:
    plant, run, _ = FAULTS[fault]
    run(name)  # green without the fault
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            run(name)
    run(name)  # and green again once it is gone


def test_every_kind_that_was_asked_for_is_here() -> None:
    asked = ("divisor", "linear scales", "swapped", "factor 6", "factor 3", "sliced", "padded")
    assert all(any(word in fault for fault in FAULTS) for word in asked)
