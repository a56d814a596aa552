"""What a backend has made of a tensor, kept beside the tensor as long as it lives and is not written to."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Kept:
    """For each tensor object a dict, empty at first and again once the tensor's version has changed.

    The object is the key, not its address, which another tensor may get; and nothing is hung on the tensor itself,
    which would travel with it into files. Tensors made in inference mode have no version: those must not be written to.
    """

    def __init__(self) -> None:
        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, tensor: Tensor) -> dict[Any, Any]:
        version = 0 if tensor.is_inference() else tensor._version
        kept = self._of.get(tensor)
        if kept is None or kept[0] != version:
            kept = self._of[tensor] = (version, {})
        made: dict[Any, Any] = kept[1]
        return made
