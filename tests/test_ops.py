"""rotate_quantize and its quantize-dequantize form, on every backend this machine has, against the reference.

Bit for bit where the arithmetic is exact: no transform, a signed permutation, or small integers through a Hadamard
whose factor is a power of two. Elsewhere by the counted bounds of comparing.compare_quantized.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import by_hand
from comparing import HERE, assert_equal_arrays, assert_refused, assert_same_bits, compare_quantized, rotation_bound
from quarterturn import MXFP4, NVFP4, ops, reference

FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAN_BYTE = {"nvfp4": 0x7F, "mxfp4": 255}
every_backend = pytest.mark.parametrize("backend", HERE)
every_format = pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both_ways = pytest.mark.parametrize("transpose", [False, True], ids=["", "transposed"])
ENCODE = 150.0

# M around the tile of 128, K not a multiple of 64 and K / group not a multiple of 4
SHAPES = [
    *[("nvfp4", m, k) for m, k in [(1, 16), (3, 80), (7, 48), (127, 48), (128, 64), (129, 96), (385, 80)]],
    *[("mxfp4", m, k) for m, k in [(1, 32), (2, 96), (7, 160), (127, 96), (128, 64), (129, 96), (385, 160)]],
]


def options(name: str, encode: float | None = ENCODE, **others: object) -> dict:
    return {
        "format": FORMATS[name],
        "encode_scale": torch.tensor([encode]) if name == "nvfp4" and encode else None,
    } | others


def signed_permutation(size: int) -> torch.Tensor:
    signs = torch.randint(0, 2, (size,)).float() * 2 - 1
    return torch.eye(size)[torch.randperm(size)] * signs


def side_of(matrix: torch.Tensor, factor: float, transpose: bool) -> np.ndarray:
    return (matrix.T if transpose else matrix).double().numpy() * factor


def check_bits(x: torch.Tensor, *transform: object, backend: str, what: str = "", **kwargs: object) -> None:
    want = reference.rotate_quantize(x, *transform, **kwargs)
    got = ops.rotate_quantize(x, *transform, backend=backend, **kwargs)
    assert got[0].dtype == torch.uint8
    assert got[1].dtype == kwargs["format"].scale_dtype
    assert_same_bits(got[2].reshape(-1), want[2].reshape(-1), f"{what} tensor scales")
    assert_equal_arrays(by_hand.numpy(got[1]), by_hand.numpy(want[1]), f"{what} scale bytes")
    assert_equal_arrays(by_hand.numpy(got[0]), by_hand.numpy(want[0]), f"{what} codes")


def check_counted(
    x: torch.Tensor, matrix: torch.Tensor, factor: float, transpose: bool, *, backend: str, **kwargs
) -> None:
    want = reference.rotate_quantize(x, matrix, factor, transpose, **kwargs)
    got = ops.rotate_quantize(x, matrix, factor, transpose, backend=backend, **kwargs)
    side = side_of(matrix, factor, transpose)
    z = by_hand.rotate(by_hand.numpy(x), side)
    dz = rotation_bound(by_hand.numpy(x), side)
    if kwargs.get("recipe") == "token":  # the encode scale itself depends on z
        relative = dz.max(axis=1, keepdims=True) / np.abs(z).max(axis=1, keepdims=True) + 2.0**-22
        np.testing.assert_array_less(np.abs(got[2].numpy() / want[2].numpy() - 1), relative.ravel())
        dz = dz + np.abs(z) * relative
    else:
        assert_same_bits(got[2].reshape(-1), want[2].reshape(-1), "tensor scales")
    encode = 1 / want[2].double().numpy().reshape(-1, 1)
    compare_quantized(got, want, z, dz, kwargs["format"].name, encode, kwargs.get("rule", "even"))


# ---- exact arithmetic: no bit may differ


@every_backend
@every_dtype
@pytest.mark.parametrize(("name", "m", "k"), SHAPES)
def test_without_a_transform(name: str, m: int, k: int, dtype, backend: str, poisoned_memory: None) -> None:
    check_bits((torch.randn(m, k) * 3).to(dtype), backend=backend, **options(name))


@every_backend
@pytest.mark.parametrize("recipe", ["checkpoint", "token", "qutlass"])
@every_dtype
def test_every_recipe(recipe: str, dtype, backend: str) -> None:
    x = torch.randn(33, 96) * torch.logspace(-4, 3, 33)[:, None]
    x[5] = 0
    x[6, :16] = 0
    check_bits(x.to(dtype), backend=backend, recipe=recipe, **options("nvfp4"))


@every_backend
@pytest.mark.parametrize("rule", by_hand.RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_e8m0_rule(rule: str, dtype, backend: str) -> None:
    x = (torch.randn(78, 96) * torch.logspace(-40, 37, 78)[:, None]).to(dtype)
    mantissas = torch.tensor([1, 1.25, 1.5, 1.7421875, 1.75, 1.7578125, 1.9921875, 1.0078125])  # each exact in bf16
    lone = torch.zeros(64, 32)
    lone[torch.arange(64), torch.randint(0, 32, (64,))] = torch.exp2(torch.arange(64) // 8 - 3.0) * mantissas.repeat(8)
    check_bits(x, backend=backend, **options("mxfp4", rule=rule), what="spread")
    check_bits(lone.to(dtype), backend=backend, **options("mxfp4", rule=rule), what="lone")


@every_backend
def test_mxfp4_as_qutlass_has_it(backend: str) -> None:
    check_bits(torch.randn(16, 96), backend=backend, **options("mxfp4", recipe="qutlass"))


@every_backend
@every_format
def test_ties_both_neighbours_and_signed_zeros(name: str, backend: str) -> None:
    """Every tie of E2M1 and both its neighbours in a group whose scale is exactly 1."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], dtype=np.float32)
    points = np.concatenate(
        [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9)), [-0.0, 0, -0.1]]
    )
    points = np.concatenate([points, -points]).astype(np.float32)
    z = np.zeros((len(points), by_hand.GROUP[name]), dtype=np.float32)
    z[:, 0], z[:, 5] = 6.0, points
    codes, scale, _ = ops.rotate_quantize(torch.from_numpy(z), backend=backend, **options(name, 1.0))
    assert by_hand.E8M0[127] == by_hand.E4M3[0x38] == 1.0
    assert set(by_hand.numpy(scale).ravel()) == {0x38 if name == "nvfp4" else 127}
    assert_equal_arrays(by_hand.unpack(codes.numpy())[:, 5], by_hand.e2m1_codes(points), "codes")


@every_backend
def test_e4m3_ties_and_saturation(backend: str) -> None:
    ties = (by_hand.E4M3[:126] + by_hand.E4M3[1:127]) / 2 * 6
    middle = ties.astype(np.float32).view(np.int32)
    near = (middle[:, None] + np.arange(-3, 4, dtype=np.int32)).ravel().view(np.float32)
    amax = np.concatenate([near, np.array([2689, 2694, 2784, 2880, 3072, 1e4, 1e30, 3.4e38], dtype=np.float32)])
    z = np.zeros((len(amax), 16), dtype=np.float32)
    z[:, 2], z[:, 9] = amax, -amax / 3
    for encode in (1.0, 17.3, 1e3):
        want = by_hand.quantize(z, "nvfp4", encode)
        codes, scale, _ = ops.rotate_quantize(torch.from_numpy(z), backend=backend, **options("nvfp4", encode))
        assert_equal_arrays(by_hand.numpy(scale), want[1], "scale bytes")
        assert_equal_arrays(by_hand.unpack(codes.numpy()), want[0], "codes")
    assert (by_hand.numpy(scale)[-8:] == 0x7E).all()


@every_backend
@both_ways
@every_dtype
@pytest.mark.parametrize("size", [16, 32, 48, 64, 96, 128, 192])
def test_through_a_signed_permutation(size: int, dtype, transpose: bool, backend: str) -> None:
    x = torch.randn(19, 384 if size != 192 else 192).to(dtype)
    matrix = signed_permutation(size)
    for name in FORMATS if dtype != torch.float16 else ["nvfp4"]:
        check_bits(x, matrix, 1.0, transpose, backend=backend, **options(name), what=name)


@every_backend
@both_ways
@every_dtype
@pytest.mark.parametrize(("size", "factor"), [(16, 0.25), (64, 0.125)])
def test_integers_through_a_random_hadamard(size: int, factor: float, dtype, transpose: bool, backend: str) -> None:
    h = torch.from_numpy(by_hand.sylvester(size)).float() * (torch.randint(0, 2, (size, 1)) * 2 - 1)
    x = torch.randint(-8, 9, (65, 192)).to(dtype)
    for name in FORMATS:
        check_bits(x, h, factor, transpose, backend=backend, **options(name), what=name)


@every_backend
@pytest.mark.parametrize("transpose", [False, True])
def test_the_four_by_four_case(transpose: bool, backend: str) -> None:
    m = torch.from_numpy(np.kron(np.eye(4), by_hand.four_by_four())).float()
    x = torch.zeros(1, 16)
    x[0, 0] = 4.0
    values, tensor_scale = ops.rotate_quantize_dequantize(
        x, m, 1.0, transpose, format=NVFP4, encode_scale=3.0, backend=backend
    )  # amax 2: 3 * 2 / 6 = 1, so 2 is 6 * 1 / 3
    assert (values * 1.0)[0, :5].tolist() == ([6, -6, 6, 6, 0] if transpose else [6, 6, 6, 6, 0])
    assert tensor_scale.tolist() == [float(np.float32(1) / np.float32(3))]


# ---- counted


@every_backend
@both_ways
@every_dtype
@pytest.mark.parametrize(("name", "k", "size"), [
    ("nvfp4", 48, 8), ("nvfp4", 48, 16), ("nvfp4", 48, 24), ("nvfp4", 48, 48), ("nvfp4", 80, 40), ("nvfp4", 80, 80),
    ("nvfp4", 384, 32), ("nvfp4", 384, 64), ("nvfp4", 384, 96), ("nvfp4", 384, 128), ("mxfp4", 96, 16),
    ("mxfp4", 96, 48), ("mxfp4", 96, 96), ("mxfp4", 384, 32), ("mxfp4", 384, 64), ("mxfp4", 384, 128),
])  # fmt: skip
def test_through_any_matrix(name: str, k: int, size: int, dtype, transpose: bool, backend: str) -> None:
    x = torch.randn(129, k).to(dtype)
    matrix = torch.randn(size, size) / size**0.5
    check_counted(x, matrix, 1.0, transpose, backend=backend, **options(name))


@every_backend
@both_ways
@pytest.mark.parametrize("recipe", ["checkpoint", "token", "qutlass"])
def test_every_recipe_behind_a_hadamard(recipe: str, transpose: bool, backend: str) -> None:
    h = torch.from_numpy(by_hand.sylvester(32)).float() * (torch.randint(0, 2, (32, 1)) * 2 - 1)
    x = torch.randn(129, 96).bfloat16()
    check_counted(x, h, 32**-0.5, transpose, backend=backend, recipe=recipe, **options("nvfp4"))


@every_backend
@every_format
def test_the_rates_on_a_large_sample(name: str, backend: str) -> None:
    """2 M values: at most 1 scale byte in 1e5 and 1 code in 1e4 may differ, and T is not rounded to bf16 or TF32.

    Rounding T to TF32 would change 1e-3 of the codes, rounding it to bf16 7e-3.
    """
    x, matrix = torch.randn(4096, 512), torch.randn(64, 64) / 8
    check_counted(x, matrix, 1.0, False, backend=backend, **options(name))


# ---- values that are not finite, zeros


@every_backend
@every_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@every_dtype
def test_a_group_that_is_not_finite(name: str, bad: float, dtype, backend: str) -> None:
    size = by_hand.GROUP[name]
    x = torch.randn(3, 4 * size).to(dtype)
    clean = ops.rotate_quantize(x, backend=backend, **options(name))
    x[1, size + 3] = bad
    codes, scale, _ = ops.rotate_quantize(x, backend=backend, **options(name))
    want_codes, want_scale = by_hand.unpack(clean[0].numpy()), by_hand.numpy(clean[1]).copy()
    want_scale[1, 1], want_codes[1, size : 2 * size] = NAN_BYTE[name], 0
    assert_equal_arrays(by_hand.numpy(scale), want_scale, "scale bytes")
    assert_equal_arrays(by_hand.unpack(codes.numpy()), want_codes, "codes")
    if dtype == torch.float16 and name == "mxfp4":
        call = lambda: ops.rotate_quantize_dequantize(x, backend=backend, **options(name))  # noqa: E731
        assert_refused(call, "can overflow float16")
        return
    values, _ = ops.rotate_quantize_dequantize(x, backend=backend, **options(name))
    assert torch.isnan(values[1, size : 2 * size]).all()
    assert int(torch.isnan(values).sum()) == size


@every_backend
@every_format
@pytest.mark.parametrize("recipe", ["checkpoint", "token"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite(name: str, recipe: str, bad: float, backend: str) -> None:
    """Every group that the bad value's block of 64 reaches is NaN; the other rows keep their bits."""
    x = torch.randn(3, 128)
    h = torch.from_numpy(by_hand.sylvester(64)).float()
    clean = ops.rotate_quantize(x, h, 0.125, recipe=recipe, backend=backend, **options(name))
    x[1, 70] = bad
    codes, scale, _ = ops.rotate_quantize(x, h, 0.125, recipe=recipe, backend=backend, **options(name))
    byte, groups = by_hand.numpy(scale), 64 // by_hand.GROUP[name]
    assert (byte[1, groups:] == NAN_BYTE[name]).all()
    assert not codes[1, 32:].any()
    assert_equal_arrays(byte[[0, 2]], by_hand.numpy(clean[1])[[0, 2]], "scales of the other rows")
    assert_equal_arrays(codes[[0, 2]].numpy(), clean[0][[0, 2]].numpy(), "codes of the other rows")


@every_backend
@every_format
def test_zeros_and_scales_that_underflow(name: str, backend: str) -> None:
    size = by_hand.GROUP[name]
    x = torch.zeros(2, 3 * size)
    x[0, :size], x[0, size : 2 * size] = -0.0, torch.randn(size)
    x[1, :size] = -1e-7  # NVFP4 with encode 150: 2.5e-6 is under half of 2^-9
    codes, scale, _ = ops.rotate_quantize(x, backend=backend, **options(name))
    want = by_hand.quantize(x.numpy(), name, ENCODE)
    assert_equal_arrays(by_hand.numpy(scale), want[1], "scale bytes")
    assert_equal_arrays(by_hand.unpack(codes.numpy()), want[0], "codes")
    assert scale.view(torch.uint8)[0, 0] == 0
    assert not codes[0, : size // 2].any()
    values, _ = ops.rotate_quantize_dequantize(x, backend=backend, **options(name))
    assert not values[0, :size].any()
    assert not torch.isnan(values).any()


@pytest.mark.parametrize("backend", ["any_torch", "cpu_native"])
@pytest.mark.parametrize("size", [16, 24])
def test_a_matrix_of_any_dtype_is_rounded_to_fp32(backend: str, size: int) -> None:
    matrix, x = torch.rand(size, size, dtype=torch.float64), torch.randn(4, 48)
    assert torch.equal(ops.rotate(x, matrix, backend=backend), ops.rotate(x, matrix.float(), backend=backend))
