"""What a backend has made of a tensor, kept beside the tensor as long as it lives and is not written to; and how one
record is written over by another."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

COMPARED = 1 << 16
"""Bytes of a tensor in main memory (a matrix, an input) that are kept and compared at most: 128 x 128 in fp32."""


class Kept:
    """For each tensor object a dict, empty at first and again once the tensor has changed.

    The object is the key, not its address, which another tensor may get; and nothing is hung on the tensor itself,
    which would travel with it into files. How a change is seen:

    | tensor                    | by                                                                                |
    |---|---|
    | in main memory, up to 64 KiB | its bytes, whoever wrote them                                                  |
    | other                     | its version, storage and place, shape and strides in it; writes past `.data` or   |
    |                           | through numpy leave no trace there                                                |
    | other, of inference mode  | has no version: nothing is kept                                                   |
    """

    def __init__(self) -> None:
        # By id, which another tensor may come to have: each is looked at before it is believed. A dictionary of weak
        # references takes 10 us to ask.
        self._of: dict[int, tuple[weakref.ref[Tensor], Any, dict[Any, Any], Any]] = {}

    def of(self, tensor: Tensor) -> dict[Any, Any]:
        memory = None
        if tensor.device.type == "cpu" and tensor.nbytes <= COMPARED:
            state: Any = (tensor.shape, tensor.dtype, contents(tensor))
        elif tensor.is_inference():
            return {}
        else:
            # `tensor.data = other` changes all but the version.
            memory = tensor.untyped_storage()
            state = (tensor._version, memory._cdata, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        number = id(tensor)
        found = self._of.get(number)
        if found is None or found[0]() is not tensor or found[1] != state:
            here = weakref.ref(tensor, lambda gone: self._forget(number, gone))
            # The storage is held weakly, so that no other is at its address.
            found = self._of[number] = (here, state, {}, memory and StorageWeakRef(memory))
        return found[2]

    def _forget(self, number: int, gone: weakref.ref[Tensor]) -> None:
        found = self._of.get(number)
        if found is not None and found[0] is gone:
            self._of.pop(number, None)


def misfits(old: Any, new: Any, name: str = "it") -> list[tuple[str, str]]:
    """Why one record cannot be written over by another, as (needed, found), each of them with the place in the record:
    tensors of another dtype or shape, a tensor on one side alone, other values beside the tensors; [] where it can."""
    inner: list[tuple[str, Any, Any]] = []
    if type(old) is type(new) and isinstance(old, tuple) and len(old) == len(new):
        names = [f".{field}" for field in getattr(old, "_fields", ())] or [f"[{i}]" for i in range(len(old))]
        inner = [(name + part, mine, other) for part, mine, other in zip(names, old, new, strict=True)]
    elif type(old) is type(new) and is_dataclass(old):
        inner = [(f"{name}.{e.name}", getattr(old, e.name), getattr(new, e.name)) for e in fields(old)]
    elif (needed := _form(old)) != (found := _form(new)):
        return [(f"{name}: {needed}", found)]
    return [pair for part, mine, other in inner for pair in misfits(mine, other, part)]


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} part{'s' * (len(value) != 1)}"
    return type(value).__name__ if is_dataclass(value) else "none" if value is None else repr(value)


def write_over(old: Any, new: Any) -> None:
    """The tensors in a record or tuple, and in those within, written over by those of another of its kind: in place,
    and without a trace in their versions, so that what was made for a captured CUDA graph is read with new values.
    The two must have no `misfits`; see `wait_for_writes`."""
    pairs = misfits(old, new)
    assert not pairs, pairs
    _write(old, new)


def wait_for_writes(device: torch.device) -> None:
    """Returns when all that was written on a GPU's current stream is there: kernels may ask for weights before those
    launched before them have ended, and on other streams."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


def _write(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        old.data.copy_(new)
    elif isinstance(old, tuple):
        for mine, other in zip(old, new, strict=True):
            _write(mine, other)
    elif is_dataclass(old):
        for entry in fields(old):
            _write(getattr(old, entry.name), getattr(new, entry.name))


def contents(tensor: Tensor) -> bytes:
    """The values of a tensor in main memory, row by row: a copy that costs a few microseconds for 64 KiB."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
