"""Siblings on a GPU whose weights lie in one tensor: one launch of each kernel, captured and compiled too."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quarterturn import FP4Linear, compile_options, random_hadamard
from quarterturn.backends import gpu_device, gpu_product, gpu_triton
from quarterturn.formats import FORMATS
from quarterturn.sharing import place_of, tie
from test_gpu_product import weight_of
from test_gpu_product_device import assert_near, expected

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
K, SIZES = 4096, (4096, 1024, 1000)
ROWS = (1, 8, 16, 17, 100, 300)


class Attention(nn.Module):
    """q, k, v of one input, and o of the same width that reads something else."""

    def __init__(self, name: str = "nvfp4", activations: str = "fp4", dtype: torch.dtype = BF16, **how) -> None:
        super().__init__()
        for number, (part, n) in enumerate(zip("qkvo", (*SIZES, K), strict=True)):
            with torch.device("cuda"):
                weight = weight_of(FORMATS[name], n, K, (n - 64, 64) if number == 1 and name == "nvfp4" else ())
                weight.codes.random_(0, 256)
            scale = {"input_encode_scale": 200.0} if activations == "fp4" else {}
            layer = FP4Linear.from_tensor(
                weight, bias=torch.randn(n, device="cuda").to(dtype), activations=activations,
                input_transform=random_hadamard(64), **scale, **{"weights": "packed", "backend": "gpu_triton", **how},
            )  # fmt: skip
            setattr(self, part, layer)

    def layers(self) -> list[FP4Linear]:
        return [self.q, self.k, self.v]

    def forward(self, x: Tensor) -> list[Tensor]:
        ys = [layer(x) for layer in self.layers()]
        return [*ys, self.o(ys[0] * 0.01)]


def tied(**how) -> tuple[Attention, Attention]:
    """The same layers, put together by a call, and each alone."""
    alone = Attention(**how)
    together = copy.deepcopy(alone)
    tie(together, FP4Linear)
    with torch.no_grad():
        for _ in range(2):
            together(torch.randn(3, K, device="cuda").to(how.get("dtype", BF16)))
    wholes = {layer.part.whole for layer in together.layers() if layer.part is not None}
    assert len(wholes) == 1
    assert together.o.part is None
    assert all(layer.values is together.q.values for layer in together.layers())
    assert together.v.explain().weights == "packed, in fragments"
    return together, alone


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of weights of every product, and 0 for every input that is quantized."""
    found: list[int] = []
    matmul, turn = gpu_product.matmul, gpu_triton.rotate_quantize_dequantize

    def counted(x, x_tensor_scale, weight, *rest):
        found.append(weight.n)
        return matmul(x, x_tensor_scale, weight, *rest)

    def turned(*arguments, **options):
        found.append(0)
        return turn(*arguments, **options)

    monkeypatch.setattr(gpu_product, "matmul", counted)
    monkeypatch.setattr(gpu_triton, "rotate_quantize_dequantize", turned)
    return found


def near_all(got: list[Tensor], model: Attention, x: Tensor) -> None:
    """The first three against float64 on what each layer multiplies by itself."""
    for y, layer in zip(got, model.layers(), strict=False):
        assert y.shape == (*x.shape[:-1], layer.out_features)
        assert_near(y, expected(layer, x))


@pytest.mark.parametrize("activations", ["bf16", "fp4"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("nvfp4", BF16), ("mxfp4", BF16), ("nvfp4", FP16), ("mxfp4", FP16), ("nvfp4", FP32)]
)
def test_results(name: str, dtype: torch.dtype, activations: str) -> None:
    together, alone = tied(name=name, dtype=dtype, activations=activations)
    with torch.no_grad():
        for m in ROWS:
            x = torch.randn(m, K, device="cuda").to(dtype)
            got = together(x)
            near_all(got, alone, x)
            assert all(torch.equal(a, b) for a, b in zip(together(x), got, strict=True)), "deterministic"


def test_a_part_by_itself() -> None:
    together, alone = tied()
    with torch.no_grad():
        for m in ROWS:
            for layer, other in zip(together.layers(), alone.layers(), strict=True):
                x = torch.randn(m, K, device="cuda").to(BF16)
                assert_near(layer(x), expected(other, x))


@pytest.mark.parametrize("m", [1, 40])
def test_one_launch_of_each(m: int, products: list[int]) -> None:
    together, _ = tied()
    with torch.no_grad():
        x = torch.randn(m, K, device="cuda").to(BF16)
        together(x)
        products.clear()
        together(x)
    assert products == [0, sum(SIZES), 0, K]


@pytest.mark.parametrize("activations", ["bf16", "fp4"])
def test_products_that_fill_the_device_are_each_their_own(activations: str, products: list[int]) -> None:
    together, alone = tied(activations=activations)
    m = 4 * 128 * 256 * gpu_device.multiprocessors(torch.device("cuda", 0)) // min(SIZES) + 1
    with torch.no_grad():
        for rows, number in ((m - 1, 1), (m, 3)):
            x = torch.randn(rows, K, device="cuda").to(BF16)
            products.clear()
            got = [layer(x) for layer in together.layers()]
            assert len([n for n in products if n]) == number, products
            assert all(y.is_contiguous() for y in got) == (number == 3)
            if number == 3:
                assert all(torch.equal(y, layer(x)) for y, layer in zip(got, alone.layers(), strict=True))


def captured(run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("m", [4, 40])
def test_captured(m: int, products: list[int]) -> None:
    together, alone = tied()
    held = torch.randn(m, K, device="cuda").to(BF16)
    graph, out = captured(lambda: together(held))
    products.clear()
    for _ in range(3):
        held.copy_(torch.randn_like(held))
        graph.replay()
        near_all(out, alone, held)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(together(held), out, strict=True))
    # What is loaded again is read by the graph.
    other = Attention()
    together.load_state_dict(other.state_dict())
    held.copy_(torch.randn_like(held))
    graph.replay()
    near_all(out, other, held)


def test_a_share_of_one_capture_is_in_no_other() -> None:
    together, alone = tied()
    held = torch.randn(4, K, device="cuda").to(BF16)
    with torch.no_grad():
        for layer in together.layers():  # what is compiled at a first call must not be in a graph
            layer(torch.randn_like(held))
        together(held), together(held)
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            assert place_of(held).capture is not None
            q = together.q(held)
            captured_here = place_of(held)
        with torch.cuda.graph(second):
            assert place_of(held) != captured_here
            k = together.k(held)
        assert place_of(held).capture is None
        v = together.v(held)
        held.copy_(torch.randn_like(held))
        second.replay()
        assert_near(k, expected(alone.k, held))
        first.replay()
        assert_near(q, expected(alone.q, held))
        assert not torch.equal(v, together.v(held))


def test_weights_that_a_graph_reads_stay_where_they_are() -> None:
    model = Attention()
    alone = copy.deepcopy(model)
    held = torch.randn(4, K, device="cuda").to(BF16)
    graph, out = captured(lambda: model(held))
    tie(model, FP4Linear)
    with torch.no_grad():
        for _ in range(3):
            near_all(model(held), alone, held)
    assert not any(layer.part for layer in model.layers())
    filled = [torch.randn(1 << 24, device="cuda") for _ in range(4)]
    held.copy_(torch.randn_like(held))
    graph.replay()
    near_all(out, alone, held)
    del filled


def test_other_streams_compute_for_themselves() -> None:
    together, alone = tied()
    with torch.no_grad():
        x = torch.randn(8, K, device="cuda").to(BF16)
        want = [layer(x) for layer in together.layers()]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        for _ in range(20):
            got = []
            for layer, stream in zip(together.layers(), streams, strict=True):
                with torch.cuda.stream(stream):
                    got.append(layer(x))
            torch.cuda.synchronize()
            near_all(got, alone, x)
    near_all(want, alone, x)


@pytest.mark.parametrize("m", [4, 40])
@pytest.mark.parametrize("mode", ["plain", "merged", "merged and captured"])
def test_compiled(m: int, mode: str, products: list[int]) -> None:
    together, alone = tied()
    options = {} if mode == "plain" else compile_options(**({"triton.cudagraphs": True} if "captured" in mode else {}))
    torch._dynamo.reset()
    compiled = torch.compile(together, fullgraph=True, dynamic=False, options=options)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(m, K, device="cuda").to(BF16)
            products.clear()
            near_all([y.clone() for y in compiled(x)], alone, x)
            made = [n for n in products if n]
            if mode != "merged and captured":
                assert sorted(made) == sorted([sum(SIZES), K] if mode == "merged" else [*SIZES, K])


@pytest.mark.parametrize("m", [4, 40])
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "scale", "bias", "to", "decoded"])
def test_a_sibling_that_changes(how: str, m: int) -> None:
    together, _ = tied(backend="auto")
    other, x = Attention(), torch.randn(m, K, device="cuda").to(BF16)
    with torch.no_grad():
        together(x)
        v = together.v
        together.q(x)
        if how == "load_state_dict":
            v.load_state_dict(other.v.state_dict())
        elif how == "copy_":
            v.codes.copy_(other.v.codes)
        elif how == "scale":
            v.input_encode_scale.mul_(0.5)
        elif how == "bias":
            v.bias.mul_(-3)
        elif how == "to":
            v.to("cpu").to("cuda")
        else:
            v.weights = "decoded"
        for _ in range(3):
            near_all(together(x), together, x)


def test_auto_keeps_fragments_where_they_were_run() -> None:
    layer = Attention(weights="auto").q
    run = torch.cuda.get_device_capability() in gpu_triton.TESTED
    assert layer.explain().weights == ("packed, in fragments" if run else "decoded to bfloat16")
    x = torch.randn(4, K, device="cuda").to(BF16)
    with torch.no_grad():
        assert_near(layer(x), expected(layer, x))
