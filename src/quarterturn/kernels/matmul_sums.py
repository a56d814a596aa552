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
    alpha = gl.load(alpha_ptr + row, mask=row < n, other=0.0)
    if X_BY_ROW:
        # By one thread each: as the accumulator has them, their addresses take registers that the loop needs.
        token = first_token + gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        x_scale = gl.load(x_scale_ptr + token, mask=token < m, other=0.0)
        acc *= alpha[:, None] * gl.convert_layout(x_scale, gl.SliceLayout(0, acc.type.layout))[None, :]
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
def _where(z):
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
    group, at = _where(z)
    gl.store(part_ptr + (group * (acc.shape[0] * 8) + at), z)


@gluon.jit
def meet(counts, rank, SPLIT: gl.constexpr, PATIENCE: gl.constexpr):
    """Which shares, as bits, this program of SPLIT is to add: all have then come here, and what each stored before can
    be read.

    Who has come looks PATIENCE times for the others: nothing makes sure that they run at the same time. Then it leaves
    its share to the last one to come. counts: bits 0 to 7 of the first number say how many have come, the next who has
    left, so that of two who meet there each knows which was first; the second is of `done`.
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
def done(counts, shares, SPLIT: gl.constexpr):
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
    y_ptr, alpha_ptr, x_scale_ptr, bias_ptr, parts_ptr, y_tile, m, n, first_row, first_token, rank, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr, X_BY_ROW: gl.constexpr, BY_16: gl.constexpr,
):  # fmt: skip
    """A share of a tile to y, through shared memory: of every 8 tokens the numbers rank, rank + SPLIT, ...

    parts_ptr: where the group's first program left its sums, the others behind it. BY_16: n is a multiple of 8, so that
    y is stored by 16 bytes.
    """
    EIGHTS: gl.constexpr = TOKENS // 8
    COUNT: gl.constexpr = max(EIGHTS // SPLIT, 1)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 8 * COUNT, 16])
    # -0: any number is added to it exactly
    total = _by_lane(gl.full([ROWS, 8 * COUNT], -0.0, gl.float32, ACC))
    number, at = _where(total)
    eight = rank + number * SPLIT
    for p in gl.static_range(SPLIT):
        there = parts_ptr + (p * (ROWS * TOKENS) + eight * (ROWS * 8) + at)
        total += gl.load(there, mask=eight < EIGHTS, other=0.0, cache_modifier=".cg")
    y = total.reshape([ROWS // 16, 8, COUNT, 4, 2, 2]).permute((0, 4, 1, 2, 3, 5)).reshape([ROWS, 8 * COUNT])
    y = gl.convert_layout(y, ACC, assert_trivial=True)

    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))[:, None]
    column = gl.arange(0, 8 * COUNT, gl.SliceLayout(0, ACC))[None, :]
    eight = rank + column // 8 * SPLIT
    token = first_token + eight * 8 + column % 8
    scale = gl.load(alpha_ptr + row, mask=row < n, other=0.0)
    if X_BY_ROW:
        scale = scale * gl.load(x_scale_ptr + token, mask=(eight < EIGHTS) & (token < m), other=0.0)
    else:
        scale *= gl.load(x_scale_ptr)
    y *= scale
    if HAS_BIAS:
        y += gl.load(bias_ptr + row, mask=row < n, other=0.0)

    own = y_tile.slice(0, 8 * COUNT, 0)
    gl.thread_barrier()
    own.permute((1, 0)).store(y.to(y_tile.dtype))
    gl.thread_barrier()
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    BY_8: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROWS, ROWS // 8], [gl.num_warps(), 1], [1, 0])
    OUT: gl.constexpr = BY_8 if BY_16 else LINES
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))[None, :]
    column = gl.arange(0, 8 * COUNT, gl.SliceLayout(1, OUT))[:, None]
    eight = rank + column // 8 * SPLIT
    token = first_token + eight * 8 + column % 8
    inside = (eight < EIGHTS) & (token < m) & (row < n)
    gl.store(y_ptr + token.to(gl.int64) * n + row, own.load(OUT), mask=inside)
