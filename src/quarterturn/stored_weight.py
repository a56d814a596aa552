"""The weight of a layer as a checkpoint stores it: kept as buffers, or let go where fragments hold all of it.

Fragments (weight_layout.py) have every bit that codes and block scales have, but codes under a zero scale or MXFP4's
NaN, which come back as 0. So a layer that has made them lets go of the two, and holds a weight once:

| asks for them                               | gets                                                              |
|---|---|
| state_dict, weight_tensor, copy, pickle     | tensors made for this one call                                    |
| `.codes`, `.block_scale`, `.to`,            | the buffers, made again: they may be written to, and stay until   |
| load_state_dict                             | the next call or refresh, which makes fragments of them again     |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import weight_layout
from .formats import FP4Format
from .fused import Part
from .plan import Stamp
from .tensor import FP4Tensor

STORED = ("codes", "block_scale")


def _given_back(name: str) -> property:
    """A buffer that is made again where it was let go. Assignments are nn.Module's, as to any buffer."""

    def get(layer: StoredWeight) -> Tensor:
        buffers = layer.__dict__.get("_buffers", {})
        if name not in buffers:
            raise AttributeError(name)
        if buffers[name] is None:
            layer.take_back()
        found: Tensor = buffers[name]
        return found

    return property(get)


class StoredWeight(nn.Module):
    """What an FP4Linear knows of its weight. keep_codes: never let go of the stored form."""

    if TYPE_CHECKING:
        codes: Tensor
        block_scale: Tensor
    else:
        codes, block_scale = map(_given_back, STORED)
    encode_scale: Tensor | None
    values: Tensor | None
    part: Part | None
    format: FP4Format
    in_features: int
    output_sizes: tuple[int, ...]
    keep_codes: bool

    @property
    def device(self) -> torch.device:
        """Where the weight is."""
        held = self._buffers["codes"]
        held = self.values if held is None else held
        assert held is not None
        return held.device

    def weight_tensor(self) -> FP4Tensor:
        """The weight as an FP4Tensor: on this layer's memory, or made of its fragments where they are all it holds."""
        return FP4Tensor.from_encode(*self._stored(), self.encode_scale, self.format, self.output_sizes)

    def take_back(self) -> None:
        """Hold the stored form as buffers again."""
        self._buffers.update(zip(STORED, self._stored(), strict=True))

    def _stored(self) -> tuple[Tensor, Tensor]:
        """Codes and block scales: what of them is held, and what is not of the fragments."""
        codes, block_scale = (self._buffers[name] for name in STORED)
        if codes is not None and block_scale is not None:
            return codes, block_scale
        data, rows = (self.values, None) if self.part is None else (self.part.whole.data, self.part.rows)
        assert data is not None
        # Tensors of inference mode could not be written to later.
        with torch.inference_mode(False), torch.no_grad():
            fragments, _ = weight_layout.from_stored(data, self.in_features, self.format, rows)
            made = weight_layout.inverse(fragments)
        return made[0] if codes is None else codes, made[1] if block_scale is None else block_scale

    def _let_go(self, weight: FP4Tensor, stamp: Stamp | None, choices: tuple[Any, ...]) -> Stamp | None:
        """Hold the weight, of which the values were made, in one form -> the stamp of the buffers as they then are.

        stamp: made before the values were. Where it does not hold any more the weight has been written to meanwhile:
        nothing is let go of, and the next call makes the values again.
        """
        gone = not self.keep_codes and self.values is not None and self.values.dtype == torch.int32
        held = [name for name in STORED if self._buffers[name] is not None]
        if stamp is None or len(held) == (0 if gone else len(STORED)):
            return stamp
        wanted = (None, None) if gone else (weight.codes, weight.linear_block_scale())
        later = Stamp(self, choices, wanted)
        if not stamp.holds(self, choices):
            return stamp
        self._buffers.update(zip(STORED, wanted, strict=True))
        return later

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in zip(STORED, self._stored(), strict=True):
            destination[prefix + name] = tensor if keep_vars else tensor.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.take_back()
        super()._load_from_state_dict(*arguments)
