"""Which capture of a CUDA graph records what a stream is given (PyTorch tells only whether one does), and counters that
it may use: zero before and after each kernel, so that nothing has to clear them when the graph runs. And memory that
outlasts a call, which must not be a graph's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

_FEWEST, _SETS = 1024, 1024

Made = TypeVar("Made")


def capture_of(stream: int) -> object | None:
    """The number, unique in the process, of the capture that a stream (its handle) takes part in; None where it is in
    none, and an object equal to nothing else where the driver does not say."""
    status, number = ctypes.c_int(0), ctypes.c_ulonglong(0)
    function = _function()
    if function is None:
        return object()
    # CUresult cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, their number), the last three optional
    error = function(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    if error:
        return object()
    return number.value if status.value else None


@cache
def _function() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None


def lasting(device: torch.device, make: Callable[[], Made]) -> Made:
    """What `make` gives, in memory that may be kept and read on any stream after it.

    PyTorch's own graphs (`cudagraph_trees`) call a function once before they capture it, in a thread whose allocations
    are already the graph's; what is kept of that would be overwritten. So it is made in a thread of its own, and waited
    for. Not while a graph is captured, when there is no other memory than the graph's.
    """
    if device.type != "cuda":
        return make()

    def run() -> Made:
        with torch.cuda.device(device), torch.no_grad():
            made = make()
            torch.cuda.current_stream(device).synchronize()
            return made

    torch.cuda.current_stream(device).synchronize()  # what it reads is there
    with ThreadPoolExecutor(1) as worker:
        return worker.submit(run).result()


@lru_cache(maxsize=64)
def counters_of(device: torch.device) -> int:
    """int32 numbers that a capture gets, or a stream that keeps its own: two for each group of programs, of which there
    is up to one a multiprocessor (gpu_matmul_many.py); one for each program of another product (gpu_matmul.py)."""
    return max(_FEWEST, 4 * torch.cuda.get_device_properties(device).multi_processor_count)


class _Sets:
    """Sets of counters of a device, each for one capture and stream. Graphs read them as long as the process lives, so
    none is given twice, nor freed."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.left: list[Tensor] = []


_SETS_OF: dict[torch.device, _Sets] = {}


def provide(device: torch.device) -> None:
    """Have sets of counters ready. Not while a graph is captured: it would be the graph that clears them."""
    sets = _SETS_OF.setdefault(device, _Sets())
    if len(sets.left) < _SETS // 2:
        made = lasting(device, lambda: torch.zeros(_SETS, counters_of(device), dtype=torch.int32, device=device))
        sets.kept.append(made)
        sets.left.extend(made.unbind())


def counters(device: torch.device) -> Tensor:
    """Counters (counters_of(device),) for kernels that the current stream's capture records one after the other.

    Where none are ready they are the graph's own, which clears them when it runs.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    found = _taken(device, stream, capture_of(stream))
    return torch.zeros(counters_of(device), dtype=torch.int32, device=device) if found is None else found


@lru_cache(maxsize=64)
def _taken(device: torch.device, stream: int, capture: object) -> Tensor | None:
    sets = _SETS_OF.get(device)
    return sets.left.pop() if sets is not None and sets.left else None
