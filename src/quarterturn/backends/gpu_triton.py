"""Triton kernels on NVIDIA GPUs.

| needs     | an NVIDIA GPU of capability 8.0 or more and Triton 3.6 (or Triton's interpreter: TRITON_INTERPRET=1) |
| provides  | every op, format, rule, recipe, dtype and size; rotate + quantize in one launch for R = 16, 32, 64, 128 |
| does not  | fuse other sizes of R (a float64 product makes z first), nor QuTLASS's MXFP4 recipe (any_torch computes it) |
| run on    | NVIDIA H200; not run on other GPUs, for which its kernels are compiled in tests |

Hopper GPUs take the kernel of rotate_quantize_hopper.py for bf16 and fp16 input that lies contiguous in memory, all else
takes the portable one of rotate_quantize.py, with the same bits: both multiply exact pieces of the matrix and sum in fp32.
A matrix is looked at once, at its first use, and the form that the kernels multiply is kept on it.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import INV6, MXFP4
from ..layouts import BLOCKED_128x4
from ..tensor import FP4Tensor
from . import any_torch
from .protocol import Blocks, Problem, Quantizer, Weight

NAME = "gpu_triton"
FUSED_SIZES = (16, 32, 64, 128)
CODES, VALUES, ROTATED = 0, 1, 2
"""What a kernel writes; the numbers are those of the kernels' OUTPUT."""

# What an E8M0 rule adds to the bits of an amax, so that its mantissa carries into the exponent from a threshold on.
_RULE_ADD = {"even": 0x200000, "floor": 0, "ceil": 0x7FFFFF, "rceil": 0x3FFFFF}


def interpreted() -> bool:
    """Whether this process runs Triton's kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing(device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
    """Reasons against this machine: no NVIDIA GPU, too old a one, or no Triton."""
    reasons = []
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return [f"needs an NVIDIA GPU, found {device.type}"]
    if device.type == "cuda" and torch.version.hip is not None:
        return ["needs an NVIDIA GPU, found an AMD one"]
    if device.type == "cuda" and (found := capability or _capability(device)) < (8, 0):
        reasons.append(f"needs a GPU of capability 8.0 or more, found {found[0]}.{found[1]}")
    if (version := _triton_version()) is None:
        reasons.append("needs Triton: pip install triton")
    elif version < (3, 6):
        reasons.append(f"needs Triton 3.6 or newer, found {version[0]}.{version[1]}: pip install -U triton")
    return reasons


def refuses(problem: Problem) -> list[str]:
    """Nothing that `ops` lets through."""
    return []


def prepare(weight: FP4Tensor, mode: str) -> Tensor | None:
    """As any_torch, which multiplies."""
    return any_torch.prepare(weight, mode)


def rotate(x: Tensor, blocks: Blocks, out_dtype: torch.dtype) -> Tensor:
    """x (M, K) @ V per block, fp32 sums, rounded once to out_dtype."""
    if blocks.matrix.shape[0] not in FUSED_SIZES:
        return any_torch.rotate(x, blocks, out_dtype)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.numel():
        _launch(x, blocks, None, ROTATED, out)
    return out


def rotate_quantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, scale_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K) -> packed codes (M, K/2), scale bytes in the layout, tensor scale (1,) or (M,)."""
    if _reproduces_qutlass_mxfp4(quantizer):
        return any_torch.rotate_quantize(x, blocks, quantizer, scale_layout)
    m, k = x.shape
    fmt, blocked = quantizer.format, scale_layout == BLOCKED_128x4.name
    x, blocks = _fusable(x, blocks)
    codes = torch.empty(fmt.codes_shape(m, k), dtype=torch.uint8, device=x.device)
    shape = fmt.scale_shape(m, k)
    scale = torch.empty(BLOCKED_128x4.shape(*shape) if blocked else shape, dtype=torch.uint8, device=x.device)
    tensor_scale = _tensor_scale(m, quantizer, x)
    if m:
        _launch(x, blocks, quantizer, CODES, codes, scale, tensor_scale, blocked)
    return codes, scale, tensor_scale


def rotate_quantize_dequantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x (M, K) -> e2m1 * block_scale (M, K) of out_dtype, exact, and the tensor scale (1,) or (M,)."""
    if _reproduces_qutlass_mxfp4(quantizer):
        return any_torch.rotate_quantize_dequantize(x, blocks, quantizer, out_dtype)
    x, blocks = _fusable(x, blocks)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    tensor_scale = _tensor_scale(x.shape[0], quantizer, x)
    if x.numel():
        _launch(x, blocks, quantizer, VALUES, out, None, tensor_scale)
    return out, tensor_scale


def matmul(
    x: Tensor,
    x_block_scale: Tensor | None,
    x_tensor_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """(M, K) x (N, K)^T -> (M, N), by any_torch."""
    return any_torch.matmul(x, x_block_scale, x_tensor_scale, weight, bias, out_dtype)


def _reproduces_qutlass_mxfp4(quantizer: Quantizer) -> bool:
    return quantizer.recipe == "qutlass" and quantizer.format is MXFP4


def _fusable(x: Tensor, blocks: Blocks | None) -> tuple[Tensor, Blocks | None]:
    """Turned already, in fp32, where the kernels do not know the size."""
    if blocks is None or blocks.matrix.shape[0] in FUSED_SIZES:
        return x, blocks
    return any_torch.rotate(x, blocks, torch.float32), None


def _tensor_scale(m: int, quantizer: Quantizer, x: Tensor) -> Tensor:
    """Room for it; where there is no row to launch for, what it is."""
    if _per_row(quantizer):
        return torch.empty(m, dtype=torch.float32, device=x.device)
    if m:
        return torch.empty(1, dtype=torch.float32, device=x.device)
    return _encode(quantizer, x.device).reciprocal()


def _per_row(quantizer: Quantizer) -> bool:
    return quantizer.recipe == "token" and quantizer.format.has_tensor_scale


def _encode(quantizer: Quantizer | None, device: torch.device) -> Tensor:
    """The encode scale, fp32 (1,); 1 where there is none."""
    if quantizer is None or not quantizer.format.has_tensor_scale or quantizer.recipe == "token":
        return _constant(1.0, device)
    if quantizer.recipe == "qutlass":
        return _constant(6.0, device)
    assert quantizer.encode_scale is not None
    return quantizer.encode_scale.view(1)


@lru_cache(maxsize=64)
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _triton_version() -> tuple[int, int] | None:
    try:
        import triton
    except ImportError:
        return None
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Pieces:
    """A block matrix as the kernels multiply it: pieces (P, R, R) whose sum is the matrix, and the factor.

    hopper: for each output, the pieces block-diagonal to a width of 64 at least, transposed, columns in its order.
    matrix: fp32 (R, R), in the direction it is used.
    """

    pieces: Tensor
    hopper: dict[int, Tensor]
    matrix: Tensor
    factor: float

    @property
    def size(self) -> int:
        return self.matrix.shape[0]


def _pieces(blocks: Blocks, dtype: torch.dtype) -> Pieces:
    """The kernels' form of a block, kept on the matrix it was made of, and made again when that is written to.

    While a CUDA graph is being captured nothing can be looked at: the form is then made on the GPU, as part of the
    graph, of as many pieces as any matrix may need. A matrix that was met before costs nothing there.
    """
    matrix = blocks.matrix
    version = 0 if matrix.is_inference() else matrix._version
    kept = getattr(matrix, "_gpu_triton", None)
    if kept is None or kept[0] != version:
        kept = (version, {})
        matrix._gpu_triton = kept  # type: ignore[attr-defined]
    made: dict[tuple[float, bool, torch.dtype], Pieces] = kept[1]
    key = (blocks.factor, blocks.transpose, dtype)
    if key not in made:
        if matrix.is_cuda and torch.cuda.is_current_stream_capturing():
            return make_pieces(blocks, dtype, look=False)
        made[key] = make_pieces(blocks, dtype)
    return made[key]


def make_pieces(blocks: Blocks, dtype: torch.dtype, look: bool = True) -> Pieces:
    """Split a matrix into pieces of dtype: one for +-1, else as many as bring it to fp32, three of bf16 or two of fp16.

    fp32 input is multiplied in float64 instead, by the one piece that the matrix then is. The sign of the factor and a
    power of two go over to the pieces, exactly: the whole of the factor's, so that no sum overflows which the factor
    would bring back; for fp16, whose small numbers lose bits, 16 times more. look: read the matrix to choose, which
    waits for the GPU; else take three pieces.
    """
    factor = float(torch.tensor(blocks.factor, dtype=torch.float32, device="cpu"))
    power = math.frexp(factor)[1] - 1 + (4 if dtype == torch.float16 else 0)
    matrix = blocks.matrix.detach().float()
    matrix = (matrix.T if blocks.transpose else matrix) * math.copysign(math.ldexp(1.0, power), factor)
    rest, pieces = matrix.double(), []
    enough = 2.0**-22 * float(rest.norm()) if look else 0.0
    for _ in range(1 if dtype == torch.float32 else 3):
        pieces.append(rest.to(torch.float64 if dtype == torch.float32 else dtype))
        rest = rest - pieces[-1].double()
        if look and float(rest.norm()) <= enough:
            break
    stacked = torch.stack(pieces)
    hopper = {}
    if matrix.is_cuda and _capability(matrix.device)[0] == 9 and dtype != torch.float32:
        hopper = {output: _hopper_pieces(stacked, output) for output in (CODES, VALUES, ROTATED)}
    return Pieces(stacked, hopper, matrix.contiguous(), math.ldexp(abs(factor), -power))


def _hopper_pieces(pieces: Tensor, output: int) -> Tensor:
    """(P, R, R) -> (P, W, W): entry [n, k] multiplies value k of a unit for column n of the product.

    The order of the columns is that of rotate_quantize_hopper.column_order, as a permutation of digits.
    """
    width = max(64, pieces.shape[1])
    wide = torch.stack([torch.block_diag(*[piece] * (width // piece.shape[0])) for piece in pieces])
    pairs = 8 if output == CODES else 4
    digits = wide.view(-1, width, width // (8 * pairs), 4, pairs, 2).transpose(3, 4)
    return digits.reshape(-1, width, width).transpose(1, 2).contiguous()


def _launch(
    x: Tensor,
    blocks: Blocks | None,
    quantizer: Quantizer | None,
    output: int,
    out: Tensor,
    scale: Tensor | None = None,
    tensor_scale: Tensor | None = None,
    blocked: bool = False,
) -> None:
    """One kernel over x (M, K), M and K not 0, that fills what is given."""
    with _Nowhere() if x.device.index == _current_device(x) else torch.cuda.device(x.device):
        if not hopper_takes(x, blocks, quantizer, out):
            return _launch_portable(x, blocks, quantizer, output, out, scale, tensor_scale, blocked)
        # Rows that lie apart are brought together, so that strides change no bit.
        x = x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
        group = 16 if quantizer is None else quantizer.format.group_size
        if blocked and x.shape[1] % max(hopper_width(blocks), 4 * group):
            # A unit would span rows, or the padding: the scales take their places in a second step.
            assert scale is not None
            rows_major = scale.new_empty(x.shape[0], x.shape[1] // group)
            _launch_hopper(x, blocks, quantizer, output, out, rows_major, tensor_scale, False)
            scale.copy_(BLOCKED_128x4.forward(rows_major))
        else:
            _launch_hopper(x, blocks, quantizer, output, out, scale, tensor_scale, blocked)


def _current_device(x: Tensor) -> int | None:
    return torch.cuda.current_device() if x.is_cuda else None


class _Nowhere:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...


def hopper_width(blocks: Blocks | None) -> int:
    """Values in a unit of the Hopper kernel."""
    return 128 if blocks is not None and blocks.matrix.shape[0] == 128 else 64


def hopper_takes(x: Tensor, blocks: Blocks | None, quantizer: Quantizer | None, out: Tensor) -> bool:
    """Whether the Hopper kernel runs this: whole units of 16-bit values to be turned, none quantized by its row."""
    units, rest = divmod(x.numel(), hopper_width(blocks))
    return (
        blocks is not None
        and x.is_cuda
        and _capability(x.device)[0] == 9
        and x.dtype in (torch.bfloat16, torch.float16)
        and out.dtype in (torch.uint8, x.dtype)
        and rest == 0
        and units < 2**31 - 2**16
        and not (quantizer is not None and _per_row(quantizer))
    )


def _launch_portable(
    x: Tensor,
    blocks: Blocks | None,
    quantizer: Quantizer | None,
    output: int,
    out: Tensor,
    scale: Tensor | None,
    tensor_scale: Tensor | None,
    blocked: bool,
) -> None:
    from ..kernels.rotate_quantize import rotate_quantize as kernel

    m, k = x.shape
    group = 16 if quantizer is None else quantizer.format.group_size
    pieces = None if blocks is None else _pieces(blocks, x.dtype)
    width = max(64, 0 if pieces is None else pieces.size)
    rows, cols = BLOCKED_128x4.shape(m, k // group) if blocked else (m, k // group)
    token = quantizer is not None and _per_row(quantizer)
    block_m = 16 if m <= 16 or token or x.dtype == torch.float32 else 64
    grid = (-(-rows // block_m), 1 if token else -(-max(cols * group, k) // width))
    encode = _encode(quantizer, x.device)
    words = out.view(torch.int32) if output == CODES else out
    kernel[grid](
        x, x.stride(0), x if pieces is None else pieces.pieces, words,
        encode if scale is None else scale, encode if tensor_scale is None else tensor_scale, encode,
        m, k, rows, cols, 1.0 if pieces is None else pieces.factor,
        SIZE=0 if pieces is None else pieces.size, PIECES=0 if pieces is None else pieces.pieces.shape[0],
        WIDTH=width, BLOCK_M=block_m, GROUP=group, OUTPUT=output,
        BLOCKED=blocked, TOKEN=token, RULE_ADD=0 if quantizer is None else _RULE_ADD[quantizer.rule],
        HARDWARE=x.is_cuda and _capability(x.device)[0] >= 10, INTERPRETED=interpreted(), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """How the Hopper kernel is cut: units a tile, tiles in flight a program, warps, programs a multiprocessor."""

    block: int
    stages: int
    num_warps: int
    programs: int


def tiling(width: int, pieces: int, output: int, units: int, multiprocessors: int) -> Tiling:
    """Measured on an H200 at 8192 x 8192; a few units are spread over as many programs as there can be."""
    if units < 128 * multiprocessors:
        return Tiling(64, 1, 4 if width == 64 else 8, 4)
    return _TILINGS[width, pieces > 1, output]


_TILINGS = {
    (64, False, CODES): Tiling(64, 1, 4, 6),
    (64, True, CODES): Tiling(128, 1, 4, 4),
    (128, False, CODES): Tiling(64, 1, 4, 4),
    (128, True, CODES): Tiling(64, 1, 8, 2),
    (64, False, VALUES): Tiling(128, 1, 8, 2),
    (64, True, VALUES): Tiling(64, 3, 4, 3),
    (128, False, VALUES): Tiling(64, 1, 4, 3),
    (128, True, VALUES): Tiling(64, 1, 4, 2),
    (64, False, ROTATED): Tiling(128, 2, 4, 4),
    (64, True, ROTATED): Tiling(128, 2, 4, 4),
    (128, False, ROTATED): Tiling(64, 1, 8, 3),
    (128, True, ROTATED): Tiling(64, 1, 8, 2),
}
"""By the width of a unit, whether the matrix takes several pieces, and what is written."""


def _launch_hopper(
    x: Tensor,
    blocks: Blocks | None,
    quantizer: Quantizer | None,
    output: int,
    out: Tensor,
    scale: Tensor | None,
    tensor_scale: Tensor | None,
    blocked: bool,
) -> None:
    assert blocks is not None
    pieces = _pieces(blocks, x.dtype)
    group = 16 if quantizer is None else quantizer.format.group_size
    rule = "even" if quantizer is None else quantizer.rule
    operand, factor = pieces.hopper[output], pieces.factor
    width = operand.shape[2]
    units, per_row = x.numel() // width, max(1, x.shape[1] // width)
    shape = tiling(width, operand.shape[0], output, units, _multiprocessors(x.device))
    launcher = hopper_launcher(
        x.device, width, operand.shape[0], pieces.size, output, blocked, group, rule, x.dtype == torch.float16, shape
    )
    padded = -(-x.shape[0] // 128) * 128 * per_row if blocked else units
    tiles = max(-(-units // shape.block), -(-(padded - units) // (32 * shape.num_warps)))
    encode = _encode(quantizer, x.device)
    reciprocal = (2**32 - 1) // per_row
    launcher(
        min(tiles, _multiprocessors(x.device) * shape.programs),
        x, operand, pieces.matrix, out,
        encode if scale is None else scale, encode if tensor_scale is None else tensor_scale, encode,
        units, padded, per_row, reciprocal - 2**32 if reciprocal >= 2**31 else reciprocal,
        factor, 2 / factor if factor else 0.0, factor if group == MXFP4.group_size else INV6 * factor,
    )  # fmt: skip


class _Described(NamedTuple):
    """What Triton's launcher asks of a tensor descriptor, without the checks that making one repeats at every call."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"


@lru_cache(maxsize=512)
def hopper_launcher(
    device: torch.device,
    width: int,
    pieces: int,
    size: int,
    output: int,
    blocked: bool,
    group: int,
    rule: str,
    half: bool,
    shape: Tiling,
) -> Callable[..., None]:
    """The kernel of a configuration, compiled at the first call and launched with little Python after that."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import driver

    from ..kernels.rotate_quantize_hopper import rotate_quantize_hopper as kernel

    constants = hopper_constants(width, pieces, size, output, blocked, group, rule, half, shape)
    layout, num_warps = constants["X_LAYOUT"], constants["num_warps"]
    dtype = torch.float16 if half else torch.bfloat16
    word = {CODES: torch.int64, VALUES: torch.int32, ROTATED: dtype}[output]
    # Any memory will do to compile for: 16-byte aligned, as what the op allocates is and x was asked to be.
    like = torch.empty(pieces * width, width, dtype=dtype, device=device)
    fp32, byte = like.view(-1)[: 2 * 64].view(torch.float32), like.view(torch.uint8)
    compiled = kernel.warmup(
        TensorDescriptor(like, [width, width], [width, 1], [shape.block, width], layout),
        TensorDescriptor(like, [pieces * width, width], [width, 1], [width, width], layout),
        like, fp32, like.view(word), byte, fp32, fp32, 2, 2, 2, 2, 1.5, 1.5, 1.5, **constants, grid=(1,),
    )  # fmt: skip
    compiled._init_handles()
    _prefer_shared_memory(compiled.function)
    index, run, function, metadata = device.index, compiled.run, compiled.function, compiled.packed_metadata
    constexprs = [constants[name] for name in kernel.arg_names if name in constants]
    stream_of, strides = driver.active.get_current_stream, [width, 1]

    def launch(programs: int, x: Tensor, operand: Tensor, matrix: Tensor, out: Tensor, *rest: Any) -> None:
        rows = x.numel() // width
        run(
            programs, 1, 1, stream_of(index), function, metadata, None, None, None,
            _Described(x, [rows, width], strides), _Described(operand, [pieces * width, width], strides),
            x, matrix, out, *rest, *constexprs,
        )  # fmt: skip

    return launch


def hopper_constants(
    width: int,
    pieces: int,
    size: int,
    output: int,
    blocked: bool,
    group: int,
    rule: str,
    half: bool,
    shape: Tiling,
) -> dict[str, Any]:
    from triton.experimental.gluon.language import NVMMASharedLayout

    from ..kernels import rotate_quantize_hopper as hopper

    repair = size if size < width else 0
    amax = quantize = ("", "")
    if (output == ROTATED and repair) or (output != ROTATED and group != hopper.RUN[output]):
        amax = hopper.amax_asm(output, repair, half)
    if output != ROTATED:
        quantize = hopper.quantize_asm(group, output, rule, repair, half)
    layout = hopper.store_layout(shape.block, width, 4 * output, shape.num_warps) if output != CODES else ""
    return {
        "WIDTH": width, "PIECES": pieces, "BLOCK": shape.block, "STAGES": shape.stages, "OUTPUT": output,
        "BLOCKED": blocked, "GROUP": group, "STORE_LAYOUT": layout, "REPAIR": repair > 0,
        "AMAX_ASM": amax[0], "AMAX_CONSTRAINTS": amax[1],
        "QUANTIZE_ASM": quantize[0], "QUANTIZE_CONSTRAINTS": quantize[1],
        "X_LAYOUT": NVMMASharedLayout(128, 16, 2), "num_warps": shape.num_warps,
    }  # fmt: skip


@lru_cache(maxsize=512)
def _prefer_shared_memory(function: int) -> None:
    """Several programs fit on a multiprocessor only if all of its memory that can be shared is: ask the driver for it."""
    preferred_carveout, percent = 9, 100
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), preferred_carveout, percent)
