"""PTX text that makes tensor-core operands of fragments (weight_layout.py): bits are placed, then multiplied.

Sixteen codes of a row in two words become eight registers of two neighbours e2m1 * 2^-126 (bf16; fp16: 2^-14) with 16
instructions, and eight multiplications by the block scale make e2m1 * block_scale * 2^-exponent of them, exactly. The
names t, u, c0 and c1 are scratch registers, .b32, of whoever uses the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..formats import NVFP4, FP4Format
from ..weight_layout import MERGE, PAIR, ROTATIONS

_MAGNITUDES, _SIGNS = 0x01C001C0, 0x80008000
_LONGEST_SHIFT = 6  # left, by which no bit of a pair comes from the other half


def pairs(first: str, second: str, out: Sequence[str], half: bool) -> list[str]:
    """Two words of a row -> its eight pairs in order, as bf16 times 2^126 (fp16: 2^14)."""
    lines = [f"lop3.b32 c0, {first}, {second}, {MERGE}, 0xE4;"]  # the first word where MERGE has a bit
    for j, by in enumerate(ROTATIONS):
        source = first if j < 3 else second if j < 6 else "c0"
        if by:
            lines.append(_left(source, by))
            source = "t"
        lines += _pair_of(source, out[j], half)
    return lines


def _left(source: str, by: int) -> str:
    if by <= _LONGEST_SHIFT:
        return f"shl.b32 t, {source}, {by};"
    return f"shf.l.wrap.b32 t, {source}, {source}, {by};"


def _pair_of(source: str, out: str, half: bool) -> list[str]:
    if not half:
        return [f"and.b32 {out}, {source}, {PAIR};"]
    return [
        f"and.b32 u, {source}, {_MAGNITUDES};",
        "shl.b32 u, u, 3;",
        f"lop3.b32 {out}, {source}, {_SIGNS}, u, 0xEA;",  # source & signs | u
    ]


def scale(word: str, byte: int, out: str, fmt: FP4Format, half: bool) -> list[str]:
    """Byte 0..3 of a word of stored scales -> the factor of `pairs`, twice in a register.

    fp16 and MXFP4: byte << 7, which for fp16 is NVFP4's alone.
    """
    assert not (half and fmt != NVFP4)
    lines = [f"prmt.b32 t, {word}, 0, {0x4040 + 0x101 * byte};"]
    if fmt == NVFP4 and not half:
        return [*lines, f"mad.lo.u32 {out}, t, 16, 0x70007000;"]
    return [*lines, f"shl.b32 {out}, t, 7;"]


def values(first: str, second: str, by: str, out: Sequence[str], half: bool) -> list[str]:
    """Two words of a row and the factor of `scale` -> eight registers of e2m1 * block_scale * 2^-exponent."""
    kind = "f16x2" if half else "bf16x2"
    # A multiplication of bf16 alone came with sm_90; adding -0 changes nothing.
    return [
        *pairs(first, second, out, half),
        *[f"fma.rn.{kind} {register}, {register}, {by}, negative_zero;" for register in out],
    ]
