"""New weights written over a layer's own memory, by an engine that leaves no trace of it: `plan.renew`.

What a layer has derived must be the new weights' by then, in the place it had: there captured CUDA graphs read.
"""

from __future__ import annotations

import pytest
import torch

from comparing import assert_same_bits
from quarterturn import FP4Linear, hadamard, random_hadamard
from quarterturn.backends.kept import write_over
from quarterturn.plan import renew
from test_linear import make
from vendor_door import every_case, layer_of, opened

OWN = ("codes", "block_scale", "encode_scale", "input_encode_scale", "bias")


def changed(layer: FP4Linear, scales: bool) -> FP4Linear:
    """The same layer with every tensor of its weights another; but the tensor scales, which a CPU layer looks at, only
    where `scales` says so."""
    with torch.no_grad():
        layer.codes.bitwise_xor_(0x88)
        scale_bytes = layer.block_scale.view(torch.uint8)
        scale_bytes.copy_(scale_bytes.roll(1, 0))
        for name in OWN[2 if scales else 4 :]:
            if (tensor := getattr(layer, name)) is not None:
                tensor.mul_(1.5)
    return layer.refresh()


def reload(layer: FP4Linear, fresh: FP4Linear) -> None:
    """As vLLM does it: what is derived, then the tensors that were loaded."""
    renew(layer, fresh)
    for name in OWN:
        if (tensor := getattr(layer, name)) is not None:
            tensor.data.copy_(getattr(fresh, name).data)


def both_ways(layer: FP4Linear, x: torch.Tensor) -> list[torch.Tensor]:
    """By the plan, and by the operator, as a compiled model calls it."""
    return [layer(x), torch.ops.quarterturn.fp4_linear(x, *layer._operands())]


def check(layer: FP4Linear, other: FP4Linear, x: torch.Tensor, scales: bool) -> None:
    for first, want in zip(both_ways(layer, x), both_ways(changed(other, scales), x), strict=True):
        assert not torch.equal(first, want)
    places = {name: t.data_ptr() for name, t in layer.named_buffers()}
    reload(layer, other)
    for got, want in zip(both_ways(layer, x), both_ways(other, x), strict=True):
        assert_same_bits(got, want, "y")
    assert {name: t.data_ptr() for name, t in layer.named_buffers()} == places


either = pytest.mark.parametrize("scales", [False, True], ids=["same scales", "other scales"])


@either
@pytest.mark.parametrize("weights", ["packed", "decoded"])
@pytest.mark.parametrize("backend", ["cpu_native", "any_torch"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_on_a_cpu(fmt: str, backend: str, weights: str, scales: bool) -> None:
    def one() -> FP4Linear:
        torch.manual_seed(3)
        turn, sizes = random_hadamard(16, seed=1), (32, 16) if fmt == "nvfp4" else ()
        return make(fmt, sizes=sizes, input_transform=turn, output_transform=turn, backend=backend, weights=weights)

    for rows in (3, 100):
        check(one(), one(), torch.randn(rows, 96, generator=torch.Generator().manual_seed(5)), scales)


@either
@every_case
def test_by_a_vendors_product(name: str, fmt: str, scales: bool) -> None:
    """The scales lie there in another layout, the rows padded, alpha made of both tensor scales."""

    def one() -> FP4Linear:
        sizes = (40, 8) if fmt == "nvfp4" and name != "cublas" else ()
        return layer_of(name, fmt, 48, 96, bias=True, sizes=sizes, input_transform=hadamard(16))

    with opened(name):
        check(one(), one(), torch.randn(5, 96, generator=torch.Generator().manual_seed(5)).bfloat16(), scales)


def test_a_matrix_whose_memory_was_given_up() -> None:
    """A sleeping engine may have kept nothing of it on the device."""
    layer = make("nvfp4", input_transform=random_hadamard(16, seed=1), backend="any_torch")
    x = torch.randn(3, 96)
    want = layer(x)
    assert layer.input_matrix is not None
    version = layer.input_matrix._version
    layer.input_matrix.data.fill_(33.0)
    assert not torch.equal(layer(x), want)
    renew(layer, layer)
    assert_same_bits(layer(x), want, "y")
    assert layer.input_matrix._version == version, "what was made of it for a CUDA graph would be made anew elsewhere"


def test_records_of_different_kinds_are_not_written_over() -> None:
    with pytest.raises(ValueError, match="zip"):
        write_over((torch.ones(1),), (torch.ones(1), torch.ones(1)))


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["packed", "decoded"])
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_a_captured_graph_reads_the_new_weights(fmt: str, activations: str, weights: str) -> None:
    def one() -> FP4Linear:
        torch.manual_seed(3)
        turn = random_hadamard(64, seed=1)
        options = {"input_transform": turn, "weights": weights, "keep_codes": True, "dtype": torch.bfloat16}
        made = make(fmt, activations, 256, 512, bias=False, **options)
        return made.to("cuda")

    layer, other = one(), changed(one(), True)
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(5)).to("cuda", torch.bfloat16)
    before, want = layer(x), other(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    reload(layer, other)
    graph.replay()
    assert not torch.equal(y, before)
    assert_same_bits(y, want, "y")
    assert_same_bits(layer(x), want, "y")
