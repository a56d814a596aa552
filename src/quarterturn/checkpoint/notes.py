"""What is odd in a checkpoint and not refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .files import DTYPES, INDEX, PLAIN_FLOATS, SINGLE

if TYPE_CHECKING:
    from .read import Checkpoint


def suspicious(checkpoint: Checkpoint, by_design: set[str]) -> list[str]:
    """One sentence each. by_design: tensors that are no plain floats because their format says so."""
    notes = []
    if (checkpoint.path / SINGLE).exists() and (checkpoint.path / INDEX).exists():
        notes.append(f"{INDEX} is beside {SINGLE}: it is not read")
    used = {name for spec in checkpoint.layers.values() for name in spec.scheme_names}
    for scheme in checkpoint.quant.schemes:
        if scheme.apply and scheme.name not in used:
            notes.append(f"transform '{scheme.name}' is declared online but matches no FP4 layer")
        for stored in (t for t in checkpoint.transforms if t.scheme == scheme.name):
            signed = stored.transform.is_signed
            if scheme.type != "random-matrix" and not signed:
                notes.append(f"{stored.tensor}: declared {scheme.type}, but its entries are not +-1; used as stored")
    explained = by_design | {f"{t.tensor.removesuffix('weight')}perm" for t in checkpoint.transforms}
    for name, info in checkpoint.tensors.items():
        if info.dtype not in DTYPES:
            notes.append(f"{name}: dtype {info.dtype} is not known here")
        elif info.dtype not in PLAIN_FLOATS and name not in explained and not checkpoint.quant.others:
            notes.append(f"{name}: {info.dtype}, which is not run where the model has a parameter of floating point")
    if not checkpoint.quant.schemes:
        notes.append("no transforms are declared: these are plain FP4 layers")
    return notes
