"""Rotation by a wide +-1 matrix that is a Kronecker product, on Hopper GPUs (sm_90): DENSE by wgmma, then factors H.

    z = ((x * left) @ (DENSE x H x ... x H)) * right * factor                 H = [[1, 1], [1, -1]]

A row of x is a matrix (d, n), d below ORDER, n below INNER. A program takes rows in turn:

    one warp         copies rows by TMA, in units of CHUNK values of d that follow each other in memory, FLIGHT of them
                     at a time: more would be in each other's way (docs/notes.md)
    four warps       change signs of x in shared memory, where there are such
    the other warps  multiply a row by DENSE, +-1 or +-2^p by 16-bit values, which is exact, in fp32 sums; each factor H
                     is then a sum and a difference, rounded once, log2(INNER) roundings a value

Of the digits of n a thread holds all but two in its registers. For those two, pairs of lanes exchange half of their
values; what they hold then is runs of eight neighbours, and a lane's differences have a sign by the lane.

All warps that multiply run one piece of code. As a piece for each group of four it does not fit in the instruction
cache, which costs a third of the time.

| x_desc   | (rows, ORDER, INNER) bf16 or fp16, contiguous, 16-byte aligned; tiles (1, CHUNK, 64)           |
| dense    | (128, 128) of x's dtype, [output, input], zeros from ORDER on; ORDER <= 128, INNER 64, 128 or 256  |
| signs    | left: int32 (INNER / 32, 128), right: (INNER / 64, 256), of gpu_wide_hopper.py; read if LEFT, RIGHT |
| output   | (rows, ORDER * INNER) bf16, fp16 or fp32; a zero is +0                                             |
| moves    | x once and the output once; DENSE and signs once a program                                         |
| does not | check arguments, allocate                                                                          |
| see      | backends/gpu_wide_hopper.py, tests/test_gpu_triton_wide.py, tests/test_wide_hopper_compile.py      |
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import ring_ptx

NUM_WARPS = 8
"""Warps that multiply: two groups of four, each with half of DENSE's outputs."""

# How a slice of 64 columns lies in threads as it is stored (row group of a warp, half of it, row, n / 32, n / 8 % 4,
# n % 8), and how 16 rows of it do as their signs are changed in shared memory, in pairs (row, pair / 4, pair % 4).
_STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 4], [0, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0]],
        [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0], [0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0], [0, 0, 4, 0, 0, 0]],
        [[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]],
        [],
        [8, 2, 8, 2, 4, 8],
    )
)
_FLIP = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0]],
        [[4, 0, 0], [8, 0, 0]],
        [],
        [16, 8, 4],
    )
)


@gluon.constexpr_function
def units(order, chunk):
    """Units of a row."""
    return (order + chunk - 1) // chunk


@gluon.jit
def _copy(
    x_desc, ring, barriers, rows, ORDER: gl.constexpr, SLICES: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    FLIGHT: gl.constexpr,
):  # fmt: skip
    """The warp that fills the ring."""
    UNITS: gl.constexpr = units(ORDER, CHUNK)
    stage = 0
    phase = 1
    sent = 0
    awaited = 0
    awaited_phase = 0
    gdc_wait()  # the kernel before may still run: x is not read, nor z written, until it has ended
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        mbarrier.wait(barriers.index(STAGES * UNITS + stage), phase)
        for unit in gl.static_range(UNITS):
            if sent >= FLIGHT:
                mbarrier.wait(barriers.index(awaited), awaited_phase)
                awaited += 1
                if awaited == STAGES * UNITS:
                    awaited = 0
                    awaited_phase ^= 1
            sent += 1
            full = barriers.index(stage * UNITS + unit)
            mbarrier.expect(full, CHUNK * SLICES * 128)
            for j in gl.static_range(SLICES):
                to = ring.index(stage * SLICES + j).slice(unit * CHUNK, CHUNK, 0)
                to = to._reinterpret(x_desc.dtype, [1, CHUNK, 64], x_desc.layout)
                tma.async_copy_global_to_shared(x_desc, [row, unit * CHUNK, j * 64], full, to)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _change_signs(
    left_ptr, ring, barriers, rows, ORDER: gl.constexpr, SLICES: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """The warps that change signs of x in shared memory, unit after unit as they arrive."""
    UNITS: gl.constexpr = units(ORDER, CHUNK)
    TOGETHER: gl.constexpr = 4 if SLICES == 4 else 2
    gl.static_assert(CHUNK // 16 * SLICES % TOGETHER == 0)
    FULL: gl.constexpr = barriers_at(SLICES, STAGES)
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, _FLIP))
    thread = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, _FLIP)))[:, None] * 8
    thread += gl.arange(0, 8, ROW)[None, :]
    words = ()
    for i in gl.static_range(2 * SLICES):
        words += (gl.load(left_ptr + (i * 128 + thread)),)
    stage = 0
    phase = 0
    for _ in range(gl.program_id(0), rows, gl.num_programs(0)):
        for unit in gl.static_range(UNITS):
            ring_ptx.run([FULL + 8 * (stage * UNITS + unit), phase], WAIT)
            # Some loads before the first store, which the compiler could not tell apart: these warps seldom get a turn.
            for first in gl.static_range(unit * CHUNK // 16 * SLICES, (unit + 1) * CHUNK // 16 * SLICES, TOGETHER):
                changed = ()
                for piece in gl.static_range(first, first + TOGETHER):
                    changed += (_changed(ring, stage, piece, SLICES, words[piece // 4]),)
                for piece in gl.static_range(first, first + TOGETHER):
                    _pairs(ring, stage, piece, SLICES).store(changed[piece - first])
            fence_async_shared()
            mbarrier.arrive(barriers.index(STAGES * UNITS + STAGES + stage * UNITS + unit), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _pairs(ring, stage, PIECE: gl.constexpr, SLICES: gl.constexpr):
    """16 rows of a slice as pairs in int32 (16, 32)."""
    rows16 = ring.index(stage * SLICES + PIECE % SLICES).slice(PIECE // SLICES * 16, 16, 0)
    return rows16._reinterpret(gl.int32, [16, 32], gl.NVMMASharedLayout(128, 32, 2))


@gluon.jit
def _changed(ring, stage, PIECE: gl.constexpr, SLICES: gl.constexpr, word):
    """Such a piece with its signs changed: a thread has four pairs of it, whose bits are a quarter of its word."""
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _FLIP)))[None, None, :]
    bits = ((word.expand_dims(2) << (15 - PIECE % 4 * 4 - pair)) & -0x7FFF8000).reshape([16, 32])
    return _pairs(ring, stage, PIECE, SLICES).load(bits.type.layout) ^ bits


@gluon.jit
def _half_turn(z, HIGH: gl.constexpr, LOW: gl.constexpr):
    """The factor H at a digit of n in registers, with LOW values below it and HIGH above."""
    a, b = z.reshape([128, HIGH, 2, LOW]).permute((0, 1, 3, 2)).split()
    both = gl.join(a + b, a - b).permute((0, 1, 3, 2)).reshape([128, 64])
    return gl.convert_layout(both, z.type.layout, assert_trivial=True)


@gluon.jit
def _exchanged(z, LANE: gl.constexpr, TEXT: gl.constexpr):
    """The factor H at the digit of n that the lanes' bit LANE holds, which changes places with the digit two above.

    The differences of lanes with that bit come out negated.
    """
    LOW: gl.constexpr = 2 * LANE
    HIGH: gl.constexpr = 4 // LANE
    n = gl.arange(0, 64, gl.SliceLayout(0, z.type.layout))[None, :]
    n, _ = gl.broadcast(n, z)
    n, _ = n.reshape([128, HIGH, 2, 2, 2, LOW]).permute((0, 1, 3, 4, 5, 2)).split()
    first, second = z.reshape([128, HIGH, 2, 2, 2, LOW]).permute((0, 1, 3, 4, 5, 2)).split()
    odd = (n & LOW) != 0
    kept = gl.where(odd, second, first)
    sent = gl.where(odd, first, second)
    got = gl.inline_asm_elementwise(TEXT, "=f,f", [sent], dtype=gl.float32, is_pure=True, pack=1)
    return gl.join(kept + got, kept - got).permute((0, 1, 3, 2, 5, 4)).reshape([128, 64])


@gluon.jit
def _store(z, z_ptr, row, J: gl.constexpr, word, factor, ORDER: gl.constexpr, INNER: gl.constexpr, RIGHT: gl.constexpr):
    """Slice J of the product, all but two of whose factors are multiplied, to memory."""
    z = _exchanged(z, 1, "shfl.sync.bfly.b32 $0, $1, 1, 31, -1;")
    z = _exchanged(z, 2, "shfl.sync.bfly.b32 $0, $1, 2, 31, -1;")
    LAYOUT: gl.constexpr = _STORE
    z = gl.convert_layout(z.reshape([8, 2, 8, 2, 4, 8]), LAYOUT, assert_trivial=True)
    d = _index(8, 0, LAYOUT) * 16 + _index(2, 1, LAYOUT) * 8 + _index(8, 2, LAYOUT)
    n = _index(2, 3, LAYOUT) * 32 + _index(4, 4, LAYOUT) * 8 + _index(8, 5, LAYOUT)
    if RIGHT:
        place = _index(2, 1, LAYOUT) * 16 + _index(2, 3, LAYOUT) * 8 + _index(8, 5, LAYOUT)
        sign = (word.expand_dims(1).expand_dims(3).expand_dims(5) << (31 - place)) & -0x80000000
        z = (z.to(gl.int32, bitcast=True) ^ sign).to(gl.float32, bitcast=True)
    by_lane = gl.where((n & 10) == 10, -factor, factor)
    by_lane = gl.where((n & 20) == 20, -by_lane, by_lane)
    by_lane, _ = gl.broadcast(by_lane, z)
    z = gl.fma(z, by_lane, gl.full(z.shape, 0.0, gl.float32, LAYOUT)).to(z_ptr.dtype.element_ty)
    at = z_ptr + row.to(gl.int64) * (ORDER * INNER) + (d * INNER + (J * 64 + n))
    gl.store(at, z, mask=(d < ORDER) & (n >= 0))


@gluon.jit
def _index(SIZE: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to SIZE along a dimension of six."""
    index = gl.arange(0, SIZE, _only(DIM, LAYOUT))
    for dim in gl.static_range(6):
        if dim != DIM:
            index = index.expand_dims(dim)
    return index


@gluon.constexpr_function
def _only(dim, layout):
    """The layout of a vector along one dimension of six."""
    for other in range(5, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def barriers_at(slices, stages):
    """The byte of shared memory behind the ring and DENSE."""
    return 16384 * slices * stages + 32768


@gluon.jit
def _multiply(
    z_ptr, right_ptr, ring, dense, rows, factor, ORDER: gl.constexpr, SLICES: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, WAIT: gl.constexpr, LEAVE: gl.constexpr,
):  # fmt: skip
    """The warps that multiply."""
    UNITS: gl.constexpr = units(ORDER, CHUNK)
    EMPTY: gl.constexpr = barriers_at(SLICES, STAGES) + 8 * STAGES * UNITS
    READY: gl.constexpr = EMPTY + 8 * STAGES if LEFT else barriers_at(SLICES, STAGES)
    INNER: gl.constexpr = SLICES * 64
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 64, 16])
    zero = gl.zeros([128, 64], gl.float32, ACC)
    right = ()
    for j in gl.static_range(SLICES):
        right += (_right_word(right_ptr + j * 256, RIGHT),)
    stage = 0
    phase = 0
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        for unit in gl.static_range(UNITS):
            ring_ptx.run([READY + 8 * (stage * UNITS + unit), phase], WAIT)
        products = ()
        for j in gl.static_range(SLICES):
            product = warpgroup_mma(dense, ring.index(stage * SLICES + j), zero, use_acc=False, is_async=True)
            products += (product,)
        z = ()
        for j in gl.static_range(SLICES):
            part = warpgroup_mma_wait(SLICES - 1 - j, [products[j]])
            if j == SLICES - 1:
                ring_ptx.run([EMPTY + 8 * stage, 1], LEAVE)
            part = _half_turn(part, 32, 1)
            part = _half_turn(part, 4, 8)
            part = _half_turn(part, 2, 16)
            z += (_half_turn(part, 1, 32),)
        if SLICES == 2:
            z = (z[0] + z[1], z[0] - z[1])
        if SLICES == 4:
            z = (z[0] + z[1], z[0] - z[1], z[2] + z[3], z[2] - z[3])
            z = (z[0] + z[2], z[1] + z[3], z[0] - z[2], z[1] - z[3])
        for j in gl.static_range(SLICES):
            _store(z[j], z_ptr, row, j, right[j], factor, ORDER, INNER, RIGHT)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _right_word(ptr, READ: gl.constexpr):
    """A thread's word of signs of z (8, 8, 4)."""
    L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(5, _STORE)))
    warp = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    if READ:
        return gl.load(ptr + (warp * 32 + row * 4 + group))
    else:
        return warp + row + group


@gluon.jit(do_not_specialize=["rows"])
def hadamard_wide_hopper(
    x_desc, z_ptr, dense_ptr, left_ptr, right_ptr, rows, factor, ORDER: gl.constexpr, SLICES: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, FLIGHT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    WAIT: gl.constexpr, LEAVE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """x (rows, ORDER, 64 * SLICES) -> z. A program takes every num_programs-th row; STAGES rows have room."""
    gdc_launch_dependents()  # the kernel behind may start, and wait in the same way
    # One allocation, so that it begins at 0: the ring, DENSE, and the ring's barriers, "full", "empty" and "signed".
    BARRIERS: gl.constexpr = barriers_at(SLICES, STAGES)
    UNITS: gl.constexpr = units(ORDER, CHUNK)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    gl.static_assert(2 * STAGES * UNITS + STAGES <= 64)  # barriers
    gl.static_assert(FLIGHT <= STAGES * UNITS)  # or a unit that is awaited is two phases behind
    shared = gl.allocate_shared_memory(gl.int8, [BARRIERS // 1024 + 1, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = shared._reinterpret(x_desc.dtype, [STAGES * SLICES, 128, 64], TILE)
    dense = shared.index(BARRIERS // 1024 - 32)._reinterpret(x_desc.dtype, [128, 128], TILE)
    barriers = shared.index(BARRIERS // 1024)._reinterpret(gl.int64, [64, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES * UNITS):
        mbarrier.init(barriers.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(STAGES * UNITS + i), count=num_warps)
    if LEFT:
        for i in gl.static_range(STAGES * UNITS):
            mbarrier.init(barriers.index(STAGES * UNITS + STAGES + i), count=1)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    p = gl.arange(0, 128, gl.SliceLayout(1, L))[:, None]
    d = gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    dense.store(gl.load(dense_ptr + (p * 128 + d)))
    Z: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    for i in gl.static_range(STAGES * SLICES):
        for unit in gl.static_range(UNITS, 128 // CHUNK):  # no copy writes these, and zeros of DENSE take them: no NaN
            ring.index(i).slice(unit * CHUNK, CHUNK, 0).store(gl.zeros([CHUNK, 64], x_desc.dtype, Z))
    fence_async_shared()
    gl.thread_barrier()
    if LEFT:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        z_ptr, right_ptr, ring, dense, rows, factor, ORDER, SLICES, CHUNK, STAGES, LEFT, RIGHT, WAIT,
                        LEAVE,
                    ),
                ),
                (_copy, (x_desc, ring, barriers, rows, ORDER, SLICES, CHUNK, STAGES, FLIGHT)),
                (_change_signs, (left_ptr, ring, barriers, rows, ORDER, SLICES, CHUNK, STAGES, WAIT)),
            ],
            [1, 4],
            [24, 72 if SLICES == 4 else 48],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        z_ptr, right_ptr, ring, dense, rows, factor, ORDER, SLICES, CHUNK, STAGES, LEFT, RIGHT, WAIT,
                        LEAVE,
                    ),
                ),
                (_copy, (x_desc, ring, barriers, rows, ORDER, SLICES, CHUNK, STAGES, FLIGHT)),
            ],
            [1],
            [24],
        )  # fmt: skip
