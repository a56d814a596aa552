"""Numbers below 2^-126, and what lies behind them: a CPU's results do not depend on a process that flushes them.

Also rows whose memory is not one behind the other, and zeros of either sign.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from comparing import assert_same_bits
from cpu_cases import kernels, threads
from quarterturn import FP4Linear, FP4Tensor
from quarterturn.kernels import cpu_build
from quarterturn.tensor import _scale_table

__all__ = ["kernels", "threads"]
pytestmark = pytest.mark.usefixtures("kernels", "threads")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.fail("this CPU flushes nothing")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


def layer_of(byte: int, format: str = "nvfp4", n: int = 130, k: int = 256, **options) -> FP4Linear:
    """All block scales are this byte."""
    group, encode = (16, torch.tensor([1.0])) if format == "nvfp4" else (32, None)
    scale = torch.full((n, k // group), byte, dtype=torch.uint8)
    scale = scale.view(torch.float8_e4m3fn) if format == "nvfp4" else scale
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    weight = FP4Tensor.from_encode(codes, scale, encode, format)
    return FP4Linear.from_tensor(weight, **{"backend": "cpu_native", **options})


CASES = {
    "weights W4A16": (5, {"activations": "bf16"}, FP32, 1.0),
    "weights W4A4": (5, {"input_encode_scale": 900.0}, FP32, 1.0),
    "weights, invariant": (5, {"input_encode_scale": 900.0, "batch_invariant": True}, BF16, 1.0),
    "activations": (0x38, {"input_encode_scale": 1.0}, FP32, 0.02),
    "activations, invariant": (0x38, {"input_encode_scale": 1.0, "batch_invariant": True}, FP32, 0.02),
    "fp16": (0x38, {"activations": "bf16"}, FP16, 3e-5),
    "fp16, quantized": (0x38, {"recipe": "token"}, FP16, 3e-5),
}


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("byte", "options", "dtype", "size"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_flushing(byte: int, options: dict, dtype, size: float, count: int, rows: int, flushed: None) -> None:
    layer, x = layer_of(byte, **options), (torch.rand(rows, 256) * size).to(dtype)
    torch.set_num_threads(count)
    want = layer(x)
    assert (want != 0).any()
    torch.set_flush_denormal(True)
    found = [layer(x) for _ in range(4)]
    torch.set_flush_denormal(False)
    for y in found:
        assert_same_bits(y, want)


def test_the_flag_is_left_as_it_was(flushed: None) -> None:
    torch.set_flush_denormal(True)
    with torch.no_grad():
        layer_of(5, activations="bf16")(torch.ones(3, 256))
    gone = float((torch.tensor([1e-38] * 64) * 0.1)[0])
    torch.set_flush_denormal(False)
    assert gone == 0.0


def test_tables_made_while_flushing(flushed: None) -> None:
    library, size = cpu_build.library(), 2 * 256 * 16 * 2

    def values() -> bytes:
        return ctypes.string_at(library.qt_values(), size)

    plain, table = values(), _scale_table("mxfp4", torch.device("cpu")).clone()
    _scale_table.cache_clear()
    torch.set_flush_denormal(True)
    again, made = values(), _scale_table("mxfp4", torch.device("cpu"))
    torch.set_flush_denormal(False)
    assert plain == again
    assert_same_bits(made, table)
    assert made.view(torch.int32)[0] == 1 << 22


@pytest.mark.parametrize("backend", ["any_torch", "cpu_native"])
@pytest.mark.parametrize("weights", ["packed", "decoded"])
@pytest.mark.parametrize("rows", [1, 40, 80])
@torch.no_grad()
def test_what_stands_between_rows(backend: str, weights: str, rows: int) -> None:
    layer = layer_of(0x38, n=15, k=80, activations="bf16", backend=backend, weights=weights)
    big = torch.ones(rows, 96, dtype=BF16)
    big[:, 80:] = float("nan")
    x: Tensor = big[:, :80]
    assert_same_bits(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("activations", ["fp4", "bf16"])
@torch.no_grad()
def test_a_zero_has_its_sign_in_any_batch(activations: str) -> None:
    layer = layer_of(2, "mxfp4", activations=activations, batch_invariant=True)
    layer.codes.fill_(0x22)
    x = torch.full((3, 256), -1e-30)
    whole = layer(x)
    assert (whole == 0).all()
    assert (whole.view(torch.int32) != 0).any()
    for m in (1, 2):
        assert_same_bits(layer(x[:m]), whole[:m])
