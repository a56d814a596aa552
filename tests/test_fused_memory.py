"""Siblings whose weights lie in one tensor: what is held, what is freed, and what happens where memory ends."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import fused_cases
from comparing import assert_same_bits
from fused_cases import BF16, SIZES, Attention, Gpu, is_fused, same, tied, x_of
from quarterturn import FP4Linear, sharing, weight_layout
from quarterturn.backends import gpu_product
from quarterturn.sharing import tie

called, gpu = fused_cases.called, fused_cases.gpu


def test_nothing_is_held_twice(gpu: Gpu) -> None:
    together, _ = tied()
    whole = together.q.part.whole.data
    assert whole.shape[0] == sum(SIZES)
    assert all(layer.values is whole for layer in together.layers())
    gc.disable()
    try:
        before = weakref.ref(whole)
        del whole, together
        assert before() is None
    finally:
        gc.enable()


def test_what_was_held_before_is_freed_at_once(gpu: Gpu) -> None:
    model = Attention()
    tie(model, FP4Linear)
    gone = [weakref.ref(layer.values) for layer in model.layers()]
    gc.disable()
    try:
        with torch.no_grad():
            model(x_of(2)), model(x_of(2))
        assert is_fused(model)
        assert [one() for one in gone] == [None] * 3
    finally:
        gc.enable()


def test_weights_that_a_graph_reads_stay_where_they_are(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Attention()
    together = copy.deepcopy(alone)
    tie(together, FP4Linear)
    with torch.no_grad():
        monkeypatch.setattr(gpu_product.gpu_pieces, "is_capturing", lambda x: True)
        together.k(x_of(4))
        monkeypatch.setattr(gpu_product.gpu_pieces, "is_capturing", lambda x: False)
        for _ in range(3):
            x = x_of(4)
            same(together(x), alone(x))
        assert not any(layer.part for layer in together.layers())
        together.k.load_state_dict(alone.k.state_dict())
        same(together(x), alone(x))


@pytest.mark.parametrize("count", [4, 2])
def test_without_memory_for_it_layers_stay_apart_and_results_are_kept(
    gpu: Gpu, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are put together when the last sibling has taken its share, or before a call with another input."""
    model, tries = Attention(), []

    def fuse(members, plans):
        tries.append(len(members))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(sharing, "fuse", fuse)
    alone = copy.deepcopy(model)
    tie(model, FP4Linear)
    pairs = list(zip([*model.layers(), model.o], [*alone.layers(), alone.o], strict=True))[:count]
    with torch.no_grad():
        for order in (pairs, pairs[::-1], pairs):
            x = x_of(3)
            for layer, other in order:
                assert_same_bits(layer(x), other(x))
    assert tries == [count], "not tried again"


@pytest.mark.parametrize("step", ["joined", "cat", "clone"])
def test_where_memory_ends_no_layer_is_changed(gpu: Gpu, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_, **__):
        steps.append(step)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model, steps = Attention(bias=True), []
    alone = copy.deepcopy(model)
    tie(model, FP4Linear)
    with torch.no_grad():
        x, other = x_of(3), x_of(3)
        got = [layer(x) for layer in model.layers()]
        plans = [layer.current_plan(BF16) for layer in model.layers()]
        values = [layer.values for layer in model.layers()]
        with monkeypatch.context() as memory:
            memory.setattr({"joined": weight_layout, "cat": torch, "clone": torch.Tensor}[step], step, full)
            got.append(model.q(other))
        assert steps
        want = [*(layer(x) for layer in alone.layers()), alone.q(other)]
        same(got, want)
    assert all(a is b.current_plan(BF16) for a, b in zip(plans, model.layers(), strict=True))
    assert all(a is b.values for a, b in zip(values, model.layers(), strict=True))
