"""The ways to run, in the order automatic choice tries them, and the one function that chooses.

A backend is a module with five parts: a docstring table (needs, provides, does not), `missing(device, capability)` for
the machine, `refuses(problem)` for the layer, `prepare(weight, ...)`, and the ops. One with a way of its own through a
whole layer is a FusedBackend besides; this and what else some of them answer, and the forms that weights and operands
have, is in protocol.py. A layer that is to be batch-invariant is run by those alone that answer a third question,
`varies(problem)`. The questions are answered with a list of reasons; no reasons mean yes. Automatic choice takes the
first backend with no reason against it. An explicit choice is run or refused, never replaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

import torch

from ..errors import BackendRefusal, refusal
from . import (
    any_torch,
    blackwell_cublas,
    blackwell_flashinfer,
    blackwell_qutlass,
    blackwell_triton,
    cpu_native,
    gpu_fp8,
    gpu_triton,
)
from .gpu_device import capability as capability_of
from .protocol import Backend, Blocks, Layer, Operand, Problem, Quantizer, Together, Weight

__all__ = [
    "BACKENDS",
    "Backend",
    "Blocks",
    "Layer",
    "Operand",
    "Problem",
    "Quantizer",
    "Selection",
    "Together",
    "Weight",
    "get_backend",
    "op_backend",
    "reasons_against",
    "run_on",
    "select",
]


@dataclass(frozen=True)
class Selection:
    """Who runs a layer, why, and every reason against those that were asked before."""

    backend: Backend
    reason: str
    rejected: dict[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.backend.NAME


BACKENDS: tuple[Backend, ...] = (
    cast(Backend, cpu_native),
    cast(Backend, blackwell_cublas),
    cast(Backend, blackwell_flashinfer),
    cast(Backend, blackwell_triton),
    cast(Backend, gpu_triton),
    cast(Backend, any_torch),
    cast(Backend, blackwell_qutlass),
    cast(Backend, gpu_fp8),
)
"""In the order of automatic choice. any_torch runs everything, so what is behind it runs only where it is named:
QuTLASS, whose codes may differ from the definition's next to a tie, and FP8, whose sums have fewer bits."""


def get_backend(name: str, layer: str | None = None) -> Backend:
    """The backend of that name. Raises BackendRefusal for any other name.

    'blackwell_flashinfer:<kernel>' is that backend with one kernel of FlashInfer, see there.
    """
    for backend in BACKENDS:
        if name == backend.NAME:
            return backend
    owner, _, kernel = name.partition(":")
    if kernel and owner == blackwell_flashinfer.NAME:
        return blackwell_flashinfer.named(kernel)
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
    operation: str = "fp4_linear",
    layer: str | None = None,
    capability: tuple[int, int] | None = None,
) -> Selection:
    """Choose the backend for a layer on a device.

    requested: 'auto' takes the first backend of BACKENDS with no reason against it; a name is obeyed or refused.
    problem: None asks about the machine alone. capability: of a GPU to ask about, instead of the one at hand.
    Raises BackendRefusal with every reason when the requested one cannot run.
    """
    rejected: dict[str, list[str]] = {}
    if problem is not None:
        problem = replace(problem, capability=_capability(device, capability))
    candidates: Sequence[Backend] = BACKENDS if requested == "auto" else (get_backend(requested, layer),)
    for backend in candidates:
        reasons = _reasons(backend, problem, device, capability)
        if not reasons:
            why = "asked for" if requested != "auto" else _why(backend.NAME, rejected)
            return Selection(backend, why, rejected)
        rejected[backend.NAME] = reasons
    raise refusal(
        operation,
        f"backend '{requested}' cannot run this{' layer' if problem is not None else ''} here.",
        layer=layer,
        needs=[(f"'{name}' to run here", f"that it {'; '.join(reasons)}") for name, reasons in rejected.items()],
        do="choose backend 'auto', or cure the reason",
        kind=BackendRefusal,
    )


def reasons_against(
    problem: Problem | None, device: torch.device, capability: tuple[int, int] | None = None
) -> dict[str, list[str]]:
    """Every reason against each backend of BACKENDS, those behind the one that `select` would choose too; none: []."""
    if problem is not None:
        problem = replace(problem, capability=_capability(device, capability))
    return {backend.NAME: _reasons(backend, problem, device, capability) for backend in BACKENDS}


def run_on(backend: Backend) -> str:
    """The machines where a backend's tests were run, as its docstring says; 'not run' where there is none."""
    found = re.search(r"^\| run on +\| (.*?) +\|$", backend.__doc__ or "", flags=re.M)
    return found[1] if found else "not told"


def _reasons(
    backend: Backend, problem: Problem | None, device: torch.device, capability: tuple[int, int] | None
) -> list[str]:
    """Reasons against the machine and against the layer: all, so that nobody cures one to meet the next."""
    reasons = backend.missing(device, capability)
    if problem is None:
        return reasons
    reasons = [*reasons, *backend.refuses(problem)]
    if problem.batch_invariant:
        varies = getattr(backend, "varies", None)
        reasons += [_VARIES] if varies is None else varies(problem)
    return reasons


_VARIES = "adds in an order that may depend on the number of rows, where batch_invariant needs one order"


@lru_cache(maxsize=128)
def op_backend(operation: str, device: torch.device, requested: str, problem: Problem | None = None) -> Backend:
    """The backend of an op called by itself, by the machine, and by the layer where one is asked about; that answer
    does not change in a process's life."""
    return select(problem, device, requested, operation=operation).backend


def _capability(device: torch.device, given: tuple[int, int] | None) -> tuple[int, int] | None:
    """The capability that a layer would run on: the one asked about, or that of the GPU at hand."""
    if given is not None or device.type != "cuda" or not torch.cuda.is_available():
        return given
    return capability_of(device)


def _why(name: str, rejected: dict[str, list[str]]) -> str:
    if not rejected:
        return f"'{name}' is the first in the order and nothing speaks against it"
    return f"'{name}' is the first in the order that nothing speaks against; passed over: {', '.join(rejected)}"
