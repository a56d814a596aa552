"""cuBLAS's FP4 product through torch.nn.functional.scaled_mm, behind our own rotate + quantize.

| needs     | a Blackwell GPU (10.x or 12.x), a torch built for CUDA with scaled_mm (2.11 or newer), and Triton |
| provides  | W4A4. NVFP4: every size, dtype, recipe and transform, rounded once. MXFP4 on 10.x: bf16 |
| does not  | W4A16; MXFP4 on 12.x, with fp16 or fp32 or QuTLASS's recipe |
| run on    | not run |

NVFP4 has two ways. Where nothing follows the product (one tensor scale, no bias, no output transform) cuBLAS gets both
tensor scales and gives x.dtype. Else it gives the bare sums in fp32, all ranges in one product, and alpha, bias and the
one rounding follow as everywhere (compose.epilogue).

MXFP4 is not cuBLAS's own: torch hands it to a kernel (MSLK) that is in some of its builds only, for 10.x only, and
gives bf16; where there is a bias or an output transform the result is so rounded twice. Source: torch 2.13,
torch/nn/functional.py and _meta_registrations.py; pytorch/pytorch, aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import vendor
from .compose import epilogue
from .protocol import Layer, Operand, Problem, Weight
from .vendor import prepare, rotate, rotate_quantize, rotate_quantize_dequantize, together

__all__ = [
    "NAME", "matmul", "missing", "operand", "prepare", "product", "refuses", "rotate", "rotate_quantize",
    "rotate_quantize_dequantize", "together",
]  # fmt: skip

NAME = "blackwell_cublas"
ALIGN_N = 16
"""scaled_mm asks for N in multiples of 16; K is in whole tiles of scales, which is more than it asks for."""


def missing(device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
    """Reasons against this machine: no Blackwell, no Triton, a torch without scaled_mm."""
    reasons = vendor.missing_gpu(device, capability)
    if not hasattr(functional, "scaled_mm"):
        reasons.append(f"needs torch 2.11 or newer, found {torch.__version__}: pip install -U torch")
    return reasons


def refuses(problem: Problem) -> list[str]:
    """Reasons against a layer: W4A16, and of MXFP4 what torch's kernel does not take."""
    reasons = vendor.refuses_layer(problem)
    if problem.format.has_tensor_scale:
        return reasons
    instead = "choose 'blackwell_flashinfer' or 'blackwell_triton'"
    if problem.capability is not None and problem.capability[0] != 10:
        found = ".".join(map(str, problem.capability))
        reasons.append(f"needs a GPU of 10.x for MXFP4, torch having no other such product, found {found}: {instead}")
    if problem.dtype != torch.bfloat16:
        reasons.append(f"needs bfloat16 for MXFP4, which its product gives, found {_short(problem.dtype)}: {instead}")
    if problem.recipe == "qutlass":
        reasons.append(
            f"needs a product with alpha for QuTLASS's MXFP4 (1/3), found torch's, which has none: {instead}"
        )
    return reasons


def operand(x: Tensor, layer: Layer) -> Operand:
    """x (M, K), rotated and quantized: codes, and scales in the 128x4 layout."""
    return vendor.quantized(x, layer)


def product(operand: Operand, layer: Layer) -> Tensor:
    """The operand times the weight: (M, N) of the operand's dtype."""
    (part,) = vendor.prepared(layer, NAME, _parts).parts
    dtype = operand.dtype
    if operand.rows == 0:
        return operand.data.new_empty(0, part.outputs, dtype=dtype)
    if not layer.weight.format.has_tensor_scale:
        return vendor.finished(vendor.joined([_mxfp4(operand, part)], (part,)), layer, dtype)
    if _is_plain(layer):
        assert operand.tensor_scale is not None
        return vendor.joined([_nvfp4(operand, part, operand.tensor_scale, dtype)], (part,))
    rounded = dtype if layer.output_blocks is None else torch.float32
    y = _exact(operand, part, layer.weight, layer.bias, rounded)
    return y if layer.output_blocks is None else rotate(y, layer.output_blocks, dtype)


def renewal(old: Layer, new: Layer) -> list[tuple[Any, Any]]:
    """See `FusedBackend.renewal`."""
    return vendor.renewal(old, new, NAME, _parts)


def matmul(
    x: Tensor,
    x_block_scale: Tensor | None,
    x_tensor_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Packed codes (M, K/2) x (N, K/2)^T -> (M, N) of out_dtype. Raises BackendRefusal for values."""
    codes = vendor.packed_operand(x, x_block_scale, x_tensor_scale, weight, NAME)
    (part,) = _parts(weight)
    if codes.rows == 0:
        return x.new_empty(0, part.outputs, dtype=out_dtype)
    if weight.format.has_tensor_scale:
        return _exact(codes, part, weight, bias, out_dtype)
    if out_dtype != torch.bfloat16 or bias is not None:
        raise vendor.cannot_give(NAME, ["needs a bfloat16 result without bias for MXFP4, found another"])
    return vendor.joined([_mxfp4(codes, part)], (part,))


def _parts(weight: Weight) -> tuple[vendor.Part, ...]:
    return vendor.parts_of(weight, ALIGN_N, apart=False)


def _is_plain(layer: Layer) -> bool:
    """Whether nothing but one scale is to be done to the sums."""
    per_row = layer.quantizer is not None and layer.quantizer.per_row
    return layer.bias is None and layer.output_blocks is None and len(layer.weight.output_sizes) == 1 and not per_row


def _exact(operand: Operand, part: vendor.Part, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    acc = _nvfp4(operand, part, None, torch.float32)[:, : part.outputs]
    return epilogue(acc, operand.tensor_scale, weight, bias, dtype).contiguous()


def _nvfp4(operand: Operand, part: vendor.Part, x_tensor_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(M, N padded) of dtype: the bare sums, or with the tensor scales of both sides where that of x is given."""
    scaling, swizzle = functional.ScalingType, functional.SwizzleType
    recipes, swizzles = [scaling.BlockWise1x16], [swizzle.SWIZZLE_32_4_4]
    x_scales, w_scales = [_scales(operand.block_scale)], [_scales(part.block_scale)]
    if x_tensor_scale is not None:
        recipes, swizzles = [*recipes, scaling.TensorWise], [*swizzles, swizzle.NO_SWIZZLE]
        x_scales, w_scales = [*x_scales, x_tensor_scale], [*w_scales, part.tensor_scale]
    return functional.scaled_mm(
        _fp4(operand.data), _fp4(part.codes).T, x_scales, recipes, w_scales, recipes, swizzles, swizzles,
        output_dtype=dtype,
    )  # fmt: skip


def _mxfp4(operand: Operand, part: vendor.Part) -> Tensor:
    """(M, N padded) bf16."""
    recipe, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    assert operand.block_scale is not None
    x_scale, w_scale = (scale.view(torch.float8_e8m0fnu) for scale in (operand.block_scale, part.block_scale))
    return functional.scaled_mm(
        _fp4(operand.data), _fp4(part.codes).T, x_scale, recipe, w_scale, recipe, swizzle, swizzle,
        output_dtype=torch.bfloat16,
    )  # fmt: skip


def _fp4(codes: Tensor) -> Tensor:
    return codes.view(torch.float4_e2m1fn_x2)


def _scales(scale: Tensor | None) -> Tensor:
    assert scale is not None
    return scale.view(torch.float8_e4m3fn)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
