"""The numbers of the GPU's rotate + quantize kernels, on a GPU and through Triton's interpreter.

Bit for bit where the arithmetic is exact: no transform, or integers whose sums fp32 holds. By the counted bounds of
docs/numerics.md elsewhere. Shapes, strides, streams and graphs are in test_gpu_triton_rows.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import by_hand
from comparing import assert_equal_arrays, assert_same_bits
from gpu_cases import (
    DEVICE,
    DTYPES,
    ENCODE,
    EXACT_KINDS,
    FORMATS,
    INTERPRETED,
    MANNERS,
    RULES,
    SIZES,
    USUAL,
    assert_counted,
    assert_exact,
    grid,
    here,
    integers,
    manner,
    matrix_of,
    run,
)
from quarterturn import ops, reference

pytestmark = pytest.mark.gpu
SHAPES = {
    "nvfp4": [(1, 16), (3, 80), (7, 48), (127, 48), (128, 64), (129, 208), (385, 464), (33, 11008)],
    "mxfp4": [(1, 32), (2, 96), (7, 160), (127, 96), (128, 64), (129, 416), (385, 928), (33, 11008)],
}
TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], dtype=np.float32)
NAN_BYTE = {"nvfp4": 0x7F, "mxfp4": 255}


def any_exponent(m: int, k: int) -> torch.Tensor:
    """fp32 numbers of every size, those of a group of 32 within 2^8 of each other; now and then a zero."""
    top = torch.randint(-149, 127, (m, k // 32, 1)).double()
    x = (torch.rand(m, k // 32, 32).double() * 2 - 1) * torch.exp2(top - torch.randint(0, 8, (m, k // 32, 32)))
    return (x * (torch.rand_like(x) > 0.02)).float().view(m, k)


# ---- exact: no transform


@pytest.mark.parametrize(("name", "m", "k"), [
    pytest.param(name, m, k, marks=(pytest.mark.interpreter,) if m * k < 30000 else ())
    for name, shapes in SHAPES.items() for m, k in shapes
])  # fmt: skip
def test_without_a_transform(name: str, m: int, k: int) -> None:
    for dtype in DTYPES:
        assert_exact((torch.randn(m, k) * 3).to(dtype), **manner(name), what=str(dtype))


@grid(small=lambda **_: True, dtype=DTYPES, how=MANNERS)
def test_every_manner_over_many_sizes_of_values(dtype, how) -> None:
    x = torch.randn(65, 96) * torch.logspace(-6, 4, 65)[:, None]
    x[5], x[6, :32], x[7] = 0, 0, -0.0
    assert_exact(x.to(dtype), **manner(*how))


@grid(
    small=lambda dtype, how: how in USUAL or (dtype == torch.bfloat16 and how[1] != "qutlass"),
    dtype=DTYPES[:2],
    how=MANNERS,
)
def test_every_number_of_16_bits(dtype, how) -> None:
    """All 65,536 patterns, denormals, Infs and NaNs too: beside their neighbours, and beside any other."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    mixed = every[torch.randperm(65536)]
    for what, x in (("in order", every), ("mixed", mixed)):
        assert_exact(x.view(128, 512), **manner(*how), what=what)


@pytest.mark.interpreter
@pytest.mark.parametrize("encode", [1.0, 17.3, 2.0**-100, 3e38, 1e-38, 1e-40])
def test_fp32_of_every_size_and_every_encode_scale(encode: float) -> None:
    x = any_exponent(16 if INTERPRETED else 2048, 512)
    assert_exact(x, **manner("nvfp4", encode=encode))
    if encode == 1.0:
        for rule in RULES:
            assert_exact(x, **manner("mxfp4", rule=rule), what=rule)
        assert_exact(x, **manner("nvfp4", "token"), what="token")


def test_any_bits_of_fp32() -> None:
    bits = torch.randint(-(2**31), 2**31, (2048, 512), dtype=torch.int64).to(torch.int32)
    for how in MANNERS:
        assert_exact(bits.view(torch.float32), **manner(*how), what=str(how))


def around(points: np.ndarray) -> np.ndarray:
    """fp32 numbers, the one below and the one above each."""
    return np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])


@pytest.mark.interpreter
@pytest.mark.parametrize("name", FORMATS)
def test_ties_both_neighbours_and_signed_zeros_by_literals(name: str) -> None:
    """A group whose scale is exactly 1: what is expected is written here, not computed."""
    to_even, below, above = [0, 2, 2, 4, 4, 6, 6], [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]
    points = np.concatenate([around(TIES), -around(TIES), [0.0, -0.0, -0.1, 100.0, -100.0]]).astype(np.float32)
    want = [*to_even, *below, *above, *(c + 8 for c in [*to_even, *below, *above]), 0, 8, 8, 7, 15]
    z = np.zeros((len(points), by_hand.GROUP[name]), dtype=np.float32)
    z[:, 0], z[:, 5] = 6.0, points.clip(-6, 6)
    codes, scale, _ = here(run(ops.rotate_quantize, torch.from_numpy(z), **manner(name, encode=1.0)))
    assert set(by_hand.numpy(scale).ravel()) == {0x38 if name == "nvfp4" else 127}
    assert by_hand.unpack(codes.numpy())[:, 5].tolist() == want


@pytest.mark.interpreter
@pytest.mark.parametrize(("name", "encode"), [("nvfp4", 1.0), ("nvfp4", 0.375), ("nvfp4", 17.3), ("mxfp4", 1.0)])
def test_ties_under_every_scale(name: str, encode: float) -> None:
    """Each tie with both neighbours, in a group led by 6 times the scale, for every byte that a scale can have."""
    size = by_hand.GROUP[name]
    scales = by_hand.E4M3[1:127] / np.float32(encode) if name == "nvfp4" else by_hand.E8M0[:253]
    groups = []
    for scale in scales:
        points = around((TIES * scale).astype(np.float32))
        points = np.concatenate([points, -points])
        points = np.concatenate([points, np.zeros(-len(points) % (size - 1), dtype=np.float32)])
        lead = np.full((len(points) // (size - 1), 1), 6 * scale, dtype=np.float32)
        groups.append(np.concatenate([lead, points.reshape(-1, size - 1)], axis=1))
    x = torch.from_numpy(np.concatenate(groups))
    assert_exact(x, **manner(name, encode=encode))
    scale = run(ops.rotate_quantize, x, **manner(name, encode=encode))[1].view(torch.uint8)
    assert scale.unique().numel() == len(scales), "every byte was reached"


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_ties_in_16_bits(name: str, dtype) -> None:
    ties = torch.from_numpy(np.concatenate([TIES, -TIES])).to(dtype)
    near = (ties.view(torch.int16)[:, None] + torch.arange(-1, 2, dtype=torch.int16)).view(dtype).view(-1)
    x = torch.zeros(near.numel() * 13, by_hand.GROUP[name], dtype=dtype)
    power = torch.exp2(torch.arange(-6.0, 7)).repeat_interleave(near.numel())
    x[:, 0], x[:, -1] = (6 * power).to(dtype), (near.repeat(13).double() * power).to(dtype)
    assert_exact(x, **manner(name, encode=1.0))


@pytest.mark.interpreter
def test_ties_of_e4m3_and_saturation() -> None:
    ties = ((by_hand.E4M3[:126] + by_hand.E4M3[1:127]) / 2 * 6).astype(np.float32).view(np.int32)
    near = (ties[:, None] + np.arange(-3, 4, dtype=np.int32)).ravel().view(np.float32)
    beyond = np.array([2688, 2689, 2694, 2784, 2880, 3072, 1e4, 1e30, 3.4e38], dtype=np.float32)
    z = np.zeros((len(near) + len(beyond), 16), dtype=np.float32)
    z[:, 2] = np.concatenate([near, beyond])
    z[:, 9] = -z[:, 2] / 3
    for encode in (1.0, 17.3) if INTERPRETED else (1.0, 17.3, 1e3):
        assert_exact(torch.from_numpy(z), **manner("nvfp4", encode=encode), what=f"encode {encode}")
        scale = run(ops.rotate_quantize, torch.from_numpy(z), **manner("nvfp4", encode=encode))[1]
        assert (scale.view(torch.uint8)[-len(beyond) :] == 0x7E).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("how", [*MANNERS[3:], ("mxfp4", "qutlass", "even")], ids=str)
def test_every_power_of_two_as_a_scale(how) -> None:
    """A lone value of every exponent and of mantissas at the edges of all rules, as literal arithmetic has it too."""
    mantissas = np.array([1, 1 + 2**-23, 1.5, 1.5 + 2**-23, 1.75 - 2**-23, 1.75, 2 - 2**-23])
    exponents = np.arange(-126, 128)
    if INTERPRETED and how[1] != "qutlass":  # a fifth of them, with both ends
        exponents = np.concatenate([exponents[::5], exponents[-2:]])
    lone = (mantissas * 2.0 ** exponents[:, None]).astype(np.float32).ravel()
    tiny = np.array([2.0**-149, 2.0**-140, 1.75 * 2.0**-130], dtype=np.float32)
    x = np.zeros((len(lone) + 3, 32), dtype=np.float32)
    x[np.arange(len(x)), np.arange(len(x)) % 32] = np.concatenate([lone, tiny])
    assert_exact(torch.from_numpy(x), **manner(*how))
    scale = run(ops.rotate_quantize, torch.from_numpy(x), **manner(*how))[1].cpu().numpy().ravel()
    if how[1] == "qutlass":
        assert set(range(1, 255)) <= set(scale.tolist())
    else:
        assert_equal_arrays(scale.astype(int), by_hand.e8m0_exponents(x.max(1), how[2]) + 127, "literal bytes")


# ---- exact: integers through a matrix


@grid(
    small=lambda kind, size, transpose: (
        (kind == "random hadamard" and size in (16, 32, 64, 128) and (transpose or size in (16, 64)))
        or (transpose and (kind, size) in (("integers", 16), ("integers", 48), ("integers", 64), ("signs", 64)))
    ),
    kind=EXACT_KINDS,
    size=SIZES,
    transpose=[False, True],
)
def test_integers_through_a_matrix(kind: str, size: int, transpose: bool) -> None:
    """Sums that fp32 holds exactly; bf16, fp16, and fp32 with more bits than a bf16 operand keeps."""
    turn = (*matrix_of(kind, size), transpose)
    k = math.lcm(size, 32) * (1 if size > 64 else 3)
    fast = size in (16, 32, 64, 128) and kind in ("random hadamard", "integers") and not INTERPRETED
    manners = MANNERS if fast else [MANNERS[0], MANNERS[1], MANNERS[3 + size // 32 % 4]]
    wide = 8 if kind == "integers" else 50000
    for dtype, largest in ((torch.bfloat16, 8), (torch.float16, 8), (torch.float32, wide)):
        x = integers(33 if INTERPRETED else 97, k, dtype, largest)
        for how in manners:
            assert_exact(x, turn, **manner(*how, encode=3.0 / largest), what=f"{dtype} {how}")


@grid(small=lambda **_: True, name=FORMATS, size=[16, 32, 64], dtype=DTYPES)
def test_codes_that_a_tie_decides_behind_a_hadamard(name: str, size: int, dtype) -> None:
    """z is a multiple of 1/4 and the scale is short, so that one code in a hundred and more is the outcome of a tie."""
    x, turn = integers(65, 192, dtype, 2), (matrix_of("random hadamard", size)[0], 0.25, False)
    how = manner(name, encode=6.0)
    _, scale, tensor_scale = reference.rotate_quantize(x, *turn, **how)
    decoded = reference.e4m3_decode(scale) if name == "nvfp4" else reference.e8m0_decode(scale)
    reciprocal = 1 / (decoded.float() * tensor_scale).unsqueeze(-1)
    steps = reference.rotate(x, *turn).float().view(65, -1, by_hand.GROUP[name]) * reciprocal
    assert np.isin(steps.abs().numpy(), TIES).mean() > 0.01
    assert_exact(x, turn, **how)


@pytest.mark.interpreter
@pytest.mark.parametrize("transpose", [False, True])
def test_the_four_by_four_case(transpose: bool) -> None:
    matrix = torch.from_numpy(np.kron(np.eye(4), by_hand.four_by_four())).float()
    x = torch.zeros(1, 16)
    x[0, 0] = 4.0
    how = manner("nvfp4", encode=3.0)
    values, scale = here(run(ops.rotate_quantize_dequantize, x, matrix, 1.0, transpose, **how))
    assert values[0, :5].tolist() == ([6, -6, 6, 6, 0] if transpose else [6, 6, 6, 6, 0])
    assert scale.tolist() == [float(np.float32(1) / np.float32(3))]


@pytest.mark.interpreter
@pytest.mark.parametrize("of", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_matrix_of_another_dtype_or_strides_is_its_fp32_values(of) -> None:
    x, big = torch.randn(5, 64), torch.randn(64, 64).to(of)
    for matrix in (big[:32, 32:], big[::2, ::2], big[:32, :32].t()):
        want = here(run(ops.rotate_quantize, x, matrix.float().contiguous(), **manner("nvfp4")))
        got = here(run(ops.rotate_quantize, x, matrix, **manner("nvfp4")))
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


# ---- counted


@grid(
    small=lambda kind, size, dtype, how: kind == "dense" and (size == 64 or (size == 48 and dtype == torch.float32)),
    kind=["hadamard", "dense"],
    size=[16, 32, 48, 64, 128],
    dtype=DTYPES,
    how=[MANNERS[0], MANNERS[3]],
)
def test_counted_against_the_specification(kind: str, size: int, dtype, how) -> None:
    """2 M values on a GPU, 12 thousand in the interpreter, where one code may differ."""
    x = torch.randn(*((65, 192) if INTERPRETED else (2048, 1056 if size == 48 else 1024))).to(dtype)
    for transpose in (False, True):
        assert_counted(x, (*matrix_of(kind, size), transpose), **manner(*how))


@grid(
    kind=["hadamard", "random hadamard", "dense"],
    size=[16, 32, 64, 128],
    transpose=[False, True],
    dtype=DTYPES,
)
def test_counted_on_a_large_sample(kind: str, size: int, transpose: bool, dtype) -> None:
    """16.8 M values in every manner, against any_torch on the same GPU: 10 bytes and 1,678 codes may differ.

    Rounding T to TF32 would change 1e-3 of the codes, rounding it to bf16 7e-3. That any_torch equals the
    specification is held by test_gpu.py, and by the test above for these kernels themselves.
    """
    x = torch.randn(2048, 8192, device=DEVICE).to(dtype)
    turn = (*matrix_of(kind, size), transpose)
    for how in MANNERS:
        assert_counted(x, turn, "any_torch", **manner(*how))


@grid(size=[8, 24, 48, 96, 192, 256], dtype=DTYPES)
def test_counted_for_other_sizes(size: int, dtype) -> None:
    x = torch.randn(2048, 8448 if size != 192 and size != 256 else 7680 if size == 256 else 8064, device=DEVICE)
    for transpose in (False, True):
        for how in (MANNERS[0], MANNERS[1], MANNERS[3]):
            assert_counted(x.to(dtype), (*matrix_of("dense", size), transpose), "any_torch", **manner(*how))


# ---- values that are not finite, zeros, underflow


@grid(small=lambda **_: True, name=FORMATS, bad=[math.nan, math.inf, -math.inf], dtype=DTYPES)
def test_a_group_that_is_not_finite(name: str, bad: float, dtype) -> None:
    size = by_hand.GROUP[name]
    x = torch.randn(3, 4 * size).to(dtype)
    clean = here(run(ops.rotate_quantize, x, **manner(name)))
    x[1, size + 3] = bad
    codes, scale, _ = here(run(ops.rotate_quantize, x, **manner(name)))
    want_codes, want_scale = by_hand.unpack(clean[0].numpy()), by_hand.numpy(clean[1]).copy()
    want_scale[1, 1], want_codes[1, size : 2 * size] = NAN_BYTE[name], 0
    assert_equal_arrays(by_hand.numpy(scale), want_scale, "scale bytes")
    assert_equal_arrays(by_hand.unpack(codes.numpy()), want_codes, "codes")
    out = torch.float32 if dtype == torch.float16 and name == "mxfp4" else dtype
    (values, _) = here(run(ops.rotate_quantize_dequantize, x, **manner(name), out_dtype=out))
    assert torch.isnan(values[1, size : 2 * size]).all()
    assert int(torch.isnan(values).sum()) == size


@grid(
    small=lambda size, bad, dtype: size in (16, 64) and bad == math.inf,
    keep=lambda size, bad, dtype: bad == math.inf or (size == 32 and dtype == torch.bfloat16),
    size=[8, 16, 32, 48, 64, 128],
    bad=[math.nan, math.inf, -math.inf],
    dtype=DTYPES,
)
def test_a_block_that_is_not_finite_and_all_its_neighbours(size: int, bad: float, dtype) -> None:
    """One bad value in the second of four blocks, one block in another row: the rest has the bits it has without."""
    matrix, factor = matrix_of("random hadamard", size) if size != 48 else matrix_of("dense", size)
    if size != 48:
        factor = 0.25
    x = integers(5, 4 * math.lcm(size, 32), dtype)
    x[1, size + size // 2] = bad
    x[3, -1] = -bad
    for how in MANNERS if size != 48 else []:
        assert_exact(x, (matrix, factor, True), **manner(*how), what=str(how))
    z = reference.rotate(x, matrix, factor, True)
    (got,) = here(run(ops.rotate, x, matrix, factor, True, out_dtype=torch.float32))
    assert_equal_arrays(~np.isfinite(got.numpy()), ~np.isfinite(z.numpy()), "where not finite")


@pytest.mark.interpreter
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_scales_that_underflow(name: str, dtype) -> None:
    size = by_hand.GROUP[name]
    x = torch.zeros(3, 3 * size)
    x[0, :size], x[0, size : 2 * size] = -0.0, torch.randn(size)
    x[1, :size] = -1e-7  # NVFP4 with encode 150: 2.5e-6 is under half of 2^-9
    x[2] = -(2.0**-14) if name == "mxfp4" else -6 * 2.0**-10 / ENCODE  # NVFP4: the tie between 0 and 2^-9
    x = x.to(dtype)
    assert_exact(x, **manner(name))
    codes, scale, _ = here(run(ops.rotate_quantize, x, **manner(name)))
    assert scale.view(torch.uint8)[0, 0] == scale.view(torch.uint8)[0, 2] == 0
    assert not codes[0, : size // 2].any(), "codes of negative zeros are 0, not 8"
    if name == "nvfp4":
        assert not codes[1].any()
    values = here(run(ops.rotate_quantize_dequantize, x, **manner(name), out_dtype=torch.float32))[0]
    assert not values[0, :size].any()
    assert not torch.isnan(values).any()


@pytest.mark.interpreter
@pytest.mark.parametrize("size", [16, 64])
def test_sums_that_cancel_to_zero_have_code_zero(size: int) -> None:
    """Everything but the first column of a Hadamard cancels, and a zero sum is +0 whatever its terms and factor."""
    matrix = matrix_of("hadamard", size)[0]
    for sign, factor in ((1.0, 0.25), (-1.0, 0.25), (1.0, -0.25)):
        for dtype in DTYPES:
            x = torch.full((3, 64), sign).to(dtype)
            assert_exact(x, (matrix, factor, False), **manner("nvfp4", encode=1.0), what=f"{sign} {factor} {dtype}")


@grid(small=lambda size, dtype: size == 16, size=[16, 32, 64, 128], dtype=[torch.bfloat16, torch.float32])
def test_denormals_through_a_hadamard(size: int, dtype) -> None:
    """Nothing is flushed to zero: integers times the smallest number of the dtype, exact in fp32."""
    unit = 2.0**-133 if dtype == torch.bfloat16 else 2.0**-149
    x = (torch.randint(-8, 9, (17, 128)).double() * unit).to(dtype)
    assert_exact(x, (matrix_of("random hadamard", size)[0], 1.0, False), **manner("mxfp4"))


@grid(small=lambda size: size == 64, size=[16, 32, 64, 128])
def test_the_largest_fp32_through_a_hadamard(size: int) -> None:
    """3.4e38 is Inf in bf16, so operands split into bf16 pieces must not lose it."""
    x = torch.zeros(3, 128)
    x[0, 5], x[1, 77], x[2, 100] = 3.4e38, -3.4e38, 3.3e38
    for how in (MANNERS[0], MANNERS[1], MANNERS[3]):
        assert_exact(x, (matrix_of("random hadamard", size)[0], 2.0**-7, False), **manner(*how), what=str(how))
