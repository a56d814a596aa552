"""The weighted sum of routed experts, without an engine: by all tokens as in a CUDA graph, and by those of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comparing import assert_same_bits
from quarterturn.integrations.vllm.routing import weighted_sum

COUNT, TOP = 6, 3


def routed(dtype: torch.dtype) -> tuple[list[Callable[[Tensor], Tensor]], Tensor, Tensor, Tensor]:
    """Experts whose rows do not depend on one another, tokens, fp32 weights, and ids, some of other ranks' experts."""
    scales = torch.rand(COUNT, 64) + 0.5
    experts = [lambda x, s=s: (x.float() * s).to(x.dtype) for s in scales]
    ids = torch.stack([torch.randperm(COUNT + 2)[:TOP] for _ in range(200)])
    ids[ids >= COUNT] = -1
    return experts, torch.randn(200, 64).to(dtype), torch.rand(200, TOP).softmax(-1), ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_captured_step_gives_the_bits_of_the_loop(dtype: torch.dtype) -> None:
    """A weight is not rounded by itself, and the product once: in bf16 rounding both moves a third of the results."""
    given = routed(dtype)
    experts, x, weights, ids = given
    got = weighted_sum(*given, dense=True)
    assert got.dtype == dtype
    assert_same_bits(got, weighted_sum(*given, dense=False))
    twice = weighted_sum(experts, x, weights.to(dtype), ids, dense=True)
    assert torch.equal(got, twice) == (dtype == torch.float32)


def test_it_is_the_sum_of_what_was_routed() -> None:
    experts, x, weights, ids = routed(torch.float32)
    want = torch.zeros_like(x, dtype=torch.float64)
    size = torch.zeros_like(want)
    for token in range(len(x)):
        for weight, index in zip(weights[token], ids[token].tolist(), strict=True):
            if index >= 0:
                term = weight.double() * experts[index](x[token]).double()
                want[token] += term
                size[token] += term.abs()
    for dense in (False, True):  # each term is rounded, and each sum but the first, which is to zero
        off = (weighted_sum(experts, x, weights, ids, dense).double() - want).abs()
        assert bool((off <= TOP * 2.0**-24 * size).all())


def test_an_expert_without_tokens_leaves_no_trace() -> None:
    """What it makes of tokens that are not its own may be no number."""
    experts, x, weights, ids = routed(torch.bfloat16)
    experts.append(lambda x: torch.full_like(x, float("nan")))
    for dense in (False, True):
        assert bool(weighted_sum(experts, x, weights, ids, dense).isfinite().all())
