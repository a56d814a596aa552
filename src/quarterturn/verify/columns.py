"""Single columns of a layer that have nothing to do with the original's.

S (N, K) is the original turned as declared, W' the stored weight over its factor. However a weight was rounded, W' is
S + e with an e that has little to do with S, so that

    p = <W'_j, S_j> / |S_j|^2

is near 1 for every column j, and near 0, by |W'_j| / (|S_j| sqrt N) one way or the other, for one that is not the
original's. GPTQ moves errors into columns that hardly matter, which makes e large and leaves p, and may well empty
them: columns that became much smaller are not judged, nor are those that were small. A column is wrong when p is below
0.5 and six of those deviations below 1: another column of the same size is told from some 64 rows on.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL, _EMPTIED = 0.25, 0.5


def unrelated(stored: Tensor, expected: Tensor, factor: float) -> tuple[int, ...]:
    """The numbers of the columns of the stored weight (N, K) that are large and not those of S."""
    size, own = _sum(expected * expected).sqrt(), _sum(stored * stored).sqrt() / abs(factor)
    judged = (size > _SMALL * size.median()) & (own > _EMPTIED * size) & (size > 0)
    missing = 1 - _sum(stored * expected) / (factor * size.square())
    deviation = own / (size * len(stored) ** 0.5)
    wrong = judged & (missing > 0.5) & (missing > 6 * deviation)
    return tuple(torch.nonzero(wrong)[:, 0].tolist())


def _sum(values: Tensor) -> Tensor:
    return values.sum(dim=0, dtype=torch.float64)
