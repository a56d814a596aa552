"""y (M, N) = x (M, K) @ w (N, K)^T for a few tokens, on tensor cores through mma.sync, at the speed of memory.

    warp         one part of K, 256 values, of 16 rows of w at a time: sixteen registers of codes a lane, asked for
                 TILES tiles ahead; its part of x stays in registers for the whole launch
    program      WARPS parts of K beside each other; every TILES tiles of rows the warps' sums go through shared
                 memory and are added in the order of K
    launch       SPLIT programs share a range of rows, each with its own parts of K; sums go through `partial`, and
                 the program that comes last adds them in the order of K

| x        | (M, K) bf16 or fp16, rows contiguous, 16-byte aligned; M <= 8 TOKENS8                                  |
| w        | weight_layout.Fragments; fp16 x: NVFP4 alone                                                           |
| scales   | w_scale fp32 (1,) or (N,), x_scale fp32 (1,) or (M,), or neither                                       |
| output   | (M, N) of x's dtype: sum * 2^exponent * fp32(x_scale * w_scale) + bias, fp32 sums, rounded once         |
| moves    | w once, x once a program, sums of SPLIT > 1 twice                                                      |
| does not | check arguments, allocate; `count` is zero before and after                                            |
| see      | weight_layout.py, fp4_decode.py; tests/test_matmul_few*.py                                             |

A lane 4g+q holds of the sums of a tile: rows g and g + 8, tokens 2q and 2q + 1 (mma.m16n8k16's accumulator).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats import FP4Format
from . import fp4_decode

CHUNK = 256
"""Values of K whose scales a lane has in eight bytes: four blocks."""

TILES = 2
"""Tiles of 16 rows that a warp multiplies side by side, so that they share x and two chains of sums overlap."""

_STREAM = "ld.global.nc.L1::no_allocate"


def codes_asm(block: int) -> tuple[str, str]:
    """(address, blocks) -> the four words of codes of a lane in a block, undefined unless block < blocks."""
    lines = [
        ".reg .pred p;",
        f"setp.gt.s32 p, $5, {block};",
        f"@p {_STREAM}.v4.b32 {{$0, $1, $2, $3}}, [$4+{512 * block}];",
    ]
    return _text(lines), "=r,=r,=r,=r,l,r"


def scales_asm(whole: bool) -> tuple[str, str]:
    """(address, blocks) -> the two words of scales of a lane in a chunk; where blocks is 0 zero, if `whole` undefined."""
    clear = [] if whole else ["mov.b32 $0, 0;", "mov.b32 $1, 0;"]
    lines = [".reg .pred p;", "setp.gt.s32 p, $3, 0;", *clear, f"@p {_STREAM}.v2.b32 {{$0, $1}}, [$2];"]
    return _text(lines), "=&r,=&r,l,r"


def x_asm() -> tuple[str, str]:
    """(address, exists) -> the 16 values of a token and a block that a lane multiplies, or zeros: 8 words."""
    lines = [".reg .pred p;", "setp.ne.s32 p, $9, 0;", *[f"mov.b32 ${i}, 0;" for i in range(8)]]
    for i in (0, 4):
        words = ", ".join(f"${i + j}" for j in range(4))
        lines.append(f"@p ld.global.nc.v4.b32 {{{words}}}, [$8+{4 * i}];")
    return _text(lines), "=&r," * 8 + "l,r"


def shared_asm(words: int, load: bool) -> tuple[str, str]:
    """(words, byte) stores, (byte) loads 4 or 8 words of a lane: those behind the fourth lie a slot further.

    `byte` counts from the start of the program's shared memory. Triton's own stores would wait for all warps at each.
    """
    names = [f"${i}" for i in range(words)]
    at, slot = (f"${words}", f"${words + 1}") if load else (f"${1 + words}", f"${2 + words}")
    if not load:
        names = [f"${1 + i}" for i in range(words)]
    lines = [".reg .b32 at;", "mov.u32 at, global_smem;", f"add.u32 at, at, {at};"]
    for i in range(0, words, 4):
        four = "{" + ", ".join(names[i : i + 4]) + "}"
        lines += [f"ld.shared.v4.b32 {four}, [at];" if load else f"st.shared.v4.b32 [at], {four};"]
        if i + 4 < words:
            lines.append(f"add.u32 at, at, {slot};")
    if load:
        return _text(lines), "=r," * words + "r,r"
    return _text([*lines, "mov.b32 $0, 0;"]), "=r," + "r," * words + "r,r"


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


def texts(tokens8: int, fmt: FP4Format, half: bool, whole: bool) -> dict[str, object]:
    """The texts as the kernel's constants."""
    steps = [step_asm(block, tokens8, fmt, half) for block in (0, 1)]
    return {
        "CODES": (*(codes_asm(block)[0] for block in range(4)), codes_asm(0)[1]), "SCALES": scales_asm(whole), "X": x_asm(),
        "STEP": (steps[0][0], steps[1][0], steps[0][1]), "STORE4": shared_asm(4, False),
        "STORE8": shared_asm(8, False), "LOAD8": shared_asm(8, True), "SCALE_LANES": 512 // fmt.group_size,
    }  # fmt: skip


_WORDS2 = gl.constexpr((gl.int32,) * 2)
_WORDS4 = gl.constexpr((gl.int32,) * 4)
_WORDS8 = gl.constexpr((gl.int32,) * 8)
_SUMS4 = gl.constexpr((gl.float32,) * 4)
_SUMS8 = gl.constexpr((gl.float32,) * 8)
_SUMS16 = gl.constexpr((gl.float32,) * 16)


@gluon.jit
def _load(address, blocks, TEXTS: gl.constexpr, WHICH: gl.constexpr, DTYPE: gl.constexpr):
    """What a text of TEXTS, whose last is their constraints, loads."""
    return gl.inline_asm_elementwise(TEXTS[WHICH], TEXTS[-1], [address, blocks], dtype=DTYPE, is_pure=False, pack=1)


@gluon.jit
def _four_blocks(codes, blocks, CODES: gl.constexpr):
    return (
        _load(codes, blocks, CODES, 0, _WORDS4), _load(codes, blocks, CODES, 1, _WORDS4),
        _load(codes, blocks, CODES, 2, _WORDS4), _load(codes, blocks, CODES, 3, _WORDS4),
    )  # fmt: skip


@gluon.jit
def _tokens(x_ptr, thread, chunk, m, k, FIRST: gl.constexpr, BLOCK: gl.constexpr, X: gl.constexpr):
    """A lane's words of tokens FIRST..+7 in a block of a chunk. A row behind the last is the last."""
    token = gl.minimum(FIRST + thread % 32 // 4, m - 1)
    at = chunk * 256 + BLOCK * 64 + thread % 4 * 16
    return _load(x_ptr + token.to(gl.int64) * k + at, (at < k).to(gl.int32), X, 0, _WORDS8)


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


@gluon.jit(do_not_specialize=["m", "n", "k", "tiles", "blocks", "chunks", "each", "more", "factor"])
def matmul_few(
    x_ptr, codes_ptr, scales_ptr, w_scale_ptr, x_scale_ptr, bias_ptr, out_ptr, partial_ptr, count_ptr, m, n, k, tiles,
    blocks, chunks, each, more, factor, TOKENS8: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr,
    X_SHARED: gl.constexpr, SPLIT: gl.constexpr, W_SCALES: gl.constexpr, X_SCALES: gl.constexpr, BIAS: gl.constexpr,
    SCALE_LANES: gl.constexpr, CODES: gl.constexpr, SCALES: gl.constexpr, X: gl.constexpr, STEP: gl.constexpr,
    STORE4: gl.constexpr, STORE8: gl.constexpr, LOAD8: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """tiles: of 16 rows; blocks, chunks: K / 64 and K / 256, rounded up; each, more: tiles a program, and how many
    programs have one more.

    CHUNKS: that a warp takes. SLOTS: pairs of tiles whose sums wait in shared memory. X_SHARED: x waits there too, in
    registers otherwise. W_SCALES, X_SCALES: 0 for none, 1 for one number, 2 for one a row of w or of x.
    factor: 2^exponent.
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
    exists = blocks - chunk * 4
    first = start.to(gl.int64)
    codes_step = blocks.to(gl.int64) * 128
    scales_step = chunks.to(gl.int64) * (SCALE_LANES * 2)
    codes = codes_ptr + (first * blocks + chunk * 4) * 128 + lane * 4
    scales = scales_ptr + ((first * chunks + chunk) * SCALE_LANES + lane * SCALE_LANES // 32) * 2

    here0, here1 = exists, gl.where(start + 1 < end, exists, 0)
    words0 = _four_blocks(codes, here0, CODES)
    words1 = _four_blocks(codes + codes_step, here1, CODES)
    scale0 = _load(scales, here0, SCALES, 0, _WORDS2)
    scale1 = _load(scales + scales_step, here1, SCALES, 0, _WORDS2)

    # Sums of SLOTS pairs of tiles first, then x: of each a lane's 16 bytes beside those of the next lane.
    PARTS: gl.constexpr = 2 * SLOTS * TOKENS8
    X_PARTS: gl.constexpr = 8 * CHUNKS * TOKENS8 if X_SHARED else 0
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = gl.allocate_shared_memory(gl.float32, [(PARTS + X_PARTS) * THREADS * 4], FLAT)
    by_warp = shared._reinterpret(
        gl.float32, [PARTS, num_warps, 128], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    ACROSS: gl.constexpr = gl.BlockedLayout([1, num_warps, 1], [1, 1, 32], [num_warps // 4, 1, 4], [2, 1, 0])
    SLOT: gl.constexpr = THREADS * 16
    slot = gl.full([THREADS], SLOT, gl.int32, LANES)

    x = ()
    for c in gl.static_range(CHUNKS):
        for block in gl.static_range(4):
            for i in gl.static_range(TOKENS8):
                found = _tokens(x_ptr, thread, chunk + c, m, k, 8 * i, block, X)
                if X_SHARED:
                    at = thread * 16 + (PARTS + 2 * ((c * 4 + block) * TOKENS8 + i)) * SLOT
                    gl.inline_asm_elementwise(
                        STORE8[0],
                        STORE8[1],
                        [found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7], at, slot],
                        dtype=gl.int32,
                        is_pure=False,
                        pack=1,
                    )
                else:
                    x = x + (found,)

    zero = gl.full([THREADS], 0.0, gl.float32, LANES)
    waiting = start * 0
    for tile in range(start, end, 2):
        sums0 = (zero,) * (4 * TOKENS8)
        sums1 = (zero,) * (4 * TOKENS8)
        for c in gl.static_range(CHUNKS):
            # What comes next: the next chunk of these tiles, or the first of the next two.
            if c + 1 < CHUNKS:
                codes += 512
                scales += SCALE_LANES * 2
                next0 = exists - 4 * (c + 1)
                next1 = gl.where(tile + 1 < end, next0, 0)
            else:
                codes += 2 * codes_step - 512 * (CHUNKS - 1)
                scales += 2 * scales_step - SCALE_LANES * 2 * (CHUNKS - 1)
                next0 = gl.where(tile + 2 < end, exists, 0)
                next1 = gl.where(tile + 3 < end, exists, 0)
            scale_next0 = _load(scales, next0, SCALES, 0, _WORDS2)
            scale_next1 = _load(scales + scales_step, next1, SCALES, 0, _WORDS2)
            for block in gl.static_range(4):
                operand = ()
                for i in gl.static_range(TOKENS8):
                    if X_SHARED:
                        at = thread * 16 + (PARTS + 2 * ((c * 4 + block) * TOKENS8 + i)) * SLOT
                        operand = operand + (_load(at, slot, LOAD8, 0, _WORDS8),)
                    else:
                        operand = operand + (x[(c * 4 + block) * TOKENS8 + i],)
                sums0 = _step(words0[block], scale0[block // 2], operand, sums0, block, TOKENS8, STEP)
                following0 = _load(codes, next0, CODES, block, _WORDS4)
                words0 = words0[:block] + (following0,) + words0[block + 1 :]
                sums1 = _step(words1[block], scale1[block // 2], operand, sums1, block, TOKENS8, STEP)
                following1 = _load(codes + codes_step, next1, CODES, block, _WORDS4)
                words1 = words1[:block] + (following1,) + words1[block + 1 :]
            scale0 = scale_next0
            scale1 = scale_next1
        for i in gl.static_range(TOKENS8):
            at = thread * 16 + (waiting * 2 * TOKENS8 + i) * SLOT
            gl.inline_asm_elementwise(
                STORE4[0],
                STORE4[1],
                [sums0[4 * i], sums0[4 * i + 1], sums0[4 * i + 2], sums0[4 * i + 3], at, slot],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
            gl.inline_asm_elementwise(
                STORE4[0],
                STORE4[1],
                [sums1[4 * i], sums1[4 * i + 1], sums1[4 * i + 2], sums1[4 * i + 3], at + TOKENS8 * SLOT, slot],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        waiting += 1
        if (waiting == SLOTS) | (tile + 2 >= end):
            begin = tile + 2 - 2 * waiting
            last = gl.minimum(end, tile + 2)
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
                place = gl.arange(0, 128, gl.SliceLayout(0, TOTAL))[None, :]
                to = ((part * tiles + begin) * TOKENS8 + sub) * 128 + place
                gl.store(partial_ptr + to, total, mask=begin + sub // TOKENS8 < last)

    if SPLIT > 1:
        gl.thread_barrier()
        before = gl.atomic_add(count_ptr + program, 1, sem="acq_rel", scope="gpu")
        if before == SPLIT - 1:
            AT_ONCE: gl.constexpr = num_warps // 2
            FINAL: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [num_warps // 2, 2], [1, 0])
            sub = gl.arange(0, AT_ONCE, gl.SliceLayout(1, FINAL))[:, None]
            place = gl.arange(0, 128, gl.SliceLayout(0, FINAL))[None, :]
            for tile in range(start, end, AT_ONCE // TOKENS8):
                row, token, inside = _outputs(tile, end, m, n, AT_ONCE, TOKENS8, FINAL)
                scale, bias = _factors(
                    row, token, inside, w_scale_ptr, x_scale_ptr, bias_ptr, W_SCALES, X_SCALES, BIAS
                )  # fmt: skip
                total = gl.zeros([AT_ONCE, 128], gl.float32, FINAL)
                for s in gl.static_range(SPLIT):
                    to = ((s * tiles + tile) * TOKENS8 + sub) * 128 + place
                    total += gl.load(partial_ptr + to, mask=inside, other=0.0, cache_modifier=".cg")
                _write(total, scale, bias, row, token, inside, out_ptr, n, factor, BIAS)
            gl.store(count_ptr + program, 0)
