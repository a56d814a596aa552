"""FP4Linear as a module: dtype moves, state dicts, reloading in place, copies, and torch.compile."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import shutil
from dataclasses import replace

import pytest
import torch

from comparing import assert_same_bits
from quarterturn import FP4Linear, FP4Tensor, hadamard, random_hadamard
from quarterturn.backends import BACKENDS
from quarterturn.plan import LayerPlan
from test_linear import integers, make
from test_ops import every_backend

PACKED = ("codes", "block_scale", "encode_scale", "input_encode_scale")
every_weights = pytest.mark.parametrize("weights", ["auto", "packed", "decoded"])


def same_packed(a: FP4Linear, b: FP4Linear) -> None:
    for name in PACKED:
        if getattr(a, name, None) is not None:
            assert_same_bits(getattr(a, name), getattr(b, name), name)


def twin(layer: FP4Linear, **options: object) -> FP4Linear:
    """A fresh layer of the same shape that never saw the old weights."""
    fresh = make("nvfp4", input_transform=random_hadamard(16), **options)
    fresh.load_state_dict(layer.state_dict())
    return fresh


@pytest.mark.parametrize(
    "move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.bfloat16()]
)
@every_weights
def test_dtype_moves_keep_the_packed_bits(move, weights: str) -> None:
    layer = make("nvfp4", weights=weights)
    kept = copy.deepcopy(layer)
    moved = move(torch.nn.Sequential(layer))[0]
    same_packed(moved, kept)
    assert moved.codes.dtype == torch.uint8
    assert moved.block_scale.dtype == torch.float8_e4m3fn
    assert moved.encode_scale.dtype == torch.float32
    assert moved.weight_tensor().tensor_scale.dtype == torch.float32
    x = integers(3, 96)
    moved.bias.data = kept.bias.data.clone()
    assert_same_bits(moved(x), kept(x), "y after the move")


@every_weights
def test_half_and_back_gives_the_same_layer(weights: str) -> None:
    layer, x = make("nvfp4", weights=weights, bias=False), integers(3, 96)
    want = layer(x)
    assert_same_bits(layer.half().float()(x), want)
    y = layer.to(torch.bfloat16)(x.bfloat16())
    fresh = make("nvfp4", weights=weights, bias=False)
    fresh.load_state_dict(layer.state_dict())
    assert_same_bits(y, fresh(x.bfloat16()))


@every_backend
@every_weights
def test_state_dict_round_trip(weights: str, backend: str, tmp_path) -> None:
    layer = make("nvfp4", input_transform=random_hadamard(16), weights=weights, backend=backend)
    state = layer.state_dict()
    assert {"codes", "block_scale", "encode_scale", "input_encode_scale", "bias"} == set(state)
    torch.save(state, tmp_path / "layer.pt")
    again = make("nvfp4", input_transform=random_hadamard(16), weights=weights, backend=backend)
    x = integers(5, 96)
    again(x)
    again.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    for name, tensor in again.state_dict().items():
        assert_same_bits(tensor, state[name], name)
    assert_same_bits(again(x), layer(x), "y")


@pytest.mark.parametrize("name", ["codes", "block_scale", "encode_scale", "input_encode_scale", "bias"])
def test_a_missing_tensor_is_named(name: str) -> None:
    layer = make("nvfp4")
    state = layer.state_dict()
    del state[name]
    with pytest.raises(RuntimeError, match=name):
        layer.load_state_dict(state)


@every_backend
@every_weights
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "copy_ and refresh", "assign"])
def test_reloading_in_place_equals_a_fresh_layer(how: str, weights: str, backend: str) -> None:
    """New weights in the same buffers, at the same addresses: nothing decoded from the old ones may be left."""
    options = {"input_transform": random_hadamard(16), "weights": weights, "backend": backend}
    layer, other = make("nvfp4", **options), make("nvfp4", std=3.0, **options)
    x = integers(5, 96)
    before = layer(x)
    if how == "load_state_dict":
        layer.load_state_dict(other.state_dict())
    elif how == "assign":
        layer.load_state_dict(other.state_dict(), assign=True)
    else:
        with torch.no_grad():
            for name, tensor in layer.state_dict(keep_vars=True).items():
                tensor.data.copy_(other.state_dict()[name]) if name == "bias" else tensor.copy_(
                    other.state_dict()[name]
                )
        if how == "copy_ and refresh":
            layer.refresh()
    want = other(x)
    assert not torch.equal(before, want)
    assert_same_bits(layer(x), want, "y after the reload")
    assert_same_bits(layer.weight_tensor().tensor_scale, other.weight_tensor().tensor_scale, "tensor scales")


@every_backend
def test_one_model_after_another(backend: str) -> None:
    """Load, free, load another, load the first again: the bits of a process that only ever saw the first."""

    def first() -> FP4Linear:
        torch.manual_seed(1)
        return make(
            "nvfp4", input_transform=random_hadamard(16, seed=1), output_transform=hadamard(16), backend=backend
        )

    def second() -> FP4Linear:
        torch.manual_seed(2)
        return make(
            "nvfp4", input_transform=random_hadamard(16, seed=2), output_transform=random_hadamard(16), backend=backend
        )

    x = integers(5, 96)
    want = {first: first()(x), second: second()(x)}
    for build in (first, second, first, first, second):
        layer = build()
        layer.half().float()
        layer.bias.data = build().bias.data
        assert_same_bits(layer(x), want[build], build.__name__)
        assert_same_bits(layer(x), want[build], f"{build.__name__}, again")
        del layer
        gc.collect()


def saved(layer: FP4Linear) -> FP4Linear:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, saved, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deepcopy", "save", "pickle"]
)
@every_weights
def test_copies_are_equal_and_independent(weights: str, how) -> None:
    layer = make("nvfp4", input_transform=random_hadamard(16), output_transform=hadamard(16), weights=weights)
    x = integers(5, 96)
    want = layer(x)
    made = how(layer)
    assert_same_bits(made(x), want)
    same_packed(made, layer)
    made.load_state_dict(make("nvfp4", std=9.0).state_dict())
    assert not torch.equal(made(x), want)
    assert_same_bits(layer(x), want, "the original after its copy changed")


def test_sharing_a_transform_does_not_share_its_use() -> None:
    shared = random_hadamard(16, seed=4)
    kept = shared.matrix.clone()
    one, two = make("nvfp4", input_transform=shared), make("nvfp4", input_transform=shared)
    x = integers(5, 96)
    want = two(x)
    one(x), one.half(), one.float()
    assert_same_bits(two(x), want)
    assert_same_bits(shared.matrix, kept, "the shared matrix")


def model(backend: str, dtype: torch.dtype) -> torch.nn.Module:
    t = random_hadamard(16, seed=5)
    layers = [
        make("nvfp4", n=96, input_transform=t, output_transform=t, backend=backend, dtype=dtype),
        torch.nn.SiLU(),
        make("nvfp4", n=96, sizes=(32, 64), recipe="token", input_transform=hadamard(32), backend=backend, dtype=dtype),
        make("mxfp4", "bf16", n=48, bias=False, input_transform=t, backend=backend, dtype=dtype),
    ]
    return torch.nn.Sequential(*layers).eval().requires_grad_(False)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_compiled_equals_eager(dynamic: bool, dtype, backend: str) -> None:
    torch._dynamo.reset()
    net = model(backend, dtype)
    compiled = torch.compile(net, fullgraph=True, dynamic=dynamic, backend="eager")
    for shape in [(5, 96), (1, 96), (2, 7, 96)]:
        x = torch.randn(shape, dtype=dtype)
        kept = x.clone()
        with torch.no_grad():
            assert_same_bits(compiled(x), net(x))
        assert_same_bits(x, kept, "x after the call")


@pytest.mark.filterwarnings("ignore")
def test_compiled_by_inductor_equals_eager() -> None:
    """Inductor needs a C++ compiler, as cpu_native needs one for C: without it this fails, and does not pass unseen."""
    assert shutil.which("g++") or shutil.which("clang++"), "the tests need a C++ compiler: install g++ or clang"
    torch._dynamo.reset()
    net = model("auto", torch.float32)
    net[1] = torch.nn.ReLU()  # exact under any fusion, where SiLU may round otherwise
    compiled = torch.compile(net, fullgraph=True)
    x = torch.randn(5, 96)
    with torch.no_grad():
        assert_same_bits(compiled(x), net(x))


@every_backend
@pytest.mark.parametrize("weights", ["packed", "decoded"])
def test_another_dtype_decodes_nothing_and_moves_nothing(
    weights: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a captured graph reads stays where it is, and what was made of the weights is not made again."""
    layer, t = make("nvfp4", weights=weights, backend=backend, input_transform=random_hadamard(16)), torch.bfloat16
    fresh, x = copy.deepcopy(layer), integers(3, 96)
    want = {torch.float32: fresh(x), t: copy.deepcopy(layer)(x.to(t))}
    layer(x)
    derived = {name: getattr(layer, name) for name in ("tensor_scale", "values", "input_matrix")}
    made = layer.current_plan(torch.float32).layer
    decoded: list[int] = []
    module = next(b for b in BACKENDS if backend == b.NAME)
    prepare = module.prepare
    monkeypatch.setattr(module, "prepare", lambda *arguments: decoded.append(1) or prepare(*arguments))
    for dtype in (t, torch.float32, t):
        assert_same_bits(layer(x.to(dtype)), want[dtype])
        assert layer.current_plan(dtype).layer is made
    assert not decoded
    assert all(getattr(layer, name) is tensor for name, tensor in derived.items())
    layer.codes.bitwise_xor_(8)
    got = layer(x.to(t))
    assert len(decoded) == 1
    assert_same_bits(got, twin(layer, weights=weights, backend=backend)(x.to(t)), "after a write")


@every_backend
@every_weights
def test_new_weights_come_into_the_old_memory(weights: str, backend: str) -> None:
    options = {"input_transform": random_hadamard(16), "weights": weights, "backend": backend}
    for inference in (False, True):
        with torch.inference_mode(inference):
            layer, other = make("nvfp4", **options), make("nvfp4", std=3.0, **options)
        names = [name for name in ("tensor_scale", "values", "input_matrix") if getattr(layer, name) is not None]
        before = {name: (getattr(layer, name), getattr(layer, name).data_ptr()) for name in names}
        with torch.inference_mode(inference):
            layer.load_state_dict(other.state_dict())
        for name, (tensor, place) in before.items():
            assert getattr(layer, name) is tensor, name
            assert tensor.data_ptr() == place, name
            assert_same_bits(tensor, getattr(other, name), name)


def test_no_thread_sees_a_new_stamp_with_an_old_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread, here the call in the middle of a plan's making, must not run the plan of the old weights."""
    layer, other, x = make("nvfp4", weights="decoded"), make("nvfp4", std=3.0, weights="decoded"), integers(3, 96)
    layer(x)
    seen = []
    original = LayerPlan.__init__

    def interrupted(self, *arguments) -> None:
        seen.append(layer.current_plan(torch.float32))
        original(self, *arguments)

    monkeypatch.setattr(LayerPlan, "__init__", interrupted)
    layer.codes.copy_(other.codes)
    layer(x)
    assert seen == [None]


def test_a_change_while_it_is_read_is_seen_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, other, x = make("nvfp4", weights="decoded"), make("nvfp4", std=3.0, weights="decoded"), integers(3, 96)
    weight_tensor = FP4Linear.weight_tensor

    def overtaken(self) -> FP4Tensor:
        weight = weight_tensor(self)
        read = replace(weight, codes=weight.codes.clone())
        self.codes.copy_(other.codes)
        return read

    with monkeypatch.context() as patched:
        patched.setattr(FP4Linear, "weight_tensor", overtaken)
        layer.refresh(torch.float32)
    assert_same_bits(layer(x), copy.deepcopy(layer)(x))
