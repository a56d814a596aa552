"""What products of FP8 need around them: operands in E4M3, the library's product, and the rows that it cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import e4m3_layout
from ..settings import triton_interprets
from ..tensor import FP4Tensor, per_output
from . import gpu_device
from .protocol import Operand

FORM = "e4m3"
"""The form of an operand of this kind."""
_BLOCK = 1024  # words of eight codes that a program of to_e4m3 converts at a time
TILE = {"ROWS": 64, "COLUMNS": 128, "DEPTH": 128, "num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}


@dataclass(frozen=True, eq=False, kw_only=True)
class E4M3Operand(Operand):
    """x (M, K): codes uint8 (M, K/2) with block_scale (M, K/32), and `data` in E4M3 with fp32 row_scale (M, 1), both of
    which have rows without meaning behind, up to a multiple of 16, as products like it.

    left: int32 (M, 2), of which count (1) are rows that E4M3 does not hold; see kernels/to_e4m3.py.
    """

    codes: Tensor
    row_scale: Tensor
    left: Tensor
    count: Tensor


def operand(codes: Tensor, block_scale: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> E4M3Operand:
    """Packed codes (M, K/2), E8M0 scale bytes (M, K/32) and tensor scale (1,) of an input of `dtype`, in E4M3."""
    m, k = codes.shape[0], 2 * codes.shape[1]
    data = torch.empty(e4m3_layout.rows(m), k, dtype=torch.uint8, device=codes.device)
    row_scale = torch.empty(len(data), 1, dtype=torch.float32, device=codes.device)
    left, count = _convert(codes, block_scale, tensor_scale, data, row_scale)
    return E4M3Operand(
        data=data.view(e4m3_layout.DTYPE), block_scale=block_scale, tensor_scale=tensor_scale, rows=m, dtype=dtype,
        form=FORM, codes=codes, row_scale=row_scale, left=left, count=count,
    )  # fmt: skip


def weight_in_e4m3(weight: FP4Tensor) -> tuple[Tensor, int]:
    """An MXFP4 weight as e4m3_layout stores it, its tensor scales in the rows' own, and how many of its rows do not
    fit. Waits for the device."""
    n, k = weight.shape
    stored = e4m3_layout.empty(n, k, weight.device)
    values, scale = e4m3_layout.parts(stored, k)
    one = torch.ones(1, dtype=torch.float32, device=weight.device)
    scales = weight.linear_block_scale().view(torch.uint8)
    _, count = _convert(weight.codes, scales, one, values[:n].view(torch.uint8), scale[:n])
    scale[:n].mul_(per_output(weight.tensor_scale, weight.output_sizes))
    return stored, int(count)


def _convert(
    codes: Tensor, block_scale: Tensor, tensor_scale: Tensor, out: Tensor, row_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill the first M rows of E4M3 bytes and row scales; the list of rows that do not fit, and its length."""
    m, k = len(codes), out.shape[1]
    left = torch.empty(m, 2, dtype=torch.int32, device=codes.device)
    count = torch.zeros(1, dtype=torch.int32, device=codes.device)
    if m:
        from ..kernels.to_e4m3 import to_e4m3

        words = k // 8
        with gpu_device.on_device(codes.device):
            to_e4m3[(m,)](
                _whole(codes).view(torch.int32), block_scale.contiguous(), tensor_scale, out, row_scale, left, count,
                **conversion(words),
            )  # fmt: skip
    return left, count


def conversion(words: int) -> dict[str, Any]:
    """The constexpr arguments of to_e4m3 for rows of `words`, and the compiler's options."""
    block = min(_BLOCK, 1 << (words - 1).bit_length())
    return {"WORDS": words, "BLOCK": block, "INTERPRETED": triton_interprets(), "num_warps": 4}


def _whole(codes: Tensor) -> Tensor:
    """The same codes, contiguous and at a multiple of 16 bytes."""
    codes = codes.contiguous()
    return codes.clone() if codes.data_ptr() % 16 else codes


def multiply(
    x: E4M3Operand, values: Tensor, scale: Tensor, n: int, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """x (M, K) times E4M3 values (N up to 16, K) with fp32 scales (N up to 16) -> (M, n) of out_dtype, contiguous.

    fp32 scales and bias (n), one rounding; M and n not 0.
    """
    with gpu_device.on_device(x.data.device):
        if out_dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16):
            y = by_rows(x.data, x.row_scale, values, scale, _padded(bias, len(scale)))[: x.rows, :n].contiguous()
        else:
            acc = bare_sums(x.data, values)[: x.rows, :n]
            acc.mul_(x.row_scale[: x.rows]).mul_(scale[:n])
            y = (acc if bias is None else acc.add_(bias)).to(out_dtype).contiguous()
        _replace_left(x, values, scale, bias, y)
    return y


def by_rows(
    x: Tensor, x_scale: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None, fast: bool = False
) -> Tensor:
    """bf16 (M, N): E4M3 x (M, K) with scales (M, 1), values (N, K) with scales (N), bias bf16 (N).

    fast: sums stay in the matrix units' own precision.
    """
    recipe = functional.ScalingType.RowWise
    return functional.scaled_mm(
        x, values.t(), x_scale, recipe, scale.view(1, -1), recipe, bias=bias, output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )  # fmt: skip


def bare_sums(x: Tensor, values: Tensor, out_dtype: torch.dtype = torch.float32, fast: bool = False) -> Tensor:
    """(M, N) of E4M3 x (M, K) and values (N, K), without scales."""
    recipe, one = functional.ScalingType.TensorWise, gpu_device.constant(1.0, x.device)
    return functional.scaled_mm(
        x, values.t(), one, recipe, one, recipe, output_dtype=out_dtype, use_fast_accum=fast
    )  # fmt: skip


def _padded(bias: Tensor | None, count: int) -> Tensor | None:
    if bias is None or len(bias) == count:
        return bias
    return functional.pad(bias, (0, count - len(bias)))


def _replace_left(x: E4M3Operand, values: Tensor, scale: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Write the rows of y that E4M3 does not hold."""
    from ..kernels.matmul_left import matmul_left

    programs = gpu_device.multiprocessors(y.device) if y.is_cuda else 2
    matmul_left[(programs,)](
        _whole(x.codes), x.block_scale, x.tensor_scale, values.view(torch.uint8), scale,
        scale if bias is None else bias, y, x.left, x.count, y.shape[1], K=values.shape[1], HAS_BIAS=bias is not None,
        INTERPRETED=triton_interprets(), **TILE,
    )  # fmt: skip
