"""What a backend has made of a tensor, kept beside the tensor as long as it lives and is not written to."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Kept:
    """For each tensor object a dict, empty at first and again once the tensor's version or memory has changed.

    The object is the key, not its address, which another tensor may get; and nothing is hung on the tensor itself,
    which would travel with it into files. Tensors made in inference mode have no version: those must not be written to.
    """

    def __init__(self) -> None:
        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, tensor: Tensor) -> dict[Any, Any]:
        # `tensor.data = other` changes the memory, not the version.
        state = (0 if tensor.is_inference() else tensor._version, tensor.data_ptr())
        kept = self._of.get(tensor)
        if kept is None or kept[0] != state:
            kept = self._of[tensor] = (state, {})
        made: dict[Any, Any] = kept[1]
        return made
