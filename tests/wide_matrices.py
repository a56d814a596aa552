"""Wide +-1 matrices that are Kronecker products, for tests."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from quarterturn import hadamard
from quarterturn.backends.factors import Factors


def signs(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape).float() * 2 - 1


def small(order: int) -> Tensor:
    """A Hadamard matrix in fp32; of 172, which Paley's constructions leave out, signs at random: as good a factor."""
    return signs(order, order) if order == 172 else hadamard(order).matrix.float()


def product(*orders: int, signed: bool = True) -> Tensor:
    """The Kronecker product of small matrices, the first order outermost; signed: with signs at rows and columns."""
    entries = reduce(torch.kron, map(small, orders))
    return entries.mul_(signs(len(entries), 1)).mul_(signs(len(entries))) if signed else entries


def factors(*orders: int, signed: bool = True) -> Factors:
    """The factors of such a matrix, which need not be made itself; powers of two by factors of order 2."""
    parts = [small(order).double() for order in spread(orders)]
    size = math.prod(map(len, parts))
    left, right = (signs(size).double() if signed else torch.ones(size, dtype=torch.float64) for _ in range(2))
    return Factors(left, right, tuple(parts), tuple(parts), all(len(part) == 2 for part in parts))


def spread(orders: tuple[int, ...]) -> list[int]:
    """Powers of two as as many twos."""
    return [n for order in orders for n in ([2] * (order.bit_length() - 1) if order & (order - 1) == 0 else [order])]


def by_factors(x: Tensor, made: Factors, transpose: bool = False) -> Tensor:
    """x (M, R) times the matrix of these factors: float64, one factor after the other."""
    first, last = (made.right, made.left) if transpose else (made.left, made.right)
    z, inner = x.double() * first, len(first)
    for part in made.parts:
        inner //= len(part)
        side = part.T if transpose else part
        z = torch.einsum("adi,de->aei", z.reshape(-1, len(part), inner), side)
    return z.reshape(x.shape) * last
