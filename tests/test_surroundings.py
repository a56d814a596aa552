"""The numbers do not depend on the process around them: autocast, defaults of torch, threads, precision switches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from comparing import assert_same_bits
from quarterturn import MXFP4, NVFP4, FP4Linear, hadamard, matrix, ops, random_hadamard
from quarterturn.backends import BACKENDS, Blocks
from test_linear import integers, make
from test_ops import every_backend
from test_ops_matmul import weight


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    yield
    torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def thread_count(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


SURROUNDINGS = {
    "autocast to bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "matmul precision medium": lambda: matmul_precision("medium"),
    "two threads": lambda: thread_count(2),
    "inference mode": torch.inference_mode,
}
every_surrounding = pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS.keys())


@every_backend
@every_surrounding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ops_are_the_same(around, dtype, backend: str) -> None:
    x, m = torch.randn(257, 128).to(dtype), torch.randn(64, 64) / 8
    encode = torch.tensor([100.0])
    w, few = weight("nvfp4", 32, 128, (0.3,)), torch.randint(-8, 9, (33, 128)).to(dtype)  # exact sums in any order

    def run() -> list[torch.Tensor]:
        made = [ops.rotate(x, m, backend=backend)]
        made += ops.rotate_quantize(x, m, format=NVFP4, encode_scale=encode, backend=backend)
        made += ops.rotate_quantize(x, m, format=NVFP4, recipe="token", backend=backend)
        made += ops.rotate_quantize_dequantize(x, m, format=MXFP4, backend=backend)
        return [*made, ops.fp4_matmul(few, weight=w, backend=backend)]

    want = run()
    with around():
        got = run()
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


@every_backend
@every_surrounding
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_a_layer_is_the_same(around, activations: str, backend: str) -> None:
    """Small integers behind a Hadamard of 16: the sums are exact enough that an order of threads cannot move them."""
    t = random_hadamard(16)
    x = integers(65, 96)
    layer = make("nvfp4", activations, input_transform=t, output_transform=t, backend=backend)
    want = layer(x)
    with around():
        got = layer(x)
    assert got.dtype == want.dtype
    # fp32 sums of 96 terms in another order: at most 96 * 2^-24 = 2^-17.4 of the terms' magnitudes, of which the
    # largest sum is the greater part, and in practice an ulp or two; a bf16 product would be off by 2^-9.
    off = float((got - want).abs().max() / want.abs().max())
    assert off < 2.0**-18


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_making_things_under_another_default_dtype(dtype) -> None:
    def build() -> list[torch.Tensor]:
        torch.manual_seed(1)
        t = random_hadamard(32, seed=1)
        layer = FP4Linear(64, 32, format="nvfp4", input_transform=t, dtype=torch.float32)
        state = {k: v for k, v in layer.state_dict().items() if k.endswith("scale") and "block" not in k}
        made = [
            hadamard(32).matrix,
            t.matrix,
            t.activation_matrix(),
            t.weight_matrix(),
            t.compose(t).matrix,
            *state.values(),
        ]
        return [
            *made,
            matrix([[1.0, 0.1], [0.3, 2.0]]).matrix,
            t.fold_input_weight(torch.ones(2, 64, dtype=torch.float32)),
        ]

    want = build()
    with default_dtype(dtype):
        got = build()
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def test_making_a_layer_on_the_meta_device_and_filling_it() -> None:
    """How large models are loaded: made without memory, then given their tensors. The transform must not be lost."""
    t, u = random_hadamard(16, seed=1), random_hadamard(16, seed=2)
    want = make("nvfp4", input_transform=t, output_transform=u)
    x = integers(5, 96)
    with torch.device("meta"):
        layer = FP4Linear(96, 48, format="nvfp4", bias=True, input_transform=t, output_transform=u)
    assert layer.codes.device.type == "meta"
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(want.state_dict())
    assert_same_bits(layer(x), want(x), "to_empty and load")
    with torch.device("meta"):
        layer = FP4Linear(96, 48, format="nvfp4", bias=True, input_transform=t, output_transform=u)
    layer.load_state_dict(want.state_dict(), assign=True)
    assert_same_bits(layer(x), want(x), "load with assign")


def test_making_transforms_under_the_meta_device() -> None:
    with torch.device("meta"):
        made = [hadamard(32), random_hadamard(32, seed=1)]
    for got, want in zip(made, [hadamard(32), random_hadamard(32, seed=1)], strict=True):
        assert_same_bits(got.matrix, want.matrix)


@every_backend
def test_two_threads_at_once(backend: str) -> None:
    t = random_hadamard(16)
    layers = [make("nvfp4", input_transform=t, std=std, backend=backend, weights="decoded") for std in (0.1, 5.0)]
    x = integers(65, 96)
    want = [layer(x) for layer in layers]
    wrong: list[str] = []

    def work(which: int) -> None:
        for _ in range(30):
            if not torch.equal(layers[which](x), want[which]):
                wrong.append(f"layer {which}")

    workers = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@every_backend
@pytest.mark.parametrize("rows", [3, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_default_device_does_not_matter(dtype, rows: int, backend: str) -> None:
    """What is made on the way lies where x lies, through the operators and beside them."""
    x, m, encode = torch.randn(rows, 128).to(dtype), torch.randn(64, 64) / 8, torch.tensor([100.0])
    w, mx = weight("nvfp4", 32, 128, (0.3,)), weight("mxfp4", 32, 128)
    signs = random_hadamard(32).matrix.float()
    layers = [
        make(name, activations, k=128, input_transform=t, output_transform=hadamard(16), backend=backend, weights=kept)
        for name in ("nvfp4", "mxfp4")
        for activations in ("fp4", "bf16")
        for kept in ("packed", "decoded")
        for t in (None, random_hadamard(32))
    ]
    module = next(b for b in BACKENDS if backend == b.NAME)

    def run() -> list[torch.Tensor]:
        made = [ops.rotate(x, m, backend=backend), module.rotate(x, Blocks(m, 1.0, False), torch.float32)]
        made += ops.rotate_quantize(x, signs, format=NVFP4, encode_scale=encode, backend=backend)
        made += ops.rotate_quantize(x, m, format=NVFP4, encode_scale=100.0, scale_layout="blocked", backend=backend)
        made += ops.rotate_quantize(x, m, format=NVFP4, recipe="token", backend=backend)
        made += ops.rotate_quantize(x, format=MXFP4, recipe="qutlass", backend=backend)
        made += ops.rotate_quantize_dequantize(x, m, format=MXFP4, backend=backend, out_dtype=torch.float32)
        made += [ops.fp4_matmul(x, weight=some, backend=backend) for some in (w, mx)]
        codes, scale, one = ops.rotate_quantize(x, format=NVFP4, encode_scale=encode, backend=backend)
        made.append(ops.fp4_matmul(codes, one, weight=w, x_block_scale=scale, backend=backend))
        made.append(ops.unswizzle_scales(ops.swizzle_scales(scale), *scale.shape))
        for layer in layers:
            plan = layer.refresh(dtype).current_plan(dtype)
            assert plan is not None
            made += [layer(x), plan.run(x)]
        return made

    want = run()
    with default_device("meta"):
        got = run()
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
