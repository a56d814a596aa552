"""The form in which a GPU's kernel multiplies a wide +-1 matrix, as far as a CPU can tell: that it is the matrix, and
which matrices have none."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
import torch
from torch import Tensor

from quarterturn.backends import factors as factors_module
from quarterturn.backends import gpu_wide, gpu_wide_hopper
from quarterturn.backends.factors import factorize
from quarterturn.backends.gpu_wide import RUN, Wide, cut, fits, make_wide, rotate
from quarterturn.backends.protocol import Blocks
from wide_matrices import by_factors, factors, product, signs

CPU = torch.device("cpu")
H = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (12, 0))
# Orders of the factors, the outermost first: the order of the dense factor, and of those of order 2 outside and inside.
FORMS = {
    (256,): (32, 1, 8),
    (512,): (64, 1, 8),
    (1024,): (64, 1, 16),
    (8192,): (64, 1, 128),
    (16384,): (128, 1, 128),
    (32768,): (128, 1, 256),
    (12, 64): (48, 1, 16),
    (64, 12): (48, 16, 1),
    (8, 12, 8): (48, 2, 8),
    (32, 12, 2): (48, 16, 1),
    (2, 12, 2, 20): (0, 0, 0),
    (12, 20, 2): (240, 1, 2),
    (20, 32): (40, 1, 16),
    (28, 128): (56, 1, 64),
    (128, 28): (56, 64, 1),
    (28, 512): (112, 1, 128),
    (28, 1024): (112, 1, 256),
    (1024, 28): (112, 256, 1),
    (172, 64): (172, 1, 64),
    (172, 128): (172, 1, 128),
    (20, 1024): (80, 1, 256),
    (65536,): (0, 0, 0),
    (36, 1024): (0, 0, 0),
    (172, 256): (0, 0, 0),
}
TAKEN = [orders for orders, (order, outer, _) in FORMS.items() if outer]


def made(*orders: int, signed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Wide | None:
    return make_wide(factors(*orders, signed=signed), 1.0, False, dtype, CPU)


def multiplied(wide: Wide) -> Tensor:
    """The matrix of a form, float64."""
    if wide.hopper:
        bits = [words if words is None else read(words, wide) for read, words in (
            (left_signs, wide.left), (right_signs, wide.right),
        )]  # fmt: skip
        wide = replace(wide, left=bits[0], right=bits[1])
    twos = [[H] * (n.bit_length() - 1) for n in (wide.outer, wide.inner)]
    dense = wide.dense[: wide.order, : wide.order].double().T.contiguous()
    entries = reduce(torch.kron, [*twos[0], dense, *twos[1]]) * wide.factor
    for bits, shape in ((wide.left, (-1, 1)), (wide.right, (1, -1))):
        if bits is not None:
            assert set(bits.tolist()) <= {0, -(2**15)}
            entries = entries * torch.where(bits < 0, -1.0, 1.0).view(shape)
    return entries


def left_signs(words: Tensor, wide: Wide) -> Tensor:
    """The sign bits (R,) that the Hopper kernel's words change in x: a thread has 16 bytes of every 16th row."""
    d, n = torch.arange(wide.order).view(-1, 1), torch.arange(wide.inner)
    piece = d // 16 * (wide.inner // 64) + n // 64
    word = words[piece // 4, d % 16 * 8 + n % 64 // 8]
    place = piece % 4 * 4 + n % 8 // 2 + n % 2 * 16
    return -((word >> place & 1) << 15).to(torch.int16).flatten()


def right_signs(words: Tensor, wide: Wide) -> Tensor:
    """Those that it changes in the output: a lane has eight neighbours in both halves of 64 and of a warp's 16 rows."""
    d, n = torch.arange(wide.order).view(-1, 1), torch.arange(wide.inner)
    word = words[n // 64, d // 16 * 32 + d % 8 * 4 + n % 32 // 8]
    place = d % 16 // 8 * 16 + n % 64 // 32 * 8 + n % 8
    return -((word >> place & 1) << 15).to(torch.int16).flatten()


HOPPER = {
    (4096,): None,
    (8192,): (128, 64),
    (16384,): (128, 128),
    (32768,): (128, 256),
    (12, 512): (96, 64),
    (20, 256): (80, 64),
    (28, 512): (112, 128),
    (28, 1024): (112, 256),
    (108, 128): (108, 128),
    (28, 128): None,
    (512, 28): None,
    (172, 64): None,
    (2, 12, 2, 20): None,
}
"""Which forms the kernel for Hopper takes, as the orders of its dense factor and of what is inside."""


@pytest.mark.parametrize("orders", HOPPER, ids=str)
def test_which_forms_the_hopper_kernel_takes(orders: tuple[int, ...]) -> None:
    wide = make_wide(factors(*orders, signed=False), 1.0, False, torch.bfloat16, CPU, hopper=True)
    want = HOPPER[orders]
    if want is None:
        other = make_wide(factors(*orders, signed=False), 1.0, False, torch.bfloat16, CPU)
        assert (wide is None) == (other is None)
        if wide is not None and other is not None:
            assert not wide.hopper
            assert (wide.order, wide.outer, wide.inner) == (other.order, other.outer, other.inner)
        return
    assert wide is not None
    assert wide.hopper
    assert wide.outer == 1
    assert (wide.order, wide.inner) == want
    assert wide.padded == gpu_wide_hopper.PADDED


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("orders", [(8192,), (20, 256), (12, 512)], ids=str)
def test_the_hopper_form_is_the_matrix(orders: tuple[int, ...], transpose: bool) -> None:
    made = factors(*orders)
    wide = make_wide(made, -0.3, transpose, torch.bfloat16, CPU, hopper=True)
    assert wide is not None
    assert wide.hopper
    x = torch.randint(-8, 9, (3, wide.size)).double()
    want = by_factors(x, made, transpose) * torch.tensor(-0.3).double()
    assert torch.equal(x @ multiplied(wide), want)


@pytest.mark.parametrize("place", ["left_words", "right_words"])
def test_one_sign_read_wrong_turns_that_red(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = getattr(gpu_wide_hopper, place)
    monkeypatch.setattr(gpu_wide_hopper, place, lambda *given: kept(*given) ^ (1 << 7))
    with pytest.raises(AssertionError):
        test_the_hopper_form_is_the_matrix((8192,), False)


@pytest.mark.parametrize("orders", FORMS, ids=str)
def test_which_factors_are_multiplied_together(orders: tuple[int, ...]) -> None:
    wide = made(*orders)
    if orders in TAKEN:
        assert wide is not None
        assert (wide.order, wide.outer, wide.inner) == FORMS[orders]
    else:
        assert wide is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, -0.3, 2.0**-40, 1e30])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("orders", [(256,), (12, 64), (64, 12), (4, 12, 16), (12, 20, 2), (28, 16)], ids=str)
def test_the_form_is_the_matrix(
    orders: tuple[int, ...], signed: bool, transpose: bool, factor: float, dtype: torch.dtype
) -> None:
    matrix = product(*orders, signed=signed)
    found = factorize(matrix)
    assert found is not None
    wide = make_wide(found, factor, transpose, dtype, CPU)
    assert wide is not None
    want = (matrix.T if transpose else matrix).double() * torch.tensor(factor).double()
    assert torch.equal(multiplied(wide), want)
    assert wide.factor >= 0
    assert wide.dense.dtype == dtype
    assert len({float(entry) for entry in wide.dense.abs().unique()} - {0.0}) == 1
    assert not wide.dense[wide.order :].any()
    assert not wide.dense[:, wide.order :].any()


FAULTS = {
    "signs read as none": ("_sign_bits", lambda kept: lambda signs: torch.zeros(len(signs), dtype=torch.int16)),
    "random signs taken for those of the dense factor": ("_absorbed", lambda kept: lambda *a: (None, kept(*a)[1])),
    "one more factor is of order two": ("_window", lambda kept: lambda parts: shorter(kept(parts))),
}


def shorter(window: slice | None) -> slice | None:
    return None if window is None else slice(window.start + 1, window.stop)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_turns_the_test_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ((12, 64), True, False, -0.3, torch.bfloat16)
    test_the_form_is_the_matrix(*case)
    place, change = FAULTS[name]
    monkeypatch.setattr(gpu_wide, place, change(getattr(gpu_wide, place)))
    with pytest.raises((AssertionError, RuntimeError)):
        test_the_form_is_the_matrix(*case)


def test_the_transposed_matrix_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ((12, 64), False, True, 1.0, torch.bfloat16)
    test_the_form_is_the_matrix(*case)
    monkeypatch.setattr(factors_module.Factors, "transposed", lambda self: self)
    with pytest.raises(AssertionError):
        test_the_form_is_the_matrix(*case)


def test_signs_that_repeat_are_those_of_the_dense_factor() -> None:
    """Paley's matrices have signs in their first row and column: those cost nothing; random ones are read."""
    for orders in ((12, 64), (64, 12), (28, 128)):
        found = factorize(product(*orders, signed=False))
        assert found is not None
        assert (found.left < 0).any() or (found.right < 0).any()
        wide = make_wide(found, 1.0, False, torch.bfloat16, CPU)
        assert wide is not None
        assert wide.left is wide.right is None
    rows = factorize(product(12, 64, signed=False) * signs(768, 1))
    assert rows is not None
    for transpose, read in ((False, (True, False)), (True, (False, True))):
        wide = make_wide(rows, 1.0, transpose, torch.bfloat16, CPU)
        assert wide is not None
        assert (wide.left is not None, wide.right is not None) == read


def test_a_factor_of_order_two_that_is_no_hadamard_matrix_is_multiplied() -> None:
    for place in range(3):
        parts = [product(16, signed=False), product(16, signed=False)]
        parts.insert(place, torch.ones(2, 2))
        found = factorize(reduce(torch.kron, parts))
        assert found is not None
        wide = make_wide(found, 1.0, False, torch.bfloat16, CPU)
        assert wide is not None
        assert torch.equal(multiplied(wide), reduce(torch.kron, parts).double())


def test_what_a_tile_has_room_for() -> None:
    for orders in TAKEN:
        wide = made(*orders)
        assert wide is not None
        values = wide.padded * wide.outer * wide.inner
        assert values <= 2**15
        assert wide.inner == 1 or wide.inner >= RUN or orders == (12, 20, 2)
        for at in CAPABILITIES:
            assert cut(wide, at).rows * values <= 2**15
    room = {at: [orders for orders in TAKEN if not fits(made(*orders), at)] for at in (*CAPABILITIES, (8, 6), (10, 3))}
    most = [(12, 20, 2), (172, 64), (172, 128)]
    assert room == {(8, 0): most[2:], (9, 0): [], (10, 0): [], (10, 3): [], (12, 0): most, (8, 6): most}


def test_who_else_rotates() -> None:
    """fp32, small blocks, and matrices without factors are not taken."""
    matrix, x = product(12, 64), torch.zeros(1, 768)
    assert rotate(x, Blocks(matrix, 1.0, False), torch.float32) is None
    assert rotate(x.bfloat16(), Blocks(signs(768, 768), 1.0, False), torch.float32) is None
    assert rotate(x.bfloat16(), Blocks(product(128), 1.0, False), torch.float32) is None
