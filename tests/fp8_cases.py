"""What the tests of FP8 products share: MXFP4 operands whose exponents are chosen, E4M3 by hand, and float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from conftest import INTERPRETED
from gpu_cases import DEVICE
from quarterturn import MXFP4, ops
from quarterturn.backends import fp8_launch
from quarterturn.formats import E2M1_VALUES
from quarterturn.linear import FP4Linear
from quarterturn.tensor import FP4Tensor

E4M3_BY_HAND = torch.tensor(
    [
        (byte & 7) * 2.0**-9 if byte & 0x78 == 0 else (1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3 & 15) - 7)
        for byte in range(0x7F)
    ],
    dtype=torch.float64,
)
"""The value of every E4M3 byte that is a number and not negative, by the format's definition (bias 7)."""


UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
FP32_SUMS = (4e-6, 0.0)
FP8_SUMS = FP32_SUMS if INTERPRETED else (2.0**-11, 2.0**-9)
"""What a sum may be off, in units of the sum of magnitudes, and of the largest product. An instruction cuts each of 33
summands by less than 2^-13 of the largest, so it may be 2^-8 of that off, and is far less; sums of 128 are rounded in
that way too, a few times, and have different signs."""


def decoded(byte: Tensor) -> Tensor:
    """E4M3 bytes -> float64."""
    magnitude = torch.cat((E4M3_BY_HAND, torch.tensor([float("nan")], dtype=torch.float64)))[(byte & 0x7F).long()]
    return torch.where(byte >= 0x80, -magnitude, magnitude)


def scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, a_recipe: object, b_scale: Tensor, b_recipe: object, *,
    bias: Tensor | None = None, output_dtype: torch.dtype, use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_mm in float64, with what CUDA's asks (ScaledBlas.cpp): K and N multiples of 16, a
    row-major and b column-major, fp32 scales (M, 1) and (1, N) or of one element, no bias of fp32 results."""
    recipes = torch.nn.functional.ScalingType
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert k % 16 == n % 16 == a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    assert a.stride() == (k, 1)
    assert b.stride() == (1, k)
    assert a_scale.dtype == b_scale.dtype == torch.float32
    assert a_recipe is b_recipe
    if a_recipe is recipes.RowWise:
        assert output_dtype == torch.bfloat16
        assert (a_scale.shape, b_scale.shape) == ((m, 1), (1, n))
        assert b_scale.stride(1) == 1
        assert a_scale.is_contiguous()
    else:
        assert a_recipe is recipes.TensorWise
        assert a_scale.numel() == b_scale.numel() == 1
    assert bias is None or (bias.shape == (n,) and bias.dtype == output_dtype != torch.float32)
    assert not use_fast_accum
    y = (decoded(a.view(torch.uint8)) @ decoded(b.t().view(torch.uint8)).T) * a_scale.double() * b_scale.double()
    return (y if bias is None else y + bias.double()).to(output_dtype)


def operand_of(rows: int, k: int, low: int = 120, high: int = 128) -> FP4Tensor:
    """Random codes, with scale bytes from `low` to `high` - 1."""
    make = torch.Generator().manual_seed(rows * 31 + k)
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=make)
    scale = torch.randint(low, high, (rows, k // 32), dtype=torch.uint8, generator=make)
    return FP4Tensor.from_encode(codes, scale, None, MXFP4)


def values_of(operand: FP4Tensor) -> Tensor:
    """e2m1 * 2^(byte - 127) in float64, NaN for the byte 255, without the library."""
    codes = operand.codes.cpu()
    table = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    e2m1 = table[torch.stack((codes & 15, codes >> 4), -1).long()].view(operand.shape)
    byte = operand.block_scale.cpu().double()
    scale = torch.where(byte == 255, torch.full_like(byte, float("nan")), 2.0 ** (byte - 127))
    return e2m1 * scale.repeat_interleave(32, 1)


def layer_of(n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, bias: bool = False, **how) -> FP4Linear:
    """dtype: of the bias. In the interpreter a row of weights takes some 10 ms to convert."""
    weight = operand_of(n, k).to(DEVICE)
    how |= {"bias": torch.randn(n, device=DEVICE).to(dtype)} if bias else {}
    return FP4Linear.from_tensor(weight, activations="fp4", backend="gpu_fp8", **how)


class Expected(NamedTuple):
    """A product in float64 (M, N), the sums of its products' magnitudes, and what none of these is greater than."""

    y: Tensor
    size: Tensor
    peak: Tensor

    def of(self, rows: Tensor | list[int]) -> Expected:
        return Expected(self.y[rows], self.size[rows], self.peak[rows])


def by_float64(layer: FP4Linear, x: Tensor) -> Expected:
    """The layer up to its output transform, on the operands that it multiplies."""
    first = layer.input_transform
    side = () if first is None else (layer.input_matrix, first.factor, first.transpose)
    codes, scale, tensor_scale = ops.rotate_quantize(
        x, *side, format=MXFP4, rule=layer.rule, recipe=layer.recipe, backend="gpu_triton"
    )
    values = FP4Tensor(codes, scale, tensor_scale, None, MXFP4, (len(codes),)).values().double()
    values, w = values * tensor_scale.double(), layer.weight_tensor().dequantize().double()
    y, size = values @ w.T, values.abs() @ w.abs().T
    peak = values.abs().amax(1, keepdim=True) * w.abs().amax(1)
    return Expected(y, size, peak) if layer.bias is None else Expected(y + layer.bias.double(), size, peak)


def assert_near(got: Tensor, want: Expected, sums: tuple[float, float], what: str = "") -> None:
    assert not got.isnan().any(), what
    bound = 1.01 * UNIT[got.dtype] * want.y.abs() + sums[0] * want.size + sums[1] * want.peak
    bound += 2.0**-24 * (got.dtype == torch.float16)
    worst = float(((got.double() - want.y).abs() / bound.clamp_min(1e-300)).max()) if got.numel() else 0.0
    assert worst <= 1, f"{what}: {worst} of the bound"


def converted(x: FP4Tensor, scale: float = 1.0) -> fp8_launch.E4M3Operand:
    moved = x.to(DEVICE)
    return fp8_launch.operand(moved.codes, moved.block_scale, torch.tensor([scale], device=DEVICE), torch.bfloat16)


def bytes_of(made: fp8_launch.E4M3Operand) -> Tensor:
    return made.data.view(torch.uint8)[: made.rows].cpu()


def exactly(made: fp8_launch.E4M3Operand) -> Tensor:
    """What E4M3 numbers and row scales say, float64."""
    return decoded(bytes_of(made)) * made.row_scale[: made.rows].cpu().double()


def left_rows(operand: fp8_launch.E4M3Operand) -> list[int]:
    return sorted(operand.left[: int(operand.count), 0].tolist())
