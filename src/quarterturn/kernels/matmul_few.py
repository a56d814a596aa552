"""y (M, N) = x (M, K) @ w (N, K)^T for a few tokens, on tensor cores through mma.sync, at the speed of memory.

    warp         a part of K, CHUNKS times 256 values; its part of x stays in registers for the whole launch. It takes
                 one tile of 16 rows of w after the other: cp.async brings codes and scales into places of shared
                 memory that each lane has for itself, STAGES steps ahead, so that no warp waits for another
    program      parts of K beside each other; the warps' sums of SLOTS tiles wait in shared memory and are then added
                 in the order of K
    launch       SPLIT programs share a range of rows, each with its own parts of K. As a cluster they own every
                 SPLIT-th tile each, write their sums into the shared memory of its owner, and each adds those of its
                 own in the order of K; otherwise sums go through `partial`, and the program that comes last adds them

| x        | (M, K) bf16 or fp16, rows contiguous, 16-byte aligned; M <= 8 TOKENS8                                  |
| w        | weight_layout.Fragments; fp16 x: NVFP4 alone                                                           |
| scales   | w_scale fp32 (1,) or (N,), x_scale fp32 (1,) or (M,), or neither                                       |
| output   | (M, N) of x's dtype: sum * 2^exponent * fp32(x_scale * w_scale) + bias, fp32 sums, rounded once         |
| moves    | w once, x once a program, sums of SPLIT > 1 twice                                                      |
| does not | check arguments, allocate; `count` is zero before and after                                            |
| see      | weight_layout.py, matmul_few_ptx.py; tests/test_matmul_few*.py                                            |

A lane 4g+q holds of the sums of a tile: rows g and g + 8, tokens 2q and 2q + 1 (mma.m16n8k16's accumulator).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_FLOAT = gl.constexpr((gl.float32,))
_WORD = gl.constexpr((gl.int32,))
_WORDS2 = gl.constexpr((gl.int32,) * 2)
_WORDS4 = gl.constexpr((gl.int32,) * 4)
_WORDS8 = gl.constexpr((gl.int32,) * 8)
_SUMS4 = gl.constexpr((gl.float32,) * 4)
_SUMS8 = gl.constexpr((gl.float32,) * 8)
_SUMS16 = gl.constexpr((gl.float32,) * 16)


@gluon.jit
def _run(args, TEXTS: gl.constexpr, WHICH: gl.constexpr, DTYPE: gl.constexpr):
    """A text of TEXTS, whose last is their constraints, in its place: it reads or writes memory."""
    return gl.inline_asm_elementwise(TEXTS[WHICH], TEXTS[-1], args, dtype=DTYPE, is_pure=False, pack=1)


@gluon.jit
def _copy(
    codes, scales, codes_step, scales_step, byte, scale_byte, chunk, blocks, tiles, NUMBER: gl.constexpr,
    CHUNKS: gl.constexpr, SCALE_LANES: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Start copying step NUMBER from a tile on, of which on there are `tiles`."""
    TILE: gl.constexpr = NUMBER // CHUNKS
    C: gl.constexpr = NUMBER % CHUNKS
    args = [
        codes + TILE * codes_step + C * 512, scales + TILE * scales_step + C * (SCALE_LANES * 2), byte, scale_byte,
        blocks - (chunk + C) * 4, (tiles > TILE).to(gl.int32),
    ]  # fmt: skip
    _run(args, COPY, 0, _WORD)


@gluon.jit
def _tokens(x_ptr, thread, chunk, m, k, FIRST: gl.constexpr, BLOCK: gl.constexpr, X: gl.constexpr):
    """A lane's words of tokens FIRST..+7 in a block of a chunk. A row behind the last is the last."""
    token = gl.minimum(FIRST + thread % 32 // 4, m - 1)
    at = chunk * 256 + BLOCK * 64 + thread % 4 * 16
    return _run([x_ptr + token.to(gl.int64) * k + at, (at < k).to(gl.int32)], X, 0, _WORDS8)


@gluon.jit
def _step(words, scale, x, sums, BLOCK: gl.constexpr, TOKENS8: gl.constexpr, STEP: gl.constexpr):
    """Sums after a block of a tile."""
    args = [words[0], words[1], words[2], words[3], scale]
    for i in gl.static_range(TOKENS8):
        for j in gl.static_range(8):
            args = args + [x[i][j]]
    for i in gl.static_range(4 * TOKENS8):
        args = args + [sums[i]]
    DTYPE: gl.constexpr = _SUMS4 if TOKENS8 == 1 else (_SUMS8 if TOKENS8 == 2 else _SUMS16)
    return gl.inline_asm_elementwise(STEP[BLOCK % 2], STEP[2], args, dtype=DTYPE, is_pure=True, pack=1)


@gluon.jit
def _outputs(tile, end, m, n, EVERY: gl.constexpr, PARTS: gl.constexpr, TOKENS8: gl.constexpr, L: gl.constexpr):
    """Of sums (PARTS, 128), fragments of every EVERY-th tile from `tile` on: the row of w, the token, and whether there
    is one."""
    sub = gl.arange(0, PARTS, gl.SliceLayout(1, L))[:, None]
    i = gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    here = tile + sub // TOKENS8 * EVERY
    row = here * 16 + i // 16 + i % 4 // 2 * 8
    token = sub % TOKENS8 * 8 + i // 4 % 4 * 2 + i % 2
    return row, token, (here < end) & (row < n) & (token < m)


@gluon.jit
def _factors(
    row, token, inside, w_scale_ptr, x_scale_ptr, bias_ptr, W_SCALES: gl.constexpr, X_SCALES: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """What sums are multiplied by, and what is added: asked for before the sums are there."""
    scale = gl.full_like(row, 1.0, dtype=gl.float32)
    bias = gl.full_like(row, 0.0, dtype=gl.float32)
    if W_SCALES:
        scale = gl.load(w_scale_ptr + row * (W_SCALES - 1), mask=inside)
    if X_SCALES:
        scale = gl.load(x_scale_ptr + token * (X_SCALES - 1), mask=inside) * scale
    if BIAS:
        bias = gl.load(bias_ptr + row, mask=inside).to(gl.float32)
    return scale, bias


@gluon.jit
def _write(total, scale, bias, row, token, inside, out_ptr, n, factor, BIAS: gl.constexpr):
    y = total * factor * scale
    if BIAS:
        y = y + bias
    gl.store(out_ptr + token.to(gl.int64) * n + row, y.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _add_warps(
    shared, begin, last, first, part, tiles, w_scale_ptr, x_scale_ptr, bias_ptr, out_ptr, partial_ptr, m, n, factor,
    TOKENS8: gl.constexpr, SLOTS: gl.constexpr, SPLIT: gl.constexpr, W_SCALES: gl.constexpr, X_SCALES: gl.constexpr,
    BIAS: gl.constexpr, CLUSTER: gl.constexpr, TOTAL_AT: gl.constexpr, TOTALS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The sums of the tiles begin..last-1 that wait in shared memory, added over warps: written, or kept for the other
    parts. first: the program's first tile."""
    PARTS: gl.constexpr = SLOTS * TOKENS8
    ACROSS: gl.constexpr = gl.BlockedLayout([1, num_warps, 1], [1, 1, 32], [num_warps // 4, 1, 4], [2, 1, 0])
    L: gl.constexpr = gl.SliceLayout(1, ACROSS)
    by_warp = shared._reinterpret(gl.float32, [PARTS, num_warps, 128], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    row, token, inside = _outputs(begin, last, m, n, 1, PARTS, TOKENS8, L)
    if SPLIT == 1:
        scale, bias = _factors(row, token, inside, w_scale_ptr, x_scale_ptr, bias_ptr, W_SCALES, X_SCALES, BIAS)
    gl.thread_barrier()
    total = gl.sum(by_warp.load(ACROSS), 1)
    gl.thread_barrier()
    if SPLIT == 1:
        _write(total, scale, bias, row, token, inside, out_ptr, n, factor, BIAS)
    else:
        sub = gl.arange(0, PARTS, gl.SliceLayout(1, L))[:, None]
        column = gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
        there = begin + sub // TOKENS8 < last
        if CLUSTER:
            local = begin - first + sub // TOKENS8
            to = ((part * CLUSTER + local // SPLIT) * TOKENS8 + sub % TOKENS8) * 512 + column * 4
            _run([total, TOTAL_AT + to, local % SPLIT, there.to(gl.int32)], TOTALS, 0, _FLOAT)
        else:
            to = ((part * tiles + begin) * TOKENS8 + sub) * 128 + column
            gl.store(partial_ptr + to, total, mask=there)


@gluon.jit
def _add_parts(
    start, end, part, tiles, w_scale_ptr, x_scale_ptr, bias_ptr, out_ptr, partial_ptr, m, n, factor,
    TOKENS8: gl.constexpr, SPLIT: gl.constexpr, W_SCALES: gl.constexpr, X_SCALES: gl.constexpr, BIAS: gl.constexpr,
    CLUSTER: gl.constexpr, TOTAL_AT: gl.constexpr, TOTALS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The sums of all parts of K, added and written, for a range of tiles, or, of a cluster, for those of this part."""
    AT_ONCE: gl.constexpr = num_warps // 2
    EVERY: gl.constexpr = SPLIT if CLUSTER else 1
    L: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [num_warps // 2, 2], [1, 0])
    sub = gl.arange(0, AT_ONCE, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    if CLUSTER:
        start += part
    for tile in range(start, end, AT_ONCE // TOKENS8 * EVERY):
        row, token, inside = _outputs(tile, end, m, n, EVERY, AT_ONCE, TOKENS8, L)
        scale, bias = _factors(row, token, inside, w_scale_ptr, x_scale_ptr, bias_ptr, W_SCALES, X_SCALES, BIAS)
        total = gl.zeros([AT_ONCE, 128], gl.float32, L)
        for s in gl.static_range(SPLIT):
            if CLUSTER:
                # For tiles that there are not the last place is read, and not used.
                here = gl.minimum((tile - start) // SPLIT + sub // TOKENS8, CLUSTER - 1)
                to = ((s * CLUSTER + here) * TOKENS8 + sub % TOKENS8) * 512 + column * 4
                total += _run([total, TOTAL_AT + to, to, to], TOTALS, 1, _FLOAT)[0]
            else:
                to = ((s * tiles + tile) * TOKENS8 + sub) * 128 + column
                total += gl.load(partial_ptr + to, mask=inside, other=0.0, cache_modifier=".cg")
        _write(total, scale, bias, row, token, inside, out_ptr, n, factor, BIAS)


@gluon.jit
def _do(thread, TEXT: gl.constexpr):
    """An instruction without operands."""
    gl.inline_asm_elementwise(TEXT + " mov.b32 $0, 0;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(
    do_not_specialize=["m", "n", "k", "tiles", "blocks", "chunks", "each", "more", "factor"],
    do_not_specialize_on_alignment=["w_scale_ptr", "x_scale_ptr", "bias_ptr", "out_ptr"],
)
def matmul_few(
    x_ptr, codes_ptr, scales_ptr, w_scale_ptr, x_scale_ptr, bias_ptr, out_ptr, partial_ptr, count_ptr, m, n, k, tiles,
    blocks, chunks, each, more, factor, TOKENS8: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr, SPLIT: gl.constexpr, W_SCALES: gl.constexpr, X_SCALES: gl.constexpr, BIAS: gl.constexpr,
    AFTER: gl.constexpr, CLUSTER: gl.constexpr, SCALE_LANES: gl.constexpr, COPY: gl.constexpr, SCALES: gl.constexpr,
    CODES: gl.constexpr, X: gl.constexpr, STEP: gl.constexpr, SUMS: gl.constexpr, TOTALS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """tiles: of 16 rows; blocks, chunks: K / 64 and K / 256, rounded up; each, more: tiles a program, and how many
    programs have one more.

    W_SCALES, X_SCALES: 0 for none, 1 for one number, 2 for one a row of w or of x. factor: 2^exponent. AFTER: launched
    while the kernel before it still runs; only weights are read until that has ended. CLUSTER: the SPLIT programs are
    one, and each owns at most so many tiles; 0: they are not.
    """
    pid = gl.program_id(0)
    part = pid % SPLIT
    program = pid // SPLIT
    start = program * each + gl.minimum(program, more)
    end = start + each + (program < more).to(gl.int32)

    THREADS: gl.constexpr = num_warps * 32
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    thread = gl.arange(0, THREADS, LANES)
    lane = thread % 32
    chunk = (part * num_warps + thread // 32) * CHUNKS
    codes_step = blocks.to(gl.int64) * 128
    scales_step = chunks.to(gl.int64) * (SCALE_LANES * 2)
    codes = codes_ptr + start * codes_step + (chunk * 128 * 4 + lane * 4)
    scales = scales_ptr + start * scales_step + (chunk * SCALE_LANES + lane * SCALE_LANES // 32) * 2

    # Shared memory: sums of SLOTS tiles, each lane's 16 bytes beside those of the next lane; the stages; the sums of a
    # cluster's programs.
    SLOT: gl.constexpr = THREADS * 16
    STAGE: gl.constexpr = THREADS * (4 * 16 + 8)
    STAGES_AT: gl.constexpr = SLOTS * TOKENS8 * SLOT
    TOTAL_AT: gl.constexpr = STAGES_AT + STAGES * STAGE
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = gl.allocate_shared_memory(gl.float32, [(TOTAL_AT + SPLIT * CLUSTER * TOKENS8 * 512) // 4], FLAT)
    place = STAGES_AT + thread * 16
    scale_place = STAGES_AT + 4 * SLOT + thread * 8

    if CLUSTER:
        _do(thread, "barrier.cluster.arrive.relaxed.aligned;")
    for i in gl.static_range(STAGES):
        _copy(
            codes, scales, codes_step, scales_step, place + i * STAGE, scale_place + i * STAGE, chunk, blocks,
            end - start, i, CHUNKS, SCALE_LANES, COPY,
        )  # fmt: skip
    if AFTER:
        _do(thread, "griddepcontrol.launch_dependents; griddepcontrol.wait;")
    x = ()
    for c in gl.static_range(CHUNKS):
        for block in gl.static_range(4):
            for i in gl.static_range(TOKENS8):
                x = x + (_tokens(x_ptr, thread, chunk + c, m, k, 8 * i, block, X),)

    if CLUSTER:
        _do(thread, "barrier.cluster.wait.acquire.aligned;")  # all run: their memory may be written to

    zero = gl.full([THREADS], 0.0, gl.float32, LANES)
    waiting = start * 0
    stage = start * 0
    for tile in range(start, end):
        sums = (zero,) * (4 * TOKENS8)
        others = (zero,) * (4 * TOKENS8)  # a second chain, where there is but one
        for c in gl.static_range(CHUNKS):
            by = _run([scale_place + stage], SCALES, 0, _WORDS2)
            for block in gl.static_range(4):
                words = _run([place + stage], CODES, block, _WORDS4)
                operand = ()
                for i in gl.static_range(TOKENS8):
                    operand = operand + (x[(c * 4 + block) * TOKENS8 + i],)
                if TOKENS8 == 1 and block % 2:
                    others = _step(words, by[block // 2], operand, others, block, TOKENS8, STEP)
                else:
                    sums = _step(words, by[block // 2], operand, sums, block, TOKENS8, STEP)
            _copy(
                codes, scales, codes_step, scales_step, place + stage, scale_place + stage, chunk, blocks, end - tile,
                c + STAGES, CHUNKS, SCALE_LANES, COPY,
            )  # fmt: skip
            stage = gl.where(stage == (STAGES - 1) * STAGE, 0, stage + STAGE)
        codes += codes_step
        scales += scales_step
        if TOKENS8 == 1:
            sums = (sums[0] + others[0], sums[1] + others[1], sums[2] + others[2], sums[3] + others[3])
        for i in gl.static_range(TOKENS8):
            at = thread * 16 + (waiting * TOKENS8 + i) * SLOT
            _run([sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3], at], SUMS, 0, _WORD)
        waiting += 1
        if (waiting == SLOTS) | (tile + 1 == end):
            _add_warps(
                shared, tile + 1 - waiting, tile + 1, start, part, tiles, w_scale_ptr, x_scale_ptr, bias_ptr, out_ptr,
                partial_ptr, m, n, factor, TOKENS8, SLOTS, SPLIT, W_SCALES, X_SCALES, BIAS, CLUSTER, TOTAL_AT, TOTALS,
                num_warps,
            )  # fmt: skip
            waiting = start * 0

    if SPLIT > 1:
        if CLUSTER:
            _do(thread, "barrier.cluster.arrive.release.aligned;")
            _do(thread, "barrier.cluster.wait.acquire.aligned;")
            adds = True
        else:
            gl.thread_barrier()
            adds = gl.atomic_add(count_ptr + program, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if adds:
            _add_parts(
                start, end, part, tiles, w_scale_ptr, x_scale_ptr, bias_ptr, out_ptr, partial_ptr, m, n, factor,
                TOKENS8, SPLIT, W_SCALES, X_SCALES, BIAS, CLUSTER, TOTAL_AT, TOTALS, num_warps,
            )  # fmt: skip
            if not CLUSTER:
                gl.store(count_ptr + program, 0)
