"""What a reload of weights has to leave as it is: the online transforms, and what config.json says of the layers.

A running engine's layers are built around both, so they are held to those of the first load: a folder before its
weights are read, and every matrix in a stream of weights, wherever that comes from. No vLLM in this file.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint import Checkpoint, open_checkpoint
from ...checkpoint.config import ONLINE
from ...errors import CheckpointRefusal, Refusal, refusal

KINDS = ("weight", "perm")


class FirstLoad:
    """The transforms and the quantization of the checkpoint that an engine was started with."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.quant = replace(checkpoint.quant, version="")
        schemes = [scheme.name for scheme in checkpoint.quant.schemes]
        self.suffixes = [f".{name}_{where}.{kind}" for name in schemes for where in ONLINE for kind in KINDS]
        """How the names of the stored matrices end."""
        # Digests, since a matrix may be as wide as the model.
        self.matrices = {name: _digest(checkpoint.read(name)) for name in checkpoint.tensors if self._suffix(name)}
        self._seen = _state(checkpoint.path)

    def check_folder(self, folder: Path) -> None:
        """Raises CheckpointRefusal where a checkpoint that weights are about to be read from is of another kind. What
        has not changed since it was looked at, or is no folder of a checkpoint, is not opened."""
        state = _state(folder)
        if state == self._seen or not (folder / "config.json").is_file():
            return
        checkpoint = open_checkpoint(folder, others=True)
        if replace(checkpoint.quant, version="") != self.quant:
            raise _refused(folder / "config.json", "the quantization_config of the first load", "another")
        missing = [name for name in self.matrices if name not in checkpoint.tensors]
        if missing:
            raise _refused(folder, f"the matrix {missing[0]} of the first load", "no such tensor")
        for name in checkpoint.tensors:
            if self._suffix(name):
                self.check_tensor(name, checkpoint.read(name))
        self._seen = state

    def check_tensor(self, name: str, data: Tensor) -> None:
        """Raises CheckpointRefusal where a tensor of a stream of weights is a transform's, and not that of the first
        load. A matrix under a module that had none has to be one of its scheme's."""
        suffix = self._suffix(name)
        if suffix is None:
            return
        here = self.matrices.get(name)
        known = [m for n, m in self.matrices.items() if n.endswith(suffix)] if here is None else [here]
        if _digest(data) not in known:
            raise _refused(None, f"the matrix of the first load as {name}", "another")

    def _suffix(self, name: str) -> str | None:
        return next((suffix for suffix in self.suffixes if name.endswith(suffix)), None)


def _digest(matrix: Tensor) -> str:
    """The same for the same numbers, whatever their dtype."""
    numbers = matrix.detach().to("cpu", torch.float64).contiguous().numpy()
    return f"{numbers.shape} {hashlib.sha256(numbers.tobytes()).hexdigest()}"


def _state(folder: Path) -> list[tuple[str, int, int]]:
    """What tells that files are others, or have been written to."""
    files = [file for file in (folder / "config.json", *sorted(folder.glob("*.safetensors"))) if file.is_file()]
    return [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]


def _refused(file: Path | None, needed: str, found: str) -> Refusal:
    return refusal(
        "vllm",
        "weights are reloaded only for the transforms and formats that the engine was started with.",
        file=file,
        needs=[(needed, found)],
        do="start the engine anew with this checkpoint, or reload weights that were made for the same",
        kind=CheckpointRefusal,
    )
