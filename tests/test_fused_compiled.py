"""The operator for rows of a weight, and siblings under torch.compile: one call for all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor

import fused_cases
from comparing import assert_same_bits
from fused_cases import BF16, Attention, Gpu, every_kind, same, tied, x_of
from quarterturn import compile_options
from quarterturn.compiled import merge_siblings
from quarterturn.errors import Refusal

called, gpu = fused_cases.called, fused_cases.gpu


def test_the_operator_multiplies_rows(gpu: Gpu) -> None:
    together, alone = tied(bias=True)
    x = x_of(3)
    with torch.no_grad(), torch.autocast("cpu", BF16):  # which has to see the operator
        for layer, other in zip(together.layers(), alone.layers(), strict=True):
            assert_same_bits(layer(x), other(x))
    arguments = list(together.k._operands())
    for wrong in ([16, 64], [128, 65 + 100], [128], [-64, 64], [0, 0]):
        with pytest.raises(Refusal, match="rows \\(first, count\\)"):
            torch.ops.quarterturn.fp4_linear(x, *arguments[:-2], wrong)


@pytest.mark.parametrize("name", ["post_grad_custom_pre_pass", "post-grad-custom-pre-pass"])
@pytest.mark.parametrize("given", [None, merge_siblings])
def test_another_pass_in_the_place_of_ours_is_refused(name: str, given: object) -> None:
    with pytest.raises(Refusal, match=r"needs no post_grad_custom_pre_pass of another's; found .* in options\n"):
        compile_options(**{name: given})


def test_a_pass_that_was_set_before_is_not_replaced() -> None:
    with (
        inductor.patch(post_grad_custom_pre_pass=merge_siblings),
        pytest.raises(Refusal, match=r"found <function merge_siblings .* in torch\._inductor\.config\n.*post_pass"),
    ):
        compile_options()


def test_other_options_are_handed_on() -> None:
    ours = compile_options()
    with inductor.patch(ours):
        assert compile_options(max_autotune=True) == {**ours, "max_autotune": True}


class AsTold(torch.fx.Interpreter):
    """Runs a graph, of which every tensor has to lie as the graph says."""

    def run_node(self, n: torch.fx.Node) -> object:
        made = super().run_node(n)
        if isinstance(made, Tensor):
            assert made.stride() == n.meta["val"].stride(), n.format_node()
        return made


class Calls:
    """A backend for torch.compile that counts calls of the operator before and after they are merged."""

    def __init__(self) -> None:
        self.before = self.after = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        from torch._dynamo.backends.common import aot_autograd

        def compiler(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
            self.before += (before := self._count(graph))
            saved = merge_siblings(graph.graph)
            graph.graph.lint()
            graph.recompile()
            self.after += self._count(graph)
            assert saved == before - self._count(graph)
            return AsTold(graph).run

        return aot_autograd(fw_compiler=compiler)(module, inputs)

    @staticmethod
    def _count(graph: torch.fx.GraphModule) -> int:
        return sum(node.target is torch.ops.quarterturn.fp4_linear.default for node in graph.graph.nodes)


@every_kind
def test_compiled_siblings_are_one_call(gpu: Gpu, options) -> None:
    together, alone = tied(**options)
    torch._dynamo.reset()
    calls = Calls()
    compiled = torch.compile(together, fullgraph=True, backend=calls, dynamic=False)
    with torch.no_grad():
        x = x_of(2, 3)
        same(compiled(x), alone(x))
        assert (calls.before, calls.after) == (4, 2)
        gpu.products.clear()
        same(compiled(x + 1), alone(x + 1))
        assert len(gpu.products) == 2 + 4


def test_compiled_siblings_without_the_pass_are_multiplied_each(gpu: Gpu) -> None:
    together, alone = tied(bias=True)
    torch._dynamo.reset()
    with torch.no_grad():
        x = x_of(3)
        same(torch.compile(together, fullgraph=True, backend="aot_eager")(x), alone(x))


def test_an_x_that_is_written_to_between_compiled_siblings(gpu: Gpu) -> None:
    together, alone = tied()
    torch._dynamo.reset()

    def run(model: Attention, x: Tensor) -> list[Tensor]:
        x = x * 1
        first = model.q(x)
        x.mul_(2)
        return [first, model.k(x), model.v(x), model.o(x)]

    calls = Calls()
    with torch.no_grad():
        x = x_of(3)
        same(torch.compile(lambda x: run(together, x), fullgraph=True, backend=calls)(x), run(alone, x))
    assert (calls.before, calls.after) == (4, 3)


def test_compiled_siblings_that_do_not_agree(gpu: Gpu) -> None:
    together, alone = tied()
    torch._dynamo.reset()
    calls = Calls()
    compiled = torch.compile(together, fullgraph=True, backend=calls, dynamic=False)
    with torch.no_grad():
        x = x_of(3)
        same(compiled(x), alone(x))
        for model in (together, alone):
            model.v.input_encode_scale.mul_(2)
            model.v.refresh()
        same(compiled(x), alone(x))
    assert (calls.before, calls.after) == (8, 2 + 4)


@torch.library.custom_op("quarterturn_tests::rows_in_one_piece", mutates_args=())
def rows_in_one_piece(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return x.view(-1) * 2


@rows_in_one_piece.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.numel())


READERS: dict[str, tuple[Callable[[Tensor], object], bool]] = {
    "as_strided": (lambda y: y.as_strided((6, 32), (64, 2)) * 2, False),
    "as_strided with an offset": (lambda y: torch.as_strided(y, (5, 64), (64, 1), 64) * 2, False),
    "as_strided of a view": (lambda y: y.view(-1, 16).transpose(0, 1).as_strided((64,), (1,), 3) * 2, False),
    "as_strided of a part": (lambda y: y.split(32, -1)[1].as_strided((8,), (1,), 32) * 2, False),
    "an operator of somebody else": (rows_in_one_piece, False),
    "the same of a view": (lambda y: rows_in_one_piece(y.view(-1, 16)), False),
    "other bits": (lambda y: y.view(torch.int32) + 1, False),
    "_unsafe_view": (lambda y: torch.ops.aten._unsafe_view(y, (-1, 16)) * 2, True),
    "a view of a view": (lambda y: y.transpose(0, 1).transpose(0, 1).view(-1) * 2, True),
    "parts": (lambda y: torch.cat(y.chunk(4, -1)[::-1], -1).view(-1), True),
    "a sum": (lambda y: y.float().sum(0), True),
}


@pytest.mark.parametrize("backend", ["merged", "inductor"])
@pytest.mark.parametrize(("read", "apart"), READERS.values(), ids=list(READERS))
def test_what_is_read_by_memory_is_multiplied_by_itself(
    gpu: Gpu, read: Callable[[Tensor], Tensor], apart: bool, backend: str
) -> None:
    """k is the second of three, so that its rows begin somewhere in the tensor of all, and lie apart."""
    together, alone = tied()
    torch._dynamo.reset()
    how = {"options": compile_options()} if backend == "inductor" else {"backend": Calls()}

    def run(model: Attention, x: Tensor) -> list[Tensor]:
        return [model.q(x) * 2, read(model.k(x)), model.v(x) * 2]

    with torch.no_grad():
        x = x_of(2, 3)
        compiled = torch.compile(lambda x: run(together, x), fullgraph=True, dynamic=False, **how)
        gpu.products.clear()
        found = compiled(x)
        assert len(gpu.products) == (1 if apart else 3)
        for got, want in zip(found, run(alone, x), strict=True):
            assert_same_bits(got.contiguous(), want)


def test_views_of_what_was_merged(gpu: Gpu) -> None:
    """A view that lies-apart rows do not have."""
    together, alone = tied()
    torch._dynamo.reset()

    def run(model: Attention, x: Tensor) -> list[Tensor]:
        return [model.q(x).view(-1, 16), model.k(x).view(2, 3, -1, 16).transpose(1, 2), model.v(x) * 2, model.o(x)]

    with torch.no_grad():
        x = x_of(2, 3)
        for backend in (Calls(), "inductor"):
            how = {} if backend != "inductor" else {"options": compile_options()}
            compiled = torch.compile(lambda x: run(together, x), fullgraph=True, backend=backend, dynamic=False, **how)
            gpu.products.clear()
            got = compiled(x)
            assert len(gpu.products) == 2
            same(got, [y.contiguous() for y in run(alone, x)])
