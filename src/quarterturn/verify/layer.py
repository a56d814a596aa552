"""Whether a checkpoint's weights carry the transforms that its config declares, layer by layer, against the original.

A layer declared with input transform V and output transform U must store W' = U^-T W V^-T, rounded to 4 bits. The
original W is turned as each hypothesis says (as declared, never, twice, the wrong way round, by another matrix of the
file or a plain Hadamard) and compared with the decoded weight:

    error = |c W' - S| / |S|     S: the original turned as the hypothesis says, c: the best single factor

The yardstick is the error of rounding the declared S to the format here, about 0.1. A right hypothesis comes near it
(checkpoints made with other roundings reach about twice), a wrong one comes near 1, because a rotated weight has
almost nothing in common with the weight. Where two different hypotheses fit, or the best is in between, the verdict is
"cannot tell". Where the declared one fits, the factor, the rows and the columns are looked at by themselves (rows.py,
columns.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import refusal
from ..formats import FP4Format
from ..quantize.rtn import round_to_nearest
from ..transforms import Transform
from .columns import unrelated
from .rows import Rows, examine, listed, sources

OK = "ok"
NEVER = "transform never applied"
TWICE = "transform applied twice"
REVERSED = "transform applied the wrong way round"
OTHER = "wrong matrix"
UNDECLARED = "transform not declared"
DIFFERENT = "another weight"
CANNOT_TELL = "cannot tell"
SCALED = "wrong factor"
ROWS = "wrong rows"
COLUMNS = "wrong columns"
BIAS = "bias on one side only"

# In units of the yardstick y, 0.09 to 0.12: a hypothesis fits below the first, and is ruled out above the second, or
# above 0.8. Rounding to nearest gives 1, GPTQ and tensor scales shared with a larger layer up to 2: with a quarter to
# spare. What shares a part c of its squared norm with the weight is at sqrt(1 - c): a wrong hypothesis, c = 0, at
# 1 / y = 8 to 11, and one at 5 y has c = 0.64 to 0.8, which neither a rounding nor another matrix leaves.
_FITS, _RULED_OUT = 2.5, 5.0
_ROWS = 256
# Four roundings to bf16, of 2^-8 each, the coarsest dtype of a file: of the bias, of the matrix, of their product in
# the producer's dtype, and of what is stored.
_BIAS_ERROR = 4 * 2.0**-8


@dataclass(frozen=True)
class LayerVerdict:
    """What a layer's weights show. error: of the best hypothesis; declared: of the declared one; yardstick: of
    rounding to the format; factor: of the stored weights over the original's; rows: those that are not the original's,
    where the verdict is about rows; so with columns."""

    layer: str
    verdict: str
    detail: str
    error: float
    declared: float
    yardstick: float
    factor: float = math.nan
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return self.verdict == OK


@dataclass(frozen=True)
class _Hypothesis:
    """One side of a layer: what may have been done to the weight, as a matrix that its blocks are multiplied by."""

    verdict: str
    detail: str
    matrix: Tensor | None


class _Tried(NamedTuple):
    """A pair of hypotheses with the error of its best factor."""

    error: float
    factor: float
    first: _Hypothesis
    second: _Hypothesis


Named = Mapping[str, Transform]


def check_layer(
    layer: str,
    decoded: Tensor,
    original: Tensor,
    format: FP4Format,
    input_transform: Transform | None = None,
    output_transform: Transform | None = None,
    others: Named | None = None,
) -> LayerVerdict:
    """Compare a decoded weight (N, K) with the original (N, K).

    others: further matrices by name that may have been used instead. Raises Refusal where the shapes differ.
    """
    if decoded.shape != original.shape:
        raise refusal(
            "verify",
            "the original's weight has another shape.",
            layer=layer,
            needs=[(str(tuple(decoded.shape)), str(tuple(original.shape)))],
            do="give the model that the checkpoint was made from",
        )
    if not bool(torch.isfinite(original).all() and torch.isfinite(decoded).all()):
        return LayerVerdict(layer, CANNOT_TELL, "a weight is not finite", math.nan, math.nan, math.nan)
    weight, stored = original.float(), decoded.float()
    inputs = _hypotheses("input", input_transform, weight.shape[1], others or {})
    outputs = _hypotheses("output", output_transform, weight.shape[0], others or {})
    # Whole blocks of rows are enough to tell the hypotheses apart; the two that matter are then measured in full.
    size = output_transform.size if output_transform is not None else 1
    rows = slice(0, -(-_ROWS // size) * size)

    def tried(first: _Hypothesis, second: _Hypothesis, rows: slice = rows) -> _Tried:
        return _Tried(*_distance(stored[rows], _turn(weight[rows], first.matrix, second.matrix)), first, second)

    declared = _turn(weight, inputs[0].matrix, outputs[0].matrix)
    rounded = round_to_nearest(declared, format).dequantize()
    yardstick = _distance(rounded, declared)[0]
    found = [tried(first, second) for first in inputs for second in outputs]
    nearest = min(found, key=lambda t: t.error)
    whole = slice(0, None)
    found = [tried(t.first, t.second, whole) if t is found[0] or t is nearest else t for t in found]
    if not math.isfinite(min(t.error for t in found)):
        return LayerVerdict(layer, CANNOT_TELL, "the weight is zero everywhere", math.inf, math.inf, yardstick)
    return _decide(layer, found, yardstick, examine(stored, declared, rounded, yardstick), stored, declared)


def check_bias(
    verdict: LayerVerdict, stored: Tensor, original: Tensor, output_transform: Transform | None = None
) -> LayerVerdict:
    """The verdict of a layer whose weight is as declared, with its bias (N,) looked at too: b U^-1 must be stored."""
    if stored.shape != original.shape:
        detail = f"the bias has the shape {tuple(stored.shape)}, the original's {tuple(original.shape)}"
        return replace(verdict, verdict=DIFFERENT, detail=detail)
    tried = []
    for side in _hypotheses("output", output_transform, len(original), {}):
        expected = _turn(original.double()[:, None], None, side.matrix)[:, 0]
        tried.append((float((stored.double() - expected).norm() / expected.norm().clamp(min=1e-30)), side))
    error, nearest = min(tried, key=lambda t: t[0])
    declared = tried[0][0]
    # A bias is not rounded to 4 bits, only to the file's dtype.
    if min(declared, error) > _BIAS_ERROR:
        return replace(verdict, verdict=DIFFERENT, detail=f"the bias is another one (error {declared:.3f})")
    if declared > _BIAS_ERROR:
        return replace(verdict, verdict=nearest.verdict, detail=f"bias, {nearest.detail}")
    return verdict


def _decide(
    layer: str, tried: list[_Tried], yardstick: float, rows: Rows, stored: Tensor, expected: Tensor
) -> LayerVerdict:
    declared = tried[0].error
    error, _, first, second = min(tried, key=lambda t: t.error)
    near = [t for t in tried if t.error <= max(error * 1.5, error + yardstick / 2)]
    wrong = [side for side in (first, second) if side.verdict != OK]

    def verdict(
        text: str, detail: str, wrong_rows: tuple[int, ...] = (), wrong_columns: tuple[int, ...] = ()
    ) -> LayerVerdict:
        return LayerVerdict(
            layer, text, detail, error, declared, yardstick, rows.factor, wrong_rows, wrong_columns
        )  # fmt: skip

    if not wrong and (columns := _wrong_columns(stored, expected, rows.factor, _FITS * yardstick)):
        return verdict(COLUMNS, f"{listed(columns, 'column')} of {stored.shape[1]}: not the original's", (), columns)
    if error > _FITS * yardstick:
        if found := _wrong_rows(rows, stored, expected):
            return verdict(ROWS, found, rows.wrong)
        if error <= min(_RULED_OUT * yardstick, 0.8):
            detail = f"nearest: {_describe(first, second)}, but farther than rounding explains"
            return verdict(CANNOT_TELL, detail)
        if tried[0].first.matrix is None and tried[0].second.matrix is None:
            return verdict(DIFFERENT, "no transform is declared, and no Hadamard tried explains the difference")
        return verdict(OTHER, "none of the hypotheses fits: another matrix, or another original")
    if len(near) > 1:
        names = " or ".join(sorted({_describe(t.first, t.second) for t in near}))
        return verdict(CANNOT_TELL, f"these fit equally: {names}")
    if wrong:
        return verdict(wrong[0].verdict, _describe(first, second))
    if rows.scaled:
        return verdict(SCALED, f"the weights are {rows.factor:.3g} times as large as the original's")
    if rows.wrong:
        return verdict(ROWS, _wrong_rows(rows, stored, expected) or listed(rows.wrong), rows.wrong)
    return verdict(OK, _describe(first, second))


def _wrong_columns(stored: Tensor, expected: Tensor, factor: float, fits: float) -> tuple[int, ...]:
    """Columns that are not the original's, where the error of all others is at most `fits`."""
    columns = unrelated(stored, expected, factor) if abs(factor) > 0 else ()
    if not columns or len(columns) == stored.shape[1]:
        return ()
    rest = torch.ones(stored.shape[1], dtype=torch.bool, device=stored.device)
    rest[list(columns)] = False
    return columns if _distance(stored[:, rest], expected[:, rest])[0] <= fits else ()


def _wrong_rows(rows: Rows, stored: Tensor, expected: Tensor) -> str | None:
    """What is the matter with single rows; None where the layer as a whole is another one."""
    if not rows.wrong:
        return None
    held = sources(stored, expected, rows.wrong)
    if rows.fits and len(rows.wrong) <= len(stored) / 2:
        text = f"{listed(rows.wrong)} of {len(stored)}: not the original's (error up to {rows.worst:.2f})"
        swaps = [f"row {own} holds row {other}" for own, other in list(held.items())[:4]]
        return "; ".join([text, *swaps])
    # Unrelated weights hold no row of the original at all.
    if len(held) > 0.9 * min(len(rows.wrong), 256):
        own, other = next(iter(held.items()))
        return f"the rows stand in another order: row {own} holds row {other}"
    return None


def _describe(first: _Hypothesis, second: _Hypothesis) -> str:
    return ", ".join(side.detail for side in (first, second) if side.detail) or "no transform"


def _hypotheses(side: str, transform: Transform | None, width: int, others: Named) -> list[_Hypothesis]:
    """What may have happened on one side, the declared first; equal matrices are one hypothesis with both names."""
    if transform is None:
        found = [_Hypothesis(OK, "", None)]
        strange = UNDECLARED
    else:
        v, w = transform.activation_matrix(), transform.weight_matrix()
        if side == "output":
            # _turn multiplies rows from the left: U^-T W = (W^T U^-1)^T.
            v, w = v.T, w.T
        found = [
            _Hypothesis(OK, f"{side}: as declared", w),
            _Hypothesis(NEVER, f"{side}: never applied", torch.eye(len(w), dtype=w.dtype, device=w.device)),
            _Hypothesis(TWICE, f"{side}: applied twice", w @ w),
            _Hypothesis(REVERSED, f"{side}: transposed", w.T),
            _Hypothesis(REVERSED, f"{side}: not inverted", v),
            _Hypothesis(REVERSED, f"{side}: inverted and transposed", v.T),
        ]
        strange = OTHER
    if side == "input":
        for name, other in others.items():
            if width % other.size == 0:
                found.append(_Hypothesis(strange, f"{side}: {name}", other.weight_matrix()))
    return _merged(found)


def _merged(found: list[_Hypothesis]) -> list[_Hypothesis]:
    kept: list[_Hypothesis] = []
    for new in found:
        for index, old in enumerate(kept):
            if _same(old.matrix, new.matrix):
                # A symmetric Hadamard applied twice is no transform: say both, but the declared case stays plain "ok".
                if old.verdict not in (OK, new.verdict) and new.verdict in (NEVER, TWICE, REVERSED):
                    kept[index] = _Hypothesis(
                        f"{old.verdict}, or {new.verdict.removeprefix('transform ')}",
                        f"{old.detail} or {new.detail.split(': ')[-1]} (the same for this matrix)",
                        old.matrix,
                    )
                break
        else:
            kept.append(new)
    return kept


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    size = math.lcm(len(a), len(b))
    wide = [torch.block_diag(*[m] * (size // len(m))) for m in (a, b)]
    return bool(torch.allclose(wide[0], wide[1], atol=1e-6))


def _turn(weight: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
    """W -> blocks of K multiplied by `first`, blocks of N by `second`: S = second^T W first."""
    if first is not None:
        weight = (weight.unflatten(-1, (-1, len(first))) @ first.to(weight)).flatten(-2)
    if second is not None:
        weight = (weight.T.unflatten(-1, (-1, len(second))) @ second.to(weight)).flatten(-2).T
    return weight


def _distance(stored: Tensor, expected: Tensor) -> tuple[float, float]:
    """The error of the best multiple of `stored`, and that factor; not finite where one of them is zero."""
    inner, square = float((stored * expected).sum()), float(stored.square().sum())
    norm = float(expected.square().sum())
    if square == 0 or norm == 0:
        return math.inf, math.nan
    factor = inner / square
    return float((factor * stored - expected).norm()) / math.sqrt(norm), factor
