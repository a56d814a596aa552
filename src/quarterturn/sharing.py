"""Layers that read the same input rotate and quantize it once, as q/k/v and gate/up do.

FP4Linears of one parent are siblings (`tie`). Whether they read the same x is not asked of their names: one that is
called leaves, for its own thread, what its siblings need of x, and a sibling takes that where it is called with the
very same x; else it computes for itself and leaves a share in turn. A share has the bits that a sibling would have made
of x by itself, but for outputs of weights that lie in one tensor: see the last paragraph.

| x         | a share is                                          | x is the same where it is                    |
|---|---|---|
| few rows  | the siblings' outputs, one each, of one native call | the same tensor, of the same bytes; without  |
|           |                                                     | a version (inference mode), any of the same  |
| many rows | the rotated, quantized x                            | the same tensor, of the same bytes or, above |
|           |                                                     | 64 KiB, of the same version and memory       |
| on a GPU  | the rotated, quantized x, or where the weights lie  | the same tensor, of the same version and     |
|           | in one tensor (fused.py) the outputs                | memory, on the same stream, in the same      |
|           |                                                     | capture; never a tensor of inference mode    |

An x of more than 64 KiB, or on a GPU, that is written to between siblings in a way that leaves no trace (`x.data.mul_`,
through numpy) is not seen to be another: tie no layers around such code, or give them a new tensor.

A share ends when every sibling has taken it or one of them gets another input. Siblings that left one behind (several,
where their weights lie together) read something else, and none is made for them again; the weights of those that took
it are put together where they can be, unless a CUDA graph is being captured. From then on the outputs are not bit for
bit those of layers alone, unless they are batch-invariant: a product of more rows may be cut in another way. Where the
GPU has no memory for that, which takes as much again for a moment, they stay apart until one of them is made again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .backends import Layer, Operand, Together, compose
from .backends.capturing import capture_of
from .backends.kept import COMPARED, contents
from .fused import Member, Part, fuse, same_input, together
from .plan import LayerPlan

PATIENCE = 4
"""Shares of one layer that its siblings may leave behind, one after the other, where their weights lie together."""


@dataclass(frozen=True, eq=False)
class _Team:
    """A layer's plan, and the siblings that take the same operand, with theirs."""

    others: tuple[tuple[weakref.ref[Any], LayerPlan], ...]
    together: Together | None
    whole: bool = False
    """Whether their weights lie together, since they were seen to read the same x."""

    def stands(self) -> bool:
        """Whether the siblings are still there. One that has changed since has another plan, and takes nothing."""
        return not [None for other, _ in self.others if other() is None]


class Place(NamedTuple):
    """Where a call on a GPU runs: the stream, and the capture that records it, None where it runs at once."""

    stream: int
    capture: object | None


def place_of(x: Tensor) -> Place | None:
    """The place of a call for an x on a GPU; None elsewhere."""
    if not x.is_cuda:
        return None
    stream = torch.cuda.current_stream(x.device).cuda_stream
    return Place(stream, capture_of(stream) if torch.cuda.is_current_stream_capturing() else None)


class _Share:
    """What one call leaves: outputs or an operand for the siblings in `wanting`, and how to know x again."""

    __slots__ = ("_bytes", "_look", "_place", "_x", "leader", "operand", "outputs", "plans", "team", "wanting")

    def __init__(self, x: Tensor, place: Place | None, leader: LayerPlan, team: _Team) -> None:
        self.leader, self.team, self._place = leader, team, place
        self.wanting = {plan for _, plan in team.others}
        self.plans = {leader, *self.wanting}
        self.outputs: dict[LayerPlan, Tensor] = {}
        self.operand: Operand | None = None
        self._look, self._x = _look(x), weakref.ref(x)
        self._bytes = contents(x) if place is None and x.nbytes <= COMPARED else None

    def is_of(self, x: Tensor) -> bool:
        """Whether x is what this is made of."""
        if (not x.is_inference() and self._x() is not x) or place_of(x) != self._place:
            return False
        return _look(x) == self._look and (self._bytes is None or contents(x) == self._bytes)

    def taken(self) -> list[LayerPlan]:
        """The plans of the siblings that have taken it."""
        return [plan for _, plan in self.team.others if plan not in self.wanting]


def _look(x: Tensor) -> tuple[Any, ...]:
    """What is the same while a tensor is: for one that keeps no version, only what its bytes do not tell."""
    inference = torch.is_inference_mode_enabled()  # where results are tensors of another kind
    if x.is_inference():
        return inference, x.dtype, x.shape
    return inference, x.dtype, x.shape, x._version, x.data_ptr(), x.stride()


class Siblings:
    """The FP4Linears of one parent. Holds none of them, and is not copied with them: copies find each other anew.

    An input of more than 64 KiB, or on a GPU, must not be written to between the calls of siblings in a way that leaves
    its version as it is (`.data`, numpy): they would get results of the values before.
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
        self._settled: set[LayerPlan] = set()
        self._left: dict[LayerPlan, int] = {}

    def run(self, x: Tensor, plan: LayerPlan) -> Tensor:
        """The layer of a plan on x (..., K), by a share of x where there is one."""
        share: _Share | None = getattr(self._here, "share", None)
        if share is not None:
            if plan in share.wanting and share.is_of(x):
                share.wanting.discard(plan)
                y = share.outputs.pop(plan) if share.operand is None else plan.product(share.operand, x)
                if not share.wanting:
                    self._here.share = None
                    self._left.pop(share.leader, None)
                    self._settle(share, x)
                return y
            self._here.share = None
            if plan in share.plans or not share.is_of(x):  # else one that has changed ends it, whatever others read
                self._leave(share)
            if self._settle(share, x):
                return plan.run(x)  # by what was planned before
        return self._lead(x, plan)

    def _leave(self, share: _Share) -> None:
        """Learn from a share that siblings left behind."""
        self._left[share.leader] = self._left.get(share.leader, 0) + 1
        if not share.team.whole or self._left[share.leader] >= PATIENCE:
            self._apart.update((share.leader, left) for left in share.wanting)
            self._teams.pop(share.leader, None)

    def _settle(self, share: _Share, x: Tensor) -> bool:
        """Put the weights together of layers that were seen to read the same x, where they can be; whether they were.

        Not while a graph is captured, whose memory that would be.
        """
        place = place_of(x)
        if share.operand is None or share.leader in self._settled or (place is not None and place.capture is not None):
            return False
        self._settled.add(share.leader)
        wanted, found = {share.leader, *share.taken()}, []
        for reference in self._members:
            member = reference()
            plan = None if member is None else member.current_plan(share.leader.dtype)
            if member is not None and plan in wanted:
                found.append((member, plan))
        try:
            new = fuse([member for member, _ in found], [plan for _, plan in found])
        except torch.OutOfMemoryError:
            # For a moment both forms are held. The results are there: the layers go on as they are, by these plans.
            self._settled.update(wanted)
            return False
        if new:
            apart = {(new.get(a, a), new.get(b, b)) for a, b in self._apart}
            self.changed()
            self._apart = apart
        return bool(new)

    def _lead(self, x: Tensor, plan: LayerPlan) -> Tensor:
        team, place = self._teams.get(plan), place_of(x)
        if team is not None and not team.stands():
            self.changed()  # the plans of a layer that is gone hold its weights
            team = None
        if team is None:
            # While a graph is captured tensors cannot be compared.
            team = None if place is not None and place.capture is not None else self._gathered(plan)
            if team is None:
                return plan.run(x)
            self._teams[plan] = team
        tracked, contiguous = not x.is_inference(), x.is_contiguous()
        if not team.others or not (tracked or (place is None and contiguous and x.nbytes <= COMPARED)):
            return plan.run(x)
        share = _Share(x, place, plan, team)
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

    def _gathered(self, plan: LayerPlan) -> _Team | None:
        """None for a plan that is no member's any more."""
        others: list[tuple[weakref.ref[Any], LayerPlan, Part | None]] = []
        leader: Member | None = None
        for reference in self._members:
            member = reference()
            other = None if member is None else member.current_plan(plan.dtype)
            if other is plan:
                leader = member
            if member is None or other is None or other is plan or (plan, other) in self._apart:
                continue
            if other.backend is plan.backend and _same_operand(plan.layer, other.layer):
                others.append((reference, other, member.part))
        if leader is None:
            return None
        own = leader.part
        if own is not None:
            mates = [other for other in others if other[2] is not None and other[2].whole is own.whole]
            # Where all of a whole are there, they have been seen to read the same x, and the others have not.
            others = mates if len(mates) + 1 == own.whole.number else others
        found = tuple((reference, other) for reference, other, _ in others)
        if not found:
            return _Team((), None)
        run = together(plan.backend, plan.layer, [own, *(part for _, _, part in others)])
        layers = (plan.layer, *(other.layer for _, other in found))
        return _Team(found, run or compose.together(plan.backend, layers), run is not None)


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
        and a.weight.data.dtype == b.weight.data.dtype  # x has another order for fragments, another form for E4M3
        and a.weight.format == b.weight.format
        and (a.output_blocks is None) == (b.output_blocks is None)
        and a.weight.data.device == b.weight.data.device
        and a.weight.data.device.type in ("cpu", "cuda")
        and same_input(a, b)
    )
