"""What FP4Linear decides once: the plan it runs its inputs by, and the stamp that tells when to decide again.

A call by a plan skips the dispatcher and the checks of weights, which cost more than a small product on a CPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import checks
from .backends import Backend, Layer, compose
from .errors import refusal


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """A backend and, for inputs (..., in_features) of `dtype`, all that it needs beside them."""

    backend: Backend
    layer: Layer
    in_features: int
    dtype: torch.dtype


def seen_by_torch(x: Tensor) -> bool:
    """Whether anything looks on that must see an operator: tracing, fake tensors, modes, autocast, functorch."""
    return (
        type(x) is not Tensor
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled(x.device.type)
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def rows_of(x: Tensor, plan: LayerPlan) -> Tensor:
    """x (..., K) as (M, K) with the last dimension contiguous. Raises what fp4_linear would for an x that does not fit."""
    weight, k = plan.layer.weight.data, plan.in_features
    if x.dtype not in checks.FLOATS or x.requires_grad or x.dim() == 0 or x.device != weight.device:
        checks.x("fp4_linear", x, weight)
    if x.shape[-1] != k:
        raise refusal(
            "fp4_linear",
            "x does not fit the weight.",
            needs=[(f"x (..., {k})", str(tuple(x.shape)))],
            do="check the layer's sizes",
        )
    if x.is_contiguous() and x.numel():
        return x.view(-1, k)
    return compose.rows(x)


def shaped(y: Tensor, x: Tensor) -> Tensor:
    """The result (M, N) in the shape of x (..., K)."""
    return y.view(*x.shape[:-1], y.shape[1])


class Stamp:
    """What a layer's derived buffers were made from: tensors, their places and versions, and choices that can change."""

    __slots__ = ("_choices", "_numbers", "_places", "_tensors", "_versions", "dtype")

    BUFFERS = ("codes", "block_scale", "encode_scale", "input_encode_scale", "input_matrix")

    def __init__(self, layer: nn.Module, choices: tuple[Any, ...], dtype: torch.dtype) -> None:
        tensors = [layer._buffers[name] for name in self.BUFFERS] + [layer._parameters["bias"]]
        there = [t for t in tensors if t is not None]
        self.dtype, self._choices, self._tensors = dtype, choices, tensors
        # `.data =` moves a tensor's memory. A write in place raises its version; those made in inference mode keep none.
        self._places = [(t, t.data_ptr()) for t in there]
        self._versions = [(t, t._version) for t in there if not t.is_inference()]
        # Whatever wrote to them: scales on a CPU, where a look is cheap, are looked at.
        self._numbers = [(seen, seen.raw) for t in tensors[2:4] if (seen := _memory(t)) is not None]

    def holds(self, layer: nn.Module, choices: tuple[Any, ...], dtype: torch.dtype) -> bool:
        """Whether nothing of it has changed."""
        if dtype is not self.dtype or choices != self._choices:
            return False
        buffers = layer._buffers
        codes, block_scale, encode, input_encode, matrix, bias = self._tensors
        if (
            buffers["codes"] is not codes
            or buffers["block_scale"] is not block_scale
            or buffers["encode_scale"] is not encode
            or buffers["input_encode_scale"] is not input_encode
            or buffers["input_matrix"] is not matrix
            or layer._parameters["bias"] is not bias
        ):
            return False
        for tensor, place in self._places:
            if tensor.data_ptr() != place:
                return False
        for tensor, version in self._versions:
            if tensor._version != version:
                return False
        return all([memory.raw == before for memory, before in self._numbers])


def _memory(t: Tensor | None) -> Any:
    """A tensor's bytes as they are in memory, where it lies in a CPU's; its place must have been checked before a look."""
    if t is None or t.device.type != "cpu" or not t.is_contiguous():
        return None
    return (ctypes.c_char * (t.numel() * t.element_size())).from_address(t.data_ptr())
