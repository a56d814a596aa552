"""Fragments of weights (weight_layout.py) as the left operand of wgmma: decoded in registers by the lanes that loaded
them, for matmul_many.py and, without the operand's order, decode_fragments.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats import FP4Format
from . import fp4_decode, ring_ptx


def decode_asm(fmt: FP4Format, half: bool, natural: bool = False) -> tuple[str, str]:
    """Text and constraints, for two rows of a lane: two words of each and a word of scales -> their eight pairs.

    Output 2j+r is pair j of row r; inputs 16 and 17 are the first words of the rows, 18 and 19 the second ones, 20 the
    scale bytes of the rows. natural: the pairs that wgmma takes where x is in its natural order; inputs 22 and 24 are
    a lane's places to write to and to read from (ring_ptx.exchange).
    """
    lines = ["{", ".reg .b32 t, u, c0, c1, s, negative_zero, v<16>;", "mov.b32 negative_zero, 0x80008000;"]
    for r in range(2):
        lines += fp4_decode.scale("$20", r, "s", fmt, half)
        out = [f"v{2 * j + r}" if natural else f"${2 * j + r}" for j in range(8)]
        lines += fp4_decode.values(f"${16 + r}", f"${18 + r}", "s", out, half)
    if natural:
        lines += ring_ptx.exchange([f"v{i}" for i in range(16)], [f"${i}" for i in range(16)], "$22", "$24")
    return "\n".join([*lines, "}"]), "=&r," * 16 + ",".join("r" * (10 if natural else 6))


def fragment_layout(rows: int, words: int, num_warps: int) -> gl.DistributedLinearLayout:
    """How fragments (rows / 16, 32, words) lie in threads: as the rows of an accumulator do."""
    registers = [[0, 0, 1 << i] for i in range(_bits(words))]
    registers += [[num_warps << i, 0, 0] for i in range(_bits(rows // (16 * num_warps)))]
    lanes = [[0, 1 << i, 0] for i in range(5)]
    warps = [[1 << i, 0, 0] for i in range(_bits(num_warps))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows // 16, 32, words])


def pair_layout(rows: int, num_warps: int) -> gl.DistributedLinearLayout:
    """How the pairs of neighbours (rows, 32) of a block lie in threads as wgmma's left operand."""
    registers = [[8, 0], [0, 4], [0, 8], [0, 16]]
    registers += [[16 * num_warps << i, 0] for i in range(_bits(rows // (16 * num_warps)))]
    warps = [[16 << i, 0] for i in range(_bits(num_warps))]
    return gl.DistributedLinearLayout(
        registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [rows, 32]
    )  # fmt: skip


def _bits(power: int) -> int:
    return power.bit_length() - 1


_PAIRS = gl.constexpr((gl.int32,) * 8)
_TWO_BF16 = gl.constexpr((gl.bfloat16,) * 2)
_TWO_FP16 = gl.constexpr((gl.float16,) * 2)


@gluon.jit
def decode(
    words, scales, to, back, dtype: gl.constexpr, ROWS: gl.constexpr, OPERAND: gl.constexpr, PAIRS: gl.constexpr,
    NATURAL: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """words (ROWS/16, 32, 4) and scale bytes (ROWS/16, 32) of a block -> the left operand (ROWS, 64)."""
    first, second = words.reshape([ROWS // 16, 32, 2, 2]).split()
    s = gl.convert_layout(scales, gl.SliceLayout(2, first.type.layout), assert_trivial=True).expand_dims(2)
    s, _ = gl.broadcast(s, first)
    args = [first, second, s]
    if NATURAL:
        args = args + [to, back]
    # pair 2t+h of (tile of rows, lane, row / 8)
    p0, p1, p2, p3, p4, p5, p6, p7 = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, args, dtype=_PAIRS, is_pure=not NATURAL, pack=2
    )
    even = gl.join(gl.join(p0, p4), gl.join(p2, p6))
    odd = gl.join(gl.join(p1, p5), gl.join(p3, p7))
    pairs = gl.join(even, odd).reshape([ROWS // 16, 8, 4, 2, 2, 2, 2])  # tile, g, q, row / 8, t (two bits), h
    pairs = pairs.permute((0, 3, 1, 4, 5, 6, 2)).reshape([ROWS, 32])
    pairs = gl.convert_layout(pairs, PAIRS, assert_trivial=True)
    rows = pairs.reshape([ROWS // 16, 2, 8, 32]).permute((0, 2, 3, 1))
    upper, lower = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $3;", "=&r,=&r,r,r", [rows],
        dtype=_TWO_FP16 if dtype == gl.float16 else _TWO_BF16, is_pure=True, pack=2,
    )  # fmt: skip
    values = gl.join(upper, lower).permute((0, 4, 1, 2, 3)).reshape([ROWS, 64])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def places(words, base):
    """Bytes of shared memory that a lane writes its pairs to and reads others from where these change lanes: 2 KB a
    warp, a row in 128 bytes, of which piece i of 16 lies at i xor row % 8."""
    first, _ = words.reshape([words.shape[0], 32, 2, 2]).split()
    L: gl.constexpr = first.type.layout
    warp = base + gl.arange(0, words.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None] * 2048
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    to = warp + lane // 4 * 128 + ((lane % 4 * 2) ^ (lane // 4)) * 16
    back = warp + (lane % 8 + lane // 8 % 2 * 8) * 128 + ((lane // 16) ^ (lane % 8)) * 16
    to, _ = gl.broadcast(to, first)
    back, _ = gl.broadcast(back, first)
    return to, back
