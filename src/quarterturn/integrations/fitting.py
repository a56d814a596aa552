"""Whether the tensors of a file fit the model that config.json describes, where they are not packed.

Transformers compares shapes only where no quantizer takes part: a norm of one entry would then be broadcast, and
an embedding with a row too few would be found out by the first token that needs it, or never. It converts integers
and FP8 to the model's dtype too, as if they were plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoint
from ..checkpoint.files import PLAIN_FLOATS, refuse
from ..linear import FP4Linear

DO = "check that config.json is of this model, or make or fetch the checkpoint again"


def check_headers(model: Any, checkpoint: Checkpoint, conversions: list[Any]) -> None:
    """Compare headers with a model on the meta device, before anything is read. Raises CheckpointRefusal.

    Names are changed as Transformers will change them. Tensors that a conversion merges or cuts have their shapes
    compared by `check_shapes`, when that is done.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    wanted = _wanted(model)
    everything = model.state_dict()
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    for tensor, info in checkpoint.tensors.items():
        name, converted = rename_source_key(tensor, renamings, converters, model.base_model_prefix, everything)
        if name not in everything and tensor in everything:
            name, converted = tensor, None
        own = wanted.get(name)
        if own is None:
            continue
        if own.is_floating_point() and info.dtype not in PLAIN_FLOATS:
            raise refuse(
                info.file,
                "a tensor is not in plain floating point, and no scale for it is known.",
                [(f"one of {', '.join(PLAIN_FLOATS)}", info.dtype)],
                "make the checkpoint with this tensor unquantized",
                tensor=tensor,
            )
        if converted is None and info.shape != tuple(own.shape):
            raise refuse(
                info.file,
                "a tensor is not of the model's shape.",
                [(_named(name, tensor, own.shape), str(info.shape))],
                DO,
                tensor=tensor,
            )


def shapes(model: Any) -> dict[str, torch.Size]:
    """The shapes of all that is not packed, by the model's names."""
    return {name: tensor.shape for name, tensor in _wanted(model).items()}


def check_shapes(model: Any, checkpoint: Checkpoint, wanted: dict[str, torch.Size]) -> None:
    """Compare what was loaded with the `shapes` of the model before. Raises CheckpointRefusal."""
    for name, shape in shapes(model).items():
        if shape != wanted.get(name, shape):
            raise refuse(
                checkpoint.path,
                "a tensor is not of the model's shape.",
                [(str(tuple(wanted[name])), str(tuple(shape)))],
                DO,
                tensor=name,
            )


def _named(name: str, tensor: str, shape: torch.Size) -> str:
    return str(tuple(shape)) if name == tensor else f"{tuple(shape)} of {name}"


def _wanted(model: Any) -> dict[str, Tensor]:
    """The model's tensors but those of packed layers, which `open_checkpoint` has compared with each other."""
    packed = set(_packed(model))
    return {name: tensor for name, tensor in model.state_dict().items() if not packed & set(_owners(name))}


def _packed(model: Any) -> Iterator[str]:
    return (name for name, module in model.named_modules() if isinstance(module, FP4Linear))


def _owners(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name
