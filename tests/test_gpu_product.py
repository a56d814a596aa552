"""Weights in fragments through a layer: how they are stored, and which kernel is handed what, without a GPU.

The kernels' places are taken by stand-ins that check what they are given and multiply in float64; what the kernels
themselves compute is held by test_matmul_few_device.py and test_matmul_many.py on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from quarterturn import MXFP4, NVFP4, weight_layout
from quarterturn.backends import any_torch, gpu_device, gpu_product, gpu_triton
from quarterturn.backends.protocol import Weight
from quarterturn.errors import Refusal
from quarterturn.formats import FORMATS, FP4Format
from quarterturn.tensor import FP4Tensor
from quarterturn.weight_layout import Fragments

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1, 16), (16, 64), (464, 176), (100, 272), (130, 96)]


def weight_of(fmt: FP4Format, n: int, k: int, ranges: tuple[int, ...] = ()) -> FP4Tensor:
    make = torch.Generator(torch.get_default_device()).manual_seed(n + k)
    k = -(-k // fmt.group_size) * fmt.group_size
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=make)
    low, high = (0x20, 0x60) if fmt == NVFP4 else (118, 130)
    scales = torch.randint(low, high, (n, k // fmt.group_size), dtype=torch.uint8, generator=make)
    ranges = ranges or (n,)
    encode = torch.rand(len(ranges), generator=make) * 100 + 1 if fmt.has_tensor_scale else None
    return FP4Tensor.from_encode(codes, scales.view(fmt.scale_dtype), encode, fmt, ranges)


# ---- one tensor that holds all


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_what_is_stored_comes_back(name: str, n: int, k: int) -> None:
    weight = weight_of(FORMATS[name], n, k)
    made = weight_layout.forward(weight.codes, weight.block_scale, weight.format)
    alpha = torch.rand(n)
    data = weight_layout.stored(made, alpha)
    assert data is not None
    assert data.dtype == torch.int32
    assert data.shape == (n, weight_layout.stored_width(n, weight.shape[1], weight.format))
    again, factor = weight_layout.from_stored(data, weight.shape[1], weight.format)
    assert torch.equal(again.codes, made.codes)
    assert torch.equal(again.scales, made.scales)
    assert torch.equal(factor, alpha)
    assert (again.n, again.k, again.exponent) == (made.n, made.k, made.exponent)
    codes, scales = weight_layout.inverse(again)
    assert torch.equal(codes, weight.codes)
    assert torch.equal(scales.view(torch.uint8), weight.block_scale.view(torch.uint8))


def test_what_has_no_such_form_is_left_as_it_is() -> None:
    large = weight_of(MXFP4, 16, 64)
    large.block_scale.view(torch.uint8)[3, 1] = 180
    assert gpu_product.prepare(large) is None
    negative = weight_of(NVFP4, 16, 64)
    negative.block_scale.view(torch.uint8)[3, 1] = 0x98
    assert gpu_product.prepare(negative) is None


def test_only_packed_weights_on_a_gpu_are_kept_so(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(NVFP4, 16, 64)
    assert gpu_triton.prepare(weight, "packed") is None
    monkeypatch.setattr(gpu_product, "runs_on", lambda device: True)
    made = gpu_triton.prepare(weight, "packed")
    assert made is not None
    assert made.dtype == torch.int32
    for capability, kept in (((9, 0), torch.int32), ((8, 0), BF16), ((10, 0), BF16)):
        monkeypatch.setattr(gpu_triton, "capability_of", lambda device, found=capability: found)
        assert gpu_triton.prepare(weight, "auto").dtype == kept
    negative = weight_of(NVFP4, 16, 64)
    negative.block_scale.view(torch.uint8)[3, 1] = 0x98
    monkeypatch.setattr(gpu_triton, "capability_of", lambda device: (9, 0))
    assert gpu_triton.prepare(negative, "packed") is None
    assert gpu_triton.prepare(negative, "auto").dtype == BF16, "a weight without such a form is decoded once"
    decoded = gpu_triton.prepare(weight, "decoded")
    assert decoded is not None
    assert decoded.dtype == BF16


@pytest.mark.parametrize(("capability", "triton", "runs"), [
    ((9, 0), (3, 6), True), ((8, 0), (3, 6), True), ((7, 5), (3, 6), False), ((9, 0), (3, 7), False),
    ((9, 0), None, False),
])  # fmt: skip
def test_where_they_can_be(monkeypatch: pytest.MonkeyPatch, capability, triton, runs: bool) -> None:
    monkeypatch.setattr(gpu_device, "capability", lambda device: capability)
    monkeypatch.setattr(gpu_device, "triton_version", lambda: triton)
    assert gpu_product.runs_on(torch.device("cuda")) is runs
    assert not gpu_product.runs_on(torch.device("cpu"))


def test_an_op_refuses_fragments_of_another_size() -> None:
    data = torch.zeros(16, 40, dtype=torch.int32)
    with pytest.raises(Refusal, match="fragments \\(16, "):
        torch.ops.quarterturn.fp4_matmul(
            torch.zeros(2, 64, dtype=BF16),
            None,
            None,
            data,
            None,
            torch.ones(1),
            [16],
            None,
            "nvfp4",
            BF16,
            "any_torch",
        )


# ---- who is handed what


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran, with stand-ins for them on a machine that says it is a Hopper GPU."""
    names: list[str] = []

    def checked(name: str, x: Tensor, weight: Fragments, out: Tensor) -> Tensor:
        names.append(name)
        assert x.is_contiguous()
        assert x.data_ptr() % 16 == 0
        assert x.dtype in (BF16, FP16)
        assert out.shape == (x.shape[0], weight.n)
        assert weight.codes.is_contiguous()
        return x.double() @ weight_layout.decoded(weight).double().T

    def few(x, weight, w_scale, x_scale, bias, out, *, after=False, cut, tokens8=None):
        assert 1 <= x.shape[0] <= 16
        assert after == (gpu_device.capability(x.device)[0] == 9)
        assert x.shape[0] <= 8 * (tokens8 or 2)
        assert w_scale.shape == (weight.n,)
        acc = checked("few", x, weight, out)
        acc = acc * w_scale.double() * (1.0 if x_scale is None else x_scale.double().view(-1, 1))
        out.copy_(acc if bias is None else acc + bias.double())

    def of_values(name: str) -> Callable:
        def run(x, weight, alpha, x_scale, bias, *rest):
            # by_library: out; many: workspace, out, ordered, chosen
            out, ordered = (rest[0], False) if name == "by_library" else rest[1:3]
            assert not ordered
            assert alpha.shape == (weight.n,)
            assert x_scale.numel() in (1, x.shape[0])
            acc = checked(name, x, weight, out) * 2.0**-weight.exponent  # as the kernels decode
            acc = acc * alpha.double() * x_scale.double().view(-1, 1)
            assert bias is None or bias.dtype == FP32
            if name == "many":
                assert out.dtype == x.dtype
            return out.copy_(acc if bias is None else acc + bias.double())

        return run

    monkeypatch.setattr(gpu_product, "few", few)
    monkeypatch.setattr(gpu_product, "many", of_values("many"))
    monkeypatch.setattr(gpu_product, "by_library", of_values("by_library"))
    monkeypatch.setattr(gpu_product, "_space", lambda device: None)
    monkeypatch.setattr(gpu_device, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu_device, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(gpu_device, "on_device", lambda device: nullcontext())
    return names


def run(x: Tensor, x_scale: Tensor | None, weight: FP4Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    data = gpu_product.prepare(weight)
    assert data is not None
    held = Weight(data, None, weight.tensor_scale, weight.output_sizes, weight.format)
    return gpu_triton.matmul(x, None, x_scale, held, bias, out_dtype)


def expected(x: Tensor, x_scale: Tensor | None, weight: FP4Tensor, bias: Tensor | None) -> Tensor:
    """float64 by the value equation."""
    y = x.double() @ weight.dequantize().double().T
    y = y * (1.0 if x_scale is None else x_scale.double().view(-1, 1))
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "kernel"), [(1, "few"), (16, "few"), (17, "many"), (300, "many")])
@pytest.mark.parametrize("scales", ["none", "one", "rows"])
def test_rows_choose_the_kernel(called: list[str], name: str, m: int, kernel: str, scales: str) -> None:
    fmt = FORMATS[name]
    weight = weight_of(fmt, 464, 192, (400, 64) if fmt.has_tensor_scale else ())
    x, bias = torch.randn(m, 192).to(BF16), torch.randn(464).to(BF16)
    x_scale = {"none": None, "one": torch.tensor([0.37]), "rows": torch.rand(m) + 0.5}[scales]
    for given in (None, bias):
        y = run(x, x_scale, weight, given, BF16)
        want = expected(x, x_scale, weight, given)
        assert y.dtype == BF16
        assert ((y.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-5 * want.abs().max()).all()
    assert called == [kernel, kernel]


def test_what_the_kernels_do_not_take_is_computed_all_the_same(called: list[str]) -> None:
    weight, wide = weight_of(NVFP4, 130, 96), weight_of(MXFP4, 130, 96)
    x = torch.randn(5, 96)
    cases = [
        (weight, x.to(BF16), FP32, ["by_library"]),  # an output transform takes fp32
        (weight, x, FP32, []),
        (wide, x.to(FP16), FP16, []),
        (weight, x.to(FP16), FP16, ["few"]),
    ]
    for held, given, out_dtype, kernels in cases:
        called.clear()
        y = run(given, None, held, None, out_dtype)
        want = expected(given, None, held, None)
        assert called == kernels
        assert y.dtype == out_dtype
        unit = {FP32: 2.0**-20, FP16: 2.0**-10}[out_dtype]
        assert ((y.double() - want).abs() <= unit * (want.abs() + want.abs().max() / 16)).all()


def test_other_gpus_multiply_many_rows_by_the_library(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_device, "capability", lambda device: (8, 0))
    run(torch.randn(17, 96).to(BF16), None, weight_of(NVFP4, 130, 96), None, BF16)
    assert called == ["by_library"]


def test_rows_that_lie_apart_or_begin_anywhere_are_brought_together(called: list[str]) -> None:
    weight = weight_of(NVFP4, 130, 96)
    big = torch.randn(40, 200).to(BF16)
    for x in (big[::2, 3:99], big[:17, :96], big.view(-1)[1 : 1 + 20 * 96].view(20, 96)):
        y = run(x, None, weight, None, BF16)
        want = expected(x, None, weight, None)
        assert ((y.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-5 * want.abs().max()).all()


def test_nothing_is_launched_for_no_rows(called: list[str]) -> None:
    y = run(torch.zeros(0, 96, dtype=BF16), None, weight_of(NVFP4, 130, 96), None, BF16)
    assert y.shape == (0, 130)
    assert called == []


def test_packed_activations_are_decoded_first(called: list[str]) -> None:
    weight, x = weight_of(NVFP4, 130, 96), weight_of(NVFP4, 3, 96)
    data = gpu_product.prepare(weight)
    assert data is not None
    held = Weight(data, None, weight.tensor_scale, weight.output_sizes, weight.format)
    y = gpu_triton.matmul(x.codes, x.block_scale.view(torch.uint8), x.tensor_scale, held, None, BF16)
    values = Weight(weight.values(FP32), None, weight.tensor_scale, (130,), NVFP4)
    want = any_torch.matmul(x.values(FP32), None, x.tensor_scale, values, None, FP32)
    assert ((y.double() - want.double()).abs() <= 2.0**-8 * want.abs() + 1e-5 * want.abs().max()).all()
    assert called == ["few"]
