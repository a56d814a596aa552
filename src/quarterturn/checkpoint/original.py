"""The unquantized model that a checkpoint was made from: its tensors by layer, read when asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..errors import refusal
from .files import TensorReader, list_tensors, resolve
from .read import Checkpoint


class OriginalModel:
    """A folder (or hub id) of an unquantized model. Raises CheckpointRefusal where it cannot be read."""

    def __init__(self, path: str | Path) -> None:
        self.folder = resolve(path)
        self.tensors = list_tensors(self.folder)
        self._reader = TensorReader()

    def weight(self, layer: str) -> Tensor:
        """The weight (N, K) of a layer in the file's dtype. Raises Refusal where the model has none."""
        name = f"{layer}.weight"
        if name not in self.tensors:
            raise refusal(
                "verify",
                "the original has no such tensor.",
                tensor=name,
                file=self.folder,
                needs=[(name, f"{len(self.tensors)} others")],
                do="give the unquantized model that the checkpoint was made from",
            )
        return self._reader.read(name, self.tensors[name])

    def bias(self, layer: str) -> Tensor | None:
        """The bias (N,) of a layer, or None."""
        name = f"{layer}.bias"
        return self._reader.read(name, self.tensors[name]) if name in self.tensors else None

    def changed_in(self, checkpoint: Checkpoint) -> list[str]:
        """The tensors outside 4-bit layers that the checkpoint holds with other values than this model."""
        changed = []
        for name, info in checkpoint.tensors.items():
            if name not in self.tensors or name.rpartition(".")[0] in checkpoint.layers:
                continue
            ours, theirs = checkpoint.read(name), self._reader.read(name, self.tensors[name])
            if info.shape != self.tensors[name].shape or not torch.equal(ours, theirs.to(ours.dtype)):
                changed.append(name)
        return changed
