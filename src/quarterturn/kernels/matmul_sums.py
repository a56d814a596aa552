"""From the accumulators of matmul_many.py to y: y = acc * (alpha * x_scale) + bias in fp32, rounded once.

An accumulator is (rows of w, tokens) fp32, y (tokens, rows of w). Sums of parts along K are added in the order of K, by
whoever adds them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma


@gluon.jit
def finish(
    acc, y_desc, y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, y_tile, m, n, first_row, first_token, HAS_BIAS: gl.constexpr,
    X_BY_ROW: gl.constexpr, TMA_OUT: gl.constexpr,
):  # fmt: skip
    """The accumulator of a whole tile to y, through shared memory, which `stored` says is free again."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, acc.type.layout))
    alpha = gl.load(alpha_ptr + row, mask=row < n, other=0.0)
    if X_BY_ROW:
        acc *= alpha[:, None] * gl.load(x_scale_ptr + token, mask=token < m, other=0.0)[None, :]
    else:
        acc *= (alpha * gl.load(x_scale_ptr))[:, None]
    if HAS_BIAS:
        acc += gl.load(bias_ptr + row, mask=row < n, other=0.0)[:, None]
    stored()
    gl.thread_barrier()
    y_tile.permute((1, 0)).store(acc.to(y_tile.dtype))
    if TMA_OUT:
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(y_desc, [first_token, first_row], y_tile)
    else:
        OUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
        gl.thread_barrier()
        values = y_tile.load(OUT)
        token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, OUT))[:, None]
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))[None, :]
        gl.store(y_ptr + token.to(gl.int64) * n + row, values, mask=(token < m) & (row < n))


@gluon.jit
def stored():
    """Returns when TMA has read what it was told to store."""
    tma.store_wait(0)


@gluon.jit
def _by_lane(acc):
    """An accumulator as (rows / 2, tokens / 2, 4): a lane's four of 16 rows and 8 tokens beside each other."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    z = acc.reshape([ROWS // 16, 2, 8, TOKENS // 8, 4, 2]).permute((0, 2, 3, 4, 1, 5))
    return z.reshape([ROWS // 2, TOKENS // 2, 4])


@gluon.jit
def _places(z):
    """For elements of what `_by_lane` gives: which 8 tokens, and where among the sums of those."""
    L: gl.constexpr = z.type.layout
    r = gl.arange(0, z.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    c = gl.arange(0, z.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return c // 4, (r * 4 + c % 4) * 4 + i


@gluon.jit
def leave(acc, part_ptr):
    """The accumulator to memory: 8 tokens after the other, of each 16 rows after the other, in the order of lanes."""
    z = _by_lane(acc)
    group, at = _places(z)
    gl.store(part_ptr + (group * (acc.shape[0] * 8) + at), z)


@gluon.jit
def meet(counts, rank, SPLIT: gl.constexpr, PATIENCE: gl.constexpr):
    """Which shares, as bits, this program of SPLIT is to add: all have then come here, and what each stored before can
    be read.

    Who has come looks PATIENCE times for the others: nothing makes sure that they run at the same time. Then it leaves its share to the last one to come. counts: bits 0 to 7 of the first number say how many have come, the
    next who has left, so that of two who meet there each knows which was first; the second is of `part`.
    """
    gl.thread_barrier()
    before = gl.atomic_add(counts, 1, sem="acq_rel", scope="gpu")
    shares = gl.to_tensor(1) << rank
    if before % 256 == SPLIT - 1:
        shares = shares | (before >> 8)
    else:
        here = before
        looks = before * 0
        while (here % 256 < SPLIT) & (looks < PATIENCE):
            here = gl.atomic_add(counts, 0, sem="acquire", scope="gpu")
            looks += 1
        if here % 256 < SPLIT:
            here = gl.atomic_or(counts, shares << 8, sem="acq_rel", scope="gpu")
            if here % 256 < SPLIT:
                shares = shares * 0
    gl.thread_barrier()
    return shares


@gluon.jit
def part(counts, shares, SPLIT: gl.constexpr):
    """Says that shares are added; the last makes the counts zero again. One thread does it, and no other waits."""
    added = shares * 0
    for rank in gl.static_range(SPLIT):
        added += (shares >> rank) % 2
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred first, last;
        .reg .b32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 first, t, 0;
        @first atom.add.relaxed.gpu.global.u32 t, [$1+4], $2;
        add.u32 t, t, $2;
        setp.eq.and.u32 last, t, $3, first;
        @last st.relaxed.gpu.global.u32 [$1+4], 0;
        @last st.relaxed.gpu.global.u32 [$1], 0;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r", [counts.to(gl.int64), added, SPLIT], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add(
    y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, parts_ptr, y_tile, m, n, rows, tokens, rank, tiles, chunks,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, SPLIT: gl.constexpr, SHARED: gl.constexpr, HAS_BIAS: gl.constexpr,
    X_BY_ROW: gl.constexpr, BY_16: gl.constexpr,
):  # fmt: skip
    """A share of the `tiles` tiles that a group shares: of every 8 tokens of a tile, the tiles behind each other, numbers
    rank, rank + SPLIT, ..., eight at a time.

    rows, tokens: the first of each tile. parts_ptr: where the group's first program left its first sums; each has room
    for two tiles. BY_16: n is a multiple of 8, so that y is stored by 16 bytes.
    """
    PIECES: gl.constexpr = TOKENS // 8
    MOST: gl.constexpr = (SHARED * PIECES + SPLIT - 1) // SPLIT
    # Programs that have chunks of a tile: a group has SHARED tiles, or one fewer.
    PARTS: gl.constexpr = SPLIT if SHARED <= 2 else (SPLIT + SHARED - 2) // (SHARED - 1) + 1
    COUNT: gl.constexpr = 1 if MOST == 1 else 2 if MOST == 2 else 4 if MOST <= 4 or PIECES == 4 else 8
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 8 * COUNT, 16])
    total_like = gl.full([ROWS, 8 * COUNT], -0.0, gl.float32, ACC)  # to which any number is added exactly
    z = _by_lane(total_like)
    number, at = _places(z)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))[:, None]
    column = gl.arange(0, 8 * COUNT, gl.SliceLayout(0, ACC))[None, :]
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROWS, ROWS // 8], [gl.num_warps(), 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    STORE: gl.constexpr = OUT if BY_16 else LINES
    out_row = gl.arange(0, ROWS, gl.SliceLayout(0, STORE))[None, :]
    out_column = gl.arange(0, 8 * COUNT, gl.SliceLayout(1, STORE))[:, None]
    for start in gl.static_range(0, MOST, COUNT):
        piece = rank + (start + number) * SPLIT
        tile = piece // PIECES
        first = _of_tile(tile, _firsts(tiles, SPLIT, SHARED), SHARED) if PARTS < SPLIT else tile * 0
        total = z
        for other in gl.static_range(PARTS):
            # Program p has these chunks of all tiles, and left its sums of a second tile behind those of the first.
            p = first + other
            begin = p * (tiles * chunks) // SPLIT
            end = (p + 1) * (tiles * chunks) // SPLIT
            has = (tile < tiles) & (p < SPLIT) & (end > begin) & (end > tile * chunks) & (begin < (tile + 1) * chunks)
            slot = 2 * p + (begin < tile * chunks).to(gl.int32)
            there = parts_ptr + (slot * (ROWS * TOKENS) + piece % PIECES * (ROWS * 8) + at)
            total += gl.load(there, mask=has & (at >= 0), other=-0.0, cache_modifier=".cg")
        back = total.reshape([ROWS // 16, 8, COUNT, 4, 2, 2]).permute((0, 4, 1, 2, 3, 5)).reshape([ROWS, 8 * COUNT])
        y = gl.convert_layout(back, ACC, assert_trivial=True)

        piece = rank + (start + column // 8) * SPLIT
        tile = piece // PIECES
        y_row = _of_tile(tile, rows, SHARED) + row
        y_token = _of_tile(tile, tokens, SHARED) + piece % PIECES * 8 + column % 8
        inside = (tile < tiles) & (y_row < n)
        scale = gl.load(alpha_ptr + y_row, mask=inside, other=0.0)
        if X_BY_ROW:
            scale *= gl.load(x_scale_ptr + y_token + row * 0, mask=inside & (y_token < m), other=0.0)
        else:
            scale *= gl.load(x_scale_ptr)
        y *= scale
        if HAS_BIAS:
            y += gl.load(bias_ptr + y_row, mask=inside, other=0.0)

        part_tile = y_tile.slice(0, 8 * COUNT, 0)
        gl.thread_barrier()
        part_tile.permute((1, 0)).store(y.to(y_tile.dtype))
        gl.thread_barrier()
        values = part_tile.load(STORE)
        piece = rank + (start + out_column // 8) * SPLIT
        tile = piece // PIECES
        y_row = _of_tile(tile, rows, SHARED) + out_row
        y_token = _of_tile(tile, tokens, SHARED) + piece % PIECES * 8 + out_column % 8
        inside = (tile < tiles) & (y_row < n) & (y_token < m)
        gl.store(y_ptr + y_token.to(gl.int64) * n + y_row, values, mask=inside)


@gluon.jit
def _of_tile(tile, values, SHARED: gl.constexpr):
    """The value of each tile."""
    if SHARED == 1:
        return values[0]
    else:
        found = tile * 0 + values[0]
        for t in gl.static_range(1, SHARED):
            found = gl.where(tile == t, values[t], found)
        return found


@gluon.jit
def _firsts(tiles, SPLIT: gl.constexpr, SHARED: gl.constexpr):
    """The first program that has, or could have, chunks of a tile, for each of `tiles` tiles: SHARED, or one fewer."""
    found = (tiles * 0,)
    for t in gl.static_range(1, SHARED):
        found = found + (gl.where(tiles == SHARED, t * SPLIT // SHARED, t * SPLIT // (SHARED - 1)),)
    return found
