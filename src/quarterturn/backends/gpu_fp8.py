"""MXFP4 layers with many rows through the FP8 matrix units of NVIDIA GPUs, at twice the rate of bf16.

| needs     | an NVIDIA GPU of capability 8.9, 9.0 or 12.0, Triton 3.6 or newer, torch 2.11 or newer |
| provides  | W4A4 MXFP4 layers: every rule, recipe, dtype, transform, bias and size; meant for 2,048 rows and more |
| does not  | NVFP4 (its values need 6 bits, E4M3 has 4); W4A16; packed weights: it keeps 8 bits a value besides |
| run on    | NVIDIA H200; not run on 8.9 and 12.0, for which its kernels are compiled in tests |

An E2M1 number times a power of two is exact in E4M3 over 15 exponents, so where those of a row span 14 or less its
block scales go into the numbers and a power of two for the row is left (kernels/to_e4m3.py). Weights are looked at
once: one with a row that spans more is kept and multiplied as by gpu_triton, which `explain` tells. Of x,
which is rotated and quantized by gpu_triton, such rows are found on the device and multiplied again in bf16 by a kernel
that ends at once where there are none (kernels/matmul_left.py): nothing waits for the host, also in CUDA graphs.

The operands are exact, the sums are not those of the definition, which is why this backend has to be named. Hopper and
Ada add FP8 products with 13 bits behind the point of the largest summand, cut off. torch's product is asked not to stay
there (`use_fast_accum=False`: sums go into fp32 periodically; cuBLAS does not say how often, CUTLASS each 128 of K):
scaled_mm with a scale each row, cuBLAS's on 9.0 and CUTLASS's elsewhere, for bf16 results, and bare fp32 sums from
cuBLAS, scaled afterwards, for others. With sums moved each 128 of K by instructions of 32 values, each of which cuts 33
summands by less than 2^-13 of the largest, a sum is off by less than 4 * 33 * 2^-13 = 1.6% of the sum of the products'
magnitudes, at the very worst. On an H200 sums of 4,096 to 14,336 products were off by 2e-4 of it at most, 9e-6 rms
(1e-3 and 7e-5 with fast accumulation), as `python -m benchmarks.gpu_fp8` measures.

Sources: DeepSeek-V3 (arXiv 2412.19437), 3.3.2, for the 14 bits; cuBLAS's documentation of
CUBLASLT_MATMUL_DESC_FAST_ACCUM; pytorch/pytorch, aten/src/ATen/native/cuda/ScaledBlas.cpp and RowwiseScaledMM.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .. import e4m3_layout
from ..errors import BackendRefusal, refusal
from ..layouts import LINEAR
from ..tensor import FP4Tensor
from . import compose, fp8_launch, gpu_triton
from .gpu_device import capability as capability_of
from .protocol import Layer, Operand, Problem, Together, Weight

NAME = "gpu_fp8"
CAPABILITIES = ((8, 9), (9, 0), (12, 0))
"""Those with FP8 matrix units for which torch is built and Triton compiles; 10.x multiplies FP4 itself."""

rotate = gpu_triton.rotate
rotate_quantize = gpu_triton.rotate_quantize
rotate_quantize_dequantize = gpu_triton.rotate_quantize_dequantize


def missing(device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
    """Reasons against this machine: no FP8 matrix units, no Triton, a torch without scaled_mm."""
    reasons = gpu_triton.missing(device, capability)
    if device.type == "cuda" and torch.version.hip is None:
        found = capability or capability_of(device)
        if found not in CAPABILITIES:
            known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
            text = f"needs FP8 matrix units of a capability it knows ({known}), found {found[0]}.{found[1]}"
            reasons.append(f"{text}: choose backend 'auto'")
    if not hasattr(functional, "scaled_mm"):
        reasons.append(f"needs torch 2.11 or newer, found {torch.__version__}: pip install -U torch")
    return reasons


def refuses(problem: Problem) -> list[str]:
    """Layers that are not MXFP4 by MXFP4."""
    reasons = []
    if not problem.format.has_e8m0_scale:
        why = "needs MXFP4, whose scales are powers of two, so that E4M3 holds its values"
        reasons.append(f"{why}, found {problem.format.name}: choose 'gpu_triton'")
    if problem.activations != "fp4":
        reasons.append(f"multiplies FP4 by FP4 (W4A4), found activations in {problem.activations}: choose 'gpu_triton'")
    if not (problem.n and problem.k):
        reasons.append(f"needs inputs and outputs, found {problem.k} and {problem.n}: choose 'any_torch'")
    return reasons


def prepare(weight: FP4Tensor, mode: str) -> Tensor | None:
    """The weight as e4m3_layout stores it; where a row spans too many exponents, as gpu_triton keeps it.

    Raises BackendRefusal for mode 'packed'.
    """
    if mode == "packed":
        raise refusal(
            "fp4_linear",
            f"backend '{NAME}' keeps weights in E4M3, 8 bits a value.",
            needs=[("weights 'auto' or 'decoded'", "'packed'")],
            do="leave weights at 'auto', or choose backend 'gpu_triton'",
            kind=BackendRefusal,
        )
    stored, unfit = fp8_launch.weight_in_e4m3(weight)
    if unfit:
        return gpu_triton.prepare(weight, mode)
    if stored.is_cuda:
        torch.cuda.current_stream(stored.device).synchronize()  # other streams may read it next
    return stored


def remark(weight: FP4Tensor, values: Tensor | None) -> str | None:
    """Why a layer does not run as the backend's name says; None where it does."""
    if values is not None and values.dtype == e4m3_layout.DTYPE:
        return None
    _, unfit = fp8_launch.weight_in_e4m3(weight)
    return (
        f"multiplied as by '{gpu_triton.NAME}' all the same: {unfit} of {weight.shape[0]} rows of the weight have "
        "scales more than 2^14 apart, or too large or small, which E4M3 does not hold"
    )


def matmul(
    x: Tensor,
    x_block_scale: Tensor | None,
    x_tensor_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Packed codes (M, K/2) x a weight that `prepare` made (N, K)^T -> (M, N). Raises BackendRefusal for packed weights
    and for values of x."""
    if weight.block_scale is not None:
        raise _by_itself("fp4_matmul")
    if weight.data.dtype != e4m3_layout.DTYPE:
        return gpu_triton.matmul(x, x_block_scale, x_tensor_scale, weight, bias, out_dtype)
    if x_block_scale is None or x_tensor_scale is None or x_tensor_scale.numel() != 1:
        raise _by_itself("fp4_matmul")
    return _times(fp8_launch.operand(x, x_block_scale, x_tensor_scale, out_dtype), weight, bias, out_dtype)


def operand(x: Tensor, layer: Layer) -> Operand:
    """x (M, K) rotated, quantized, and converted to E4M3."""
    if layer.weight.block_scale is not None:
        raise _by_itself("fp4_linear")
    if layer.weight.data.dtype != e4m3_layout.DTYPE or layer.quantizer is None:
        return compose.operand(gpu_triton, x, layer)
    codes, scale, tensor_scale = rotate_quantize(x, layer.input_blocks, layer.quantizer, LINEAR.name)
    return fp8_launch.operand(codes, scale, tensor_scale, x.dtype)


def product(operand: Operand, layer: Layer) -> Tensor:
    """The operand times the weight, the output turned: (M, N) of the operand's dtype."""
    if not isinstance(operand, fp8_launch.E4M3Operand):
        return compose.product(gpu_triton, operand, layer)
    # The output transform takes the product in fp32, so that the result is rounded once.
    dtype = operand.dtype if layer.output_blocks is None else torch.float32
    y = _times(operand, layer.weight, layer.bias, dtype)
    return y if layer.output_blocks is None else rotate(y, layer.output_blocks, operand.dtype)


def together(layers: Sequence[Layer]) -> Together | None:
    """None: nothing is gained by one call."""
    return None


def _by_itself(operation: str) -> Exception:
    return refusal(
        operation,
        f"backend '{NAME}' multiplies codes by weights that a layer has converted once.",
        needs=[(f"a layer: FP4Linear(..., backend='{NAME}')", "a call of the operator by itself")],
        do="build the layer, or choose backend 'auto'",
        kind=BackendRefusal,
    )


def _times(operand: fp8_launch.E4M3Operand, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    n = weight.data.shape[0]
    if not operand.rows:
        return operand.data.new_empty(0, n, dtype=dtype)
    values, scale = e4m3_layout.parts(weight.data, operand.data.shape[1])
    return fp8_launch.multiply(operand, values, scale, n, None if bias is None else bias.detach(), dtype)
