"""New weights in the place of a layer's own, by an engine that leaves no trace of it: what is derived is written anew.

An engine such as vLLM loads new weights into fresh tensors, has layers made of them, and then writes those tensors over
the old ones, which compiled code and captured CUDA graphs read. What the old layers have derived stays where it is and
gets the values that the fresh ones have derived. No version tells of it: it counts as what it was made from.
"""

from __future__ import annotations

from typing import Any

import torch

from .backends.kept import misfits, wait_for_writes, write_over

HELD = ("codes", "block_scale", "encode_scale", "input_encode_scale", "bias")
DERIVED = ("tensor_scale", "values")


class Renewal:
    """An FP4Linear and a fresh one with the same transforms, of which all is made that `write` will need.

    misfits: (needed, found) for every tensor that cannot be written over: of the derived ones, of those that backends
    keep, and of those that the engine is to write. Nothing is written before `write`, and that only without misfits.
    """

    def __init__(self, old: Any, new: Any) -> None:
        self._layer = old
        self._pairs = [(name, getattr(old, name), getattr(new, name)) for name in DERIVED]
        before, after = (layer._decided.plan if layer._decided else None for layer in (old, new))
        if before is not None and after is not None and hasattr(before.backend, "renewal"):
            with torch.no_grad():
                made = before.backend.renewal(before.layer, after.layer)
            self._pairs += [(f"what {before.backend.NAME} keeps", *pair) for pair in made]
        held = [(name, getattr(old, name), getattr(new, name)) for name in HELD]
        self.misfits = [pair for name, mine, other in held + self._pairs for pair in misfits(mine, other, name)]

    @torch.no_grad()
    def write(self) -> None:
        """The old layer's derived tensors, in their places, with what the fresh one's have: there on return."""
        assert not self.misfits, self.misfits
        for _, mine, other in self._pairs:
            write_over(mine, other)
        # The matrices of all layers are one tensor, whose memory a sleeping engine may have given up.
        old = self._layer
        for matrix, transform in ((old.input_matrix, old.input_transform), (old.output_matrix, old.output_transform)):
            if matrix is not None:
                matrix.data.copy_(transform.matrix)
        wait_for_writes(old.tensor_scale.device)
