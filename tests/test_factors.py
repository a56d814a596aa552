"""Wide +-1 matrices by their factors: which have some, that these are the matrix, and what is rotated with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor

from comparing import assert_same_bits
from gpu_cases import rotate_bound
from quarterturn import hadamard, ops, random_hadamard, reference
from quarterturn.backends import any_torch, cpu_layer, factors
from quarterturn.backends.factors import WIDE, factorize, factors_of
from quarterturn.formats import FORMATS
from wide_matrices import product, signs, small

BACKENDS = pytest.mark.parametrize("backend", ["any_torch", "cpu_native"])
DIRECTIONS = pytest.mark.parametrize("transpose", [False, True], ids=["straight", "transposed"])
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def irregular(size: int) -> Tensor:
    """A +-1 matrix that is no product."""
    return signs(size, size)


MADE: dict[str, Callable[[], Tensor]] = {
    "sylvester": lambda: hadamard(256).matrix.float(),
    "random hadamard": lambda: random_hadamard(512).matrix.float(),
    "small inside": lambda: product(32, 12),
    "small outside": lambda: product(28, 16),
    "small in the middle": lambda: product(8, 12, 8),
    "two small": lambda: product(12, 2, 20),
    "odd orders": lambda: torch.kron(signs(15, 15), signs(21, 21)),
    "nothing but signs": lambda: signs(256, 1) * signs(256),
}
every_product = pytest.mark.parametrize("name", MADE)


def multiplied(left: Tensor, parts: tuple[Tensor, ...], right: Tensor) -> Tensor:
    return left.view(-1, 1) * reduce(torch.kron, parts) * right


@every_product
def test_the_factors_are_the_matrix(name: str) -> None:
    matrix = MADE[name]()
    found = factorize(matrix)
    assert found is not None
    for parts in (found.parts, found.merged):
        assert_same_bits(multiplied(found.left, parts, found.right), matrix.double(), "the product")
        other = found.transposed()
        both = (other.parts, other.merged)[parts is found.merged]
        assert_same_bits(multiplied(other.left, both, other.right), matrix.T.double(), "the transposed product")
    assert all(factorize(part.float()) is None for part in found.parts)
    assert sum(map(len, found.merged)) < len(matrix) / 2
    assert found.is_sylvester == (name in ("sylvester", "random hadamard"))


def test_factors_of_known_orders() -> None:
    def orders(matrix: Tensor) -> list[int]:
        found = factorize(matrix)
        assert found is not None
        return [len(part) for part in found.parts]

    assert orders(product(4, 28)) == [2, 2, 28]
    assert orders(product(28, 4)) == [28, 2, 2]
    assert orders(product(12, 4, 20)) == [12, 2, 2, 20]


@every_product
def test_one_entry_off_is_no_product(name: str) -> None:
    matrix = MADE[name]()
    last = len(matrix) - 1
    for at in ((0, 0), (0, 7), (7, 0), (1, 1), (last, last), (100, 201), (last, 0)):
        matrix[at] *= -1
        assert factorize(matrix) is None, at
        matrix[at] *= -1
    assert factorize(matrix) is not None


@pytest.mark.parametrize("size", [1, 2, 7, 12, 28, 256, 720])
def test_what_is_no_product_has_no_factors(size: int) -> None:
    assert factorize(small(size) if size in (1, 2, 12, 28) else irregular(size)) is None


@pytest.mark.parametrize("entry", [0.0, 0.5, -3.0, float("nan"), float("inf")])
def test_other_entries_have_no_factors(entry: float) -> None:
    matrix = hadamard(64).matrix.float()
    matrix[40, 3] = entry
    assert factorize(matrix) is None
    assert factorize(hadamard(64).matrix.float() / 8) is None


def test_large_matrices_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = product(8, 12, 4)
    want = factorize(matrix)
    monkeypatch.setattr(factors, "ENTRIES", 1000)
    got = factorize(matrix)
    assert want is not None
    assert got is not None
    assert [a.tolist() for a in got.parts] == [a.tolist() for a in want.parts]
    for row in range(0, 384, 5):  # wherever the parts begin and end
        matrix[row, 300] *= -1
        assert factorize(matrix) is None
        matrix[row, 300] *= -1


# ---- what is kept


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever a matrix is looked at."""
    seen: list[int] = []

    def look(matrix: Tensor) -> factors.Factors | None:
        seen.append(len(matrix))
        return factorize(matrix)

    monkeypatch.setattr(factors, "factorize", look)
    return seen


@BACKENDS
def test_a_matrix_is_looked_at_once_and_again_when_it_is_written_to(backend: str, looks: list[int]) -> None:
    matrix, x = product(32, 12), torch.randn(3, 384)

    def check(matrix: Tensor, count: int) -> None:
        for transpose in (False, True):
            got = ops.rotate(x, matrix, 0.5, transpose, backend=backend)
            assert_same_bits(got, reference.rotate(x, matrix, 0.5, transpose).float())
        assert len(looks) == count

    check(matrix, 1)
    matrix.copy_(product(32, 12))
    check(matrix, 2)
    other = copy.deepcopy(matrix)
    check(other, 3)
    other.copy_(product(12, 32))
    check(other, 4)
    check(matrix, 4)
    matrix.data = irregular(384)
    check(matrix, 5)
    with torch.inference_mode():  # whose tensors do not tell of changes, so that nothing is kept
        made = matrix.clone()
    looks.clear()
    assert_same_bits(ops.rotate(x, made, 0.5, backend=backend), reference.rotate(x, made, 0.5).float())
    assert looks


def test_narrow_matrices_are_not_looked_at_and_sylvesters_have_kernels(looks: list[int]) -> None:
    narrow, wide = hadamard(192).matrix.float(), product(2**9)
    ops.rotate(torch.randn(2, 192), narrow, backend="any_torch")
    assert WIDE > 192
    assert looks == []
    ops.rotate(torch.randn(2, 512), wide, backend="cpu_native")
    assert cpu_layer._prepared(any_torch.Blocks(wide, 1.0, False)).signs is not None
    assert not cpu_layer.turned_apart(any_torch.Blocks(wide, 1.0, False))
    assert cpu_layer.turned_apart(any_torch.Blocks(product(32, 12), 1.0, False))


# ---- what is rotated


def assert_rotates(x: Tensor, matrix: Tensor, factor: float, transpose: bool, backend: str) -> None:
    """Within what fp32 and one rounding may lose, and all but always the float64 result rounded once."""
    for out in (torch.float32, x.dtype):
        got = ops.rotate(x, matrix, factor, transpose, out_dtype=out, backend=backend)
        z, bound = rotate_bound(x, (matrix, factor, transpose), out)
        assert bool(((got.double() - z).abs() <= bound).all())
        assert int((got != z.float().to(out)).sum()) <= 1 + z.numel() * 1e-6


@BACKENDS
@DIRECTIONS
@every_product
def test_small_integers_are_exact_and_a_zero_is_positive(name: str, transpose: bool, backend: str) -> None:
    matrix, factor = MADE[name](), 0.3
    for dtype in DTYPES:
        x = torch.randint(-8, 9, (13, 2 * len(matrix))).to(dtype)
        x[4], x[5, : len(matrix)] = 0, -0.0
        want = reference.rotate(x, matrix, factor, transpose).float()
        for sign in (1, -1):
            got = ops.rotate(x, matrix * sign, factor, transpose, out_dtype=torch.float32, backend=backend)
            assert_same_bits(got, want * sign + 0.0, f"{dtype}")
        assert_rotates(torch.randn(13, 2 * len(matrix)).to(dtype), matrix, factor, transpose, backend)


@BACKENDS
@DIRECTIONS
@pytest.mark.parametrize("orders", [(128, 28), (8192,), (512, 28), (64, 172), (28, 128)], ids=str)
def test_full_width(orders: tuple[int, ...], transpose: bool, backend: str) -> None:
    size = math.prod(orders)
    matrix, factor = product(*orders), size**-0.5
    x = torch.randint(-8, 9, (5, size)).bfloat16()
    # fp32 holds the sums: below 8 * 2^14.
    want = (x.float() @ (matrix.T if transpose else matrix)).double() * torch.tensor(factor).double()
    got = ops.rotate(x, matrix, factor, transpose, out_dtype=torch.float32, backend=backend)
    assert_same_bits(got, want.float() + 0.0)
    assert factors_of(matrix) is not None
    if size < 4096:
        assert_rotates(torch.randn(5, size).bfloat16(), matrix, factor, transpose, backend)


@BACKENDS
@DIRECTIONS
def test_a_matrix_without_factors_stays_dense(transpose: bool, backend: str) -> None:
    off = product(32, 12)
    off[100, 201] *= -1
    for matrix in (off, irregular(384)):
        x = torch.randint(-8, 9, (13, 768)).bfloat16()
        got = ops.rotate(x, matrix, 0.3, transpose, out_dtype=torch.float32, backend=backend)
        assert_same_bits(got, reference.rotate(x, matrix, 0.3, transpose).float())
        assert factors_of(matrix) is None


@BACKENDS
def test_no_number_spreads_over_its_block_alone(backend: str) -> None:
    matrix, x = product(32, 12), torch.randn(6, 768)
    x[0, 5], x[1, 400], x[2, 7] = float("nan"), float("inf"), -float("inf")
    x[3, 8], x[3, 300] = float("inf"), float("inf")
    got, want = ops.rotate(x, matrix, 1.0, backend=backend), reference.rotate(x, matrix).float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@BACKENDS
def test_no_rows_and_other_strides(backend: str) -> None:
    matrix, big = product(32, 12), torch.randn(20, 1000)
    for x in (big[:, 100:868], big[::3, :384], big.expand(2, 20, 1000)[:, :7, 3:387]):
        got = ops.rotate(x, matrix, 0.05, backend=backend)
        assert_same_bits(got, reference.rotate(x, matrix, 0.05).float())
    assert ops.rotate(big[:0, :768], matrix, backend=backend).shape == (0, 768)
    strided = torch.zeros(384, 768)[:, ::2].copy_(matrix)
    assert_same_bits(ops.rotate(big[:, :384], strided, backend=backend), reference.rotate(big[:, :384], matrix).float())


@BACKENDS
@DIRECTIONS
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("recipe", ["checkpoint", "token", "qutlass"])
def test_quantized_as_specified(recipe: str, format: str, transpose: bool, backend: str) -> None:
    matrix, factor = product(32, 12), 384**-0.5
    encode = torch.tensor([150.0]) if (recipe, format) == ("checkpoint", "nvfp4") else None
    how = {"format": format, "recipe": recipe, "encode_scale": encode}
    for dtype in DTYPES:
        x = torch.randn(40, 768).to(dtype)
        got = ops.rotate_quantize(x, matrix, factor, transpose, **how, backend=backend)
        want = reference.rotate_quantize(x, matrix, factor, transpose, **how)
        assert_same_bits(got[0], want[0], "codes")
        assert_same_bits(got[1].view(torch.uint8), want[1].view(torch.uint8), "scale bytes")
        assert_same_bits(got[2].view(-1), want[2].view(-1), "tensor scale")
        if dtype == torch.bfloat16:
            values, one = ops.rotate_quantize_dequantize(x, matrix, factor, transpose, **how, backend=backend)
            assert torch.equal(values.double(), reference.dequantize(want[0], want[1], 1.0, format))
            assert_same_bits(one.view(-1), want[2].view(-1))


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_whole_layers(rows: int, activations: str, format: str, dtype: torch.dtype, backend: str) -> None:
    """Behind a wide input transform, before a wide output transform, or both; W4A16 rounds z to x's dtype once."""
    fmt, bias = FORMATS[format], torch.randn(384)
    codes = torch.randint(0, 256, fmt.codes_shape(384, 768), dtype=torch.uint8)
    low, high = (0x30, 0x40) if format == "nvfp4" else (125, 129)
    scale = torch.randint(low, high, fmt.scale_shape(384, 768), dtype=torch.uint8)
    tensor_scale = torch.tensor([1.5])
    x, turn, none = torch.randn(rows, 768).to(dtype), (product(32, 12), 384**-0.5, True), (None, 1.0, False)
    encode = torch.tensor([300.0]) if format == "nvfp4" else None
    for sides in ((turn, none), (turn, turn), (none, turn)):
        got = torch.ops.quarterturn.fp4_linear(
            x, codes, scale, tensor_scale, [384], bias, format, *sides[0], *sides[1],
            activations == "fp4", encode, "checkpoint", "even", backend,
        )  # fmt: skip
        want = reference.linear(
            x, codes, scale, tensor_scale, [384], format=format, activations=activations,
            encode_scale=encode, bias=bias,
            input_transform=None if sides[0] is none else sides[0],
            output_transform=None if sides[1] is none else sides[1],
        )  # fmt: skip
        unit = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        size = want.square().mean().sqrt()
        assert got.dtype == dtype
        assert float((got.double() - want).abs().max() / size) < 4 * unit
