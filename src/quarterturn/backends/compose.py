"""A whole layer out of a backend's parts, where it does not fuse them, and the end of every product.

linear = together, or product of operand.  operand: rotate, quantize.  product: multiply, turn the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ..errors import BackendRefusal, refusal
from ..tensor import FP4Tensor, per_output
from .protocol import (
    Backend,
    FusedBackend,
    Layer,
    Operand,
    OrderedBackend,
    Problem,
    Quantizer,
    RemarkingBackend,
    Together,
    Weight,
)


def row_count(x: Tensor) -> int:
    """M: the product of all dimensions but the last."""
    return math.prod(x.shape[:-1])


def rows(x: Tensor) -> Tensor:
    """(..., K) as (M, K) with the last dimension contiguous; a copy only where the strides need one, or a sign that
    PyTorch has put off: kernels read the memory."""
    if x.is_neg():
        x = x.resolve_neg()
    if x.dim() != 2:  # a view costs microseconds
        # reshape cannot infer M where K is 0 or there are no rows, so M is counted.
        x = x.reshape(row_count(x), x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def linear(backend: Backend, x: Tensor, layer: Layer) -> Tensor:
    """x (M, K) -> (M, N) of x.dtype."""
    run = together(backend, (layer,))
    whole = run(x) if run is not None and x.is_contiguous() else None
    return whole[0] if whole is not None else product(backend, operand(backend, x, layer), layer)


def together(backend: Backend, layers: Sequence[Layer]) -> Together | None:
    """Layers that take the same operand as one function of x, where the backend has such: see FusedBackend."""
    fused = _fused(backend)
    return None if fused is None else fused.together(layers)


def operand(backend: Backend, x: Tensor, layer: Layer) -> Operand:
    """x (M, K), rotated and quantized as the layer asks."""
    fused = _fused(backend)
    if fused is not None:
        return fused.operand(x, layer)
    quantizer, values, tensor_scale = layer.quantizer, x, None
    how = _ORDERED if hasattr(backend, "in_order") and cast(OrderedBackend, backend).in_order(x, layer) else {}
    if quantizer is not None:
        # MXFP4 values can overflow fp16; NVFP4 values are exact in every float dtype.
        dtype = torch.float32 if x.dtype == torch.float16 and not quantizer.format.has_tensor_scale else x.dtype
        values, tensor_scale = backend.rotate_quantize_dequantize(x, layer.input_blocks, quantizer, dtype, **how)
    elif layer.input_blocks is not None:
        values = backend.rotate(x, layer.input_blocks, x.dtype, **how)
    return Operand(values, None, tensor_scale, x.shape[0], x.dtype, "ordered" if how else "rows")


def product(backend: Backend, operand: Operand, layer: Layer) -> Tensor:
    """The operand times the weight, the output turned: (M, N) of the operand's dtype."""
    fused = _fused(backend)
    if fused is not None:
        return fused.product(operand, layer)
    # The output transform takes the product in fp32, so that the result is rounded once.
    dtype = operand.dtype if layer.output_blocks is None else torch.float32
    how = _ORDERED if operand.form == "ordered" else {}
    if layer.batch_invariant:
        how = {**how, "invariant": True}
    y = backend.matmul(operand.data, operand.block_scale, operand.tensor_scale, layer.weight, layer.bias, dtype, **how)
    return y if layer.output_blocks is None else backend.rotate(y, layer.output_blocks, operand.dtype)


def remark(backend: Backend, weight: Callable[[], FP4Tensor], values: Tensor | None) -> str:
    """'; ' and why a layer with these prepared values does not run as the backend's name says; '' where it does."""
    told = cast(RemarkingBackend, backend).remark(weight(), values) if hasattr(backend, "remark") else None
    return "" if told is None else f"; {told}"


def problem_of(layer: Layer, dtype: torch.dtype, k: int) -> Problem:
    """What a layer of inputs (M, k) of a dtype asks of a backend."""
    quantizer = layer.quantizer or Quantizer(layer.weight.format, None)
    sides = [None if blocks is None else blocks.matrix.shape[0] for blocks in (layer.input_blocks, layer.output_blocks)]
    return Problem(
        layer.weight.format, "bf16" if layer.quantizer is None else "fp4", dtype, layer.weight.n, k, sides[0], sides[1],
        layer.bias is not None, quantizer.rule, quantizer.recipe, layer.batch_invariant,
    )  # fmt: skip


def would_vary(needed: str, found: str, layer: str = "") -> BackendRefusal:
    """The refusal of a batch-invariant layer for what only its tensors show."""
    made = refusal(
        "fp4_linear",
        "a row's bits would depend on the number of rows, which batch_invariant rules out.",
        layer=layer or None,
        needs=[(needed, found)],
        do="leave batch_invariant out, or change what is named",
        kind=BackendRefusal,
    )
    return cast(BackendRefusal, made)


_ORDERED = {"ordered": True}


def _fused(backend: Backend) -> FusedBackend | None:
    return cast(FusedBackend, backend) if hasattr(backend, "together") else None


def epilogue(
    acc: Tensor, x_tensor_scale: Tensor | None, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """acc fp32 (M, N), overwritten -> (acc * (x.tensor_scale * w.tensor_scale) + bias) of out_dtype, one rounding."""
    alpha = per_output(weight.tensor_scale, weight.output_sizes)
    acc.mul_(alpha if x_tensor_scale is None else alpha * x_tensor_scale.view(-1, 1))
    if bias is not None:
        acc.add_(bias)
    return acc.to(out_dtype)
