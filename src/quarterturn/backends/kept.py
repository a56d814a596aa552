"""What a backend has made of a tensor, kept beside the tensor as long as it lives and is not written to."""

from __future__ import annotations

import ctypes
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

COMPARED = 1 << 16
"""Bytes of a tensor in main memory that are kept and compared at most: a matrix of 128 x 128 in fp32."""


class Kept:
    """For each tensor object a dict, empty at first and again once the tensor has changed.

    The object is the key, not its address, which another tensor may get; and nothing is hung on the tensor itself,
    which would travel with it into files. How a change is seen:

    | tensor                    | by                                                                                |
    |---|---|
    | in main memory, up to 64 KiB | its bytes, whoever wrote them                                                  |
    | other                     | its version and memory; writes past `.data` or through numpy leave no trace there |
    | other, of inference mode  | has no version: nothing is kept                                                   |
    """

    def __init__(self) -> None:
        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, tensor: Tensor) -> dict[Any, Any]:
        if tensor.device.type == "cpu" and tensor.nbytes <= COMPARED:
            state: Any = (tensor.shape, tensor.dtype, contents(tensor))
        elif tensor.is_inference():
            return {}
        else:
            # `tensor.data = other` changes the memory, not the version.
            state = (tensor._version, tensor.data_ptr())
        kept = self._of.get(tensor)
        if kept is None or kept[0] != state:
            kept = self._of[tensor] = (state, {})
        made: dict[Any, Any] = kept[1]
        return made


def write_over(old: Any, new: Any) -> None:
    """The tensors in a record or tuple, and in those within, written over by those of another of its kind: in place,
    and without a trace in their versions, so that what was made for a captured CUDA graph is read with new values."""
    if isinstance(old, Tensor):
        old.data.copy_(new)
    elif isinstance(old, tuple):
        for mine, other in zip(old, new, strict=True):
            write_over(mine, other)
    elif is_dataclass(old):
        for entry in fields(old):
            write_over(getattr(old, entry.name), getattr(new, entry.name))


def contents(tensor: Tensor) -> bytes:
    """The values of a tensor in main memory, row by row: a copy that costs a few microseconds for 64 KiB."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
