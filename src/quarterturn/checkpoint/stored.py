"""The matrices of online transforms as a file holds them: each once, under the first module that uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Refusal
from ..transforms import Transform
from .config import ONLINE, QuantConfig, Scheme, matches
from .files import TensorInfo, refuse


@dataclass(frozen=True)
class StoredTransform:
    """A matrix as the file holds it, under the first module that uses it."""

    scheme: str
    location: str
    module: str
    tensor: str
    size: int
    inverse: bool
    transform: Transform
    """In the direction of the scheme, before any `inverse` of an apply entry."""


class StoredMatrix(nn.Module):
    """A transform's tensors as a file holds them, so that saving writes them back; nothing computes with them."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def _apply(self, fn: Any, recurse: bool = True) -> StoredMatrix:
        """`.to`, `.half` and the like: the device changes, and the file's dtypes stay."""
        super()._apply(lambda t: t.to(fn(t).device), recurse)
        return self


def stored_transforms(
    quant: QuantConfig, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor]
) -> list[StoredTransform]:
    stored = []
    for scheme in quant.schemes:
        for location in ONLINE:
            suffix = f".{scheme.name}_{location}.weight"
            for tensor, info in tensors.items():
                if tensor.endswith(suffix):
                    module = tensor.removesuffix(suffix)
                    stored.append(_stored_transform(read, scheme, location, module, tensor, info))
    return stored


def _stored_transform(
    read: Callable[[str], Tensor], scheme: Scheme, location: str, module: str, tensor: str, info: TensorInfo
) -> StoredTransform:
    floats = ("F64", "F32", "F16", "BF16")
    square = len(info.shape) == 2 and info.shape[0] == info.shape[1]
    if info.dtype not in floats or not square or (scheme.size and info.shape[0] != scheme.size):
        size = scheme.size or "R"
        raise refuse(
            info.file,
            "a transform's matrix is misshapen.",
            [(f"float ({size}, {size}) as '{scheme.name}' says", f"{info.dtype} {info.shape}")],
            "make or fetch the checkpoint again",
            tensor=tensor,
        )
    matrix = read(tensor).to(torch.float64)
    size = info.shape[0]
    if scheme.permuted and scheme.type != "random-matrix":
        order = read(f"{tensor.removesuffix('weight')}perm").long()
        if order.shape != (size,) or not torch.equal(order.sort().values, torch.arange(size, device="cpu")):
            raise refuse(
                info.file,
                "a transform's permutation is none.",
                [(f"the numbers 0..{size - 1}", "others")],
                "make or fetch the checkpoint again",
                tensor=tensor,
            )
        matrix = matrix[order][:, order]
    # Hadamards are stored as +-1 and divided by sqrt(R) when used; a matrix that is not +-1 is used alike.
    factor = 1.0 if scheme.type == "random-matrix" else 1 / math.sqrt(size)
    try:
        transform = Transform(matrix, factor)
    except Refusal as error:
        raise refuse(
            info.file,
            "a transform's matrix is none.",
            [("entries that are finite in fp32", "NaN, Inf, or larger than fp32 holds")],
            "make or fetch the checkpoint again",
            tensor=tensor,
        ) from error
    if not transform.is_invertible:
        raise refuse(
            info.file,
            "a transform's matrix has no inverse.",
            [("an invertible matrix: no weights can be stored behind another", _of_matrix(matrix))],
            "make or fetch the checkpoint again",
            tensor=tensor,
        )
    return StoredTransform(
        scheme.name, location, module, tensor, size, _owner_inverse(scheme, location, module), transform
    )


def _of_matrix(matrix: Tensor) -> str:
    return "a singular one" if bool(matrix.any()) else "zeros alone"


def _owner_inverse(scheme: Scheme, location: str, module: str) -> bool:
    """Whether the owner of a stored random-matrix uses it inverted: then the file holds the inverse itself."""
    if scheme.type != "random-matrix":
        return False
    stand_in = torch.nn.Linear(1, 1, bias=False, device="meta")
    for apply in scheme.apply:
        if apply.location == location and matches(module, stand_in, apply.targets, apply.ignore):
            return apply.inverse
    return False
