"""The GPU's rotate + quantize kernels on the device: graphs, compile, streams, more than one GPU, large offsets."""

from __future__ import annotations

import pytest
import torch

from comparing import assert_same_bits
from gpu_cases import BACKEND, FORMATS, grid, manner, matrix_of
from quarterturn import ops
from quarterturn.backends import gpu_triton
from quarterturn.backends.gpu_matmul_many import order
from quarterturn.backends.protocol import Blocks, Quantizer
from quarterturn.formats import NVFP4

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16


def every_form(x: torch.Tensor, matrix: torch.Tensor, encode: torch.Tensor) -> list[torch.Tensor]:
    """Each op in several forms, so that one capture or one compilation sees all of them."""
    nvfp4 = {"format": "nvfp4", "encode_scale": encode, "backend": BACKEND}
    made = [ops.rotate(x, matrix, 0.25, backend=BACKEND)]
    made += ops.rotate_quantize(x, matrix, 0.25, True, **nvfp4)
    made += ops.rotate_quantize(x, matrix, 0.25, scale_layout="blocked", **nvfp4)
    made += ops.rotate_quantize(x, matrix, 0.25, recipe="token", **nvfp4)
    made += ops.rotate_quantize(x, None, format="mxfp4", backend=BACKEND)
    made += ops.rotate_quantize_dequantize(x, matrix, 0.25, **nvfp4)
    return made


def inputs(kind: str, m: int = 37, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"):
    x = torch.randn(m, 384, device=device).to(dtype)
    return x, matrix_of(kind, 64)[0].to(device), torch.tensor([100.0], device=device)


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], what: str = "") -> None:
    assert len(got) == len(want)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(a, b, f"{what} result {number}")


@grid(kind=["random hadamard", "dense"], m=[1, 37, 1025])
def test_a_captured_graph_replays_on_new_input(kind: str, m: int) -> None:
    x, matrix, encode = inputs(kind, m)
    other, louder = torch.randn_like(x) * 5, torch.tensor([7.0], device="cuda")
    every_form(x, matrix, encode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = every_form(x, matrix, encode)
    for tensor in out:
        tensor.view(torch.uint8).fill_(255)
    x.copy_(other)
    encode.copy_(louder)  # the scale is read on the device at every replay, not baked in
    graph.replay()
    torch.cuda.synchronize()
    assert_same(out, every_form(other, matrix, louder), "replayed")
    graph.replay()
    assert_same(out, every_form(other, matrix, louder), "replayed twice")


@grid(kind=["random hadamard", "dense"], dynamic=[False, True])
@pytest.mark.filterwarnings("ignore")
def test_compiled_whole_equals_eager(kind: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(every_form, fullgraph=True, dynamic=dynamic)
    for m in (5, 1, 129):
        x, matrix, encode = inputs(kind, m)
        kept = x.clone()
        assert_same(compiled(x, matrix, encode), every_form(x, matrix, encode), f"{m} rows")
        assert_same_bits(x, kept, "x after the call")


@pytest.mark.filterwarnings("ignore")
def test_compiled_between_other_operations() -> None:
    """Inductor's own kernels before and after it, and its graphs around all of it."""

    def block(x: torch.Tensor) -> torch.Tensor:
        values, scale = ops.rotate_quantize_dequantize(
            torch.relu(x) * 2, matrix, 0.25, format="nvfp4", encode_scale=encode, backend=BACKEND
        )
        return values.float() * 2 + scale  # exact, since Inductor may fuse the product into the sum

    x, matrix, encode = inputs("random hadamard")
    want = block(x)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_bits(compiled(x).clone(), want)


def test_nothing_waits_for_the_device() -> None:
    x, matrix, encode = inputs("dense")
    every_form(x, matrix, encode)
    torch.cuda.set_sync_debug_mode("error")
    try:
        every_form(x, matrix, encode)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_work_goes_to_the_current_stream() -> None:
    """x gets its values late on a stream of its own; a launch on any other stream would read the old ones."""
    x, matrix, encode = inputs("random hadamard", 513)
    late = torch.randn_like(x)
    want = every_form(late, matrix, encode)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.copy_(late)
        got = every_form(x, matrix, encode)
    stream.synchronize()
    assert_same(got, want)


def test_every_device_that_is_there_whatever_the_current_one() -> None:
    x, matrix, encode = inputs("dense", device="cuda:0")
    want = [t.cpu() for t in every_form(x, matrix, encode)]
    for index in range(torch.cuda.device_count()):
        moved = [t.to(f"cuda:{index}") for t in (x, matrix, encode)]
        got = every_form(*moved)
        assert {t.device.index for t in got} == {index}
        assert_same([t.cpu() for t in got], want, f"device {index}")
    assert torch.cuda.current_device() == 0


@grid(name=FORMATS, rotation=["none", "random hadamard", "dense"])
def test_offsets_past_two_to_the_31(name: str, rotation: str) -> None:
    """2^31 + 32,768 elements in one call: the rows around the edge and the last ones are those of a small call."""
    k, m = 8192, (1 << 18) + 4
    x = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
    x[: m - 16].fill_(1.5)
    checked = [slice(0, 3), slice((1 << 17) - 2, (1 << 17) + 2), slice(m - 9, m)]
    for rows in checked:
        x[rows] = torch.randn(x[rows].shape, device="cuda").bfloat16()
    turn = (None, 1.0, False) if rotation == "none" else (*matrix_of(rotation, 64), False)
    turn = tuple(t.cuda() if isinstance(t, torch.Tensor) else t for t in turn)
    how = {key: v.cuda() if isinstance(v, torch.Tensor) else v for key, v in manner(name).items()}
    for op, layout in ((ops.rotate_quantize, {"scale_layout": "linear"}), (ops.rotate_quantize_dequantize, {})):
        whole = op(x, *turn, **how, **layout, backend=BACKEND)
        for rows in checked:
            part = op(x[rows].clone(), *turn, **how, **layout, backend=BACKEND)
            for a, b in zip(whole[:-1], part[:-1], strict=True):
                assert_same_bits(a[rows], b, f"rows from {rows.start}")
        del whole
    blocked = ops.rotate_quantize(x, *turn, **how, scale_layout="blocked", backend=BACKEND)[1]
    last = ops.rotate_quantize(x[-4:].clone(), *turn, **how, scale_layout="blocked", backend=BACKEND)[1]
    assert_same_bits(blocked[-128:], last, "the last tiles of blocked scales")
    if rotation != "none":
        z = ops.rotate(x, *turn, backend=BACKEND)
        for rows in checked:
            assert_same_bits(z[rows], ops.rotate(x[rows].clone(), *turn, backend=BACKEND), "rotate")


def test_strides_past_two_to_the_31() -> None:
    """A narrow view whose rows lie 2^21 elements apart: row 1,024 begins at 2^31."""
    big = torch.empty(1030, 1 << 21, device="cuda", dtype=torch.bfloat16)
    x = big[:, 64:192]
    x.copy_(torch.randn(1030, 128, device="cuda"))
    matrix, encode = matrix_of("random hadamard", 64)[0].cuda(), torch.tensor([100.0], device="cuda")
    assert_same(every_form(x, matrix, encode), every_form(x.contiguous(), matrix, encode))


@grid(
    keep=lambda kind, size, m, dtype: kind == "random hadamard" or size >= 64,  # others come in units of 32
    kind=["random hadamard", "dense"],
    size=[16, 32, 64, 128],
    m=[1, 16, 64, 300, 1100],
    dtype=[BF16, FP16],
)
def test_written_in_the_order_of_the_product(kind: str, size: int, m: int, dtype: torch.dtype) -> None:
    """The same numbers as in their natural order, at the places where `order` puts them."""
    x = torch.randn(m, 4096, device="cuda").to(dtype)
    blocks = Blocks(matrix_of(kind, size)[0].to("cuda"), size**-0.5, False)
    encode = torch.tensor([100.0], device="cuda")
    want = gpu_triton.rotate(x, blocks, dtype)
    assert_same_bits(gpu_triton.rotate(x, blocks, dtype, ordered=True), order(want))
    for fmt in FORMATS.values() if dtype == BF16 else (NVFP4,):
        quantizer = Quantizer(fmt, encode if fmt == NVFP4 else None, "checkpoint", "even")
        want, scale = gpu_triton.rotate_quantize_dequantize(x, blocks, quantizer, dtype)
        got, same = gpu_triton.rotate_quantize_dequantize(x, blocks, quantizer, dtype, ordered=True)
        assert_same_bits(got, order(want))
        assert_same_bits(same, scale)
