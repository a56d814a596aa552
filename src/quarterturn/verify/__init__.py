"""Whether a checkpoint's weights are the original's, behind the transforms that its config declares, layer by layer.

layer.py decides which transforms a weight carries, rows.py whether its factor and each of its rows are right,
columns.py whether each of its columns is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..checkpoint import OriginalModel, open_checkpoint
from ..transforms import hadamard
from .layer import (
    BIAS,
    CANNOT_TELL,
    COLUMNS,
    DIFFERENT,
    NEVER,
    OK,
    OTHER,
    REVERSED,
    ROWS,
    SCALED,
    TWICE,
    UNDECLARED,
    LayerVerdict,
    check_bias,
    check_layer,
)

_HADAMARD_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Verification:
    """All layers of a checkpoint, and names of tensors outside them: those that are not the original's (other norms may
    be meant), those of the original that the checkpoint lacks, those that only the checkpoint has, and those of the
    changed ones that have another shape, which no other values explain."""

    layers: list[LayerVerdict]
    changed: list[str]
    missing: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        strange = self.missing or self.added or self.misshapen
        return all(layer.ok for layer in self.layers) and not strange


def verify(path: str | Path, original: str | Path, advance: Callable[[str], None] = lambda layer: None) -> Verification:
    """Compare a checkpoint with the unquantized model it was made from, tensor by tensor from the files.

    advance: called with a layer's name when it is done. Raises Refusal where a folder cannot be read, or where the
    original lacks a layer or has it in another shape.
    """
    checkpoint, theirs = open_checkpoint(path), OriginalModel(original)
    others = {f"the matrix of '{t.scheme}' ({t.tensor})": t.transform for t in checkpoint.transforms}
    others |= {f"hadamard {size}": hadamard(size) for size in _HADAMARD_SIZES}
    verdicts = []
    for name, spec in checkpoint.layers.items():
        weight = theirs.weight(name)
        offline = checkpoint.offline_schemes(name)
        if offline:
            detail = (
                f"{', '.join(offline)} changed this weight before it was stored, and the file does not hold the matrix"
            )
            verdict = LayerVerdict(name, CANNOT_TELL, detail, math.nan, math.nan, math.nan)
        else:
            decoded = checkpoint.weight(name).dequantize()
            verdict = check_layer(
                name, decoded, weight, spec.format, spec.input_transform, spec.output_transform, others
            )
            stored, own = checkpoint.bias(name), theirs.bias(name)
            if verdict.ok and stored is not None and own is not None:
                verdict = check_bias(verdict, stored, own, spec.output_transform)
            elif verdict.ok and (stored is None) != (own is None):
                detail = "the checkpoint has no bias, the original has" if stored is None else "the original has none"
                verdict = replace(verdict, verdict=BIAS, detail=detail)
        verdicts.append(verdict)
        advance(name)
    missing, added = theirs.missing_from(checkpoint), theirs.unknown_in(checkpoint)
    return Verification(verdicts, theirs.changed_in(checkpoint), missing, added, theirs.misshapen_in(checkpoint))


__all__ = [
    "BIAS",
    "CANNOT_TELL",
    "COLUMNS",
    "DIFFERENT",
    "NEVER",
    "OK",
    "OTHER",
    "REVERSED",
    "ROWS",
    "SCALED",
    "TWICE",
    "UNDECLARED",
    "LayerVerdict",
    "Verification",
    "check_bias",
    "check_layer",
    "verify",
]
