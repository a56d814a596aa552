"""The product of packed FP4 codes on Blackwell's FP4 matrix units: y = (x w^T) * tensor scales + bias, in plain Triton.

A program makes BLOCK_M tokens of BLOCK_N outputs. The weights are the left operand, so that they fill the 128 rows of
tcgen05.mma at any number of tokens (on 12.0: the 16 of mma.sync), and the tokens are its columns. Codes come row by row
through cp.async, scales as the 512-byte tiles of the 128x4 layout through TMA, from where tcgen05.cp takes them to
tensor memory without passing registers. For fewer than 128 tokens a program takes its rows of such tiles word by word.

| w, w scale     | (N, K/2) uint8, two codes a byte; the 128x4 tiles of (N, K/GROUP) as (1, N/128, K/GROUP/4, 2, 256) |
| x, x scale     | (M, K/2) uint8; the same, or int32 words of four scales where BLOCK_M < 128                        |
| scales are     | float8_e4m3fn, GROUP 16 (NVFP4), or uint8 E8M0, GROUP 32 (MXFP4)                                   |
| tensor scales  | fp32, (N,) or (1,) of w and (M,) or (1,) of x; bias fp32 (N,)                                      |
| y              | (M, N) bf16, fp16 or fp32: fp32 sums, times (x tensor scale * w tensor scale), plus bias, rounded  |
| moves          | every code and scale of x and w once a program that needs it; y once                               |
| needs          | capability 10.0, 10.3 or 12.0; Triton 3.6; every pointer 16-byte aligned                           |
| does not       | split K, so few tokens of a narrow layer leave multiprocessors idle; check, allocate               |
| run on         | nothing: no Blackwell was at hand. Compiled and read in tests/test_blackwell_compile.py            |

DEFINITION replaces the one call of `tl.dot_scaled` by what it means, codes and scales decoded to fp32 and multiplied in
fp32, and changes nothing else: so the addresses, tails and epilogue of this source run in Triton's interpreter on a
CPU, whose own `dot_scaled` fails (3.6) or misreads E4M3 scales (3.9). See tests/test_blackwell_triton.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rotate_quantize import _narrowed, e4m3_value, power_of_two


@triton.jit
def decoded_codes(codes, ROWS: tl.constexpr, HALF: tl.constexpr):
    """(ROWS, HALF) uint8 -> fp32 (ROWS, 2 * HALF), the low nibble first."""
    code = tl.reshape(tl.join(codes & 15, codes >> 4), (ROWS, 2 * HALF)).to(tl.int32)
    low = (code & 7).to(tl.float32)
    magnitude = tl.where(low < 4.0, low * 0.5, tl.where(low < 6.0, low - 2.0, low * 2.0 - 8.0))
    return tl.where(code > 7, -magnitude, magnitude)


@triton.jit
def decoded_scales(scales, GROUP: tl.constexpr):
    """E4M3 numbers (GROUP 16) or E8M0 bytes (32) -> fp32."""
    byte = scales.to(tl.uint8, bitcast=True).to(tl.int32)
    if GROUP == 16:
        return tl.where(byte == 0x7F, float("nan"), e4m3_value(byte))
    else:
        return tl.where(byte == 0xFF, float("nan"), power_of_two(byte))


@triton.jit
def _values(codes, scales, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """e2m1 * block_scale, fp32 (ROWS, BLOCK_K)."""
    code = tl.reshape(decoded_codes(codes, ROWS, BLOCK_K // 2), (ROWS, BLOCK_K // GROUP, GROUP))
    return tl.reshape(code * decoded_scales(scales, GROUP)[:, :, None], (ROWS, BLOCK_K))


@triton.jit
def _tile_scales(desc, first_row, quad, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Whole tiles of the 128x4 layout -> scales (ROWS, GROUPS); ROWS a multiple of 128, `quad` of four groups first.

    In a tile of 512 bytes, byte a * 16 + b * 4 + c is the scale of row 32 b + a and group c.
    """
    tiles = desc.load([0, first_row // 128, quad, 0, 0])
    digits = tl.reshape(tiles, (ROWS // 128, GROUPS // 4, 32, 4, 4))
    return tl.reshape(tl.permute(digits, (0, 3, 2, 1, 4)), (ROWS, GROUPS))


@triton.jit
def _row_scales(words_ptr, rows, padded_rows, quad, quads, ROWS: tl.constexpr, GROUPS: tl.constexpr,
                GROUP: tl.constexpr):  # fmt: skip
    """Rows of tiles of the 128x4 layout, as int32 words of a row's four groups -> scales (ROWS, GROUPS)."""
    column = quad + tl.arange(0, GROUPS // 4)
    tile = (rows // 128).to(tl.int64)[:, None] * quads + column[None, :]
    word = tile * 128 + (rows % 32 * 4 + rows % 128 // 32)[:, None]
    inside = (rows < padded_rows)[:, None] & (column < quads)[None, :]
    words = tl.load(words_ptr + word, mask=inside, other=0)
    bytes = words[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]
    scales = tl.reshape(bytes.to(tl.uint8), (ROWS, GROUPS))
    if GROUP == 16:
        return scales.to(tl.float8e4nv, bitcast=True)
    else:
        return scales


@triton.jit
def _codes(ptr, rows, count, first, half, BLOCK_K: tl.constexpr):
    """Packed codes (rows, BLOCK_K / 2) from byte `first` of each row on; zero outside of (count, half)."""
    column = first + tl.arange(0, BLOCK_K // 2)
    inside = (rows < count)[:, None] & (column < half)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * half + column[None, :], mask=inside, other=0)


@triton.jit
def _write(
    acc, first, outputs, m, n, y_ptr, w_tensor_scale, x_tensor_scale_ptr, bias, TOKENS: tl.constexpr,
    PART: tl.constexpr, BY_ROW: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Finish and store acc (BLOCK_N, TOKENS) of the tokens from `first` on, PART at a time.

    On 10.x a thread takes an output's tokens out of tensor memory: PART of them are what it holds. w_tensor_scale and
    bias: fp32 (BLOCK_N, 1), or one number.
    """
    if TOKENS > PART:
        halves = tl.permute(tl.reshape(acc, (acc.shape[0], 2, TOKENS // 2)), (0, 2, 1))
        front, back = tl.split(halves)
        _write(
            front, first, outputs, m, n, y_ptr, w_tensor_scale, x_tensor_scale_ptr, bias, TOKENS // 2, PART, BY_ROW,
            INTERPRETED,
        )  # fmt: skip
        _write(
            back, first + TOKENS // 2, outputs, m, n, y_ptr, w_tensor_scale, x_tensor_scale_ptr, bias, TOKENS // 2,
            PART, BY_ROW, INTERPRETED,
        )  # fmt: skip
    else:
        tokens = first + tl.arange(0, TOKENS)
        if BY_ROW:
            x_tensor_scale = tl.load(x_tensor_scale_ptr + tokens, mask=tokens < m, other=0.0)[None, :]
        else:
            x_tensor_scale = tl.load(x_tensor_scale_ptr)
        y = acc * (x_tensor_scale * w_tensor_scale) + bias
        y = tl.trans(_narrowed(y, y_ptr.dtype.element_ty, INTERPRETED))
        inside = (tokens < m)[:, None] & (outputs < n)[None, :]
        tl.store(y_ptr + tokens.to(tl.int64)[:, None] * n + outputs[None, :], y, mask=inside)


@triton.jit
def matmul_scaled(
    w_ptr, w_scale, x_ptr, x_scale, y_ptr, w_tensor_scale_ptr, x_tensor_scale_ptr, bias_ptr, m, n, units, quads,
    padded_m, padded_n, steps, UNIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    PART: tl.constexpr, GROUP: tl.constexpr, W_TILES: tl.constexpr, X_TILES: tl.constexpr, BY_OUTPUT: tl.constexpr,
    BY_ROW: tl.constexpr, BIAS: tl.constexpr, DEFINITION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y (m, n) of rows of `units` times UNIT bytes of codes, UNIT 8 or 16, and `quads` columns of scale tiles.

    w_scale, x_scale: tensor descriptors where W_TILES, X_TILES, else pointers to int32, with padded_n, padded_m rows
    of scales. steps: BLOCK_Ks of K. BY_OUTPUT, BY_ROW: tensor scales of w, of x, are one each, not one for all. PART:
    tokens that are finished at a time.
    """
    first_m, first_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    tokens, outputs = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    groups: tl.constexpr = BLOCK_K // GROUP
    half = units * UNIT
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(steps):
        first, quad = step * (BLOCK_K // 2), step * (groups // 4)
        w = _codes(w_ptr, outputs, n, first, half, BLOCK_K)
        x = _codes(x_ptr, tokens, m, first, half, BLOCK_K)
        if W_TILES:
            ws = _tile_scales(w_scale, first_n, quad, BLOCK_N, groups)
        else:
            ws = _row_scales(w_scale, outputs, padded_n, quad, quads, BLOCK_N, groups, GROUP)
        if X_TILES:
            xs = _tile_scales(x_scale, first_m, quad, BLOCK_M, groups)
        else:
            xs = _row_scales(x_scale, tokens, padded_m, quad, quads, BLOCK_M, groups, GROUP)
        if DEFINITION:
            left, right = _values(w, ws, BLOCK_N, BLOCK_K, GROUP), _values(x, xs, BLOCK_M, BLOCK_K, GROUP)
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        else:
            acc = tl.dot_scaled(w, ws, "e2m1", tl.trans(x), xs, "e2m1", acc)
    if BY_OUTPUT:
        w_tensor_scale = tl.load(w_tensor_scale_ptr + outputs, mask=outputs < n, other=0.0)[:, None]
    else:
        w_tensor_scale = tl.load(w_tensor_scale_ptr)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + outputs, mask=outputs < n, other=0.0)[:, None]
    _write(
        acc, first_m, outputs, m, n, y_ptr, w_tensor_scale, x_tensor_scale_ptr, bias, BLOCK_M, PART, BY_ROW,
        INTERPRETED,
    )  # fmt: skip
