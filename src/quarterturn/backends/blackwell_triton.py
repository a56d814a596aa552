"""Native FP4 on Blackwell GPUs, in Triton.

| needs     | an NVIDIA GPU of capability 10.0, 10.3 or 12.0, and Triton 3.6 or newer |
| provides  | W4A4 layers of packed weights on FP4 matrix units; every format, recipe, rule, dtype, bias, any M, N, K |
| does not  | W4A16; fp32 input, other transform sizes, output transforms and decoded weights go by way of gpu_triton |
| run on    | not run on any GPU; compiled in tests for 10.0, 10.3 and 12.0, its numbers checked on a CPU |

x is rotated and quantized by gpu_triton's portable kernel, with the hardware's conversion to E2M1, its scales written
straight into the 128x4 layout; the product is kernels/matmul_scaled.py. On a CPU both run in Triton's interpreter, with
the conversion replaced by its twin and the scaled product by its definition. The weights' scales are moved into the
128x4 layout once a layer; where torch.compile calls the op, at every call.

Alpha, bias and the one rounding are fp32 in the same kernel. The sums are the hardware's, 64 values at a time in the
order of K whatever the tile; how it rounds them, and that a NaN scale makes a NaN, no hardware was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..layouts import BLOCKED_128x4
from ..tensor import FP4Tensor
from . import compose, gpu_triton
from .blackwell_launch import ScaledWeight, multiply, scaled_weight
from .gpu_device import capability as capability_of
from .gpu_pieces import is_capturing
from .protocol import Layer, Operand, Problem, Together, Weight
from .vendor import own_or_any

NAME = "blackwell_triton"
CAPABILITIES = ((10, 0), (10, 3), (12, 0))
"""For which Triton 3.6 makes FP4 products: of one family of instructions for 10.x, of another for 12.0."""
BLOCKED_CODES = "codes with blocked scales"
"""Form of an operand: packed codes, scales in the 128x4 layout."""


def missing(device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
    """Reasons against this machine: not a Blackwell GPU that Triton makes FP4 instructions for, or no Triton."""
    if device.type == "cuda" and torch.version.hip is None:
        found = capability or capability_of(device)
        if found not in CAPABILITIES:
            return [_unfit(found)]
    return gpu_triton.missing(device, capability)


def _unfit(found: tuple[int, int]) -> str:
    known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
    why = "which has no FP4 matrix units" if found < (10, 0) else _UNFIT.get(found, "for which it was never compiled")
    return f"needs a GPU of capability {known}, found {found[0]}.{found[1]}, {why}: choose {own_or_any(found)}"


_UNFIT = {
    (11, 0): "for which Triton 3.6 has no assembler",
    (12, 1): "for which Triton 3.6 makes no FP4 products",
}


def refuses(problem: Problem) -> list[str]:
    """Layers whose activations are not FP4."""
    if problem.activations == "fp4":
        return []
    return [f"needs FP4 activations (W4A4), found {problem.activations} (W4A16): choose {gpu_triton.NAME}"]


def prepare(weight: FP4Tensor, mode: str) -> Tensor | None:
    """None: packed weights are what it runs on; bf16 values (N, K) for mode 'decoded', which gpu_triton multiplies."""
    return weight.values(torch.bfloat16) if mode == "decoded" else None


rotate = gpu_triton.rotate
rotate_quantize = gpu_triton.rotate_quantize
rotate_quantize_dequantize = gpu_triton.rotate_quantize_dequantize


def matmul(
    x: Tensor,
    x_block_scale: Tensor | None,
    x_tensor_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """(M, K) x (N, K)^T -> (M, N): codes by FP4 units, their linear scales moved first; values by gpu_triton."""
    if x_block_scale is None or x_tensor_scale is None or weight.block_scale is None or not x.shape[1]:
        return gpu_triton.matmul(x, x_block_scale, x_tensor_scale, weight, bias, out_dtype)
    blocked = BLOCKED_128x4.forward(x_block_scale)
    return multiply(x.contiguous(), blocked, x_tensor_scale, scaled_weight(weight, bias), out_dtype, _family(x))


def operand(x: Tensor, layer: Layer) -> Operand:
    """x (M, K), rotated and quantized to codes with blocked scales."""
    if not _fits(layer):
        return compose.operand(gpu_triton, x, layer)
    assert layer.quantizer is not None
    codes, scale, tensor_scale = rotate_quantize(x, layer.input_blocks, layer.quantizer, BLOCKED_128x4.name)
    return Operand(codes, scale, tensor_scale, x.shape[0], x.dtype, BLOCKED_CODES)


def product(operand: Operand, layer: Layer) -> Tensor:
    """The operand times the weight, the output turned: (M, N) of the operand's dtype."""
    if operand.form != BLOCKED_CODES:
        return compose.product(gpu_triton, operand, layer)
    assert operand.block_scale is not None
    assert operand.tensor_scale is not None
    # The output transform takes the product in fp32, so that the result is rounded once.
    dtype = operand.dtype if layer.output_blocks is None else torch.float32
    family = _family(operand.data)
    y = multiply(operand.data, operand.block_scale, operand.tensor_scale, _kept(layer), dtype, family)
    return y if layer.output_blocks is None else rotate(y, layer.output_blocks, operand.dtype)


def together(layers: Sequence[Layer]) -> Together | None:
    """None: nothing is gained by one call."""
    return None


def renewal(old: Layer, new: Layer) -> list[tuple[Any, Any]]:
    """See `FusedBackend.renewal`."""
    kept = old.kept.get(NAME)
    return [] if kept is None else [(kept, scaled_weight(new.weight, new.bias))]


def _fits(layer: Layer) -> bool:
    """Whether the layer is one of packed codes by codes; `refuses` was not asked where an op is called by itself."""
    return layer.quantizer is not None and layer.weight.block_scale is not None and layer.weight.data.shape[1] > 0


def _kept(layer: Layer) -> ScaledWeight:
    """The layer's weight as the product reads it, made at its first use.

    What a CUDA graph makes lies in the graph's memory, so it is not kept; what a graph reads stays in memory.
    """
    kept: ScaledWeight | None = layer.kept.get(NAME)
    capturing = is_capturing(layer.weight.data)
    if kept is None:
        kept = scaled_weight(layer.weight, layer.bias)
        if capturing:
            return kept
        layer.kept[NAME] = kept
        if kept.codes.is_cuda:
            torch.cuda.current_stream(kept.codes.device).synchronize()  # other streams may read it next
    if capturing:
        _CAPTURED[id(kept)] = kept
    return kept


_CAPTURED: dict[int, ScaledWeight] = {}
"""What CUDA graphs may read, for as long as the process lives: a graph does not say when it goes."""


def _family(x: Tensor) -> int:
    """10 or 12; on a CPU, where the interpreter runs, 10."""
    return capability_of(x.device)[0] if x.is_cuda else 10
