"""FP4Linears on the memory of a vLLM layer's parameters, and how they outlive a reload of weights.

vLLM reloads weights into fresh tensors, has them processed, and copies the result into the old ones, which compiled
code and CUDA graphs read. So the FP4Linears of the first load stay, on the old tensors, and what they have derived is
written anew, in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...checkpoint import LayerSpec
from ...errors import CheckpointRefusal, Refusal, refusal
from ...linear import FP4Linear
from ...renewal import Renewal
from ...tensor import FP4Tensor


def fp4_part(
    spec: LayerSpec,
    weight: FP4Tensor,
    input_encode: Tensor | None,
    bias: Tensor | None,
    *,
    backend: str,
    dtype: torch.dtype,
    name: str,
) -> FP4Linear:
    """An FP4Linear that holds these tensors, no copies of them, and runs as the file says. Raises Refusal."""
    scaled = spec.activations == "fp4" and spec.format.has_tensor_scale
    # Tensors made in inference mode could not be written to when weights are reloaded.
    with torch.inference_mode(False):
        part = FP4Linear.from_tensor(
            weight.validate(name),
            bias=bias,
            input_encode_scale=input_encode if scaled else None,
            activations=spec.activations,
            input_transform=spec.input_transform,
            output_transform=spec.output_transform,
            rule=spec.rule,
            backend=backend,
            keep_codes=True,
            name=name,
        )
        return part.refresh(dtype)


def kept(known: Sequence[FP4Linear] | None, fresh: list[FP4Linear], codes: Tensor, name: str) -> list[FP4Linear]:
    """The FP4Linears to run from now on: the fresh ones, or when vLLM reloads, the known ones with what is derived from
    the fresh weights. codes: the parameter as it is now. Raises CheckpointRefusal where they do not fit each other; the
    known ones are then what they were."""
    if known is None or known[0].codes.data_ptr() == codes.data_ptr():
        return fresh
    before, now = [part.output_sizes for part in known], [part.output_sizes for part in fresh]
    if before != now:
        needs = [(f"input scales that divide it into {before}", str(now))]
        raise _refused("the weights that are reloaded need another division of this layer.", name, needs)
    renewals = [Renewal(old, new) for old, new in zip(known, fresh, strict=True)]
    if needs := [pair for renewal in renewals for pair in renewal.misfits]:
        raise _refused("the weights that are reloaded are kept in another form than those before.", name, needs)
    for renewal in renewals:
        renewal.write()
    return list(known)


def _refused(headline: str, name: str, needs: list[tuple[str, str]]) -> Refusal:
    do = "start the engine anew with this checkpoint"
    return refusal("vllm", headline, layer=name, needs=needs, do=do, kind=CheckpointRefusal)
