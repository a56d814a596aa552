"""Siblings whose weights lie in one tensor: one product gives the results of all, whatever happens between them."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import fused_cases
from comparing import assert_same_bits
from fused_cases import BF16, SIZES, Attention, Gpu, K, every_kind, is_fused, layer_of, same, tied, x_of
from quarterturn import FP4Linear, hadamard, random_hadamard, sharing
from quarterturn.backends import gpu_device, gpu_product
from quarterturn.sharing import Place, tie

called, gpu = fused_cases.called, fused_cases.gpu


@every_kind
def test_one_product_gives_what_layers_alone_give(gpu: Gpu, options) -> None:
    together, alone = tied(**options)
    assert is_fused(together)
    with torch.no_grad():
        for shape in ((1,), (16,), (17,), (2, 3), (0,)):
            x = x_of(*shape)
            gpu.products.clear()
            got = together(x)
            made = list(gpu.products)
            same(got, alone(x), str(shape))
            assert len(made) == (2 if x.numel() else 0), made
            assert got[0].shape == (*shape, SIZES[0])


@every_kind
def test_products_that_fill_the_device_are_each_their_own(gpu: Gpu, options, monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone = tied(**options)
    assert is_fused(together)
    asked, quantized = [], options.get("activations") != "bf16"

    def fills(device: torch.device, m: int, n: int) -> bool:
        asked.append((m, n))
        return m >= 18

    monkeypatch.setattr(gpu_product, "fills", fills)
    with torch.no_grad():
        for shape, alone_too in (((17,), False), ((18,), True), ((2, 9), True), ((0,), False)):
            x = x_of(*shape)
            gpu.products.clear(), gpu.turned.clear()
            got = together(x)
            made, turned = list(gpu.products), list(gpu.turned)
            same(got, alone(x), str(shape))
            assert len(made) == (0 if not x.numel() else 4 if alone_too else 2), made
            assert [y.shape for y in got[:3]] == [(*shape, n) for n in SIZES]
            assert all(y.is_contiguous() for y in got[:3]) == (alone_too or not x.numel())
            assert turned == [x[..., 0].numel()] * (2 if quantized else 0)  # once for q, k and v, once for o
    assert {n for _, n in asked} == {min(SIZES)}


def test_how_many_rows_fill_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_device, "multiprocessors", lambda device: 132)
    device = torch.device("cuda", 0)
    assert [gpu_product.fills(device, m, 14336) for m in (16, 1024, 1206, 1207, 4096)] == [False] * 3 + [True] * 2
    assert not gpu_product.fills(device, 4096, 4096)  # 512 tiles, 3.9 for each
    assert not gpu_product.fills(torch.device("cpu"), 128, 4096)


def test_the_input_is_turned_once_before_and_after(gpu: Gpu) -> None:
    alone = Attention()
    together = copy.deepcopy(alone)
    tie(together, FP4Linear)
    with torch.no_grad():
        for _ in range(3):  # the first leaves a share of what is turned, which shows who takes it
            x = x_of(5)
            gpu.turned.clear()
            got = together(x)
            assert gpu.turned == [5, 5]
            same(got, alone(x))
    assert is_fused(together)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x[0, 5:6].fill_(9),
        lambda x: x.view(-1)[3:4].zero_(),
        lambda x: setattr(x, "data", x.data * 3),
        lambda x: x.set_(torch.ones_like(x)),
    ],
    ids=["mul", "one number", "through a view", "data", "set"],
)
def test_a_change_of_x_between_siblings(gpu: Gpu, change) -> None:
    together, alone = tied()
    with torch.no_grad():
        x = x_of(3)
        y = x.clone()
        same(together(x, lambda: change(x)), alone(y, lambda: change(y)))
        x = x_of(3)
        same(together(x), alone(x), "after that")


def test_another_stream_or_capture_takes_nothing(gpu: Gpu) -> None:
    """What one capture records is in its graph alone, though the tensor and the stream be the same."""
    for here, there in (((7, None), (8, None)), ((7, None), (7, 1)), ((7, 1), (7, 2)), ((7, 1), (7, None))):
        gpu.place = Place(7, None)
        together, alone = tied()
        x = x_of(4)
        with torch.no_grad():
            want = alone(x)
            gpu.products.clear()
            gpu.place = Place(*here)
            together.q(x)
            gpu.place = Place(*there)
            assert_same_bits(together.k(x).contiguous(), want[1])
            assert gpu.products == ["few", "few"], there
            assert_same_bits(together.v(x).contiguous(), want[2])


def test_nothing_is_put_together_while_a_graph_is_captured(gpu: Gpu) -> None:
    alone = Attention()
    together = copy.deepcopy(alone)
    tie(together, FP4Linear)
    x = x_of(4)
    gpu.place = Place(7, 3)
    with torch.no_grad():
        for _ in range(3):
            same(together(x), alone(x))
        assert not any(layer.part for layer in together.layers())
        gpu.place = Place(7, None)
        together(x_of(4)), together(x_of(4))
        assert is_fused(together)


def test_a_tensor_of_inference_mode_is_not_shared(gpu: Gpu) -> None:
    together, alone = tied()
    with torch.inference_mode():
        x = x_of(3)
        gpu.products.clear()
        same(together(x), alone(x))
        assert gpu.products[:4] == ["few"] * 4


def test_results_are_the_callers_own(gpu: Gpu) -> None:
    together, alone = tied()
    with torch.no_grad():
        x = x_of(3)
        want = alone(x)
        q, k = together.q(x), together.k(x)
        q.zero_(), k.fill_(7)
        assert_same_bits(together.k(x).contiguous(), want[1], "k again")
        assert_same_bits(together.v(x).contiguous(), want[2], "v")
        assert_same_bits(together.q(x).contiguous(), want[0], "q again")


@pytest.mark.parametrize(
    "how", ["load_state_dict", "copy_", "data", "scale", "encode", "bias", "to", "weights", "half"]
)
def test_a_sibling_that_changes(gpu: Gpu, how: str) -> None:
    together, alone = tied(bias=True)
    other = Attention(bias=True, input_transform=hadamard(16)).v
    other.codes.random_(0, 256)

    def change(model: Attention) -> None:
        v = model.v
        if how == "load_state_dict":
            v.load_state_dict(other.state_dict())
        elif how == "copy_":
            v.codes.copy_(other.codes)
        elif how == "data":
            v.codes.data = other.codes.clone()
        elif how == "scale":
            v.input_encode_scale.mul_(2)
        elif how == "encode":
            v.encode_scale.mul_(2)
        elif how == "bias":
            v.bias.mul_(-3)
        elif how == "to":
            v.to("cpu")
        elif how == "weights":
            v.weights = "decoded"
        else:
            v.half()

    with torch.no_grad():
        for step in range(4):
            x = x_of(3)
            got, want = [together.q(x)], [alone.q(x)]
            if step == 1:
                change(together), change(alone)
            got += [together.k(x), together.v(x)]
            want += [alone.k(x), alone.v(x)]
            for name, a, b in zip("qkv", got, want, strict=True):
                assert_same_bits(a.contiguous(), b, f"{name} at step {step}")
    fits = how in ("load_state_dict", "copy_", "data", "encode", "bias", "to", "scale")
    assert (together.v.part is not None) == fits
    if fits:
        assert together.v.part.whole is together.q.part.whole


def test_all_siblings_loaded_again_stay_together_and_where_they_were(gpu: Gpu) -> None:
    """A graph that was captured reads there; scales change one after the other, so that they differ meanwhile."""
    together, _ = tied(bias=True)
    whole, other = together.q.part.whole, Attention(bias=True)
    for layer in (*other.layers(), other.o):
        layer.codes.random_(0, 256)
        layer.input_encode_scale.mul_(1.5)
    places = [t.data_ptr() for t in whole.buffers()]
    together.load_state_dict(other.state_dict())
    assert together.v.part.whole is whole
    assert whole.agree
    assert [t.data_ptr() for t in whole.buffers()] == places
    assert whole.encode_scale.item() == 150.0
    with torch.no_grad():
        x = x_of(3)
        gpu.products.clear()
        got = together(x)
        assert gpu.products == ["few", "few"]
        same(got, other(x))


def test_one_that_left_comes_back(gpu: Gpu) -> None:
    together, alone = tied()
    whole = weakref.ref(together.q.part.whole)
    together.k.weights = "decoded"
    with torch.no_grad():
        for _ in range(3):
            x = x_of(3)
            want = alone(x)
            assert_same_bits(together(x)[0].contiguous(), want[0])
        assert together.k.part is None
        together.k.weights = "packed"
        for _ in range(4):
            x = x_of(3)
            same(together(x), alone(x))
    assert is_fused(together)
    assert whole() is None


def test_siblings_that_read_something_else_are_multiplied_by_themselves(gpu: Gpu) -> None:
    together, alone = tied()
    with torch.no_grad():
        for _ in range(sharing.PATIENCE + 2):
            a, b = x_of(3), x_of(3)
            got = [together.q(a), together.k(b), together.v(a)]
            for layer, x, y in zip(alone.layers(), (a, b, a), got, strict=True):
                assert_same_bits(y.contiguous(), layer(x))
        assert is_fused(together)
    team = together.q.siblings._teams[together.q.current_plan(BF16)]
    assert not team.others, "after some patience nothing is made for those that do not take it"


def test_one_odd_call_does_not_part_them(gpu: Gpu) -> None:
    together, alone = tied()
    with torch.no_grad():
        for _ in range(2 * sharing.PATIENCE):
            odd = x_of(3)
            assert_same_bits(together.q(odd).contiguous(), alone.q(odd))
            x = x_of(3)
            gpu.products.clear()
            got = together(x)
            assert gpu.products == ["few", "few"]
            same(got, alone(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_are_put_together_anew(gpu: Gpu, how: str) -> None:
    together, alone = tied(bias=True)
    if how == "deepcopy":
        made = copy.deepcopy(together)
    elif how == "pickle":
        made = pickle.loads(pickle.dumps(together))
    else:
        buffer = io.BytesIO()
        torch.save(together, buffer)
        made = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert not any(layer.part for layer in made.layers())
    assert is_fused(together)
    with torch.no_grad():
        for _ in range(3):
            x = x_of(3)
            want = alone(x)
            same(made(x), want)
            same(together(x), want)
    assert is_fused(made)
    assert made.q.part.whole is not together.q.part.whole
    alone_bytes = len(pickle.dumps(alone.q))
    assert len(pickle.dumps(together.q)) <= alone_bytes + 100, "a layer copied by itself takes nothing along"


def test_what_is_held_together_is_in_no_state_dict_and_no_list_of_modules(gpu: Gpu) -> None:
    together, alone = tied(bias=True)
    assert set(together.state_dict()) == set(alone.state_dict())
    assert [name for name, _ in together.named_modules()] == [name for name, _ in alone.named_modules()]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"input_transform": random_hadamard(16, seed=2)}),
        ({}, {"input_transform": None}),
        ({}, {"recipe": "token"}),
        ({}, {"activations": "bf16"}),
        ({}, {"bias": True}),
        ({"fmt": "mxfp4"}, {"fmt": "nvfp4"}),
        ({}, {"output_transform": hadamard(32)}),
    ],
    ids=["matrix", "transform", "recipe", "activations", "bias", "format", "output"],
)
def test_what_is_not_equal_is_not_put_together(gpu: Gpu, first, second) -> None:
    pair = nn.Sequential(layer_of(64, 1, **first), layer_of(64, 2, **second))
    want = copy.deepcopy(pair)
    tie(pair, FP4Linear)
    with torch.no_grad():
        for _ in range(3):
            x = x_of(3)
            for layer, alone in zip(pair, want, strict=True):
                assert_same_bits(layer(x), alone(x))
    assert not any(layer.part for layer in pair)


def test_sizes_that_lie_badly_go_last_or_stay_apart(gpu: Gpu) -> None:
    odd = nn.Sequential(layer_of(100, 1), layer_of(64, 2), layer_of(128, 3, ranges=(70, 58)))
    worse = nn.Sequential(layer_of(100, 1), layer_of(40, 2))
    for model, fused in ((odd, True), (worse, False)):
        want = copy.deepcopy(model)
        tie(model, FP4Linear)
        with torch.no_grad():
            for _ in range(3):
                for dtype in (BF16, torch.float32):
                    x = x_of(3).to(dtype)
                    for layer, alone in zip(model, want, strict=True):
                        assert_same_bits(layer(x).contiguous(), alone(x))
        assert all((layer.part is not None) == fused for layer in model)
    assert odd[0].part.first == 192


def test_fp32_goes_by_codes_made_again(gpu: Gpu) -> None:
    together, alone = tied(ranges=(), bias=True)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, K)
            same(together(x), alone(x))
