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


def repair(
    size: int, half: bool, z: Sequence[str], a: str, offset: str, x: str, matrix: str, at: str = ""
) -> list[str]:
    """Values of a block of `size` that NaN or Inf of a neighbouring block has reached (0 * Inf is NaN): made again.

    The product multiplies a unit of values by several blocks of the matrix at once. Where the amax `a` of neighbours
    z is not finite, they are summed again from their own block alone; `a` stays NaN only if that block is not finite.
    offset: of z in the tile, in steps of its count; x: address of the tile; matrix: of fp32 (size, size); at: ends the
    labels of one of several such texts.
    """
    load, count = "cvt.f32.f16 h, xe;" if half else "mov.b32 h, {zero, xe};", len(z)
    lines = [
        f"setp.lt.f32 fin, {a}, {constant(_INFINITY)};",
        f"@fin bra CLEAN{at};",
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
        *[f"mov.f32 {value}, {constant(0)};" for value in z],
        f"AGAIN{at}:",
        '.pragma "nounroll";',
        "ld.global.b16 xe, [xa];",
        load,
        f"abs.f32 {a}, h;",
        f"setp.lt.and.f32 fin, {a}, {constant(_INFINITY)}, fin;",
    ]
    for i in range(0, count, 4):
        lines.append(f"ld.global.v4.f32 {{x0, x1, x2, x3}}, [ma+{4 * i}];")
        lines += [f"fma.rn.f32 {z[i + j]}, h, x{j}, {z[i + j]};" for j in range(4)]
    return [
        *lines,
        "add.s64 xa, xa, 2;",
        f"add.s64 ma, ma, {4 * size};",
        "sub.u32 u, u, 1;",
        "setp.ne.u32 again, u, 0;",
        f"@again bra AGAIN{at};",
        *amax(z, a),
        f"selp.f32 {a}, {a}, {constant(_NAN)}, fin;",
        f"CLEAN{at}:",
    ]


def exact_amax(size: int, half: bool, z: Sequence[str], offset: str, x: str, matrix: str) -> list[str]:
    """The amax `a` of neighbours z again for lanes with `near`, of a matrix that the product had but two pieces of.

    The value that is the largest is summed again, in fp32, from its block of x and its column of the matrix. All lanes
    of a warp run this, and help one another: each multiplies every 32nd value of the block. Operands as for `repair`.
    """
    lines = ["mov.u32 u, 0;"]
    for i, value in enumerate(z):
        lines += [f"abs.f32 h, {value};", "setp.eq.f32 again, h, a;", f"@again mov.u32 u, {i};"]
    lines += [
        f"mad.lo.u32 place, {offset}, {len(z)}, u;",
        "vote.sync.ballot.b32 left, near, 0xFFFFFFFF;",
        "mov.u32 lane, %laneid;",
        f"setp.lt.u32 fin, lane, {size};",
        "mov.b16 zero, 0;",
        "MORE:",
        "setp.eq.u32 again, left, 0;",
        "@again bra DONE;",
        "brev.b32 u, left;",
        "clz.b32 u, u;",
        "setp.eq.u32 pos, u, lane;",
        "shfl.sync.idx.b32 v, place, u, 0x1F, 0xFFFFFFFF;",
        f"and.b32 u, v, {-size};",
        "add.u32 u, u, lane;",
        "mul.wide.u32 xa, u, 2;",
        f"add.s64 xa, xa, {x};",
        f"and.b32 u, v, {size - 1};",
        f"mad.lo.u32 u, lane, {size}, u;",
        "mul.wide.u32 ma, u, 4;",
        f"add.s64 ma, ma, {matrix};",
        f"mov.f32 d, {constant(0)};",
    ]
    for step in range(max(1, size // 32)):
        lines += [
            f"@fin ld.global.b16 xe, [xa+{64 * step}];",
            f"@fin ld.global.f32 n, [ma+{128 * size * step}];",
            "cvt.f32.f16 h, xe;" if half else "mov.b32 h, {zero, xe};",
            "@fin fma.rn.f32 d, h, n, d;",
        ]
    for lanes in (16, 8, 4, 2, 1):
        lines += [shuffle("h", "d", lanes), "add.rn.f32 d, d, h;"]
    return [
        *lines,
        "abs.f32 d, d;",
        "@pos mov.f32 a, d;",
        "sub.u32 u, left, 1;",
        "and.b32 left, left, u;",
        "bra MORE;",
        "DONE:",
    ]


_NEAR = 24
"""In units of the last place: how far from a tie of E4M3 the scale of two pieces is trusted. They make an entry to
2^-18.6 of it on the average. Of 21 million groups, 14 in a million have another byte with two pieces; with those made
again that are as near as this, 1.6 in a million."""


def near_tie(exact: Sequence[str]) -> list[str]:
    """From a scale `t` and its `byte`: `near`, where it is next to a tie of E4M3; warps that have one run `exact`.

    Normal scales tie where the 20 bits that E4M3 drops are 0x80000, others half way between multiples of 2^-9.
    """
    return [
        "mov.b32 v, t;",
        f"add.u32 v, v, {(_NEAR - 0x80000) % 2**32};",
        "and.b32 v, v, 0xFFFFF;",
        f"setp.lt.u32 near, v, {2 * _NEAR};",
        "setp.lt.or.u32 again, byte, 9, near;",
        "vote.sync.any.pred again, again, 0xFFFFFFFF;",
        "@!again bra SURE;",
        f"mul.rn.f32 h, t, {constant(512.0)};",
        "cvt.rmi.f32.f32 d, h;",
        "sub.rn.f32 h, h, d;",
        f"sub.rn.f32 h, h, {constant(0.5)};",
        "abs.f32 h, h;",
        f"setp.lt.f32 again, h, {constant(8 * _NEAR * 2.0**-23)};",
        f"setp.lt.f32 pos, t, {constant(2.0**-6)};",
        "@pos mov.pred near, again;",
        f"setp.lt.and.f32 near, a, {constant(_INFINITY)}, near;",
        *exact,
        "SURE:",
    ]


def nvfp4_scale(
    unusual: Sequence[str], amax_factor: str, encode: str, divisor: str, usual: str, repaired: Sequence[str] = (),
    exact: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """From the amax `a`: `byte`, `s` its value, and `r`, half the reciprocal that values are multiplied by.

    unusual: what a group that takes the branch does with r and `pos` at its end: `clamp` its values, or `FLAG` it.
    repaired: `repair` of values whose amax is not finite, in the branch. exact: `exact_amax` of scales next to a tie.
    amax_factor: fp32(1/6) times the factor that the values still lack. divisor: twice the tensor scale, over
    that factor, so that r = 1 / (s * divisor). usual: 0x76, or 0 to send every group the long way.

    Usual groups have a normal scale under 448: then 6 * s is near amax, no value exceeds 7, and s * divisor is far
    from the ends of fp32, where one Newton step after the approximate reciprocal rounds as IEEE division does. Scales
    that are zero, subnormal, saturated or NaN take the branch: exact reciprocal, values clamped or set to zero.
    """
    scale = [
        f"mul.rn.f32 t, a, {amax_factor};",
        f"mul.rn.f32 t, {encode}, t;",
        f"cvt.rn.satfinite.e4m3x2.f32 e, {constant(0)}, t;",
        "cvt.u32.u16 byte, e;",
    ]
    return [
        *scale,
        *(near_tie([*exact, *scale]) if exact else []),
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
        *([*repaired, *scale] if repaired else []),
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
        *unusual,
        "USUAL:",
    ]


def mxfp4_scale(unusual: Sequence[str], rule: str, factor: str) -> list[str]:
    """From the amax `a`: `byte`, `s` = 2^(byte - 127), and `r` = factor / (2 * s), exact. unusual: as above.

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
        *unusual,
        "USUAL:",
    ]


FLAG = ("neg.f32 r, r;",)
"""Leaves to others what is to be done: r is negative, and -0 where `pos` is false."""


def clamp(z: Sequence[str], r: str = "r") -> list[str]:
    """Values to +-6.5 scales, whose code is that of 6; to zero where `pos` is false."""
    lines = [
        f"rcp.approx.f32 t, {r};",
        f"mul.f32 t, t, {constant(3.25)};",
        "neg.f32 n, t;",
        f"selp.f32 t, t, {constant(0)}, pos;",
        f"selp.f32 n, n, {constant(0)}, pos;",
    ]
    return lines + [line for value in z for line in (f"min.f32 {value}, {value}, t;", f"max.f32 {value}, {value}, n;")]


def _magnitude(value: str, saturate: bool, r: str) -> list[str]:
    """`u` = 0x4B000000 + the code's three low bits, of a value times r."""
    lines = [
        f"abs.f32 h, {value};",
        f"mul.rn.f32 h, h, {r};",
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


def codes(z: Sequence[str], out: str, saturate: bool = False, r: str = "r") -> list[str]:
    """8 values -> 32 bits of codes, the first value in the lowest nibble.

    A funnel shift puts the sign of the value before under a magnitude, a multiplication moves both to their place, and
    what the constant 0x4B000000 leaves is taken off at the end. saturate: where values may exceed 7 scales.
    """
    lines = [*_magnitude(z[0], saturate, r), f"mov.b32 {out}, u;"]
    for i in range(1, 8):
        lines += [
            *_magnitude(z[i], saturate, r),
            f"mov.b32 v, {z[i - 1]};",
            "shf.l.wrap.b32 u, v, u, 1;",
            f"mad.lo.u32 {out}, u, {2 ** (4 * i - 1)}, {out};",
        ]
    return [
        *lines,
        f"sub.u32 {out}, {out}, {0x4B000000 * 0x11111111 % 2**32};",
        f"mov.b32 v, {z[7]};",
        "and.b32 v, v, 0x80000000;",
        f"xor.b32 {out}, {out}, v;",
    ]


def exchange(first: str, second: str, out: str) -> list[str]:
    """Two lanes hold halves of two rows each; the even lane finishes the first row, the `odd` one the second.

    first, second: this lane's half of either row; out: the other lane's half of the row that this one finishes.
    """
    return [f"selp.b32 {out}, {first}, {second}, odd;", shuffle(out, out, 1)]


def shuffle(out: str, value: str, lanes: int) -> str:
    """A value from the lane whose number differs in one bit."""
    return f"shfl.sync.bfly.b32 {out}, {value}, {lanes}, 0x1F, 0xFFFFFFFF;"


def values(out: Sequence[str], half: bool, saturate: bool = False) -> list[str]:
    """Values -> 32-bit words, each two numbers e2m1 * s of bf16 (or fp16), exact.

    A number h = |v| / 2 is rounded to a multiple of a power of two by adding 2^23 and a half times that, and taking it
    off again: to one bit after its first, but of a quarter at least. The products by 2s, two at once, are exact.
    """
    kind = "f16x2" if half else "bf16x2"
    three = 0x42004200 if half else 0x40404040
    lines = ["add.rn.f32 t, s, s;", f"cvt.rn.{kind}.f32 sp, t, t;"]
    for pair, word in enumerate(out):
        for k in range(2):
            lines += [
                f"abs.f32 h, z{2 * pair + k};",
                "mul.rn.f32 h, h, r;",
                "mov.b32 u, h;",
                f"and.b32 u, u, {_INFINITY};",
                f"add.s32 u, u, {0x0B400000};",  # from 2^e to 1.5 * 2^(e + 22)
                f"max.s32 u, u, {0x4A400000};",
                "mov.b32 x0, u;",
                "add.rn.f32 h, h, x0;",
                f"sub.rn.f32 y{k}, h, x0;",
            ]
        lines.append(f"cvt.rn.{kind}.f32 {word}, y1, y0;")
        lines += [f"mov.b32 v, {three};", f"min.{kind} {word}, {word}, v;"] if saturate else []
        lines += [
            f"mul.rn.{kind} {word}, {word}, sp;",
            f"mov.b32 u, z{2 * pair};",
            f"mov.b32 v, z{2 * pair + 1};",
            "prmt.b32 v, u, v, 0x7632;",
            "and.b32 v, v, 0x80008000;",
            f"or.b32 {word}, {word}, v;",
        ]
    return lines


def block(lines: Sequence[str], z: Sequence[str] = ()) -> str:
    """Lines as one asm text with its registers; z: operands to copy into z0..z15 first."""
    registers = [
        ".reg .pred fin, pos, usual, again, odd, near;",
        ".reg .f32 t, s, d, r, n, h, a, x<4>, y<2>, z<16>, a<2>, r<2>;",
        ".reg .b16 e, eh, el, xe, zero;",
        ".reg .b32 u, v, byte, sp, w<8>, place, left, lane;",
        ".reg .b64 xa, ma;",
    ]
    moves = [f"mov.f32 z{i}, {operand};" for i, operand in enumerate(z)]
    return "\n".join(["{", *registers, *moves, *lines, "}"])
