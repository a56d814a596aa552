"""The ways to run, in the order automatic choice tries them, and the one function that chooses.

A backend is a module with five parts: a docstring table (needs, provides, does not), `missing(device, capability)` for
the machine, `refuses(problem)` for the layer, `prepare(weight, ...)`, and the ops (one that fuses a whole layer also
has `linear`, see compose.py). Both questions are answered with a list of reasons; an empty list means yes. Automatic
choice takes the first backend with no reason against it. An explicit choice is run or refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, cast

import torch
from torch import Tensor

from ..errors import BackendRefusal, refusal
from ..formats import FP4Format
from ..tensor import FP4Tensor
from . import any_torch


@dataclass(frozen=True)
class Problem:
    """What a layer asks for, as far as it can decide who runs it. Sizes None mean: no transform on that side."""

    format: FP4Format
    activations: str
    dtype: torch.dtype
    n: int
    k: int
    input_size: int | None = None
    output_size: int | None = None
    bias: bool = False
    rule: str = "even"
    recipe: str = "checkpoint"


@dataclass(frozen=True)
class Blocks:
    """A block-diagonal matrix as the ops take it: fp32 (R, R), an fp32 factor, and its direction."""

    matrix: Tensor
    factor: float
    transpose: bool


@dataclass(frozen=True)
class Quantizer:
    """How activations are quantized: the format, the stored encode scale (fp32, one element) and the rules."""

    format: FP4Format
    encode_scale: Tensor | None
    recipe: str = "checkpoint"
    rule: str = "even"


@dataclass(frozen=True)
class Weight:
    """The weight operand of a product: packed codes with block scale bytes, or values (N, K) that hold the scales."""

    data: Tensor
    block_scale: Tensor | None
    tensor_scale: Tensor
    output_sizes: tuple[int, ...]
    format: FP4Format


class Backend(Protocol):
    """One way to run the ops; every method takes 2-D contiguous-in-K tensors that `ops` has checked."""

    NAME: str

    def missing(self, device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
        """Reasons why this machine cannot run it; a GPU's capability may be given to ask about another machine."""

    def refuses(self, problem: Problem) -> list[str]:
        """Reasons why it cannot run this layer."""

    def prepare(self, weight: FP4Tensor, mode: str) -> Tensor | None:
        """Values (N, K) decoded once for `mode` 'decoded', None where the packed codes are what it runs on."""

    def rotate(self, x: Tensor, blocks: Blocks, out_dtype: torch.dtype) -> Tensor:
        """x (M, K) -> x @ V per block, (M, K) of out_dtype, to fp32 accuracy."""

    def rotate_quantize(
        self, x: Tensor, blocks: Blocks | None, quantizer: Quantizer, scale_layout: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (M, K) -> packed codes, block scale bytes (uint8) in the layout, tensor scale (1,) or (M,)."""

    def rotate_quantize_dequantize(
        self, x: Tensor, blocks: Blocks | None, quantizer: Quantizer, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """x (M, K) -> e2m1 * block_scale of out_dtype (M, K), and the tensor scale beside it."""

    def matmul(
        self,
        x: Tensor,
        x_block_scale: Tensor | None,
        x_tensor_scale: Tensor | None,
        weight: Weight,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """(M, K) x (N, K)^T -> (M, N): fp32 accumulation, alpha and bias in fp32, one rounding."""


@dataclass(frozen=True)
class Selection:
    """Who runs a layer, why, and every reason against those that were asked before."""

    backend: Backend
    reason: str
    rejected: dict[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.backend.NAME


BACKENDS: tuple[Backend, ...] = (cast(Backend, any_torch),)
"""In the order of automatic choice."""


def get_backend(name: str, layer: str | None = None) -> Backend:
    """The backend of that name. Raises BackendRefusal for any other name."""
    for backend in BACKENDS:
        if name == backend.NAME:
            return backend
    raise refusal(
        "backend",
        f"there is no backend '{name}'.",
        layer=layer,
        needs=[(f"auto or one of {', '.join(b.NAME for b in BACKENDS)}", repr(name))],
        do="name one of them",
        kind=BackendRefusal,
    )


def select(
    problem: Problem | None,
    device: torch.device,
    requested: str = "auto",
    *,
    layer: str | None = None,
    capability: tuple[int, int] | None = None,
) -> Selection:
    """Choose the backend for a layer on a device.

    requested: 'auto' takes the first backend of BACKENDS with no reason against it; a name is obeyed or refused.
    problem: None asks about the machine alone. capability: of a GPU to ask about, instead of the one at hand.
    Raises BackendRefusal with every reason when the requested one cannot run.
    """
    rejected: dict[str, list[str]] = {}
    candidates: Sequence[Backend] = BACKENDS if requested == "auto" else (get_backend(requested, layer),)
    for backend in candidates:
        reasons = backend.missing(device, capability)
        if problem is not None and not reasons:
            reasons = backend.refuses(problem)
        if not reasons:
            why = "asked for" if requested != "auto" else _why(backend.NAME, rejected)
            return Selection(backend, why, rejected)
        rejected[backend.NAME] = reasons
    raise refusal(
        "fp4_linear",
        f"backend '{requested}' cannot run this layer.",
        layer=layer,
        needs=[(f"'{name}' to have no reason against it", "; ".join(reasons)) for name, reasons in rejected.items()],
        do="choose backend='auto', or cure the reason",
        kind=BackendRefusal,
    )


@lru_cache(maxsize=128)
def default_backend(device: torch.device, requested: str) -> Backend:
    """The backend for an op called by itself; the answer for a machine does not change while a process runs."""
    return select(None, device, requested).backend


def _why(name: str, rejected: dict[str, list[str]]) -> str:
    if not rejected:
        return f"'{name}' is the first in the order and nothing speaks against it"
    return f"'{name}' is the first in the order that nothing speaks against; passed over: {', '.join(rejected)}"
