"""C kernels on a CPU, compiled once by the system's compiler.

| needs     | a CPU, and gcc or clang for the first use |
| provides  | every op, format, dtype and size; the steps of a layer fused for few rows, weights packed at 4.5 bits |
| does not  | QuTLASS's MXFP4 recipe (any_torch computes that one, with the same bits) |
| run on    | x86-64 with AVX2; x86-64 with AVX-512 and AMX |

Packed weights are multiplied by packed activations: integer products of the codes, exact in every group, times the
scales in fp32, so that a row's bits do not depend on the batch, neither in the quantization nor in the product. Many
rows of unquantized activations (W4A16), and many rows on a CPU with bf16 instructions, decode slices of the weights for
the library's product instead. z is summed in float64 in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..formats import FP4Format
from ..kernels import cpu_build
from ..layouts import get_layout
from ..tensor import FP4Tensor
from . import any_torch
from .compose import epilogue
from .protocol import Blocks, Problem, Quantizer, Weight

NAME = "cpu_native"
FEW_ROWS = 64
"""Up to here the kernel's own product is always used; above, the library's can be faster."""
SCRATCH = 1 << 21
"""Weights that are decoded at a time for the library's product: 8 MB of fp32."""

_DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODES = -1
_FORMAT = {"nvfp4": 0, "mxfp4": 1}
_ROTATE_ONLY = -1
# The mantissa bits of a group's amax above which the power of two goes up by one, for each E8M0 rule.
_RULE = {"even": 0x5FFFFF, "floor": 0x7FFFFF, "ceil": 0, "rceil": 0x400000}


def missing(device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
    """Reasons against this machine: not a CPU, or no compiler; the first call on a CPU builds the kernels."""
    if device.type != "cpu":
        return [f"needs a CPU, found {device.type}"]
    return cpu_build.reasons()


def refuses(problem: Problem) -> list[str]:
    """Nothing that `ops` lets through."""
    return []


def prepare(weight: FP4Tensor, mode: str) -> Tensor | None:
    """None: packed weights are what it runs on; bf16 values (N, K) for mode 'decoded'."""
    return weight.values(torch.bfloat16) if mode == "decoded" else None


def rotate(x: Tensor, blocks: Blocks, out_dtype: torch.dtype) -> Tensor:
    """x (M, K) @ V per block, summed in float64, rounded to fp32, then to out_dtype."""
    out = torch.empty(x.shape, dtype=out_dtype)
    if x.numel():
        _quantize(x, blocks, _ROTATE_ONLY, 0, None, False, x.new_empty(1, dtype=torch.float32), values=out)
    return out


def rotate_quantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, scale_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K) -> packed codes (M, K/2), scale bytes in the layout, tensor scale (1,) or (M,)."""
    if _reproduces_qutlass_mxfp4(quantizer):
        return any_torch.rotate_quantize(x, blocks, quantizer, scale_layout)
    codes, scale, tensor_scale = _codes(x, blocks, quantizer)
    return codes, get_layout(scale_layout).forward(scale) if scale_layout != "linear" else scale, tensor_scale


def rotate_quantize_dequantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x (M, K) -> e2m1 * block_scale (M, K) of out_dtype, exact, and the tensor scale (1,) or (M,)."""
    if _reproduces_qutlass_mxfp4(quantizer):
        return any_torch.rotate_quantize_dequantize(x, blocks, quantizer, out_dtype)
    out = torch.empty(x.shape, dtype=out_dtype)
    return out, _run_quantizer(x, blocks, quantizer, values=out)


def matmul(
    x: Tensor,
    x_block_scale: Tensor | None,
    x_tensor_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """(M, K) x (N, K)^T -> (M, N)."""
    if weight.block_scale is None:
        return any_torch.matmul(x, x_block_scale, x_tensor_scale, weight, bias, out_dtype)
    if _own_product(x.shape[0], x_block_scale is not None):
        return _few_rows(x, x_block_scale, x_tensor_scale, weight, bias, out_dtype)
    if x_block_scale is not None:
        x = _decoded(x, x_block_scale, weight.format, any_torch.product_dtype(x, weight))
    return _many_rows(x, x_tensor_scale, weight, bias, out_dtype)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    input_blocks: Blocks | None,
    output_blocks: Blocks | None,
    quantizer: Quantizer | None,
) -> Tensor:
    """A whole layer: x (M, K) -> (M, N) of x.dtype."""
    product_dtype = x.dtype if output_blocks is None else torch.float32
    operand, tensor_scale = x, None
    if quantizer is not None:
        own = weight.block_scale is not None and _own_product(x.shape[0], True)
        if own and not _reproduces_qutlass_mxfp4(quantizer):
            y = _few_rows_fused(x, weight, bias, input_blocks, quantizer, product_dtype)
            return y if output_blocks is None else rotate(y, output_blocks, x.dtype)
        # Quantized values are exact in every dtype, so they go straight into the one that the product wants.
        values_dtype = any_torch.product_dtype(x, weight)
        operand, tensor_scale = rotate_quantize_dequantize(x, input_blocks, quantizer, values_dtype)
    elif input_blocks is not None:
        operand = rotate(x, input_blocks, x.dtype)
    y = matmul(operand, None, tensor_scale, weight, bias, product_dtype)
    return y if output_blocks is None else rotate(y, output_blocks, x.dtype)


def _own_product(rows: int, quantized: bool) -> bool:
    """Integer products win at any number of rows, but against a CPU's own bf16 products; others win for few rows."""
    return rows <= FEW_ROWS or (quantized and not any_torch.cpu_has_bf16())


def _reproduces_qutlass_mxfp4(quantizer: Quantizer) -> bool:
    return quantizer.recipe == "qutlass" and not quantizer.format.has_tensor_scale


def _codes(x: Tensor, blocks: Blocks | None, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    codes = torch.empty(quantizer.format.codes_shape(m, k), dtype=torch.uint8)
    scale = torch.empty(quantizer.format.scale_shape(m, k), dtype=torch.uint8)
    return codes, scale, _run_quantizer(x, blocks, quantizer, codes=codes, scale=scale)


def _run_quantizer(
    x: Tensor,
    blocks: Blocks | None,
    quantizer: Quantizer,
    codes: Tensor | None = None,
    scale: Tensor | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """Fill the outputs that are given; returns the tensor scale."""
    scaled = quantizer.format.has_tensor_scale
    per_row = quantizer.recipe == "token" and scaled
    tensor_scale = torch.empty(x.shape[0] if per_row else 1, dtype=torch.float32)
    encode = quantizer.encode_scale if quantizer.recipe == "checkpoint" else None
    if encode is None or not scaled:
        encode = _ENCODE_QUTLASS
    format, rule = _FORMAT[quantizer.format.name], _RULE[quantizer.rule]
    _quantize(x, blocks, format, rule, encode, per_row, tensor_scale, codes, scale, values)
    return tensor_scale


_ENCODE_QUTLASS = torch.full((1,), 6.0, dtype=torch.float32, device="cpu")


def _quantize(
    x: Tensor,
    blocks: Blocks | None,
    format: int,
    rule: int,
    encode: Tensor | None,
    per_row: bool,
    tensor_scale: Tensor,
    codes: Tensor | None = None,
    scale: Tensor | None = None,
    values: Tensor | None = None,
) -> None:
    prepared = _NO_BLOCKS if blocks is None else _prepared(blocks)
    failed = cpu_build.library().qt_quantize(
        x.data_ptr(),
        _DTYPE[x.dtype],
        x.stride(0),
        x.shape[0],
        x.shape[1],
        _address(prepared.table),
        _address(prepared.signs),
        prepared.size,
        prepared.factor,
        format,
        rule,
        _address(encode),
        per_row,
        tensor_scale.data_ptr(),
        _address(codes),
        _address(scale),
        _address(values),
        0 if values is None else _DTYPE[values.dtype],
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("cpu_native: no memory for the rows of an activation")


def _few_rows_fused(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    blocks: Blocks | None,
    quantizer: Quantizer,
    out_dtype: torch.dtype,
) -> Tensor:
    """Rotate, quantize and multiply in one call; the bits are those of the two calls."""
    assert weight.block_scale is not None
    prepared = _NO_BLOCKS if blocks is None else _prepared(blocks)
    encode = quantizer.encode_scale if quantizer.recipe == "checkpoint" else None
    m, k = x.shape
    n = weight.data.shape[0]
    y = torch.empty(m, n, dtype=out_dtype)
    codes, block_scale = weight.data.contiguous(), weight.block_scale.contiguous()
    failed = cpu_build.library().qt_linear(
        x.data_ptr(),
        _DTYPE[x.dtype],
        x.stride(0),
        m,
        k,
        _address(prepared.table),
        _address(prepared.signs),
        prepared.size,
        prepared.factor,
        _FORMAT[quantizer.format.name],
        _RULE[quantizer.rule],
        (_ENCODE_QUTLASS if encode is None else encode).data_ptr(),
        quantizer.recipe == "token" and quantizer.format.has_tensor_scale,
        codes.data_ptr(),
        block_scale.data_ptr(),
        quantizer.format.group_size,
        n,
        weight.tensor_scale.data_ptr(),
        _ends(weight.output_sizes).data_ptr(),
        _address(bias),
        0 if bias is None else _DTYPE[bias.dtype],
        y.data_ptr(),
        _DTYPE[out_dtype],
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("cpu_native: no memory for the rows of an activation")
    return y


def _few_rows(
    x: Tensor,
    x_block_scale: Tensor | None,
    x_tensor_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    assert weight.block_scale is not None
    codes, block_scale = weight.data.contiguous(), weight.block_scale.contiguous()
    n, k = codes.shape[0], codes.shape[1] * 2
    y = torch.empty(x.shape[0], n, dtype=out_dtype)
    x = x if x.stride(1) == 1 and x_block_scale is None else x.contiguous()
    x_scales = None if x_block_scale is None else x_block_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    failed = cpu_build.library().qt_matmul(
        x.data_ptr(),
        _CODES if x_scales is not None else _DTYPE[x.dtype],
        x.stride(0),
        _address(x_scales),
        _address(x_tensor_scale),
        0 if x_tensor_scale is None or x_tensor_scale.numel() == 1 else 1,
        x.shape[0],
        codes.data_ptr(),
        block_scale.data_ptr(),
        weight.format.group_size,
        n,
        k,
        weight.tensor_scale.data_ptr(),
        _ends(weight.output_sizes).data_ptr(),
        _address(bias),
        0 if bias is None else _DTYPE[bias.dtype],
        y.data_ptr(),
        _DTYPE[out_dtype],
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("cpu_native: no memory for the rows of an activation")
    return y


def _many_rows(
    x: Tensor, x_tensor_scale: Tensor | None, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    assert weight.block_scale is not None
    dtype = any_torch.product_dtype(x, weight)
    x = x.to(dtype)
    n, k = weight.data.shape[0], weight.data.shape[1] * 2
    acc = torch.empty(x.shape[0], n, dtype=torch.float32)
    step = max(16, min(n, SCRATCH // k))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        values = _decoded(weight.data[rows], weight.block_scale[rows], weight.format, dtype)
        acc[:, rows] = x @ values.T
    return epilogue(acc, x_tensor_scale, weight, bias, out_dtype)


def _decoded(codes: Tensor, block_scale: Tensor, format: FP4Format, dtype: torch.dtype) -> Tensor:
    """Packed codes (N, K/2) and scale bytes -> e2m1 * block_scale, (N, K) of dtype."""
    codes, block_scale = codes.contiguous(), block_scale.contiguous()
    n, k = codes.shape[0], codes.shape[1] * 2
    out = torch.empty(n, k, dtype=dtype)
    cpu_build.library().qt_decode(
        codes.data_ptr(), block_scale.data_ptr(), format.group_size, n, k, out.data_ptr(), _DTYPE[dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class _Prepared:
    """A block matrix as the kernel reads it. Without signs, table is float64 (R, R rounded up to 8); with signs, the
    matrix is diag(signs) H diag(table) for Sylvester's H, and is multiplied in R log R steps."""

    table: Tensor | None
    signs: Tensor | None
    size: int
    factor: float


_NO_BLOCKS = _Prepared(None, None, 0, 1.0)


def _prepared(blocks: Blocks) -> _Prepared:
    """The kernel's form of a block, kept on the matrix it was made of, and made again when that is written to."""
    matrix = blocks.matrix
    key = (blocks.factor, blocks.transpose, 0 if matrix.is_inference() else matrix._version)
    kept = getattr(matrix, "_cpu_native", None)
    if kept is None or kept[0] != key:
        kept = (key, _prepare_blocks(blocks))
        matrix._cpu_native = kept  # type: ignore[attr-defined]
    result: _Prepared = kept[1]
    return result


def _prepare_blocks(blocks: Blocks) -> _Prepared:
    m = blocks.matrix.detach().float().double()
    m = (m.T if blocks.transpose else m).contiguous()
    size = m.shape[0]
    factor = float(torch.tensor(blocks.factor, dtype=torch.float32, device="cpu"))
    if size >= 16 and size & (size - 1) == 0 and bool((m.abs() == 1).all()):
        # A matrix of this form is known by its first row and column.
        columns, signs = m[0] * m[0, 0], m[:, 0]
        if torch.equal(signs.view(-1, 1) * _sylvester(size) * columns, m):
            return _Prepared((columns * factor).contiguous(), signs.float().contiguous(), size, factor)
    table = torch.zeros(size, -(-size // 8) * 8, dtype=torch.float64, device="cpu")
    table[:, :size] = m
    return _Prepared(table, None, size, factor)


def _sylvester(size: int) -> Tensor:
    entries = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while entries.shape[0] < size:
        entries = torch.cat((torch.cat((entries, entries), 1), torch.cat((entries, -entries), 1)))
    return entries


@lru_cache(maxsize=256)
def _ends(output_sizes: tuple[int, ...]) -> Tensor:
    """The first row behind each range."""
    return torch.tensor(output_sizes, dtype=torch.int64, device="cpu").cumsum(0)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
