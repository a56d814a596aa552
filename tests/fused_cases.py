"""Siblings with weights in fragments on a GPU that there only seems to be: for test_fused*.py.

The places of its kernels are taken by stand-ins that multiply in float64, where results of one product and of several
are equal bit for bit, and CPU tensors are taken for ones on a stream of a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from comparing import assert_same_bits
from quarterturn import FP4Linear, backends, hadamard, random_hadamard, sharing
from quarterturn.backends import any_torch, gpu_product, gpu_triton
from quarterturn.formats import FORMATS
from quarterturn.sharing import Place, tie
from test_gpu_product import called as called
from test_gpu_product import weight_of

BF16 = torch.bfloat16
K = 192
SIZES = (128, 64, 100)

AT_ONCE = Place(7, None)


@dataclass
class Gpu:
    """The GPU that there seems to be: what its kernels were asked for, and where calls are made."""

    products: list[str]
    turned: list[int] = field(default_factory=list)
    place: Place = AT_ONCE


@pytest.fixture
def gpu(called: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu(called)

    def turn(*arguments, **options):
        assert not options
        found.turned.append(arguments[0].shape[0])
        return any_torch.rotate_quantize_dequantize(*arguments)

    monkeypatch.setattr(gpu_triton, "missing", lambda *_: [])
    monkeypatch.setattr(gpu_triton, "rotate", any_torch.rotate)
    monkeypatch.setattr(gpu_triton, "rotate_quantize_dequantize", turn)
    monkeypatch.setattr(gpu_product, "runs_on", lambda device: True)
    monkeypatch.setattr(sharing, "place_of", lambda x: found.place)
    backends.op_backend.cache_clear()
    yield found
    backends.op_backend.cache_clear()


def layer_of(n: int, seed: int = 0, **options) -> FP4Linear:
    fmt, bias = FORMATS[options.pop("fmt", "nvfp4")], options.pop("bias", False)
    ranges = options.pop("ranges", ())
    weight = weight_of(fmt, n, K, ranges)
    weight.codes.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    given = {"input_transform": hadamard(16), "activations": "fp4", "weights": "packed", **options}
    if fmt.has_tensor_scale and given["activations"] == "fp4" and "recipe" not in given:
        given["input_encode_scale"] = 100.0
    layer = FP4Linear.from_tensor(weight, bias=torch.randn(n).to(BF16) if bias else None, backend="gpu_triton", **given)
    assert layer.explain().weights == "packed, in fragments"
    return layer


class Attention(nn.Module):
    """Three layers of one input, and one of the same width that reads something else."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.q, self.k, self.v = (layer_of(n, seed, **options) for seed, n in enumerate(SIZES))
        self.o = layer_of(K, 9, **options)

    def layers(self) -> list[FP4Linear]:
        return [self.q, self.k, self.v]

    def forward(self, x: Tensor, between: Callable[[], object] = lambda: None) -> list[Tensor]:
        found = [self.q(x)]
        for layer in (self.k, self.v):
            between()
            found.append(layer(x))
        return [*found, self.o(torch.cat((found[0], found[0]), -1)[..., :K].contiguous())]


def tied(**options) -> tuple[Attention, Attention]:
    """The same layers, put together by a call, and each alone."""
    alone = Attention(**options)
    together = copy.deepcopy(alone)
    tie(together, FP4Linear)
    with torch.no_grad():
        together(torch.randn(2, K).to(BF16))
        together(torch.randn(2, K).to(BF16))
    return together, alone


def is_fused(model: Attention) -> bool:
    wholes = {id(layer.part.whole) for layer in model.layers() if layer.part is not None}
    return len(wholes) == 1 and all(layer.part for layer in model.layers()) and model.o.part is None


def same(got: list[Tensor], want: list[Tensor], what: str = "") -> None:
    for name, a, b in zip("qkvo", got, want, strict=True):
        assert_same_bits(a.contiguous(), b, f"{name} {what}")


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, K).to(BF16)


OPTIONS = {
    "nvfp4": {},
    "bias": {"bias": True},
    "mxfp4": {"fmt": "mxfp4"},
    "W4A16": {"activations": "bf16", "input_transform": random_hadamard(32)},
    "token": {"recipe": "token"},
    "no transform": {"input_transform": None, "activations": "bf16"},
}
every_kind = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
