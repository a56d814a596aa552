"""Rotation by a wide +-1 matrix that is a Kronecker product, in one pass over memory: plain Triton, sm_80 to sm_120.

    z = ((x * left) @ (I or H, ..., DENSE, ..., H)) * right * factor        H = [[1, 1], [1, -1]]

A value of a row has the index (o, d, i): o below OUTER and i below INNER are digits of factors of order 2, d is the one
of DENSE, the product of all other factors and of some of order 2, up to 256. A tile is the matrix (d, n) with
n = (row, o, i). The matrix unit multiplies DENSE by it, +-1 or +-2^p by 16-bit values, which is exact, in fp32 sums.
Each factor of order 2 is then an fp32 sum and a difference, rounded once: log2(OUTER * INNER) roundings a value.

Digits of n that a thread holds cost one instruction a value each. Those that its neighbours hold, LATE of them from
the second lowest on, are left to the end, so that the tile changes hands once, on its way to the layout of the stores.

| x        | (rows, K) bf16 or fp16, contiguous, K = ORDER * OUTER * INNER                                     |
| dense    | (PADDED, PADDED) of x's dtype, [output, input], zeros from ORDER on; PADDED a power of two >= 16  |
| signs    | left, right: int16 (K), the sign bit where a value is negated; read if LEFT, RIGHT                |
| output   | (rows, K) bf16, fp16 or fp32; a zero is +0                                                        |
| moves    | x once and the output once; DENSE once a program, signs (from a cache) once a tile                |
| does not | check arguments, allocate, take fp32 x                                                            |
| see      | backends/gpu_wide.py for the launch, tests/test_gpu_triton_wide.py, test_wide_compile.py           |
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rotate_quantize import _narrowed, _widened


@triton.jit
def _sums_and_differences(z, HIGH: tl.constexpr, LOW: tl.constexpr, PADDED: tl.constexpr):
    """The factor of order 2 at the digit of n that has LOW values below it and HIGH above; z is (n, d)."""
    a, b = tl.split(tl.trans(tl.reshape(z, (HIGH, 2, LOW, PADDED)), 0, 2, 3, 1))
    return tl.reshape(tl.trans(tl.join(a + b, a - b), 0, 3, 1, 2), (HIGH * 2 * LOW, PADDED))


@triton.jit
def _tile(
    x_ptr, dense, left_ptr, right_ptr, out_ptr, first, rows, factor,
    ORDER: tl.constexpr, PADDED: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, LATE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rows `first` (int64) to first + ROWS."""
    N: tl.constexpr = OUTER * INNER
    K: tl.constexpr = ORDER * N
    d = tl.arange(0, PADDED)[:, None]
    n = tl.arange(0, ROWS * N)[None, :]
    place = n // INNER % OUTER * (ORDER * INNER) + d * INNER + n % INNER
    inside = (d < ORDER) & (first + n // N < rows)
    at = first * K + (n // N * K + place)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if LEFT:
        sign = tl.load(left_ptr + place, mask=d < ORDER, other=0)
        x = (x.to(tl.int16, bitcast=True) ^ sign).to(x_ptr.dtype.element_ty, bitcast=True)
    if INTERPRETED:  # whose product of bf16 multiplies their bits
        x, dense = _widened(x, True), _widened(dense, True)
    z = tl.trans(tl.dot(dense, x, input_precision="ieee"))
    for step in tl.static_range(STEPS):
        if step == 0 or step > LATE:
            z = _sums_and_differences(z, ROWS * N >> (step + 1), 1 << step, PADDED)
    for late in tl.static_range(LATE):
        z = _sums_and_differences(z, ROWS * N >> (LATE - late + 1), 1 << (LATE - late), PADDED)
    z = tl.trans(z)
    if RIGHT:
        sign = tl.load(right_ptr + place, mask=d < ORDER, other=0).to(tl.int32) << 16
        z = (z.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    tl.store(out_ptr + at, _narrowed(z * factor + 0.0, out_ptr.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def hadamard_wide(
    x_ptr, dense_ptr, left_ptr, right_ptr, out_ptr, rows, factor,
    ORDER: tl.constexpr, PADDED: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, LATE: tl.constexpr, STAGES: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """x (rows, K) -> z (rows, K). A program takes every num_programs-th tile of ROWS rows.

    STEPS: log2(OUTER * INNER). STAGES: tiles of x in flight a program.
    """
    i, j = tl.arange(0, PADDED)[:, None], tl.arange(0, PADDED)[None, :]
    dense = tl.load(dense_ptr + i * PADDED + j)
    tiles = tl.cdiv(rows, ROWS)
    if INTERPRETED:  # `range` cannot take bounds from arguments there, with NumPy 2.4
        tile = tl.program_id(0)
        while tile < tiles:
            _tile(
                x_ptr, dense, left_ptr, right_ptr, out_ptr, tile.to(tl.int64) * ROWS, rows, factor,
                ORDER, PADDED, OUTER, INNER, ROWS, STEPS, LATE, LEFT, RIGHT, INTERPRETED,
            )  # fmt: skip
            tile += tl.num_programs(0)
    else:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            _tile(
                x_ptr, dense, left_ptr, right_ptr, out_ptr, tile.to(tl.int64) * ROWS, rows, factor,
                ORDER, PADDED, OUTER, INNER, ROWS, STEPS, LATE, LEFT, RIGHT, INTERPRETED,
            )  # fmt: skip
