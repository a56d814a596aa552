"""The oracle of a whole layer: the transform in both directions, the blocked layout, the product, bias and ranges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import by_hand
from comparing import FP32_UNIT, assert_equal_arrays, assert_within
from quarterturn import reference
from quarterturn.formats import MXFP4, NVFP4

FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4}


def test_the_four_by_four_transform_both_ways() -> None:
    m = torch.from_numpy(np.kron(np.eye(4), by_hand.four_by_four()))
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 20] = 1.0, 2.0  # the first element of a 4-block in each 16-block
    forward = reference.rotate(x, m, 1.0)
    assert forward.dtype == torch.float64
    assert forward[0, :4].tolist() == [0.5, 0.5, 0.5, 0.5]
    assert forward[0, 20:24].tolist() == [1, 1, 1, 1]
    back = reference.rotate(x, m, 1.0, transpose=True)
    assert back[0, :4].tolist() == [0.5, -0.5, 0.5, 0.5]
    assert back[0, 20:24].tolist() == [1, -1, 1, 1]
    assert int((forward != 0).sum()) == int((back != 0).sum()) == 8


def test_the_factor_is_kept_apart() -> None:
    h = torch.from_numpy(by_hand.sylvester(32))
    x = torch.ones(1, 64)
    got = reference.rotate(x, h, 32**-0.5)
    want = np.zeros((1, 64))
    want[0, [0, 32]] = np.sqrt(32.0)
    # the factor may be held in fp32 or fp64; bf16(1/sqrt(32)) would be off by 1.07e-4
    np.testing.assert_allclose(got.numpy(), want, rtol=2 * FP32_UNIT, atol=0)


@pytest.mark.parametrize("transpose", [False, True])
def test_rotate_is_block_diagonal(transpose: bool) -> None:
    m = torch.randn(48, 48, dtype=torch.float64).float().double()
    x = torch.randn(5, 96)
    side = (m.T if transpose else m).numpy() * 0.25
    got = reference.rotate(x, m, 0.25, transpose=transpose).numpy()
    want = by_hand.rotate(x.numpy(), side)
    # Two ways to add 48 float64 products: 48 * 2^-53 = 5e-15 of their magnitudes.
    assert np.abs(got - want).max() < 1e-13 * np.abs(want).max()


def test_rotated_values_are_quantized_unrounded() -> None:
    """z goes to the quantizer in fp32: rounding it to bf16 first would give other codes."""
    x = torch.randn(64, 64).bfloat16()
    h = by_hand.sylvester(64)
    z = by_hand.rotate(by_hand.numpy(x), h / 8).astype(np.float32)
    want = by_hand.quantize(z, "nvfp4", 500.0)
    early = by_hand.quantize(by_hand.numpy(torch.from_numpy(z).bfloat16()), "nvfp4", 500.0)
    assert (want[0] != early[0]).any(), "the sample does not tell the two apart"
    got = reference.rotate_quantize(x, torch.from_numpy(h), 0.125, format=NVFP4, encode_scale=torch.tensor([500.0]))
    assert_equal_arrays(by_hand.numpy(got[1]), want[1], "scale bytes")
    assert_equal_arrays(by_hand.unpack(got[0].numpy()), want[0], "codes")


def test_blocked_layout_literals() -> None:
    assert by_hand.blocked_offset(33, 2, 4) == 22
    assert by_hand.blocked_offset(130, 5, 8) == 1569
    marked = torch.zeros(34, 4, dtype=torch.uint8)
    marked[33, 2] = 77
    got = reference.swizzle(marked).flatten()
    assert got.numel() == 512
    assert got.nonzero().tolist() == [[22]]
    assert got[22] == 77
    marked = torch.zeros(131, 8, dtype=torch.uint8)
    marked[130, 5] = 78
    got = reference.swizzle(marked).flatten()
    assert got.numel() == 2048
    assert got.nonzero().tolist() == [[1569]]
    assert got[1569] == 78


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 5), (127, 4), (128, 3), (129, 6), (385, 7)])
def test_blocked_layout_whole_buffer(rows: int, cols: int, poisoned_memory: None) -> None:
    scale = torch.randint(1, 256, (rows, cols), dtype=torch.uint8)
    assert_equal_arrays(reference.swizzle(scale).flatten().numpy(), by_hand.blocked(scale.numpy()), "padded buffer")


def test_dequantize_is_the_value_equation() -> None:
    codes = torch.full((1, 8), 0x21, dtype=torch.uint8)  # .5, 1, .5, 1, ...
    scale = torch.tensor([[0x39]], dtype=torch.uint8)  # 1.125
    got = reference.dequantize(codes, scale, torch.tensor([0.5]), NVFP4)
    assert got.dtype == torch.float64
    assert got.tolist() == [[0.28125, 0.5625] * 8]
    codes = torch.full((1, 16), 0xF8, dtype=torch.uint8)  # -0, -6, ...
    got = reference.dequantize(codes, torch.tensor([[125]], dtype=torch.uint8), torch.tensor([1.0]), MXFP4)
    assert got.tolist() == [[0.0, -1.5] * 16]


# ---- a layer by hand


def ones_layer() -> dict:
    """N = 2, K = 16: every weight code is 1.0 in row 0 and 2.0 in row 1, block scales 1.5 and .25."""
    codes = torch.tensor([[0x22] * 8, [0x44] * 8], dtype=torch.uint8)
    scale = torch.tensor([[0x3C], [0x28]], dtype=torch.uint8)  # 1.5 = 1.1 * 2^0, .25 = 2^-2
    return {"w_codes": codes, "w_scale": scale}


def layer(x: torch.Tensor, tensor_scale: list[float], sizes: tuple[int, ...], name: str = "nvfp4", **options):
    options = {
        "activations": "fp4",
        "encode_scale": None,
        "bias": None,
        "input_transform": None,
        "output_transform": None,
    } | options
    parts = ones_layer() | options.pop("weight", {})
    return reference.linear(
        x, parts["w_codes"], parts["w_scale"], torch.tensor(tensor_scale), sizes,
        format=FORMATS[name], recipe=options.pop("recipe", "checkpoint"), rule="even", **options,
    )  # fmt: skip


def test_w4a16_by_hand() -> None:
    x = torch.arange(16.0)[None]  # the sum is 120
    got = layer(x, [0.5], (2,), activations="bf16")
    assert got.tolist() == [[120 * 1.5 * 0.5, 120 * 2 * 0.25 * 0.5]]


def test_w4a4_by_hand_with_bias_once_and_a_scale_per_range() -> None:
    # encode = 4: s = E4M3(4 * 6/6) = 4, tensor scale .25, so x = 6, 3, 0 ... is exact; the sum is 9
    x = torch.tensor([[6.0, 3.0] + [0.0] * 14])
    bias = torch.tensor([10.0, -1.0])
    got = layer(x, [0.5, 8.0], (1, 1), encode_scale=torch.tensor([4.0]), bias=bias)
    assert got.tolist() == [[9 * 1.5 * 0.5 + 10, 9 * 2 * 0.25 * 8 - 1]]


def test_w4a4_quantizes_its_input() -> None:
    # 7 decodes to 6.75 with encode 1 (7/6 -> 1.125, times 6), so 7 * 1.0 * 1.5 is 10.125 and not 10.5
    x = torch.tensor([[7.0] + [0.0] * 15])
    got = layer(x, [1.0], (2,), encode_scale=torch.tensor([1.0]))
    assert got.tolist() == [[10.125, 3.375]]


def test_output_transform_takes_the_bias_along() -> None:
    u = torch.tensor([[1.0, 2.0], [0.0, 4.0]], dtype=torch.float64)
    x = torch.tensor([[6.0, 3.0] + [0.0] * 14])
    bias = torch.tensor([10.0, -1.0])
    before = [9 * 1.5 + 10, 9 * 0.5 - 1]  # 23.5, 3.5
    got = layer(x, [1.0], (2,), encode_scale=torch.tensor([4.0]), bias=bias, output_transform=(u, 1.0, False))
    assert got.tolist() == [[before[0], 2 * before[0] + 4 * before[1]]]
    got = layer(x, [1.0], (2,), encode_scale=torch.tensor([4.0]), bias=bias, output_transform=(u, 0.5, True))
    assert got.tolist() == [[(before[0] + 2 * before[1]) / 2, 2 * before[1]]]


def test_w4a16_rounds_the_rotated_input_once() -> None:
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    m = torch.eye(16, dtype=torch.float64)
    m[0, 0] = 1 + 2.0**-9  # a tie in bf16, to even: 1
    got = layer(x, [1.0], (2,), activations="bf16", input_transform=(m, 1.0, False))
    assert got.tolist() == [[1.5, 0.5]]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_a_random_layer_equals_the_second_writing(name: str, activations: str) -> None:
    m, n, k = 5, 6, 96
    x = torch.randn(m, k)
    side = torch.randn(32, 32).double()
    w_codes, w_scale = by_hand.quantize(torch.randn(n, k).numpy(), name, 100.0)
    z = by_hand.rotate(x.numpy(), side.T.numpy()).astype(np.float32)
    encode, tensor_scale = (40.0, np.float32(1) / np.float32(40)) if name == "nvfp4" else (None, np.float32(1))
    a = z.astype(np.float64)
    if activations == "fp4":
        x_codes, x_scale = by_hand.quantize(z, name, 1.0 if encode is None else encode)
        a = by_hand.values(by_hand.pack(x_codes), x_scale, name)
    else:
        tensor_scale = np.float32(1)
    w = by_hand.values(by_hand.pack(w_codes), w_scale, name)
    want = (a @ w.T) * np.repeat([0.01, 3.0], [2, 4]).astype(np.float32) * tensor_scale
    weight = {"w_codes": torch.from_numpy(by_hand.pack(w_codes)), "w_scale": torch.from_numpy(w_scale)}
    got = layer(
        x, [0.01, 3.0], (2, 4), name, weight=weight, activations=activations,
        encode_scale=None if encode is None else torch.tensor([encode]), input_transform=(side, 1.0, True),
    )  # fmt: skip
    # two roundings to fp32 at most: the product of the tensor scales, and the accumulator
    assert_within(got, want, 2 * FP32_UNIT * (np.abs(a) @ np.abs(w).T) * np.abs(want / (a @ w.T)) + 1e-30)
