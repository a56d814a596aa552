"""Weights of siblings behind each other in one tensor, so that one product gives the results of all.

On a GPU a small product takes little less time than a large one. Layers that have been seen to read the same x
(sharing.py), whose weights are fragments (weight_layout.py), become parts of a `Whole`: its tensor takes the place of
theirs, so that nothing is held twice. A part is multiplied by itself where it has an x of its own.

| joined are   | layers of one input side (transform, quantizer) and format, without output transforms, all with a   |
|              | bias of one dtype or all without; all N but one multiples of 64; weights that no graph has captured |
| results      | are what each layer by itself gives, but for the order of sums: how a product is cut depends on N,  |
|              | unless it is batch-invariant. They are slices of one tensor: their rows lie apart, and what reads   |
|              | them next is slower for it. So with many rows, where one product saves nothing, each has its own    |
| loaded again | a part is written in its place, where captured graphs read it; its bias and scales too, so call     |
|              | `refresh` after writing to them in place                                                            |
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import weight_layout
from .backends import Backend, Blocks, Layer, Quantizer, Together, Weight, compose, gpu_product
from .backends.kept import wait_for_writes
from .plan import LayerPlan
from .tensor import FP4Tensor


class Member(Protocol):
    """A layer whose weight can be a part."""

    part: Part | None

    def current_plan(self, dtype: torch.dtype) -> LayerPlan | None:
        """The plan for inputs of a dtype; None where it is not made, or what it was made from has changed."""

    def take(self, part: Part) -> LayerPlan:
        """Hold the weight as a part from now on -> the plan by which the layer is then run."""

    def made_layer(self) -> Layer:
        """All that the layer is beside its input."""


@dataclass(frozen=True, eq=False)
class Part:
    """Rows first .. first + count - 1 of a whole, and the tensor scales of their ranges."""

    whole: Whole
    first: int
    count: int
    scales: slice

    @property
    def rows(self) -> tuple[int, int]:
        return self.first, self.count

    def write(self, made: Tensor | None, weight: FP4Tensor, bias: Tensor | None) -> bool:
        """Put a weight, prepared as `made`, in its place; False where it does not fit there."""
        whole, k = self.whole, weight.shape[1]
        if made is None or made.dtype != torch.int32 or made.device != whole.data.device or k != whole.k:
            return False
        kept = None if whole.bias is None else whole.bias[self.first : self.first + self.count]
        scale = whole.tensor_scale[self.scales]
        if not (made.shape[0] == self.count and weight.format == whole.format and _alike(kept, bias)):
            return False
        if tuple(weight.output_sizes) != whole.sizes[self.scales]:
            return False
        weight_layout.put(whole.data, *weight_layout.from_stored(made, k, whole.format), self.rows)
        scale.copy_(weight.tensor_scale)
        if kept is not None and bias is not None:
            kept.copy_(bias)
        wait_for_writes(made.device)
        return True


class Whole(nn.Module):
    """Weights of layers in one tensor, and what one product of all takes beside x.

    Buffers: data int32 (N, W) as weight_layout stores it, tensor_scale fp32 (P,), bias (N,) or None, matrix and
    encode_scale of the input side that all have while they `agree`.
    """

    data: Tensor
    tensor_scale: Tensor
    bias: Tensor | None
    matrix: Tensor | None
    encode_scale: Tensor | None

    def __init__(self, members: Sequence[Member], plans: Sequence[LayerPlan]) -> None:
        super().__init__()
        weights, self.k = [plan.layer.weight for plan in plans], plans[0].in_features
        self.format, self.agree = weights[0].format, False
        self.members = [weakref.ref(member) for member in members]
        stored = [weight_layout.from_stored(w.data, self.k, self.format, w.rows) for w in weights]
        scales = [gpu_product.ranges(w) for w in weights]
        biases = [plan.layer.bias for plan in plans if plan.layer.bias is not None]
        self.sizes = tuple(size for _, sizes in scales for size in sizes)
        self._keep("data", weight_layout.joined(stored))
        self._keep("tensor_scale", torch.cat([scale for scale, _ in scales]))
        self._keep("bias", torch.cat([b.detach() for b in biases]) if biases else None)
        self._keep("matrix", None)
        self._keep("encode_scale", None)
        self.counts = [w.n for w in weights]
        self.ranges = [len(sizes) for _, sizes in scales]

    @property
    def number(self) -> int:
        """Of parts."""
        return len(self.counts)

    def parts(self) -> list[Part]:
        """One for each layer, in their order."""
        found, first, scale = [], 0, 0
        for count, ranges in zip(self.counts, self.ranges, strict=True):
            found.append(Part(self, first, count, slice(scale, scale + ranges)))
            first, scale = first + count, scale + ranges
        return found

    def weight(self, rows: tuple[int, int]) -> Weight:
        """Some of its rows as the operand of a product."""
        return Weight(self.data, None, self.tensor_scale, self.sizes, self.format, rows)

    def settle(self) -> None:
        """Look whether the layers still agree in their input sides; what they agree in is then kept here."""
        there = [member for reference in self.members if (member := reference()) is not None]
        self.settle_by([member.made_layer() for member in there if member.part and member.part.whole is self])

    def settle_by(self, layers: Sequence[Layer]) -> None:
        """The same for the layers as they are, or will be."""
        self.agree = bool(layers) and all(same_input(layers[0], layer) for layer in layers[1:])
        if not self.agree:
            return
        blocks, quantizer = layers[0].input_blocks, layers[0].quantizer
        self.matrix = None if blocks is None else blocks.matrix
        scale = None if quantizer is None else quantizer.encode_scale
        if scale is None or self.encode_scale is None:
            self.encode_scale = None if scale is None else scale.clone()
        else:
            self.encode_scale.copy_(scale)

    def _keep(self, name: str, tensor: Tensor | None) -> None:
        self.register_buffer(name, tensor, persistent=False)


def fuse(members: Sequence[Member], plans: Sequence[LayerPlan]) -> dict[LayerPlan, LayerPlan]:
    """Make parts of one whole of layers that take the same operand, by their plans -> their old plans and the new;
    nothing where that cannot be. Raises OutOfMemoryError before a member is changed."""
    pairs = sorted(zip(members, plans, strict=True), key=lambda pair: pair[1].layer.weight.n % _ROWS != 0)
    members, plans = [member for member, _ in pairs], [plan for _, plan in pairs]
    if not _can_be_joined(members, plans):
        return {}
    # Tensors of inference mode could not be written to later.
    with torch.inference_mode(False), torch.no_grad():
        whole = Whole(members, plans)
        if whole.data.is_cuda:
            torch.cuda.synchronize(whole.data.device)  # what is read on other streams is freed next
        whole.settle_by([plan.layer for plan in plans])
        return {plan: member.take(part) for member, plan, part in zip(members, plans, whole.parts(), strict=True)}


_ROWS = weight_layout.PADDED_ROWS


def _can_be_joined(members: Sequence[Member], plans: Sequence[LayerPlan]) -> bool:
    layers = [plan.layer for plan in plans]
    wholes = {None if member.part is None else member.part.whole for member in members}
    if len(plans) < 2 or (len(wholes) == 1 and None not in wholes):
        return False
    return all(
        layer.weight.data.dtype == torch.int32
        and layer.output_blocks is None
        and _alike(layer.bias, layers[0].bias, sized=False)
        and not gpu_product.is_captured(layer.weight.data)
        for layer in layers
    ) and all(layer.weight.n % _ROWS == 0 for layer in layers[:-1])


def together(backend: Backend, leader: Layer, parts: Sequence[Part | None]) -> Together | None:
    """Layers whose weights lie behind each other as one function of x, by the input side of the first; None where they
    do not. Its results are slices of one tensor, but where each layer's product fills the device."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({part.whole for part in known}) != 1:
        return None
    ordered = sorted(known, key=lambda part: part.first)
    if any(a.first + a.count != b.first for a, b in pairwise(ordered)):
        return None
    whole, first, count = known[0].whole, ordered[0].first, sum(part.count for part in known)

    def layer_of(first: int, count: int) -> Layer:
        bias = None if whole.bias is None else whole.bias[first : first + count]
        return replace(leader, weight=whole.weight((first, count)), bias=bias, output_blocks=None, kept={})

    layer, apart = layer_of(first, count), [layer_of(*part.rows) for part in known]
    places = [(part.first - first, part.first - first + part.count) for part in known]
    narrowest = min(part.count for part in known)

    def run(x: Tensor) -> list[Tensor]:
        taken = compose.operand(backend, compose.rows(x), layer)
        if gpu_product.fills(x.device, taken.rows, narrowest):
            return [compose.product(backend, taken, part).view(*x.shape[:-1], part.weight.n) for part in apart]
        y = compose.product(backend, taken, layer).view(*x.shape[:-1], count)
        return [y[..., start:end] for start, end in places]

    return run


def same_input(a: Layer, b: Layer) -> bool:
    """Whether two layers turn and quantize their inputs in the same way; waits for the device where it has to look."""
    if a.batch_invariant != b.batch_invariant:  # whose products may take different operands
        return False
    return _same_blocks(a.input_blocks, b.input_blocks) and _same_quantizer(a.quantizer, b.quantizer)


def _same_blocks(a: Blocks | None, b: Blocks | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.factor, a.transpose) == (b.factor, b.transpose) and _same(a.matrix, b.matrix)


def _same_quantizer(a: Quantizer | None, b: Quantizer | None) -> bool:
    if a is None or b is None:
        return a is b
    same = (a.format, a.recipe, a.rule) == (b.format, b.recipe, b.rule)
    return same and (a.recipe != "checkpoint" or _same(a.encode_scale, b.encode_scale))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or torch.equal(a, b)


def _alike(a: Any, b: Any, sized: bool = True) -> bool:
    """Whether both are None, or tensors of one dtype (and shape)."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and (not sized or a.shape == b.shape)
