"""The oracle against literals and against the definition written a second time (by_hand), so it cannot drift."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

import by_hand
from comparing import assert_equal_arrays
from quarterturn import formats, reference
from quarterturn.formats import MXFP4, NVFP4

FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4}
NAN_BYTE = {"nvfp4": 0x7F, "mxfp4": 255}
# value -> code, the code just below, the code just above; codes 0..7 are 0 .5 1 1.5 2 3 4 6
TIES = [
    (0.25, 0, 0, 1),
    (0.75, 2, 1, 2),
    (1.25, 2, 2, 3),
    (1.75, 4, 3, 4),
    (2.5, 4, 4, 5),
    (3.5, 6, 5, 6),
    (5.0, 6, 6, 7),
]


def below(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(-np.inf)))


def above(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def quantize(z: np.ndarray | list, name: str, encode: float = 1.0, rule: str = "even") -> tuple[np.ndarray, np.ndarray]:
    """The reference's codes, one a byte, and its scale bytes."""
    z = torch.as_tensor(np.asarray(z, dtype=np.float32))
    codes, scale = reference.quantize(z, FORMATS[name], encode, rule=rule)
    return by_hand.unpack(by_hand.numpy(codes)), by_hand.numpy(scale)


def lone(value: float, name: str, rule: str = "even") -> tuple[int, float]:
    """Scale byte and decoded value of one value in a group of zeros."""
    z = np.zeros((1, by_hand.GROUP[name]), dtype=np.float32)
    z[0, 3] = value
    codes, scale = reference.quantize(torch.from_numpy(z), FORMATS[name], 1.0, rule=rule)
    decoded = reference.dequantize(codes, scale, torch.ones(1), FORMATS[name])
    assert not decoded[0, :3].any()
    assert not decoded[0, 4:].any()
    return int(by_hand.numpy(scale)[0, 0]), float(decoded[0, 3])


# ---- E2M1 and packing


def test_e2m1_table() -> None:
    got = reference.e2m1_decode(torch.arange(16, dtype=torch.uint8))
    assert got.dtype == torch.float64
    assert got.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.signbit(got).tolist() == [False] * 8 + [True] * 8, "code 8 is -0"


@pytest.mark.parametrize(("value", "code", "under", "over"), TIES)
def test_e2m1_ties_and_both_neighbours(value: float, code: int, under: int, over: int) -> None:
    got = reference.e2m1_encode(f64(value, below(value), above(value), -value, -below(value), -above(value)))
    assert got.dtype == torch.uint8
    assert got.tolist() == [code, under, over, code + 8, under + 8, over + 8]


def test_e2m1_saturation_and_signed_zero() -> None:
    values = f64(0.0, -0.1, -0.0, 6.0, 6.5, 7.0, 1e30, -6.0, -8.0, -1e30, 1e-30, -1e-30)
    assert reference.e2m1_encode(values).tolist() == [0, 8, 8, 7, 7, 7, 7, 15, 15, 15, 0, 8]


def test_e2m1_every_value_encodes_to_itself() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert reference.e2m1_encode(reference.e2m1_decode(codes)).tolist() == codes.tolist()


def test_packing_of_every_byte() -> None:
    assert reference.e2m1_decode(reference.unpack(torch.tensor([0x21], dtype=torch.uint8))).tolist() == [0.5, 1.0]
    every = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    codes = reference.unpack(every)
    assert codes.shape == (2, 256)
    assert codes.dtype == torch.uint8
    assert codes[:, 0::2].flatten().tolist() == [b & 15 for b in range(256)]
    assert codes[:, 1::2].flatten().tolist() == [b >> 4 for b in range(256)]
    assert torch.equal(reference.pack(codes), every)


# ---- scales


def test_one_sixth_is_the_agreed_constant() -> None:
    assert struct.pack(">f", float(formats.INV6)).hex() == "3e2aaaab"
    assert struct.unpack(">f", struct.pack(">f", float(formats.INV6)))[0] == float(formats.INV6), "not an fp32 number"


def test_e4m3_every_byte() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    got = reference.e4m3_decode(every).numpy()
    np.testing.assert_array_equal(got, by_hand.E4M3)
    np.testing.assert_array_equal(got, every.view(torch.float8_e4m3fn).to(torch.float64).numpy())  # a second witness
    assert [float(got[b]) for b in (0x01, 0x08, 0x38, 0x7E)] == [2.0**-9, 2.0**-6, 1.0, 448.0]
    assert np.isnan(got[[0x7F, 0xFF]]).all()


def test_e4m3_values_ties_and_neighbours() -> None:
    table = [float(v) for v in by_hand.E4M3[:127]]
    assert reference.e4m3_encode(torch.tensor(table)).tolist() == list(range(127))
    ties = [(table[b] + table[b + 1]) / 2 for b in range(126)]
    assert reference.e4m3_encode(torch.tensor(ties)).tolist() == [b + b % 2 for b in range(126)]
    assert reference.e4m3_encode(torch.tensor([below(v) for v in ties])).tolist() == list(range(126))
    assert reference.e4m3_encode(torch.tensor([above(v) for v in ties])).tolist() == list(range(1, 127))


def test_e4m3_saturates_to_7e() -> None:
    values = torch.tensor([448.0, 449.0, 463.9, 464.0, 465.0, 479.9, 480.0, 512.0, 1e4, 3e38])
    assert reference.e4m3_encode(values).tolist() == [0x7E] * 10


def test_e8m0_every_byte() -> None:
    got = reference.e8m0_decode(torch.arange(256, dtype=torch.uint8))
    assert got[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert torch.isnan(got[255])


@pytest.mark.parametrize("rule", by_hand.RULES)
def test_e8m0_bias_is_127(rule: str) -> None:
    assert reference.e8m0_encode(torch.tensor([4.0]), rule).tolist() == [127]


E8M0_EDGES = [  # amax, then the exponent under floor, ceil, rceil, even
    (4.0, 0, 0, 0, 0),
    (above(4.0), 0, 1, 0, 0),
    (below(4.0), -1, 0, 0, 0),  # even: mantissa 1.9999999 rounds up to 4
    (6.0, 0, 1, 0, 0),
    (above(6.0), 0, 1, 1, 0),
    (7.0, 0, 1, 1, 1),
    (below(7.0), 0, 1, 1, 0),
    (3.4028234663852886e38, 125, 126, 126, 126),
    (2.0**-149, -127, -127, -127, -127),  # the smallest fp32 subnormal
    (2.0**-126, -127, -127, -127, -127),  # -128 is clamped
    (1.75 * 2.0**-126, -127, -127, -127, -127),
]


@pytest.mark.parametrize("column", range(4), ids=["floor", "ceil", "rceil", "even"])
def test_e8m0_edges(column: int) -> None:
    rule = ["floor", "ceil", "rceil", "even"][column]
    amax = torch.tensor([row[0] for row in E8M0_EDGES])
    want = [row[1 + column] + 127 for row in E8M0_EDGES]
    assert reference.e8m0_encode(amax, rule).tolist() == want


@pytest.mark.parametrize("rule", by_hand.RULES)
def test_e8m0_over_all_exponents(rule: str) -> None:
    mantissas = np.array([1, 1.0000001, 1.25, 1.4999999, 1.5, 1.5000001, 1.7499999, 1.75, 1.7500001, 1.9999999])
    amax = (mantissas.astype(np.float32)[None] * np.ldexp(np.float32(1), np.arange(-126, 128))[:, None]).ravel()
    want = by_hand.e8m0_exponents(amax, rule) + 127
    assert_equal_arrays(reference.e8m0_encode(torch.from_numpy(amax), rule).numpy().astype(int), want, rule)


# ---- quantizing: the literals of the definition


@pytest.mark.parametrize(
    ("rule", "wants"),
    [
        ("floor", {5: 4, 6: 6, 6.5: 6, 7: 6, 7.5: 6}),
        ("ceil", {5: 4, 6: 6, 6.5: 6, 7: 8, 7.5: 8}),
        ("rceil", {5: 4, 6: 6, 6.5: 6, 7: 8, 7.5: 8}),
        ("even", {5: 4, 6: 6, 6.5: 6, 7: 8, 7.5: 8}),
    ],
)
def test_mxfp4_a_lone_value(rule: str, wants: dict[float, float]) -> None:
    assert {value: lone(value, "mxfp4", rule)[1] for value in wants} == wants


@pytest.mark.parametrize(("value", "want"), [(5, 16 / 3), (6, 16 / 3), (6.5, 16 / 3), (7, 8), (7.5, 8)])
def test_mxfp4_a_lone_value_as_qutlass_has_it(value: float, want: float) -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = value
    codes, scale, tensor_scale = reference.rotate_quantize(x, None, format=MXFP4, recipe="qutlass")
    decoded = reference.dequantize(codes, scale, tensor_scale, MXFP4)
    assert float(decoded[0, 0]) == pytest.approx(want, rel=2.0**-24), "the factor 3 is one fp32 number"


@pytest.mark.parametrize(
    ("value", "byte", "want"),
    [
        (7.0, 0x39, 6.75),  # 7/6 rounds to 1.125
        (0.006, 0x01, 3 * 2.0**-9),
        (6 * 2.0**-10, 0x00, 0.0),  # a tie at half the smallest subnormal, to even
        (3000.0, 0x7E, 2688.0),
    ],
)
def test_nvfp4_a_lone_value(value: float, byte: int, want: float) -> None:
    assert lone(value, "nvfp4") == (byte, want)
    assert lone(-value, "nvfp4") == (byte, -want)


def test_codes_come_from_the_rounded_scale() -> None:
    # amax 7 gives s = 1.125, not 7/6: 2.9 / 1.125 = 2.578 -> 3 (code 5), while 2.9 * 6 / 7 = 2.486 -> 2 (code 4)
    codes, scale = quantize([[7.0, 2.9] + [0.0] * 14], "nvfp4")
    assert scale.tolist() == [[0x39]]
    assert codes[0, :2].tolist() == [7, 5]


@pytest.mark.parametrize("amax", [2689.0, 2694.0, 2783.9, 2784.0, 2880.0, 3072.0, 1e4, 1e30, 3.4e38])
def test_nvfp4_scale_over_448_saturates(amax: float) -> None:
    codes, scale = quantize([[amax, -amax] + [1.0] * 14], "nvfp4")
    assert scale.tolist() == [[0x7E]]
    assert codes[0].tolist() == [7, 15] + [0] * 14
    codes, scale = quantize([[amax] * 16], "nvfp4", encode=1e3)  # encode * amax / 6 may overflow fp32
    assert scale.tolist() == [[0x7E]]
    assert codes[0].tolist() == [7] * 16


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_group_that_is_not_finite(name: str, bad: float) -> None:
    size = by_hand.GROUP[name]
    z = np.full((2, 3 * size), 3.0, dtype=np.float32)
    z[0, size + 5] = bad
    codes, scale = quantize(z, name)
    clean = quantize(np.full_like(z, 3.0), name)
    assert scale[0, 1] == NAN_BYTE[name]
    assert not codes[0, size : 2 * size].any()
    scale[0, 1], codes[0, size : 2 * size] = clean[1][0, 1], clean[0][0, size : 2 * size]
    assert_equal_arrays(scale, clean[1], "scales of the other groups")
    assert_equal_arrays(codes, clean[0], "codes of the other groups")
    packed, byte = reference.quantize(torch.from_numpy(z), FORMATS[name], 1.0)
    decoded = reference.dequantize(packed, byte, torch.ones(1), FORMATS[name])
    assert torch.isnan(decoded[0, size : 2 * size]).all()
    assert int(torch.isnan(decoded).sum()) == size


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_group_of_zeros_beside_values(name: str, zero: float) -> None:
    size = by_hand.GROUP[name]
    z = np.full((1, 2 * size), zero, dtype=np.float32)
    z[0, size:] = -2.0
    codes, scale = quantize(z, name)
    assert scale[0, 0] == 0
    assert not codes[0, :size].any(), "codes 0, not 8"
    packed, byte = reference.quantize(torch.from_numpy(z), FORMATS[name], 1.0)
    decoded = reference.dequantize(packed, byte, torch.ones(1), FORMATS[name])
    assert not decoded[0, :size].any()
    # NVFP4: 2/6 rounds to .34375 and -2/.34375 to -6; MXFP4: 2 is 4 * 2^-1
    assert (decoded[0, size:] == (-6 * 0.34375 if name == "nvfp4" else -2.0)).all()


def test_a_scale_that_underflows_takes_its_codes_with_it() -> None:
    codes, scale = quantize([[-1e-4, 1e-4, -5e-3] + [-1e-6] * 13], "nvfp4")
    assert scale.tolist() == [[0]]
    assert not codes.any()


def test_mxfp4_subnormals_are_not_flushed() -> None:
    z = [[2.0**-126, 2.0**-127, 2.0**-128, -(2.0**-128), 2.0**-149] + [0.0] * 27]
    codes, scale = quantize(z, "mxfp4")
    assert scale.tolist() == [[0]]
    assert codes[0, :5].tolist() == [4, 2, 1, 9, 0], "2, 1, .5, -.5, 0 times 2^-127"


# ---- quantizing: the definition written twice


@pytest.mark.parametrize("encode", [1.0, 6.0, 17.3, 2688 / 4.7, 1e-3])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 400.0])
def test_nvfp4_equals_the_second_writing(encode: float, spread: float) -> None:
    z = (torch.randn(256, 256) * spread).numpy()
    want = by_hand.quantize(z, "nvfp4", encode)
    got = quantize(z, "nvfp4", encode)
    assert_equal_arrays(got[1], want[1], "scale bytes")
    assert_equal_arrays(got[0], want[0], "codes")


@pytest.mark.parametrize("rule", by_hand.RULES)
def test_mxfp4_equals_the_second_writing(rule: str) -> None:
    z = (torch.randn(256, 256) * torch.logspace(-40, 37, 256)[:, None]).numpy()
    want, got = by_hand.quantize(z, "mxfp4", rule=rule), quantize(z, "mxfp4", rule=rule)
    assert_equal_arrays(got[1], want[1], "scale bytes")
    assert_equal_arrays(got[0], want[0], "codes")


def test_the_order_of_the_scale_product() -> None:
    """encode * (amax * c): amax next to the E4M3 ties, where the other two orders in use give another byte."""
    encode, c = np.float32(17.3), by_hand.ONE_SIXTH
    ties = (by_hand.E4M3[8:125] + by_hand.E4M3[9:126]) / 2
    middle = (6 * ties / float(encode)).astype(np.float32).view(np.int32)
    amax = (middle[:, None] + np.arange(-3, 4, dtype=np.int32)).ravel().view(np.float32)
    orders = [encode * (amax * c), encode * (amax / np.float32(6)), amax * (encode * c)]
    ours, *others = (by_hand.e4m3_bytes(order) for order in orders)
    assert all((ours != other).any() for other in others), "the sample does not tell the orders apart"
    z = np.zeros((len(amax), 16), dtype=np.float32)
    z[:, 7] = amax
    assert_equal_arrays(quantize(z, "nvfp4", float(encode))[1][:, 0], ours, "scale bytes")


# ---- recipes


def test_recipe_checkpoint_returns_the_reciprocal() -> None:
    x = torch.randn(4, 64)
    *_, tensor_scale = reference.rotate_quantize(x, None, format=NVFP4, encode_scale=torch.tensor([17.3]))
    assert tensor_scale.dtype == torch.float32
    assert tensor_scale.flatten().tolist() == [float(np.float32(1) / np.float32(17.3))]


def test_recipe_token() -> None:
    x = torch.randn(6, 64) * torch.tensor([1e-3, 1.0, 300.0, 0.0, 1.0, 1e-38])[:, None]
    x[4, :] = 0.0
    amax = x.abs().amax(dim=1).numpy()
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.float32(2688) / amax
    encode = np.where(np.isfinite(encode), encode, np.float32(1))
    assert encode[3] == encode[4] == encode[5] == 1, "zero rows, and one whose quotient overflows"
    codes, scale, tensor_scale = reference.rotate_quantize(x, None, format=NVFP4, recipe="token")
    assert_equal_arrays(tensor_scale.numpy().ravel(), np.float32(1) / encode, "tensor scales")
    want = by_hand.quantize(x.numpy(), "nvfp4", encode[:, None])
    assert_equal_arrays(by_hand.numpy(scale), want[1], "scale bytes")
    assert_equal_arrays(by_hand.unpack(codes.numpy()), want[0], "codes")


def test_recipe_qutlass_is_an_encode_of_six() -> None:
    x = torch.randn(16, 64)
    got = reference.rotate_quantize(x, None, format=NVFP4, recipe="qutlass")
    want = by_hand.quantize(x.numpy(), "nvfp4", 6.0)
    assert_equal_arrays(by_hand.numpy(got[1]), want[1], "scale bytes")
    assert_equal_arrays(by_hand.unpack(got[0].numpy()), want[0], "codes")
    assert got[2].flatten().tolist() == [float(np.float32(1) / np.float32(6))]
