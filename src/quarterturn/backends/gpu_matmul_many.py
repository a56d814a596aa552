"""Launches of the product for many tokens: how it is cut, its workspace, and the two ways to compute it.

`many` runs kernels/matmul_many.py (Hopper); `by_library` decodes slices of the weight and calls the library's product,
on any GPU of capability 8.0 or more. Both take what a prepared layer keeps: fragments (weight_layout.py) and alpha, the
fp32 tensor scale of each row's output range times 2^exponent of the fragments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import MXFP4, FP4Format
from ..weight_layout import Fragments
from .gpu_device import Described, capability, multiprocessors, require_barriers


class Cut(NamedTuple):
    """rows and tokens of a tile; programs of a group, a power of two; whether weights meet x in its natural order;
    programs a multiprocessor; parts that a program adds up by itself; where programs are in groups, rounds of whole
    tiles, one a program, before each group makes one."""

    rows: int
    tokens: int
    split: int
    natural: bool
    programs: int
    inside: int = 1
    rounds: int = 0

    @property
    def num_warps(self) -> int:
        """Those that multiply."""
        return self.rows // 16


@lru_cache(maxsize=4096)
def cut(m: int, n: int, k: int, multiprocessors: int, ordered: bool) -> Cut:
    """The fastest by an estimate from times measured on an H200. ordered: x comes in the order of fragments."""
    options, chunks = [], -(-k // 256)
    for tile in _tiles(m):
        count = -(-n // tile.rows) * -(-m // tile.tokens)
        for split, rounds in ways(count, tile.programs * multiprocessors):
            if split == 1 or chunks >= 2 * split:
                us = _estimated_us(tile, count, split, rounds, chunks, multiprocessors)
                options.append((us, split, rounds, tile))
    _, split, rounds, tile = min(options)
    # Weights that meet x in its natural order cost 0 to 2% at 256 tokens a tile, less than ordering x; with fewer more.
    return Cut(tile.rows, tile.tokens, split, not ordered and tile.tokens == 256, tile.programs, rounds=rounds)


def ways(tiles: int, programs: int) -> list[tuple[int, int]]:
    """Of dealing tiles out to at most so many programs: split and rounds (see Cut)."""
    found = [(1, 0)]
    for split in _SPLITS:
        groups = programs // split
        rounds = max(-(-(tiles - groups) // (groups * split)), 0) if groups else 0
        if groups and rounds <= _MOST_ROUNDS and rounds * split * -(-tiles // (rounds * split + 1)) < tiles:
            found.append((split, rounds))
    return found


_SPLITS = (2, 4, 8)
_MOST_ROUNDS = 3  # after more, what groups save is less than what their sums cost


@lru_cache(maxsize=4096)
def invariant_cut(m: int, n: int, k: int, multiprocessors: int) -> Cut:
    """One whose sums are the same for every m and n: parts of K by k alone, which the programs of a group add up, or
    each by itself where there are too many for all to run at once. For x in the order of fragments."""
    parts, chunks, options = _parts(k), -(-k // 256), []
    for tile in _tiles(m):
        count = -(-n // tile.rows) * -(-m // tile.tokens)
        if parts == 1 or count * parts <= tile.programs * multiprocessors:
            made = Cut(tile.rows, tile.tokens, parts, False, tile.programs)
            options.append((_estimated_us(tile, count, parts, 0, chunks, multiprocessors), made))
        elif tile.rows * tile.tokens <= 128 * 128:  # twice the sums have to find room in registers
            tile = tile if tile.tokens <= 32 else tile._replace(programs=1, block_us=tile.alone_us)
            made = Cut(tile.rows, tile.tokens, 1, False, tile.programs, parts)
            options.append((_estimated_us(tile, count, 1, 0, chunks, multiprocessors), made))
    return min(options)[1]


def _parts(k: int) -> int:
    """By K alone: so many parts, of two chunks at least, that few rows of 4096 outputs and more fill an H200. What all
    batch-invariant layers give hangs on it: a change of it changes their bits."""
    chunks = -(-k // 256)
    return 8 if chunks > 40 else 4 if chunks >= 8 else 2 if chunks >= 4 else 1


def _tiles(m: int) -> tuple[_Tile, ...]:
    return _TILES[min(tokens for tokens in _TILES if tokens >= min(m, 256))]


def _estimated_us(tile: _Tile, count: int, split: int, rounds: int, chunks: int, multiprocessors: int) -> float:
    """Microseconds of `count` tiles; see `ways`."""
    how = Cut(tile.rows, tile.tokens, split, False, tile.programs, rounds=rounds)
    programs, each, more = shares(count, how, multiprocessors)
    whole = each + (more > 0)
    block = tile.alone_us if programs <= multiprocessors else tile.block_us
    us = 4 * whole * chunks * block + tile.start_us + max(whole - 1, 0) * tile.tile_us
    if split > 1:
        us += 4 * -(-chunks // split) * block + tile.adding_us + tile.part_us * split + (whole > 0) * tile.tile_us
    return us


class _Tile(NamedTuple):
    """Rows and tokens, and programs a multiprocessor. Microseconds of a block of 64 of K where a multiprocessor has one
    program and where it has as many as it can, of starting and ending a program, of a further tile, and of adding parts
    of K."""

    rows: int
    tokens: int
    programs: int
    alone_us: float
    block_us: float
    start_us: float
    tile_us: float
    adding_us: float
    part_us: float


_TILES = {
    32: (_Tile(128, 32, 2, 0.24, 0.36, 3, 1, 2.5, 0.1),),
    64: (_Tile(128, 64, 2, 0.29, 0.44, 4, 1, 3, 0.1),),
    256: (_Tile(128, 128, 1, 0.36, 0.36, 3, 1, 3, 0.25), _Tile(128, 256, 1, 0.67, 0.67, 4, 3, 8, 1)),
}
"""By how many tokens they are for, at most; the last for more too."""
_GROUP = 16  # token tiles that share weights in L2
_REGISTERS_OF_TWO = 80  # a thread, so that two programs of eight warps and their helpers fit on a multiprocessor
_SLICE = 24 << 20  # bytes of decoded weights that stay in L2


class Workspace(NamedTuple):
    """Sums that programs of a group leave each other, and counters: of one stream at a time. counts is zero between
    launches."""

    parts: Tensor
    counts: Tensor


def workspace(device: torch.device, counts: Tensor | None = None) -> Workspace:
    """What any product on the device needs; counts: zeros, two a multiprocessor or more, that are there already."""
    count = multiprocessors(device)
    counts = torch.zeros(2 * count, dtype=torch.int32, device=device) if counts is None else counts
    assert 2 * count <= counts.numel(), (2 * count, counts.numel())
    return Workspace(torch.empty(_sums(count), dtype=torch.float32, device=device), counts)


_PATIENCE = 32
"""Times that a program of a group looks whether the others have come: some 20 microseconds."""


def order(x: Tensor) -> Tensor:
    """x (M, K) -> (M, K up to 64) in the order of fragments. K is a multiple of 8, rows contiguous, 16-byte aligned."""
    m, k = x.shape
    blocks = -(-k // 64)
    out = x.new_empty(m, blocks * 64)
    _order_launcher(x.device, x.dtype)(blocks, x, out, m, k, x.stride(0))
    return out


def many(
    x: Tensor, weight: Fragments, alpha: Tensor, x_scale: Tensor, bias: Tensor | None, space: Workspace,
    out: Tensor | None = None, ordered: bool = False, chosen: Cut | None = None,
) -> Tensor:  # fmt: skip
    """x (M, K) @ weight^T (N, K) -> (M, N) of x's dtype, M at least 1. Hopper alone; x is on the current device.

    alpha: fp32 (N). x_scale: fp32 (1) or (M). bias: fp32 (N). ordered: x is (M, K up to 64) as `order` gives it.
    space: `workspace` of this stream; no other product may use it.
    """
    m, n, k = x.shape[0], weight.n, weight.k
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    how = chosen or cut(m, n, k, multiprocessors(x.device), ordered)
    chunks = weight.scales.shape[1]
    assert min(how.split, how.inside) == 1, (how, "parts of parts")
    assert how.inside <= chunks, (how, chunks, "a part of K without a chunk")
    if not ordered and not how.natural:
        x = order(x)
    tiles16, blocks = weight.codes.shape[:2]
    assert weight.codes.numel() < 2**31, (n, k, "places are counted in 32 bits")
    config = Config(
        x.device, x.dtype, weight.format, how._replace(rounds=0), blocks % 4 == 0, bias is not None,
        x_scale.numel() > 1, n % 8 == 0, m <= how.tokens,
    )  # fmt: skip
    y = x.new_empty(m, n) if out is None else out
    row_tiles, token_tiles = -(-n // how.rows), -(-m // how.tokens)
    programs, each, more = shares(row_tiles * token_tiles, how, multiprocessors(x.device))
    assert programs * each + more <= row_tiles * token_tiles, (how, row_tiles, token_tiles, "tiles that there are not")
    if how.split > 1:
        assert programs * how.rows * how.tokens <= space.parts.numel(), (how, space.parts.numel())
        assert 2 * programs // how.split <= space.counts.numel(), (how, space.counts.numel())
    launcher(config)(
        programs, x, weight.codes, weight.scales, y, alpha, x_scale, alpha if bias is None else bias,
        space.parts, space.counts, m, n, row_tiles, token_tiles, each, more, chunks, blocks, tiles16,
    )  # fmt: skip
    return y


def shares(tiles: int, how: Cut, multiprocessors: int) -> tuple[int, int, int]:
    """Programs of a launch, whole tiles that each makes, and how many make one more; groups make the others."""
    if how.split == 1:
        programs = min(tiles, multiprocessors * how.programs)
        return programs, tiles // programs, tiles % programs
    groups = -(-tiles // (how.rounds * how.split + 1))
    return groups * how.split, how.rounds, 0


def has_room(how: Cut, m: int, n: int, multiprocessors: int) -> bool:
    """Whether the programs of groups run beside each other, and their sums find room in the workspace."""
    programs, _, _ = shares(-(-n // how.rows) * -(-m // how.tokens), how, multiprocessors)
    sums = programs * how.rows * how.tokens
    return how.split == 1 or (programs <= how.programs * multiprocessors and sums <= _sums(multiprocessors))


def _sums(multiprocessors: int) -> int:
    """fp32 numbers of a workspace."""
    return 2 * multiprocessors * 128 * 128


class Config(NamedTuple):
    """What the kernel is compiled for. even: blocks of K are a multiple of 4; by_tma: N is a multiple of 8; one: there
    is one token tile."""

    device: torch.device
    dtype: torch.dtype
    format: FP4Format
    cut: Cut
    even: bool
    bias: bool
    by_row: bool
    by_tma: bool
    one: bool

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments of the kernel."""
        from ..kernels import matmul_operand as operand
        from ..kernels import ring_ptx

        rows, tokens, split, natural, _, inside, _ = self.cut
        warps = self.cut.num_warps
        asm, constraints = operand.decode_asm(self.format, self.dtype == torch.float16, natural)
        return {
            "ROWS": rows, "TOKENS": tokens, "SPLIT": split, "INSIDE": inside, "GROUP": 1 if self.one else _GROUP,
            "NATURAL": natural, "PATIENCE": _PATIENCE, "EVEN": self.even, "HAS_BIAS": self.bias,
            "X_BY_ROW": self.by_row, "TMA_OUT": self.by_tma, "LANES": 16 if self.format == MXFP4 else 32,
            "CODES": operand.fragment_layout(rows, 4, warps), "SCALES": operand.fragment_layout(rows, 2, warps),
            "PAIRS": operand.pair_layout(rows, warps), "ASM": asm, "CONSTRAINTS": constraints, "num_warps": warps,
            "WAIT": ring_ptx.wait_asm(), "LEAVE": ring_ptx.leave_asm(),
        }  # fmt: skip

    def options(self) -> dict[str, Any]:
        """The compiler's options."""
        most = {"maxnreg": _REGISTERS_OF_TWO} if self.cut.programs == 2 else {}
        return {"enable_fp_fusion": False, **most}


@lru_cache(maxsize=512)
def launcher(config: Config) -> Callable[..., None]:
    """The kernel of a configuration, compiled at the first call and launched with little Python after that."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import driver

    from ..kernels.matmul_many import barriers_at
    from ..kernels.matmul_many import matmul_many as kernel

    constants, how = config.constants(), config.cut
    # Any memory will do to compile for: 16-byte aligned.
    like = torch.empty(1024, 1024, dtype=config.dtype, device=config.device)
    fp32, int32 = like.view(torch.float32), like.view(torch.int32)
    layout = NVMMASharedLayout(128, 16, 2)
    compiled = kernel.warmup(
        TensorDescriptor(like, [1024, 1024], [1024, 1], [how.tokens, 64], layout),
        TensorDescriptor(like, [1024, 1024], [1024, 1], [how.tokens, how.rows], layout),
        int32, int32, like, fp32, fp32, fp32, fp32, int32, 2, 2, 2, 2, 2, 2, 2, 2, 2, **constants, **config.options(),
        launch_pdl=True, grid=(1,),
    )  # fmt: skip
    byte = barriers_at(how.rows, how.tokens, how.natural)
    require_barriers("fp4_matmul", compiled, byte, 'weights="decoded"')
    compiled._init_handles()
    index, run, function, metadata = config.device.index, compiled.run, compiled.function, compiled.packed_metadata
    constexprs = [constants[name] for name in kernel.arg_names if name in constants]
    stream_of, by_tma = driver.active.get_current_stream, config.by_tma
    unused = None if by_tma else Described(like, [1024, 1024], [1024, 1])

    def start(programs: int, x: Tensor, codes: Tensor, scales: Tensor, y: Tensor, *rest: Any) -> None:
        m, width = x.shape
        n = y.shape[1]
        run(
            programs, 1, 1, stream_of(index), function, metadata, None, None, None,
            Described(x, [m, width], [x.stride(0), 1]), Described(y, [m, n], [n, 1]) if by_tma else unused,
            codes, scales, y, *rest, *constexprs,
        )  # fmt: skip

    return start


@lru_cache(maxsize=64)
def _order_launcher(device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    from triton.runtime import driver

    from ..kernels.order_tokens import TOKENS, load_layout
    from ..kernels.order_tokens import order_tokens as kernel

    hopper = capability(device)[0] >= 9
    constants = {"TOKENS": TOKENS, "LOAD": load_layout(), "HOPPER": hopper}
    like = torch.empty(64, dtype=dtype, device=device)
    compiled = kernel.warmup(like, like, 2, 64, 64, 64, **constants, num_warps=4, launch_pdl=hopper, grid=(1,))
    compiled._init_handles()
    index, run, function, metadata = device.index, compiled.run, compiled.function, compiled.packed_metadata
    stream_of = driver.active.get_current_stream

    def start(blocks: int, x: Tensor, out: Tensor, m: int, k: int, stride: int) -> None:
        run(
            blocks, -(-m // TOKENS), 1, stream_of(index), function, metadata, None, None, None,
            x, out, m, k, stride, blocks * 64, *constants.values(),
        )  # fmt: skip

    return start


def by_library(
    x: Tensor, weight: Fragments, alpha: Tensor, x_scale: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """As `many`, with x as it was: slices of decoded weights times x, fp32 sums, scaled and rounded once."""
    m, n, k = x.shape[0], weight.n, weight.k
    tiles16, blocks = weight.codes.shape[:2]
    y = x.new_empty(m, n) if out is None else out
    step = max(_SLICE // (blocks * 128) // 64, 1) * 64
    scratch = x.new_empty(min(step, tiles16 * 16), blocks * 64)
    scale = x_scale.view(-1, 1)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        count = -(-(rows.stop - start) // 16)
        decode(weight, x.dtype, start // 16, count, scratch)
        acc = torch.mm(x, scratch[: rows.stop - start, :k].t(), out_dtype=torch.float32)
        acc *= scale * alpha[rows]
        if bias is not None:
            acc += bias[rows]
        y[:, rows] = acc
    return y


def decode(weight: Fragments, dtype: torch.dtype, first: int, count: int, out: Tensor) -> None:
    """`count` tiles of 16 rows from tile `first` on -> out (16 * count or more, blocks * 64), * 2^-exponent."""
    from ..kernels.decode_fragments import decode_fragments, store_layout
    from ..kernels.matmul_operand import decode_asm, fragment_layout

    blocks, chunks = weight.codes.shape[1], weight.scales.shape[1]
    asm, constraints = decode_asm(weight.format, dtype == torch.float16)
    decode_fragments[(blocks, -(-count // 4))](
        weight.codes[first:], weight.scales[first:].view(torch.int32), out.view(torch.int32), count, blocks, chunks,
        LANES=16 if weight.format == MXFP4 else 32, CODES=fragment_layout(64, 4, 4), ASM=asm, CONSTRAINTS=constraints,
        ROWS=64, P=store_layout(64), num_warps=4,
    )  # fmt: skip
