"""The other promises of rotate and rotate_quantize: layouts in and out, rows on their own, repeats, nothing touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import by_hand
from comparing import (
    HERE,
    assert_equal_arrays,
    assert_same_bits,
    assert_within,
    rotation_bound,
    rounded,
)  # fmt: skip
from quarterturn import ops, random_hadamard
from test_ops import (
    DTYPES,
    FORMATS,
    both_ways,
    every_backend,
    every_dtype,
    every_format,
    options,
    side_of,
    signed_permutation,
)

TRANSFORMS = {  # matrix, factor
    "none": lambda: (None, 1.0),
    "hadamard32": lambda: (torch.from_numpy(by_hand.sylvester(32)).float(), 32**-0.5),
    "matrix64": lambda: (torch.randn(64, 64) / 8, 1.0),
    "matrix48": lambda: (torch.randn(48, 48) / 7, 1.0),
}
every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
every_recipe = pytest.mark.parametrize("recipe", ["checkpoint", "token"])


def same(got: tuple, want: tuple, what: str) -> None:
    for part, a, b in zip(("codes", "scales", "tensor scales"), got, want, strict=True):
        assert_same_bits(a, b, f"{what}: {part}")


# ---- rotate


@every_backend
@every_dtype
@both_ways
@pytest.mark.parametrize("size", [8, 16, 32, 48, 64, 96, 128, 384])
def test_rotate_is_exact_where_arithmetic_is(size: int, transpose: bool, dtype, backend: str) -> None:
    x = torch.randint(-100, 101, (37, 384)).to(dtype)
    matrix = signed_permutation(size)
    want = by_hand.rotate(by_hand.numpy(x), side_of(matrix, 1.0, transpose))
    got = ops.rotate(x, matrix, 1.0, transpose, backend=backend)
    assert got.dtype == dtype
    assert_equal_arrays(by_hand.numpy(got).astype(np.float64), want)


@every_backend
@every_dtype
@both_ways
@pytest.mark.parametrize("size", [16, 48, 128])
@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_rotate_rounds_once_from_fp32(size: int, transpose: bool, dtype, out, backend: str) -> None:
    x, matrix = torch.randn(37, 384).to(dtype), torch.randn(size, size)
    side = side_of(matrix, 0.3, transpose)
    want, bound = by_hand.rotate(by_hand.numpy(x), side), rotation_bound(by_hand.numpy(x), side)
    got = ops.rotate(x, matrix, 0.3, transpose, out_dtype=out, backend=backend)
    assert got.dtype == out
    assert_within(got, want, rounded(want, bound, out))


@every_backend
def test_rotate_factor_is_not_rounded_to_bf16(backend: str) -> None:
    h = torch.from_numpy(by_hand.sylvester(32)).float()
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    got = ops.rotate(x, h, 32**-0.5, out_dtype=torch.float32, backend=backend)
    assert abs(float(got[0, 0]) / 32**0.5 - 1) < 2.0**-22 < 1.07e-4, "bf16(1/sqrt(32)) is off by 1.07e-4"


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotate_takes_any_leading_dimensions_and_none(dtype, backend: str) -> None:
    matrix = torch.randn(16, 16)
    x = torch.randn(2, 3, 5, 48).to(dtype)
    flat = ops.rotate(x.reshape(30, 48), matrix, backend=backend)
    assert_same_bits(ops.rotate(x, matrix, backend=backend), flat.reshape(2, 3, 5, 48))
    assert_same_bits(ops.rotate(x[0, 0, 0], matrix, backend=backend), flat[0])
    for empty in [(0, 48), (2, 0, 48)]:
        assert tuple(ops.rotate(torch.zeros(empty, dtype=dtype), matrix, backend=backend).shape) == empty


# ---- shapes and strides of the quantizers


def strided(rows: int, k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "columns of a wider tensor": torch.randn(rows, k + 40).to(dtype)[:, :k],
        "every other row": torch.randn(2 * rows, k).to(dtype)[::2],
        "a transpose": torch.randn(k, rows).to(dtype).t(),
        "every other column": torch.randn(rows, 2 * k).to(dtype)[:, ::2],
        "one row expanded": torch.randn(1, k).to(dtype).expand(rows, k),
        "an offset that breaks alignment": torch.randn(rows * k + 1).to(dtype)[1:].view(rows, k),
        "a middle slice of three dimensions": torch.randn(rows, 3, k).to(dtype)[:, 1],
    }


@every_backend
@every_format
@every_transform
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_input_equals_contiguous(name: str, transform, dtype, backend: str) -> None:
    matrix, factor = transform()
    k = 96 if matrix is None or matrix.shape[0] != 64 else 128
    for what, x in strided(33, k, dtype).items():
        dense = x.contiguous().clone()
        for call in (ops.rotate_quantize, ops.rotate_quantize_dequantize):
            got = call(x, matrix, factor, backend=backend, **options(name))
            want = call(dense, matrix, factor, backend=backend, **options(name))
            for a, b in zip(got, want, strict=True):
                assert_same_bits(a, b, what)
        if matrix is not None:
            assert_same_bits(
                ops.rotate(x, matrix, factor, backend=backend), ops.rotate(dense, matrix, factor, backend=backend), what
            )


@every_backend
def test_a_strided_matrix_equals_a_contiguous_one(backend: str) -> None:
    x, big = torch.randn(5, 64), torch.randn(64, 64)
    for matrix in (big[:32, 32:], big[::2, ::2], big[:32, :32].t()):
        want = ops.rotate_quantize(x, matrix.contiguous().clone(), backend=backend, **options("nvfp4"))
        same(ops.rotate_quantize(x, matrix, backend=backend, **options("nvfp4")), want, "strided matrix")


@every_backend
@every_format
@every_recipe
def test_any_leading_dimensions_and_none(name: str, recipe: str, backend: str) -> None:
    x = torch.randn(2, 3, 96)
    groups = 96 // by_hand.GROUP[name]
    flat = ops.rotate_quantize(x.reshape(6, 96), recipe=recipe, backend=backend, **options(name))
    deep = ops.rotate_quantize(x, recipe=recipe, backend=backend, **options(name))
    assert tuple(deep[0].shape) == (2, 3, 48)
    assert tuple(deep[1].shape) == (2, 3, groups)
    for a, b in zip(deep, flat, strict=True):
        assert_same_bits(a.reshape(b.shape), b)
    line = ops.rotate_quantize(x[0, 0], recipe=recipe, backend=backend, **options(name))
    assert tuple(line[0].shape) == (48,)
    assert tuple(line[1].shape) == (groups,)
    assert_same_bits(line[0], flat[0][0])
    for m in [(0,), (2, 0)]:
        empty = torch.zeros(*m, 96)
        codes, scale, _ = ops.rotate_quantize(empty, recipe=recipe, backend=backend, **options(name))
        assert tuple(codes.shape) == (*m, 48)
        assert tuple(scale.shape) == (*m, groups)
        values, _ = ops.rotate_quantize_dequantize(empty, recipe=recipe, backend=backend, **options(name))
        assert tuple(values.shape) == (*m, 96)


@every_backend
@every_format
@pytest.mark.parametrize("m", [0, 1, 7, 127, 128, 129, 385])
@pytest.mark.parametrize("k", [96, 160])
def test_blocked_scales_are_the_linear_ones_moved(
    name: str, m: int, k: int, backend: str, poisoned_memory: None
) -> None:
    x = torch.randn(m, k)
    linear = ops.rotate_quantize(x, backend=backend, **options(name))
    moved = ops.rotate_quantize(x, backend=backend, scale_layout="blocked", **options(name))
    assert_same_bits(moved[0], linear[0], "codes")
    assert moved[1].dtype == linear[1].dtype
    assert_equal_arrays(by_hand.numpy(moved[1]).ravel(), by_hand.blocked(by_hand.numpy(linear[1])), "padded buffer")
    assert_same_bits(ops.swizzle_scales(linear[1]).reshape(-1), moved[1].reshape(-1), "swizzle_scales")
    back = ops.unswizzle_scales(moved[1], m, k // by_hand.GROUP[name])
    assert_same_bits(back, linear[1], "unswizzle_scales")


# ---- the quantize-dequantize form


@every_backend
@every_dtype
@every_transform
@pytest.mark.parametrize("recipe", ["checkpoint", "token", "qutlass"])
@every_format
def test_quantize_dequantize_is_the_codes_decoded(name, recipe: str, transform, dtype, backend: str) -> None:
    if name == "mxfp4" and dtype == torch.float16:
        dtype = torch.bfloat16  # refused in fp16: test_ops_contract holds that
    matrix, factor = transform()
    x = (torch.randn(65, 192) * 2).to(dtype)
    codes, scale, tensor_scale = ops.rotate_quantize(x, matrix, factor, recipe=recipe, backend=backend, **options(name))
    values, again = ops.rotate_quantize_dequantize(x, matrix, factor, recipe=recipe, backend=backend, **options(name))
    assert values.dtype == dtype
    assert_same_bits(again, tensor_scale, "tensor scales")
    want = by_hand.values(codes.numpy(), by_hand.numpy(scale), name)  # without the tensor scale, exact in x.dtype
    assert_equal_arrays(values.double().numpy(), want)


# ---- rows on their own, repeats


@every_backend
@every_format
@every_recipe
@every_transform
@every_dtype
def test_a_row_does_not_depend_on_its_batch(name: str, recipe: str, transform, dtype, backend: str) -> None:
    matrix, factor = transform()
    x = torch.randn(257, 192).to(dtype)
    want = ops.rotate_quantize(x, matrix, factor, recipe=recipe, backend=backend, **options(name))
    for start, m in [(0, 1), (256, 1), (0, 2), (5, 7), (100, 31), (0, 127), (0, 128), (128, 129)]:
        rows = slice(start, start + m)
        got = ops.rotate_quantize(x[rows], matrix, factor, recipe=recipe, backend=backend, **options(name))
        scale_rows = want[2][rows] if want[2].numel() == 257 else want[2]
        same(got, (want[0][rows], want[1][rows], scale_rows), f"{m} rows from {start}")


@every_backend
@pytest.mark.parametrize("size", [16, 48, 64, 128, 384])
@every_dtype
def test_a_rotated_row_does_not_depend_on_its_batch(size: int, dtype, backend: str) -> None:
    """Sharper than the quantized form: the fp32 bits themselves."""
    x, matrix = torch.randn(257, 384).to(dtype), torch.randn(size, size)
    want = ops.rotate(x, matrix, out_dtype=torch.float32, backend=backend)
    for start, m in [(0, 1), (256, 1), (0, 2), (3, 3), (0, 16), (0, 128), (128, 129)]:
        got = ops.rotate(x[start : start + m], matrix, out_dtype=torch.float32, backend=backend)
        assert_same_bits(got, want[start : start + m], f"{m} rows from {start}")


@every_backend
@every_format
def test_twenty_repeats_have_equal_bits(name: str, backend: str) -> None:
    x, matrix = torch.randn(2049, 256).bfloat16(), torch.randn(64, 64) / 8
    want = ops.rotate_quantize(x, matrix, backend=backend, **options(name))
    for repeat in range(20):
        same(ops.rotate_quantize(x, matrix, backend=backend, **options(name)), want, f"repeat {repeat}")


# ---- nothing given is changed or handed back


@every_backend
@every_transform
@every_dtype
def test_inputs_are_unchanged_and_not_aliased(transform, dtype, backend: str) -> None:
    matrix, factor = transform()
    encode = torch.tensor([150.0])
    x = torch.randn(32, 192).to(dtype)
    given = [t for t in (x, matrix, encode) if t is not None]
    kept = [t.clone() for t in given]
    kwargs = {"format": FORMATS["nvfp4"], "encode_scale": encode, "backend": backend}
    made = [
        *ops.rotate_quantize(x, matrix, factor, **kwargs),
        *ops.rotate_quantize_dequantize(x, matrix, factor, **kwargs),
    ]
    if matrix is not None:
        made += [
            ops.rotate(x, matrix, factor, backend=backend),
            ops.rotate(x, matrix, factor, out_dtype=dtype, backend=backend),
        ]
    for before, after in zip(kept, given, strict=True):
        assert_same_bits(after, before, "an input")
    owned = {t.untyped_storage().data_ptr() for t in given}
    assert not owned & {t.untyped_storage().data_ptr() for t in made}, "an output is an input's memory"
    assert len({t.untyped_storage().data_ptr() for t in made}) == len(made), "two outputs share memory"


def test_an_identity_rotation_is_still_a_new_tensor() -> None:
    for backend in HERE:
        x = torch.randn(4, 32)
        y = ops.rotate(x, torch.eye(16), backend=backend)
        assert torch.equal(x, y)
        assert x.data_ptr() != y.data_ptr()
        scale = torch.zeros(128, 4, dtype=torch.uint8)
        assert ops.swizzle_scales(scale).data_ptr() != scale.data_ptr()


@every_backend
def test_the_bf16_result_is_the_fp32_one_rounded(backend: str) -> None:
    x, matrix = torch.randn(64, 128).bfloat16(), torch.randn(32, 32)
    fine = ops.rotate(x, matrix, out_dtype=torch.float32, backend=backend)
    assert_same_bits(ops.rotate(x, matrix, backend=backend), fine.bfloat16())
    assert (fine != fine.bfloat16().float()).any()


@pytest.mark.parametrize("backend", ["cpu_native", "any_torch"])
def test_a_sign_that_pytorch_has_put_off(backend: str) -> None:
    """`is_neg()`: the memory has the other sign."""
    x, matrix = torch.randn(4, 64), random_hadamard(64).matrix.float()
    lazy = torch._neg_view(x)
    assert torch.equal(ops.rotate(lazy, matrix, backend=backend), ops.rotate(-x, matrix, backend=backend))
    how = {"format": "mxfp4", "backend": backend}
    for got, want in zip(ops.rotate_quantize(lazy, matrix, **how), ops.rotate_quantize(-x, matrix, **how), strict=True):
        assert torch.equal(got, want)
