"""What torch.compile is told, so that siblings are multiplied together in a compiled model too.

Inductor merges no calls of an operator that are equal, nor knows that several are parts of one. Layers that hold their
weights together (fused.py) call `fp4_linear` each for its own rows; a pass over the graph makes one call of those that
differ in nothing else. The graph is functional there: what is written to between two calls is another value in it.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import fx

from .ops import FP4_LINEAR


def compile_options(**others: Any) -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)`, with those given besides.

    Call the model once under `torch.no_grad()` before it is compiled: whether layers read the same input is seen in a
    call, but never in one of inference mode, whose tensors keep no version by which they would be known again.
    """
    return {"post_grad_custom_pre_pass": _as_pass(), **others}


def merge_siblings(graph: fx.Graph) -> int:
    """Make one call of calls of fp4_linear for neighbouring rows of the same weight and x, in place -> calls saved."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is FP4_LINEAR.default and not node.kwargs and len(node.args) > _ROWS and node.args[_ROWS]:
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
            part = graph.call_function(torch.ops.aten.slice.Tensor, (whole, like.dim() - 1, start, start + count))
            part.meta["val"] = whole.meta["val"][..., start : start + count]
            for user in list(node.users):
                if user.target is torch.ops.aten.view.default:  # of rows that lie apart now
                    user.target = torch.ops.aten.reshape.default
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)


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
