"""Triton kernels on NVIDIA GPUs.

| needs     | an NVIDIA GPU of capability 8.0 or more and Triton 3.6 or newer (or its interpreter: TRITON_INTERPRET=1) |
| provides  | every op, format, rule, recipe, dtype and size; rotate + quantize in one launch for R = 16, 32, 64, 128 |
| does not  | fuse other sizes, nor fp32 but on 8.0 and 9.0 (float64 makes z first); QuTLASS's MXFP4 is any_torch's |
| run on    | NVIDIA H200; not run on other GPUs, for which its kernels are compiled in tests |

Hopper GPUs with Triton 3.6 take the kernel of rotate_quantize_hopper.py for bf16 and fp16 input behind a transform (K a
multiple of 64), all else takes the portable one of rotate_quantize.py: both multiply exact pieces of the matrix, sum in
fp32 and round in the same way. A matrix is looked at once, at its first use, and the form that the kernels multiply is
kept beside it: `matrix.data` must not be written to in place on a GPU.

With `weights="packed"` weights stay at 4.5 bits, in fragments that kernels of our own decode on the way to the matrix
units (gpu_product.py), and that a layer then holds alone (stored_weight.py); else they are decoded to bf16 once and
multiplied by the library. `auto` takes fragments on a GPU of capability 9.0, where their tests were run (NVIDIA H200,
Triton 3.6), and decodes on others, where they were not.
fp32 input, and fp16 with MXFP4, has no kernel for fragments and decodes them at every call: ask for "decoded" there.
Siblings that read the same input are one product (fused.py), until there are so many rows that each fills the GPU by
itself. Batch-invariant layers have a cut of their own, the same for every number of rows: see gpu_product.py.

Wider Hadamard matrices turn bf16 and fp16 in one pass on GPUs of capability 9.0 (gpu_wide.py), elsewhere and in fp32
any_torch turns by them, in float64 by their factors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import CODES, ROTATED, VALUES
from ..layouts import BLOCKED_128x4
from ..settings import triton_interprets
from ..tensor import FP4Tensor, decode_block_scale, decode_codes
from . import any_torch, compose, gpu_product, gpu_wide
from .gpu_device import capability as capability_of
from .gpu_device import triton_version
from .gpu_launch import Task, encode_scale, hopper_takes, launch
from .gpu_pieces import is_capturing, is_met, pieces_of
from .protocol import Blocks, Layer, Problem, Quantizer, Weight

NAME = "gpu_triton"
TESTED = ((9, 0),)
"""Capabilities where the tests of layers with weights in fragments were run."""

FUSED_SIZES = (16, 32, 64, 128)
FLOAT64_UNITS = ((8, 0), (9, 0))
"""Capabilities on which Triton's float64 product runs on matrix units. Elsewhere it does not compile (10.0, R = 16),
spills (10.0 and 12.0, R = 64), or asks for more shared memory than there is (8.6 and 12.0, R = 128)."""


def missing(device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
    """Reasons against this machine: no NVIDIA GPU, too old a one, or no Triton."""
    reasons = []
    if device.type != "cuda" and not (device.type == "cpu" and triton_interprets()):
        return [f"needs an NVIDIA GPU, found {device.type}"]
    if device.type == "cuda" and torch.version.hip is not None:
        return ["needs an NVIDIA GPU, found an AMD one"]
    if device.type == "cuda" and (found := capability or capability_of(device)) < (8, 0):
        reasons.append(f"needs a GPU of capability 8.0 or more, found {found[0]}.{found[1]}")
    if (version := triton_version()) is None:
        reasons.append("needs Triton: pip install triton")
    elif version < (3, 6):
        reasons.append(f"needs Triton 3.6 or newer, found {version[0]}.{version[1]}: pip install -U triton")
    return reasons


def refuses(problem: Problem) -> list[str]:
    """Nothing that `ops` lets through."""
    return []


def varies(problem: Problem) -> list[str]:
    """Reasons why a row's bits may depend on the other rows: rotations by a library's float64, or by kernels that
    multiply few rows by other instructions than many; and what gpu_product has no such product of."""
    reasons, size = gpu_product.varies(problem), problem.input_size
    quantizes, scaled = problem.activations == "fp4", problem.format.has_tensor_scale
    if quantizes and problem.recipe == "qutlass" and not scaled:
        reasons.append("quantizes QuTLASS's MXFP4 by plain torch, where batch_invariant needs one order of sums")
    hopper, by_row = problem.capability is not None and problem.capability[0] == 9, problem.recipe == "token" and scaled
    unit = 128 if size == 128 else 64
    if size is not None and size not in FUSED_SIZES:
        known = ", ".join(map(str, FUSED_SIZES))
        reasons.append(f"needs an input transform of {known} for batch_invariant, found {size}")
    elif size is not None and hopper and problem.k % unit and not (quantizes and by_row):
        needed = f"needs inputs in a multiple of {unit} behind transform {size} for batch_invariant"
        reasons.append(f"{needed}, found {problem.k}")
    return reasons


def prepare(weight: FP4Tensor, mode: str) -> Tensor | None:
    """For mode 'packed' fragments (gpu_product.py) where they can be, for 'auto' where their tests were run; else as
    any_torch, which then multiplies."""
    device = weight.device
    if gpu_product.runs_on(device) and (mode == "packed" or (mode == "auto" and capability_of(device) in TESTED)):
        made = gpu_product.prepare(weight)
        return made if made is not None or mode == "packed" else any_torch.prepare(weight, mode)
    return any_torch.prepare(weight, mode)


def rotate(x: Tensor, blocks: Blocks, out_dtype: torch.dtype, ordered: bool = False) -> Tensor:
    """x (M, K) @ V per block, fp32 sums, rounded once to out_dtype. ordered: as gpu_matmul_many.order gives it."""
    if not _fuses(x, blocks):
        assert not ordered
        return _turned(x, blocks, out_dtype)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.numel():
        launch(Task(x, blocks, None, ROTATED, out, ordered=ordered))
    return out


def rotate_quantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, scale_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K) -> packed codes (M, K/2), scale bytes in the layout, tensor scale (1,) or (M,)."""
    if quantizer.is_qutlass_mxfp4:
        return any_torch.rotate_quantize(x, blocks, quantizer, scale_layout)
    m, k = x.shape
    fmt, blocked = quantizer.format, scale_layout == BLOCKED_128x4.name
    x, blocks = _fusable(x, blocks)
    codes = torch.empty(fmt.codes_shape(m, k), dtype=torch.uint8, device=x.device)
    shape = fmt.scale_shape(m, k)
    scale = torch.empty(BLOCKED_128x4.shape(*shape) if blocked else shape, dtype=torch.uint8, device=x.device)
    tensor_scale = _tensor_scale(m, quantizer, x)
    if m:
        launch(Task(x, blocks, quantizer, CODES, codes, scale, tensor_scale, blocked))
    return codes, scale, tensor_scale


def rotate_quantize_dequantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, out_dtype: torch.dtype, ordered: bool = False
) -> tuple[Tensor, Tensor]:
    """x (M, K) -> e2m1 * block_scale (M, K) of out_dtype, exact; the tensor scale (1,) or (M,). ordered: as rotate."""
    if quantizer.is_qutlass_mxfp4:
        return any_torch.rotate_quantize_dequantize(x, blocks, quantizer, out_dtype)
    x, blocks = _fusable(x, blocks)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    tensor_scale = _tensor_scale(x.shape[0], quantizer, x)
    if x.numel():
        launch(Task(x, blocks, quantizer, VALUES, out, None, tensor_scale, ordered=ordered))
    return out, tensor_scale


def in_order(x: Tensor, layer: Layer) -> bool:
    """Whether x is to be turned into the order in which fragments of the weight are multiplied, by the same launch."""
    blocks, quantizer, weight = layer.input_blocks, layer.quantizer, layer.weight
    if blocks is None or weight.data.dtype != torch.int32 or layer.output_blocks is not None:
        return False
    if quantizer is not None and quantizer.is_qutlass_mxfp4:
        return False
    if not gpu_product.takes_order(x, weight.format, layer.batch_invariant):
        return False
    output = ROTATED if quantizer is None else VALUES
    if not (_fuses(x, blocks) and hopper_takes(Task(x, blocks, quantizer, output, x))):
        return False
    return pieces_of(blocks, x.dtype).hopper[output].shape[2] >= 64  # whole blocks of that order


def matmul(
    x: Tensor,
    x_block_scale: Tensor | None,
    x_tensor_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    ordered: bool = False,
    invariant: bool = False,
) -> Tensor:
    """(M, K) x (N, K)^T -> (M, N): of fragments by kernels of our own, else by any_torch. ordered: as rotate left x.
    invariant: by the way that is the same for every M. Raises BackendRefusal where the weight is not in fragments."""
    if weight.data.dtype != torch.int32:
        if invariant:
            found = "a negative block scale, or MXFP4 scales above 2^9" if weight.block_scale is not None else "values"
            raise compose.would_vary("a weight that can be kept in fragments", found)
        return any_torch.matmul(x, x_block_scale, x_tensor_scale, weight, bias, out_dtype)
    if x_block_scale is not None:
        values = decode_block_scale(x_block_scale, weight.format)
        x = decode_codes(x, values, weight.format.group_size, torch.bfloat16)
    return gpu_product.matmul(x, x_tensor_scale, weight, bias, out_dtype, ordered, invariant)


def _fusable(x: Tensor, blocks: Blocks | None) -> tuple[Tensor, Blocks | None]:
    """Turned already, in fp32, where the kernels do not turn it."""
    if blocks is None or _fuses(x, blocks):
        return x, blocks
    return _turned(x, blocks, torch.float32), None


def _turned(x: Tensor, blocks: Blocks, out_dtype: torch.dtype) -> Tensor:
    """x @ V per block where the kernels of R up to 128 do not turn it: in one pass, or by any_torch."""
    turned = gpu_wide.rotate(x, blocks, out_dtype)
    return any_torch.rotate(x, blocks, out_dtype) if turned is None else turned


def _fuses(x: Tensor, blocks: Blocks) -> bool:
    if x.dtype == torch.float16 and is_capturing(x) and not is_met(blocks, x.dtype):
        return False  # what fp16 needs to know of a matrix cannot be asked now
    return fuses(blocks.matrix.shape[0], x.dtype, capability_of(x.device) if x.is_cuda else (8, 0))


def fuses(size: int, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether the kernels themselves turn blocks of a size: fp32, multiplied in float64, only where Triton can."""
    return size in FUSED_SIZES and (dtype != torch.float32 or capability in FLOAT64_UNITS)


def _tensor_scale(m: int, quantizer: Quantizer, x: Tensor) -> Tensor:
    """Room for it; where there is no row to launch for, what it is."""
    if quantizer.per_row:
        return torch.empty(m, dtype=torch.float32, device=x.device)
    if m:
        return torch.empty(1, dtype=torch.float32, device=x.device)
    return encode_scale(quantizer, x.device).reciprocal()
