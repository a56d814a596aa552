"""What is odd in a checkpoint and not refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..formats import E2M1_MAX, E4M3_MAX
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
    notes += _scales_of_no_use(checkpoint)
    if not checkpoint.quant.schemes:
        notes.append("no transforms are declared: these are plain FP4 layers")
    return notes


USUAL = (1e-6, 1e6)
"""Largest activations that a model may have."""


def _scales_of_no_use(checkpoint: Checkpoint) -> list[str]:
    """Input scales made for activations that no model has: those it has become zeros, or all the largest number."""
    found: dict[float, list[str]] = {}
    for layer in checkpoint.layers:
        scale = checkpoint.input_encode_scale(layer)
        largest = 1.0 if scale is None else E4M3_MAX * E2M1_MAX / float(scale)
        if not USUAL[0] <= largest <= USUAL[1]:
            found.setdefault(largest, []).append(layer)
    return [
        f"{layers[0]}{f' and {len(layers) - 1} more' if len(layers) > 1 else ''}: the input scale is made for "
        f"activations up to {largest:.1e}; "
        + (f"those below {largest / E4M3_MAX / 2**10:.1e} become zeros" if largest > 1 else "larger ones are cut off")
        for largest, layers in found.items()
    ]
