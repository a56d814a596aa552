"""The operator's layers on a CPU are checked and prepared once, and nothing that is written to is missed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from comparing import assert_same_bits
from quarterturn import FP4Linear, known, matrix, random_hadamard
from test_linear import make

FP4_LINEAR = torch.ops.quarterturn.fp4_linear
TENSORS = {"codes": 0, "block scales": 1, "tensor scales": 2, "bias": 4, "input matrix": 6, "encode scale": 13}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each layer that was not known."""
    counted: list[int] = []
    keep = known.keep
    monkeypatch.setattr(known, "keep", lambda *a: counted.append(1) or keep(*a))
    return counted


def layer_of(backend: str = "cpu_native", **options: Any) -> FP4Linear:
    torch.manual_seed(1)
    turn = options.pop("turn", random_hadamard(16, seed=1))
    return make("nvfp4", sizes=(32, 16), input_transform=turn, backend=backend, **options)


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 96, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("backend", ["cpu_native", "any_torch"])
def test_a_layer_is_prepared_once(backend: str, kept: list[int]) -> None:
    layer = layer_of(backend)
    given = layer._operands()
    for x in (x_of(3), x_of(2, 3), x_of(100), x_of(3).t().contiguous().t()):
        assert_same_bits(FP4_LINEAR(x, *given), layer(x), "y")
    assert len(kept) == 1
    FP4_LINEAR(x_of(3).bfloat16(), *given)
    assert len(kept) == 2, "inputs of another dtype are another plan"


@pytest.mark.parametrize("backend", ["cpu_native", "any_torch"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_write_that_leaves_no_trace_is_seen(name: str, backend: str) -> None:
    layer, x = layer_of(backend, weights="packed"), x_of(5)
    given = list(layer._operands())
    before, tensor = FP4_LINEAR(x, *given), given[TENSORS[name]]
    if name in ("codes", "block scales"):
        tensor.data.copy_(tensor.roll(1, 0))
    else:
        tensor.data[0] *= -2 if name == "input matrix" else 3
    after = FP4_LINEAR(x, *given)
    assert not torch.equal(after, before)
    fresh = [t.clone() if isinstance(t, torch.Tensor) else t for t in given]
    assert_same_bits(after, FP4_LINEAR(x, *fresh), "y")


@pytest.mark.parametrize(
    ("place", "value"), [(3, [16, 32]), (4, None), (7, 0.5), (8, True), (12, False), (14, "token"), (16, "any_torch")]
)
def test_other_arguments_are_another_layer(place: int, value: Any, kept: list[int]) -> None:
    turn = matrix(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))
    given = list(layer_of(turn=turn)._operands())
    x = x_of(5)
    before = FP4_LINEAR(x, *given)
    given[place] = value
    after = FP4_LINEAR(x, *given)
    assert len(kept) == 2
    # The two backends compute the same here, but the second must be asked.
    assert place == 16 or not torch.equal(after, before)


def test_what_does_not_fit_is_refused_as_the_first_time() -> None:
    given = layer_of()._operands()
    FP4_LINEAR(x_of(3), *given)
    with pytest.raises(ValueError, match="fp4_linear"):
        FP4_LINEAR(x_of(3)[:, :80], *given)
    with pytest.raises(ValueError, match="dtype"):
        FP4_LINEAR(x_of(3).double(), *given)


def test_a_layer_is_forgotten_with_its_weight() -> None:
    gc.collect()
    before = len(known._KNOWN)
    layer = layer_of()
    FP4_LINEAR(x_of(3), *layer._operands())
    assert len(known._KNOWN) == before + 1
    del layer
    gc.collect()
    assert len(known._KNOWN) == before


def test_a_compiled_model_finds_its_layers(kept: list[int]) -> None:
    layers = torch.nn.Sequential(layer_of(), torch.nn.Linear(48, 96), layer_of()).requires_grad_(False)
    compiled = torch.compile(layers, backend="aot_eager")
    with torch.inference_mode():
        want = layers(x_of(3))
        for _ in range(3):
            assert_same_bits(compiled(x_of(3)), want, "y")
    assert len(kept) == 2
