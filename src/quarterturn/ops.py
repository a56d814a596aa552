"""The operators: `torch.library` schemas, argument checks, fakes. Nothing is computed here.

| operator                    | equation                                                                       |
|---|---|
| rotate                      | z = x @ V per block of R                                                       |
| rotate_quantize             | z -> packed E2M1 codes, block scales (linear or blocked), tensor scale         |
| rotate_quantize_dequantize  | z -> e2m1 * block_scale, and the tensor scale beside it                        |
| swizzle_scales, unswizzle_scales | row-major scales <-> the 128x4 layout                                     |
| fp4_matmul                  | y = (x * x_tensor_scale) @ w^T + bias, x and w values or packed codes          |
| fp4_linear                  | all of it: what FP4Linear calls                                                |

x is (..., K), bf16, fp16 or fp32, last dimension of any stride; results are new and contiguous (FP4Linears that are one
product give slices of such a result, see fused.py). Inference only: an input that asks for gradients is refused. Every
Python function here stands for the operator `torch.ops.quarterturn.<name>`, which checks its arguments, and which
`torch.compile` and CUDA graphs take whole; called eagerly it runs without the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import checks, known
from .backends import Blocks, Quantizer, Weight, compose, op_backend
from .eager import seen_by_torch
from .formats import FP4Format, get_format
from .layouts import LINEAR, BLOCKED_128x4, get_layout
from .tensor import FP4Tensor

_library = torch.library.Library("quarterturn", "DEF")
_QUANTIZE = (
    "(Tensor x, Tensor? matrix, float factor, bool transpose, str format, Tensor? encode_scale, str recipe, str rule, "
)
_library.define(
    "rotate(Tensor x, Tensor matrix, float factor, bool transpose, ScalarType out_dtype, str backend) -> Tensor"
)
_library.define(f"rotate_quantize{_QUANTIZE}str scale_layout, str backend) -> (Tensor, Tensor, Tensor)")
_library.define(f"rotate_quantize_dequantize{_QUANTIZE}ScalarType out_dtype, str backend) -> (Tensor, Tensor)")
_library.define("swizzle_scales(Tensor scales) -> Tensor")
_library.define("unswizzle_scales(Tensor stored, SymInt rows, SymInt cols) -> Tensor")
_WEIGHT = "Tensor weight, Tensor? block_scale, Tensor tensor_scale, SymInt[] output_sizes, Tensor? bias, str format, "
_library.define(
    f"fp4_matmul(Tensor x, Tensor? x_block_scale, Tensor? x_tensor_scale, {_WEIGHT}ScalarType out_dtype, "
    "str backend) -> Tensor"
)
_library.define(
    f"fp4_linear(Tensor x, {_WEIGHT}Tensor? input_matrix, float input_factor, bool input_transpose, "
    "Tensor? output_matrix, float output_factor, bool output_transpose, bool quantize, Tensor? encode_scale, "
    "str recipe, str rule, str backend, int[]? rows=None, bool batch_invariant=False) -> Tensor"
)


def rotate(
    x: Tensor,
    matrix: Tensor,
    factor: float = 1.0,
    transpose: bool = False,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """x (..., K) -> x @ V for every block of R along K, V = factor * matrix (or its transpose).

    matrix: (R, R), rounded to fp32; R divides K. Accurate to fp32, rounded once to out_dtype (default x.dtype).
    Raises Refusal for other dtypes and shapes, and where x asks for gradients. Source: docs/numerics.md.
    """
    checks.turn("rotate", x, matrix, factor, transpose, backend, needed=True)
    return _call(_rotate, x, matrix, factor, transpose, out_dtype or x.dtype, backend)


def rotate_quantize(
    x: Tensor,
    matrix: Tensor | None = None,
    factor: float = 1.0,
    transpose: bool = False,
    *,
    format: str | FP4Format,
    encode_scale: Tensor | float | None = None,
    recipe: str = "checkpoint",
    rule: str = "even",
    scale_layout: str = "linear",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., K) -> codes uint8 (..., K/2), block scales, tensor scale fp32 ((1,), or (M,) for recipe 'token').

    encode_scale: fp32, one element, finite and positive; needed by NVFP4's recipe 'checkpoint', unused elsewhere.
    Block scales are E4M3 (NVFP4) or E8M0 as uint8 (MXFP4), (..., K/group_size) for scale_layout 'linear'; 'blocked' is
    the 128x4 layout of the (M, K) matrix that x is when its leading dimensions are merged, padding bytes zero.
    rule: how MXFP4 makes a power of two of a group's amax. Raises Refusal for what does not fit.
    """
    checks.turn("rotate_quantize", x, matrix, factor, transpose, backend)
    scale = _encode_tensor(encode_scale, x)
    name = get_format(format).name
    codes, byte, tensor_scale = _call(
        _rotate_quantize, x, matrix, factor, transpose, name, scale, recipe, rule, scale_layout, backend
    )
    dtype = get_format(format).scale_dtype
    return codes, byte if byte.dtype == dtype else byte.view(dtype), tensor_scale


def rotate_quantize_dequantize(
    x: Tensor,
    matrix: Tensor | None = None,
    factor: float = 1.0,
    transpose: bool = False,
    *,
    format: str | FP4Format,
    encode_scale: Tensor | float | None = None,
    recipe: str = "checkpoint",
    rule: str = "even",
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """As rotate_quantize, but -> e2m1 * block_scale (..., K) of out_dtype (default x.dtype), and the tensor scale.

    Exact in fp32 and bf16, NVFP4 also in fp16; MXFP4 in fp16 can overflow and is refused.
    """
    op = _rotate_quantize_dequantize
    checks.turn("rotate_quantize_dequantize", x, matrix, factor, transpose, backend)
    scale, name, out = _encode_tensor(encode_scale, x), get_format(format).name, out_dtype or x.dtype
    return _call(op, x, matrix, factor, transpose, name, scale, recipe, rule, out, backend)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Block scales (rows, cols), one byte each -> the 128x4 layout, rows padded to 128 and cols to 4 with zeros."""
    checks.tensor("swizzle_scales", "scales", scales)
    return torch.ops.quarterturn.swizzle_scales(_bytes(scales)).view(scales.dtype)


def unswizzle_scales(stored: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of swizzle_scales for a matrix that had (rows, cols) before padding."""
    checks.tensor("unswizzle_scales", "stored", stored)
    return torch.ops.quarterturn.unswizzle_scales(_bytes(stored), rows, cols).view(stored.dtype)


def fp4_matmul(
    x: Tensor,
    x_tensor_scale: Tensor | None = None,
    *,
    weight: FP4Tensor,
    x_block_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """x (..., K) times weight (N, K) -> (..., N): fp32 accumulation, tensor scales and bias in fp32, one rounding.

    x: values as they are (W4A16), quantize-dequantize values with their x_tensor_scale (W4A4), or packed codes (uint8)
    with linear x_block_scale and x_tensor_scale (W4A4; out_dtype then defaults to bf16).
    x_tensor_scale: fp32, one element or one per row. bias: (N,). Raises Refusal for what does not fit.
    """
    checks.product("fp4_matmul", x, x_tensor_scale, weight, x_block_scale, bias, backend)
    dtype = out_dtype or (torch.bfloat16 if x.dtype == torch.uint8 else x.dtype)
    return _call(
        _fp4_matmul,
        x,
        None if x_block_scale is None else _bytes(x_block_scale),
        x_tensor_scale,
        weight.codes,
        _bytes(weight.linear_block_scale()),
        weight.tensor_scale,
        list(weight.output_sizes),
        bias,
        weight.format.name,
        dtype,
        backend,
    )


def _call(operator: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    """The operator of that function, or the function itself where nobody would see the difference."""
    if torch.compiler.is_compiling() or seen_by_torch(x, *rest):
        return getattr(torch.ops.quarterturn, operator.__name__[1:])(x, *rest)
    return operator(True, x, *rest)


def _bytes(scales: Tensor) -> Tensor:
    """Block scales as uint8: the operators take and give bytes, since float8 tensors lack most of PyTorch."""
    return scales.view(torch.uint8) if scales.element_size() == 1 else scales


def _encode_tensor(encode_scale: Tensor | float | None, x: Tensor) -> Tensor | None:
    if encode_scale is None or isinstance(encode_scale, Tensor):
        return encode_scale
    checks.encode_scale(encode_scale)
    return torch.tensor([encode_scale], dtype=torch.float32, device=x.device)


# Each operator is one function: it checks, then runs, or (`run` False: the fake that tracing asks) tells its shapes.


def _rotate(
    run: bool, x: Tensor, matrix: Tensor, factor: float, transpose: bool, out_dtype: torch.dtype, backend: str
) -> Tensor:
    checks.x("rotate", x, matrix)
    checks.blocks("rotate", x.shape[-1], matrix)
    checks.out_dtype("rotate", out_dtype)
    if not run:
        return x.new_empty(x.shape, dtype=out_dtype)
    blocks = Blocks(matrix, factor, transpose)
    return _shaped(op_backend("rotate", x.device, backend).rotate(compose.rows(x), blocks, out_dtype), x.shape)


def _rotate_quantize(
    run: bool,
    x: Tensor,
    matrix: Tensor | None,
    factor: float,
    transpose: bool,
    format: str,
    encode_scale: Tensor | None,
    recipe: str,
    rule: str,
    scale_layout: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    op, k = "rotate_quantize", x.shape[-1] if x.dim() else 0
    quantizer = _quantizer(op, x, matrix, format, encode_scale, recipe, rule)
    layout, fmt = get_layout(scale_layout), quantizer.format
    linear_shape, codes_shape = (*x.shape[:-1], k // fmt.group_size), (*x.shape[:-1], k // 2)
    if not run:
        stored = linear_shape if layout is LINEAR else layout.shape(compose.row_count(x), k // fmt.group_size)
        codes = x.new_empty(codes_shape, dtype=torch.uint8)
        return codes, x.new_empty(stored, dtype=torch.uint8), _tensor_scale_like(x, quantizer)
    codes, scale, tensor_scale = op_backend(op, x.device, backend).rotate_quantize(
        compose.rows(x), known.blocks(matrix, factor, transpose), quantizer, scale_layout
    )
    return _shaped(codes, codes_shape), _shaped(scale, linear_shape) if layout is LINEAR else scale, tensor_scale


def _rotate_quantize_dequantize(
    run: bool,
    x: Tensor,
    matrix: Tensor | None,
    factor: float,
    transpose: bool,
    format: str,
    encode_scale: Tensor | None,
    recipe: str,
    rule: str,
    out_dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    op = "rotate_quantize_dequantize"
    quantizer = _quantizer(op, x, matrix, format, encode_scale, recipe, rule)
    checks.out_dtype(op, out_dtype, quantizer.format)
    if not run:
        return x.new_empty(x.shape, dtype=out_dtype), _tensor_scale_like(x, quantizer)
    values, tensor_scale = op_backend(op, x.device, backend).rotate_quantize_dequantize(
        compose.rows(x), known.blocks(matrix, factor, transpose), quantizer, out_dtype
    )
    return _shaped(values, x.shape), tensor_scale


def _shaped(result: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A matrix in the shape that the caller's x asks for, which mostly is the one it has: a view costs microseconds."""
    return result if len(shape) == 2 else result.view(shape)


def _quantizer(
    op: str, x: Tensor, matrix: Tensor | None, format: str, encode_scale: Tensor | None, recipe: str, rule: str
) -> Quantizer:
    fmt = get_format(format)
    checks.x(op, x, matrix, encode_scale)
    checks.blocks(op, x.shape[-1], matrix)
    checks.quantizer(op, x.shape[-1], fmt, encode_scale, recipe, rule)
    return Quantizer(fmt, encode_scale, recipe, rule)


def _tensor_scale_like(x: Tensor, quantizer: Quantizer) -> Tensor:
    return x.new_empty((compose.row_count(x) if quantizer.per_row else 1,), dtype=torch.float32)


def _swizzle_scales(run: bool, scales: Tensor) -> Tensor:
    checks.block_scales("swizzle_scales", scales)
    return BLOCKED_128x4.forward(scales) if run else scales.new_empty(BLOCKED_128x4.shape(*scales.shape))


def _unswizzle_scales(run: bool, stored: Tensor, rows: int, cols: int) -> Tensor:
    checks.scale_bytes("unswizzle_scales", stored)
    return BLOCKED_128x4.inverse(stored, rows, cols) if run else stored.new_empty((rows, cols))


def _fp4_matmul(
    run: bool,
    x: Tensor,
    x_block_scale: Tensor | None,
    x_tensor_scale: Tensor | None,
    weight: Tensor,
    block_scale: Tensor | None,
    tensor_scale: Tensor,
    output_sizes: list[int],
    bias: Tensor | None,
    format: str,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    op, fmt = "fp4_matmul", get_format(format)
    others = (x_block_scale, x_tensor_scale, weight, block_scale, tensor_scale, bias)
    if x.dtype == torch.uint8:
        checks.rest(op, x, *others)
        checks.packed_x(op, x, x_block_scale, x_tensor_scale, fmt)
        k = x.shape[-1] * 2
    else:
        checks.x(op, x, *others)
        k = x.shape[-1]
    checks.x_tensor_scale(op, x_tensor_scale, compose.row_count(x))
    checks.weight(op, k, weight, block_scale, tensor_scale, output_sizes, bias, fmt)
    checks.out_dtype(op, out_dtype)
    shape = (*x.shape[:-1], weight.shape[0])
    if not run:
        return x.new_empty(shape, dtype=out_dtype)
    operand = Weight(weight, block_scale, tensor_scale, tuple(output_sizes), fmt)
    x_scales = None if x_block_scale is None else compose.rows(x_block_scale)
    y = op_backend(op, x.device, backend).matmul(compose.rows(x), x_scales, x_tensor_scale, operand, bias, out_dtype)
    return _shaped(y, shape)


def _fp4_linear(run: bool, x: Tensor, *rest: Any) -> Tensor:
    plan = known.plan(x, rest) if run else None
    if plan is not None:
        plan.check(x)
        return plan.run(x)
    n, layer = known.checked_layer(x, *rest)
    shape = (*x.shape[:-1], n)
    if not run:
        return x.new_empty(shape)
    asked = compose.problem_of(layer, x.dtype, x.shape[-1]) if layer.batch_invariant else None
    backend = op_backend("fp4_linear", x.device, rest[known.BACKEND], asked)
    known.keep(x, rest, backend, layer)
    return _shaped(compose.linear(backend, compose.rows(x), layer), shape)


def _register(name: str, operator: Callable[..., Any]) -> None:
    def real(x: Tensor, *rest: Any) -> Any:
        # Autocast would round the operands of products that are exact.
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return operator(True, x, *rest)
        with torch.autocast(kind, enabled=False):
            return operator(True, x, *rest)

    def fake(*arguments: Any) -> Any:
        return operator(False, *arguments)

    _library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"quarterturn::{name}", fake, lib=_library)


for _operator in (
    _rotate,
    _rotate_quantize,
    _rotate_quantize_dequantize,
    _swizzle_scales,
    _unswizzle_scales,
    _fp4_matmul,
    _fp4_linear,
):
    _register(_operator.__name__[1:], _operator)

FP4_LINEAR = torch.ops.quarterturn.fp4_linear
"""What FP4Linear calls where torch looks on."""
