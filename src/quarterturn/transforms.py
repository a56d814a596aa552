"""Block-diagonal transforms: the matrix that turns activations, and the one that is folded into weights.

Row-vector convention. A layer y = x W^T behind an input transform V runs as (x V)(W V^-T)^T: `x @ V` online, block by
block of R along K, and W V^-T stored. Behind an output transform U it runs as (x W'^T + b') U with W' = U^-T W and
b' = b U^-1 stored. V need not be orthogonal; where it is, V^-T = V.

The factor 1/sqrt(R) of a Hadamard stays apart from its +-1 entries: they are exact in any dtype, the factor is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from .errors import Refusal, refusal


@dataclass(frozen=True, repr=False, eq=False)
class Transform:
    """One (R, R) block, the same for every block along a dimension.

    matrix: float64 (R, R), as a file stores it.
    factor: multiplies the matrix; 1/sqrt(R) for a +-1 Hadamard matrix, 1 for others.
    transpose: the activation side uses the transposed matrix.
    """

    matrix: Tensor
    factor: float = 1.0
    transpose: bool = False
    _operands: dict[torch.device, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        m = self.matrix
        if m.dim() != 2 or m.shape[0] != m.shape[1] or m.shape[0] == 0:
            raise _bad_matrix("a square matrix (R, R)", f"shape {tuple(m.shape)}")
        # Everything that runs takes the matrix in fp32, where a large float64 is infinite.
        if not bool(torch.isfinite(m.to(torch.float32)).all()) or not math.isfinite(self.factor):
            amax = float(m.abs().max())
            raise _bad_matrix("entries that are finite in fp32", f"{amax:.1e}" if amax < math.inf else "NaN or Inf")
        object.__setattr__(self, "matrix", m.detach().to(torch.float64))

    @property
    def size(self) -> int:
        """R, the width of a block."""
        return self.matrix.shape[0]

    @property
    def is_signed(self) -> bool:
        """Whether every entry of the matrix is +1 or -1, so that it is exact in every dtype."""
        return bool((self.matrix.abs() == 1).all())

    def __repr__(self) -> str:
        kind = "signed" if self.is_signed else "dense"
        return f"Transform(size={self.size}, {kind}, factor={self.factor:g}, transpose={self.transpose})"

    def operand(self, device: torch.device) -> Tensor:
        """The matrix in fp32 on a device, as the ops take it (factor and direction apart); made once per device."""
        if device not in self._operands:
            # A tensor made in inference mode has no version, and backends could not keep what they make of it.
            with torch.inference_mode(False):
                self._operands[device] = self.matrix.detach().to(device=device, dtype=torch.float32)
        return self._operands[device]

    def activation_matrix(self) -> Tensor:
        """V, float64 (R, R): activations become x @ V."""
        return (self.matrix.T if self.transpose else self.matrix) * self.factor

    def weight_matrix(self) -> Tensor:
        """V^-T, float64 (R, R): stored weights are W @ V^-T. Raises Refusal where V has no inverse."""
        return _inverse(self.activation_matrix()).T.contiguous()

    @property
    def is_hadamard(self) -> bool:
        """Whether this is a +-1 matrix with orthogonal rows and the factor 1/sqrt(R): its inverse is its transpose."""
        m = self.matrix
        orthogonal = self.is_signed and torch.equal(
            m @ m.T, self.size * torch.eye(self.size, dtype=m.dtype, device=m.device)
        )
        return orthogonal and math.isclose(self.factor * math.sqrt(self.size), 1.0, rel_tol=1e-15)

    @property
    def is_invertible(self) -> bool:
        """Whether the matrix has an inverse, as it is and as fp32 holds it (1-norm condition number under 1e12)."""
        return _is_invertible(self.matrix) and _is_invertible(self.matrix.to(torch.float32).to(torch.float64))

    def inverse(self) -> Transform:
        """The transform that undoes this one on activations."""
        if self.is_hadamard:
            return replace(self, transpose=not self.transpose)
        return Transform(_inverse(self.activation_matrix()))

    def compose(self, other: Transform) -> Transform:
        """This one first, then `other`: x @ (V1 V2), multiplied in float64. The sizes are made equal by repetition."""
        size = math.lcm(self.size, other.size)
        left, right = (torch.block_diag(*[t.activation_matrix()] * (size // t.size)) for t in (self, other))
        return Transform(left @ right)

    def apply(self, x: Tensor) -> Tensor:
        """x @ V per block in float64; x (..., K) with K a multiple of R."""
        return _per_block(x, self.activation_matrix(), "transform")

    def fold_input_weight(self, weight: Tensor) -> Tensor:
        """W (N, K) -> W V^-T per block, float64: what is stored behind an input transform."""
        return _per_block(weight, self.weight_matrix(), "fold")

    def unfold_input_weight(self, weight: Tensor) -> Tensor:
        """The inverse of fold_input_weight: W' V^T, float64."""
        return _per_block(weight, self.activation_matrix().T, "unfold")

    def fold_output_weight(self, weight: Tensor) -> Tensor:
        """W (N, K) -> U^-T W per block of rows, float64: what is stored before an output transform."""
        return _per_block(weight.T, _inverse(self.activation_matrix()), "fold").T.contiguous()

    def unfold_output_weight(self, weight: Tensor) -> Tensor:
        """The inverse of fold_output_weight: U^T W', float64."""
        return _per_block(weight.T, self.activation_matrix(), "unfold").T.contiguous()

    def fold_output_bias(self, bias: Tensor) -> Tensor:
        """b (N,) -> b U^-1 per block, float64."""
        return _per_block(bias, _inverse(self.activation_matrix()), "fold")

    def unfold_output_bias(self, bias: Tensor) -> Tensor:
        """The inverse of fold_output_bias: b' U, float64."""
        return _per_block(bias, self.activation_matrix(), "unfold")


def matrix(values: Tensor | Sequence[Sequence[float]], factor: float = 1.0) -> Transform:
    """The transform x @ (factor * values) for any invertible (R, R) matrix. Raises Refusal for a singular one."""
    transform = Transform(
        torch.as_tensor(values, dtype=torch.float64, device=None if isinstance(values, Tensor) else "cpu"), factor
    )
    _inverse(transform.activation_matrix())
    return transform


def hadamard(size: int) -> Transform:
    """The deterministic Hadamard transform of an order, a +-1 matrix with the factor 1/sqrt(size).

    Orders: 2^k, and 2^k times a Paley order (q + 1 for a prime q = 3 mod 4, 2 (q + 1) for a prime q = 1 mod 4), which
    gives 12, 20, 24, 28, 36, 44, 48, ... Powers of two are Sylvester's matrix, which is symmetric; the others are
    Paley's times Sylvester's (Kronecker's product), which turns neighbours, as in QuIP's transforms. Paley's first kind
    (12, 20, 24, 44, ...) is not symmetric, the second (28, 36, ...) is.
    Raises Refusal for other orders and says the nearest that can be built. Source: Paley, "On orthogonal matrices",
    J. Math. Phys. 12 (1933).
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise refusal(
            "hadamard",
            "an order is a positive whole number.",
            needs=[("an int", repr(size))],
            do="pass an order such as 32, or make a transform from a matrix of your own",
        )
    entries = _hadamard_matrix(size)
    if entries is None:
        below = next(n for n in range(size - 1, 0, -1) if _paley_base(n) is not None)  # 1 and 2 are orders
        above = next(n for n in count(size + 1) if _paley_base(n) is not None)
        raise refusal(
            "hadamard",
            f"no Hadamard matrix of order {size} can be built.",
            needs=[("2^k, or 2^k times 12, 20, 28, 36, 44, ... (Paley's orders)", str(size))],
            do=f"take order {below} or {above}, a block that divides {size}, or give a matrix of your own",
        )
    return Transform(entries, 1 / math.sqrt(size))


def random_hadamard(size: int, seed: int = 0) -> Transform:
    """A Hadamard transform whose rows are multiplied by random signs: diag(s) H, not symmetric.

    seed: an int from -2^63 to 2^64 - 1. The same gives the same matrix on every machine. Raises Refusal for others, and
    for orders that `hadamard` cannot build.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise refusal(
            "random_hadamard",
            "the seed is none.",
            needs=[("an int from -2^63 to 2^64 - 1", repr(seed))],
            do="pass a number such as 0",
        )
    base = hadamard(size)
    generator = torch.Generator("cpu").manual_seed(seed)
    signs = torch.randint(0, 2, (size, 1), generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
    return replace(base, matrix=signs * base.matrix)


def _hadamard_matrix(size: int) -> Tensor | None:
    base = _paley_base(size)
    if base is None:
        return None
    doubled = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while base * len(doubled) < size:
        doubled = torch.cat((torch.cat((doubled, doubled), 1), torch.cat((doubled, -doubled), 1)))
    return torch.kron(_base_matrix(base), doubled)


def _paley_base(size: int) -> int | None:
    """The order that doubling starts from to reach `size`: 1, or the smallest Paley order; None where there is none."""
    halves = [size >> i for i in range(size.bit_length()) if size % (1 << i) == 0]
    if halves[-1] == 1:
        return 1
    return min((n for n in halves if _paley_prime(n) is not None), default=None)


def _paley_prime(order: int) -> tuple[int, int] | None:
    """(q, type) of Paley's construction: type 1 is q + 1 for q = 3 mod 4, type 2 is 2 (q + 1) for q = 1 mod 4."""
    if order % 4 == 0 and (order - 1) % 4 == 3 and _is_prime(order - 1):
        return order - 1, 1
    if order % 4 == 0 and (order // 2 - 1) % 4 == 1 and _is_prime(order // 2 - 1):
        return order // 2 - 1, 2
    return None


def _base_matrix(order: int) -> Tensor:
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64, device="cpu")
    prime = _paley_prime(order)
    assert prime is not None
    q, kind = prime
    residues = {(i * i) % q for i in range(1, q)}
    character = torch.tensor(
        [0.0] + [1.0 if i in residues else -1.0 for i in range(1, q)], dtype=torch.float64, device="cpu"
    )
    position = torch.arange(q, device="cpu")
    index = (position.view(-1, 1) - position) % q
    core = torch.zeros(q + 1, q + 1, dtype=torch.float64, device="cpu")
    core[1:, 1:] = character[index]
    core[0, 1:] = 1
    eye = torch.eye(q + 1, dtype=torch.float64, device="cpu")
    if kind == 1:
        core[1:, 0] = -1
        return eye + core
    core[1:, 0] = 1
    plus = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64, device="cpu")
    minus = torch.tensor([[1, -1], [-1, -1]], dtype=torch.float64, device="cpu")
    return torch.kron(core, plus) + torch.kron(eye, minus)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _inverse(m: Tensor) -> Tensor:
    gram = m @ m.T
    scale = float(gram[0, 0])
    eye = torch.eye(len(m), dtype=m.dtype, device=m.device)
    if scale > 0 and torch.allclose(gram / scale, eye, rtol=0, atol=1e-14):
        return m.T / scale
    inverse, info = torch.linalg.inv_ex(m)
    condition = float(torch.linalg.cond(m))
    if int(info) or not condition < 1e12:
        raise _bad_matrix("an invertible matrix (condition number under 1e12)", f"condition number {condition:.1e}")
    return inverse


def _is_invertible(m: Tensor) -> bool:
    """An orthogonal matrix of any size is known by what M M^T does to a few random vectors, without a product of
    matrices: one that is singular takes something of size 1 from them (after Freivalds, "Probabilistic machines can
    use less running time", 1977). Others are inverted."""
    generator = torch.Generator("cpu").manual_seed(0)
    probes = torch.randn(len(m), 8, generator=generator, dtype=m.dtype, device="cpu").to(m.device)
    scale = m[0].square().sum()
    if bool(scale > 0) and bool((m @ (m.T @ probes) / scale - probes).norm(dim=0).max() < 0.1):
        return True
    inverse, info = torch.linalg.inv_ex(m)
    condition = torch.linalg.matrix_norm(m, 1) * torch.linalg.matrix_norm(inverse, 1)
    return not int(info) and bool(condition < 1e12)


def _per_block(x: Tensor, block: Tensor, operation: str) -> Tensor:
    size = block.shape[0]
    if x.shape[-1] % size:
        raise refusal(
            operation,
            "the blocks do not divide the dimension.",
            needs=[(f"a dimension that is a multiple of {size}", str(x.shape[-1]))],
            do=f"take a transform size that divides {x.shape[-1]}",
        )
    blocks = x.to(torch.float64).reshape(*x.shape[:-1], -1, size)
    return (blocks @ block.to(x.device)).reshape(x.shape)


def _bad_matrix(needed: str, found: str) -> Refusal:
    return refusal(
        "transform",
        "this matrix cannot be a transform.",
        needs=[(needed, found)],
        do="give a finite invertible square matrix",
    )
