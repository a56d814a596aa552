"""FP4Tensor: the value equation, one tensor scale per range, the stored number kept, and what validate refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import by_hand
from comparing import assert_equal_arrays, assert_refused, assert_same_bits
from quarterturn import MXFP4, NVFP4, FP4Tensor

FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4}


def make(name: str = "nvfp4", n: int = 4, k: int = 64, encode: tuple[float, ...] = (), sizes: tuple[int, ...] = ()):
    codes, scale = by_hand.quantize(torch.randn(n, k).numpy(), name, 100.0)
    fmt = FORMATS[name]
    count = len(sizes) or 1
    encode_scale = torch.tensor(encode or (100.0,) * count) if name == "nvfp4" else None
    return FP4Tensor(
        codes=torch.from_numpy(by_hand.pack(codes)),
        block_scale=torch.from_numpy(scale).view(fmt.scale_dtype),
        tensor_scale=torch.ones(count) if encode_scale is None else 1 / encode_scale,
        encode_scale=encode_scale,
        format=fmt,
        output_sizes=sizes or (n,),
    )


def change(t: FP4Tensor, **fields: object) -> FP4Tensor:
    return dataclasses.replace(t, **fields)


def exact(t: FP4Tensor) -> np.ndarray:
    """e2m1 * block_scale by hand."""
    return by_hand.values(t.codes.numpy(), by_hand.numpy(t.block_scale), t.format.name)


def test_the_byte_0x21() -> None:
    one = torch.tensor([[0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    t = FP4Tensor(torch.full((1, 8), 0x21, dtype=torch.uint8), one, torch.tensor([1.0]), None, NVFP4, (1,))
    assert t.dequantize().tolist() == [[0.5, 1.0] * 8]
    assert t.shape == (1, 16)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_every_byte_of_codes_with_every_finite_scale(name: str) -> None:
    fmt = FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8)[None].repeat(16, 1)
    per_row = 512 // fmt.group_size
    scale = torch.arange(16 * per_row, dtype=torch.int64) % 255  # 0xFF is NaN in both
    scale = torch.where((scale == 0x7F) & (name == "nvfp4"), 0x38, scale).to(torch.uint8).reshape(16, per_row)
    t = FP4Tensor(codes, scale.view(fmt.scale_dtype), torch.ones(1), None, fmt, (16,))
    with np.errstate(over="ignore"):  # 6 * 2^127 is Inf in fp32
        want = exact(t).astype(np.float32)
    assert_equal_arrays(t.dequantize().numpy(), want)
    assert_equal_arrays(np.signbit(t.dequantize().numpy()), np.signbit(want), "signs, -0 included")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_leave_the_tensor_scale_out_and_are_exact(dtype: torch.dtype) -> None:
    t = make(encode=(3.0,))
    assert t.values(dtype).dtype == dtype
    assert_equal_arrays(t.values(dtype).double().numpy(), exact(t))
    assert_equal_arrays(make("mxfp4").values(torch.bfloat16).shape, (4, 64))


def test_values_of_mxfp4_are_exact_in_bf16() -> None:
    t = make("mxfp4")
    assert_equal_arrays(t.values(torch.bfloat16).double().numpy(), exact(t))


def test_dequantize_has_one_tensor_scale_per_range() -> None:
    t = make(n=6, encode=(100.0, 7.0, 0.3), sizes=(2, 1, 3))
    per_row = np.repeat(t.tensor_scale.numpy(), [2, 1, 3])[:, None]
    # one rounding: the exact fp32 value times the fp32 tensor scale
    assert_equal_arrays(t.dequantize().numpy(), exact(t).astype(np.float32) * per_row)


@pytest.mark.parametrize(("name", "byte"), [("nvfp4", 0x7F), ("mxfp4", 255)])
def test_a_nan_scale_gives_nan_whatever_the_codes(name: str, byte: int) -> None:
    t = make(name)
    scale = t.block_scale.view(torch.uint8).clone()
    scale[1, 0] = byte
    t = change(t, block_scale=scale.view(t.format.scale_dtype))
    size = t.format.group_size
    for got in (t.dequantize(), t.values(torch.bfloat16)):
        assert torch.isnan(got[1, :size]).all()
        assert int(torch.isnan(got).sum()) == size


def test_from_encode_keeps_the_stored_number() -> None:
    # 1/(1/x) is not x for 16% of fp32 values: 17 of 100 here would come back changed from the multiplier alone
    stored = torch.rand(100) * 1e4 + 1e-3
    assert (1 / (1 / stored) != stored).any()
    base = make(n=100, sizes=(1,) * 100, encode=tuple(stored.tolist()))
    t = FP4Tensor.from_encode(base.codes, base.block_scale, stored[:1], NVFP4)
    assert_same_bits(t.encode_scale, stored[:1], "encode_scale")
    assert_same_bits(t.tensor_scale, 1 / stored[:1], "tensor_scale")
    assert t.output_sizes == (100,)
    assert t.layout == "linear"
    t = FP4Tensor.from_encode(*(lambda m: (m.codes, m.block_scale))(make("mxfp4")), None, MXFP4)
    assert t.encode_scale is None
    assert t.tensor_scale.tolist() == [1.0]


def test_nbytes_and_bits_per_value() -> None:
    t = make(n=8, k=128)
    stored = 8 * 64 + 8 * 8
    assert stored <= t.nbytes <= stored + 8, "codes, block scales and at most the two fp32 numbers"
    assert NVFP4.bits_per_value == 4.5
    assert MXFP4.bits_per_value == 4.25
    assert tuple(NVFP4.codes_shape(8, 128)) == (8, 64)
    assert tuple(NVFP4.scale_shape(8, 128)) == (8, 8)
    assert tuple(MXFP4.scale_shape(8, 128)) == (8, 4)


def test_to_keeps_bits_and_dtypes() -> None:
    t = make()
    moved = t.to("cpu")
    for field in ("codes", "block_scale", "tensor_scale", "encode_scale"):
        assert_same_bits(getattr(moved, field), getattr(t, field), field)


def test_printing_does_not_dequantize(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object, **__: object) -> None:
        raise AssertionError("printing made the values")

    t = make()
    for method in ("values", "dequantize"):
        monkeypatch.setattr(FP4Tensor, method, no)
    assert "nvfp4" in repr(t).lower()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_validate_accepts_a_good_tensor(name: str) -> None:
    make(name).validate("model.layers.0.q_proj")
    make(name, n=6, sizes=(2, 4)).validate()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda t: change(t, codes=t.codes.to(torch.int32)), ["uint8", "int32"]),
        (lambda t: change(t, codes=t.codes[0]), ["codes"]),
        (lambda t: change(t, block_scale=t.block_scale.view(torch.uint8)), ["float8_e4m3fn", "uint8"]),
        (lambda t: change(t, block_scale=t.block_scale.float()), ["float8_e4m3fn", "float32"]),
        (lambda t: change(t, block_scale=t.block_scale[:, :3]), ["(4, 4)", "(4, 3)"]),
        (lambda t: change(t, block_scale=t.block_scale[:3]), ["(4, 4)", "(3, 4)"]),
        (lambda t: change(t, tensor_scale=torch.ones(2)), ["tensor scale", "2"]),
        (lambda t: change(t, tensor_scale=torch.ones(1, dtype=torch.bfloat16)), ["bfloat16"]),
        (lambda t: change(t, encode_scale=torch.ones(2)), ["encode"]),
        (lambda t: change(t, output_sizes=(3,)), ["output_sizes"]),
        (lambda t: change(t, output_sizes=(2, 2)), ["(2, 2)"]),
        (lambda t: change(t, layout="swizzled"), ["swizzled"]),
    ],
)
def test_validate_refuses(fault, words: list[str]) -> None:
    text = assert_refused(lambda: fault(make()).validate("model.layers.0.q_proj"), *words)
    assert "model.layers.0.q_proj" in text


def test_validate_refuses_groups_that_do_not_divide() -> None:
    t = make("mxfp4", k=64)
    short = change(t, codes=t.codes[:, :24])  # K = 48
    assert_refused(lambda: short.validate(), "48", "32")
