"""The unquantized model that a checkpoint was made from: its tensors by layer, read when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..errors import refusal
from .files import TensorInfo, TensorReader, list_tensors, resolve
from .read import Checkpoint

_DERIVED = ("rotary_emb.inv_freq", ".attn.masked_bias")
"""Ends of names of buffers that old files hold and Transformers makes anew."""


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
        return self._read(name)

    def bias(self, layer: str) -> Tensor | None:
        """The bias (N,) of a layer, or None."""
        name = f"{layer}.bias"
        return self._read(name) if name in self.tensors else None

    def changed_in(self, checkpoint: Checkpoint) -> list[str]:
        """The tensors outside 4-bit layers that the checkpoint holds with other values than this model."""
        changed = []
        for name, info in checkpoint.tensors.items():
            if name not in self.tensors or name.rpartition(".")[0] in checkpoint.layers:
                continue
            ours, theirs = checkpoint.read(name), self._read(name)
            if info.shape != self.tensors[name].shape or not torch.equal(ours, theirs.to(ours.dtype)):
                changed.append(name)
        return changed

    def misshapen_in(self, checkpoint: Checkpoint) -> list[str]:
        """The tensors outside 4-bit layers that the checkpoint holds in another shape than this model."""
        return [
            name
            for name, info in checkpoint.tensors.items()
            if name in self.tensors
            and name.rpartition(".")[0] not in checkpoint.layers
            and info.shape != self.tensors[name].shape
        ]

    def missing_from(self, checkpoint: Checkpoint) -> list[str]:
        """The tensors of this model that the checkpoint lacks, but those of its 4-bit layers (`verify` compares these)
        and second names of tensors that it has (tied weights)."""
        return [
            name
            for name in self.tensors
            if name not in checkpoint.tensors
            and name.rpartition(".")[0] not in checkpoint.layers
            and not name.endswith(_DERIVED)
            and not _tied(name, self.tensors, checkpoint.tensors, self._read)
        ]

    def unknown_in(self, checkpoint: Checkpoint) -> list[str]:
        """The tensors of the checkpoint that this model lacks, but those of 4-bit layers and transforms, which
        `open_checkpoint` judges, and second names of tensors that it has."""
        matrices = tuple(f"{t.module}.{t.scheme}_{t.location}." for t in checkpoint.transforms)
        return [
            name
            for name in checkpoint.tensors
            if name not in self.tensors
            and not _belongs(name, checkpoint.layers)
            and not name.startswith(matrices)
            and not name.endswith(_DERIVED)
            and not _tied(name, checkpoint.tensors, self.tensors, checkpoint.read)
        ]

    def _read(self, name: str) -> Tensor:
        return self._reader.read(name, self.tensors[name])


def _belongs(tensor: str, layers: Iterable[str]) -> bool:
    parts = tensor.split(".")
    return any(".".join(parts[:cut]) in layers for cut in range(1, len(parts)))


def _tied(name: str, own: dict[str, TensorInfo], theirs: dict[str, TensorInfo], read: Callable[[str], Tensor]) -> bool:
    """Whether a tensor's values are those of another of the same model, which both models have."""
    alike = [n for n in own if n != name and n in theirs and own[n].shape == own[name].shape]
    # Values are kept under two names for embeddings; vectors are equal by chance (norms of ones).
    return len(own[name].shape) > 1 and any(torch.equal(read(name), read(n)) for n in alike)
