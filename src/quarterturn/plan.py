"""What FP4Linear decides once: who runs it, the plan it runs its inputs by, and the stamp that tells when to decide
again. The three are one value (Decided), so that no thread sees some of them new and some old.

A call by a plan skips the dispatcher and the checks of weights, which cost more than a small product on a CPU.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import checks
from .backends import Backend, Layer, Operand, Selection, compose
from .backends.kept import wait_for_writes
from .errors import refusal


class LayerPlan:
    """A backend and, for inputs (..., in_features) of `dtype`, all that it needs beside them."""

    __slots__ = ("_device", "_floats", "_together", "backend", "dtype", "in_features", "layer")

    def __init__(self, backend: Backend, layer: Layer, in_features: int, dtype: torch.dtype) -> None:
        self.backend, self.layer, self.in_features, self.dtype = backend, layer, in_features, dtype
        self._device = layer.weight.data.device
        sides = [blocks.matrix for blocks in (layer.input_blocks, layer.output_blocks) if blocks is not None]
        scale = None if layer.quantizer is None else layer.quantizer.encode_scale
        given = (layer.weight.data, layer.weight.tensor_scale, layer.bias, scale, *sides)
        self._floats = [t for t in given if t is not None and t.is_floating_point()]
        self._together = compose.together(backend, (layer,))

    def check(self, x: Tensor) -> None:
        """Raises what fp4_linear would for an x that does not fit."""
        # Gradients can be asked of a bias at any time.
        asking = [t for t in self._floats if t.requires_grad] if torch.is_grad_enabled() else ()
        if x.dtype not in checks.FLOATS or x.requires_grad or x.dim() == 0 or x.device != self._device or asking:
            checks.x("fp4_linear", x, self.layer.weight.data, *asking)
        if x.shape[-1] != self.in_features:
            raise refusal(
                "fp4_linear",
                "x does not fit the weight.",
                needs=[(f"x (..., {self.in_features})", str(tuple(x.shape)))],
                do="check the layer's sizes",
            )

    def run(self, x: Tensor) -> Tensor:
        """The layer of an x that has been checked."""
        if self._together is not None and x.is_contiguous():
            whole = self._together(x)
            if whole is not None:
                return whole[0]
        return self.product(self.operand(x), x)

    def operand(self, x: Tensor) -> Operand:
        """x, rotated and quantized."""
        return compose.operand(self.backend, compose.rows(x), self.layer)

    def product(self, operand: Operand, x: Tensor) -> Tensor:
        """The result, in the shape of the x that the operand was made of."""
        y = compose.product(self.backend, operand, self.layer)
        return y.view(*x.shape[:-1], y.shape[1])


class Stamp:
    """What a layer's derived buffers were made from: tensors, their places and versions, and choices."""

    __slots__ = (
        "_choices", "_memories", "_numbers", "_place_of", "_places", "_tensors", "_versioned", "_versions",
    )  # fmt: skip

    BUFFERS = ("codes", "block_scale", "encode_scale", "input_encode_scale", "input_matrix")

    def __init__(
        self, layer: nn.Module, choices: tuple[Any, ...], stored: tuple[Tensor | None, Tensor | None] | None = None
    ) -> None:
        """stored: the codes and block scales that the layer is about to hold, where they are others than now."""
        tensors = [layer._buffers[name] for name in self.BUFFERS] + [layer._parameters["bias"]]
        if stored is not None:
            tensors[:2] = stored
        there = [t for t in tensors if t is not None]
        self._choices, self._tensors = choices, tensors
        # `.data =` moves a tensor's memory. A write raises its version; tensors made in inference mode keep none.
        self._place_of = [t.data_ptr for t in there]
        self._places = [place() for place in self._place_of]
        self._versioned = [t for t in there if not t.is_inference()]
        self._versions = [t._version for t in self._versioned]
        # Whatever wrote to them: scales on a CPU, where a look is cheap, are looked at.
        self._memories = [memory for t in tensors[2:4] if (memory := _memory(t)) is not None]
        self._numbers = [memory.raw for memory in self._memories]

    def holds(self, layer: nn.Module, choices: tuple[Any, ...]) -> bool:
        """Whether nothing of it has changed."""
        if choices != self._choices:
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
        return (
            [place() for place in self._place_of] == self._places
            and [t._version for t in self._versioned] == self._versions
            and [memory.raw for memory in self._memories] == self._numbers
        )


class Decided(NamedTuple):
    """How a layer runs inputs of a dtype. No stamp and no plan where its tensors are no plain ones (fake tensors): it
    is then decided anew for every call."""

    selection: Selection
    dtype: torch.dtype
    stamp: Stamp | None
    plan: LayerPlan | None

    def holds(self, layer: nn.Module, choices: tuple[Any, ...]) -> bool:
        """Whether nothing has changed that it was decided by, but perhaps the inputs' dtype."""
        return self.stamp is not None and self.stamp.holds(layer, choices)


def in_place_of(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """`new`, in the memory of `old` where it fits: a CUDA graph that was captured reads there.

    The copy has ended on return.
    """
    if old is None or new is None or old.is_inference() or type(old) is not type(new):
        return new
    if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        return new
    old.copy_(new)
    wait_for_writes(old.device)
    return old


def _memory(t: Tensor | None) -> Any:
    """A CPU tensor's bytes, as they are when looked at; its place must have been checked before."""
    if t is None or t.device.type != "cpu" or not t.is_contiguous():
        return None
    return (ctypes.c_char * (t.numel() * t.element_size())).from_address(t.data_ptr())
