"""Siblings that read the same input: the bits of layers on their own, whatever happens between their calls."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quarterturn
from comparing import assert_refused, assert_same_bits
from quarterturn import FP4Linear, hadamard, random_hadamard
from quarterturn.backends import any_torch, compose, cpu_native
from quarterturn.backends.kept import COMPARED
from quarterturn.sharing import tie
from test_linear import make
from test_ops import every_backend
from tiny_models import tiny_model

ROWS = [1, 3, cpu_native.FEW_ROWS + 37]
K = 96
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
every_count = pytest.mark.parametrize("rows", ROWS)
Mode = Callable[[], AbstractContextManager[None]]


class Attention(nn.Module):
    """Three layers of one input; `between` is done with it before each of the others."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        fmt, activations = options.pop("fmt", "nvfp4"), options.pop("activations", "fp4")
        given = {"input_transform": hadamard(16), **options}
        self.q, self.k, self.v = (make(fmt, activations, n=n, k=K, bias=n == 48, **given) for n in (48, 32, 40))  # type: ignore[arg-type]

    def layers(self) -> list[FP4Linear]:
        return [self.q, self.k, self.v]

    def forward(self, x: Tensor, between: Callable[[Tensor], object] = lambda x: None) -> list[Tensor]:
        results = [self.q(x)]
        for layer in (self.k, self.v):
            between(x)
            results.append(layer(x))
        return results


def tied(**options: object) -> tuple[Attention, Attention]:
    """The same layers as siblings, and each alone."""
    alone = Attention(**options)
    together = copy.deepcopy(alone)
    tie(together, FP4Linear)
    assert together.q.siblings is together.v.siblings is not None
    return together, alone


def same(got: list[Tensor], want: list[Tensor], what: str = "") -> None:
    for name, a, b in zip("qkv", got, want, strict=True):
        assert_same_bits(a, b, f"{name} {what}")


@pytest.fixture
def operands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry, the number of layers, for every time that an input is rotated and quantized."""
    made: list[int] = []
    original, whole = compose.operand, compose.together

    def operand(*arguments):
        made.append(1)
        return original(*arguments)

    def together(backend, layers):
        run = whole(backend, layers)
        if run is None:
            return None

        def counted(x: Tensor):
            ys = run(x)
            made.extend([len(layers)] if ys is not None else [])
            return ys

        return counted

    monkeypatch.setattr(compose, "operand", operand)
    monkeypatch.setattr(compose, "together", together)
    return made


@every_backend
@every_mode
@every_count
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fmt": "mxfp4"},
        {"activations": "bf16"},
        {"fmt": "mxfp4", "activations": "bf16", "input_transform": random_hadamard(32)},
        {"recipe": "token"},
        {"output_transform": hadamard(8)},
        {"input_transform": None},
        {"weights": "decoded"},
    ],
    ids=["nvfp4", "mxfp4", "W4A16", "mxfp4 W4A16", "token", "turned output", "no transform", "decoded"],
)
def test_bits_are_those_of_layers_alone(options, dtype: torch.dtype, rows: int, mode: Mode, backend: str) -> None:
    together, alone = tied(**options, backend=backend)
    with mode():
        for _ in range(2):
            x = torch.randn(rows, K).to(dtype)
            same(together(x), alone(x))
            x = torch.randn(2, rows, K).to(dtype)
            same(together(x), alone(x), "of three dimensions")
            wide = torch.randn(rows, 2 * K).to(dtype)
            same(together(wide[:, ::2]), alone(wide[:, ::2]), "strided")


@every_count
@every_backend
def test_an_input_is_quantized_once(rows: int, backend: str, operands: list[int]) -> None:
    together, alone = tied(backend=backend)
    native = backend == "cpu_native" and rows <= cpu_native.FEW_ROWS
    together(torch.randn(rows, K))  # the first input of a dtype makes plans
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(rows, K)
            operands.clear()
            together(x)
            assert operands == ([3] if native else [1])
        operands.clear()
        alone(x)
        assert operands == ([1, 1, 1])
    with torch.inference_mode():
        x = torch.randn(rows, K)
        operands.clear()
        together(x)
        if native:
            assert operands == [3]


@every_mode
@every_count
@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.mul_(2),
        lambda x: x[0, 5:6].fill_(9),
        lambda x: x.view(-1).view(torch.int32)[3:4].zero_(),
        lambda x: x.copy_(x.flip(-1)),
        lambda x: x.resize_(x.shape[0] - 1, K) if x.shape[0] > 1 else x,
        lambda x: setattr(x, "data", x.data * 3),
        lambda x: x.set_(torch.ones_like(x)),
        lambda x: x.data.mul_(2),
        lambda x: np.multiply(x.numpy(), 2, out=x.numpy()),
    ],
    ids=["mul", "one number", "through a view", "copy", "resize", "data", "set", "data in place", "numpy"],
)
def test_a_change_of_x_between_siblings(between, rows: int, mode: Mode) -> None:
    together, alone = tied()
    with mode():
        for _ in range(2):
            x = torch.randn(rows, K)
            y = x.clone()
            same(together(x, between), alone(y, between))
            x = torch.randn(rows, K)
            same(together(x), alone(x), "after that")


@every_mode
@every_count
def test_outputs_are_the_callers_own(rows: int, mode: Mode) -> None:
    """Each output is given once, in memory of its own: writing to it changes no other."""
    together, alone = tied()
    with mode():
        x = torch.randn(rows, K)
        want = alone(x)
        for _ in range(2):
            q, k = together.q(x), together.k(x)
            q.zero_(), k.fill_(7)
            assert_same_bits(together.k(x), want[1], "k again")
            assert_same_bits(together.v(x), want[2], "v")
            assert_same_bits(together.q(x), want[0], "q again")


@every_mode
@every_count
def test_other_inputs_orders_and_layers_left_out(rows: int, mode: Mode) -> None:
    together, alone = tied()
    with mode():
        xs = [torch.randn(rows, K) for _ in range(3)]
        xs.append(xs[0].clone())
        order = [*torch.randint(0, 3, (60, 2)).tolist(), [0, 0], [1, 3], [2, 0], [2, 3]]
        for layer, x in order:
            assert_same_bits(together.layers()[layer](xs[x]), alone.layers()[layer](xs[x]), f"{layer} of {x}")


def test_siblings_that_read_something_else_are_not_made_again(operands: list[int]) -> None:
    together, alone = tied()
    with torch.inference_mode():
        for _ in range(3):
            x, encoded = torch.randn(1, K), torch.randn(1, K)
            operands.clear()
            same([together.q(x), together.k(encoded), together.v(encoded)], [alone.q(x), *alone(encoded)[1:]])
        assert operands[:2] == [1, 2]


@every_count
def test_threads_do_not_get_each_others_values(rows: int) -> None:
    together, alone = tied()
    wrong: list[str] = []

    def work(seed: int) -> None:
        x = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            want = alone(x)
            for _ in range(60):
                for layer, y in zip(together.layers(), want, strict=True):
                    if not torch.equal(layer(x), y):
                        wrong.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_not_equal_is_not_shared(operands: list[int]) -> None:
    """Another matrix, direction, scale, format or rule is another input side."""
    turn, x = random_hadamard(16, seed=1), torch.randn(1, K)
    base = {"input_transform": turn}
    for other in (
        {"input_transform": random_hadamard(16, seed=2)},
        {"input_transform": turn.inverse()},
        {"input_transform": None},
        {**base, "recipe": "token"},
        {**base, "backend": "any_torch"},
        {**base, "weights": "decoded"},
    ):
        pair = nn.Sequential(make("nvfp4", k=K, **base), make("nvfp4", k=K, **other))
        want = [layer(x) for layer in pair]
        tie(pair, FP4Linear)
        operands.clear()
        for layer, y in zip(pair, want, strict=True):
            assert_same_bits(layer(x), y)
        assert len(operands) == 2, other
    pair = nn.Sequential(make("nvfp4", k=K, **base), make("nvfp4", k=K, **base))
    tie(pair, FP4Linear)
    pair[1].input_encode_scale = torch.tensor([50.0])
    want = copy.deepcopy(pair[1])
    want.siblings = None
    pair[0](x)
    assert_same_bits(pair[1](x), want(x))


@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "data", "scale", "encode", "to", "activations"])
@every_mode
@every_count
def test_a_sibling_that_changes_after_the_first_was_called(rows: int, mode: Mode, how: str) -> None:
    together, alone = tied()
    other = Attention()

    def change(model: Attention) -> None:
        k = model.k
        if how == "load_state_dict":
            k.load_state_dict(other.k.state_dict())
        elif how == "copy_":
            k.codes.copy_(other.k.codes)
        elif how == "data":
            k.codes.data = other.k.codes.clone()
        elif how == "scale":
            k.input_encode_scale.mul_(2)
        elif how == "encode":
            k.encode_scale.data.mul_(2)
        elif how == "to":
            k.double()
        else:
            k.activations = "bf16"

    for step in range(3):
        with mode():
            x = torch.randn(rows, K)
            got, want = [together.q(x)], [alone.q(x)]
        if step == 1:
            with torch.no_grad():
                change(together), change(alone)
        with mode():
            got += [together.k(x), together.v(x)]
            want += [alone.k(x), alone.v(x)]
        same(got, want, f"at step {step}")


def test_hooks_run_and_may_change_the_input() -> None:
    together, alone = tied()
    seen = []
    for model in (together, alone):
        model.k.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 2,))
        model.v.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(1, K)
    same(together(x), alone(x))
    assert len(seen) == 2


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_are_siblings_of_each_other_alone(how: str, operands: list[int]) -> None:
    together, _ = tied()
    x = torch.randn(1, K)
    together.q(x)  # a share is left behind
    if how == "deepcopy":
        made = copy.deepcopy(together)
    elif how == "pickle":
        made = pickle.loads(pickle.dumps(together))
    else:
        buffer = io.BytesIO()
        torch.save(together, buffer)
        made = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert made.q.siblings is made.k.siblings is not together.q.siblings
    for model in (made, together):
        want = [y.clone() for y in model(x)]
        operands.clear()
        same(model(x), want)
        assert operands == [3]
    # A layer copied by itself takes nothing along.
    assert len(pickle.dumps(together.q)) < 2 * together.q.codes.numel() + 8 * together.q.block_scale.numel() + 6000
    single = copy.deepcopy(together.q)
    assert_same_bits(single(x), together.q(x))


def test_layers_are_freed_at_once() -> None:
    """No cycle keeps a model's weights until the garbage collector comes."""
    together, _ = tied()
    for rows in (1, 100):
        with torch.no_grad():
            together(torch.randn(rows, K))
    gc.collect()
    gc.disable()
    try:
        gone = [weakref.ref(layer) for layer in together.layers()] + [weakref.ref(together.k.codes)]
        together.k = nn.Identity()
        together.q(torch.randn(1, K)), together.q(torch.randn(1, K))
        assert gone[1]() is None
        assert gone[3]() is None, "the weights of a layer that is gone"
        del together
        assert [one() for one in gone] == [None] * 4
    finally:
        gc.enable()


def test_gradients_are_refused_by_siblings_too() -> None:
    together, _ = tied()
    x = torch.randn(1, K)
    together.q(x)
    x.requires_grad_()
    assert_refused(lambda: together.k(x), "gradients")


def test_compiled_siblings_are_the_operator() -> None:
    together, alone = tied()
    torch._dynamo.reset()
    compiled = torch.compile(together, fullgraph=True, backend="eager")
    for rows in (1, 5):
        with torch.no_grad():
            x = torch.randn(rows, K)
            same(compiled(x), alone(x))


def test_big_inputs_without_versions_are_not_kept(operands: list[int]) -> None:
    together, alone = tied()
    with torch.inference_mode():
        x = torch.randn(COMPARED // (4 * K) + 1, K)
        same(together(x), alone(x))
        operands.clear()
        together(x)
        assert operands == [1, 1, 1]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_whole_models_are_tied(kind: str, tmp_path, operands: list[int]) -> None:
    model, ids = tiny_model(kind), torch.randint(3, 90, (1, 8))
    folder = tmp_path / "made"
    made = quarterturn.quantize(model, "nvfp4", transform="hadamard:16", calibration=ids, output=folder, progress=False)
    loaded = quarterturn.load(folder, device="cpu")
    names = set(loaded.state_dict())
    for tied_model in (made, loaded):
        layers = [m for m in tied_model.modules() if isinstance(m, FP4Linear)]
        attention = tied_model.model.layers[0].self_attn
        assert attention.q_proj.siblings is attention.v_proj.siblings is not None
        with torch.inference_mode():
            got = tied_model(ids).logits
            operands.clear()
            assert_same_bits(tied_model(ids).logits, got, "logits again")
            assert len(operands) < len(layers), "nothing was shared"
            for layer in layers:
                layer.siblings = None
            assert_same_bits(tied_model(ids).logits, got, "logits of layers alone")
    assert set(loaded.state_dict()) == names


def test_the_portable_backend_has_no_call_for_several() -> None:
    assert compose.together(any_torch, (Attention().q.current_plan(torch.float32).layer,)) is None  # type: ignore[union-attr, arg-type]
