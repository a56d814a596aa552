"""What torch is promised of every op (opcheck, compile, dynamic shapes) and what a caller is told when it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import quarterturn
from comparing import HERE, assert_refused, assert_same_bits
from quarterturn import MXFP4, NVFP4, FP4Linear, FP4Tensor, eager, ops
from test_ops_matmul import activations, weight

every_backend = pytest.mark.parametrize("backend", HERE)


class Recorder(TorchDispatchMode):
    """Notes the calls of the library's ops, so that opcheck gets their real arguments, whatever the schemas are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "quarterturn":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded(call: Callable[[], object]) -> list[tuple]:
    with Recorder() as recorder:
        call()
    assert recorder.calls, "the call went past torch.ops.quarterturn"
    return recorder.calls


def layer(name: str, activations: str, **options: object) -> FP4Linear:
    made = FP4Linear.from_tensor(
        weight(name, 32, 64, (0.3,)), activations=activations, bias=torch.randn(32),
        input_encode_scale=torch.tensor([100.0]) if name == "nvfp4" and activations == "fp4" else None, **options,
    )  # fmt: skip
    return made.eval().requires_grad_(False)


def calls(backend: str) -> dict[str, Callable[[], object]]:
    x, h = torch.randn(5, 64), quarterturn.random_hadamard(16)
    m = h.matrix.float()
    half = x.bfloat16()
    codes, scale, _ = activations("nvfp4", 5, 64)
    mx_codes, mx_scale, _ = activations("mxfp4", 5, 64)
    nv = {"format": NVFP4, "encode_scale": torch.tensor([100.0]), "backend": backend}
    mx = {"format": MXFP4, "backend": backend}
    rows = torch.rand(5)
    w, wm = weight("nvfp4", 32, 64), weight("mxfp4", 32, 64)
    sizes = weight("nvfp4", 32, 64, (0.1, 0.2), (8, 24))
    return {
        "rotate": lambda: ops.rotate(x, m, h.factor, backend=backend),
        "rotate bf16 transposed": lambda: ops.rotate(half, m, h.factor, True, out_dtype=torch.float32, backend=backend),
        "rotate 3-D": lambda: ops.rotate(x.reshape(1, 5, 64), m, backend=backend),
        "rotate an empty batch": lambda: ops.rotate(x[:0], m, backend=backend),
        "quantize": lambda: ops.rotate_quantize(x, **nv),
        "quantize token": lambda: ops.rotate_quantize(half, m, h.factor, recipe="token", format=NVFP4, backend=backend),
        "quantize 3-D": lambda: ops.rotate_quantize(x.reshape(1, 5, 64), m, **nv),
        "quantize strided": lambda: ops.rotate_quantize(torch.randn(10, 64)[::2], m, **nv),
        "quantize blocked": lambda: ops.rotate_quantize(x, m, scale_layout="blocked", **nv),
        "quantize mxfp4": lambda: ops.rotate_quantize(x, m, rule="rceil", **mx),
        "quantize mxfp4 blocked": lambda: ops.rotate_quantize(x, scale_layout="blocked", **mx),
        "quantize an empty batch": lambda: ops.rotate_quantize(x[:0], m, **nv),
        "qdq": lambda: ops.rotate_quantize_dequantize(x, m, h.factor, **nv),
        "qdq token": lambda: ops.rotate_quantize_dequantize(half, recipe="token", format=NVFP4, backend=backend),
        "qdq mxfp4": lambda: ops.rotate_quantize_dequantize(half, m, **mx),
        "matmul": lambda: ops.fp4_matmul(x, weight=w, bias=torch.randn(32), backend=backend),
        "matmul bf16 with ranges": lambda: ops.fp4_matmul(half, rows, weight=sizes, backend=backend),
        "matmul mxfp4": lambda: ops.fp4_matmul(half, weight=wm, backend=backend),
        "matmul of codes": lambda: ops.fp4_matmul(codes, rows, weight=w, x_block_scale=scale, backend=backend),
        "matmul of mxfp4 codes": lambda: ops.fp4_matmul(
            mx_codes, torch.ones(1), weight=wm, x_block_scale=mx_scale, out_dtype=torch.float32, backend=backend
        ),
        "swizzle": lambda: ops.swizzle_scales(torch.randint(0, 255, (5, 3), dtype=torch.uint8)),
        "swizzle e4m3": lambda: ops.swizzle_scales(scale),
        "unswizzle": lambda: ops.unswizzle_scales(ops.swizzle_scales(scale), 5, 4),
        "linear W4A4": lambda: layer("nvfp4", "fp4", input_transform=h, output_transform=h, backend=backend)(x),
        "linear W4A16": lambda: layer("mxfp4", "bf16", input_transform=h, backend=backend)(half),
    }


@every_backend
@pytest.mark.parametrize("case", calls("auto"))
@pytest.mark.filterwarnings("ignore")
def test_opcheck(case: str, backend: str) -> None:
    for func, args, kwargs in recorded(calls(backend)[case]):
        torch.library.opcheck(func, args, kwargs)


def test_opcheck_saw_every_op() -> None:
    named = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("quarterturn::")}
    seen = {func.name() for call in calls("auto").values() for func, _, _ in recorded(call)}
    assert named == seen


@every_backend
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_equals_eager_and_leaves_its_input_alone(compiler: str, backend: str) -> None:
    h = quarterturn.random_hadamard(32)
    matrix, w = h.matrix.float(), weight("nvfp4", 32, 64, (0.3,))

    def run(x: torch.Tensor) -> torch.Tensor:
        values, scale = ops.rotate_quantize_dequantize(
            x, matrix, h.factor, format=NVFP4, encode_scale=torch.tensor([100.0]), backend=backend
        )
        return ops.fp4_matmul(values, scale, weight=w, backend=backend) + x.sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=compiler)
    for m in (5, 1, 129):
        x = torch.randn(m, 64)
        kept = x.clone()
        assert_same_bits(compiled(x), run(x))
        assert_same_bits(x, kept, "x after the call")


# ---- refusals

X = torch.randn(4, 64)
M = torch.eye(16)
NV = {"format": NVFP4, "encode_scale": 1.0}
W = weight("nvfp4", 8, 64)
REFUSALS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "R does not divide K, though it divides numel": (lambda: ops.rotate(torch.randn(2, 24), M), ["rotate", "24", "16"]),
    "a matrix that is not square": (lambda: ops.rotate(X, torch.randn(16, 32)), ["rotate", "16, 32"]),
    "a matrix of integers": (lambda: ops.rotate(X, torch.ones(16, 16, dtype=torch.int32)), ["rotate", "int32"]),
    "x of integers": (lambda: ops.rotate(torch.ones(4, 64, dtype=torch.int32), M), ["rotate", "int32"]),
    "x of float64": (lambda: ops.rotate(X.double(), M), ["rotate", "float64"]),
    "x without dimensions": (lambda: ops.rotate(torch.tensor(1.0), M), ["rotate"]),
    "out_dtype of integers": (lambda: ops.rotate(X, M, out_dtype=torch.int32), ["rotate", "int32"]),
    "an unknown backend": (lambda: ops.rotate(X, M, backend="warp_drive"), ["warp_drive"]),
    "K = 24": (lambda: ops.rotate_quantize(torch.randn(2, 24), **NV), ["rotate_quantize", "24", "16"]),
    "MXFP4 with K = 48": (
        lambda: ops.rotate_quantize(torch.randn(2, 48), format=MXFP4),
        ["rotate_quantize", "48", "32"],
    ),
    "NVFP4 without encode": (lambda: ops.rotate_quantize(X, format=NVFP4), ["rotate_quantize", "encode_scale"]),
    "two encode scales": (
        lambda: ops.rotate_quantize(X, format=NVFP4, encode_scale=torch.ones(2)),
        ["rotate_quantize", "encode_scale", "2"],
    ),
    "a matrix without entries": (lambda: ops.rotate(X, torch.ones(0, 0)), ["rotate"]),
    "an encode scale of zero": (lambda: ops.rotate_quantize(X, format=NVFP4, encode_scale=0.0), ["encode_scale"]),
    "an encode scale below zero": (lambda: ops.rotate_quantize(X, format=NVFP4, encode_scale=-1.0), ["encode_scale"]),
    "an encode scale of NaN": (lambda: ops.rotate_quantize(X, format=NVFP4, encode_scale=math.nan), ["encode_scale"]),
    "tensors on two devices": (lambda: ops.rotate(X, M.to("meta")), ["rotate", "meta", "cpu"]),
    "an unknown recipe": (lambda: ops.rotate_quantize(X, recipe="best", **NV), ["rotate_quantize", "best", "token"]),
    "an unknown rule": (lambda: ops.rotate_quantize(X, format=MXFP4, rule="up"), ["rotate_quantize", "up", "rceil"]),
    "an unknown layout": (lambda: ops.rotate_quantize(X, scale_layout="zigzag", **NV), ["zigzag", "blocked"]),
    "an unknown format": (lambda: ops.rotate_quantize(X, format="int4"), ["int4", "nvfp4", "mxfp4"]),
    "MXFP4 values in fp16": (
        lambda: ops.rotate_quantize_dequantize(X.half(), format=MXFP4),
        ["rotate_quantize_dequantize", "float16"],
    ),
    "MXFP4 values asked for in fp16": (
        lambda: ops.rotate_quantize_dequantize(X, format=MXFP4, out_dtype=torch.float16),
        ["rotate_quantize_dequantize", "float16"],
    ),
    "a product with another K": (lambda: ops.fp4_matmul(torch.randn(2, 48), weight=W), ["fp4_matmul", "48"]),
    "a bias of another length": (
        lambda: ops.fp4_matmul(X, weight=W, bias=torch.ones(7)),
        ["fp4_matmul", "bias", "7", "8"],
    ),
    "codes without their scales": (
        lambda: ops.fp4_matmul(W.codes, torch.ones(1), weight=W),
        ["fp4_matmul", "x_block_scale"],
    ),
    "codes with scales of another shape": (
        lambda: ops.fp4_matmul(W.codes, torch.ones(1), weight=W, x_block_scale=W.block_scale[:, :3]),
        ["fp4_matmul", "8, 3"],
    ),
    "tensor scales of another length": (lambda: ops.fp4_matmul(X, torch.ones(3), weight=W), ["fp4_matmul", "3"]),
    "scales of floats": (lambda: ops.swizzle_scales(torch.ones(4, 4)), ["swizzle_scales", "float32"]),
    "a buffer of another size": (
        lambda: ops.unswizzle_scales(torch.zeros(512, dtype=torch.uint8), 129, 4),
        ["512", "129"],
    ),
    "no matrix to turn by": (lambda: ops.rotate(X, None), ["rotate", "matrix", "None"]),
    "a list as matrix": (lambda: ops.rotate(X, [[1.0]]), ["rotate", "matrix", "list"]),
    "a list as matrix of a quantizer": (lambda: ops.rotate_quantize(X, [[1.0]], **NV), ["rotate_quantize", "list"]),
    "a list as x": (lambda: ops.rotate([1.0], M), ["rotate", "x", "list"]),
    "no x": (lambda: ops.rotate_quantize_dequantize(None, **NV), ["rotate_quantize_dequantize", "x", "None"]),
    "a factor in words": (lambda: ops.rotate(X, M, "2"), ["rotate", "factor", "'2'"]),
    "a factor that is a tensor": (lambda: ops.rotate(X, M, torch.ones(())), ["rotate", "factor", "Tensor"]),
    "a direction in words": (lambda: ops.rotate_quantize(X, M, 1.0, "no", **NV), ["rotate_quantize", "transpose"]),
    "a backend that is no name": (lambda: ops.rotate(X, M, backend=None), ["rotate", "backend", "None"]),
    "an encode scale in a list": (lambda: ops.rotate_quantize(X, format=NVFP4, encode_scale=[1.0]), ["encode_scale"]),
    "a format that is no name": (lambda: ops.rotate_quantize(X, format=["nvfp4"]), ["format", "nvfp4"]),
    "a layout that is no name": (lambda: ops.rotate_quantize(X, scale_layout=[], **NV), ["scale layout"]),
    "a rule that is no name": (lambda: ops.rotate_quantize(X, format=MXFP4, rule=[]), ["rotate_quantize", "rule"]),
    "an out_dtype in words": (lambda: ops.rotate(X, M, out_dtype="float32"), ["rotate", "out_dtype"]),
    "a weight of values": (lambda: ops.fp4_matmul(X, weight=X), ["fp4_matmul", "weight", "FP4Tensor"]),
    "a bias in a list": (lambda: ops.fp4_matmul(X, weight=W, bias=[0.0] * 8), ["fp4_matmul", "bias", "list"]),
    "a tensor scale in bf16": (
        lambda: ops.fp4_matmul(X, torch.ones(1).bfloat16(), weight=W), ["fp4_matmul", "x_tensor_scale", "bfloat16"],
    ),
    "a weight's tensor scale in bf16": (
        lambda: ops.fp4_matmul(X, weight=replace(W, tensor_scale=W.tensor_scale.bfloat16())),
        ["fp4_matmul", "tensor_scale float32", "bfloat16"],
    ),
    "a tensor scale as a number": (lambda: ops.fp4_matmul(X, 1.0, weight=W), ["fp4_matmul", "x_tensor_scale", "float"]),
    "a list as x of a product": (lambda: ops.fp4_matmul([1.0], weight=W), ["fp4_matmul", "x", "list"]),
    "scales in a list": (lambda: ops.swizzle_scales([1]), ["swizzle_scales", "scales", "list"]),
    "a buffer that is a list": (lambda: ops.unswizzle_scales([1], 1, 1), ["unswizzle_scales", "stored", "list"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_saying_needed_found_and_what_to_do(case: str) -> None:
    call, words = REFUSALS[case]
    assert_refused(call, *words)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.rotate(x, M),
        lambda x: ops.rotate_quantize(x, **NV),
        lambda x: ops.rotate_quantize_dequantize(x, **NV),
        lambda x: ops.fp4_matmul(x, weight=W),
    ],
    ids=["rotate", "rotate_quantize", "rotate_quantize_dequantize", "fp4_matmul"],
)
def test_gradients_are_refused_and_named(call) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    text = assert_refused(lambda: call(x))
    assert ("grad" in text and "no_grad" in text) or "inference_mode" in text, f"does not say the way out: {text}"
    with torch.no_grad():
        call(x)
    with torch.inference_mode():
        call(torch.randn(4, 64))
    call(x.detach())


def test_a_width_of_zero_is_refused() -> None:
    assert_refused(lambda: ops.rotate_quantize(torch.ones(2, 0), **NV), "K = 0")


def test_a_layer_under_gradients_is_refused() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    assert_refused(lambda: layer("nvfp4", "fp4")(x), "grad")


@pytest.mark.parametrize("name", ["bias", "input_encode_scale", "tensor_scale", "input_matrix"])
def test_a_layer_whose_parts_ask_for_gradients_is_refused(name: str) -> None:
    made, x = layer("nvfp4", "fp4", input_transform=quarterturn.random_hadamard(16)), torch.randn(4, 64)
    made(x)
    getattr(made, name).requires_grad_()
    assert_refused(lambda: made(x), "fp4_linear", "grad", "no_grad")
    with torch.no_grad():
        want = made(x)
    getattr(made, name).requires_grad_(False)
    assert_same_bits(made(x), want)


def test_an_explicit_backend_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend with a reason against this machine refuses by name, with its reasons; automatic choice goes past it."""
    from quarterturn.backends import BACKENDS, op_backend

    first = BACKENDS[0]
    monkeypatch.setattr(first, "missing", lambda device, capability=None: ["needs a chip, found none"])
    op_backend.cache_clear()
    try:
        text = assert_refused(lambda: ops.rotate(X, M, backend=first.NAME), first.NAME)
        assert "needs a chip, found none" in text
        assert op_backend("rotate", torch.device("cpu"), "auto").NAME == "any_torch"
    finally:
        op_backend.cache_clear()


class Named(TorchFunctionMode):
    """Notes the functions that a torch function mode is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@every_backend
def test_who_looks_on_sees_the_operators(backend: str) -> None:
    made = layer("nvfp4", "fp4", backend=backend)
    want = [ops.rotate(X, M, backend=backend), ops.fp4_matmul(X, weight=W, backend=backend), made(X)]
    with Named() as named:
        got = [ops.rotate(X, M, backend=backend), ops.fp4_matmul(X, weight=W, backend=backend), made(X)]
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    for name in ("rotate", "fp4_matmul", "fp4_linear"):
        assert any(f"quarterturn.{name}" in seen for seen in named.names), named.names


@every_backend
def test_a_fake_tensor_anywhere_goes_to_the_fakes(backend: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    codes, scale = mode.from_tensor(W.codes), mode.from_tensor(W.block_scale)
    fake = FP4Tensor(codes, scale, mode.from_tensor(W.tensor_scale), None, NVFP4, W.output_sizes)
    for got, shape in (
        (ops.rotate(X, mode.from_tensor(M), backend=backend), (4, 64)),
        (ops.rotate_quantize(X, mode.from_tensor(M), backend=backend, **NV)[0], (4, 32)),
        (ops.fp4_matmul(X, weight=fake, backend=backend), (4, 8)),
        (ops.fp4_matmul(X, weight=W, bias=mode.from_tensor(torch.ones(8)), backend=backend), (4, 8)),
    ):
        assert isinstance(got, FakeTensor)
        assert tuple(got.shape) == shape
    made = layer("nvfp4", "fp4", backend=backend)
    assert isinstance(made(mode.from_tensor(X)), FakeTensor)
    for name, buffer in list(made._buffers.items()):
        made._buffers[name] = None if buffer is None else mode.from_tensor(buffer)
    made.bias = torch.nn.Parameter(mode.from_tensor(made.bias.detach()), False)
    for x in (X, mode.from_tensor(X)):
        assert isinstance(made(x), FakeTensor)


def test_a_private_name_that_torch_lacks_means_seen() -> None:
    assert not eager.seen_by_torch(X, M, 1.0, False, None, [1], torch.float32, "auto")
    for name in ("_no_such_name", "_functorch.no_such_name", "_no_such.name"):
        answer = eager._question(name)()
        assert answer
        assert answer is not None
        assert answer > 0
