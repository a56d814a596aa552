"""A wide +-1 matrix as the product that it is: diag(left) (F1 x F2 x ... x Fn) diag(right), x Kronecker's product.

Sylvester's matrices, their products with a small Hadamard matrix in any order, and either with signs at the rows, the
columns or both, are of this form. A row of R values then takes R (f1 + f2 + ...) multiplications instead of R^2.

A +-1 matrix M is diag(M[:, 0]) N diag(M[0, 0] M[0, :]) for the N whose first row and column are 1, which fixes the
signs. Such an N is A x B, B of order b, only for B = N[:b, :b] and A = N[::b, ::b], which fixes the factors; whether it
is, is compared entry by entry. Nothing is estimated, so a matrix one entry off has no factors and stays dense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .kept import Kept

WIDE = 256
"""The order from which on backends rotate by factors: below, one dense product is as fast, or faster."""
PASS = 32
"""What a product over all values costs beside its multiplications, in multiplications a value (AVX2, float64)."""
ENTRIES = 1 << 20
"""Entries of a matrix that are looked at together: their copies stay in a cache."""


@dataclass(frozen=True, eq=False)
class Factors:
    """left, right: float64 (R,) of +-1. parts: float64 (f, f) of +-1, the outermost first, none a Kronecker product,
    the first row and column of each 1. merged: the same product in fewer factors, as many as are fastest.
    is_sylvester: whether that product, without the signs, is Sylvester's matrix."""

    left: Tensor
    right: Tensor
    parts: tuple[Tensor, ...]
    merged: tuple[Tensor, ...]
    is_sylvester: bool

    def transposed(self) -> Factors:
        """Those of the transposed matrix."""
        parts, merged = (tuple(f.T for f in factors) for factors in (self.parts, self.merged))
        return Factors(self.right, self.left, parts, merged, self.is_sylvester)

    def rotate(self, x: Tensor, factor: float) -> Tensor:
        """x (m, K) -> x @ (factor * matrix) per block of R, float64 (m, K), summed in float64; a zero is +0."""
        size, values = len(self.left), x.numel()
        z, inner = x.reshape(values // size, size) * self.left, size
        for f in self.merged:
            inner //= len(f)
            groups = values // (len(f) * inner)
            z = f.T @ z.view(groups, len(f), inner) if inner > 1 else z.view(groups, len(f)) @ f
        return z.view(-1, size).mul_(self.right * factor).add_(0.0).view(x.shape)


def factors_of(matrix: Tensor) -> Factors | None:
    """The factors of a matrix (R, R), kept beside it; None where it has none.

    While a CUDA graph is being captured nothing can be looked at: a matrix that was not met before has none there.
    """
    made = _KEPT.of(matrix)
    if "factors" not in made:
        if matrix.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        made["factors"] = factorize(matrix)
    factors: Factors | None = made["factors"]
    return factors


_KEPT = Kept()


def factorize(matrix: Tensor) -> Factors | None:
    """The factors of a matrix (R, R), whose product is the matrix bit for bit; None where there are not two or more.

    Reads R^2 entries once, or a few times for a matrix that has factors, and needs a byte for each of them meanwhile.
    """
    rest = _signs(matrix.detach())
    if rest is None or len(rest) == 1:
        return None
    left, right = rest[:, 0].clone(), rest[0] * rest[0, 0]
    rest.mul_(left.view(-1, 1)).mul_(right)
    found: list[Tensor] = []
    while len(rest) > 1:
        rest, part = _split(rest)
        if len(part) == len(matrix):
            return None
        found.insert(0, part.double())
    sylvester = all(len(part) == 2 and float(part[1, 1]) == -1 for part in found)
    return Factors(left.double(), right.double(), tuple(found), tuple(_merged(found)), sylvester)


def _signs(matrix: Tensor) -> Tensor | None:
    """A +-1 matrix as int8; None for others."""
    size = len(matrix)
    signs = torch.empty(size, size, dtype=torch.int8, device=matrix.device)
    step = max(1, ENTRIES // size)
    for start in range(0, size, step):
        rows = matrix[start : start + step].float()
        if not bool((rows.abs() == 1).all()):
            return None
        signs[start : start + step] = rows
    return signs


def _split(n: Tensor) -> tuple[Tensor, Tensor]:
    """(A, B) with n = A x B, B the smallest of order over 1, and so no product itself; B is n where there is none.

    The first row and column of n are 1.
    """
    size = len(n)
    for order in range(2, size // 2 + 1):
        if size % order == 0:
            outer, inner = n[::order, ::order], n[:order, :order]
            if _is_product(n, outer, inner):
                return outer.contiguous(), inner.contiguous()
    return n.new_ones(1, 1), n


def _is_product(n: Tensor, outer: Tensor, inner: Tensor) -> bool:
    """Whether n = outer x inner, where the first row of outer is 1."""
    size, a, b = len(n), len(outer), len(inner)
    if not torch.equal(n[1], inner[1].repeat(a)):  # nearly all that are not differ here already
        return False
    repeated, groups = inner.repeat(1, a), n.view(a, b, size)
    step = max(1, ENTRIES // (b * size))
    for start in range(0, a, step):
        rows = slice(start, start + step)
        spread = outer[rows].repeat_interleave(b, 1)
        if not torch.equal(groups[rows], spread.unsqueeze(1) * repeated):
            return False
    return True


def _merged(parts: list[Tensor]) -> list[Tensor]:
    """Neighbours multiplied together where one pass over the values is faster than two."""
    best: list[tuple[int, list[int]]] = [(0, [])]  # for the first i parts: the cost, and where its factors begin
    for end in range(1, len(parts) + 1):
        orders = [math.prod(map(len, parts[start:end])) for start in range(end)]
        best.append(min((best[start][0] + orders[start] + PASS, [*best[start][1], start]) for start in range(end)))
    starts = [*best[-1][1], len(parts)]
    return [_product(parts[start:end]) for start, end in pairwise(starts)]


def _product(parts: list[Tensor]) -> Tensor:
    product = parts[0]
    for part in parts[1:]:
        product = torch.kron(product, part)
    return product.contiguous()
