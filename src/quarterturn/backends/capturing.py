"""Which capture of a CUDA graph records what a stream is given: PyTorch tells only whether one does."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


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
