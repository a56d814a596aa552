"""The product for a few tokens on a GPU, against float64 on dequantized operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quarterturn import weight_layout
from quarterturn.backends.gpu_matmul import Cut, few
from quarterturn.formats import FORMATS, NVFP4, FP4Format
from quarterturn.weight_layout import Fragments

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    (4096, 4096), (28672, 4096), (1024, 14336), (4096, 8192), (464, 464), (4112, 3600), (208, 2912), (16, 32),
    (3584, 18944), (1, 96), (1000, 28672),
]  # fmt: skip


def made(n: int, k: int, fmt: FP4Format, seed: int = 0) -> Fragments:
    make = torch.Generator("cuda").manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=make)
    low, high = (0x08, 0x60) if fmt == NVFP4 else (116, 130)
    scale = torch.randint(low, high, (n, k // fmt.group_size), dtype=torch.uint8, device="cuda", generator=make)
    return weight_layout.forward(codes, scale.view(fmt.scale_dtype), fmt)


def fresh(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((m, n), float("nan"), dtype=dtype, device="cuda")


def assert_exact(found: Tensor, wanted: Tensor, *, fp32: float = 3e-6) -> None:
    """All that is lost is one rounding to the dtype, and the order of fp32 sums."""
    assert not found.isnan().any()
    error = (found.double() - wanted).norm() / wanted.norm()
    rounding = (wanted.to(found.dtype).double() - wanted).norm() / wanted.norm()
    assert error <= rounding * 1.02 + fp32, (float(error), float(rounding))


@pytest.mark.parametrize(
    ("n", "k", "name", "dtype"),
    [(n, k, name, dtype) for n, k in SHAPES for name, dtype in (("nvfp4", BF16), ("mxfp4", BF16), ("nvfp4", FP16))
     if k % FORMATS[name].group_size == 0],
)  # fmt: skip
def test_products(n: int, k: int, name: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    weight = made(n, k, fmt)
    values = weight_layout.decoded(weight).double()
    w_scale, bias = torch.rand(n, device="cuda") + 0.5, torch.randn(n, device="cuda", dtype=dtype)
    for m in (1, 2, 7, 8, 9, 16):
        x = (torch.randn(m, k, device="cuda") / 64).to(dtype)
        x_scale = torch.rand(m, device="cuda") + 0.5
        wanted = x.double() @ values.t()
        for after in (False, True):
            plain = fresh(m, n, dtype)
            few(x, weight, None, None, None, plain, after=after)
            assert_exact(plain, wanted)
            scaled = fresh(m, n, dtype)
            few(x, weight, w_scale, x_scale, bias, scaled, after=after)
            assert_exact(scaled, wanted * x_scale.double()[:, None] * w_scale.double() + bias.double())
            again = fresh(m, n, dtype)
            few(x, weight, w_scale, x_scale, bias, again, after=after)
            assert torch.equal(again, scaled)


@pytest.mark.parametrize(
    "cut",
    [Cut(16, 1, 1, 3, 4, 1, False), Cut(16, 2, 1, 2, 2, 1, True), Cut(8, 4, 1, 2, 2, 2, False),
     Cut(8, 1, 2, 4, 8, 1, False), Cut(4, 4, 1, 2, 2, 4, False), Cut(8, 2, 1, 3, 4, 2, True)],
)  # fmt: skip
def test_cuts(cut: Cut) -> None:
    """However it is cut, one rounding; a stage of one step, many tiles a program."""
    weight = made(5136, 4096, NVFP4)
    values = weight_layout.decoded(weight).double()
    for m in (5, 16) if cut.chunks == 1 else (5,):
        x = torch.randn(m, 4096, device="cuda", dtype=BF16)
        out = fresh(m, 5136, BF16)
        few(x, weight, None, None, None, out, cut=cut)
        assert_exact(out, x.double() @ values.t())


def test_a_chain_of_overlapping_launches() -> None:
    """Each reads what the one before wrote, in a graph and without one."""
    weights = [made(4096, 4096, NVFP4, seed) for seed in range(4)]
    scale = torch.full((1,), 2.0**-9, device="cuda")
    x = torch.randn(3, 4096, device="cuda", dtype=BF16)

    def chain(after: bool) -> Tensor:
        y = x
        for weight in weights * 4:
            y, before = torch.empty_like(x), y
            few(before, weight, scale, None, None, y, after=after)
        return y

    alone = chain(False)
    assert alone.isfinite().all()
    assert torch.equal(chain(True), alone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(True)
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, alone)


def test_nan_scales_reach_their_row_alone() -> None:
    codes = torch.randint(0, 256, (64, 512), dtype=torch.uint8, device="cuda")
    for fmt in FORMATS.values():
        scale = torch.full((64, 1024 // fmt.group_size), 0x38, dtype=torch.uint8, device="cuda")
        scale[17, 3] = fmt.nan_byte
        weight = weight_layout.forward(codes, scale.view(fmt.scale_dtype), fmt)
        out = torch.empty(4, 64, dtype=BF16, device="cuda")
        few(torch.randn(4, 1024, device="cuda", dtype=BF16), weight, None, None, None, out)
        assert out[:, 17].isnan().all()
        assert out.isnan().sum() == 4


def test_no_tokens() -> None:
    weight = made(64, 64, NVFP4)
    few(torch.empty(0, 64, dtype=BF16, device="cuda"), weight, None, None, None, torch.empty(0, 64, device="cuda"))
