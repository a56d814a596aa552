"""Layers with packed weights on a GPU, through FP4Linear: every way to the product in fragments, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quarterturn import ops, random_hadamard
from quarterturn.backends import gpu_triton
from quarterturn.formats import FORMATS, MXFP4
from quarterturn.linear import FP4Linear
from test_gpu_product import weight_of

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = (1, 8, 16, 17, 64, 100, 257)
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}


def layer_of(name: str, n: int, k: int, *, activations: str = "bf16", ranges: tuple[int, ...] = (), **how) -> FP4Linear:
    with torch.device("cuda"):
        weight = weight_of(FORMATS[name], n, k, ranges if FORMATS[name].has_tensor_scale else ())
    if activations == "fp4":
        how |= {"input_encode_scale": 200.0}
    layer = FP4Linear.from_tensor(weight, activations=activations, backend="gpu_triton", weights="packed", **how)
    assert layer.explain().weights == "packed, in fragments"
    return layer


def expected(layer: FP4Linear, x: Tensor) -> Tensor:
    """float64 on the operands that the layer multiplies."""
    first, values, scale = layer.input_transform, x, torch.ones(1, device="cuda")
    side = () if first is None else (layer.input_matrix, first.factor, first.transpose)
    if layer.activations == "fp4":
        values, scale = ops.rotate_quantize_dequantize(
            x, *side, format=layer.format, encode_scale=layer.input_encode_scale, backend="gpu_triton",
            out_dtype=FP32 if layer.format == MXFP4 else None,
        )  # fmt: skip
    elif side:
        values = ops.rotate(x, *side, backend="gpu_triton")
    y = values.double() @ layer.weight_tensor().dequantize().double().T * scale.double()
    return y if layer.bias is None else y + layer.bias.double()


def assert_near(got: Tensor, want: Tensor) -> None:
    assert not got.isnan().any()
    bound = UNIT[got.dtype] * want.abs() + 4e-6 * want.abs().amax()
    assert ((got.double() - want).abs() <= bound).all(), float(((got.double() - want).abs() / bound).max())


@pytest.mark.parametrize("activations", ["bf16", "fp4"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("nvfp4", BF16), ("mxfp4", BF16), ("nvfp4", FP16), ("mxfp4", FP16), ("nvfp4", FP32)]
)
@pytest.mark.parametrize(("n", "k"), [(464, 192), (4096, 4096), (1000, 14336)])
def test_layers(n: int, k: int, name: str, dtype: torch.dtype, activations: str) -> None:
    ranges = (n - 64, 64)
    layer = layer_of(
        name, n, k, activations=activations, ranges=ranges, bias=torch.randn(n, device="cuda").to(dtype),
        input_transform=random_hadamard(64),
    )  # fmt: skip
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").to(dtype)
        y = layer(x)
        assert y.dtype == dtype
        assert_near(y, expected(layer, x))
        assert torch.equal(layer(x), y), "the same input, the same bits"


@pytest.mark.parametrize("activations", ["bf16", "fp4"])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_x_comes_in_the_order_of_the_product(activations: str, size: int) -> None:
    """From 17 rows on the launch that rotates it turns it into that order: the same bits as from its own."""
    layer = layer_of("nvfp4", 1000, 4096, activations=activations, input_transform=random_hadamard(size))
    plan = layer.current_plan(BF16)
    assert plan is not None
    for m in (16, 17, 40, 300):
        x = torch.randn(m, 4096, device="cuda").to(BF16)
        assert gpu_triton.in_order(x, plan.layer) == (m > 16)
        values, scale = x, None
        blocks, quantizer = plan.layer.input_blocks, plan.layer.quantizer
        if quantizer is None:
            values = gpu_triton.rotate(x, blocks, BF16)
        else:
            values, scale = gpu_triton.rotate_quantize_dequantize(x, blocks, quantizer, BF16)
        want = gpu_triton.matmul(values, None, scale, plan.layer.weight, None, BF16)
        assert torch.equal(layer(x), want)


def test_an_output_transform_takes_the_product_in_fp32() -> None:
    layer = layer_of("nvfp4", 512, 256, output_transform=random_hadamard(64))
    x = torch.randn(40, 256, device="cuda").to(BF16)
    turn = layer.output_transform
    assert turn is not None
    y = expected(layer, x).view(40, -1, 64)
    side = (layer.output_matrix.T if turn.transpose else layer.output_matrix).double() * turn.factor
    assert_near(layer(x), (y @ side).view(40, 512))


@pytest.mark.parametrize("m", [4, 40])
def test_compiled_and_captured(m: int) -> None:
    layer = layer_of("nvfp4", 512, 4096, activations="fp4", input_transform=random_hadamard(64))
    x = torch.randn(m, 4096, device="cuda").to(BF16)
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    graph, held = torch.cuda.CUDAGraph(), x.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layer(held)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = layer(held)
    for _ in range(3):
        held.copy_(torch.randn_like(held))
        graph.replay()
        assert torch.equal(out, layer(held))


def test_streams_do_not_disturb_each_other() -> None:
    layers = [layer_of("nvfp4", 4096, 4096 * 2) for _ in range(2)]
    x = [torch.randn(m, 8192, device="cuda").to(BF16) for m in (12, 48)]
    want = [layer(part).clone() for layer, part in zip(layers, x, strict=True)]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    for _ in range(50):
        got = []
        for layer, part, stream in zip(layers, x, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(layer(part))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_weight_that_is_loaded_again_is_seen_at_once() -> None:
    layer, other = layer_of("nvfp4", 512, 4096), weight_of(FORMATS["nvfp4"], 512, 4096)
    x = torch.randn(4, 4096, device="cuda").to(BF16)
    before = layer(x)
    with torch.no_grad():
        layer.codes.copy_(other.codes.roll(1, 0))
    after = layer(x)
    assert not torch.equal(before, after)
    assert_near(after, expected(layer, x))


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_held_once_and_given_back(name: str) -> None:
    """Between two calls nothing but the fragments takes memory; a state dict has the bytes that were quantized."""
    n, k = 4096, 8192
    with torch.device("cuda"):
        weight = weight_of(FORMATS[name], n, k)
    want = weight.codes.cpu(), weight.linear_block_scale().cpu()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - weight.codes.nbytes - weight.linear_block_scale().nbytes
    layer = FP4Linear.from_tensor(weight, activations="bf16", weights="packed")  # of a backend here, of another there
    del weight
    assert layer.values is not None
    assert torch.cuda.memory_allocated() - before < layer.values.nbytes + (1 << 16)
    x = torch.randn(4, k, device="cuda").to(BF16)
    y = layer(x)
    state = layer.state_dict()
    for got, there in zip((state["codes"], state["block_scale"]), want, strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), there.view(torch.uint8))
    layer.load_state_dict(state)
    assert torch.equal(layer(x), y)
    moved = layer.to("cpu")
    assert torch.equal(moved.codes, want[0])
    assert torch.equal(moved.to("cuda")(x), y)
