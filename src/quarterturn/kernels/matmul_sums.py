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
    """The accumulator of a whole tile to y, through shared memory."""
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
    y_tile.permute((1, 0)).store(acc.to(y_tile.dtype))
    if TMA_OUT:
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(y_desc, [first_token, first_row], y_tile)
        tma.store_wait(0)
    else:
        OUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
        gl.thread_barrier()
        values = y_tile.load(OUT)
        token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, OUT))[:, None]
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))[None, :]
        gl.store(y_ptr + token.to(gl.int64) * n + row, values, mask=(token < m) & (row < n))


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
def meet(counts, SPLIT: gl.constexpr):
    """Returns when all SPLIT programs of a tile have come here, and what each stored before can be read."""
    gl.thread_barrier()
    gl.atomic_add(counts, 1, sem="release", scope="gpu")
    while gl.atomic_add(counts, 0, sem="acquire", scope="gpu") < SPLIT:
        pass
    gl.thread_barrier()
    if gl.atomic_add(counts + 1, 1, sem="relaxed", scope="gpu") == SPLIT - 1:  # the last to see it
        gl.atomic_xchg(counts + 1, 0, sem="relaxed", scope="gpu")
        gl.atomic_xchg(counts, 0, sem="relaxed", scope="gpu")


@gluon.jit
def add(
    y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, parts_ptr, m, n, first_row, first_token, part, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr, X_BY_ROW: gl.constexpr,
):  # fmt: skip
    """This program's share of a tile of y: pieces part, part + SPLIT, ... of four values a thread, eight at a time."""
    THREADS: gl.constexpr = 32 * gl.num_warps()
    MOST: gl.constexpr = (ROWS * TOKENS // (4 * THREADS) + SPLIT - 1) // SPLIT
    COUNT: gl.constexpr = 1 if MOST == 1 else 2 if MOST == 2 else 4 if MOST <= 4 else 8
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    v = gl.arange(0, COUNT * THREADS, gl.SliceLayout(1, L))[:, None]
    i = gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    for start in gl.static_range(0, MOST, COUNT):
        spot = (part + (start + v // THREADS) * SPLIT) * THREADS + v % THREADS  # of four values: see leave
        there = spot * 4 < ROWS * TOKENS
        total = gl.load(parts_ptr + (spot * 4 + i), mask=there, other=0.0)
        for p in gl.static_range(1, SPLIT):
            total += gl.load(parts_ptr + (spot * 4 + (i + p * (ROWS * TOKENS))), mask=there, other=0.0)
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
