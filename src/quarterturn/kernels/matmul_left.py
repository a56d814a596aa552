"""The product of the rows that kernels/to_e4m3.py has left, exactly as bf16 matrix units have it.

y[row] = sum over K of (e2m1 * 2^e of x) * (E4M3 of w), fp32 sums, times both scales, plus bias, rounded once. Each
product is exact: e2m1 * 2^(e - reference) in bf16 (but groups 186 binades under the row's largest, which are zero), and
E4M3 in bf16. How many rows are left only the device knows, so as many programs are launched as it holds, which take
tiles in turn; where none are left each reads one number and ends.

| codes, scales   | uint8 (M, K / 2) and (M, K / 32), the rows of x that were quantized                                |
| w, w_scale      | uint8 (N, K) E4M3, and fp32 (N)                                                                    |
| tensor_scale    | fp32 (1), of x                                                                                     |
| bias            | (N), any float                                                                                     |
| left, count     | int32 (M, 2): row and biased reference, and (1), how many                                          |
| y               | (M, N) bf16, fp16 or fp32: the rows on the list are written, no others                             |
| needs           | capability 8.9 or more (E4M3)                                                                      |
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rotate_quantize import _narrowed
from .to_e4m3 import e2m1, power_or_nan


@triton.jit
def _operand(values, INTERPRETED: tl.constexpr):
    """Values that bf16 holds, in bf16; in the interpreter, whose products of large bf16 numbers are wrong, in fp32."""
    return values if INTERPRETED else values.to(tl.bfloat16)


@triton.jit
def _rows_of_x(codes_ptr, scales_ptr, row, reference, used, first, K: tl.constexpr, ROWS: tl.constexpr,
               DEPTH: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """bf16 (ROWS, DEPTH) of the columns from `first` on; zero outside of the row."""
    pair = first // 2 + tl.arange(0, DEPTH // 2)
    pairs = tl.load(codes_ptr + row[:, None] * (K // 2) + pair[None, :], mask=used[:, None] & (pair < K // 2)[None, :],
                    other=0).to(tl.int32)  # fmt: skip
    codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), (ROWS, DEPTH // 32, 32))
    group = first // 32 + tl.arange(0, DEPTH // 32)
    inside = used[:, None] & (group < K // 32)[None, :]
    scale = tl.load(scales_ptr + row[:, None] * (K // 32) + group[None, :], mask=inside, other=0).to(tl.int32)
    x = e2m1(codes) * power_or_nan(scale, reference[:, None])[:, :, None]
    return _operand(tl.reshape(x, (ROWS, DEPTH)), INTERPRETED)


@triton.jit
def _columns_of_w(w_ptr, col, n, first, K: tl.constexpr, DEPTH: tl.constexpr, INTERPRETED: tl.constexpr):
    """bf16 (columns, DEPTH); zero outside."""
    i = first + tl.arange(0, DEPTH)
    inside = (col < n)[:, None] & (i < K)[None, :]
    byte = tl.load(w_ptr + col.to(tl.int64)[:, None] * K + i[None, :], mask=inside, other=0)
    w = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if INTERPRETED:  # whose casts know no NaN
        w = tl.where((byte & 0x7F) == 0x7F, float("nan"), w)
    return _operand(w, INTERPRETED)


@triton.jit
def matmul_left(
    codes_ptr, scales_ptr, tensor_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, y_ptr, left_ptr, count_ptr, n,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS by COLUMNS of y, columns first, DEPTH of K at a time."""
    count = tl.load(count_ptr)
    across = tl.cdiv(n, COLUMNS)
    tile = tl.program_id(0)
    while tile < tl.cdiv(count, ROWS) * across:
        place = tile // across * ROWS + tl.arange(0, ROWS)
        used = place < count
        row = tl.load(left_ptr + 2 * place, mask=used, other=0).to(tl.int64)
        reference = tl.load(left_ptr + 2 * place + 1, mask=used, other=127)
        col = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, K, DEPTH):
            x = _rows_of_x(codes_ptr, scales_ptr, row, reference, used, first, K, ROWS, DEPTH, INTERPRETED)
            w = _columns_of_w(w_ptr, col, n, first, K, DEPTH, INTERPRETED)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        x_scale = (reference << 23).to(tl.float32, bitcast=True) * tl.load(tensor_scale_ptr)
        w_scale = tl.load(w_scale_ptr + col, mask=col < n, other=0.0)
        y = acc * (x_scale[:, None] * w_scale[None, :])
        if HAS_BIAS:
            y += tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
        y = _narrowed(y, y_ptr.dtype.element_ty, INTERPRETED)
        tl.store(y_ptr + row[:, None] * n + col[None, :], y, mask=used[:, None] & (col < n)[None, :])
        tile += tl.num_programs(0)
