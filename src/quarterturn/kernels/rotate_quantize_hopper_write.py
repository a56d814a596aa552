"""How the Hopper kernel writes a tile: accumulators where wgmma leaves them, rounded by the asm texts, stored."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import CODES


def layout_of(output: int, ordered: bool, block: int, columns: int, num_warps: int) -> Any:
    """How what is stored lies in threads; "" where nobody needs to be told."""
    if output == CODES:
        return ""
    # of a run of eight: int32 of two values, or values
    return (_order_layout if ordered else _store_layout)(block, columns, 4 * output, num_warps)


def _store_layout(block: int, columns: int, size: int, num_warps: int) -> gl.DistributedLinearLayout:
    """How (block, columns / 8, size) lies in threads, the last dimension first: what 16-byte stores need to know."""
    across = 2 if 16 * num_warps > block else 1
    down = num_warps // across
    registers = [[0, 0, 1 << i] for i in range(size.bit_length() - 1)]
    registers += [[0, 4 << i, 0] for i in range((columns // (32 * across)).bit_length() - 1)] + [[8, 0, 0]]
    registers += [[16 * down << i, 0, 0] for i in range((block // (16 * down)).bit_length() - 1)]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16 << i, 0, 0] for i in range(down.bit_length() - 1)] + ([[0, 8, 0]] if across == 2 else [])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [block, columns // 8, size])


def _order_layout(block: int, columns: int, size: int, num_warps: int) -> gl.DistributedLinearLayout:
    """The same of what _store_in_order has: (block, columns / 64, 4, 4)."""
    across = 2 if 16 * num_warps > block else 1
    down = num_warps // across
    registers = [[0, 0, 0, 1], [0, 0, 0, 2]]
    registers += [[0, 1 << i, 0, 0] for i in range((columns // (64 * across)).bit_length() - 1)] + [[8, 0, 0, 0]]
    registers += [[16 * down << i, 0, 0, 0] for i in range((block // (16 * down)).bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16 << i, 0, 0, 0] for i in range(down.bit_length() - 1)] + ([[0, 1, 0, 0]] if across == 2 else [])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [block, columns // 64, 4, 4])


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
def _store(ptr, x, units, L: gl.constexpr, BLOCK: gl.constexpr, GROUPS: gl.constexpr, SIZE: gl.constexpr, PITCH):
    """x (BLOCK, GROUPS, SIZE) to rows of memory PITCH elements apart, but for units beyond the last."""
    x = gl.convert_layout(x, L, assert_trivial=True)
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    i = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    gl.store(ptr + (row * PITCH + group * SIZE + i), x, mask=row < units)


@gluon.jit
def _store_in_order(
    out_ptr, tile, w0, w1, w2, w3, units, part, L: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr, ORDER_ASM: gl.constexpr,
):  # fmt: skip
    """Words 0 to 3 of runs (BLOCK, COLUMNS / 8) of a tile to where the product wants them, in rows of WIDTH / 2 words.

    Word 8Q + 2t + h of a block of 64 values lies at 8t + 4h + Q there (weight_layout.py, kernels/order_tokens.py).
    """
    a0, b0 = _runs_apart(w0)
    a1, b1 = _runs_apart(w1)
    a2, b2 = _runs_apart(w2)
    a3, b3 = _runs_apart(w3)
    x0, x1, x2, x3, y0, y1, y2, y3 = gl.inline_asm_elementwise(
        ORDER_ASM[1],
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [a0, a1, a2, a3, b0, b1, b2, b3],
        dtype=_EIGHT_WORDS,
        is_pure=False,  # lanes that exchange values must not be parted
        pack=1,
    )
    first = out_ptr + gl.cast(tile, gl.int64) * (BLOCK * WIDTH // 2) + part * (COLUMNS // 2)
    units -= tile * BLOCK
    _store_groups(first, x0, x1, x2, x3, units, 0, L, BLOCK, COLUMNS // 64, WIDTH)
    _store_groups(first, y0, y1, y2, y3, units, 8, L, BLOCK, COLUMNS // 64, WIDTH)


@gluon.jit
def _runs_apart(w):
    """(BLOCK, 8 n) of runs -> those of the first and of the second half of each block of eight, (BLOCK, n, 4)."""
    return w.reshape([w.shape[0], w.shape[1] // 8, 2, 4]).permute((0, 1, 3, 2)).split()


@gluon.jit
def _store_groups(
    ptr, x0, x1, x2, x3, units, offset: gl.constexpr, L: gl.constexpr, BLOCK: gl.constexpr, BLOCKS: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Words of groups 0 to 3 (BLOCK, BLOCKS, 4), the last dimension lanes: t is 2 (q % 2), and h is q / 2."""
    words = gl.join(gl.join(x0, x2), gl.join(x1, x3)).reshape([BLOCK, BLOCKS, 4, 4])
    words = gl.convert_layout(words, L, assert_trivial=True)
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    gl.store(ptr + (row * (WIDTH // 2) + block * 32 + (q % 2 * 16 + q // 2 * 4 + offset) + i), words, mask=row < units)


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
_EIGHT_WORDS = gl.constexpr((gl.int32,) * 8)


@gluon.jit
def write_codes(
    acc, tile, part, out_ptr, scale_ptr, units, units_per_row, reciprocal, factor, amax_factor, encode, divisor, usual,
    x_tile, matrix, BLOCK: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr,
    BLOCKED: gl.constexpr, NEAR: gl.constexpr, AMAX_ASM: gl.constexpr, AMAX_CONSTRAINTS: gl.constexpr,
    QUANTIZE_ASM: gl.constexpr, QUANTIZE_CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """The accumulator (BLOCK, COLUMNS) of a tile, quantized: 64 bits of codes a run of 16, a scale byte a group.

    part: which COLUMNS of a unit these are. 32 columns are finished by pairs of lanes, rows 8 apart together.
    """
    # value i of each thread's 16: tensors (BLOCK, COLUMNS / 16), or of 32 columns (BLOCK / 16, 8, 4), where they are
    if COLUMNS == 32:
        z = acc.reshape([BLOCK // 16, 2, 8, 2, 2, 4, 2]).permute((0, 2, 5, 1, 3, 4, 6))
    else:
        z = acc.reshape([BLOCK, COLUMNS // 64, 8, 4, 2]).permute((0, 1, 3, 2, 4))
        z = z.reshape([BLOCK, COLUMNS // 16, 2, 2, 2, 2])
    c0, c1, c2, c3 = _split4(z)
    z0, z4, z8, z12 = _split4(c0)
    z1, z5, z9, z13 = _split4(c1)
    z2, z6, z10, z14 = _split4(c2)
    z3, z7, z11, z15 = _split4(c3)
    L: gl.constexpr = z0.type.layout
    if COLUMNS == 32:
        high = gl.arange(0, BLOCK // 16, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
        low = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
        quarter = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
        amax = quarter % 2 + gl.full_like(z0, 0).to(gl.int32)
        # where ptx.repair finds the first row's 8 values
        offset = (high * 16 + low) * (WIDTH // 8) + part * 4 + quarter
        row = high * 16 + low + quarter % 2 * 8
        run = part * 2 + quarter // 2
        writes = (quarter < 2) | (GROUP == 16)
    else:
        row = gl.arange(0, BLOCK, gl.SliceLayout(1, L))[:, None]
        run = part * (COLUMNS // 16) + gl.arange(0, COLUMNS // 16, gl.SliceLayout(0, L))[None, :]
        amax = factor
        offset = row * (WIDTH // 16) + run
        writes = run % (GROUP // 16) == 0
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
        amax = _spread(amax, BLOCK, COLUMNS // GROUP, GROUP // 16)
    word, byte = gl.inline_asm_elementwise(
        QUANTIZE_ASM,
        QUANTIZE_CONSTRAINTS,
        [z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11, z12, z13, z14, z15]
        + [amax, amax_factor, encode, divisor, usual, offset, x_tile, matrix],
        dtype=(gl.int64, gl.int32),
        is_pure=COLUMNS != 32 and not NEAR,  # lanes that exchange values must not be parted
        pack=1,
    )
    inside = row < units - tile * BLOCK
    first = gl.cast(tile, gl.int64) * (BLOCK * WIDTH)
    gl.store(out_ptr + first // 16 + (row * (WIDTH // 16) + run), word, mask=inside)
    group = run // (GROUP // 16)
    if BLOCKED:
        at = _blocked_address(tile * BLOCK + row, group, units_per_row, reciprocal, WIDTH // GROUP)
        gl.store(scale_ptr + at, byte.to(gl.uint8), mask=writes & inside)
    else:
        at = row * (WIDTH // GROUP) + group
        gl.store(scale_ptr + first // GROUP + at, byte.to(gl.uint8), mask=writes & inside)


@gluon.jit
def write_values(
    acc, tile, part, out_ptr, units, factor, amax_factor, encode, divisor, usual, x_tile, matrix, BLOCK: gl.constexpr,
    WIDTH: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, OUTPUT: gl.constexpr, STORE_LAYOUT: gl.constexpr,
    ORDER_ASM: gl.constexpr, AMAX_ASM: gl.constexpr, AMAX_CONSTRAINTS: gl.constexpr, QUANTIZE_ASM: gl.constexpr,
    QUANTIZE_CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """The accumulator (BLOCK, COLUMNS) of a tile as numbers of 16 bits: e2m1 * block_scale, or as it is.

    ORDER_ASM: texts with which values are stored in the order of the product; else none.
    """
    z = acc.reshape([BLOCK, COLUMNS // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4))
    # value i of each run: 8 tensors (BLOCK, COLUMNS / 8), where they are
    even, odd = z.reshape([BLOCK, COLUMNS // 8, 2, 2, 2]).split()
    z0, z2, z4, z6 = _split4(even)
    z1, z3, z5, z7 = _split4(odd)
    L: gl.constexpr = z0.type.layout
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, L))[:, None]
    run = part * (COLUMNS // 8) + gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, L))[None, :]
    offset = row * (WIDTH // 8) + run
    first = gl.cast(tile, gl.int64) * (BLOCK * WIDTH) + part * COLUMNS
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
        amax = _spread(amax, BLOCK, COLUMNS // GROUP, GROUP // 8)
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            QUANTIZE_ASM,
            QUANTIZE_CONSTRAINTS,
            [z0, z1, z2, z3, z4, z5, z6, z7] + [amax, amax_factor, encode, divisor, usual, offset, x_tile, matrix],
            dtype=_FOUR_WORDS,
            is_pure=True,
            pack=1,
        )
        if len(ORDER_ASM) == 0:
            words = _join4(w0, w1, w2, w3)
            _store(out_ptr + first // 2, words, units - tile * BLOCK, STORE_LAYOUT, BLOCK, COLUMNS // 8, 4, WIDTH // 2)
        else:
            _store_in_order(out_ptr, tile, w0, w1, w2, w3, units, part, STORE_LAYOUT, BLOCK, COLUMNS, WIDTH, ORDER_ASM)
    elif len(ORDER_ASM) > 0:
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            ORDER_ASM[0],
            "=&r,=&r,=&r,=&r,f,f,f,f,f,f,f,f",
            [z0 * factor, z1 * factor, z2 * factor, z3 * factor, z4 * factor, z5 * factor, z6 * factor, z7 * factor],
            dtype=_FOUR_WORDS,
            is_pure=True,
            pack=1,
        )
        _store_in_order(out_ptr, tile, w0, w1, w2, w3, units, part, STORE_LAYOUT, BLOCK, COLUMNS, WIDTH, ORDER_ASM)
    else:
        out: gl.constexpr = out_ptr.dtype.element_ty
        halves = gl.join(_join4(z0, z2, z4, z6), _join4(z1, z3, z5, z7))
        turned = (halves.reshape([BLOCK, COLUMNS // 8, 8]) * factor).to(out)
        _store(out_ptr + first, turned, units - tile * BLOCK, STORE_LAYOUT, BLOCK, COLUMNS // 8, 8, WIDTH)


@gluon.jit
def write_padding(
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
