"""y = x @ w^T for many tokens on Hopper GPUs (sm_90): w in 4 bits as the left operand of wgmma, decoded in registers.

A tile of y^T is ROWS of w by TOKENS of x. Programs stay and make one tile after the other, each over all of K. With
SPLIT > 1 groups of so many programs make the tiles that are left over then, one each, a part of K a program.

    one warp         copies x by TMA into a ring of shared memory, four stages of 64 values of K
    the other warps  load fragments of w a chunk of 256 values ahead of their use, decode a block of 64 while wgmma
                     multiplies the block before it, and finish: y = acc * (alpha * x_scale) + bias, one rounding

Neither waits for the other at the end of a tile: x and w of the next one are on their way. The sums of parts go to
memory, and each program of a group adds its share of them in the order of K (matmul_sums.meet), so that the same input
gives the same bits, run after run.
With INSIDE > 1 a program makes so many parts of a tile one after the other, each with sums of its own, and adds them in
the order of K too: the bits of a group of INSIDE programs.

The order of K inside a block of 64 is that of weight_layout.py: x comes in it ("ordered", kernels/order_tokens.py), or
NATURAL and the decoded weights change lanes to meet it, through shared memory of their warp (ring_ptx.py).

| x_desc     | (M, K up to 64) bf16 or fp16 (fp16: NVFP4 alone), 16-byte aligned, tiles (TOKENS, 64)              |
| y_desc, y  | (M, N) of x's dtype, contiguous; tiles (TOKENS, ROWS) where N is a multiple of 8, else unused      |
| codes      | int32 (N/16, blocks, 32, 4) of weight_layout.py, and its scales as int32 (N/16, chunks, lanes, 2)  |
| alpha      | fp32 (N): tensor scale of the row's output range, times 2^exponent of the fragments                |
| x_scale    | fp32 (1) or, X_BY_ROW, (M); bias fp32 (N)                                                          |
| parts      | fp32 (programs, ROWS * TOKENS); counts: int32 (groups, 2), zero before and after                   |
| sums       | fp32, in the order of K within a part                                                              |
| does not   | check arguments, allocate                                                                          |
| see        | docs/numerics.md, tests/test_matmul_many.py                                                        |
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import ring_ptx
from .matmul_operand import decode, places
from .matmul_sums import add, done, finish, leave, meet, stored


@gluon.jit
def _load(codes_ptr, scales_ptr, codes, scales, chunk, blocks, LANES: gl.constexpr, EVEN: gl.constexpr):
    """Fragments of a chunk: words of its four blocks, scale bytes of the first two and of the others."""
    s01, s23 = gl.load(scales_ptr + (scales + chunk * (2 * LANES))).split()
    at = codes_ptr + (codes + chunk * 512)
    c0 = gl.load(at)
    if EVEN:
        c1 = gl.load(at + 128)
        c2 = gl.load(at + 256)
        c3 = gl.load(at + 384)
    else:  # blocks behind the last are read as the last; x is zero there, and the padding of scales is finite
        c1 = gl.load(codes_ptr + (codes + gl.minimum(chunk * 4 + 1, blocks - 1) * 128))
        c2 = gl.load(codes_ptr + (codes + gl.minimum(chunk * 4 + 2, blocks - 1) * 128))
        c3 = gl.load(codes_ptr + (codes + gl.minimum(chunk * 4 + 3, blocks - 1) * 128))
    return c0, c1, c2, c3, s01, s23


@gluon.jit
def _count(tiles, each, more, SPLIT: gl.constexpr, INSIDE: gl.constexpr):
    """Pieces of work of this program, and those of them that are whole tiles, or parts inside of such."""
    full = (each + (gl.program_id(0) < more).to(gl.int32)) * INSIDE
    if SPLIT == 1:
        return full, full
    return full + (_left_over(each, more, SPLIT) < tiles).to(gl.int32), full


@gluon.jit
def _left_over(each, more, SPLIT: gl.constexpr):
    """The tile that this program's group makes."""
    return each * gl.num_programs(0) + more + gl.program_id(0) // SPLIT


@gluon.jit
def _piece(
    i, full, row_tiles, token_tiles, each, more, chunks, SPLIT: gl.constexpr, INSIDE: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Row tile and token tile of piece i of this program's work, its first chunk of K and the one behind its last."""
    tile = gl.program_id(0) + i // INSIDE * gl.num_programs(0)
    begin = i % INSIDE * chunks // INSIDE
    stop = (i % INSIDE + 1) * chunks // INSIDE
    if SPLIT > 1:
        rank = gl.program_id(0) % SPLIT
        tile = gl.where(i < full, tile, _left_over(each, more, SPLIT))
        begin = gl.where(i < full, begin, rank * chunks // SPLIT)
        stop = gl.where(i < full, stop, (rank + 1) * chunks // SPLIT)
    row, token = _at(tile, row_tiles, token_tiles, GROUP)
    return row, token, begin, stop


@gluon.jit
def _at(tile, row_tiles, token_tiles, GROUP: gl.constexpr):
    """Row tile and token tile of a tile.

    Tokens go fastest, in groups of GROUP tiles: programs that run together read the same weights, and x stays in L2.
    GROUP 1: there is but one token tile.
    """
    if GROUP == 1:
        return tile, tile * 0
    group = tile // (GROUP * row_tiles)
    inside = tile - group * (GROUP * row_tiles)
    across = gl.minimum(token_tiles - group * GROUP, GROUP)
    row = inside // across
    return row, group * GROUP + inside - row * across


@gluon.constexpr_function
def barriers_at(rows, tokens, natural):
    """The byte of shared memory behind the ring, what weights change lanes through, and a tile of y."""
    return y_at(rows, tokens, natural) + 2 * rows * tokens


@gluon.constexpr_function
def y_at(rows, tokens, natural):
    """Where the tile of y is put together."""
    return 512 * tokens + 128 * rows * natural


@gluon.jit
def _wait_for_earlier_kernels():
    """What comes before this may run while the kernel before this one ends (programmatic dependent launch)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _copy_x(
    x_desc, x_tiles, barriers, row_tiles, token_tiles, each, more, chunks, TOKENS: gl.constexpr, SPLIT: gl.constexpr,
    INSIDE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The warp that fills the ring."""
    count, full = _count(row_tiles * token_tiles, each, more, SPLIT, INSIDE)
    phase = 1
    _wait_for_earlier_kernels()
    for i in range(count):
        _, token, begin, stop = _piece(i, full, row_tiles, token_tiles, each, more, chunks, SPLIT, INSIDE, GROUP)
        for chunk in range(begin, stop):
            for j in gl.static_range(4):
                # At its first block the others say that they have read the last place, as at every fourth after it.
                mbarrier.wait(barriers.index(4 + j), phase ^ (j == 3))
                mbarrier.expect(barriers.index(j), TOKENS * 128)
                at = [token * TOKENS, chunk * 256 + j * 64]
                tma.async_copy_global_to_shared(x_desc, at, barriers.index(j), x_tiles.index(j))
            phase ^= 1


@gluon.jit
def _fragments(
    row, blocks, chunks, tiles16, ROWS: gl.constexpr, LANES: gl.constexpr, CODES: gl.constexpr, SCALES: gl.constexpr
):  # fmt: skip
    """Where a row tile's codes and scales of the first chunk are, in words."""
    tile16 = row * (ROWS // 16) + gl.arange(0, ROWS // 16, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    codes = gl.minimum(tile16, tiles16 - 1) * (blocks * 128) + (lane * 4 + word)
    tile16 = row * (ROWS // 16) + gl.arange(0, ROWS // 16, gl.SliceLayout(1, gl.SliceLayout(2, SCALES)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, SCALES)))[None, :, None]
    word = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, SCALES)))[None, None, :]
    scales = gl.minimum(tile16, tiles16 - 1) * (chunks * 2 * LANES) + (lane // (32 // LANES) * 2 + word)
    return codes, scales


@gluon.jit
def _multiply(
    y_desc, codes_ptr, scales_ptr, y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, parts_ptr, counts_ptr, x_tiles, y_tile,
    m, n, row_tiles, token_tiles, each, more, chunks, blocks, tiles16, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    SPLIT: gl.constexpr, INSIDE: gl.constexpr, GROUP: gl.constexpr, NATURAL: gl.constexpr, PATIENCE: gl.constexpr,
    EVEN: gl.constexpr, HAS_BIAS: gl.constexpr, X_BY_ROW: gl.constexpr, TMA_OUT: gl.constexpr, LANES: gl.constexpr,
    CODES: gl.constexpr, SCALES: gl.constexpr, PAIRS: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
    WAIT: gl.constexpr, LEAVE: gl.constexpr,
):  # fmt: skip
    """The warps that decode and multiply."""
    dtype: gl.constexpr = x_tiles.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    FULL: gl.constexpr = barriers_at(ROWS, TOKENS, NATURAL)
    EMPTY: gl.constexpr = FULL + 32
    count, full = _count(row_tiles * token_tiles, each, more, SPLIT, INSIDE)
    row, _, begin, _ = _piece(0, full, row_tiles, token_tiles, each, more, chunks, SPLIT, INSIDE, GROUP)
    codes, scales = _fragments(row, blocks, chunks, tiles16, ROWS, LANES, CODES, SCALES)
    c0, c1, c2, c3, s01, s23 = _load(codes_ptr, scales_ptr, codes, scales, begin, blocks, LANES, EVEN)
    to, back = places(c0, TOKENS * 512)
    a = decode(c0, s01, to, back, dtype, ROWS, OPERAND, PAIRS, NATURAL, ASM, CONSTRAINTS)
    a_before = a
    total = gl.full([ROWS, TOKENS], -0.0, gl.float32, ACC)  # to which any number is added exactly
    phase = 0
    for i in range(count):
        row, token, begin, stop = _piece(i, full, row_tiles, token_tiles, each, more, chunks, SPLIT, INSIDE, GROUP)
        next_row, _, next_begin, _ = _piece(
            gl.minimum(i + 1, count - 1), full, row_tiles, token_tiles, each, more, chunks, SPLIT, INSIDE, GROUP
        )  # fmt: skip
        next_codes, next_scales = _fragments(next_row, blocks, chunks, tiles16, ROWS, LANES, CODES, SCALES)
        acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
        for chunk in range(begin, stop):
            ends = chunk + 1 == stop
            codes = gl.where(ends, next_codes, codes)
            scales = gl.where(ends, next_scales, scales)
            following = gl.where(ends, next_begin, chunk + 1)
            n0, n1, n2, n3, t01, t23 = _load(codes_ptr, scales_ptr, codes, scales, following, blocks, LANES, EVEN)
            for j in gl.static_range(4):
                ring_ptx.run([FULL + 8 * j, phase], WAIT)
                acc = warpgroup_mma(a, x_tiles.index(j).permute((1, 0)), acc, is_async=True)
                # The block before is done: its registers and its place in the ring are free.
                acc, a_before = warpgroup_mma_wait(1, [acc, a_before])
                ring_ptx.run([EMPTY + 8 * ((j + 3) % 4), 1], LEAVE)
                a_before = a
                if j == 0:
                    a = decode(c1, s01 >> 16, to, back, dtype, ROWS, OPERAND, PAIRS, NATURAL, ASM, CONSTRAINTS)
                elif j == 1:
                    a = decode(c2, s23, to, back, dtype, ROWS, OPERAND, PAIRS, NATURAL, ASM, CONSTRAINTS)
                elif j == 2:
                    a = decode(c3, s23 >> 16, to, back, dtype, ROWS, OPERAND, PAIRS, NATURAL, ASM, CONSTRAINTS)
                else:
                    a = decode(n0, t01, to, back, dtype, ROWS, OPERAND, PAIRS, NATURAL, ASM, CONSTRAINTS)
            c1 = n1
            c2 = n2
            c3 = n3
            s01 = t01
            s23 = t23
            phase ^= 1
        acc, a_before = warpgroup_mma_wait(0, [acc, a_before])
        if INSIDE > 1:
            total += acc
            if stop == chunks:
                _wait_for_earlier_kernels()
                finish(
                    total, y_desc, y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, y_tile, m, n, row * ROWS, token * TOKENS,
                    HAS_BIAS, X_BY_ROW, TMA_OUT,
                )  # fmt: skip
                total = gl.full([ROWS, TOKENS], -0.0, gl.float32, ACC)
        else:
            _wait_for_earlier_kernels()
            if i < full:
                finish(
                    acc, y_desc, y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, y_tile, m, n, row * ROWS, token * TOKENS,
                    HAS_BIAS, X_BY_ROW, TMA_OUT,
                )  # fmt: skip
            elif SPLIT > 1:
                leave(acc, parts_ptr + gl.program_id(0).to(gl.int64) * (ROWS * TOKENS))
    stored()
    if SPLIT > 1:
        if count > full:
            row, token = _at(_left_over(each, more, SPLIT), row_tiles, token_tiles, GROUP)
            group = gl.program_id(0) // SPLIT
            shares = meet(counts_ptr + group * 2, gl.program_id(0) % SPLIT, SPLIT, PATIENCE)
            parts_ptr += (group * SPLIT).to(gl.int64) * (ROWS * TOKENS)
            out_n = n // 8 * 8 if TMA_OUT else n  # the compiler sees what it is a multiple of
            for rank in range(SPLIT):
                if (shares >> rank) % 2 == 1:
                    add(
                        y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, parts_ptr, y_tile, m, out_n, row * ROWS,
                        token * TOKENS, rank, ROWS, TOKENS, SPLIT, HAS_BIAS, X_BY_ROW, TMA_OUT,
                    )  # fmt: skip
            done(counts_ptr + group * 2, shares, SPLIT)


@gluon.jit(do_not_specialize=["m", "n", "row_tiles", "token_tiles", "each", "more", "chunks", "blocks", "tiles16"])
def matmul_many(
    x_desc, y_desc, codes_ptr, scales_ptr, y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, parts_ptr, counts_ptr, m, n,
    row_tiles, token_tiles, each, more, chunks, blocks, tiles16, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    SPLIT: gl.constexpr, INSIDE: gl.constexpr, GROUP: gl.constexpr, NATURAL: gl.constexpr, PATIENCE: gl.constexpr,
    EVEN: gl.constexpr, HAS_BIAS: gl.constexpr, X_BY_ROW: gl.constexpr, TMA_OUT: gl.constexpr, LANES: gl.constexpr,
    CODES: gl.constexpr, SCALES: gl.constexpr, PAIRS: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
    WAIT: gl.constexpr, LEAVE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Groups of SPLIT programs of num_warps warps and one more.

    each, more: whole tiles that each program makes, and how many programs make one more; all tiles where SPLIT is 1.
    chunks: of 256 values of K; blocks, tiles16: of 64 values and of 16 rows that codes has. EVEN: blocks is a multiple
    of 4. LANES: of the scales, 32 (NVFP4) or 16 (MXFP4).
    """
    # One allocation, so that it begins at 0: the ring, what weights change lanes through, a tile of y, and the ring's
    # barriers, "full" and then "empty".
    BARRIERS: gl.constexpr = barriers_at(ROWS, TOKENS, NATURAL)
    Y_AT: gl.constexpr = y_at(ROWS, TOKENS, NATURAL)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = gl.allocate_shared_memory(gl.int8, [BARRIERS // 1024 + 1, 1024], FLAT)
    x_tiles = shared._reinterpret(x_desc.dtype, [4, TOKENS, 64], x_desc.layout)
    y_tile = shared.index(Y_AT // 1024)._reinterpret(x_desc.dtype, [TOKENS, ROWS], y_desc.layout)
    barriers = shared.index(BARRIERS // 1024)._reinterpret(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(4):
        mbarrier.init(barriers.index(j), count=1)
        mbarrier.init(barriers.index(4 + j), count=num_warps)
    fence_async_shared()
    gl.thread_barrier()
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    y_desc, codes_ptr, scales_ptr, y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, parts_ptr, counts_ptr,
                    x_tiles, y_tile, m, n, row_tiles, token_tiles, each, more, chunks, blocks, tiles16, ROWS, TOKENS,
                    SPLIT, INSIDE, GROUP, NATURAL, PATIENCE, EVEN, HAS_BIAS, X_BY_ROW, TMA_OUT, LANES, CODES, SCALES,
                    PAIRS, ASM, CONSTRAINTS, WAIT, LEAVE,
                ),
            ),
            (
                _copy_x,
                (
                    x_desc, x_tiles, barriers, row_tiles, token_tiles, each, more, chunks, TOKENS, SPLIT, INSIDE,
                    GROUP,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
