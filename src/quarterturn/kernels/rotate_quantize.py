"""Rotate + quantize in plain Triton: one source for sm_80 to sm_120, and for the interpreter on a CPU.

A program takes BLOCK_M rows by WIDTH values. x is read once, multiplied by the R x R matrix in pieces (bf16 products
are exact, sums are fp32; fp32 x is multiplied in float64), quantized group by group, and codes, scales and tensor
scales are written once, the scales row by row or straight into the 128x4 layout with its padding. On sm_100 and later
the hardware converts to E2M1; elsewhere the twin below computes the same bits. Launch it with enable_fp_fusion=False:
no product may be fused into a sum.

| x        | (M, K) bf16, fp16 or fp32, rows any number of elements apart                                       |
| matrix   | (P, R, R) pieces of x's dtype, fp64 for fp32 x; R = 16, 32, 64, 128, or no transform               |
| output   | int32 (M, K/8) of eight codes and uint8 scales; or (M, K) values; or (M, K) rotated                |
| moves    | K * (2 + 1/2 + 1/group) bytes a row for bf16 to codes; the matrix once a program                   |
| does not | check arguments, allocate, take other R                                                            |
| see      | docs/numerics.md and reference.py for the numbers, tests/test_gpu_triton*.py for the tests         |
"""

from __future__ import annotations

import triton
import triton.language as tl

INV6 = tl.constexpr(0.16666667163372040)
_CONVERT = tl.constexpr(
    "{\n.reg .b8 b0, b1, b2, b3;\n"
    + "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 * i + 2}, ${2 * i + 1};\n" for i in range(4))
    + "mov.b32 $0, {b0, b1, b2, b3};\n}"
)
_CONVERT_CONSTRAINTS = tl.constexpr("=r" + ",f" * 8)


@triton.jit
def e2m1_magnitude(v):
    """|v| fp32 -> the code's three low bits, int32: nearest, ties to even, saturating; NaN gives 7.

    The code is the whole number nearest to min(2v, v + 2, v / 2 + 4), and a sum with 2^23 rounds to whole numbers.
    """
    first = (v * 2.0 + 8388608.0).to(tl.int32, bitcast=True)
    second = (v + 8388610.0).to(tl.int32, bitcast=True)
    third = (v * 0.5 + 8388612.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(first, second), tl.minimum(third, 0x4B000007)) - 0x4B000000


@triton.jit
def e4m3_byte(t):
    """t >= 0 fp32 -> E4M3 byte, int32: nearest, ties to even, at most 448."""
    bits = tl.minimum(t.to(tl.int32, bitcast=True), 0x43E00000)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (tl.minimum(t, 1.0) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    return tl.where(bits < 0x3C800000, subnormal, normal)


@triton.jit
def e4m3_value(byte):
    """E4M3 byte under 0x7F -> fp32."""
    normal = ((byte << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) as fp32, for exponent 0..254; 2^-127 is subnormal."""
    return tl.maximum(exponent << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def _widened(x, INTERPRETED: tl.constexpr):
    """x in fp32. The interpreter's own cast of bf16 loses subnormal numbers."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _narrowed(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 x in dtype, to nearest. The interpreter's own cast to bf16 cuts off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _magnitude_bits(z):
    return z.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _row_amax(z, BLOCK_M: tl.constexpr):
    """The amax of each row of z (BLOCK_M, ...), as bits: NaN and Inf are above all numbers."""
    return tl.max(tl.reshape(_magnitude_bits(z), (BLOCK_M, z.shape[1] * z.shape[2])), 1)


@triton.jit
def _turned(
    x_ptr, x_stride, pieces_ptr, rows, m, first, k, factor,
    SIZE: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """z (BLOCK_M, WIDTH / GROUP, GROUP), fp32, of rows and the columns from `first` on; zero outside of x."""
    cols = first + tl.arange(0, WIDTH)
    inside = (rows < m)[:, None] & (cols < k)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=inside, other=0.0)
    if SIZE == 0:
        z = _widened(x, INTERPRETED)
    else:
        blocks: tl.constexpr = BLOCK_M * WIDTH // SIZE
        rest = tl.reshape(x, (blocks, SIZE))
        i = tl.arange(0, SIZE)
        offsets = i[:, None] * SIZE + i[None, :]
        if x_ptr.dtype.element_ty == tl.float32:
            # No pieces of fp32 span its exponents; float64 does, and its rounding is the specification's.
            sums = tl.dot(rest.to(tl.float64), tl.load(pieces_ptr + offsets), out_dtype=tl.float64)
            z = (sums * factor).to(tl.float32)
        else:
            z = tl.zeros((blocks, SIZE), tl.float32)
            for q in tl.static_range(PIECES):
                piece = tl.load(pieces_ptr + q * SIZE * SIZE + offsets)
                if INTERPRETED:  # whose product of bf16 multiplies their bits
                    z = tl.dot(_widened(rest, True), _widened(piece, True), z, input_precision="ieee")
                else:
                    z = tl.dot(rest, piece, z)
            z = z * factor
    return tl.reshape(z, (BLOCK_M, WIDTH // GROUP, GROUP))


@triton.jit
def _scaled(z, encode, tensor_scale, GROUP: tl.constexpr, RULE_ADD: tl.constexpr):
    """z (rows, groups, GROUP) -> values to round, scale bytes int32 and decoded scales (rows, groups)."""
    bits = tl.max(_magnitude_bits(z), 2)
    finite = bits < 0x7F800000
    if GROUP == 16:
        amax = bits.to(tl.float32, bitcast=True)
        byte = tl.where(finite, e4m3_byte(encode * (amax * INV6)), 0x7F)
        scale = e4m3_value(byte)
        alive = (byte > 0) & finite
        one = tl.full(scale.shape, 1.0, tl.float32)
        reciprocal = tl.minimum(tl.div_rn(one, tl.where(alive, scale * tensor_scale, 1.0)), 3.4028234663852886e38)
    else:
        byte = tl.maximum(((bits + RULE_ADD) >> 23) - 2, 0)
        alive = (bits > 0) & finite
        scale = power_of_two(byte)
        reciprocal = power_of_two(254 - byte)
        byte = tl.where(finite, byte, 0xFF)
    scaled = tl.where(alive[:, :, None], z * reciprocal[:, :, None], 0.0)
    return scaled, byte, tl.where(finite, scale, float("nan"))


@triton.jit
def _packed(scaled, BLOCK_M: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr):
    """Values to round, 8 * WORDS a row -> int32 words of eight codes (BLOCK_M, WORDS), the first in the low nibble."""
    if HARDWARE:
        even, odd = tl.split(tl.reshape(scaled, (BLOCK_M, WORDS, 2, 2, 2)))
        e0, e2 = tl.split(even)
        e1, e3 = tl.split(odd)
        v0, v4 = tl.split(e0)
        v1, v5 = tl.split(e1)
        v2, v6 = tl.split(e2)
        v3, v7 = tl.split(e3)
        return tl.inline_asm_elementwise(
            _CONVERT, _CONVERT_CONSTRAINTS, [v0, v1, v2, v3, v4, v5, v6, v7], dtype=tl.int32, is_pure=True, pack=1
        )
    values = tl.reshape(scaled, (BLOCK_M, WORDS, 8))
    sign = (values.to(tl.int32, bitcast=True) >> 28) & 8
    codes = e2m1_magnitude(tl.abs(values)) | sign
    return tl.sum(codes << (4 * tl.arange(0, 8))[None, None, :], 2)


@triton.jit
def _rounded(scaled):
    """Values to round -> the E2M1 values, with their signs."""
    code = e2m1_magnitude(tl.abs(scaled)).to(tl.float32)
    value = tl.where(code < 4.0, code * 0.5, tl.where(code < 6.0, code - 2.0, code * 2.0 - 8.0))
    return tl.where(scaled.to(tl.int32, bitcast=True) < 0, -value, value)


@triton.jit
def _write(
    z, rows, m, first, k, out_ptr, scale_ptr, padded_rows, padded_cols, encode, tensor_scale,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, OUTPUT: tl.constexpr, BLOCKED: tl.constexpr,
    RULE_ADD: tl.constexpr, HARDWARE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Quantize z and write what OUTPUT says of it. rows are int64."""
    cols = first + tl.arange(0, WIDTH)
    inside = (rows < m)[:, None] & (cols < k)[None, :]
    if OUTPUT == 2:
        turned = _narrowed(tl.reshape(z, (BLOCK_M, WIDTH)), out_ptr.dtype.element_ty, INTERPRETED)
        tl.store(out_ptr + rows[:, None] * k + cols[None, :], turned, mask=inside)
        return
    scaled, byte, scale = _scaled(z, encode, tensor_scale, GROUP, RULE_ADD)
    if OUTPUT == 1:
        values = tl.reshape(_rounded(scaled) * scale[:, :, None], (BLOCK_M, WIDTH))
        tl.store(
            out_ptr + rows[:, None] * k + cols[None, :],
            _narrowed(values, out_ptr.dtype.element_ty, INTERPRETED),
            mask=inside,
        )
        return
    WORDS: tl.constexpr = WIDTH // 8
    words = _packed(scaled, BLOCK_M, WORDS, HARDWARE)
    at = first // 8 + tl.arange(0, WORDS)
    row = rows[:, None]
    tl.store(out_ptr + row * (k // 8) + at[None, :], words, mask=(row < m) & (at * 8 < k)[None, :])
    group = (first // GROUP + tl.arange(0, WIDTH // GROUP))[None, :]
    if BLOCKED:
        tile = (row // 128 * (padded_cols // 4) + group // 4) * 512
        address = tile + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
        tl.store(scale_ptr + address, byte.to(tl.uint8), mask=(row < padded_rows) & (group < padded_cols))
    else:
        tl.store(scale_ptr + row * (k // GROUP) + group, byte.to(tl.uint8), mask=(row < m) & (group * GROUP < k))


@triton.jit
def rotate_quantize(
    x_ptr, x_stride, pieces_ptr, out_ptr, scale_ptr, tensor_scale_ptr, encode_ptr, m, k, padded_rows, padded_cols,
    factor, SIZE: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr, OUTPUT: tl.constexpr, BLOCKED: tl.constexpr, TOKEN: tl.constexpr, RULE_ADD: tl.constexpr,
    HARDWARE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """x (m, k), rows x_stride apart -> what OUTPUT says.

    pieces_ptr: (PIECES, SIZE, SIZE), whose sum is the matrix; factor: what their product lacks. SIZE 0: no transform.
    padded_rows, padded_cols: of the scales, for BLOCKED. RULE_ADD: what an E8M0 rule adds to the bits of an amax.
    TOKEN: a program holds whole rows, and goes over them twice, first for the amax of z that the encode scale is made
    of. Otherwise the second axis of the grid walks over the columns.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    if TOKEN:
        bits = tl.zeros((BLOCK_M,), tl.int32)
        first = 0
        while first < k:  # not `range`, whose bounds Triton's interpreter cannot take from arguments with NumPy 2.4
            z = _turned(
                x_ptr, x_stride, pieces_ptr, rows, m, first, k, factor, SIZE, PIECES, WIDTH, BLOCK_M, GROUP,
                INTERPRETED,
            )  # fmt: skip
            bits = tl.maximum(bits, _row_amax(z, BLOCK_M))
            first += WIDTH
        amax = bits.to(tl.float32, bitcast=True)
        encode = tl.div_rn(tl.full((BLOCK_M,), 2688.0, tl.float32), amax)
        encode = tl.where(_magnitude_bits(encode) < 0x7F800000, encode, 1.0)
        tensor_scale = tl.div_rn(tl.full((BLOCK_M,), 1.0, tl.float32), encode)
        tl.store(tensor_scale_ptr + rows, tensor_scale, mask=rows < m)
        first = 0
        while first < padded_cols * GROUP:
            z = _turned(
                x_ptr, x_stride, pieces_ptr, rows, m, first, k, factor, SIZE, PIECES, WIDTH, BLOCK_M, GROUP,
                INTERPRETED,
            )  # fmt: skip
            _write(
                z, rows, m, first, k, out_ptr, scale_ptr, padded_rows, padded_cols, encode[:, None],
                tensor_scale[:, None], WIDTH, BLOCK_M, GROUP, OUTPUT, BLOCKED, RULE_ADD, HARDWARE, INTERPRETED,
            )  # fmt: skip
            first += WIDTH
    else:
        encode = tl.load(encode_ptr)
        tensor_scale = tl.div_rn(tl.full((1, 1), 1.0, tl.float32), encode)
        if OUTPUT < 2:
            if tl.program_id(0) + tl.program_id(1) == 0:
                tl.store(tensor_scale_ptr + tl.arange(0, 1)[:, None], tensor_scale)
        first = tl.program_id(1) * WIDTH
        z = _turned(
            x_ptr, x_stride, pieces_ptr, rows, m, first, k, factor, SIZE, PIECES, WIDTH, BLOCK_M, GROUP,
            INTERPRETED,
        )  # fmt: skip
        _write(
            z, rows, m, first, k, out_ptr, scale_ptr, padded_rows, padded_cols, encode, tensor_scale,
            WIDTH, BLOCK_M, GROUP, OUTPUT, BLOCKED, RULE_ADD, HARDWARE, INTERPRETED,
        )  # fmt: skip
