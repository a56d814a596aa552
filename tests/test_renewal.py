"""New weights written over a layer's own memory, by an engine that leaves no trace of it: renewal.py.

What a layer has derived must be the new weights' by then, in the place it had: there captured CUDA graphs read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from comparing import assert_same_bits
from quarterturn import FP4Linear, hadamard, random_hadamard
from quarterturn import renewal as renewing
from quarterturn.backends import vendor
from quarterturn.backends.kept import misfits, wait_for_writes, write_over
from quarterturn.backends.vendor import Part, Prepared
from quarterturn.renewal import HELD, Renewal
from test_linear import make
from vendor_door import every_case, layer_of, opened


def changed(layer: FP4Linear, scales: bool) -> FP4Linear:
    """The same layer with every tensor of its weights another; but the tensor scales, which a CPU layer looks at, only
    where `scales` says so."""
    with torch.no_grad():
        layer.codes.bitwise_xor_(0x88)
        scale_bytes = layer.block_scale.view(torch.uint8)
        scale_bytes.copy_(scale_bytes.roll(1, 0))
        for name in HELD[2 if scales else 4 :]:
            if (tensor := getattr(layer, name)) is not None:
                tensor.mul_(1.5)
    return layer.refresh()


def reload(layer: FP4Linear, fresh: FP4Linear) -> None:
    """As vLLM does it: what is derived, then the tensors that were loaded."""
    Renewal(layer, fresh).write()
    for name in HELD:
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
    Renewal(layer, layer).write()
    assert_same_bits(layer(x), want, "y")
    assert layer.input_matrix._version == version, "what was made of it for a CUDA graph would be made anew elsewhere"


class Record(NamedTuple):
    tensor: torch.Tensor | None
    outputs: int = 8


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (torch.ones(2), None, "it[1]: float32 (2,); found none"),
        (None, torch.ones(2), "it[1]: none; found float32 (2,)"),
        (torch.ones(2), torch.ones(2).bfloat16(), "it[1]: float32 (2,); found bfloat16 (2,)"),
        (torch.ones(2), torch.ones(1), "it[1]: float32 (2,); found float32 (1,)"),
        ((torch.ones(2),), (torch.ones(2), torch.ones(2)), "it[1]: 1 part; found 2 parts"),
        (Record(torch.ones(2)), Record(torch.ones(2), 7), "it[1].outputs: 8; found 7"),
        (Prepared((), (torch.ones(2),)), Prepared((), (None,)), "it[1].alphas[0]: float32 (2,); found none"),  # type: ignore[arg-type]
        (Prepared((), ()), None, "it[1]: Prepared; found none"),
    ],
)
def test_of_a_record_of_another_form_nothing_is_written(old: Any, new: Any, told: str) -> None:
    first = torch.zeros(3)
    assert misfits((first, old), (torch.ones(3), new)) == [tuple(told.split("; found "))]
    with pytest.raises(AssertionError):
        write_over((first, old), (torch.ones(3), new))
    assert not first.any()


def test_a_record_within_a_record_is_written_over() -> None:
    old, new = ((Record(torch.zeros(3)), None, Prepared((), (torch.zeros(3) + i,))) for i in (0, 1))
    write_over(old, new)
    assert torch.equal(old[2].alphas[0], torch.ones(3))


@pytest.mark.parametrize("name", ["bias", "encode_scale", "block_scale", "tensor_scale"])
def test_every_tensor_of_a_layer_is_compared(name: str) -> None:
    """Those of the checkpoint too, which the engine is to write."""
    layer, fresh = (make("nvfp4", backend="any_torch") for _ in range(2))
    other = getattr(fresh, name)[:1].double()
    setattr(fresh, name, torch.nn.Parameter(other, False) if name == "bias" else other)
    ((needed, found),) = Renewal(layer, fresh).misfits
    assert needed.startswith(f"{name}: ")
    assert found == f"float64 {tuple(other.shape)}"


def test_what_a_backend_keeps_in_another_form_is_found_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened("cublas"):
        layer, fresh = (layer_of("cublas", "nvfp4", 48, 96, input_transform=hadamard(16)) for _ in range(2))
        layer(torch.randn(5, 96).bfloat16())
        changed(fresh, True)
        parts_of = vendor.parts_of
        monkeypatch.setattr(vendor, "parts_of", lambda *of, **how: parts_of(*of, **how) * 2)
        before = layer.tensor_scale.clone()
        renewal = Renewal(layer, fresh)
        assert [needed for needed, _ in renewal.misfits] == [
            "what blackwell_cublas keeps.parts: 1 part",
            "what blackwell_cublas keeps.alphas: 1 part",
        ]
        assert_same_bits(layer.tensor_scale, before)
        with pytest.raises(AssertionError):
            renewal.write()


@pytest.mark.parametrize("called", ["by the plan", "by the operator", "both ways"])
def test_a_tensor_that_does_not_fit_is_named_once(called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator keeps parts beside the weight, which are those that the layer keeps."""
    with opened("cublas"):
        layer, fresh = (layer_of("cublas", "nvfp4", 48, 96) for _ in range(2))
        x = torch.randn(5, 96).bfloat16()
        if called != "by the operator":
            layer(x)
        if called != "by the plan":
            torch.ops.quarterturn.fp4_linear(x, *layer._operands())
            layer.current_plan(torch.bfloat16)
        parts_of = vendor.parts_of

        def longer(*of: Any, **how: Any) -> tuple[Part, ...]:
            return tuple(part._replace(codes=torch.cat((part.codes, part.codes))) for part in parts_of(*of, **how))

        monkeypatch.setattr(vendor, "parts_of", longer)
        found = Renewal(layer, fresh).misfits
    assert found == [("what blackwell_cublas keeps.parts[0].codes: uint8 (48, 64)", "uint8 (96, 64)")]


def test_parts_that_are_not_the_layers_are_written_over_too() -> None:
    """Where the operator had to make parts of its own, the layer's and those beside the weight are two."""
    with opened("cublas"):
        layer, fresh = (layer_of("cublas", "nvfp4", 48, 96) for _ in range(2))
        x = torch.randn(5, 96).bfloat16()
        layer(x), changed(fresh, True)(x)
        plan, of_fresh = layer.current_plan(torch.bfloat16), fresh.current_plan(torch.bfloat16)
        beside = vendor._KEPT.of(layer.codes)
        stamp, parts = beside["blackwell_cublas"]
        copies = tuple(Part(*(t.clone() if isinstance(t, torch.Tensor) else t for t in part)) for part in parts)
        beside["blackwell_cublas"] = (stamp, copies)
        Renewal(layer, fresh).write()
        want = of_fresh.layer.kept["blackwell_cublas"].parts[0]
        for held in (plan.layer.kept["blackwell_cublas"].parts[0], copies[0]):
            assert_same_bits(held.codes, want.codes)


class Stream:
    """In the place of a GPU's stream: how often it was waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


@pytest.mark.parametrize(("device", "capturing", "waits"), [("cuda", False, 1), ("cuda", True, 0), ("cpu", False, 0)])
def test_a_gpu_is_waited_for_but_in_a_capture(
    device: str, capturing: bool, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    wait_for_writes(torch.device(device))
    assert stream.waited == waits


def test_what_is_written_is_waited_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels ask for weights before those launched before them have ended."""
    turn = random_hadamard(16, seed=1)
    layer, fresh = (make("nvfp4", input_transform=turn, weights="decoded", backend="any_torch") for _ in range(2))
    changed(fresh, True)
    assert layer.input_matrix is not None
    layer.input_matrix.data.fill_(33.0)
    seen: list[tuple[torch.device, bool]] = []

    def look(device: torch.device) -> None:
        written = [(layer.values, fresh.values), (layer.tensor_scale, fresh.tensor_scale)]
        done = all(torch.equal(mine, other) for mine, other in written)
        seen.append((device, done and bool((layer.input_matrix != 33.0).all())))

    monkeypatch.setattr(renewing, "wait_for_writes", look)
    Renewal(layer, fresh).write()
    assert seen == [(layer.codes.device, True)]


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
