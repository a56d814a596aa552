"""Codes and block scales of a layer that holds its weight in fragments: let go, given back, and never old."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor

import fused_cases
from comparing import assert_same_bits
from fused_cases import BF16, Gpu, K, layer_of, same, tied, x_of
from quarterturn import FP4Linear
from quarterturn.backends import gpu_triton
from quarterturn.formats import FORMATS
from quarterturn.stored_weight import STORED
from test_gpu_product import weight_of

called, gpu = fused_cases.called, fused_cases.gpu
N = 100


def is_let_go(layer: FP4Linear) -> bool:
    return all(layer._buffers[name] is None for name in STORED)


def same_weight(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert_same_bits(got[name], tensor, name)


def kept_of(name: str, **how) -> FP4Linear:
    """The same layer, which keeps its codes."""
    layer = layer_of(N, fmt=name, keep_codes=True, **how)
    assert not is_let_go(layer)
    return layer


@pytest.mark.parametrize("name", FORMATS)
def test_fragments_are_all_that_is_held(gpu: Gpu, name: str) -> None:
    weight = weight_of(FORMATS[name], N, K)
    codes = weakref.ref(weight.codes)
    how = {"input_encode_scale": 100.0} if name == "nvfp4" else {}
    layer = FP4Linear.from_tensor(weight, backend="gpu_triton", weights="packed", **how)
    assert is_let_go(layer)
    assert layer.values is not None
    del weight
    gc.collect()
    assert codes() is None
    held = [t for t in layer.buffers() if t.dtype in (torch.uint8, torch.float8_e4m3fn)]
    assert held == []


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_checkpoint_holds_is_given_back(gpu: Gpu, name: str) -> None:
    layer, kept = layer_of(N, fmt=name), kept_of(name)
    same_weight(layer.state_dict(prefix="a."), kept.state_dict(prefix="a."))
    weight, want = layer.weight_tensor(), kept.weight_tensor()
    assert_same_bits(weight.codes, want.codes)
    assert_same_bits(weight.linear_block_scale(), want.linear_block_scale())
    assert_same_bits(weight.dequantize(), want.dequantize())
    assert is_let_go(layer), "asking for them all holds none of them"
    assert_same_bits(layer.codes, kept.codes)
    assert not is_let_go(layer)
    assert layer.codes is layer.codes
    x = x_of(3)
    assert_same_bits(layer(x), kept(x))
    assert is_let_go(layer)


def test_codes_under_a_zero_scale_come_back_as_zero(gpu: Gpu) -> None:
    layer = layer_of(N)
    with torch.no_grad():
        layer.codes[3, :8] = 0x5A
        layer.block_scale[3, 0] = 0
    layer(x_of(2))
    assert is_let_go(layer)
    codes = layer.weight_tensor().codes
    assert not codes[3, :8].any()
    assert codes[3, 8:].any()


@pytest.mark.parametrize("how", ["in place", "data", "assigned", "scale", "encode scale"])
def test_what_is_written_is_seen(gpu: Gpu, how: str) -> None:
    layer, kept, other = layer_of(N), kept_of("nvfp4"), layer_of(N, 5)
    x = x_of(3)
    before = layer(x)
    with torch.no_grad():
        for one in (layer, kept):
            if how == "in place":
                one.codes.copy_(other.codes)
            elif how == "data":
                one.codes.data = other.codes.clone()
            elif how == "assigned":
                one.codes = other.codes.clone()
            elif how == "scale":
                one.block_scale.view(torch.uint8)[5] += 1
            else:
                one.encode_scale.mul_(2)
        assert_same_bits(layer(x), kept(x))
    assert not torch.equal(layer(x), before)
    assert is_let_go(layer)
    same_weight(layer.state_dict(), kept.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_loaded(gpu: Gpu, assign: bool) -> None:
    layer, other = layer_of(N), layer_of(N, 7)
    memory, x = layer.values.data_ptr(), x_of(3)
    layer.load_state_dict({name: t.clone() for name, t in other.state_dict().items()}, assign=assign)
    assert is_let_go(layer)
    assert layer.values.data_ptr() == memory, "a captured graph reads there"
    assert_same_bits(layer(x), other(x))
    some = {"block_scale": layer_of(N).state_dict()["block_scale"]}
    with pytest.raises(RuntimeError, match=r"Missing key.*codes"):
        layer.load_state_dict(some)
    layer.load_state_dict(some, strict=False)
    same_weight(layer.state_dict(), other.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies(gpu: Gpu, how: str) -> None:
    layer, x = layer_of(N, bias=True), x_of(3)
    if how == "deepcopy":
        made = copy.deepcopy(layer)
    elif how == "pickle":
        made = pickle.loads(pickle.dumps(layer))
    else:
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        made = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert is_let_go(layer)
    assert is_let_go(made)
    assert made.values.data_ptr() != layer.values.data_ptr()
    assert_same_bits(made(x), layer(x))
    weight = layer.weight_tensor()
    assert len(pickle.dumps(layer)) < weight.codes.numel() + weight.block_scale.numel() + 8000, "one form alone"


def test_a_layer_that_moves_takes_them_along(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """To where there are no fragments, and back."""
    layer, kept = layer_of(N), kept_of("nvfp4")
    x, prepare = x_of(3), gpu_triton.prepare
    layer.to(torch.float16)
    assert is_let_go(layer)
    assert_same_bits(layer(x), kept(x))
    monkeypatch.setattr(gpu_triton, "prepare", lambda weight, mode: None)
    layer.requested_backend = "any_torch"
    layer.to("cpu")
    assert layer.values is None or layer.values.dtype == BF16
    assert not is_let_go(layer)
    same_weight(layer.state_dict(), kept.state_dict())
    monkeypatch.setattr(gpu_triton, "prepare", prepare)
    layer.requested_backend = "gpu_triton"
    assert_same_bits(layer(x), kept(x))
    assert is_let_go(layer)


def test_another_way_to_keep_weights_is_made_of_them(gpu: Gpu) -> None:
    layer, kept = layer_of(N), kept_of("nvfp4")
    layer.weights = "decoded"
    layer.refresh()
    assert layer.values.dtype == BF16
    assert not is_let_go(layer)
    same_weight(layer.state_dict(), kept.state_dict())


def test_what_is_written_while_fragments_are_made_is_not_let_go(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, other, prepare = layer_of(N), layer_of(N, 5), gpu_triton.prepare

    def late(weight, mode):
        made = prepare(weight, mode)
        with torch.no_grad():
            weight.codes.copy_(other.weight_tensor().codes)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(gpu_triton, "prepare", late)
        layer.take_back()
        layer.refresh()
    assert not is_let_go(layer)
    x = x_of(3)
    want = layer_of(N, 5)
    want.block_scale, want.encode_scale = layer.block_scale.clone(), layer.encode_scale.clone()
    assert_same_bits(layer(x), want(x))
    assert is_let_go(layer)


def test_siblings_let_go(gpu: Gpu) -> None:
    together, alone = tied(bias=True)
    assert all(is_let_go(layer) for layer in together.layers())
    same_weight(together.state_dict(), alone.state_dict())
    memory, other = together.q.part.whole.data, layer_of(64, 8, bias=True).state_dict()
    with torch.no_grad():
        for model in (together, alone):
            model.k.load_state_dict(other)
        assert together.k.part is not None
        assert together.k.part.whole.data is memory
        x = x_of(3)
        same(together(x), alone(x))
    same_weight(together.state_dict(), alone.state_dict())
    assert all(is_let_go(layer) for layer in together.layers())


def test_where_inference_mode_was_on(gpu: Gpu) -> None:
    layer, kept = layer_of(N), kept_of("nvfp4")
    with torch.inference_mode():
        assert_same_bits(layer.codes, kept.codes)
        assert not layer.codes.is_inference()
        x = x_of(3)
        assert_same_bits(layer(x), kept(x))
    assert is_let_go(layer)


def test_what_is_not_there_has_no_device_and_no_name() -> None:
    layer = FP4Linear(64, 32, format="nvfp4", device="meta")
    assert layer.device.type == "meta"
    assert not is_let_go(layer)
    assert not hasattr(FP4Linear.__new__(FP4Linear), "codes")
