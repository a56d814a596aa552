"""QuTLASS: rotate + quantize in one kernel, and its FP4 products.

| needs     | a Blackwell GPU (10.x or 12.x), the package qutlass 0.2 built for it from source, and Triton |
| provides  | W4A4 of bf16: NVFP4 and MXFP4, any size, either direction of a transform, bias, q/k/v with a scale each |
| does not  | fp16 and fp32 (its kernels take and give bf16); W4A16; the recipe 'token' |
| run on    | not run |

Its own rotate + quantize runs NVFP4 behind R = 16, 32, 64, 128 where bf16 holds the matrix (a Hadamard: the factor is
moved into the global scale, so that +-1 stay), and MXFP4 behind R = 32, 64, 128 with the recipe 'qutlass', which is
its only rule. Everything else gpu_triton quantizes, and QuTLASS multiplies.

What is made of its conventions:

- Its global scale is what a file stores: the checkpoint's encode scale, or 6 for the recipe 'qutlass'.
- Raw absmax scales (6) and MXFP4's codes of 3 z / s: x's tensor scale, 1/6 or 1/3, is in alpha.
- NaN and Inf, which its maxima overlook: one more pass over x, and such groups get the NaN scale.
- Scales, dense or 128x4 by its revision: taken row by row, then laid out with zero padding (vendor_ops.py).
- K in whole tiles of scales and N in multiples of 8: both padded with zeros, the result sliced.
- Results in bf16: with a bias or an output transform they are rounded twice.

Known differences from the definition: approximate reciprocals, so that a code next to a tie may differ; with R = 128 on
10.x codes from the unrounded scale; MXFP4 adds 1e-8 to a maximum (a group of zeros has byte 100, not 0), and with R of
32 and 128 holds 1/sqrt(R) in bf16 (off by 1e-4), as the models made for it do. Sources: IST-DASLab/qutlass,
qutlass/__init__.py, csrc/bindings.cpp, csrc/gemm.cu (alignments), and csrc/include/cutlass_extensions/epilogue/
threadblock/epilogue_quant.h (arithmetic).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..layouts import BLOCKED_128x4, get_layout
from . import vendor, vendor_ops
from .gpu_pieces import is_capturing
from .kept import Kept
from .protocol import Blocks, Layer, Operand, Problem, Quantizer, Weight
from .vendor import prepare, rotate, rotate_quantize_dequantize, together

__all__ = [
    "NAME", "matmul", "missing", "operand", "prepare", "product", "refuses", "rotate", "rotate_quantize",
    "rotate_quantize_dequantize", "together",
]  # fmt: skip

NAME = "blackwell_qutlass"
SIZES = {"nvfp4": (16, 32, 64, 128), "mxfp4": (32, 64, 128)}
"""Widths of a block that its kernels turn."""
ALIGN_N = 8
"""Its products write bf16 in units of 16 bytes."""
FUNCTIONS = ("fusedQuantizeNv", "fusedQuantizeMx", "matmul_nvf4_bf16_tn", "matmul_mxf4_bf16_tn")
INSTALL = "build it from github.com/IST-DASLab/qutlass on this GPU (pip install --no-build-isolation .)"


def missing(device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
    """Reasons against this machine: no Blackwell, no Triton, no QuTLASS, or one that is too old."""
    reasons = vendor.missing_gpu(device, capability)
    load = None if reasons else vendor_ops.qutlass
    absent = vendor.missing_package("qutlass", "QuTLASS", INSTALL, load)
    if load is not None and not absent:
        module = load()
        if lacking := [name for name in FUNCTIONS if not hasattr(module, name)]:
            reasons.append(f"needs QuTLASS 0.2 or newer, found one without {', '.join(lacking)}: {INSTALL}")
    return [*reasons, *absent]


def refuses(problem: Problem) -> list[str]:
    """Reasons against a layer: W4A16, other inputs than bf16, a tensor scale for each row."""
    reasons = vendor.refuses_layer(problem)
    if problem.dtype != torch.bfloat16:
        found = str(problem.dtype).removeprefix("torch.")
        reasons.append(f"needs bfloat16 inputs, which its kernels take and give, found {found}: convert the model")
    if problem.recipe == "token" and problem.format.has_tensor_scale:
        reasons.append(vendor.PER_ROW)
    return reasons


def rotate_quantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, scale_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K) -> packed codes, scale bytes in the layout, tensor scale (1,); by its kernel where that runs it."""
    turned = None if blocks is None else _matrix(blocks, quantizer)
    if turned is None or x.dtype != torch.bfloat16 or quantizer.per_row:
        return vendor.rotate_quantize(x, blocks, quantizer, scale_layout)
    matrix, factor = turned
    tensor_scale = vendor.activation_scale(quantizer, x.device)
    (m, k), fmt = x.shape, quantizer.format
    if m == 0:
        codes = x.new_empty(fmt.codes_shape(0, k), dtype=torch.uint8)
        scale = x.new_empty(fmt.scale_shape(0, k), dtype=torch.uint8)
    else:
        x = vendor.aligned(x)
        global_scale = _global_scale(quantizer, factor, x.device) if fmt.has_tensor_scale else None
        codes, scale = torch.ops.quarterturn_vendor.qutlass_quantize(x, matrix, global_scale)
        _mark_not_finite(x, matrix.shape[0], codes, scale, quantizer)
    return codes, get_layout(scale_layout).forward(scale), tensor_scale


def operand(x: Tensor, layer: Layer) -> Operand:
    """x (M, K) bf16, rotated and quantized: codes, and scales in the 128x4 layout."""
    assert layer.quantizer is not None
    quantized = rotate_quantize(x, layer.input_blocks, layer.quantizer, BLOCKED_128x4.name)
    return vendor.as_operand(*quantized, x, layer.quantizer)


def product(operand: Operand, layer: Layer) -> Tensor:
    """The operand times the weight: (M, N) bf16."""
    made = vendor.prepared(layer, NAME, _parts)
    return vendor.finished(_multiply(operand, made.parts, made.alphas, layer.weight), layer, operand.dtype)


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
    """Packed codes (M, K/2) x (N, K/2)^T -> (M, N) bf16, without bias. Raises BackendRefusal for what it cannot do."""
    codes = vendor.packed_operand(x, x_block_scale, x_tensor_scale, weight, NAME)
    return vendor.bare_product(NAME, codes, weight, bias, out_dtype, (torch.bfloat16,), _parts, _multiply)


def _parts(weight: Weight) -> tuple[vendor.Part, ...]:
    return vendor.parts_of(weight, ALIGN_N)


def _multiply(operand: Operand, parts: tuple[vendor.Part, ...], alphas: tuple[Tensor, ...], weight: Weight) -> Tensor:
    """(M, N) bf16, one product a part."""
    if operand.rows == 0:
        return operand.data.new_empty(0, sum(part.outputs for part in parts), dtype=torch.bfloat16)
    run, name = torch.ops.quarterturn_vendor.qutlass_matmul, weight.format.name
    results = [
        run(operand.data, part.codes, operand.block_scale, part.block_scale, alpha, name)
        for part, alpha in zip(parts, alphas, strict=True)
    ]
    return vendor.joined(results, parts)


def _matrix(blocks: Blocks, quantizer: Quantizer) -> tuple[Tensor, float] | None:
    """The matrix that its kernel multiplies by, bf16 (R, R), and the factor left to the global scale.

    None where its kernel does not turn that, or would round the matrix.
    """
    fmt, size = quantizer.format, blocks.matrix.shape[0]
    if size not in SIZES[fmt.name] or not (fmt.has_tensor_scale or quantizer.recipe == "qutlass"):
        return None
    made = _KEPT.of(blocks.matrix)
    key = (blocks.factor, blocks.transpose, fmt.name)
    if key not in made and is_capturing(blocks.matrix):
        # Whether bf16 holds a matrix cannot be asked while a CUDA graph is captured, nor anything be kept.
        return None if fmt.has_tensor_scale else _turned(blocks, False)
    if key not in made:
        made[key] = _turned(blocks, fmt.has_tensor_scale)
    turned: tuple[Tensor, float] | None = made[key]
    return turned


_KEPT = Kept()


def _turned(blocks: Blocks, has_global_scale: bool) -> tuple[Tensor, float] | None:
    matrix = (blocks.matrix.T if blocks.transpose else blocks.matrix).float()
    if not has_global_scale:
        # The power of two that is the scale cannot take the factor; the models made for it have it in the matrix.
        return (matrix * blocks.factor).bfloat16().contiguous(), 1.0
    held = (matrix * -1.0 if blocks.factor < 0 else matrix).bfloat16().contiguous()
    exact = blocks.factor != 0 and torch.equal(held.float().abs(), matrix.abs())
    return (held, abs(blocks.factor)) if exact else None


def _global_scale(quantizer: Quantizer, factor: float, device: torch.device) -> Tensor:
    """encode * factor, fp32 (1,): x @ (f M) quantized with `encode` is x @ M quantized with f * encode."""
    if quantizer.recipe == "qutlass":
        return torch.full((1,), 6.0 * factor, dtype=torch.float32, device=device)
    assert quantizer.encode_scale is not None
    return quantizer.encode_scale.view(1) * factor


def _mark_not_finite(x: Tensor, size: int, codes: Tensor, scale: Tensor, quantizer: Quantizer) -> None:
    """The NaN scale and codes 0 for the groups of each block of x that holds NaN or Inf: its kernel overlooks them."""
    m, k = x.shape
    group = quantizer.format.group_size
    # The largest magnitude of each block in one pass; NaN wins over every number.
    bad = ~torch.linalg.vector_norm(x.view(m, k // size, size), ord=math.inf, dim=-1).isfinite()
    scale.masked_fill_(bad.repeat_interleave(size // group, dim=1), quantizer.format.nan_byte)
    codes.masked_fill_(bad.repeat_interleave(size // 2, dim=1), 0)
