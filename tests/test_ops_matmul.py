"""fp4_matmul on every backend this machine has, against float64 by hand.

The data of the exact tests keep every partial sum an integer multiple of 2^-4 below 2^15, so fp32 accumulation loses
nothing in any order and y = fp32(acc * fp32(sx * sw)) + bias is one number: fp32 and fp16 must hit it. In bf16 a CPU
library rounds the accumulator to bf16 first, which the definition allows: one bf16 ulp of the product, never more.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import by_hand
from comparing import (
    BF16_UNIT,
    FP32_UNIT,
    HERE,
    assert_equal_arrays,
    assert_same_bits,
    assert_within,
    rounded,
)
from quarterturn import MXFP4, NVFP4, FP4Tensor, ops
from test_ops import DTYPES, FORMATS, every_backend, every_dtype, every_format, options

ONE_BYTE = {"nvfp4": 0x38, "mxfp4": 127}  # scale 1; E4M3 doubles every 8 bytes, E8M0 every one


def small_scales(rows: int, groups: int, name: str) -> torch.Tensor:
    """Scale bytes of .5, 1 and 2."""
    step = torch.randint(-1, 2, (rows, groups)) * (8 if name == "nvfp4" else 1)
    return (ONE_BYTE[name] + step).to(torch.uint8).view(FORMATS[name].scale_dtype)


def weight(
    name: str, n: int, k: int, tensor_scale: tuple[float, ...] = (1.0,), sizes: tuple[int, ...] = ()
) -> FP4Tensor:
    """Random codes. MXFP4 has no tensor scale, so there the one given is left at 1."""
    if name == "mxfp4":
        tensor_scale = (1.0,) * len(tensor_scale)
    codes = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
    scale = small_scales(n, k // by_hand.GROUP[name], name)
    return FP4Tensor(codes, scale, torch.tensor(tensor_scale), None, FORMATS[name], sizes or (n,))


def activations(name: str, m: int, k: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    codes = torch.randint(0, 256, (m, k // 2)).to(torch.uint8)
    scale = small_scales(m, k // by_hand.GROUP[name], name)
    return codes, scale, by_hand.values(codes.numpy(), by_hand.numpy(scale), name)


def weight_values(w: FP4Tensor) -> np.ndarray:
    return by_hand.values(w.codes.numpy(), by_hand.numpy(w.block_scale), w.format.name)


def product(a: np.ndarray, w: FP4Tensor, x_scale: torch.Tensor | None, bias: torch.Tensor | None) -> tuple:
    """y of the definition in fp32, and the part of it before the bias."""
    acc = (a @ weight_values(w).T).astype(np.float32)
    per_row = np.repeat(w.tensor_scale.numpy(), w.output_sizes)
    alpha = per_row * (np.float32(1) if x_scale is None else x_scale.numpy().reshape(-1, 1))
    scaled = acc * alpha
    return scaled + (np.float32(0) if bias is None else bias.float().numpy()), scaled


def check(got: torch.Tensor, want: np.ndarray, scaled: np.ndarray, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    if dtype == torch.bfloat16:
        assert_within(got, want.astype(np.float64), rounded(want, BF16_UNIT * np.abs(scaled), dtype).astype(np.float64))
    else:
        assert_same_bits(got, torch.from_numpy(want).to(dtype), "y")


@every_backend
# E8M0 reaches beyond fp16: test_mxfp4_weights_under_fp16_input says what then.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in FORMATS for dtype in DTYPES if (name, dtype) != ("mxfp4", torch.float16)],
)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 3, 96), (3, 16, 96), (127, 24, 160), (129, 40, 64), (16, 130, 96)])
def test_w4a16_exact(m: int, n: int, k: int, bias: bool, name: str, dtype, backend: str) -> None:
    w = weight(name, n, k, (0.37,))
    x = (torch.randint(-12, 13, (m, k)) / 4).to(dtype)
    b = torch.randn(n).to(dtype) if bias else None
    want, scaled = product(by_hand.numpy(x).astype(np.float64), w, None, b)
    check(ops.fp4_matmul(x, weight=w, bias=b, backend=backend), want, scaled, dtype)


@every_backend
@every_format
@pytest.mark.parametrize("out", DTYPES, ids=str)
@pytest.mark.parametrize("per_row", [False, True], ids=["", "token scales"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 3, 96), (7, 16, 96), (129, 40, 160)])
def test_w4a4_of_codes_exact(m: int, n: int, k: int, per_row: bool, out, name: str, backend: str) -> None:
    w = weight(name, n, k, (0.37,))
    codes, scale, a = activations(name, m, k)
    x_scale = torch.rand(m if per_row else 1) + 0.01
    bias = torch.randn(n)
    want, scaled = product(a, w, x_scale, bias)
    got = ops.fp4_matmul(codes, x_scale, weight=w, x_block_scale=scale, bias=bias, out_dtype=out, backend=backend)
    check(got, want, scaled, out)


@every_backend
@every_dtype
@every_format
@pytest.mark.parametrize("per_row", [False, True], ids=["", "token scales"])
def test_w4a4_of_quantize_dequantize_values_exact(per_row: bool, name: str, dtype, backend: str) -> None:
    w = weight(name, 24, 96, (0.37,))
    _, _, a = activations(name, 33, 96)
    # The values are E2M1 times 2^-2 .. 2^2, or times E4M3: all of them numbers of fp16 and bf16 too.
    assert torch.equal(torch.from_numpy(a).to(dtype).double(), torch.from_numpy(a).double())
    x_scale = torch.rand(33 if per_row else 1) + 0.01
    want, scaled = product(a, w, x_scale, None)
    got = ops.fp4_matmul(torch.from_numpy(a).to(dtype), x_scale, weight=w, backend=backend)
    check(got, want, scaled, dtype)


@every_backend
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
def test_codes_and_their_values_give_the_same_product(name: str, out, backend: str) -> None:
    w = weight(name, 24, 96, (0.37,))
    codes, scale, a = activations(name, 33, 96)
    x_scale = torch.tensor([0.7])
    by_codes = ops.fp4_matmul(codes, x_scale, weight=w, x_block_scale=scale, out_dtype=out, backend=backend)
    by_values = ops.fp4_matmul(torch.from_numpy(a).to(out), x_scale, weight=w, backend=backend)
    # fp32: exact data, equal bits. bf16: either may have its accumulator rounded by the library, an ulp each way.
    gap = np.abs(by_codes.double().numpy() - by_values.double().numpy())
    assert (gap <= (0 if out == torch.float32 else 4 * BF16_UNIT * np.abs(by_values.double().numpy()))).all()


@every_backend
@every_dtype
def test_every_range_has_its_own_alpha(dtype, backend: str) -> None:
    """q/k/v with std .02, .2 and 2: taking one scale for all gave the smaller shard a relative MSE of .795."""
    sizes, stds = (16, 8, 8), (0.02, 0.2, 2.0)
    parts, encodes = [], []
    for n, std in zip(sizes, stds, strict=True):
        values = torch.randn(n, 96) * std
        encodes.append(float(np.float32(2688) / values.abs().max().numpy()))
        parts.append(by_hand.quantize(values.numpy(), "nvfp4", encodes[-1]))
    codes = torch.from_numpy(np.concatenate([by_hand.pack(c) for c, _ in parts]))
    scale = torch.from_numpy(np.concatenate([s for _, s in parts])).view(torch.float8_e4m3fn)
    w = FP4Tensor(codes, scale, 1 / torch.tensor(encodes), torch.tensor(encodes), NVFP4, sizes)
    x = (torch.randint(-8, 9, (17, 96)) / 4).to(dtype)
    a = by_hand.numpy(x).astype(np.float64)
    alpha = np.repeat(w.tensor_scale.numpy().astype(np.float64), sizes)
    want = (a @ weight_values(w).T) * alpha
    absolute = (np.abs(a) @ np.abs(weight_values(w)).T) * alpha
    bound = 98 * FP32_UNIT * absolute + (BF16_UNIT * np.abs(want) if dtype == torch.bfloat16 else 0)
    assert_within(ops.fp4_matmul(x, weight=w, backend=backend), want, rounded(want, bound, dtype))


@every_backend
@every_format
@pytest.mark.parametrize("k", [64, 96, 1024])
def test_fp32_is_fp32(k: int, name: str, backend: str) -> None:
    """Random data: K additions and products in fp32 and no TF32, whose products would be off by 2^-11."""
    w = weight(name, 40, k, (0.37,))
    x = torch.randn(33, k)
    want = (x.double().numpy() @ weight_values(w).T) * float(w.tensor_scale)
    bound = (k + 2) * FP32_UNIT * (np.abs(x.double().numpy()) @ np.abs(weight_values(w)).T) * float(w.tensor_scale)
    assert_within(ops.fp4_matmul(x, weight=w, backend=backend), want, bound)


@every_backend
@pytest.mark.parametrize("tensor_scale", [1e-5, 1e-3, 1.0, 1e3])
def test_fp16_does_not_overflow_before_the_tensor_scale(tensor_scale: float, backend: str) -> None:
    """The accumulator reaches 96 * 2688 * 6, beyond fp16; the result does not where the tensor scale says so."""
    w = weight("nvfp4", 8, 96, (tensor_scale,))
    w = FP4Tensor(torch.full_like(w.codes, 0x77), torch.full((8, 6), 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn),
                  w.tensor_scale, None, NVFP4, (8,))  # fmt: skip
    x = torch.full((3, 96), 6.0, dtype=torch.float16)
    x[1] = 6.0 * 2.0**-12
    x[2, ::2] = -6.0
    want = by_hand.numpy(x).astype(np.float32).sum(axis=1, keepdims=True) * np.float32(2688)
    want = np.repeat(want * np.float32(tensor_scale), 8, axis=1)
    with np.errstate(over="ignore"):
        assert_equal_arrays(ops.fp4_matmul(x, weight=w, backend=backend).numpy(), want.astype(np.float16))


@every_backend
def test_mxfp4_weights_under_fp16_input(backend: str) -> None:
    """The decoded weight would overflow fp16, so it is not decoded to fp16."""
    w = weight("mxfp4", 8, 64)
    scale = torch.full((8, 2), 127 + 15, dtype=torch.uint8)  # 6 * 2^15 is beyond fp16, times 2^-15 it is not
    w = FP4Tensor(w.codes, scale, w.tensor_scale, None, MXFP4, (8,))
    x = torch.full((2, 64), 2.0**-15, dtype=torch.float16)
    got = ops.fp4_matmul(x, weight=w, backend=backend)
    want = (by_hand.numpy(x).astype(np.float64) @ weight_values(w).T).astype(np.float32)
    assert_equal_arrays(got.numpy(), want.astype(np.float16))


@every_backend
def test_an_mxfp4_tensor_scale_that_is_not_one_is_applied(backend: str) -> None:
    w = weight("mxfp4", 8, 64)
    w = FP4Tensor(w.codes, w.block_scale, torch.tensor([0.5]), None, MXFP4, (8,))
    x = torch.ones(2, 64)
    got = ops.fp4_matmul(x, weight=w.validate(), backend=backend)
    assert_equal_arrays(w.dequantize().double().numpy(), weight_values(w) * 0.5)
    assert_equal_arrays(got.double().numpy(), np.ones((2, 64)) @ weight_values(w).T * 0.5)


@every_backend
def test_shapes_and_strides(backend: str) -> None:
    w = weight("nvfp4", 24, 96, (0.37,))
    x = torch.randint(-8, 9, (2, 3, 96)).float()
    flat = ops.fp4_matmul(x.reshape(6, 96), weight=w, backend=backend)
    assert_same_bits(ops.fp4_matmul(x, weight=w, backend=backend), flat.reshape(2, 3, 24))
    assert_same_bits(ops.fp4_matmul(x[0, 0], weight=w, backend=backend), flat[0])
    big = torch.randint(-8, 9, (192, 200)).float()
    for view in (big[:12, :96], big[:24:2, 104:], big[:96, :12].t(), big[:12, 1:193:2]):
        want = ops.fp4_matmul(view.contiguous().clone(), weight=w, backend=backend)
        assert_same_bits(ops.fp4_matmul(view, weight=w, backend=backend), want)
    for empty in [(0, 96), (2, 0, 96)]:
        assert tuple(ops.fp4_matmul(torch.zeros(empty), weight=w, backend=backend).shape) == (*empty[:-1], 24)
    codes, scale, _ = activations("nvfp4", 0, 96)
    got = ops.fp4_matmul(codes, torch.ones(1), weight=w, x_block_scale=scale, backend=backend)
    assert tuple(got.shape) == (0, 24)


@every_backend
def test_strided_weights_and_scales(backend: str) -> None:
    big = weight("nvfp4", 48, 192, (0.37,))
    x = torch.randint(-8, 9, (5, 96)).float()
    part = FP4Tensor(big.codes[::2, 48:], big.block_scale[::2, 6:], big.tensor_scale, None, NVFP4, (24,))
    scale = part.block_scale.view(torch.uint8).contiguous().view(torch.float8_e4m3fn)
    dense = FP4Tensor(part.codes.contiguous(), scale, part.tensor_scale, None, NVFP4, (24,))
    assert_same_bits(ops.fp4_matmul(x, weight=part, backend=backend), ops.fp4_matmul(x, weight=dense, backend=backend))


@every_backend
@every_format
def test_a_row_that_is_not_finite_is_nan_and_alone(name: str, backend: str) -> None:
    w = weight(name, 24, 96)
    x = torch.randn(5, 96)
    _clean, tensor_scale = ops.rotate_quantize_dequantize(x, backend=backend, **options(name))
    x[2, 40] = float("inf")
    values, tensor_scale = ops.rotate_quantize_dequantize(x, backend=backend, **options(name))
    codes, scale, _ = ops.rotate_quantize(x, backend=backend, **options(name))
    by_codes = ops.fp4_matmul(
        codes, tensor_scale, weight=w, x_block_scale=scale, out_dtype=torch.float32, backend=backend
    )
    for got in (ops.fp4_matmul(values, tensor_scale, weight=w, backend=backend), by_codes):
        assert torch.isnan(got[2]).all()
        assert torch.isfinite(got[[0, 1, 3, 4]]).all()


def test_nothing_given_is_changed() -> None:
    for backend in HERE:
        w, x, bias = weight("nvfp4", 24, 96), torch.randn(5, 96), torch.randn(24)
        given = [w.codes, w.block_scale.view(torch.uint8), w.tensor_scale, x, bias]
        kept = [t.clone() for t in given]
        y = ops.fp4_matmul(x, weight=w, bias=bias, backend=backend)
        for before, after in zip(kept, given, strict=True):
            assert_same_bits(after, before, "an input")
        assert y.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in given}
