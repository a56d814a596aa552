"""Fragments of weights (weight_layout.py) to 16-bit values by rows, for the library's matrix product.

| codes, scales | int32 (tiles, blocks, 32, 4) and (tiles, chunks, lanes, 2): a slice of whole tiles of 16 rows        |
| out           | (16 * tiles, 64 * blocks) bf16 or fp16 (NVFP4 alone): e2m1 * block_scale * 2^-exponent, exact, in    |
|               | the order of the file; as int32, two values each                                                     |
| moves         | 2.5625 bytes a value (NVFP4)                                                                         |
| runs on       | capability 8.0 or more                                                                               |
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PAIRS = gl.constexpr((gl.int32,) * 8)


def store_layout(rows: int) -> gl.DistributedLinearLayout:
    """(rows / 16, 32, 2, 8): where the pairs are in four warps, those of a row in neighbouring registers."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0]]
    registers += [[4 << i, 0, 0, 0] for i in range((rows // 64).bit_length() - 1)]
    lanes = [[0, 1 << i, 0, 0] for i in range(5)]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0, 0], [2, 0, 0, 0]], [], [rows // 16, 32, 2, 8])


@gluon.jit(do_not_specialize=["tiles", "blocks", "chunks"])
def decode_fragments(
    codes_ptr, scales_ptr, out_ptr, tiles, blocks, chunks, LANES: gl.constexpr, CODES: gl.constexpr, ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr, ROWS: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Programs (blocks, tiles * 16 / ROWS), a block of ROWS rows. CODES, ASM: matmul_operand.py. P: store_layout."""
    T: gl.constexpr = ROWS // 16
    block = gl.program_id(0)
    tile = gl.program_id(1) * T + gl.arange(0, T, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    words = gl.load(codes_ptr + ((tile * blocks + block) * 128 + lane * 4 + word), mask=tile < tiles, other=0)
    first, second = words.reshape([T, 32, 2, 2]).split()
    L: gl.constexpr = first.type.layout
    tile = gl.program_id(1) * T + gl.arange(0, T, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    at = ((tile * chunks + block // 4) * LANES + lane // (32 // LANES)) * 2 + block % 4 // 2
    scale = gl.load(scales_ptr + (at + half * 0), mask=tile < tiles, other=0) >> (block % 2 * 16)
    p0, p1, p2, p3, p4, p5, p6, p7 = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [first, second, scale], dtype=_PAIRS, is_pure=True, pack=2
    )
    low = gl.join(gl.join(p0, p2), gl.join(p1, p3))  # (tile, lane, row / 8, t, h)
    high = gl.join(gl.join(p4, p6), gl.join(p5, p7))
    pairs = gl.join(low, high).permute((0, 1, 2, 5, 3, 4)).reshape([T, 32, 2, 8])
    pairs = gl.convert_layout(pairs, P)
    tile = gl.arange(0, T, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, P))))[:, None, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, P))))[None, :, None, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, P))))[None, None, :, None]
    i = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, P))))[None, None, None, :]
    row = (gl.program_id(1) * T + tile) * 16 + half * 8 + lane // 4
    gl.store(out_ptr + (row.to(gl.int64) * (blocks * 32) + block * 32 + lane % 4 * 8 + i), pairs, mask=row < tiles * 16)
