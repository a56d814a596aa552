"""One launch of a rotate + quantize kernel: which of the two runs, how it is cut, and the arguments it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import E8M0_THRESHOLDS, INV6, MXFP4
from ..kernels import CODES, ROTATED, VALUES
from ..layouts import BLOCKED_128x4
from ..settings import triton_interprets
from . import gpu_device
from .gpu_pieces import Pieces, pieces_of
from .protocol import Blocks, Quantizer


@dataclass
class Task:
    """x (M, K), M and K not 0, its rows contiguous, and what a launch fills.

    output: CODES, VALUES or ROTATED, into `out`; scale: block scale bytes, in the 128x4 layout if `blocked`. ordered:
    VALUES and ROTATED in the order that matmul_many multiplies; for tasks that the Hopper kernel takes.
    """

    x: Tensor
    blocks: Blocks | None
    quantizer: Quantizer | None
    output: int
    out: Tensor
    scale: Tensor | None = None
    tensor_scale: Tensor | None = None
    blocked: bool = False
    ordered: bool = False

    @property
    def group(self) -> int:
        return 16 if self.quantizer is None else self.quantizer.format.group_size

    @property
    def rule(self) -> str:
        return "even" if self.quantizer is None else self.quantizer.rule

    @property
    def by_row(self) -> bool:
        return self.quantizer is not None and self.quantizer.per_row


def encode_scale(quantizer: Quantizer | None, device: torch.device) -> Tensor:
    """The encode scale, fp32 (1,); 1 where there is none for all rows."""
    if quantizer is None or not quantizer.format.has_tensor_scale or quantizer.recipe == "token":
        return gpu_device.constant(1.0, device)
    if quantizer.recipe == "qutlass":
        return gpu_device.constant(6.0, device)
    scale = quantizer.encode_scale
    assert scale is not None
    return scale if scale.dim() == 1 else scale.view(1)  # a view costs microseconds


def launch(task: Task) -> None:
    """Run the kernel that takes the task."""
    with gpu_device.on_device(task.x.device):
        if not hopper_takes(task):
            assert not task.ordered
            return _launch_portable(task)
        # Rows that lie apart are brought together, so that strides change no bit.
        if not task.x.is_contiguous() or task.x.data_ptr() % 16:
            task.x = task.x.clone(memory_format=torch.contiguous_format)
        if task.blocked and task.x.shape[1] % (4 * task.group):
            # Columns would need padding: the scales take their places in a second step.
            assert task.scale is not None
            stored, task.blocked = task.scale, False
            task.scale = stored.new_empty(task.x.shape[0], task.x.shape[1] // task.group)
            _launch_hopper(task)
            stored.copy_(BLOCKED_128x4.forward(task.scale))
        else:
            _launch_hopper(task)


def hopper_takes(task: Task) -> bool:
    """Whether the Hopper kernel runs this: rows of whole units of 16-bit values, turned, not scaled row by row."""
    x = task.x
    return (
        task.blocks is not None
        and gpu_device.runs_gluon(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and task.out.dtype in (torch.uint8, x.dtype)
        and x.shape[1] % _width(task) == 0
        and x.numel() // 32 < 2**31 - 2**16
        and not (task.blocked and x.numel() // task.group >= 2**31 - 2**24)  # whose places it counts in 32 bits
        and not task.by_row
    )


def _width(task: Task) -> int:
    """Values of which a row of the Hopper kernel is made: whole units, of 32, 64 or 128."""
    return 128 if task.blocks is not None and task.blocks.matrix.shape[0] == 128 else 64


def _launch_portable(task: Task) -> None:
    from ..kernels.rotate_quantize import rotate_quantize as kernel

    x, group = task.x, task.group
    m, k = x.shape
    pieces = None if task.blocks is None else pieces_of(task.blocks, x.dtype)
    size, count = (0, 0) if pieces is None else (pieces.size, pieces.pieces.shape[0])
    hardware = x.is_cuda and gpu_device.capability(x.device)[0] >= 10
    config = PortableConfig(x.dtype, size, count, m, task.output, task.blocked, group, task.rule, task.by_row, hardware)
    constants = config.constants()
    block_m, width = constants["BLOCK_M"], constants["WIDTH"]
    rows, cols = BLOCKED_128x4.shape(m, k // group) if task.blocked else (m, k // group)
    grid = (-(-rows // block_m), 1 if task.by_row else -(-max(cols * group, k) // width))
    encode = encode_scale(task.quantizer, x.device)
    kernel[grid](
        x, x.stride(0), x if pieces is None else pieces.pieces,
        task.out.view(torch.int32) if task.output == CODES else task.out,
        encode if task.scale is None else task.scale, encode if task.tensor_scale is None else task.tensor_scale,
        encode, m, k, rows, cols, 1.0 if pieces is None else pieces.factor, **constants,
    )  # fmt: skip


class PortableConfig(NamedTuple):
    """What the portable kernel is compiled for. rows: of x; hardware: the GPU converts to E2M1 itself."""

    dtype: torch.dtype
    size: int
    pieces: int
    rows: int
    output: int
    blocked: bool
    group: int
    rule: str
    by_row: bool
    hardware: bool

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments of the kernel, and the compiler's options."""
        wide = self.dtype == torch.float32
        block_m = 16 if self.rows <= 16 or self.by_row or wide else 64
        # Blocks of 128 in float64, or 64 rows of them in pieces, do not fit in the registers of four warps.
        crowded = self.size == 128 and (wide or (self.pieces > 1 and block_m == 64))
        return {
            "SIZE": self.size, "PIECES": self.pieces, "WIDTH": max(64, self.size), "BLOCK_M": block_m,
            "GROUP": self.group, "OUTPUT": self.output, "BLOCKED": self.blocked, "TOKEN": self.by_row,
            "RULE_ADD": 0x7FFFFF - E8M0_THRESHOLDS[self.rule], "HARDWARE": self.hardware,
            "INTERPRETED": triton_interprets(), "num_warps": 8 if crowded else 4, "enable_fp_fusion": False,
        }  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """How the Hopper kernel is cut: units a tile, tiles in flight a program, warps, programs a multiprocessor.

    No tile in flight: a program has one tile, which its threads copy themselves. parts: programs that share a tile,
    each with columns of its own. from_registers: x is multiplied from registers. pdl: the launch may begin while the
    kernel before it still runs (programmatic dependent launch), and with tiles in flight read the matrix. early: the
    kernel behind may begin before that one has ended too; without tiles in flight.
    """

    block: int
    stages: int
    num_warps: int
    programs: int
    parts: int = 1
    from_registers: bool = False
    pdl: bool = False
    early: bool = False


_FEW = 64 * 128
"""Values a multiprocessor up to which there are few: each program then has one tile."""


def few_columns(tiles: int, blocked: bool, codes_of_two: bool, ordered: bool = False) -> int:
    """Columns of a program where there are few values: fewer are fewer steps, but scatter the bytes of 128x4 scales and
    of values in the order of the product.

    codes_of_two: codes that are made with two pieces of three are made in the same way whatever the number of rows.
    """
    return 64 if codes_of_two or ordered or (blocked and tiles >= 32) else 32


_EARLY = (16, 4096)
"""Rows and values of a row up to which the product behind few values may take its place, and read its weights, before
the kernel before them has ended. It gains 0.3 to 1.2 us there (docs/notes.md); with more programs than a few, which its
places lack, it loses."""


def few_tiling(width: int, columns: int, rows: int, k: int) -> Tiling:
    """For x (rows, k)."""
    early = rows <= _EARLY[0] and k <= _EARLY[1]
    return Tiling(64, 0, 4, 4, parts=width // columns, pdl=True, early=early)


def tiling(width: int, pieces: int, output: int, size: int | None = None) -> Tiling:
    """Measured on an H200 at 8192 x 8192. size: of blocks, where several fit in a unit.

    No more programs than fit beside each other: one that waits for its place would do its tiles alone, at the end.
    """
    key = width, pieces > 1, output
    cut = _OF_SMALL_BLOCKS.get(key, _TILINGS[key]) if size and size < width else _TILINGS[key]
    fit = _SHARED // (2 * width * (cut.block * cut.stages + width * pieces) + 1152)
    return cut if cut.programs <= fit else replace(cut, programs=fit)


_SHARED = 228 * 1024
"""Bytes a multiprocessor has for its programs; each takes 1,024 more than it asks for, and 128 hold its barriers."""

_TILINGS = {
    (64, False, CODES): Tiling(64, 1, 4, 6),
    (64, True, CODES): Tiling(128, 1, 4, 4),
    (128, False, CODES): Tiling(64, 1, 4, 4),
    (128, True, CODES): Tiling(128, 1, 8, 2, pdl=True),
    (32, True, VALUES): Tiling(128, 1, 4, 4, from_registers=True),
    (64, False, VALUES): Tiling(64, 1, 4, 4),
    (64, True, VALUES): Tiling(64, 3, 4, 3),
    (128, False, VALUES): Tiling(64, 3, 8, 1, pdl=True),
    (128, True, VALUES): Tiling(64, 1, 4, 2),
    (32, True, ROTATED): Tiling(128, 1, 4, 4, from_registers=True),
    (64, False, ROTATED): Tiling(64, 1, 4, 4, pdl=True),
    (64, True, ROTATED): Tiling(128, 2, 4, 4, pdl=True),
    (128, False, ROTATED): Tiling(64, 1, 4, 2, from_registers=True, pdl=True),
    (128, True, ROTATED): Tiling(64, 1, 8, 2, pdl=True),
}
"""By the width of a unit, whether the matrix takes several pieces, and what is written. pdl gains 1 to 3%
where it is on and loses 1 to 10% elsewhere, it seems where more programs fit than there are."""

_OF_SMALL_BLOCKS = {(64, True, CODES): Tiling(128, 1, 4, 4, pdl=True)}


class HopperConfig(NamedTuple):
    """What the Hopper kernel is compiled for."""

    device: torch.device
    width: int
    pieces: int
    size: int
    output: int
    blocked: bool
    group: int
    rule: str
    half: bool
    near: bool
    tiling: Tiling
    ordered: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.half else torch.bfloat16

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments of the kernel."""
        from ..kernels import rotate_quantize_hopper_asm as asm
        from ..kernels.rotate_quantize_hopper_write import layout_of

        repair = self.size if self.size < self.width else 0
        amax = quantize = ("", "")
        if self.output == CODES and self.width // self.tiling.parts == 32:
            quantize = asm.quantize_pairs_asm(self.group, self.rule, repair, self.half, self.width)
        else:
            if (self.output == ROTATED and repair) or (self.output != ROTATED and self.group != asm.RUN[self.output]):
                amax = asm.amax_asm(self.output, repair, self.half)
            if self.output != ROTATED:
                near = self.size if self.near else 0
                quantize = asm.quantize_asm(self.group, self.output, self.rule, repair, self.half, near)
        block, warps, columns = self.tiling.block, self.tiling.num_warps, self.width // self.tiling.parts
        return {
            "WIDTH": self.width, "PIECES": self.pieces, "BLOCK": block, "STAGES": self.tiling.stages,
            "PARTS": self.tiling.parts, "FROM_REGISTERS": self.tiling.from_registers,
            "PDL": self.tiling.pdl, "EARLY": self.tiling.early, "launch_pdl": self.tiling.pdl, "OUTPUT": self.output,
            "BLOCKED": self.blocked, "GROUP": self.group,
            "STORE_LAYOUT": layout_of(self.output, self.ordered, block, columns, warps),
            "ORDER_ASM": asm.order_asm(self.half) if self.ordered else (),
            "REPAIR": repair > 0, "NEAR": self.near, "AMAX_ASM": amax[0], "AMAX_CONSTRAINTS": amax[1],
            "QUANTIZE_ASM": quantize[0], "QUANTIZE_CONSTRAINTS": quantize[1], "num_warps": warps,
        }  # fmt: skip


class _Launch(NamedTuple):
    """What is the same for every input of a shape: how the kernel is started, on how many programs, with what operand,
    and its numbers."""

    start: Callable[..., None]
    programs: int
    operand: Tensor
    numbers: tuple[int | float, ...]


_KEPT_LAUNCHES = 256
"""Of a matrix. To find one takes a microsecond or two, to make one twenty."""


def _launch_hopper(task: Task) -> None:
    assert task.blocks is not None
    x, quantizer = task.x, task.quantizer
    pieces = pieces_of(task.blocks, x.dtype)
    key = (x.shape, x.device, task.output, task.blocked, task.ordered, None if quantizer is None else quantizer.kind)
    launch = pieces.launches.get(key)
    if launch is None:
        if len(pieces.launches) >= _KEPT_LAUNCHES:
            pieces.launches.clear()
        launch = pieces.launches[key] = _make_launch(task, pieces)
    encode = pieces.matrix if quantizer is None else encode_scale(quantizer, x.device)
    launch.start(
        launch.programs, x, launch.operand, pieces.matrix, task.out, encode if task.scale is None else task.scale,
        encode if task.tensor_scale is None else task.tensor_scale, encode, *launch.numbers,
    )  # fmt: skip


def _make_launch(task: Task, pieces: Pieces) -> _Launch:
    x = task.x
    processors = gpu_device.multiprocessors(x.device)
    few = x.numel() < _FEW * processors
    factor, blocked = pieces.factor, task.blocked
    of_two = pieces.near and task.output == CODES
    columns = few_columns(x.numel() // (64 * max(64, pieces.size)), blocked, of_two, task.ordered) if few else 0
    operand = pieces.hopper[VALUES if columns == 32 else task.output]
    near = of_two and task.group == 16
    count, width = operand.shape[0], operand.shape[2]
    units, per_row = x.numel() // width, x.shape[1] // width
    cut = few_tiling(width, min(width, columns), *x.shape) if few else tiling(width, count, task.output, pieces.size)
    if not few and not pieces.ready:
        cut = replace(cut, pdl=False)
    half = x.dtype == torch.float16
    start = hopper_launcher(HopperConfig(
        x.device, width, count, pieces.size, task.output, blocked, task.group, task.rule, half, near, cut, task.ordered,
    ))  # fmt: skip
    padded = -(-x.shape[0] // 128) * 128 * per_row if blocked else units
    programs = max(-(-units // cut.block), -(-(padded - units) // (32 * cut.num_warps * cut.parts)))
    reciprocal = (2**32 - 1) // per_row  # as an int32
    return _Launch(start, programs * cut.parts if few else min(programs, processors * cut.programs), operand, (
        units, padded, per_row, reciprocal - 2**32 if reciprocal >= 2**31 else reciprocal,
        factor, 2 / factor if factor else 0.0, factor if task.group == MXFP4.group_size else INV6 * factor,
    ))  # fmt: skip


@lru_cache(maxsize=512)
def hopper_launcher(config: HopperConfig) -> Callable[..., None]:
    """The kernel of a configuration, compiled at the first call and launched with little Python after that."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import driver

    from ..kernels.rotate_quantize_hopper import rotate_quantize_hopper as kernel

    constants, width, count = config.constants(), config.width, config.pieces
    kept = torch.int32 if config.ordered else config.dtype
    word = {CODES: torch.int64, VALUES: torch.int32, ROTATED: kept}[config.output]
    # Any memory will do to compile for: 16-byte aligned, as what the op allocates is and x was asked to be.
    like = torch.empty(count * width, width, dtype=config.dtype, device=config.device)
    fp32, byte = like.view(-1)[:128].view(torch.float32), like.view(torch.uint8)
    layout, strides = NVMMASharedLayout(min(128, 2 * width), 16, 2), [width, 1]
    compiled = kernel.warmup(
        TensorDescriptor(like, [width, width], strides, [config.tiling.block, width], layout),
        TensorDescriptor(like, [count * width, width], strides, [width // config.tiling.parts, width], layout),
        like, like, fp32, like.view(word), byte, fp32, fp32, 2, 2, 2, 2, 1.5, 1.5, 1.5, **constants, grid=(1,),
    )  # fmt: skip
    compiled._init_handles()
    gpu_device.share_all_memory(compiled.function)
    index, run, function, metadata = config.device.index, compiled.run, compiled.function, compiled.packed_metadata
    constexprs = [constants[name] for name in kernel.arg_names if name in constants]
    stream_of = driver.active.get_current_stream

    def start(programs: int, x: Tensor, operand: Tensor, matrix: Tensor, out: Tensor, *rest: Any) -> None:
        run(
            programs, 1, 1, stream_of(index), function, metadata, None, None, None,
            gpu_device.Described(x, [x.numel() // width, width], strides),
            gpu_device.Described(operand, [count * width, width], strides),
            x, operand, matrix, out, *rest, *constexprs,
        )  # fmt: skip

    return start
