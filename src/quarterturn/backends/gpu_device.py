"""What launches on a GPU have in common: the device at hand, constants on it, and what Triton's launcher is given."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BackendRefusal, refusal
from ..settings import triton_interprets
from .capturing import lasting


@cache
def triton_version() -> tuple[int, int] | None:
    """Major and minor, None where there is no Triton."""
    try:
        import triton
    except ImportError:
        return None
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


HOPPER_TRITON = ((3, 6),)
"""The versions that kernels in Gluon were run with: it and the way to launch it may change with any other, where
portable kernels are taken."""


def runs_gluon(device: torch.device) -> bool:
    """Whether kernels written for Hopper run there."""
    return (
        device.type == "cuda"
        and capability(device)[0] == 9
        and triton_version() in HOPPER_TRITON
        and not triton_interprets()
    )


@lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)


def constant(value: float, device: torch.device) -> Tensor:
    """One number, kept; one that a graph under capture is the first to need is the graph's, and filled when it runs."""
    kept = _CONSTANTS.get((value, device))
    if kept is None:
        make = partial(torch.full, (1,), value, dtype=torch.float32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return make()
        kept = _CONSTANTS[value, device] = lasting(device, make)
    return kept


_CONSTANTS: dict[tuple[float, torch.device], Tensor] = {}


class Described(NamedTuple):
    """What Triton's launcher asks of a tensor descriptor, without the checks that making one repeats at every call."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"


def share_all_memory(function: int, most: int = 0) -> None:
    """Ask the driver for all the shared memory that a multiprocessor can have: several programs are to fit on it.
    most: bytes that any launch of this function may ask for, where that is more than the compiled kernel needs. One
    function can serve several configurations, and the driver keeps the last number it is given."""
    most_dynamic, preferred_carveout, percent = 8, 9, 100
    driver, kernel = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(function)
    driver.cuFuncSetAttribute(kernel, preferred_carveout, percent)
    if most:
        driver.cuFuncSetAttribute(kernel, most_dynamic, most)


def require_barriers(operation: str, compiled: Any, byte: int, do: str) -> None:
    """The texts of ring_ptx.py look for a kernel's barriers at a byte of shared memory: refuse where they are not."""
    from ..kernels import ring_ptx

    there = ring_ptx.barriers_in(compiled.asm["ptx"])
    if there != byte:
        raise refusal(
            operation,
            "this Triton lays out shared memory in another way than the kernel's own code expects.",
            needs=[(f"barriers at byte {byte}", str(there))],
            do=f"pip install triton==3.6.0, or choose {do}",
            kind=BackendRefusal,
        )
