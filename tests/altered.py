"""A small checkpoint that a test may change before it is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

import quarterturn as qt
from tiny_models import tiny_model, tokens

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def make_checkpoint(folder: Path, kind: str = "llama", format: str = "nvfp4", **options: Any) -> Path:
    """Quantize a tiny model into `folder`."""
    options.setdefault("transform", "random-hadamard:32")
    qt.quantize(tiny_model(kind), format, calibration=tokens(), output=folder, progress=False, **options)
    return folder


def altered(source: Path, target: Path, change: Change) -> Path:
    """A copy of a checkpoint whose config and tensors `change(config, tensors)` has edited in place."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(config, tensors)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"}
    )
    return target


def shard(source: Path, target: Path) -> Path:
    """The same checkpoint in two files with an index."""
    tensors = load_file(source / "model.safetensors")
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, target / file, {"format": "pt"})
    weight_map = {name: file for file, part in halves.items() for name in part}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target
