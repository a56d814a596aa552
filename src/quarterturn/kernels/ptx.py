"""PTX text that quantizes one group of values held by one thread.

A thread of the Hopper kernel holds 16 (or 8) neighbouring values `z0, z1, ...` of a row. The text here finds their
amax, makes the block scale, and rounds them to E2M1; it is put together per configuration and given to
`inline_asm_elementwise`. What is written this way is what the compiler does not find from Triton's operations:
three-way minima, funnel shifts, multiply-add packing, and branches that only unusual groups take. Every step is the
fp32 operation of the specification, in its order; the portable twins in rotate_quantize.py compute the same bits.

Rounding |v| to E2M1, to nearest with ties to even, is three lines and a minimum. With h = |v| / 2 the code is the
whole number nearest to min(4h, 2h + 2, h + 4); adding each line to 2^23 rounds it, ties to even, in one operation each,
and the least of the three sums holds the code in its low bits. All three offsets are even, so ties stay right.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..formats import E8M0_THRESHOLDS

_INFINITY, _NAN, _MAX = 0x7F800000, 0x7FFFFFFF, 0x7F7FFFFF
_ROUND = 2.0**23
_SIXTH = 0x3E2AAAAB


def constant(value: float | int) -> str:
    """A number as PTX writes fp32 constants: its bits, given as such (int) or as a number (float)."""
    bits = value if isinstance(value, int) else struct.unpack("<I", struct.pack("<f", value))[0]
    return f"0f{bits:08X}"


def amax(z: Sequence[str], out: str) -> list[str]:
    """The largest magnitude of values; NaN where one is NaN. Four chains, so that latencies overlap."""
    lines = [f"abs.f32 x{i}, {z[i]};" for i in range(4)]
    for i in range(4, len(z)):
        lines += [f"abs.f32 h, {z[i]};", f"max.NaN.f32 x{i % 4}, x{i % 4}, h;"]
    return [*lines, "max.NaN.f32 x0, x0, x1;", "max.NaN.f32 x2, x2, x3;", f"max.NaN.f32 {out}, x0, x2;"]


def repair(size: int, half: bool, count: int, offset: str, x: str, matrix: str) -> list[str]:
    """Values of a block of `size` that NaN or Inf of a neighbouring block has reached (0 * Inf is NaN): made again.

    The product multiplies 64 values by several blocks of the matrix at once. Where its result `a` (the amax) is not
    finite, the values are summed again from their own block alone; `a` stays NaN only if that block is not finite.
    offset: of the values in the tile, in steps of `count`; x: address of the tile; matrix: of fp32 (size, size).
    """
    load = "cvt.f32.f16 h, xe;" if half else "mov.b32 h, {zero, xe};"
    lines = [
        f"setp.lt.f32 fin, a, {constant(_INFINITY)};",
        "@fin bra CLEAN;",
        f"mul.wide.s32 xa, {offset}, {2 * count};",
        f"and.b64 xa, xa, {-2 * size};",
        f"add.s64 xa, xa, {x};",
        f"mul.lo.u32 u, {offset}, {count};",
        f"and.b32 u, u, {size - 1};",
        "mul.wide.u32 ma, u, 4;",
        f"add.s64 ma, ma, {matrix};",
        f"mov.u32 u, {size};",
        "mov.b16 zero, 0;",
        "setp.eq.u32 fin, 0, 0;",
        *[f"mov.f32 z{i}, {constant(0)};" for i in range(count)],
        "AGAIN:",
        '.pragma "nounroll";',
        "ld.global.b16 xe, [xa];",
        load,
        "abs.f32 a, h;",
        f"setp.lt.and.f32 fin, a, {constant(_INFINITY)}, fin;",
    ]
    for i in range(0, count, 4):
        lines.append(f"ld.global.v4.f32 {{x0, x1, x2, x3}}, [ma+{4 * i}];")
        lines += [f"fma.rn.f32 z{i + j}, h, x{j}, z{i + j};" for j in range(4)]
    return [
        *lines,
        "add.s64 xa, xa, 2;",
        f"add.s64 ma, ma, {4 * size};",
        "sub.u32 u, u, 1;",
        "setp.ne.u32 again, u, 0;",
        "@again bra AGAIN;",
        *amax([f"z{i}" for i in range(count)], "a"),
        f"selp.f32 a, a, {constant(_NAN)}, fin;",
        "CLEAN:",
    ]


def nvfp4_scale(count: int, amax_factor: str, encode: str, divisor: str, usual: str) -> list[str]:
    """From the amax `a`: `byte`, and `r`, half the reciprocal that values are multiplied by.

    amax_factor: fp32(1/6) times the factor that the values still lack. divisor: twice the tensor scale, over
    that factor, so that r = 1 / (s * divisor). usual: 0x76, or 0 to send every group the long way.

    Usual groups have a normal scale under 448: then 6 * s is near amax, no value exceeds 7, and s * divisor is far
    from the ends of fp32, where one Newton step after the approximate reciprocal rounds as IEEE division does. Scales
    that are zero, subnormal, saturated or NaN take the branch: exact reciprocal, values clamped or set to zero.
    """
    return [
        f"mul.rn.f32 t, a, {amax_factor};",
        f"mul.rn.f32 t, {encode}, t;",
        f"cvt.rn.satfinite.e4m3x2.f32 e, {constant(0)}, t;",
        "cvt.u32.u16 byte, e;",
        "mad.lo.u32 u, byte, 1048576, 0x3C000000;",
        "mov.b32 s, u;",
        f"mul.rn.f32 d, s, {divisor};",
        "neg.f32 n, d;",
        "rcp.approx.ftz.f32 r, d;",
        f"fma.rn.f32 t, n, r, {constant(1.0)};",
        "fma.rn.f32 r, r, t, r;",
        "sub.u32 u, byte, 8;",
        f"setp.lt.u32 usual, u, {usual};",
        "@usual bra USUAL;",
        f"setp.lt.f32 fin, a, {constant(_INFINITY)};",
        "cvt.rn.f16x2.e4m3x2 u, e;",
        "mov.b32 {eh, el}, u;",
        "cvt.f32.f16 s, eh;",
        f"setp.gt.and.f32 pos, s, {constant(0)}, fin;",
        f"mul.rn.f32 d, s, {divisor};",
        "rcp.rn.f32 r, d;",
        f"min.f32 r, r, {constant(_MAX)};",
        f"selp.f32 r, r, {constant(0)}, pos;",
        "selp.b32 byte, byte, 0x7F, fin;",
        f"selp.f32 s, s, {constant(_NAN)}, fin;",
        *_clamp(count),
        "USUAL:",
    ]


def mxfp4_scale(count: int, rule: str, factor: str) -> list[str]:
    """From the amax `a`: `byte`, `s` = 2^(byte - 127), and `r` = factor / (2 * s), exact.

    The rule adds to the bits of amax what carries into its exponent from a threshold of the mantissa on.
    """
    return [
        f"mul.rn.f32 a, a, {factor};",
        "mov.b32 byte, a;",
        f"add.u32 byte, byte, {0x7FFFFF - E8M0_THRESHOLDS[rule]};",
        "shr.u32 byte, byte, 23;",
        "sub.u32 byte, byte, 2;",
        "sub.u32 u, 253, byte;",
        "shl.b32 u, u, 23;",
        "mov.b32 r, u;",
        f"mul.rn.f32 r, r, {factor};",
        "shl.b32 u, byte, 23;",
        "mov.b32 s, u;",
        "sub.u32 u, byte, 1;",
        "setp.lt.u32 usual, u, 250;",
        "@usual bra USUAL;",
        f"setp.lt.f32 fin, a, {constant(_INFINITY)};",
        f"setp.gt.and.f32 pos, a, {constant(0)}, fin;",
        "max.s32 byte, byte, 0;",
        "sub.u32 u, 253, byte;",
        "shl.b32 u, u, 23;",
        "mov.b32 r, u;",
        "shl.b32 u, byte, 23;",
        "max.u32 u, u, 0x400000;",  # 2^-127 is subnormal
        "mov.b32 s, u;",
        "setp.ge.u32 again, byte, 253;",  # so is the reciprocal of 2^126 and more, halved
        "sub.u32 u, byte, 253;",
        "shr.u32 u, 0x400000, u;",
        "@again mov.b32 r, u;",
        f"mul.rn.f32 r, r, {factor};",
        f"selp.f32 r, r, {constant(0)}, pos;",
        "selp.b32 byte, byte, 0xFF, fin;",
        f"selp.f32 s, s, {constant(_NAN)}, fin;",
        *_clamp(count),
        "USUAL:",
    ]


def _clamp(count: int) -> list[str]:
    """Values to +-6.5 scales, whose code is that of 6; to zero where `pos` is false."""
    lines = [
        "rcp.approx.f32 t, r;",
        f"mul.f32 t, t, {constant(3.25)};",
        "neg.f32 n, t;",
        f"selp.f32 t, t, {constant(0)}, pos;",
        f"selp.f32 n, n, {constant(0)}, pos;",
    ]
    return lines + [line for i in range(count) for line in (f"min.f32 z{i}, z{i}, t;", f"max.f32 z{i}, z{i}, n;")]


def _magnitude(value: str, saturate: bool) -> list[str]:
    """`u` = 0x4B000000 + the code's three low bits, of a value times r."""
    lines = [
        f"abs.f32 h, {value};",
        "mul.rn.f32 h, h, r;",
        f"fma.rn.f32 x0, h, {constant(4.0)}, {constant(_ROUND)};",
        f"fma.rn.f32 x1, h, {constant(2.0)}, {constant(_ROUND + 2)};",
        f"add.rn.f32 x2, h, {constant(_ROUND + 4)};",
        "mov.b32 u, x0;",
        "mov.b32 v, x1;",
        "min.s32 u, u, v;",
        "mov.b32 v, x2;",
        "min.s32 u, u, v;",
    ]
    return [*lines, f"min.s32 u, u, {0x4B000007};"] if saturate else lines


def codes(out: str, saturate: bool = False) -> list[str]:
    """16 values -> 64 bits of codes, the first value in the lowest nibble.

    A funnel shift puts the sign of the value before under a magnitude, a multiplication moves both to their place, and
    what the constant 0x4B000000 leaves is taken off at the end. saturate: where values may exceed 7 scales.
    """
    lines = []
    for word in range(2):
        first = 8 * word
        lines += [*_magnitude(f"z{first}", saturate), f"mov.b32 w{word}, u;"]
        for i in range(1, 8):
            lines += [
                *_magnitude(f"z{first + i}", saturate),
                f"mov.b32 v, z{first + i - 1};",
                "shf.l.wrap.b32 u, v, u, 1;",
                f"mad.lo.u32 w{word}, u, {2 ** (4 * i - 1)}, w{word};",
            ]
        lines += [
            f"sub.u32 w{word}, w{word}, {0x4B000000 * 0x11111111 % 2**32};",
            f"mov.b32 v, z{first + 7};",
            "and.b32 v, v, 0x80000000;",
            f"xor.b32 w{word}, w{word}, v;",
        ]
    return [*lines, f"mov.b64 {out}, {{w0, w1}};"]


def values(out: Sequence[str], half: bool, saturate: bool = False) -> list[str]:
    """Values -> 32-bit words, each two numbers e2m1 * s of bf16 (or fp16), exact.

    A code shifted to the top of an fp32 number's mantissa and exponent is its value times 2^-126, subnormal included.
    """
    kind = "f16x2" if half else "bf16x2"
    lines = []
    for pair in range(len(out)):
        for k in range(2):
            lines += [
                *_magnitude(f"z{2 * pair + k}", saturate),
                "shl.b32 u, u, 22;",
                f"mov.b32 v, z{2 * pair + k};",
                "and.b32 v, v, 0x80000000;",
                "or.b32 u, u, v;",
                "mov.b32 h, u;",
                f"mul.rn.f32 h, h, {constant(2.0**126)};",
                f"mul.rn.f32 y{k}, h, s;",
            ]
        lines.append(f"cvt.rn.{kind}.f32 {out[pair]}, y1, y0;")
    return lines


def block(lines: Sequence[str], z: Sequence[str] = ()) -> str:
    """Lines as one asm text with its registers; z: operands to copy into z0..z15 first."""
    registers = [
        ".reg .pred fin, pos, usual, again;",
        ".reg .f32 t, s, d, r, n, h, a, x<4>, y<2>, z<16>;",
        ".reg .b16 e, eh, el, xe, zero;",
        ".reg .b32 u, v, byte, w<8>;",
        ".reg .b64 xa, ma;",
    ]
    moves = [f"mov.f32 z{i}, {operand};" for i, operand in enumerate(z)]
    return "\n".join(["{", *registers, *moves, *lines, "}"])
