"""y (M, N) = x (M, K) @ w (N, K)^T for a few tokens, on tensor cores through mma.sync, at the speed of memory.

    warp         a part of K, CHUNKS times 256 values; its part of x stays in registers for the whole launch. It takes
                 one tile of 16 rows of w after the other: cp.async brings codes and scales into places of shared
                 memory that each lane has for itself, STAGES steps ahead, so that no warp waits for another
    program      parts of K beside each other; the warps' sums of SLOTS tiles wait in shared memory and are then added
                 in the order of K
    launch       SPLIT programs share a range of rows, each with its own parts of K. As a cluster they write their sums
                 into the shared memory of its first program, which adds them in the order of K; otherwise sums go
                 through `partial`, and the program that comes last adds them

| x        | (M, K) bf16 or fp16, rows contiguous, 16-byte aligned; M <= 8 TOKENS8                                  |
| w        | weight_layout.Fragments; fp16 x: NVFP4 alone                                                           |
| scales   | w_scale fp32 (1,) or (N,), x_scale fp32 (1,) or (M,), or neither                                       |
| output   | (M, N) of x's dtype: sum * 2^exponent * fp32(x_scale * w_scale) + bias, fp32 sums, rounded once         |
| moves    | w once, x once a program, sums of SPLIT > 1 twice                                                      |
| does not | check arguments, allocate; `count` is zero before and after                                            |
| see      | weight_layout.py, fp4_decode.py; tests/test_matmul_few.py                                              |

A lane 4g+q holds of the sums of a tile: rows g and g + 8, tokens 2q and 2q + 1 (mma.m16n8k16's accumulator).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats import FP4Format
from . import fp4_decode

CHUNK = 256
"""Values of K whose scales a lane has in eight bytes: four blocks."""

def copy_asm(whole: bool, threads: int) -> tuple[str, ...]:
    """(codes, scales, byte, scale byte, blocks, there) starts copying what a lane needs of a step, if it is `there`.

    byte, scale byte: where in shared memory. blocks: how many of the step's four there are; without the first, scales
    are zero. whole: all four.
    """
    lines = [
        ".reg .pred p;", ".reg .b32 at, size;", "mov.u32 at, global_smem;", "add.u32 at, at, $3;",
        "setp.ne.s32 p, $6, 0;",
    ]  # fmt: skip
    for block in range(4):
        if not whole:
            lines += [f"setp.gt.s32 p, $5, {block};", "selp.b32 size, 16, 0, p;", "setp.ne.s32 p, $6, 0;"]
        size = "16" if whole else "16, size"
        lines.append(
            f"@p cp.async.cg.shared.global.L2::128B [at+{16 * threads * block}], [$1+{512 * block}], {size};"
        )
    lines += ["mov.u32 at, global_smem;", "add.u32 at, at, $4;"]
    if not whole:
        lines += ["setp.gt.s32 p, $5, 0;", "selp.b32 size, 8, 0, p;", "setp.ne.s32 p, $6, 0;"]
    lines += [
        f"@p cp.async.ca.shared.global [at], [$2], {'8' if whole else '8, size'};",
        "cp.async.commit_group;",
        "mov.b32 $0, 0;",
    ]
    return _text(lines), "=r,l,l,r,r,r,r"


def scales_asm(stages: int) -> tuple[str, ...]:
    """(scale byte) -> the two words of scales of a step, once its copies have arrived."""
    lines = [
        ".reg .b32 at;", f"cp.async.wait_group {stages - 1};", "mov.u32 at, global_smem;", "add.u32 at, at, $2;",
        "ld.shared.v2.b32 {$0, $1}, [at];",
    ]  # fmt: skip
    return _text(lines), "=r,=r,r"


def codes_asm(threads: int) -> tuple[str, ...]:
    """(byte) -> the four words of codes of a block; a text for each of four blocks."""
    return tuple(
        _text([".reg .b32 at;", "mov.u32 at, global_smem;", "add.u32 at, at, $4;",
               f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [at+{16 * threads * block}];"])
        for block in range(4)
    ) + ("=r,=r,=r,=r,r",)  # fmt: skip


def sums_asm() -> tuple[str, ...]:
    """(four sums, byte) stores them. Triton's own stores would make all warps wait at each."""
    lines = [".reg .b32 at;", "mov.u32 at, global_smem;", "add.u32 at, at, $5;"]
    return _text([*lines, "st.shared.v4.b32 [at], {$1, $2, $3, $4};", "mov.b32 $0, 0;"]), "=r,f,f,f,f,r"


def x_asm() -> tuple[str, str]:
    """(address, exists) -> the 16 values of a token and a block that a lane multiplies, or zeros: 8 words."""
    lines = [".reg .pred p;", "setp.ne.s32 p, $9, 0;", *[f"mov.b32 ${i}, 0;" for i in range(8)]]
    for i in (0, 4):
        words = ", ".join(f"${i + j}" for j in range(4))
        lines.append(f"@p ld.global.nc.v4.b32 {{{words}}}, [$8+{4 * i}];")
    return _text(lines), "=&r," * 8 + "l,r"


def totals_asm() -> tuple[str, ...]:
    """(value, byte, there) writes a sum into the shared memory of the cluster's first program; (value, byte, -) reads
    one there."""
    at = [".reg .b32 at;", "mov.u32 at, global_smem;", "add.u32 at, at, $2;"]
    write = [
        ".reg .pred p;", "setp.ne.s32 p, $3, 0;", "mapa.shared::cluster.u32 at, at, 0;",
        "@p st.shared::cluster.f32 [at], $1;", "mov.f32 $0, $1;",
    ]  # fmt: skip
    return _text([*at, *write]), _text([*at, "ld.shared.f32 $0, [at];"]), "=f,f,r,r"


def step_asm(block: int, tokens8: int, fmt: FP4Format, half: bool) -> tuple[str, str]:
    """(4 words of codes, a word of scales, 8 words of x a tile of tokens, sums) -> sums, after one block of K."""
    sums = 4 * tokens8
    codes = [f"${sums + i}" for i in range(4)]
    scales = f"${sums + 4}"
    x = [f"${sums + 5 + i}" for i in range(8 * tokens8)]
    old = [f"${sums + 5 + 8 * tokens8 + i}" for i in range(sums)]
    kind = "f16" if half else "bf16"
    lines = [".reg .b32 t, u, c0, by, negative_zero, a<16>;", "mov.b32 negative_zero, 0x80008000;"]
    for row in range(2):
        registers = [f"a{8 * row + j}" for j in range(8)]
        lines += fp4_decode.scale(scales, block % 2 * 2 + row, "by", fmt, half)
        lines += fp4_decode.values(codes[2 * row], codes[2 * row + 1], "by", registers, half)
    for step in range(4):
        a = f"{{a{2 * step}, a{8 + 2 * step}, a{2 * step + 1}, a{9 + 2 * step}}}"
        for i in range(tokens8):
            d = ", ".join(f"${4 * i + j}" for j in range(4))
            c = ", ".join(old[4 * i : 4 * i + 4]) if step == 0 else d
            b = f"{{{x[8 * i + 2 * step]}, {x[8 * i + 2 * step + 1]}}}"
            lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{d}}}, {a}, {b}, {{{c}}};")
    return _text(lines), "=&f," * sums + ",".join(["r"] * (5 + 8 * tokens8) + ["f"] * sums)


def _text(lines: list[str]) -> str:
    return "\n".join(["{", *lines, "}"])


def texts(tokens8: int, fmt: FP4Format, half: bool, whole: bool, stages: int, num_warps: int) -> dict[str, object]:
    """The texts as the kernel's constants."""
    steps = [step_asm(block, tokens8, fmt, half) for block in (0, 1)]
    threads = 32 * num_warps
    return {
        "COPY": copy_asm(whole, threads), "SCALES": scales_asm(stages), "CODES": codes_asm(threads), "X": x_asm(),
        "STEP": (steps[0][0], steps[1][0], steps[0][1]), "SUMS": sums_asm(), "TOTALS": totals_asm(),
        "SCALE_LANES": 512 // fmt.group_size,
    }  # fmt: skip


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
def _outputs(tile, end, m, n, PARTS: gl.constexpr, TOKENS8: gl.constexpr, L: gl.constexpr):
    """Of sums (PARTS, 128), fragments of tiles from `tile` on: the row of w, the token, and whether there is one."""
    sub = gl.arange(0, PARTS, gl.SliceLayout(1, L))[:, None]
    i = gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    here = tile + sub // TOKENS8
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
    one, with at most so many tiles; 0: they are not.
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
    PARTS: gl.constexpr = SLOTS * TOKENS8
    SLOT: gl.constexpr = THREADS * 16
    STAGE: gl.constexpr = THREADS * (4 * 16 + 8)
    TOTAL_AT: gl.constexpr = PARTS * SLOT + STAGES * STAGE
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = gl.allocate_shared_memory(gl.float32, [(TOTAL_AT + SPLIT * CLUSTER * TOKENS8 * 512) // 4], FLAT)
    by_warp = shared._reinterpret(
        gl.float32, [PARTS, num_warps, 128], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    ACROSS: gl.constexpr = gl.BlockedLayout([1, num_warps, 1], [1, 1, 32], [num_warps // 4, 1, 4], [2, 1, 0])
    place = PARTS * SLOT + thread * 16
    scale_place = PARTS * SLOT + 4 * SLOT + thread * 8

    if CLUSTER:
        _run([thread], ("barrier.cluster.arrive.relaxed.aligned; mov.b32 $0, 0;", "=r,r"), 0, _WORD)
    for i in gl.static_range(STAGES):
        _copy(
            codes, scales, codes_step, scales_step, place + i * STAGE, scale_place + i * STAGE, chunk, blocks,
            end - start, i, CHUNKS, SCALE_LANES, COPY,
        )  # fmt: skip
    if AFTER:
        _run([thread], ("griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 $0, 0;", "=r,r"), 0, _WORD)
    x = ()
    for c in gl.static_range(CHUNKS):
        for block in gl.static_range(4):
            for i in gl.static_range(TOKENS8):
                x = x + (_tokens(x_ptr, thread, chunk + c, m, k, 8 * i, block, X),)

    if CLUSTER:
        _run([thread], ("barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0;", "=r,r"), 0, _WORD)

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
            begin = tile + 1 - waiting
            last = tile + 1
            waiting = start * 0
            TOTAL: gl.constexpr = gl.SliceLayout(1, ACROSS)
            row, token, inside = _outputs(begin, last, m, n, PARTS, TOKENS8, TOTAL)
            if SPLIT == 1:
                scale, bias = _factors(
                    row, token, inside, w_scale_ptr, x_scale_ptr, bias_ptr, W_SCALES, X_SCALES, BIAS
                )  # fmt: skip
            gl.thread_barrier()
            total = gl.sum(by_warp.load(ACROSS), 1)
            gl.thread_barrier()
            if SPLIT == 1:
                _write(total, scale, bias, row, token, inside, out_ptr, n, factor, BIAS)
            else:
                sub = gl.arange(0, PARTS, gl.SliceLayout(1, TOTAL))[:, None]
                column = gl.arange(0, 128, gl.SliceLayout(0, TOTAL))[None, :]
                there = begin + sub // TOKENS8 < last
                if CLUSTER:
                    to = ((part * CLUSTER + begin - start) * TOKENS8 + sub) * 512 + column * 4
                    _run([total, TOTAL_AT + to, there.to(gl.int32)], TOTALS, 0, _FLOAT)
                else:
                    to = ((part * tiles + begin) * TOKENS8 + sub) * 128 + column
                    gl.store(partial_ptr + to, total, mask=there)

    if SPLIT > 1:
        if CLUSTER:
            _run([thread], ("barrier.cluster.arrive.release.aligned; mov.b32 $0, 0;", "=r,r"), 0, _WORD)
            _run([thread], ("barrier.cluster.wait.acquire.aligned; mov.b32 $0, 0;", "=r,r"), 0, _WORD)
            adds = part == 0
        else:
            gl.thread_barrier()
            adds = gl.atomic_add(count_ptr + program, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if adds:
            AT_ONCE: gl.constexpr = num_warps // 2
            FINAL: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [num_warps // 2, 2], [1, 0])
            sub = gl.arange(0, AT_ONCE, gl.SliceLayout(1, FINAL))[:, None]
            column = gl.arange(0, 128, gl.SliceLayout(0, FINAL))[None, :]
            for tile in range(start, end, AT_ONCE // TOKENS8):
                row, token, inside = _outputs(tile, end, m, n, AT_ONCE, TOKENS8, FINAL)
                scale, bias = _factors(
                    row, token, inside, w_scale_ptr, x_scale_ptr, bias_ptr, W_SCALES, X_SCALES, BIAS
                )  # fmt: skip
                total = gl.zeros([AT_ONCE, 128], gl.float32, FINAL)
                for s in gl.static_range(SPLIT):
                    if CLUSTER:
                        # Places of tiles that there are not are others', and what is read there is not used.
                        tile_at = gl.minimum(tile - start + sub // TOKENS8, CLUSTER - 1)
                        to = ((s * CLUSTER + tile_at) * TOKENS8 + sub % TOKENS8) * 512 + column * 4
                        total += _run([total, TOTAL_AT + to, to], TOTALS, 1, _FLOAT)[0]
                    else:
                        to = ((s * tiles + tile) * TOKENS8 + sub) * 128 + column
                        total += gl.load(partial_ptr + to, mask=inside, other=0.0, cache_modifier=".cg")
                _write(total, scale, bias, row, token, inside, out_ptr, n, factor, BIAS)
            if not CLUSTER:
                gl.store(count_ptr + program, 0)
