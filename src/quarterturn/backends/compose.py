"""A whole layer out of a backend's parts, where it does not fuse them, and the end of every product."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensor import per_output
from .protocol import Backend, Blocks, Quantizer, Weight


def linear(
    backend: Backend,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    input_blocks: Blocks | None,
    output_blocks: Blocks | None,
    quantizer: Quantizer | None,
) -> Tensor:
    """Rotate, quantize, multiply, turn the output: x (M, K) -> (M, N) of x.dtype. No quantizer means W4A16.

    A backend that has a `linear` of its own, with these arguments less the first, is asked instead.
    """
    fused = getattr(backend, "linear", None)
    if fused is not None:
        result: Tensor = fused(x, weight, bias, input_blocks, output_blocks, quantizer)
        return result
    # The output transform takes the product in fp32, so that the result is rounded once.
    product_dtype = x.dtype if output_blocks is None else torch.float32
    operand, tensor_scale = x, None
    if quantizer is not None:
        # MXFP4 values can overflow fp16; NVFP4 values are exact in every float dtype.
        values_dtype = torch.float32 if x.dtype == torch.float16 and not quantizer.format.has_tensor_scale else x.dtype
        operand, tensor_scale = backend.rotate_quantize_dequantize(x, input_blocks, quantizer, values_dtype)
    elif input_blocks is not None:
        operand = backend.rotate(x, input_blocks, x.dtype)
    y = backend.matmul(operand, None, tensor_scale, weight, bias, product_dtype)
    return y if output_blocks is None else backend.rotate(y, output_blocks, x.dtype)


def epilogue(
    acc: Tensor, x_tensor_scale: Tensor | None, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """acc fp32 (M, N), overwritten -> (acc * (x.tensor_scale * w.tensor_scale) + bias) of out_dtype, one rounding."""
    alpha = per_output(weight.tensor_scale, weight.output_sizes)
    acc.mul_(alpha if x_tensor_scale is None else alpha * x_tensor_scale.view(-1, 1))
    if bias is not None:
        acc.add_(bias)
    return acc.to(out_dtype)
