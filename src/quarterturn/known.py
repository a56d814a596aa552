"""The arguments of the operator fp4_linear as a layer: checked, and on a CPU found again, since a compiled model calls
it with all of a layer's tensors every time, and to check and prepare those costs more than a small product.

A layer is known by the tensor object of its weight, as long as that lives, and holds while every other argument is what
it was: a tensor by address, shape, strides and dtype, since the kernels read the memory as it is at each call; the
matrices by what stands in them, since tables are made of that. So a write to any of them, seen or not, changes no
result that it should not, and none that it should is kept.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from . import checks
from .backends import Backend, Blocks, Layer, Quantizer, Weight
from .backends.cpu_layer import DTYPE
from .backends.kept import COMPARED, contents
from .formats import get_format
from .plan import LayerPlan


class _Layer(NamedTuple):
    weight: weakref.ref[Tensor]
    signature: tuple[Any, ...]
    matrices: list[bytes]
    plan: LayerPlan


MATRICES, BACKEND = (6, 9), 16
"""The places of input and output matrix, and of the backend's name, among the operator's arguments behind x."""
_KNOWN: dict[int, _Layer] = {}
"""By the id of the weight, which an entry does not outlive."""


def checked_layer(
    x: Tensor,
    weight: Tensor,
    block_scale: Tensor | None,
    tensor_scale: Tensor,
    output_sizes: list[int],
    bias: Tensor | None,
    format: str,
    input_matrix: Tensor | None,
    input_factor: float,
    input_transpose: bool,
    output_matrix: Tensor | None,
    output_factor: float,
    output_transpose: bool,
    quantize: bool,
    encode_scale: Tensor | None,
    recipe: str,
    rule: str,
    _: str,
    rows: list[int] | None = None,
    batch_invariant: bool = False,
) -> tuple[int, Layer]:
    """The number of outputs, and the layer that the arguments of fp4_linear are."""
    op, fmt, k = "fp4_linear", get_format(format), x.shape[-1] if x.dim() else 0
    checks.x(op, x, weight, block_scale, tensor_scale, bias, input_matrix, output_matrix, encode_scale)
    checks.blocks(op, k, input_matrix)
    checks.weight(op, k, weight, block_scale, tensor_scale, output_sizes, bias, fmt, rows)
    first, n = (0, weight.shape[0]) if rows is None else rows
    checks.blocks(op, n, output_matrix)
    if quantize:
        checks.quantizer(op, k, fmt, encode_scale, recipe, rule)
    part = None if rows is None else (first, n)
    return n, Layer(
        Weight(weight, block_scale, tensor_scale, tuple(output_sizes), fmt, part),
        bias if bias is None or part is None else bias[first : first + n],
        blocks(input_matrix, input_factor, input_transpose),
        blocks(output_matrix, output_factor, output_transpose),
        Quantizer(fmt, encode_scale, recipe, rule) if quantize else None,
        batch_invariant,
    )


def blocks(matrix: Tensor | None, factor: float, transpose: bool) -> Blocks | None:
    """A side of a layer."""
    return None if matrix is None else Blocks(matrix, factor, transpose)


def plan(x: Tensor, rest: tuple[Any, ...]) -> LayerPlan | None:
    """The plan of a layer that is known. rest: the operator's arguments behind x, which may be anything."""
    found = _KNOWN.get(id(rest[0])) if x.is_cpu else None
    if found is None or found.weight() is not rest[0] or found.signature != _signature(x, rest):
        return None
    return found.plan if found.matrices == _contents(rest) else None


def keep(x: Tensor, rest: tuple[Any, ...], backend: Backend, layer: Layer) -> None:
    """Know a layer from now on, whose arguments have been checked. Left out are backends that keep copies of weights
    (`renewal`), tensors that would be copied, and matrices of more than 64 KiB."""
    sign, sides = _signature(x, rest), [rest[at] for at in MATRICES if rest[at] is not None]
    copied = layer.bias is not None and layer.bias.dtype not in DTYPE
    if (
        sign is None
        or copied
        or hasattr(backend, "renewal")
        or layer.weight.rows is not None
        or any(m.nbytes > COMPARED for m in sides)
    ):
        return
    # An alias: the plan must not keep the tensor alive that it is known by.
    weight = replace(layer.weight, data=layer.weight.data.detach())
    plan, key = LayerPlan(backend, replace(layer, weight=weight), x.shape[-1], x.dtype), id(rest[0])

    def forget(reference: weakref.ref[Tensor]) -> None:
        known = _KNOWN.get(key)
        if known is not None and known.weight is reference:
            del _KNOWN[key]

    _KNOWN[key] = _Layer(weakref.ref(rest[0], forget), sign, _contents(rest), plan)


def _signature(x: Tensor, rest: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What has to be the same; None for tensors that are not on a CPU, or not in one piece."""
    if not x.is_cpu:
        return None
    found: list[Any] = [x.dtype]
    for argument in rest:
        if isinstance(argument, Tensor):
            if not argument.is_contiguous() or not argument.is_cpu:
                return None
            found.append((argument.data_ptr(), argument.shape, argument.dtype))
        else:
            found.append(tuple(argument) if isinstance(argument, list) else argument)
    return tuple(found)


def _contents(rest: tuple[Any, ...]) -> list[bytes]:
    return [contents(rest[at]) for at in MATRICES if rest[at] is not None]
