"""Rotate + quantize on Hopper GPUs (sm_90), at the speed of memory.

The input is one stream of units of WIDTH neighbouring values (64, or 128 for R = 128), whole units a row. A tile is
BLOCK units in turn, across the ends of rows: a contiguous piece of memory. A few programs a
multiprocessor take tiles in turn:

    TMA copies a tile into shared memory       while earlier tiles are being worked on
    wgmma multiplies it by the matrix          +-1 in one bf16 piece, others in two or three, exact products, fp32 sums
    each thread rounds its 16 neighbouring values (ptx.py) and stores their 8 bytes of codes and the scale byte

R = 16 and 32 use a block-diagonal matrix. Its columns are permuted so that the accumulators which wgmma leaves
in a thread are runs of neighbours (gpu_pieces.py): no value has to change its thread before it is stored.

NVFP4 codes of a dense matrix are made with two of its three pieces. Where that leaves a scale byte in doubt, in one
group of twenty thousand, its amax is summed again from the matrix itself (ptx.exact_amax).

Few values are spread over as many programs as there can be: each has one tile and some of its columns, threads copy
(a TMA descriptor would have to be fetched first), and the launch overlaps the end of the kernel before it, as some
tilings of many values do, which read the matrix meanwhile. Where those
are 32 columns, a thread holds 8 neighbours of two rows, and pairs of lanes finish a row each.

| x        | (M, K) bf16 or fp16, contiguous, 16-byte aligned, K a multiple of the width                        |
| matrix   | (P, W, W) pieces of x's dtype, made by backends/gpu_pieces.py                                      |
| output   | int64 (M, K/16) of sixteen codes and uint8 scales; or (M, K) values; or (M, K) rotated, of x's dtype;  |
|          | both as words of two numbers in the order that matmul_many.py multiplies, with ORDER_ASM            |
| moves    | as rotate_quantize.py, the matrix once a program                                                   |
| does not | check arguments, allocate, take a tensor scale a row                                               |
| see      | docs/numerics.md and reference.py for the numbers, tests/test_gpu_triton*.py for the tests         |
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .rotate_quantize_hopper_write import write_codes, write_padding, write_values


@gluon.jit
def _copy_rows(shared, ptr, first, end, ROWS: gl.constexpr, WIDTH: gl.constexpr, num_warps: gl.constexpr):
    """Rows `first` and on of WIDTH values each into shared memory, by the threads themselves; zeros from `end` on."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [num_warps, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, L))[:, None]
    col = gl.arange(0, WIDTH, gl.SliceLayout(0, L))[None, :]
    at = ptr + gl.cast(first, gl.int64) * WIDTH + (row * WIDTH + col)
    async_copy.async_copy_global_to_shared(shared, at, mask=(first + row < end) & (col >= 0))


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
    pieces_ptr,
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
    PARTS: gl.constexpr,
    FROM_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
    EARLY: gl.constexpr,
    OUTPUT: gl.constexpr,
    BLOCKED: gl.constexpr,
    GROUP: gl.constexpr,
    STORE_LAYOUT: gl.constexpr,
    ORDER_ASM: gl.constexpr,
    REPAIR: gl.constexpr,
    NEAR: gl.constexpr,
    AMAX_ASM: gl.constexpr,
    AMAX_CONSTRAINTS: gl.constexpr,
    QUANTIZE_ASM: gl.constexpr,
    QUANTIZE_CONSTRAINTS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One launch over `units` units of WIDTH values. x_desc and x_ptr are the same memory; so with pieces.

    padded_units: with blocked scales, the units of all rows up to a multiple of 128, whose scales are written as zero.
    reciprocal: see _blocked_address. factor: what the accumulator lacks. twice_inverse: 2 / factor. amax_factor: what
    an amax is multiplied by.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0) // PARTS
    tiles = (units + BLOCK - 1) // BLOCK
    dtype: gl.constexpr = x_desc.dtype
    BYTES: gl.constexpr = BLOCK * WIDTH * 2
    COLUMNS: gl.constexpr = WIDTH // PARTS
    if PARTS == 1:
        part = 0
        first = program
    else:
        part = program % PARTS
        first = program // PARTS

    # The kernel before may still run: but for pieces, which were there before it, nothing is read or written until it
    # has ended.
    if PDL and STAGES == 0:
        if EARLY:
            gdc_launch_dependents()  # the kernel behind may start, and wait in the same way
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    x_tiles = gl.allocate_shared_memory(dtype, [max(STAGES, 1), BLOCK, WIDTH], x_desc.layout)
    pieces = gl.allocate_shared_memory(dtype, [PIECES, COLUMNS, WIDTH], pieces_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    if STAGES == 0:
        encode = gl.load(encode_ptr)  # asked for first, so that its latency overlaps with all that follows
        _copy_rows(x_tiles.index(0), x_ptr, first * BLOCK, units, BLOCK, WIDTH, num_warps)
        for i in gl.static_range(PIECES):
            row = i * WIDTH + part * COLUMNS
            _copy_rows(pieces.index(i), pieces_ptr, row, row + COLUMNS, COLUMNS, WIDTH, num_warps)
        async_copy.commit_group()
    else:
        for i in gl.static_range(STAGES + 1):
            mbarrier.init(arrived.index(i), count=1)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.expect(arrived.index(STAGES), PIECES * COLUMNS * WIDTH * 2)
        for i in gl.static_range(PIECES):
            row = i * WIDTH + part * COLUMNS
            tma.async_copy_global_to_shared(pieces_desc, [row, 0], arrived.index(STAGES), pieces.index(i))
        if PDL:
            gdc_launch_dependents()  # the kernel behind may start where this one's programs end, and wait likewise
            gdc_wait()
        encode = gl.load(encode_ptr)
        for i in gl.static_range(STAGES):
            tile = first + i * programs
            mbarrier.expect(arrived.index(i), BYTES, pred=tile < tiles)
            tma.async_copy_global_to_shared(
                x_desc, [tile * BLOCK, 0], arrived.index(i), x_tiles.index(i), pred=tile < tiles
            )
    if BLOCKED:
        write_padding(
            scale_ptr, program, gl.num_programs(0), units, padded_units, units_per_row, reciprocal, WIDTH // GROUP,
            num_warps,
        )  # fmt: skip
    tensor_scale = gl.inline_asm_elementwise(
        "rcp.rn.f32 $0, $1;", "=f,f", [encode], dtype=gl.float32, is_pure=True, pack=1
    )
    if OUTPUT < 2:
        if program == 0:
            gl.store(tensor_scale_ptr, tensor_scale)
    divisor = tensor_scale * twice_inverse
    usual = gl.to_tensor(0)
    if divisor > 1e-30:
        if divisor < 1e30:
            usual = gl.to_tensor(0x76)
    if STAGES == 0:
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
    else:
        mbarrier.wait(arrived.index(STAGES), 0)

    # As many warps as rows, or twice as many that share the columns.
    ACROSS: gl.constexpr = 2 if 16 * num_warps > BLOCK else 1
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps // ACROSS, ACROSS], [16, COLUMNS // ACROSS, 16])
    stage = 0
    phase = 0
    for tile in range(first, tiles, programs):
        if STAGES > 0:
            mbarrier.wait(arrived.index(stage), phase)
        acc = gl.zeros([BLOCK, COLUMNS], gl.float32, ACC)
        if FROM_REGISTERS:
            x = x_tiles.index(stage).load(gl.DotOperandLayout(0, ACC, 2))
        else:
            for i in gl.static_range(PIECES):
                piece = pieces.index(i).permute((1, 0))
                acc = warpgroup_mma(x_tiles.index(stage), piece, acc, use_acc=i > 0, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
        if STAGES > 0:
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
        if FROM_REGISTERS:
            for i in gl.static_range(PIECES):
                acc = warpgroup_mma(x, pieces.index(i).permute((1, 0)), acc, use_acc=i > 0, is_async=True)
            acc, _ = warpgroup_mma_wait(0, [acc, x])

        x_tile = gl.to_tensor(0).to(gl.int64)
        matrix = gl.to_tensor(0).to(gl.int64)
        if REPAIR or NEAR:
            x_tile = (x_ptr + gl.cast(tile, gl.int64) * (BLOCK * WIDTH)).to(gl.int64)
            matrix = matrix_ptr.to(gl.int64)
        if OUTPUT == 0:
            write_codes(
                acc, tile, part, out_ptr, scale_ptr, units, units_per_row, reciprocal, factor, amax_factor, encode,
                divisor, usual, x_tile, matrix, BLOCK, WIDTH, COLUMNS, GROUP, BLOCKED, NEAR, AMAX_ASM, AMAX_CONSTRAINTS,
                QUANTIZE_ASM, QUANTIZE_CONSTRAINTS,
            )  # fmt: skip
        else:
            write_values(
                acc, tile, part, out_ptr, units, factor, amax_factor, encode, divisor, usual, x_tile, matrix, BLOCK,
                WIDTH, COLUMNS, GROUP, OUTPUT, STORE_LAYOUT, ORDER_ASM, AMAX_ASM, AMAX_CONSTRAINTS, QUANTIZE_ASM,
                QUANTIZE_CONSTRAINTS,
            )  # fmt: skip
