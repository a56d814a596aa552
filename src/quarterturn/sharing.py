"""Layers that read the same input rotate and quantize it once, as q/k/v and gate/up do.

FP4Linears of one parent are siblings (`tie`). Whether they read the same x is not asked of their names: one that is
called leaves, for its own thread, what its siblings need of x, and a sibling takes that where it is called with the
very same x; else it computes for itself and leaves a share in turn. The bits are the same either way.

| rows of x | a share is                                          | x is the same where it is                    |
|---|---|---|
| few       | the siblings' outputs, one each, of one native call | the same tensor, of the same bytes; without  |
|           |                                                     | a version (inference mode), any of the same  |
| many      | the rotated, quantized x                            | the same tensor, of the same bytes or, above |
|           |                                                     | 64 KiB, of the same version and memory       |

An x of more than 64 KiB that is written to between siblings in a way that leaves no trace (`x.data.mul_`, through
numpy) is not seen to be another: tie no layers around such code, or give them a new tensor.

A share ends when every sibling has taken it or one of them gets another input. Siblings that left one behind read
something else, and none is made for them again. On CPUs only: on a GPU, layers may run on streams of their own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .backends import Blocks, Layer, Operand, Quantizer, Together, compose
from .backends.kept import contents
from .plan import LayerPlan

COMPARED = 1 << 16
"""Bytes of x that are kept and compared at most."""


class Member(Protocol):
    """What a layer tells its siblings."""

    def current_plan(self, dtype: torch.dtype) -> LayerPlan | None:
        """The plan for inputs of a dtype; None where it is not made, or what it was made from has changed."""


@dataclass(frozen=True, eq=False)
class _Team:
    """A layer's plan, and the siblings that take the same operand, with theirs."""

    others: tuple[tuple[weakref.ref[Any], LayerPlan], ...]
    together: Together | None

    def stands(self) -> bool:
        """Whether the siblings are still there. One that has changed since has another plan, and takes nothing."""
        return not [None for other, _ in self.others if other() is None]


class _Share:
    """What one call leaves: outputs or an operand for the siblings in `wanting`, and how to know x again."""

    __slots__ = ("_bytes", "_look", "_x", "leader", "operand", "outputs", "wanting")

    def __init__(self, x: Tensor, leader: LayerPlan, team: _Team) -> None:
        self.leader = leader
        self.wanting = {plan for _, plan in team.others}
        self.outputs: dict[LayerPlan, Tensor] = {}
        self.operand: Operand | None = None
        self._look, self._x = _look(x), weakref.ref(x)
        self._bytes = contents(x) if x.nbytes <= COMPARED else None

    def is_of(self, x: Tensor) -> bool:
        """Whether x is what this is made of."""
        if not x.is_inference() and self._x() is not x:
            return False
        return _look(x) == self._look and (self._bytes is None or contents(x) == self._bytes)


def _look(x: Tensor) -> tuple[Any, ...]:
    """What is the same while a tensor is: for one that keeps no version, only what its bytes do not tell."""
    inference = torch.is_inference_mode_enabled()  # where results are tensors of another kind
    if x.is_inference():
        return inference, x.dtype, x.shape
    return inference, x.dtype, x.shape, x._version, x.data_ptr(), x.stride()


class Siblings:
    """The FP4Linears of one parent. Holds none of them, and is not copied with them: copies find each other anew.

    An input of more than 64 KiB must not be written to between the calls of siblings in a way that leaves its version
    as it is (`.data`, numpy): they would get results of the values before.
    """

    def __init__(self) -> None:
        self._members: list[weakref.ref[Any]] = []
        self._here = threading.local()
        self.changed()

    def __reduce__(self) -> tuple[type[Siblings], tuple[()]]:
        return Siblings, ()

    def join(self, member: Member) -> None:
        """Make a layer one of them."""
        self._members = [other for other in self._members if other() not in (None, member)]
        self._members.append(weakref.ref(member))
        self.changed()

    def changed(self) -> None:
        """Forget what was found about the members' plans."""
        self._teams: dict[LayerPlan, _Team] = {}
        self._apart: set[tuple[LayerPlan, LayerPlan]] = set()

    def run(self, x: Tensor, plan: LayerPlan) -> Tensor:
        """The layer of a plan on x (..., K), by a share of x where there is one."""
        share: _Share | None = getattr(self._here, "share", None)
        if share is not None:
            if plan in share.wanting and share.is_of(x):
                share.wanting.discard(plan)
                if not share.wanting:
                    self._here.share = None
                if share.operand is None:
                    return share.outputs.pop(plan)
                return plan.product(share.operand, x)
            self._end(share)
        return self._lead(x, plan)

    def _end(self, share: _Share) -> None:
        self._here.share = None
        self._apart.update((share.leader, left) for left in share.wanting)
        self._teams.pop(share.leader, None)

    def _lead(self, x: Tensor, plan: LayerPlan) -> Tensor:
        team = self._teams.get(plan)
        if team is not None and not team.stands():
            self.changed()  # the plans of a layer that is gone hold its weights
            team = None
        if team is None:
            team = self._teams[plan] = self._gathered(plan)
        tracked, contiguous = not x.is_inference(), x.is_contiguous()
        if not team.others or not (tracked or (contiguous and x.nbytes <= COMPARED)):
            return plan.run(x)
        share = _Share(x, plan, team)
        if contiguous and team.together is not None:
            ys = team.together(x)
            if ys is not None:
                share.outputs = {p: y for (_, p), y in zip(team.others, ys[1:], strict=True)}
                self._here.share = share
                return ys[0]
        if not tracked:
            return plan.run(x)
        share.operand = plan.operand(x)
        self._here.share = share
        return plan.product(share.operand, x)

    def _gathered(self, plan: LayerPlan) -> _Team:
        others = []
        for reference in self._members:
            member = reference()
            other = None if member is None else member.current_plan(plan.dtype)
            if other is None or other is plan or (plan, other) in self._apart:
                continue
            if other.backend is plan.backend and _same_operand(plan.layer, other.layer):
                others.append((reference, other))
        layers = (plan.layer, *(other.layer for _, other in others))
        return _Team(tuple(others), compose.together(plan.backend, layers) if others else None)


def tie(model: nn.Module, kind: type[nn.Module]) -> None:
    """Make siblings of the layers of a kind that have the same parent and number of inputs."""
    for parent in model.modules():
        widths: dict[int, list[Any]] = {}
        for child in parent.children():
            if isinstance(child, kind):
                widths.setdefault(child.in_features, []).append(child)  # type: ignore[arg-type]
        for children in widths.values():
            _tied(children)


def _tied(children: Iterable[Any]) -> None:
    siblings, children = Siblings(), list(children)
    for child in children:
        child.siblings = siblings if len(children) > 1 else None
        if len(children) > 1:
            siblings.join(child)


def _same_operand(a: Layer, b: Layer) -> bool:
    return (
        (a.weight.block_scale is None) == (b.weight.block_scale is None)
        and a.weight.format == b.weight.format
        and a.weight.data.shape[1] == b.weight.data.shape[1]
        and (a.output_blocks is None) == (b.output_blocks is None)
        and _same_blocks(a.input_blocks, b.input_blocks)
        and _same_quantizer(a.quantizer, b.quantizer)
        and a.weight.data.device.type == b.weight.data.device.type == "cpu"
    )


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
