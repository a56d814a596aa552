"""MXFP4 layers in E4M3: the conversion bit for bit, the product against float64, and the rows that do not fit.

Run on a GPU, and small in Triton's interpreter, where a product in float64 that asks what torch's asks of its arguments
takes the place of torch's.
"""

from __future__ import annotations

import pytest
import torch

from comparing import assert_refused
from conftest import INTERPRETED
from fp8_cases import (
    FP8_SUMS,
    FP32_SUMS,
    Expected,
    assert_near,
    by_float64,
    bytes_of,
    converted,
    decoded,
    exactly,
    layer_of,
    left_rows,
    operand_of,
    scaled_mm,
    values_of,
)  # fmt: skip
from gpu_cases import DEVICE
from quarterturn import MXFP4, NVFP4, e4m3_layout, ops, random_hadamard
from quarterturn.backends import fp8_launch
from quarterturn.backends.fp8_launch import TILE
from quarterturn.linear import FP4Linear
from quarterturn.sharing import tie
from quarterturn.tensor import FP4Tensor

pytestmark = pytest.mark.gpu
small = pytest.mark.interpreter

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _product_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)


# ---- conversion


@small
@pytest.mark.parametrize("k", [32, 96, 8192 + 64])
def test_every_span_of_exponents(k: int) -> None:
    """Rows of every code whose exponents span 0 to 40: exact up to 14, on the list beyond."""
    x = operand_of(41, k, 100, 101)
    x.codes[:, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    x.codes[:, -8:] = x.codes[:, :8]
    span = torch.arange(41, dtype=torch.uint8)
    x.block_scale[:, 0] = 100 + span
    made = converted(x, 0.75)
    assert left_rows(made) == ([] if k == 32 else list(range(15, 41)))
    fit = 41 if k == 32 else 15
    values = exactly(made)
    assert torch.equal(values[:fit], values_of(x)[:fit] * 0.75)
    assert torch.equal(made.row_scale.cpu().view(-1)[:fit], 0.75 * 2.0 ** (100.0 + span[:fit] - 6 - 127))


@small
def test_groups_of_zeros_and_nan_do_not_count() -> None:
    x = operand_of(5, 96)
    x.block_scale[:] = torch.tensor([120, 125, 127], dtype=torch.uint8)
    x.codes[0] = 0x80  # zeros of both signs
    x.block_scale[0] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    x.codes[1, :16], x.block_scale[1, 0] = 0, 0
    x.codes[2, :16], x.block_scale[2, 0] = 0x08, 254
    x.codes[3, 16:32], x.block_scale[3, 1] = 0, 255
    x.block_scale[4, 2] = 255
    made = converted(x)
    values = exactly(made)
    assert left_rows(made) == []
    assert float(made.row_scale[0]) == 1
    want = values_of(x)
    assert torch.equal(values.isnan(), want.isnan())
    assert torch.equal(values.nan_to_num(), want.nan_to_num())
    assert (bytes_of(made)[want.isnan()] == 0x7F).all()


@small
def test_rows_with_a_scale_far_from_one_are_left() -> None:
    """Row scales stay within 2^-60 to 2^60, so that the product of two is a normal number."""
    x = operand_of(256, 32)
    x.codes[:] = 0x21
    x.block_scale[:] = torch.arange(256, dtype=torch.uint8).view(-1, 1)
    made = converted(x)
    assert left_rows(made) == [b for b in range(255) if not 67 <= b - 6 <= 187]


@small
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 64), (130, 96), (33, 288)])
def test_a_weight_is_stored_exactly(n: int, k: int) -> None:
    weight = operand_of(n, k, 113, 128).to(DEVICE)
    stored, unfit = fp8_launch.weight_in_e4m3(weight)
    assert unfit == 0
    assert stored.shape == (n, e4m3_layout.stored_width(n, k))
    values, scale = (t.cpu() for t in e4m3_layout.parts(stored, k))
    assert values.shape == (-(-n // 16) * 16, k)
    exact = decoded(values.view(torch.uint8)) * scale.double().view(-1, 1)
    assert torch.equal(exact[:n], values_of(weight))
    assert (values[n:].view(torch.uint8) == 0).all()
    assert (scale[n:] == 1).all()


@small
def test_codes_that_begin_anywhere() -> None:
    whole = operand_of(9, 64).to(DEVICE)
    memory = torch.empty(9 * 32 + 1, dtype=torch.uint8, device=DEVICE)[1:]
    memory.copy_(whole.codes.view(-1))
    one = torch.ones(1, device=DEVICE)
    made = fp8_launch.operand(memory.view(9, 32), whole.block_scale, one, BF16)
    assert torch.equal(bytes_of(made), bytes_of(converted(whole)))


# ---- layers


@small
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 64), (17, 34, 192)])
def test_small_layers(m: int, n: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    layer = layer_of(n, k, dtype=dtype, bias=bias, input_transform=random_hadamard(64, seed=3))
    assert layer.explain().weights == "decoded to float8_e4m3fn"
    x = torch.randn(m, k, device=DEVICE).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert_near(y, by_float64(layer, x), FP8_SUMS)


@small
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_rows_that_do_not_fit_are_as_exact_as_in_bf16(dtype: torch.dtype) -> None:
    """Some rows with a small part, one of small numbers, one of zeros; the others stay what they are without them."""
    layer = layer_of(34, 256, dtype=dtype, bias=dtype == BF16)
    x = torch.randn(19, 256, device=DEVICE).to(dtype)
    alone = layer(x)
    left = [0, 5, 6, 15, 18]
    x[left, 32:] *= 2.0**-22 if dtype == FP16 else 2.0**-40
    x[left, :32] *= 64  # so that fp16 does not lose the rest
    x[9] = 0
    if dtype != FP16:
        x[11] *= 2.0**-90
        left.append(11)
    y, want = layer(x), by_float64(layer, x)
    assert_near(y[left], want.of(left), FP32_SUMS, "left rows")
    assert_near(y, want, FP8_SUMS, "all rows")
    others = [row for row in range(19) if row not in (*left, 9)]
    assert torch.equal(y[others], alone[others])


@small
def test_every_row_may_be_left() -> None:
    """Two tiles each way, the second a part: more than the interpreter has programs."""
    layer = layer_of(TILE["COLUMNS"] + 2, 96)
    x = torch.randn(TILE["ROWS"] + 6, 96, device=DEVICE).to(BF16)
    x[:, 32:] *= 2.0**-30
    assert_near(layer(x), by_float64(layer, x), FP32_SUMS)


@small
def test_the_small_part_of_a_left_row_is_not_lost() -> None:
    """Where the weights meet only groups 2^-40 under the row's largest, nothing but those makes the result."""
    weight = operand_of(16, 64)
    weight.codes[:, :16] = 0
    layer = FP4Linear.from_tensor(weight.to(DEVICE), activations="fp4", backend="gpu_fp8")
    x = torch.randn(4, 64, device=DEVICE).to(BF16)
    x[:, 32:] *= 2.0**-40
    want = by_float64(layer, x)
    assert want.y.abs().amax() < 2.0**-30
    assert_near(layer(x), want, FP32_SUMS)


@small
def test_nan_makes_its_row_nan_and_no_other() -> None:
    layer = layer_of(20, 128)
    x = torch.randn(10, 128, device=DEVICE).to(BF16)
    clean = layer(x)
    x[3, 70], x[8, 1] = float("nan"), float("inf")
    x[8, 64:] *= 2.0**-40  # a row that is left, and has a NaN
    x[8, 32:64] = 1
    y = layer(x)
    assert y[[3, 8]].isnan().all()
    others = [row for row in range(10) if row not in (3, 8)]
    assert torch.equal(y[others], clean[others])


@small
def test_a_weight_with_nan() -> None:
    weight = operand_of(20, 64)
    weight.block_scale[7, 1] = 255
    x = torch.randn(3, 64, device=DEVICE).to(BF16)
    x[2, 32:] *= 2.0**-40
    y = FP4Linear.from_tensor(weight.to(DEVICE), activations="fp4", backend="gpu_fp8")(x)
    assert y[:, 7].isnan().all()
    assert y.isnan().sum() == 3


@small
@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil"])
def test_rules(rule: str) -> None:
    layer = layer_of(32, 96, rule=rule)
    x = torch.randn(5, 96, device=DEVICE).to(BF16)
    assert_near(layer(x), by_float64(layer, x), FP8_SUMS)


@small
def test_the_recipe_of_qutlass_has_a_third_for_a_scale() -> None:
    layer = layer_of(32, 96, recipe="qutlass", input_transform=random_hadamard(32, seed=1))
    x = torch.randn(5, 96, device=DEVICE).to(BF16)
    x[1, 32:] *= 2.0**-40
    assert_near(layer(x), by_float64(layer, x), FP8_SUMS)


@small
def test_an_output_transform_takes_the_product_in_fp32() -> None:
    layer = layer_of(48, 64, output_transform=random_hadamard(16, seed=2))
    x = torch.randn(9, 64, device=DEVICE).to(BF16)
    turn = layer.output_transform
    side = (layer.output_matrix.T if turn.transpose else layer.output_matrix).double() * turn.factor
    want = by_float64(layer, x)
    y, size, peak = (
        (t.view(9, -1, 16) @ s).view(9, 48) for t, s in zip(want, (side, side.abs(), side.abs()), strict=True)
    )
    assert_near(layer(x), Expected(y, size, peak), FP8_SUMS)


@small
def test_no_rows_and_leading_dimensions() -> None:
    layer = layer_of(40, 64)
    assert layer(torch.empty(0, 64, dtype=BF16, device=DEVICE)).shape == (0, 40)
    x = torch.randn(2, 3, 64, device=DEVICE).to(BF16)
    assert torch.equal(layer(x), layer(x.view(6, 64)).view(2, 3, 40))


@small
def test_a_weight_that_does_not_fit_keeps_the_other_product_and_says_so() -> None:
    weight = operand_of(40, 64)
    weight.block_scale[3] = torch.tensor([100, 115], dtype=torch.uint8)
    weight.codes[3] = 0x21
    layer = FP4Linear.from_tensor(weight.to(DEVICE), activations="fp4", backend="gpu_fp8")
    told = layer.explain()
    assert told.backend == "gpu_fp8"
    assert "asked for; multiplied as by 'gpu_triton'" in told.reason
    assert "1 of 40 rows of the weight have scales more than 2^14 apart" in told.reason
    assert "float8" not in told.weights
    x = torch.randn(5, 64, device=DEVICE).to(BF16)
    assert_near(layer(x), by_float64(layer, x), FP32_SUMS)


@small
def test_siblings_share_x_where_all_take_it_in_e4m3() -> None:
    unfit = operand_of(20, 64)
    unfit.block_scale[3], unfit.codes[3] = torch.tensor([100, 115], dtype=torch.uint8), 0x21
    weights = [operand_of(16, 64), unfit, operand_of(24, 64), unfit]
    parent = torch.nn.Module()
    for i, weight in enumerate(weights):
        layer = FP4Linear.from_tensor(weight.to(DEVICE), activations="fp4", backend="gpu_fp8")
        parent.add_module(f"part{i}", layer)
    layers, tied = list(parent.children()), torch.randn(9, 64, device=DEVICE).to(BF16)
    tied[4, 32:] *= 2.0**-40
    want = [by_float64(layer, tied) for layer in layers]
    tie(parent, FP4Linear)
    for order in ((0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 1, 0)):
        x = tied.clone()
        for i in order:
            assert_near(layers[i](x), want[i], FP8_SUMS, f"{order}, {i}")


@small
def test_a_weight_that_is_loaded_again_is_converted_again() -> None:
    layer = layer_of(32, 64)
    x, place = torch.randn(3, 64, device=DEVICE).to(BF16), layer.values.data_ptr()
    layer(x)
    with torch.no_grad():
        layer.codes.copy_(layer.codes.roll(1, 0))
    assert_near(layer(x), by_float64(layer, x), FP8_SUMS)
    assert layer.values.data_ptr() == place, "where captured graphs read"


@small
def test_what_is_refused() -> None:
    weight = operand_of(32, 64).to(DEVICE)
    build = lambda **how: FP4Linear.from_tensor(weight, backend="gpu_fp8", **how)  # noqa: E731
    assert_refused(lambda: build(activations="fp4", weights="packed"), "weights 'auto' or 'decoded'", "'packed'")
    assert_refused(lambda: build(activations="bf16"), "W4A4", "bf16")
    x = torch.randn(3, 64, device=DEVICE).to(BF16)
    assert_refused(lambda: ops.fp4_matmul(x, weight=weight, backend="gpu_fp8"), "FP4Linear(..., backend='gpu_fp8')")
    nvfp4 = FP4Tensor.from_encode(
        weight.codes, torch.full((32, 4), 0x38, dtype=torch.uint8, device=DEVICE).view(NVFP4.scale_dtype),
        torch.ones(1, device=DEVICE), NVFP4,
    )  # fmt: skip
    wrong = lambda: FP4Linear.from_tensor(nvfp4, activations="fp4", input_encode_scale=1.0, backend="gpu_fp8")  # noqa: E731
    assert_refused(wrong, "needs MXFP4", "nvfp4")


# ---- on a GPU alone


@pytest.mark.parametrize("m", [1, 2, 15, 16, 31, 100, 255])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (15, 96), (16, 32), (1000, 160), (4096, 4096)])
def test_sizes_of_every_kind(m: int, n: int, k: int) -> None:
    for dtype in (BF16, FP32):
        layer = layer_of(n, k, dtype=dtype, bias=True)
        x = torch.randn(m, k, device=DEVICE).to(dtype)
        assert_near(layer(x), by_float64(layer, x), FP8_SUMS, str(dtype))


def test_sums_of_few_bits_are_exact() -> None:
    """64 products of +-.5 and 1 are multiples of 1/4 up to 64: 9 bits, which FP8's sums have."""
    x, w = operand_of(300, 64, 127, 128), operand_of(160, 64, 127, 128)
    for side in (x, w):
        side.codes[:] = side.codes & 0x99 | 0x11  # codes 1 and 9
        side.codes[:, ::3] = side.codes[:, ::3] & 0x88 | 0x22
    stored, _ = fp8_launch.weight_in_e4m3(w.to(DEVICE))
    values, scale = e4m3_layout.parts(stored, 64)
    want = values_of(x) @ values_of(w).T
    for dtype in (BF16, FP16, FP32):
        y = fp8_launch.multiply(converted(x), values, scale, 160, None, dtype)
        assert torch.equal(y.cpu(), want.to(dtype)), dtype


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(2048, 4096, 4096), (2048, 1000, 14336), (4097, 6144, 2048), (33, 4096, 8192)]
)
def test_layers(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    layer = layer_of(n, k, dtype=dtype, bias=True, input_transform=random_hadamard(64, seed=5))
    x = torch.randn(m, k, device=DEVICE).to(dtype)
    left = torch.arange(0, m, 97, device=DEVICE)
    x[left, 64:] *= 2.0**-16 if dtype == FP16 else 2.0**-40
    y, want = layer(x), by_float64(layer, x)
    assert_near(y, want, FP8_SUMS)
    assert torch.equal(layer(x), y), "the same input, the same bits"
    codes = ops.rotate_quantize(x, layer.input_matrix, layer.input_transform.factor, layer.input_transform.transpose,
                                format=MXFP4, backend="gpu_triton")  # fmt: skip
    made = fp8_launch.operand(codes[0], codes[1], codes[2], dtype)
    found = torch.tensor(left_rows(made), device=DEVICE)
    assert dtype == FP16 or set(left.tolist()) <= set(found.tolist())
    if len(found):
        assert_near(y[found], want.of(found), FP32_SUMS, "left rows")


def test_many_left_rows() -> None:
    """More tiles than programs, and the last of them a part."""
    layer = layer_of(4100, 1024)
    x = torch.randn(2500, 1024, device=DEVICE).to(BF16)
    x[:, 32:] *= 2.0**-30
    assert_near(layer(x), by_float64(layer, x), FP32_SUMS)


def test_compiled_and_captured() -> None:
    layer = layer_of(512, 1024, input_transform=random_hadamard(64, seed=7))
    x = torch.randn(300, 1024, device=DEVICE).to(BF16)
    x[7, 64:] *= 2.0**-40
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    graph, held = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        layer(held)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = layer(held)
    for few in (0, 1, 200, 0):  # how many rows are left is another at each replay
        held.copy_(torch.randn_like(held))
        held[:few, 64:] *= 2.0**-40
        graph.replay()
        assert_near(out, by_float64(layer, held), FP8_SUMS)
        assert torch.equal(out, layer(held))


def test_a_stream_of_its_own() -> None:
    layer = layer_of(1024, 2048)
    x = torch.randn(500, 2048, device=DEVICE).to(BF16)
    x[::50, 64:] *= 2.0**-40
    want = layer(x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(layer(x))
        torch.cuda.synchronize()
        assert all(torch.equal(y, want) for y in got)
