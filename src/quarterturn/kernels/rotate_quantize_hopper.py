"""Rotate + quantize on Hopper GPUs (sm_90), at the speed of memory.

The input is one stream of units of WIDTH neighbouring values (64, or 128 for R = 128), whole units a row. A tile is
BLOCK units in turn, across the ends of rows: a contiguous piece of memory. A few programs a
multiprocessor take tiles in turn:

    TMA copies a tile into shared memory       while earlier tiles are being worked on
    wgmma multiplies it by the matrix          +-1 in one bf16 piece, others in two or three, exact products, fp32 sums
    each thread rounds its 16 neighbouring values (ptx.py) and stores their 8 bytes of codes and the scale byte

R = 16 and 32 use a 64-wide block-diagonal matrix. Its columns are permuted so that the accumulators which wgmma leaves
in a thread are runs of neighbours (gpu_pieces.py): no value has to change its thread before it is stored.

| x        | (M, K) bf16 or fp16, contiguous, 16-byte aligned, K a multiple of the width                        |
| matrix   | (P, W, W) pieces of x's dtype, made by backends/gpu_pieces.py                                      |
| output   | int64 (M, K/16) of sixteen codes and uint8 scales; or (M, K) values; or (M, K) rotated, of x's dtype |
| moves    | as rotate_quantize.py, the matrix once a program                                                   |
| does not | check arguments, allocate, take a tensor scale a row                                               |
| see      | docs/numerics.md and reference.py for the numbers, tests/test_gpu_triton*.py for the tests         |
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import CODES, ROTATED, VALUES, ptx

RUN = {CODES: 16, VALUES: 8, ROTATED: 8}
"""Neighbouring values that a thread holds: 16 make 8 bytes of codes, 8 make 16 bytes of bf16, both whole sectors."""

_OPERANDS = 8
"""Operands of the asm texts behind the values: amax, amax_factor, encode, divisor, usual, offset, tile, matrix."""


def amax_asm(output: int, repair: int, half: bool) -> tuple[str, str]:
    """Text and constraints: values -> their amax, and the values; repair: R where a unit has several blocks, or 0."""
    run = RUN[output]
    operands = [f"${1 + run + i}" for i in range(run + _OPERANDS)]
    z, (*_, offset, tile, matrix) = operands[:run], operands[run:]
    lines = ptx.amax([f"z{i}" for i in range(run)], "a")
    if repair:
        lines += ptx.repair(repair, half, run, offset, tile, matrix)
    lines += ["mov.f32 $0, a;", *[f"mov.f32 ${1 + i}, z{i};" for i in range(run)]]
    return ptx.block(lines, z), "=f," * (1 + run) + _inputs(run)


def quantize_asm(group: int, output: int, rule: str, repair: int, half: bool) -> tuple[str, str]:
    """Text and constraints: 16 values -> (codes, scale byte), or 8 values -> four words of e2m1 * block_scale.

    Where a thread holds a whole group (codes of NVFP4) the amax is found here, else it is an operand.
    """
    run = RUN[output]
    outputs = 2 if output == CODES else run // 2
    operands = [f"${outputs + i}" for i in range(run + _OPERANDS)]
    z, (amax, amax_factor, encode, divisor, usual, offset, tile, matrix) = operands[:run], operands[run:]
    if run == group:
        lines = ptx.amax([f"z{i}" for i in range(run)], "a")
        if repair:
            lines += ptx.repair(repair, half, run, offset, tile, matrix)
    else:
        lines = [f"mov.f32 a, {amax};"]
    if group == 16:
        lines += ptx.nvfp4_scale(run, amax_factor, encode, divisor, usual)
    else:
        lines += ptx.mxfp4_scale(run, rule, amax_factor)
    saturate = group == 32 and rule == "floor"
    if output == CODES:
        lines += [*ptx.codes("$0", saturate), "mov.b32 $1, byte;"]
        return ptx.block(lines, z), "=l,=r," + _inputs(run)
    lines += ptx.values([f"w{i}" for i in range(outputs)], half, saturate)
    lines += [f"mov.b32 ${i}, w{i};" for i in range(outputs)]
    return ptx.block(lines, z), "=r," * outputs + _inputs(run)


def _inputs(run: int) -> str:
    return "f," * (run + 4) + "r,r,l,l"


def store_layout(block: int, width: int, size: int, num_warps: int) -> gl.DistributedLinearLayout:
    """How (block, width / 8, size) lies in threads, the last dimension first: what 16-byte stores need to know."""
    across = 1 if num_warps == 4 else width // 64
    down = num_warps // across
    registers = [[0, 0, 1 << i] for i in range(size.bit_length() - 1)]
    registers += [[0, 4, 0], *([[0, 8, 0]] if width // 64 > across else []), [8, 0, 0]]
    registers += [[16 * down << i, 0, 0] for i in range((block // (16 * down)).bit_length() - 1)]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16 << i, 0, 0] for i in range(down.bit_length() - 1)] + ([[0, 8, 0]] if across == 2 else [])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [block, width // 8, size])


@gluon.jit
def _split4(x):
    even, odd = x.split()
    a0, a2 = even.split()
    a1, a3 = odd.split()
    return a0, a1, a2, a3


@gluon.jit
def _join4(a0, a1, a2, a3):
    joined = gl.join(gl.join(a0, a1), gl.join(a2, a3)).permute((0, 1, 3, 2))
    return joined.reshape([joined.shape[0], joined.shape[1], 4])


@triton.jit
def _greatest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _blocked_address(unit, group, units_per_row, reciprocal, GROUPS: gl.constexpr):
    """Where the scale of a group of a unit lies in the 128x4 layout, units_per_row * GROUPS columns wide.

    reciprocal: (2^32 - 1) / units_per_row, rounded down; the quotient that it gives is one too low at most.
    """
    row = gl.umulhi(unit.to(gl.uint32), reciprocal.to(gl.uint32)).to(gl.int32)
    row = gl.where(unit - row * units_per_row >= units_per_row, row + 1, row)
    col = (unit - row * units_per_row) * GROUPS + group
    across = units_per_row * GROUPS // 4
    return (row // 128 * across + col // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


@gluon.jit
def _store(ptr, x, units, L: gl.constexpr, BLOCK: gl.constexpr, GROUPS: gl.constexpr, SIZE: gl.constexpr):
    """x (BLOCK, GROUPS, SIZE) to consecutive memory, but for units beyond the last."""
    x = gl.convert_layout(x, L, assert_trivial=True)
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    i = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    gl.store(ptr + (row * (GROUPS * SIZE) + group * SIZE + i), x, mask=row < units)


@gluon.jit
def _spread(amax, BLOCK: gl.constexpr, GROUPS: gl.constexpr, RUNS: gl.constexpr):
    """The amax of runs (BLOCK, GROUPS * RUNS) -> the greatest of each group of RUNS, for each of them."""
    runs = amax.reshape([BLOCK, GROUPS, RUNS])
    greatest = gl.reduce(runs, 2, _greatest)
    greatest = gl.convert_layout(greatest, gl.SliceLayout(2, runs.type.layout), assert_trivial=True)
    both, _ = gl.broadcast(greatest.expand_dims(2), runs)
    return gl.convert_layout(both.reshape([BLOCK, GROUPS * RUNS]), amax.type.layout, assert_trivial=True)


_SEVENTEEN_FLOATS = gl.constexpr((gl.float32,) * 17)
_NINE_FLOATS = gl.constexpr((gl.float32,) * 9)
_FOUR_WORDS = gl.constexpr((gl.int32,) * 4)


@gluon.jit
def _write_codes(
    acc, tile, out_ptr, scale_ptr, units, units_per_row, reciprocal, factor, amax_factor, encode, divisor, usual,
    x_tile, matrix, BLOCK: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr, BLOCKED: gl.constexpr,
    AMAX_ASM: gl.constexpr, AMAX_CONSTRAINTS: gl.constexpr, QUANTIZE_ASM: gl.constexpr,
    QUANTIZE_CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """The accumulator (BLOCK, WIDTH) of a tile, quantized: 64 bits of codes a run of 16, a scale byte a group."""
    z = acc.reshape([BLOCK, WIDTH // 64, 8, 4, 2]).permute((0, 1, 3, 2, 4))
    # value i of each run: 16 tensors (BLOCK, WIDTH / 16), where they are
    c0, c1, c2, c3 = _split4(z.reshape([BLOCK, WIDTH // 16, 2, 2, 2, 2]))
    z0, z4, z8, z12 = _split4(c0)
    z1, z5, z9, z13 = _split4(c1)
    z2, z6, z10, z14 = _split4(c2)
    z3, z7, z11, z15 = _split4(c3)
    L: gl.constexpr = z0.type.layout
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, L))[:, None]
    run = gl.arange(0, WIDTH // 16, gl.SliceLayout(0, L))[None, :]
    offset = row * (WIDTH // 16) + run
    inside = row < units - tile * BLOCK
    first = gl.cast(tile, gl.int64) * (BLOCK * WIDTH)
    amax = factor
    if AMAX_ASM != "":
        amax, z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11, z12, z13, z14, z15 = gl.inline_asm_elementwise(
            AMAX_ASM,
            AMAX_CONSTRAINTS,
            [z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11, z12, z13, z14, z15]
            + [factor, amax_factor, encode, divisor, usual, offset, x_tile, matrix],
            dtype=_SEVENTEEN_FLOATS,
            is_pure=True,
            pack=1,
        )
        amax = _spread(amax, BLOCK, WIDTH // GROUP, GROUP // 16)
    word, byte = gl.inline_asm_elementwise(
        QUANTIZE_ASM,
        QUANTIZE_CONSTRAINTS,
        [z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11, z12, z13, z14, z15]
        + [amax, amax_factor, encode, divisor, usual, offset, x_tile, matrix],
        dtype=(gl.int64, gl.int32),
        is_pure=True,
        pack=1,
    )
    gl.store(out_ptr + first // 16 + offset, word, mask=inside)
    writes = run % (GROUP // 16) == 0
    group = run // (GROUP // 16)
    if BLOCKED:
        at = _blocked_address(tile * BLOCK + row, group, units_per_row, reciprocal, WIDTH // GROUP)
        gl.store(scale_ptr + at, byte.to(gl.uint8), mask=writes & inside)
    else:
        at = row * (WIDTH // GROUP) + group
        gl.store(scale_ptr + first // GROUP + at, byte.to(gl.uint8), mask=writes & inside)


@gluon.jit
def _write_values(
    acc, tile, out_ptr, units, factor, amax_factor, encode, divisor, usual, x_tile, matrix, BLOCK: gl.constexpr,
    WIDTH: gl.constexpr, GROUP: gl.constexpr, OUTPUT: gl.constexpr, STORE_LAYOUT: gl.constexpr, AMAX_ASM: gl.constexpr,
    AMAX_CONSTRAINTS: gl.constexpr, QUANTIZE_ASM: gl.constexpr, QUANTIZE_CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """The accumulator (BLOCK, WIDTH) of a tile as numbers of 16 bits: e2m1 * block_scale, or as it is."""
    z = acc.reshape([BLOCK, WIDTH // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4))
    # value i of each run: 8 tensors (BLOCK, WIDTH / 8), where they are
    even, odd = z.reshape([BLOCK, WIDTH // 8, 2, 2, 2]).split()
    z0, z2, z4, z6 = _split4(even)
    z1, z3, z5, z7 = _split4(odd)
    L: gl.constexpr = z0.type.layout
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, L))[:, None]
    run = gl.arange(0, WIDTH // 8, gl.SliceLayout(0, L))[None, :]
    offset = row * (WIDTH // 8) + run
    first = gl.cast(tile, gl.int64) * (BLOCK * WIDTH)
    amax = factor
    if AMAX_ASM != "":
        amax, z0, z1, z2, z3, z4, z5, z6, z7 = gl.inline_asm_elementwise(
            AMAX_ASM,
            AMAX_CONSTRAINTS,
            [z0, z1, z2, z3, z4, z5, z6, z7] + [factor, amax_factor, encode, divisor, usual, offset, x_tile, matrix],
            dtype=_NINE_FLOATS,
            is_pure=True,
            pack=1,
        )
    if OUTPUT == 1:
        amax = _spread(amax, BLOCK, WIDTH // GROUP, GROUP // 8)
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            QUANTIZE_ASM,
            QUANTIZE_CONSTRAINTS,
            [z0, z1, z2, z3, z4, z5, z6, z7] + [amax, amax_factor, encode, divisor, usual, offset, x_tile, matrix],
            dtype=_FOUR_WORDS,
            is_pure=True,
            pack=1,
        )
        words = _join4(w0, w1, w2, w3)
        _store(out_ptr + first // 2, words, units - tile * BLOCK, STORE_LAYOUT, BLOCK, WIDTH // 8, 4)
    else:
        out: gl.constexpr = out_ptr.dtype.element_ty
        halves = gl.join(_join4(z0, z2, z4, z6), _join4(z1, z3, z5, z7))
        turned = (halves.reshape([BLOCK, WIDTH // 8, 8]) * factor).to(out)
        _store(out_ptr + first, turned, units - tile * BLOCK, STORE_LAYOUT, BLOCK, WIDTH // 8, 8)


@gluon.jit
def _write_padding(
    scale_ptr, pid, programs, units, padded_units, units_per_row, reciprocal, GROUPS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Scales of zero for the rows behind the last, up to a multiple of 128."""
    PL: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    BYTES_A_STORE: gl.constexpr = 4 if GROUPS >= 4 else 1
    for start in range(units + pid * (32 * num_warps), padded_units, programs * (32 * num_warps)):
        unit = start + gl.arange(0, 32 * num_warps, PL)
        for group in gl.static_range(0, GROUPS, BYTES_A_STORE):
            at = _blocked_address(unit, group, units_per_row, reciprocal, GROUPS)
            zero = gl.full_like(unit, 0)
            if BYTES_A_STORE == 4:
                words = (scale_ptr + at).to(gl.pointer_type(gl.int32), bitcast=True)
                gl.store(words, zero, mask=unit < padded_units)
            else:
                gl.store(scale_ptr + at, zero.to(gl.uint8), mask=unit < padded_units)


@gluon.jit(
    do_not_specialize=[
        "units",
        "padded_units",
        "units_per_row",
        "reciprocal",
        "factor",
        "twice_inverse",
        "amax_factor",
    ],
    do_not_specialize_on_alignment=["encode_ptr"],
)
def rotate_quantize_hopper(
    x_desc,
    pieces_desc,
    x_ptr,
    matrix_ptr,
    out_ptr,
    scale_ptr,
    tensor_scale_ptr,
    encode_ptr,
    units,
    padded_units,
    units_per_row,
    reciprocal,
    factor,
    twice_inverse,
    amax_factor,
    WIDTH: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    OUTPUT: gl.constexpr,
    BLOCKED: gl.constexpr,
    GROUP: gl.constexpr,
    STORE_LAYOUT: gl.constexpr,
    REPAIR: gl.constexpr,
    AMAX_ASM: gl.constexpr,
    AMAX_CONSTRAINTS: gl.constexpr,
    QUANTIZE_ASM: gl.constexpr,
    QUANTIZE_CONSTRAINTS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One launch over `units` units of WIDTH values. x_desc and x_ptr are the same memory.

    padded_units: with blocked scales, the units of all rows up to a multiple of 128, whose scales are written as zero.
    reciprocal: see _blocked_address. factor: what the accumulator lacks. twice_inverse: 2 / factor. amax_factor: what
    an amax is multiplied by.
    """
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    tiles = (units + BLOCK - 1) // BLOCK
    dtype: gl.constexpr = x_desc.dtype
    BYTES: gl.constexpr = BLOCK * WIDTH * 2

    encode = gl.load(encode_ptr)  # asked for first, so that its latency overlaps with all that follows
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDTH], x_desc.layout)
    pieces = gl.allocate_shared_memory(dtype, [PIECES, WIDTH, WIDTH], pieces_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.expect(arrived.index(STAGES), PIECES * WIDTH * WIDTH * 2)
    for i in gl.static_range(PIECES):
        tma.async_copy_global_to_shared(pieces_desc, [i * WIDTH, 0], arrived.index(STAGES), pieces.index(i))
    for i in gl.static_range(STAGES):
        tile = pid + i * programs
        mbarrier.expect(arrived.index(i), BYTES, pred=tile < tiles)
        tma.async_copy_global_to_shared(
            x_desc, [tile * BLOCK, 0], arrived.index(i), x_tiles.index(i), pred=tile < tiles
        )
    tensor_scale = gl.inline_asm_elementwise(
        "rcp.rn.f32 $0, $1;", "=f,f", [encode], dtype=gl.float32, is_pure=True, pack=1
    )
    if OUTPUT < 2:
        if pid == 0:
            gl.store(tensor_scale_ptr, tensor_scale)
    divisor = tensor_scale * twice_inverse
    usual = gl.to_tensor(0)
    if divisor > 1e-30:
        if divisor < 1e30:
            usual = gl.to_tensor(0x76)
    mbarrier.wait(arrived.index(STAGES), 0)

    # Eight warps share a unit of 128 values, four hold each its own rows of units.
    ACROSS: gl.constexpr = 1 if num_warps == 4 else WIDTH // 64
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps // ACROSS, ACROSS], [16, WIDTH // ACROSS, 16])
    stage = 0
    phase = 0
    for tile in range(pid, tiles, programs):
        mbarrier.wait(arrived.index(stage), phase)
        acc = gl.zeros([BLOCK, WIDTH], gl.float32, ACC)
        for i in gl.static_range(PIECES):
            piece = pieces.index(i).permute((1, 0))
            acc = warpgroup_mma(x_tiles.index(stage), piece, acc, use_acc=i > 0, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        gl.thread_barrier()
        following = tile + STAGES * programs
        mbarrier.expect(arrived.index(stage), BYTES, pred=following < tiles)
        tma.async_copy_global_to_shared(
            x_desc, [following * BLOCK, 0], arrived.index(stage), x_tiles.index(stage), pred=following < tiles
        )
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

        x_tile = gl.to_tensor(0).to(gl.int64)
        matrix = gl.to_tensor(0).to(gl.int64)
        if REPAIR:
            x_tile = (x_ptr + gl.cast(tile, gl.int64) * (BLOCK * WIDTH)).to(gl.int64)
            matrix = matrix_ptr.to(gl.int64)
        if OUTPUT == 0:
            _write_codes(
                acc, tile, out_ptr, scale_ptr, units, units_per_row, reciprocal, factor, amax_factor, encode, divisor,
                usual, x_tile, matrix, BLOCK, WIDTH, GROUP, BLOCKED, AMAX_ASM, AMAX_CONSTRAINTS, QUANTIZE_ASM,
                QUANTIZE_CONSTRAINTS,
            )  # fmt: skip
        else:
            _write_values(
                acc, tile, out_ptr, units, factor, amax_factor, encode, divisor, usual, x_tile, matrix, BLOCK, WIDTH,
                GROUP, OUTPUT, STORE_LAYOUT, AMAX_ASM, AMAX_CONSTRAINTS, QUANTIZE_ASM, QUANTIZE_CONSTRAINTS,
            )  # fmt: skip
    if BLOCKED:
        _write_padding(
            scale_ptr, pid, programs, units, padded_units, units_per_row, reciprocal, WIDTH // GROUP, num_warps
        )
