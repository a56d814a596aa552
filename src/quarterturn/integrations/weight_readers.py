"""Which layers a model's code multiplies by itself, without calling them: those cannot be held in 4 bits.

Mamba's and Jamba's mixers compute `self.dt_proj.weight @ x`: no transform would be applied there, and no activation
rounded. The code of each layer's owner is read (not run) for `self.<layer>.weight`. Questions that absent_weight
answers (its dtype, device, shape) do not count, nor what stands under conditions on the owner's own settings that do
not hold, such as the fused kernels of training. What the reading misses is refused when it runs.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

_ANSWERED = {"dtype", "device", "shape", "ndim", "dim", "size", "requires_grad"}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip


class _Read(NamedTuple):
    """`self.<child>.weight` in a method, under conditions that must come out as given."""

    child: str
    method: str
    conditions: tuple[tuple[ast.expr, bool], ...]


class _Unknown(Exception):
    """A condition on more than the module's own settings."""


def weight_readers(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Of the layers `names`, those whose values the model's code uses, with the method that does."""
    found = {}
    for name in names:
        owner_name, _, child = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        for read in _reads(type(owner)):  # type: ignore[arg-type]
            if read.child == child and all(_may_be(test, wanted, owner) for test, wanted in read.conditions):
                found[name] = read.method
    return found


@lru_cache(maxsize=256)
def _reads(owner: type) -> list[_Read]:
    found: list[_Read] = []
    for kind in owner.__mro__:
        if kind is nn.Module:
            break
        for name, method in vars(kind).items():
            if inspect.isfunction(method) and "init" not in name and "reset" not in name:
                try:
                    source = textwrap.dedent(inspect.getsource(inspect.unwrap(method)))
                    tree = ast.parse(source)
                except (OSError, TypeError, SyntaxError):
                    continue
                found += [_Read(child, f"{kind.__name__}.{name}", tests) for child, tests in _walk(tree, ())]
    return found


def _walk(node: ast.AST, tests: tuple[tuple[ast.expr, bool], ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, (ast.If, ast.IfExp)):
        yield from _walk(node.test, tests)
        for branch, holds in ((node.body, True), (node.orelse, False)):
            parts: list[Any] = branch if isinstance(branch, list) else [branch]
            for part in parts:
                yield from _walk(part, (*tests, (node.test, holds)))
        return
    if isinstance(node, ast.Attribute) and node.attr in _ANSWERED and _child(node.value):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        return
    if child := _child(node):
        yield child, tests
        return
    for part in ast.iter_child_nodes(node):
        yield from _walk(part, tests)


def _child(node: ast.AST) -> str | None:
    """'x' of the expression self.x.weight."""
    match node:
        case ast.Attribute(ast.Attribute(ast.Name("self"), child), "weight"):
            return child
    return None


def _may_be(test: ast.expr, wanted: bool, owner: nn.Module) -> bool:
    try:
        return bool(_value(test, owner)) == wanted
    except _Unknown:
        return True


def _value(node: ast.expr, owner: nn.Module) -> Any:
    """The value of an expression of the owner's attributes and constants. Raises _Unknown for any other."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id == "self":
        return owner
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("self", "training"):
            return False
        value = _value(node.value, owner)
        if not hasattr(value, node.attr):
            raise _Unknown
        return getattr(value, node.attr)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _value(node.operand, owner)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        return _COMPARISONS[type(node.ops[0])](_value(node.left, owner), _value(node.comparators[0], owner))
    if isinstance(node, ast.BoolOp):
        decisive = isinstance(node.op, ast.Or)
        if any(not _may_be(part, not decisive, owner) for part in node.values):
            return decisive
        if all(not _may_be(part, decisive, owner) for part in node.values):
            return not decisive
    raise _Unknown
