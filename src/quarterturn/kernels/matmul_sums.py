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
def leave(acc, part_ptr):
    """The accumulator to memory, in the order of registers: four of a lane, lanes, 8 tokens each, 16 rows each."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    z = acc.reshape([ROWS // 16, 2, 8, TOKENS // 8, 4, 2]).permute((0, 2, 3, 4, 1, 5))
    z = z.reshape([ROWS // 2, TOKENS // 2, 4])
    L: gl.constexpr = z.type.layout
    r = gl.arange(0, ROWS // 2, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    c = gl.arange(0, TOKENS // 2, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    gl.store(part_ptr + (((r // 8 * (TOKENS // 8) + c // 4) * 32 + r % 8 * 4 + c % 4) * 4 + i), z)


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
    """Says that shares are added; the last makes the counts zero again."""
    added = shares * 0
    for rank in gl.static_range(SPLIT):
        added += (shares >> rank) % 2
    if gl.atomic_add(counts + 1, added, sem="relaxed", scope="gpu") + added == SPLIT:
        gl.atomic_xchg(counts + 1, 0, sem="relaxed", scope="gpu")
        gl.atomic_xchg(counts, 0, sem="relaxed", scope="gpu")


@gluon.jit
def add(
    y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, parts_ptr, m, n, first_row, first_token, rank, tile, tiles,
    chunks, ROWS: gl.constexpr, TOKENS: gl.constexpr, SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr, X_BY_ROW: gl.constexpr,
):  # fmt: skip
    """A share of one of the `tiles` tiles that a group shares: pieces rank, rank + SPLIT, ... of four values a thread,
    eight at a time.

    parts_ptr: where the group's first program left its first sums; each has room for two tiles.
    """
    THREADS: gl.constexpr = 32 * gl.num_warps()
    MOST: gl.constexpr = (ROWS * TOKENS // (4 * THREADS) + SPLIT - 1) // SPLIT
    COUNT: gl.constexpr = 1 if MOST == 1 else 2 if MOST == 2 else 4 if MOST <= 4 else 8
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    v = gl.arange(0, COUNT * THREADS, gl.SliceLayout(1, L))[:, None]
    i = gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    for start in gl.static_range(0, MOST, COUNT):
        spot = (rank + (start + v // THREADS) * SPLIT) * THREADS + v % THREADS  # of four values: see leave
        there = spot * 4 < ROWS * TOKENS
        total = gl.full([COUNT * THREADS, 4], -0.0, gl.float32, L)  # to which any number is added exactly
        for p in gl.static_range(SPLIT):
            # Program p has these chunks of all tiles, and left its sums of a second tile behind those of the first.
            begin = p * (tiles * chunks) // SPLIT
            end = (p + 1) * (tiles * chunks) // SPLIT
            has = (end > begin) & (end > tile * chunks) & (begin < (tile + 1) * chunks)
            at = parts_ptr + (2 * p + (begin < tile * chunks).to(gl.int32)) * (ROWS * TOKENS)
            total += gl.load(at + (spot * 4 + i), mask=there & has, other=-0.0, cache_modifier=".cg")
        row = first_row + spot // (4 * TOKENS) * 16 + i // 2 * 8 + spot % 32 // 4
        token = first_token + spot // 32 % (TOKENS // 8) * 8 + spot % 4 * 2 + i % 2
        inside = there & (row < n) & (token < m)
        alpha = gl.load(alpha_ptr + row, mask=inside, other=0.0)
        if X_BY_ROW:
            total *= alpha * gl.load(x_scale_ptr + token, mask=inside, other=0.0)
        else:
            total *= alpha * gl.load(x_scale_ptr)
        if HAS_BIAS:
            total += gl.load(bias_ptr + row, mask=inside, other=0.0)
        gl.store(y_ptr + token.to(gl.int64) * n + row, total.to(y_ptr.dtype.element_ty), mask=inside)
