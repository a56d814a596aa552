"""What the error of a whole layer cannot show: a wrong factor, and single rows that are not the original's.

S (N, K) is the original turned as declared, W' the stored weight, Q our own rounding of S to the format, and y the
relative error |Q - S| / |S|.

Factor. With W' = f (S + e), the least-squares factor <W', S> / <S, S> is f (1 + <e, S>/|S|^2). Rounding leaves e
orthogonal to S, or, where each code is the mean of what it stands for, to S + e: the second term is then between
-|e|^2/|S|^2 and 0, the square of the relative error, plus a random part of at most |e| / |S| * sqrt(sum S^4) / |S|^2
(one standard deviation, errors proportional to values). Clipping moves Q in the same way, so <W', S> / <Q, S> is
taken. A factor is wrong when it is off by more than

    error^2 + 2 y^2 + 4 error sqrt(sum S^4) / |S|^2        0.03 (NVFP4) to 0.04 (MXFP4) for layers of real size

Rows. Row i is wrong when |W'_i / f - S_i| is more than 2.5 times the larger of |Q_i - S_i| and y |S_i|; for
checkpoints made by other roundings, 2.5 times what is typical of the layer, but never more than 0.8 |S_i|: an unrelated
row is at 1.4, an empty one at 1. Or when its own factor is off by the bound above (6 deviations instead of 4, for
there are many rows). Columns are judged otherwise (columns.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FITS, _RULED_OUT = 2.5, 0.8
# Values below this share of the largest are under the smallest scales of NVFP4, also where layers share a tensor scale
# that one of them needs 16 times as large: 6 * 2^-10 / (448 * 6) * 16.
_FLOOR = 2.0**-15
_SOURCES = 256


@dataclass(frozen=True)
class Rows:
    """factor: of the stored weight over the original, and by how much rounding may move it; wrong: row numbers;
    worst: the largest relative error of those; fits: whether the other rows are near enough to judge by."""

    factor: float
    tolerance: float
    wrong: tuple[int, ...]
    worst: float
    fits: bool

    @property
    def scaled(self) -> bool:
        return abs(self.factor - 1) > self.tolerance


def examine(stored: Tensor, expected: Tensor, rounded: Tensor, yardstick: float) -> Rows:
    """Compare W' row by row with S and Q, all fp32 (N, K), S not zero everywhere."""
    amax = float(expected.abs().max())
    w, s, q = stored / amax, expected / amax, rounded / amax
    inner, inner_q = _sum(w * s), _sum(q * s)
    square, fourth = _sum(s * s), _sum(s.pow(4))
    seen = (inner_q > 0) & (square > 0)
    factors = torch.where(seen, inner / inner_q, torch.nan)
    middle = float(factors.nanmedian())
    if not abs(middle) > 0:
        return Rows(middle, 0.0, tuple(range(len(w))), float("inf"), False)
    norm, off_q = square.sqrt(), _sum((q - s).square()).sqrt()
    off = _sum((w / middle - s).square()).sqrt()
    typical = max(1.0, float((off / torch.maximum(off_q, yardstick * norm)).nanmedian()))
    allowed = torch.maximum(_FITS * off_q, min(_FITS * typical * yardstick, _RULED_OUT) * norm)
    wrong = off > allowed + _FLOOR * w.shape[1] ** 0.5
    good = seen & ~wrong
    if not bool(good.any()):
        return Rows(middle, 0.0, tuple(range(len(w))), float("inf"), False)
    factor = float(inner[good].sum() / inner_q[good].sum())
    total = float(square[good].sum())
    error = float(off[good].square().sum()) ** 0.5 / total**0.5
    spread = error * float(fourth[good].sum()) ** 0.5 / total
    tolerance = error**2 + 2 * yardstick**2 + 4 * spread
    # The error of a row at its own best factor, so that a row's factor does not excuse itself.
    own = (1 - inner.square() / (square * _sum(w * w))).clamp(min=0)
    bound = own + 2 * yardstick**2 + 6 * (own * fourth).sqrt() / square
    wrong |= good & ((factors / factor - 1).abs() > bound)
    numbers = tuple(wrong.nonzero()[:, 0].tolist())
    relative = (off / norm)[wrong]
    worst = float(relative.max()) if numbers else 0.0
    return Rows(factor, tolerance, numbers, worst, typical <= _FITS)


def sources(stored: Tensor, expected: Tensor, wrong: tuple[int, ...]) -> dict[int, int]:
    """Which row of the original some of the wrong rows hold instead, of those (the first 256) that hold one."""
    numbers = torch.tensor(wrong[:_SOURCES], device=stored.device)
    ours = torch.nn.functional.normalize(stored[numbers], dim=1)
    theirs = torch.nn.functional.normalize(expected, dim=1)
    cosine, row = (ours @ theirs.T).max(dim=1)
    found = zip(numbers.tolist(), row.tolist(), cosine.tolist(), strict=True)
    # A rounding error of 2.5 * 0.12 is a cosine of 0.95; unrelated rows are near 0.
    return {own: other for own, other, c in found if c > 0.9 and own != other}


def listed(numbers: tuple[int, ...] | list[int], what: str = "row", most: int = 8) -> str:
    """'rows 3, 17 and 40 more'."""
    shown = ", ".join(str(n) for n in numbers[:most])
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def _sum(values: Tensor) -> Tensor:
    return values.sum(dim=1, dtype=torch.float64)
