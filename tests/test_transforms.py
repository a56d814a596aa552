"""Transforms: makers, both directions, folding into weights and bias, composition; expected values from numpy."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest
import torch

import by_hand
from comparing import assert_refused
from quarterturn import Refusal, Transform, hadamard, matrix, random_hadamard


def random_matrix(size: int) -> torch.Tensor:
    """Random and far from orthogonal, with a condition number below 10: fair to compare after an inverse."""
    q, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    p, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    return q @ torch.diag(torch.linspace(0.5, 4.0, size, dtype=torch.float64)) @ p


def close(got: torch.Tensor, want: np.ndarray, tolerance: float = 1e-12) -> None:
    assert got.dtype == torch.float64, f"folding is float64, got {got.dtype}"
    # Sums of up to 128 float64 products, and an inverse of condition below 10: 128 * 10 * 2^-53 = 1.4e-13.
    assert np.abs(got.numpy() - want).max() <= tolerance * np.abs(want).max()


TRANSFORMS = {
    "hadamard16": lambda: hadamard(16),
    "random_hadamard32": lambda: random_hadamard(32, seed=3),
    "random_hadamard32 transposed": lambda: dataclasses.replace(random_hadamard(32, seed=3), transpose=True),
    "matrix32": lambda: matrix(random_matrix(32)),
    "matrix48 transposed": lambda: Transform(random_matrix(48), 1.0, True),
    "matrix with a factor": lambda: matrix(random_matrix(32), factor=0.25),
}
every_transform = pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS.keys())


# ---- makers


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_hadamard_of_a_power_of_two(size: int) -> None:
    h = hadamard(size)
    assert h.size == size
    assert h.is_signed
    assert not h.transpose
    assert h.matrix.dtype == torch.float64
    assert h.factor == 1 / math.sqrt(size), "the factor stays apart, in float64"
    np.testing.assert_array_equal(h.matrix.numpy(), by_hand.sylvester(size))


def test_hadamard_orders_that_cannot_be() -> None:
    for size in (3, 5, 6, 7, 10, 14, 18, 22, 0, -4):
        text = assert_refused(lambda size=size: hadamard(size), str(size))
        assert "matrix" in text or "random" in text or "128" in text, f"says no way out: {text}"


@pytest.mark.parametrize("size", [16.0, "16", None])
def test_an_order_that_is_no_integer_is_refused(size: object) -> None:
    with pytest.raises((ValueError, TypeError), match="hadamard"):
        hadamard(size)


def test_every_order_is_orthogonal_or_refused_saying_which_can() -> None:
    # Neither 2^k (q + 1) nor 2^k 2 (q + 1) of a prime q that Paley's constructions take, see hadamard().
    out_of_reach = {52, 92, 100, 116, 156, 172, 184, 188, 232, 236, 244}
    for size in range(4, 257, 4):
        if size in out_of_reach:
            assert_refused(lambda size=size: hadamard(size), str(size))
            continue
        h = hadamard(size)
        assert set(h.matrix.unique().tolist()) == {-1.0, 1.0}
        assert h.factor == 1 / math.sqrt(size)
        np.testing.assert_array_equal((h.matrix @ h.matrix.T).numpy(), size * np.eye(size))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_random_hadamard(size: int) -> None:
    h = random_hadamard(size, seed=7)
    assert h.is_signed
    assert h.size == size
    assert h.factor == 1 / math.sqrt(size)
    np.testing.assert_array_equal((h.matrix @ h.matrix.T).numpy(), size * np.eye(size))
    assert not torch.equal(h.matrix, h.matrix.T), "a random Hadamard must not be assumed symmetric"
    assert torch.equal(h.matrix, random_hadamard(size, seed=7).matrix), "the seed fixes it"
    assert not torch.equal(h.matrix, random_hadamard(size, seed=8).matrix)


def test_random_hadamard_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    random_hadamard(32, seed=5)
    assert torch.equal(torch.rand(3), want)


def test_matrix_is_kept_as_it_is() -> None:
    m = random_matrix(32).float()
    t = matrix(m)
    assert t.factor == 1.0
    assert not t.is_signed
    assert t.size == 32
    assert t.matrix.dtype == torch.float64
    assert torch.equal(t.matrix, m.double())
    assert not matrix(torch.eye(16)).is_signed


@pytest.mark.parametrize(
    "bad",
    [torch.ones(4, 8), torch.ones(4), torch.full((4, 4), float("nan")), torch.eye(4) * float("inf"), torch.zeros(0, 0)],
    ids=["not square", "1-D", "nan", "inf", "empty"],
)
def test_matrix_refuses(bad: torch.Tensor) -> None:
    assert_refused(lambda: matrix(bad))


def test_a_singular_matrix_has_no_weight_side() -> None:
    assert_refused(lambda: matrix(torch.ones(4, 4)).fold_input_weight(torch.randn(2, 4)))


# ---- directions


def test_the_four_by_four_case_both_ways() -> None:
    m = torch.from_numpy(np.kron(np.eye(4), by_hand.four_by_four()))
    e0 = torch.zeros(1, 16)
    e0[0, 0] = 1
    assert matrix(m).apply(e0)[0, :4].tolist() == [0.5, 0.5, 0.5, 0.5]
    assert Transform(m, 1.0, True).apply(e0)[0, :4].tolist() == [0.5, -0.5, 0.5, 0.5]


@every_transform
def test_sides_and_inverse(make) -> None:
    t = make()
    side = (t.matrix.T if t.transpose else t.matrix).numpy() * t.factor
    close(t.activation_matrix(), side)
    close(t.weight_matrix(), np.linalg.inv(side).T)
    close(t.inverse().activation_matrix(), np.linalg.inv(side))
    x = torch.randn(3, 96)
    if 96 % t.size == 0:
        close(t.apply(x), by_hand.rotate(x.numpy(), side))
        close(t.inverse().apply(t.apply(x)), x.double().numpy())


def test_the_inverse_of_a_hadamard_is_its_transpose_and_stays_signed() -> None:
    back = random_hadamard(32, seed=3).inverse()
    assert back.is_signed
    assert back.factor == 1 / math.sqrt(32)
    want = random_hadamard(32, seed=3).matrix.T
    assert torch.equal(back.matrix.T if back.transpose else back.matrix, want)


@every_transform
def test_the_input_side_cancels(make) -> None:
    """x V (W V^-T)^T = x W^T, for orthogonal V and for any other, and unfolding gives W back."""
    t = make()
    k = 2 * t.size
    x, w = torch.randn(5, k, dtype=torch.float64), torch.randn(7, k)
    side = t.activation_matrix().numpy()
    folded = t.fold_input_weight(w)
    close(folded, by_hand.rotate(w.numpy(), np.linalg.inv(side).T))
    close(torch.from_numpy(by_hand.rotate(x.numpy(), side)) @ folded.T, x.numpy() @ w.double().numpy().T)
    close(t.unfold_input_weight(folded), w.double().numpy())


@every_transform
def test_the_output_side_cancels_with_its_bias(make) -> None:
    """(x W'^T + b') U = x W^T + b with W' = U^-T W and b' = b U^-1."""
    t = make()
    n, k = 2 * t.size, 24
    x, w, b = torch.randn(5, k, dtype=torch.float64), torch.randn(n, k), torch.randn(n)
    side = t.activation_matrix().numpy()
    inverse = np.kron(np.eye(2), np.linalg.inv(side))
    w_folded, b_folded = t.fold_output_weight(w), t.fold_output_bias(b)
    close(w_folded, inverse.T @ w.double().numpy())
    close(b_folded, b.double().numpy() @ inverse)
    y = by_hand.rotate((x @ w_folded.T + b_folded).numpy(), side)
    close(torch.from_numpy(y), x.numpy() @ w.double().numpy().T + b.double().numpy())
    close(t.unfold_output_weight(w_folded), w.double().numpy())


def test_compose_is_self_first() -> None:
    first, second = TRANSFORMS["random_hadamard32 transposed"](), TRANSFORMS["matrix with a factor"]()
    x = torch.randn(3, 64, dtype=torch.float64)
    want = by_hand.rotate(
        by_hand.rotate(x.numpy(), first.activation_matrix().numpy()), second.activation_matrix().numpy()
    )
    close(first.compose(second).apply(x), want)
    other = second.compose(first).apply(x).numpy()
    assert np.abs(other - want).max() > 0.1, "the sample does not tell the orders apart"


def test_compose_of_two_sizes() -> None:
    small, large = hadamard(16), random_hadamard(64, seed=1)
    x = torch.randn(2, 128, dtype=torch.float64)
    want = by_hand.rotate(
        by_hand.rotate(x.numpy(), small.activation_matrix().numpy()), large.activation_matrix().numpy()
    )
    close(small.compose(large).apply(x), want)


@pytest.mark.parametrize("width", [6144, 3584])
def test_widths_that_are_no_power_of_two(width: int) -> None:
    h = hadamard(128)
    w = torch.randn(2, width)
    close(h.unfold_input_weight(h.fold_input_weight(w)), w.double().numpy())


def test_folding_a_bf16_weight_is_within_one_ulp_of_fp64() -> None:
    w = (torch.randn(64, 512) * 0.02).bfloat16()
    exact = by_hand.rotate(by_hand.numpy(w), np.linalg.inv(by_hand.sylvester(128) / np.sqrt(128)).T)
    stored = hadamard(128).fold_input_weight(w).bfloat16().double().numpy()
    assert (np.abs(stored - exact) < 2.0**-8 * np.abs(exact) + 2.0**-134).all()
    want = by_hand.numpy(torch.from_numpy(exact).bfloat16())
    assert (stored != want).mean() < 1e-6, "one rounding from float64, not one per step"


def test_folding_refuses_a_width_that_does_not_divide() -> None:
    h = hadamard(16)
    assert_refused(lambda: h.fold_input_weight(torch.randn(4, 24)), "24", "16")
    assert_refused(lambda: h.fold_output_weight(torch.randn(24, 4)), "24", "16")
    assert_refused(lambda: h.fold_output_bias(torch.randn(24)), "24", "16")
    assert_refused(lambda: h.apply(torch.randn(2, 24)), "24", "16")


def test_nothing_given_is_changed() -> None:
    m = random_matrix(32)
    w, before = torch.randn(4, 32), m.clone()
    kept = w.clone()
    t = matrix(m)
    t.fold_input_weight(w), t.apply(w), t.inverse(), t.weight_matrix()
    assert torch.equal(w, kept)
    assert torch.equal(m, before)
    assert torch.equal(t.matrix, before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.factor = 2.0


@pytest.mark.parametrize("seed", [1.5, None, "a", True, 2**64, -(2**63) - 1])
def test_a_seed_that_is_none_is_refused(seed: object) -> None:
    with pytest.raises(Refusal, match="seed"):
        random_hadamard(16, seed=seed)
    assert random_hadamard(16, seed=2**64 - 1).size == 16


def test_the_nearest_orders_of_a_large_one_are_found_at_once() -> None:
    began = time.perf_counter()
    with pytest.raises(Refusal, match="1000001"):
        hadamard(1000001)
    assert time.perf_counter() - began < 5
