"""Single columns of a layer that have nothing to do with the original's.

S (N, K) is the original turned as declared, W' the stored weight over its factor. However a weight was rounded, W' is
S + e with an e that has little to do with S, so that

    p = <W'_j, S_j> / |S_j|^2

is near 1 for every column j, and near 0, by |W'_j| / (|S_j| sqrt N) one way or the other, for one that is not the
original's. GPTQ moves errors into columns that hardly matter, which makes e large and leaves p, and may well empty
them: columns that became much smaller are not judged, nor are those that were small. A column is wrong when p is below
0.5 and six of those deviations below 1; N has to be 144 or more for that to happen to one of its own size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL, _EMPTIED = 0.25, 0.5


def unrelated(stored: Tensor, expected: Tensor, factor: float) -> tuple[int, ...]:
    """The numbers of the columns of W' (N, K) that are large and not those of S."""
    w, s = stored.double() / factor, expected.double()
    size, own = s.norm(dim=0), w.norm(dim=0)
    judged = (size > _SMALL * size.median()) & (own > _EMPTIED * size) & (size > 0)
    missing = 1 - (w * s).sum(0) / size.square()
    deviation = own / (size * len(s) ** 0.5)
    wrong = judged & (missing > 0.5) & (missing > 6 * deviation)
    return tuple(torch.nonzero(wrong)[:, 0].tolist())
