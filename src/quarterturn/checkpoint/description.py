"""What a checkpoint says of itself, from its config and headers alone: kind, formats, layers, transforms, oddities."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..errors import CheckpointRefusal
from .config import quantization_entry
from .files import list_tensors, read_json, resolve
from .read import KINDS, Checkpoint, open_checkpoint, recognise


def describe(path: str) -> dict[str, Any]:
    """What a folder (or hub id) holds, as data. Raises CheckpointRefusal where there is no checkpoint at all."""
    folder = resolve(path)
    kind = recognise(folder)
    config = read_json(folder / "config.json")
    known = kind.startswith("compressed-tensors")
    found: dict[str, Any] = {
        "path": str(path),
        "kind": kind if known else KINDS.get(kind, kind),
        "model_type": config.get("model_type", "unknown"),
        "is_fp4": known and "fp4-pack-quantized" in kind,
        "runs": False,
    }
    try:
        tensors = list_tensors(folder)
        found["bytes"] = sum(info.nbytes for info in tensors.values())
        found["tensors"] = len(tensors)
        found["dtypes"] = dict(Counter(info.dtype for info in tensors.values()).most_common())
        if found["is_fp4"]:
            found |= _contents(open_checkpoint(folder))
            found["runs"] = True
        elif not known:
            found["notes"] = [_foreign(kind)]
        else:
            open_checkpoint(folder)
    except CheckpointRefusal as error:
        found["refused"] = str(error)
    return found


def _foreign(kind: str) -> str:
    if kind == "unquantized":
        return "an ordinary model: `quarterturn quantize` makes a 4-bit checkpoint of it"
    return f"made by {KINDS.get(kind, kind)}, whose files are recognised and not run"


def _contents(checkpoint: Checkpoint) -> dict[str, Any]:
    rows: Counter[tuple[Any, ...]] = Counter()
    for spec in checkpoint.layers.values():
        first, last = spec.input_transform, spec.output_transform
        width = "W4A4" if spec.activations == "fp4" else "W4A16"
        rows[(spec.name.rsplit(".", 1)[-1], spec.format.name, width, spec.n, spec.k, first.size if first else None,
              last.size if last else None, spec.has_bias)] += 1  # fmt: skip
    keys = ("name", "format", "arithmetic", "n", "k", "input_transform", "output_transform", "bias")
    # What stands for the weights: codes and scales. A bias is stored beside them as in any other model.
    packed = sum(
        info.nbytes
        for name, info in checkpoint.tensors.items()
        if name.rpartition(".")[0] in checkpoint.layers and not name.endswith(".bias")
    )
    weights = sum(spec.n * spec.k for spec in checkpoint.layers.values())
    types = {scheme.name: scheme.type for scheme in checkpoint.quant.schemes}
    entry = quantization_entry(checkpoint.config) or {}
    return {
        "writer": f"compressed-tensors {entry.get('version', 'of an unknown version')}",
        "fp4_layers": len(checkpoint.layers),
        "fp4_bytes": packed,
        "bits_per_weight": round(8 * packed / weights, 3),
        "layers": [dict(zip(keys, row, strict=True)) | {"count": count} for row, count in rows.items()],
        "transforms": [
            {
                "scheme": t.scheme,
                "type": types[t.scheme],
                "location": t.location,
                "size": t.size,
                "signed": t.transform.is_signed,
                "tensor": t.tensor,
                "layers": sum(t.scheme in spec.scheme_names for spec in checkpoint.layers.values()),
            }
            for t in checkpoint.transforms
        ],
        "ignored": list(checkpoint.quant.ignore),
        "notes": checkpoint.notes,
    }
