"""C kernels on a CPU, compiled once by the system's compiler.

| needs     | a CPU, and gcc or clang for the first use |
| provides  | every op, format, dtype and size; a layer's steps fused, weights packed at 4.5 bits or decoded to bf16 |
| does not  | QuTLASS's MXFP4 recipe (any_torch computes that one, with the same bits) |
| run on    | x86-64 with AVX2; x86-64 with AVX-512 and AMX |

Three products take packed weights. The kernels' own is of integers for packed activations, exact in every group, times
the scales in fp32, and of fp32 for unquantized ones (W4A16). On a CPU with AMX layers go through its bf16 tiles
instead, fp32 sums with the weights decoded on the way: W4A16 of bf16 inputs always, W4A4 of bf16 inputs or in NVFP4
from two rows on. What does not goes through the library's product from 65 rows on, where it is unquantized or the CPU
has bf16 instructions; slices of the weights are decoded for it. `ops.fp4_matmul` of packed x takes integers up to 64
rows there too. In the first two products a row's bits depend on neither the rows beside it nor the threads; but they
differ from one product to another, so that on a CPU with AMX a W4A4 row alone can have other bits than beside a second
one. Layers with `batch_invariant` take the kernels' own product for every row. Quantization depends on no other row in
any case.
z is summed in float64 in a fixed order; but any_torch turns by wide matrices that are products of smaller ones, which
for these kernels would be dense: see factors.py.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..formats import FP4Format
from ..kernels import cpu_build
from ..layouts import get_layout
from ..tensor import FP4Tensor
from . import any_torch, compose
from .cpu_layer import DTYPE, Native, native, turned_apart
from .protocol import Blocks, Layer, Operand, Problem, Quantizer, Together, Weight

NAME = "cpu_native"
FEW_ROWS = 64
"""Up to here the integer product is used, but where there are tiles; above, products in bf16 can be faster."""
TILES_FROM = 2
"""Rows of quantized x from which tiles are faster than integer products; of unquantized x one is enough."""
SCRATCH = 1 << 21
"""Weights that are decoded at a time for the library's product: 8 MB of fp32."""
TILES, CODES = "tiles", "codes"
"""Forms of an operand: bf16 tiles for AMX, see cpu_amx.c; packed codes with scale bytes."""

_CODES = -1


def missing(device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
    """Reasons against this machine: not a CPU, or no compiler; the first call on a CPU builds the kernels."""
    if device.type != "cpu":
        return [f"needs a CPU, found {device.type}"]
    return cpu_build.reasons()


def refuses(problem: Problem) -> list[str]:
    """Nothing that `ops` lets through."""
    return []


def varies(problem: Problem) -> list[str]:
    """Reasons why a row's bits may depend on the other rows: only what plain torch computes of a layer."""
    if problem.recipe == "qutlass" and not problem.format.has_tensor_scale and problem.activations == "fp4":
        return ["quantizes QuTLASS's MXFP4 by plain torch, where batch_invariant needs one order of sums"]
    return []


def prepare(weight: FP4Tensor, mode: str) -> Tensor | None:
    """None: packed weights are what it runs on; bf16 values (N, K) for mode 'decoded'."""
    return weight.values(torch.bfloat16) if mode == "decoded" else None


def rotate(x: Tensor, blocks: Blocks, out_dtype: torch.dtype) -> Tensor:
    """x (M, K) @ V per block, summed in float64, rounded to fp32, then to out_dtype."""
    if turned_apart(blocks):
        return any_torch.rotate(x, blocks, out_dtype)
    out = torch.empty(x.shape, dtype=out_dtype, device="cpu")
    if x.numel():
        _quantize(x, Native(x.shape[1]).rotating(blocks), values=out)
    return out


def rotate_quantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, scale_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K) -> packed codes (M, K/2), scale bytes in the layout, tensor scale (1,) or (M,)."""
    if quantizer.is_qutlass_mxfp4:
        return any_torch.rotate_quantize(x, blocks, quantizer, scale_layout)
    x, blocks = _for_kernels(x, blocks, torch.float32)
    codes, scale, tensor_scale = _codes(x, _input_side(x, blocks, quantizer), quantizer.format)
    return codes, get_layout(scale_layout).forward(scale) if scale_layout != "linear" else scale, tensor_scale


def rotate_quantize_dequantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x (M, K) -> e2m1 * block_scale (M, K) of out_dtype, exact, and the tensor scale (1,) or (M,)."""
    if quantizer.is_qutlass_mxfp4:
        return any_torch.rotate_quantize_dequantize(x, blocks, quantizer, out_dtype)
    x, blocks = _for_kernels(x, blocks, torch.float32)
    out = torch.empty(x.shape, dtype=out_dtype, device="cpu")
    return out, _quantize(x, _input_side(x, blocks, quantizer), values=out)


def matmul(
    x: Tensor,
    x_block_scale: Tensor | None,
    x_tensor_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """(M, K) x (N, K)^T -> (M, N)."""
    m, quantized = x.shape[0], x_block_scale is not None
    if weight.block_scale is None and not (x.dtype == torch.bfloat16 and _has_tiles()):
        return any_torch.matmul(x, x_block_scale, x_tensor_scale, weight, bias, out_dtype)
    layer = Native(weight.data.shape[1] * (1 if weight.block_scale is None else 2)).multiplying(weight, bias)
    if _own_product(m, weight, quantized) and not _in_tiles(m, weight, x.dtype, None):
        return _few_rows(x, x_block_scale, x_tensor_scale, layer, out_dtype)
    if x_block_scale is not None:
        exact = weight.format.has_tensor_scale and _has_tiles()
        x = _decoded(x, x_block_scale, weight.format, torch.bfloat16 if exact else torch.float32)
    if _in_tiles(m, weight, x.dtype, None):
        return _tile_product(_tiles(x, Native(x.shape[1]))[0], x_tensor_scale, m, layer, out_dtype)
    return _many_rows(x, x_tensor_scale, weight, bias, out_dtype)


def operand(x: Tensor, layer: Layer) -> Operand:
    """x (M, K), rotated and quantized, in the form that its product takes."""
    weight, quantizer, blocks = layer.weight, layer.quantizer, layer.input_blocks
    (m, k), dtype = x.shape, x.dtype
    # Quantized values are exact in every dtype, so they go straight into the one that the product wants.
    values_dtype = any_torch.product_dtype(x, weight)
    if quantizer is not None and quantizer.is_qutlass_mxfp4:
        values, tensor_scale = any_torch.rotate_quantize_dequantize(x, blocks, quantizer, values_dtype)
        return Operand(values, None, tensor_scale, m, dtype)
    _check_invariant(layer)
    x, blocks = _for_kernels(x, blocks, dtype if quantizer is None else torch.float32)
    if not layer.batch_invariant and _in_tiles(m, weight, dtype, quantizer):
        tiles, scale_of_tensor = _tiles(x, native(layer, k))
        return Operand(tiles, None, None if quantizer is None else scale_of_tensor, m, dtype, TILES)
    if quantizer is not None and (layer.batch_invariant or _own_product(m, weight, True)):
        codes, scale, tensor_scale = _codes(x, native(layer, k), quantizer.format)
        return Operand(codes, scale, tensor_scale, m, dtype, CODES)
    if quantizer is not None:
        values = torch.empty(m, k, dtype=values_dtype, device="cpu")
        return Operand(values, None, _quantize(x, native(layer, k), values=values), m, dtype)
    return Operand(x if blocks is None else rotate(x, blocks, dtype), None, None, m, dtype)


def product(operand: Operand, layer: Layer) -> Tensor:
    """The operand times the weight, the output turned: (M, N) of the operand's dtype."""
    # The output transform takes the product in fp32, so that the result is rounded once.
    dtype = operand.dtype if layer.output_blocks is None else torch.float32
    x, x_scale, x_ts, weight = operand.data, operand.block_scale, operand.tensor_scale, layer.weight
    k = weight.data.shape[1] * (1 if weight.block_scale is None else 2)
    if operand.form == TILES:
        y = _tile_product(x, x_ts, operand.rows, native(layer, k), dtype)
    elif layer.batch_invariant or _own_product(operand.rows, weight, operand.form == CODES):
        y = _few_rows(x, x_scale, x_ts, native(layer, k), dtype)
    else:
        y = matmul(x, x_scale, x_ts, weight, layer.bias, dtype)
    return y if layer.output_blocks is None else rotate(y, layer.output_blocks, operand.dtype)


def together(layers: Sequence[Layer]) -> Together | None:
    """Layers that take the same operand of a few rows, in one call of the kernels."""
    first = layers[0]
    turned, quantizer = first.output_blocks is not None, first.quantizer
    if (
        first.weight.block_scale is None
        or (quantizer is not None and quantizer.is_qutlass_mxfp4)
        or any((layer.output_blocks is not None) != turned for layer in layers)
    ):
        return None
    for layer in layers:
        _check_invariant(layer)
    k = first.weight.data.shape[1] * 2
    natives = [native(layer, k) for layer in layers]
    count, sizes = len(layers), [one.n for one in natives]
    apart = first.input_blocks if turned_apart(first.input_blocks) else None
    addresses: type[ctypes.Array[ctypes.c_void_p]] = ctypes.c_void_p * count
    structs, qt_linear = addresses(*(one.address for one in natives)), cpu_build.library().qt_linear

    def run(x: Tensor) -> list[Tensor] | None:
        *outer, _ = x.shape
        m, dtype = math.prod(outer), x.dtype
        if m > FEW_ROWS:
            return None
        tiled = not first.batch_invariant and _in_tiles(m, first.weight, dtype, quantizer)
        if apart is not None:
            x = any_torch.rotate(x.view(m, k), apart, dtype if quantizer is None else torch.float32)
        out_dtype = torch.float32 if turned else dtype
        ys = [torch.empty(*outer, n, dtype=out_dtype, device="cpu") for n in sizes]
        outputs = addresses(*[y.data_ptr() for y in ys])
        failed = qt_linear(
            structs, count, x.data_ptr(), DTYPE[x.dtype], k, m, outputs, DTYPE[out_dtype], tiled,
            torch.get_num_threads(),
        )  # fmt: skip
        _check(failed)
        return [_turned(y, layer, dtype) for y, layer in zip(ys, layers, strict=True)] if turned else ys

    # The structs live as long as the function does.
    run.natives = natives  # type: ignore[attr-defined]
    return run


def _turned(y: Tensor, layer: Layer, dtype: torch.dtype) -> Tensor:
    assert layer.output_blocks is not None
    return rotate(y.view(-1, y.shape[-1]), layer.output_blocks, dtype).view(y.shape)


def _check_invariant(layer: Layer) -> None:
    """Raises BackendRefusal for a batch-invariant layer of which a library multiplies something."""
    if not layer.batch_invariant:
        return
    if layer.weight.block_scale is None:
        raise compose.would_vary("packed weights", f"values in {layer.weight.data.dtype}", layer.name)
    for blocks in (layer.input_blocks, layer.output_blocks):
        if turned_apart(blocks):
            found = "a wide one that is a product of smaller ones, by which plain torch turns"
            raise compose.would_vary("transforms that the kernels turn by", found, layer.name)


def _own_product(rows: int, weight: Weight, quantized: bool) -> bool:
    """Integer products win at any number of rows, but against a CPU's own bf16 products; others win for few rows."""
    return weight.block_scale is not None and (rows <= FEW_ROWS or (quantized and not any_torch.cpu_has_bf16()))


def _in_tiles(rows: int, weight: Weight, dtype: torch.dtype, quantizer: Quantizer | None) -> bool:
    """Whether the product of x runs on tiles: not where bf16 does not hold what is multiplied. It holds every value of
    NVFP4, and of MXFP4 all but those below 2^-126, which tiles take for zero. Inputs of bf16 are multiplied in no other
    way there, those of more bits are."""
    exact = dtype == torch.bfloat16 or (quantizer is not None and quantizer.format.has_tensor_scale)
    least = 1 if quantizer is None else TILES_FROM
    return exact and (rows >= least or weight.block_scale is None) and _has_tiles()


def _has_tiles() -> bool:
    return any_torch.cpu_has_bf16() and _tiles_allowed(cpu_build.library())


@lru_cache(maxsize=1)
def _tiles_allowed(kernels: ctypes.CDLL) -> bool:
    """Whether these kernels were compiled for tiles, and the system grants them."""
    return bool(kernels.qt_amx_ready())


def _for_kernels(x: Tensor, blocks: Blocks | None, dtype: torch.dtype) -> tuple[Tensor, Blocks | None]:
    """Turned already, in dtype, where that is done apart from the kernels."""
    if blocks is None or not turned_apart(blocks):
        return x, blocks
    return any_torch.rotate(x, blocks, dtype), None


def _input_side(x: Tensor, blocks: Blocks | None, quantizer: Quantizer) -> Native:
    return Native(x.shape[1]).rotating(blocks).quantizing(quantizer)


def _codes(x: Tensor, layer: Native, format: FP4Format) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty(format.codes_shape(*x.shape), dtype=torch.uint8, device="cpu")
    scale = torch.empty(format.scale_shape(*x.shape), dtype=torch.uint8, device="cpu")
    return codes, scale, _quantize(x, layer, codes=codes, scale=scale)


def _tiles(x: Tensor, layer: Native) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    tiles = torch.empty(-(-m // 16), -(-k // 32), 16, 32, dtype=torch.bfloat16, device="cpu")
    return tiles, _quantize(x, layer, values=tiles, tiled=True)


def _quantize(
    x: Tensor,
    layer: Native,
    codes: Tensor | None = None,
    scale: Tensor | None = None,
    values: Tensor | None = None,
    tiled: bool = False,
) -> Tensor:
    """Fill the outputs that are given; returns the tensor scale."""
    m = x.shape[0]
    tensor_scale = torch.empty(m if layer.per_row else 1, dtype=torch.float32, device="cpu")
    failed = cpu_build.library().qt_quantize(
        layer.address, x.data_ptr(), DTYPE[x.dtype], x.stride(0), m, tensor_scale.data_ptr(), _address(codes),
        _address(scale), _address(values), 0 if values is None else DTYPE[values.dtype], tiled, torch.get_num_threads(),
    )  # fmt: skip
    _check(failed)
    return tensor_scale


def _few_rows(
    x: Tensor, x_block_scale: Tensor | None, x_tensor_scale: Tensor | None, layer: Native, out_dtype: torch.dtype
) -> Tensor:
    """x values with their last dimension contiguous, or contiguous codes and scale bytes."""
    m = x.shape[0]
    y = torch.empty(m, layer.n, dtype=out_dtype, device="cpu")
    x = x if x.stride(1) == 1 and x_block_scale is None else x.contiguous()
    x_block_scale = None if x_block_scale is None else x_block_scale.contiguous()
    failed = cpu_build.library().qt_matmul(
        layer.address, x.data_ptr(), DTYPE[x.dtype] if x_block_scale is None else _CODES, x.stride(0),
        _address(x_block_scale), _address(x_tensor_scale), _step(x_tensor_scale), m, y.data_ptr(), DTYPE[out_dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    _check(failed)
    return y


def _tile_product(tiles: Tensor, x_tensor_scale: Tensor | None, m: int, layer: Native, dtype: torch.dtype) -> Tensor:
    y = torch.empty(m, layer.n, dtype=dtype, device="cpu")
    failed = cpu_build.library().qt_amx_matmul(
        layer.address, tiles.data_ptr(), _address(x_tensor_scale), _step(x_tensor_scale), m, y.data_ptr(), DTYPE[dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    _check(failed)
    return y


def _many_rows(
    x: Tensor, x_tensor_scale: Tensor | None, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The library's product, with slices of the weights decoded for it."""
    assert weight.block_scale is not None
    dtype = any_torch.product_dtype(x, weight)
    x = any_torch.dense(x.to(dtype))
    n, k = weight.data.shape[0], weight.data.shape[1] * 2
    acc = torch.empty(x.shape[0], n, dtype=torch.float32, device="cpu")
    step = max(16, min(n, SCRATCH // k))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        values = _decoded(weight.data[rows], weight.block_scale[rows], weight.format, dtype)
        acc[:, rows] = x @ values.T
    return compose.epilogue(acc, x_tensor_scale, weight, bias, out_dtype)


def _decoded(codes: Tensor, block_scale: Tensor, format: FP4Format, dtype: torch.dtype) -> Tensor:
    """Packed codes (N, K/2) and scale bytes -> e2m1 * block_scale, (N, K) of dtype."""
    codes, block_scale = codes.contiguous(), block_scale.contiguous()
    n, k = codes.shape[0], codes.shape[1] * 2
    out = torch.empty(n, k, dtype=dtype, device="cpu")
    cpu_build.library().qt_decode(
        codes.data_ptr(), block_scale.data_ptr(), format.group_size, n, k, out.data_ptr(), DTYPE[dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("cpu_native: no memory for the rows of an activation")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _step(tensor_scale: Tensor | None) -> int:
    """From the tensor scale of one row to the next: none where all rows have one."""
    return 0 if tensor_scale is None or tensor_scale.numel() == 1 else 1
