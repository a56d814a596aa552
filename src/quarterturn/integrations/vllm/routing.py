"""The weighted sum of routed experts, by a loop: each by its own tokens, or by all where nothing may depend on data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def weighted_sum(
    experts: Sequence[Callable[[Tensor], Tensor]], x: Tensor, weights: Tensor, ids: Tensor, dense: bool
) -> Tensor:
    """x (T, H), weights (T, top_k), ids (T, top_k) into `experts`, others of no one here -> (T, H) of x.dtype.

    dense: every expert gets every token and nothing depends on data, as a CUDA graph needs it; else those that have
    tokens get theirs. A result is multiplied by its weight in the wider dtype of the two and rounded to x.dtype once,
    so that both ways give the same bits where an expert gives a row the same bits.
    """
    total = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        if dense:
            chosen = ids == index
            share = (weights * chosen).sum(-1, keepdim=True)
            total += torch.where(chosen.any(-1, keepdim=True), (expert(x) * share).to(x.dtype), 0)
            continue
        tokens, position = torch.where(ids == index)
        if tokens.numel():
            total.index_add_(0, tokens, (expert(x[tokens]) * weights[tokens, position, None]).to(x.dtype))
    return total
