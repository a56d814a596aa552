"""What torch.compile is told, so that siblings are multiplied together in a compiled model too.

Inductor merges no calls of an operator that are equal, nor knows that several are parts of one. Layers that hold their
weights together (fused.py) call `fp4_linear` each for its own rows; a pass over the graph makes one call of those that
differ in nothing else. The graph is functional there: what is written to between two calls is another value in it.

The results are slices of one, whose rows lie apart. PyTorch's own operators take them so, and views of them are made
reshapes. A call is left by itself where its result is read by memory rather than by values (as_strided), or by an
operator that is not known here.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from .errors import refusal
from .ops import FP4_LINEAR


def compile_options(**others: Any) -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)`, with those given besides. Raises Refusal where another pass is
    asked for in the place of ours, among those or in torch._inductor.config: one of the two would be left out.

    Call the model once under `torch.no_grad()` before it is compiled: whether layers read the same input is seen in a
    call, but never in one of inference mode, whose tensors keep no version by which they would be known again.
    """
    from torch._inductor import config

    given = {name.replace("-", "_"): value for name, value in others.items()}  # as torch.compile reads them
    taken = {"options": given[_PASS]} if _PASS in given else {}
    if (set_before := getattr(config, _PASS)) not in (None, _as_pass()):
        taken["torch._inductor.config"] = set_before
    if taken:
        raise refusal(
            "compile_options",
            f"'{_PASS}' is the option by which siblings are multiplied together.",
            needs=[(f"no {_PASS} of another's", f"{value!r} in {place}") for place, value in taken.items()],
            do="make yours a post_grad_custom_post_pass, or leave compile_options out and call "
            "quarterturn.compiled.merge_siblings(graph) in yours",
        )
    return {_PASS: _as_pass(), **others}


_PASS = "post_grad_custom_pre_pass"


def merge_siblings(graph: fx.Graph) -> int:
    """Make one call of calls of fp4_linear for neighbouring rows of the same weight and x, in place -> calls saved."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is not FP4_LINEAR.default or node.kwargs or len(node.args) <= _ROWS or not node.args[_ROWS]:
            continue
        if _reads_values(node):
            groups.setdefault(_hashable((*node.args[:_ROWS], *node.args[_ROWS + 1 :])), []).append(node)
    saved = 0
    for nodes in groups.values():
        for run in _runs(nodes):
            if len(run) > 1:
                _merge(graph, run, min(run, key=nodes.index))
                saved += len(run) - 1
    return saved


_ROWS = [argument.name for argument in FP4_LINEAR.default._schema.arguments].index("rows")
"""Where a call has its rows. Arguments behind them that are as by default may be left out."""


def _hashable(value: Any) -> Hashable:
    return tuple(_hashable(v) for v in value) if isinstance(value, list | tuple) else value


def _runs(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """The calls by their rows, in lists of which each begins where the one before it ends or begins there too."""
    runs: list[list[fx.Node]] = []
    for node in sorted(nodes, key=_rows):
        last = _rows(runs[-1][-1]) if runs else None
        if last is not None and _rows(node) in (last, (sum(last), _rows(node)[1])):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _rows(node: fx.Node) -> tuple[int, int]:
    rows: Any = node.args[_ROWS]
    return rows[0], rows[1]


def _merge(graph: fx.Graph, nodes: list[fx.Node], before: fx.Node) -> None:
    first, end = _rows(nodes[0])[0], sum(_rows(nodes[-1]))
    like = before.meta["val"]
    arguments = (*before.args[:_ROWS], [first, end - first], *before.args[_ROWS + 1 :])
    with graph.inserting_before(before):
        whole = graph.call_function(before.target, arguments)  # type: ignore[arg-type]
        whole.meta["val"] = like.new_empty((*like.shape[:-1], end - first))
        for node in nodes:
            start, count = _rows(node)[0] - first, _rows(node)[1]
            part = graph.call_function(_ATEN.slice.Tensor, (whole, like.dim() - 1, start, start + count))
            _tell(part)
            node.replace_all_uses_with(part)
            _reshape_views(part)
    for node in nodes:
        graph.erase_node(node)


_ATEN = torch.ops.aten
_OPEN = ("aten", "prims", "quarterturn")
"""Operators of these take rows that lie apart, but for those of _BY_MEMORY."""
_BY_MEMORY = {
    "as_strided", "as_strided_copy", "as_strided_scatter", "_reshape_alias", "view_as_complex", "collapse_view",
    "sym_stride", "sym_storage_offset", "stride", "storage_offset", "is_contiguous", "is_strides_like_format",
}  # fmt: skip


def _reads_values(node: fx.Node) -> bool:
    """Whether nothing that reads a node, or a view of it, depends on how its rows lie in memory."""
    return all(_takes_apart(user) and (not _is_view(user) or _reads_values(user)) for user in node.users)


def _takes_apart(user: fx.Node) -> bool:
    target = user.target
    if user.op == "output" or target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or target.namespace not in _OPEN:
        return False
    return target.overloadpacket.__name__ not in _BY_MEMORY and target is not _ATEN.view.dtype


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if target in (operator.getitem, _ATEN._unsafe_view.default):
        return True
    return isinstance(target, OpOverload) and target.is_view


def _reshape_views(node: fx.Node) -> None:
    """Make reshapes of what asks for views of rows that lie apart now, and tell where the values of views lie."""
    for user in node.users:
        if user.target in (_ATEN.view.default, _ATEN._unsafe_view.default):
            user.target = _ATEN.reshape.default
        if _is_view(user):
            _tell(user)
            _reshape_views(user)


def _tell(node: fx.Node) -> None:
    """What a node gives: its shape, dtype and strides."""
    arguments, named = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["val"] = node.target(*arguments, **named)  # type: ignore[operator]


@cache
def _as_pass() -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class MergeSiblings(CustomGraphPass):
        """merge_siblings, and by what compiled code that is kept on disk is known."""

        def __call__(self, graph: fx.Graph) -> None:
            merge_siblings(graph)

        def uuid(self) -> bytes:
            digest: bytes = get_hash_for_files((__file__,))
            return digest

    return MergeSiblings()


__all__ = ["compile_options", "merge_siblings"]
