"""The argument checks of the operators: every wrong input gets a Refusal with the need and the find.

`op` is the operator's name in messages. All of them return nothing.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from . import e4m3_layout
from .errors import Refusal, refusal
from .formats import E8M0_RULES, RECIPES, FP4Format
from .tensor import FP4Tensor
from .weight_layout import PADDED_ROWS, stored_width

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise _kind(op, name, "a tensor", value)


def turn(
    op: str, x: object, matrix: object, factor: object, transpose: object, backend: object, needed: bool = False
) -> None:
    """The kinds of the arguments that an op takes without looking: what PyTorch's dispatcher checks by the schema."""
    if (
        isinstance(x, Tensor)
        and (isinstance(matrix, Tensor) or (matrix is None and not needed))
        and isinstance(factor, (float, int))
        and isinstance(transpose, bool)
        and isinstance(backend, str)
    ):
        return
    tensor(op, "x", x)
    if matrix is not None or needed:
        tensor(op, "matrix", matrix)
    for name, value, kind in (("factor", factor, float), ("transpose", transpose, bool), ("backend", backend, str)):
        if not isinstance(value, Real if kind is float else kind):
            raise _kind(op, name, _KINDS[kind], value)


def product(op: str, x: object, x_scale: object, weight: object, block_scale: object, bias: object, b: object) -> None:
    """The kinds of the arguments of a product, likewise."""
    tensor(op, "x", x)
    if not isinstance(weight, FP4Tensor):
        raise _kind(op, "weight", "an FP4Tensor", weight)
    for name, value in (("x_tensor_scale", x_scale), ("x_block_scale", block_scale), ("bias", bias)):
        if value is not None:
            tensor(op, name, value)
    if not isinstance(b, str):
        raise _kind(op, "backend", _KINDS[str], b)


_KINDS = {float: "a number", bool: "True or False", str: "a name"}


def _kind(op: str, name: str, needed: str, value: object) -> Refusal:
    found = "None" if value is None else f"{value!r}, a {type(value).__name__}" if isinstance(value, str) else ""
    return refusal(
        op,
        f"{name} is no such thing.",
        needs=[(f"{name}: {needed}", found or f"a {type(value).__name__}")],
        do=f"pass {needed}",
    )


def x(op: str, x: Tensor, *others: Tensor | None) -> None:
    if x.dtype not in FLOATS:
        raise refusal(
            op, "x has a dtype that is not run.", needs=[("bfloat16, float16 or float32", str(x.dtype))], do="convert x"
        )
    rest(op, x, *others)


def rest(op: str, x: Tensor, *others: Tensor | None) -> None:
    if x.dim() == 0:
        raise refusal(op, "x is a scalar.", needs=[("x (..., K)", "0 dimensions")], do="pass at least a vector")
    tensors = (x, *(t for t in others if t is not None))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise refusal(
            op,
            "gradients were asked for, and this is for inference only.",
            needs=[("no input that requires grad", "one that does")],
            do="call it under torch.no_grad() or torch.inference_mode()",
        )
    elsewhere = [t for t in tensors if t.device != x.device]
    if elsewhere:
        raise refusal(
            op,
            "the inputs lie on different devices.",
            needs=[(f"all on {x.device}, as x", str(elsewhere[0].device))],
            do="move them to one device",
        )


def blocks(op: str, k: int, matrix: Tensor | None) -> None:
    if matrix is None:
        return
    if (
        matrix.dim() != 2
        or matrix.shape[0] != matrix.shape[1]
        or matrix.shape[0] == 0
        or not matrix.dtype.is_floating_point
    ):
        raise refusal(
            op,
            "the matrix is not square.",
            needs=[("a floating-point (R, R)", f"{matrix.dtype} {tuple(matrix.shape)}")],
            do="pass one block; it is used for all",
        )
    if k % matrix.shape[0]:
        raise refusal(
            op,
            "the blocks do not divide the last dimension.",
            needs=[(f"K a multiple of R = {matrix.shape[0]}", f"K = {k}")],
            do="take a transform size that divides K",
        )


def quantizer(op: str, k: int, fmt: FP4Format, encode_scale: Tensor | None, recipe: str, rule: str) -> None:
    if k % fmt.group_size or k == 0:
        raise refusal(
            op,
            "K is not whole groups.",
            needs=[(f"K a multiple of {fmt.group_size} ({fmt.name})", f"K = {k}")],
            do="pad the layer to whole groups",
        )
    for word, value, known in (("recipe", recipe, RECIPES), ("E8M0 rule", rule, E8M0_RULES)):
        if value not in known:
            raise refusal(
                op,
                f"there is no such {word}.",
                needs=[(f"one of {', '.join(known)}", repr(value))],
                do="name one of them",
            )
    if not fmt.has_tensor_scale or recipe != "checkpoint":
        return
    if encode_scale is None:
        raise refusal(
            op,
            "the recipe 'checkpoint' needs a scale.",
            needs=[("encode_scale", "none")],
            do="pass the file's input scale, or take recipe='token'",
        )
    if encode_scale.dtype != torch.float32 or encode_scale.numel() != 1:
        found = f"{encode_scale.dtype}, {encode_scale.numel()} elements"
        raise refusal(
            op,
            "encode_scale does not fit.",
            needs=[("float32, one element", found)],
            do="pass the one number that the file stores",
        )


def weight(
    op: str,
    k: int,
    weight: Tensor,
    block_scale: Tensor | None,
    tensor_scale: Tensor,
    sizes: list[int],
    bias: Tensor | None,
    fmt: FP4Format,
    rows: list[int] | None = None,
) -> None:
    packed = block_scale is not None
    if weight.dim() != 2:
        raise refusal(
            op,
            "the weight does not fit.",
            needs=[("two dimensions", str(tuple(weight.shape)))],
            do="check the layer's sizes",
        )
    n, held = weight.shape[0], weight.shape[1] * (2 if packed else 1)
    needs = []
    if weight.dtype == torch.int32:  # fragments, see weight_layout.py
        width = stored_width(n, k, fmt)
        if packed or held != width:
            needs.append((f"fragments ({n}, {width}) without block_scale", f"({n}, {held}) in {weight.dtype}"))
    elif weight.dtype == e4m3_layout.DTYPE:
        width = e4m3_layout.stored_width(n, k)
        if packed or held != width:
            needs.append((f"E4M3 rows ({n}, {width}) without block_scale", f"({n}, {held}) in {weight.dtype}"))
    elif held != k or (weight.dtype == torch.uint8) != packed:
        needs.append((f"a weight (N, {k}), as x is (..., {k})", f"({n}, {held}) in {weight.dtype}"))
    if block_scale is not None and tuple(block_scale.shape) != fmt.scale_shape(n, k):
        needs.append((f"block_scale {fmt.scale_shape(n, k)}", str(tuple(block_scale.shape))))
    if tensor_scale.numel() != len(sizes) or sum(sizes) != n:
        found = f"{tensor_scale.numel()} scales for ranges {list(sizes)}"
        needs.append((f"one tensor scale per output range, ranges that sum to {n}", found))
    if tensor_scale.dtype != torch.float32:
        needs.append(("tensor_scale float32", str(tensor_scale.dtype)))
    if bias is not None and tuple(bias.shape) != (n,):
        needs.append((f"bias ({n},)", str(tuple(bias.shape))))
    if rows is not None:
        needs += _rows(rows, n, weight.dtype)
    if needs:
        raise refusal(op, "the weight does not fit.", needs=needs, do="check the layer's sizes")


def _rows(rows: list[int], n: int, dtype: torch.dtype) -> list[tuple[str, str]]:
    """What is wrong with rows (first, count) of a weight."""
    fit = len(rows) == 2 and rows[0] % PADDED_ROWS == 0 and rows[1] > 0 and 0 <= rows[0] <= n - rows[1]
    if fit and dtype == torch.int32:
        return []
    return [(f"rows (first, count) of {n}, the first a multiple of {PADDED_ROWS}, of fragments", f"{rows} of {dtype}")]


def out_dtype(op: str, out_dtype: torch.dtype, fmt: FP4Format | None = None) -> None:
    if out_dtype not in FLOATS:
        raise refusal(
            op,
            "out_dtype is not run.",
            needs=[("bfloat16, float16 or float32", str(out_dtype))],
            do="choose one of them",
        )
    if fmt is not None and fmt.has_e8m0_scale and out_dtype == torch.float16:
        raise refusal(
            op,
            "MXFP4 values can overflow float16.",
            needs=[("bfloat16 or float32", "float16")],
            do="pass out_dtype=torch.float32",
        )


def scale_bytes(op: str, scales: Tensor) -> None:
    if scales.element_size() != 1:
        raise refusal(
            op,
            "these are not block scales.",
            needs=[("one byte each", str(scales.dtype))],
            do="pass what swizzle_scales gave",
        )


def block_scales(op: str, scales: Tensor) -> None:
    if scales.dim() != 2 or scales.element_size() != 1:
        raise refusal(
            op,
            "these are not block scales.",
            needs=[("(rows, cols) of one byte each", f"{scales.dtype} {tuple(scales.shape)}")],
            do="merge the leading dimensions",
        )


def packed_x(op: str, x: Tensor, block_scale: Tensor | None, tensor_scale: Tensor | None, fmt: FP4Format) -> None:
    expected = (*x.shape[:-1], x.shape[-1] * 2 // fmt.group_size)
    if block_scale is None or tensor_scale is None or tuple(block_scale.shape) != expected:
        found = "none" if block_scale is None else str(tuple(block_scale.shape))
        raise refusal(
            op,
            "packed x needs its scales.",
            needs=[(f"x_block_scale {expected} and x_tensor_scale", found)],
            do="pass what rotate_quantize returned, in the linear layout",
        )


def x_tensor_scale(op: str, scale: Tensor | None, rows: int) -> None:
    if scale is not None and (scale.numel() not in (1, rows) or scale.dtype != torch.float32):
        raise refusal(
            op,
            "x_tensor_scale does not fit.",
            needs=[(f"float32, one element or {rows}", f"{scale.dtype}, {scale.numel()} elements")],
            do="pass one per tensor or one per row",
        )


def encode_scale(value: float) -> None:
    """An encode scale given as a number; a tensor's value is not looked at, since that would wait for the device."""
    if not isinstance(value, Real):
        raise _kind("encode_scale", "encode_scale", "a number or a tensor", value)
    if not (math.isfinite(value) and value > 0):
        raise refusal(
            "encode_scale",
            "this is no scale.",
            needs=[("a finite positive number", str(value))],
            do="pass what the file stores: 448 * 6 / amax",
        )
