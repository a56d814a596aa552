"""MXFP4 codes and scales to E4M3, exactly, for matrix units that multiply FP8; and the rows of which that is not so.

A value is e2m1 * 2^e; of a row, reference = (largest e) - 6 is taken out, which leaves e2m1 * 2^(e - reference) with
exponents up to 6. E4M3 holds these for exponents from -8 (0.5 * 2^-8 = 2^-9 is its smallest number, all multiples of
2^-9 below 2^-6 are numbers) to 6 (6 * 2^6 = 384, under 448): a row fits where the e of its groups that are not zero
span at most 14. A row that does not, or whose 2^reference is outside of 2^-60 to 2^60 (so that products of two scales
are normal numbers), is put on a list for kernels/matmul_left.py; what is written of it is of no use.

| codes        | int32 (M, WORDS) of eight codes each, even element low; WORDS = K / 8, a multiple of 4                |
| scales       | uint8 (M, K / 32), E8M0                                                                               |
| tensor_scale | fp32 (1)                                                                                              |
| out          | uint8 (M, K), E4M3: e2m1 * 2^(e - reference); NaN (0x7F) in groups of the scale NaN                   |
| row_scale    | fp32 (M): 2^reference * tensor_scale; 1 * tensor_scale for rows of zeros                              |
| left, count  | int32 (M, 2) and (1), zero before: the rows that do not fit, in any order, and the biased reference   |
|              | that matmul_left takes out of them                                                                    |
| moves        | 1.53 bytes a value; codes and scales are read twice, the second time from a cache                     |
| needs        | capability 8.9 or more (conversion to E4M3)                                                           |
"""

from __future__ import annotations

import triton
import triton.language as tl

SPAN, TOP = tl.constexpr(14), tl.constexpr(6)
"""Exponents that E4M3 has beside the largest, and the largest."""
LOWEST_REFERENCE, HIGHEST_REFERENCE = tl.constexpr(127 - 60), tl.constexpr(127 + 60)
HEADROOM = tl.constexpr(60)
"""Of rows that are left: their largest exponent is 60 above the reference, or less where that would be under 2^-60."""
E4M3_NAN, E8M0_NAN = tl.constexpr(0x7F), tl.constexpr(255)


@triton.jit
def e2m1(code):
    """Codes 0..15 as fp32."""
    placed = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)  # the value * 2^-126
    return placed * 8.507059173023462e37  # 2^126


@triton.jit
def power_or_nan(scale, reference):
    """2^(scale - reference) as fp32: 0 under 2^-126, at most 2^127, NaN for the scale NaN."""
    field = tl.minimum(tl.maximum(scale - reference + 127, 0), 254)
    return (tl.where(scale == E8M0_NAN, 0x7FC00000, field << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _words(codes_ptr, scales_ptr, word, WORDS: tl.constexpr):
    """Eight codes each, and the scale of their group; no codes and no NaN outside of the row."""
    inside = word < WORDS
    codes = tl.load(codes_ptr + word, mask=inside, other=0)
    return codes, tl.load(scales_ptr + word // 4, mask=inside, other=0).to(tl.int32), inside


@triton.jit
def to_e4m3(
    codes_ptr, scales_ptr, tensor_scale_ptr, out_ptr, row_scale_ptr, left_ptr, count_ptr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A program a row, BLOCK words at a time."""
    row = tl.program_id(0)
    codes_ptr += row.to(tl.int64) * WORDS
    scales_ptr += row.to(tl.int64) * (WORDS // 4)
    out_ptr += row.to(tl.int64) * (WORDS * 8)
    highest, lowest = tl.full((BLOCK,), -1, tl.int32), tl.full((BLOCK,), 256, tl.int32)
    for start in range(0, WORDS, BLOCK):
        codes, scale, _ = _words(codes_ptr, scales_ptr, start + tl.arange(0, BLOCK), WORDS)
        counts = ((codes & 0x77777777) != 0) & (scale != E8M0_NAN)
        highest = tl.maximum(highest, tl.where(counts, scale, -1))
        lowest = tl.minimum(lowest, tl.where(counts, scale, 256))
    top, bottom = tl.max(highest, 0), tl.min(lowest, 0)
    reference = tl.where(top < 0, 127, top - TOP)
    fits = (top < 0) | ((top - bottom <= SPAN) & (reference >= LOWEST_REFERENCE) & (reference <= HIGHEST_REFERENCE))
    for start in range(0, WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        codes, scale, inside = _words(codes_ptr, scales_ptr, word, WORDS)
        eighth = tl.arange(0, 8)
        power = power_or_nan(scale, reference)
        value = e2m1((codes[:, None] >> (4 * eighth)[None, :]) & 15) * power[:, None]
        byte = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        if INTERPRETED:  # whose casts know no NaN
            byte = tl.where((scale == E8M0_NAN)[:, None], E4M3_NAN, byte).to(tl.uint8)
        tl.store(out_ptr + (word * 8)[:, None] + eighth[None, :], byte, mask=inside[:, None])
    power = (tl.where(fits, reference, 127) << 23).to(tl.float32, bitcast=True)
    tl.store(row_scale_ptr + row, power * tl.load(tensor_scale_ptr))
    if not fits:
        place = tl.atomic_add(count_ptr, 1)
        taken = tl.minimum(tl.maximum(top - HEADROOM, LOWEST_REFERENCE), HIGHEST_REFERENCE + 7)
        tl.store(left_ptr + 2 * place, row)
        tl.store(left_ptr + 2 * place + 1, taken)
