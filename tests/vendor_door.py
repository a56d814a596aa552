"""The only way past a vendor adapter's `missing` without a Blackwell: stand-ins put in by monkeypatch, for CPU tensors.

The library has no switch for it: what is replaced here are the look-up of a package (vendor_ops), the rotate + quantize
of Triton by that of any_torch (the same bits, tested elsewhere), and the answer about the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn import functional

import by_hand
import vendor_stand_ins
from comparing import FP32_UNIT, TINY, UNIT, rotation_bound
from quarterturn import FP4Linear, Transform, backends, reference
from quarterturn.backends import (
    any_torch,
    blackwell_cublas,
    blackwell_flashinfer,
    blackwell_qutlass,
    vendor,
    vendor_ops,
)
from test_linear import parts, quantized


@dataclass(frozen=True)
class Adapter:
    """A vendor backend with its stand-in. roundings: of a result to 16 bits where a bias follows the product."""

    name: str
    stand_in: Callable[[], object] | None
    formats: tuple[str, ...] = ("nvfp4", "mxfp4")
    fp16: bool = False
    roundings: int = 2


def flashinfer(kernel: str, number: int = 100, **options) -> Adapter:
    name = blackwell_flashinfer.NAME + ("" if kernel == "auto" else f":{kernel}")
    return Adapter(name, lambda: vendor_stand_ins.FlashinferStandIn(number), **options)


NVFP4_ONLY = ("nvfp4",)
ADAPTERS = {
    "cublas": Adapter(blackwell_cublas.NAME, None, roundings=1),
    "qutlass dense": Adapter(blackwell_qutlass.NAME, lambda: vendor_stand_ins.QutlassStandIn(blocked=False)),
    "qutlass 128x4": Adapter(blackwell_qutlass.NAME, lambda: vendor_stand_ins.QutlassStandIn(blocked=True)),
    "flashinfer": flashinfer("auto", fp16=True),
    "flashinfer cutlass": flashinfer("cutlass", formats=NVFP4_ONLY, fp16=True),
    "flashinfer cudnn": flashinfer("cudnn", fp16=True),
    "flashinfer cute-dsl": flashinfer("cute-dsl", formats=NVFP4_ONLY),
    "flashinfer b12x": flashinfer("b12x", 120, fp16=True),
    "flashinfer trtllm": flashinfer("trtllm", formats=NVFP4_ONLY),
}
CASES = [(name, fmt) for name, adapter in ADAPTERS.items() for fmt in adapter.formats]
every_case = pytest.mark.parametrize(("name", "fmt"), CASES, ids=[f"{name}-{fmt}" for name, fmt in CASES])


@contextmanager
def opened(name: str) -> Iterator[object]:
    """An adapter that runs on CPU tensors, by its stand-in, which is given."""
    adapter = ADAPTERS[name]
    stand_in = adapter.stand_in() if adapter.stand_in else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vendor, "own", any_torch)
        patch.setattr(backends.get_backend(adapter.name), "missing", lambda device, capability=None: [])
        patch.setattr(vendor_ops, "flashinfer", lambda: stand_in)
        patch.setattr(vendor_ops, "qutlass", lambda: stand_in)
        patch.setattr(functional, "scaled_mm", vendor_stand_ins.scaled_mm)
        backends.op_backend.cache_clear()
        yield stand_in
    backends.op_backend.cache_clear()


def layer_of(name: str, fmt: str, n: int, k: int, *, bias: bool = False, sizes=(), **options) -> FP4Linear:
    """A layer with random weights that an adapter is to run."""
    torch.manual_seed(7)
    weight = quantized(
        fmt, torch.cat([torch.randn(size, k) * 0.05 * (i + 1) for i, size in enumerate(sizes or (n,))]), sizes
    )
    checkpoint = fmt == "nvfp4" and options.get("recipe", "checkpoint") == "checkpoint"
    return FP4Linear.from_tensor(
        weight,
        bias=torch.randn(n).bfloat16() if bias else None,
        input_encode_scale=torch.tensor([150.0]) if checkpoint else None,
        backend=ADAPTERS[name].name,
        **options,
    )


def wanted(
    layer: FP4Linear, x: torch.Tensor, roundings: int, in_parts: tuple | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """y by the reference in float64, and how far fp32 sums and roundings to x.dtype may be from it.

    in_parts: the input transform as the kernel holds it, where that is not the layer's own.
    """
    w, first, last = layer.weight_tensor(), layer.input_transform, layer.output_transform
    turn = in_parts or (None if first is None else parts(first))
    encode = getattr(layer, "input_encode_scale", None)
    options = {"format": w.format, "encode_scale": encode, "recipe": layer.recipe, "rule": layer.rule}
    weight = (w.codes, w.block_scale.view(torch.uint8), w.tensor_scale, w.output_sizes)

    def run(bias: torch.Tensor | None, out: Transform | None) -> np.ndarray:
        turned = None if out is None else parts(out)
        return reference.linear(
            x, *weight, bias=bias, input_transform=turn, output_transform=turned, **options
        ).numpy()  # fmt: skip

    operand = reference.dequantize(*reference.rotate_quantize(x, *(turn or ()), **options), w.format)
    bias = None if layer.bias is None else layer.bias.detach()
    bound = (x.shape[1] + 4) * FP32_UNIT * (operand.abs().numpy() @ w.dequantize().double().abs().numpy().T)
    want = run(bias, None)
    if roundings == 2:
        bound += UNIT[x.dtype] * (np.abs(run(None, None)) + bound) + TINY[x.dtype]
    bound += 2 * FP32_UNIT * np.abs(want)
    if last is not None:
        side = last.activation_matrix().numpy()
        bound = by_hand.rotate(bound, np.abs(side)) + rotation_bound(want, side)
        want = run(bias, last)
    return want, bound + UNIT[x.dtype] * (np.abs(want) + bound) + TINY[x.dtype]
