"""Round-to-nearest: one weight matrix becomes an FP4Tensor.

    NVFP4 encode = fp32(448 * 6 / amax of the tensor)          shared by layers that an engine fuses
          s      = E4M3_rne(min(encode * (amax / 6), 448))     amax of the group of 16
          code   = E2M1_rne_sat(w / (s / encode))              from the ROUNDED s
    MXFP4 s      = 2^e by the rule EVEN;  code = E2M1_rne_sat(w * 2^-e)

Every operation is one IEEE fp32 operation in this order, the order in which compressed-tensors quantizes weights, so
that the values equal what llm-compressor's `memoryless_minmax` observer gives in fp32. (Activations at run time use
the order of the reference instead; the two scales differ by at most one fp32 rounding before the E4M3 one.) A group of
zeros has scale 0 and codes 0 here; compressed-tensors writes scale 0.125 there, and both decode to 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import refusal
from ..formats import E2M1_MAX, E4M3_MAX, FP4Format
from ..layouts import pack_nibbles
from ..rounding import e2m1_codes, e8m0_bytes
from ..tensor import FP4Tensor, decode_block_scale
from ..transforms import Transform

_CHUNK_VALUES = 1 << 22
"""Values worked on at a time: a few buffers of 16 MB, whatever the size of the layer."""


def encode_scale(amax: float | Tensor) -> Tensor:
    """fp32 (1,): 448 * 6 / amax, with which the largest group's scale is 448; 1 where the quotient is not finite."""
    largest = torch.as_tensor(amax, dtype=torch.float32, device="cpu").reshape(1)
    encode = (E4M3_MAX * E2M1_MAX) / largest.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(torch.isfinite(encode), encode, torch.ones_like(encode))


def fold_weight(weight: Tensor, transform: Transform | None) -> Tensor:
    """W (N, K) -> W V^-T per block in float64, rounded once to fp32; W itself in fp32 where there is no transform."""
    if transform is None:
        return weight.detach().float()
    # V^-T as a transform of its own: inverted once, not once for each chunk of rows.
    weight_side = Transform(transform.weight_matrix())
    folded = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for rows in _row_chunks(*weight.shape):
        folded[rows] = weight_side.apply(weight.detach()[rows]).float()
    return folded


def weight_amax(weight: Tensor, name: str = "weight") -> float:
    """The largest magnitude of a weight. Raises Refusal where the weight holds NaN or Inf."""
    amax = weight.abs().amax() if weight.numel() else torch.zeros((), device=weight.device)
    if not bool(torch.isfinite(amax)):
        raise refusal(
            "quantize",
            "the weight holds numbers that are not finite.",
            layer=name,
            needs=[("finite weights", f"amax {float(amax)}")],
            do="check the model, or put the layer into ignore",
        )
    return float(amax)


def round_to_nearest(weight: Tensor, format: FP4Format, encode: Tensor | None = None) -> FP4Tensor:
    """Quantize a finite fp32 weight (N, K), K a multiple of the group size.

    `encode` is the tensor's encode scale, fp32 (1,), needed for a format that has one.
    """
    n, k = weight.shape
    codes = torch.empty(format.codes_shape(n, k), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(format.scale_shape(n, k), dtype=torch.uint8, device=weight.device)
    if format.has_tensor_scale:
        encode = (encode_scale(weight_amax(weight)) if encode is None else encode.float()).to(weight.device)
    for rows in _row_chunks(n, k):
        groups = weight[rows].float().unflatten(-1, (-1, format.group_size))
        amax = groups.abs().amax(dim=-1)
        if encode is not None and format.has_tensor_scale:
            scales[rows] = _e4m3_bytes(encode * (amax / E2M1_MAX))
            divisor = decode_block_scale(scales[rows], format) / encode
        else:
            scales[rows] = e8m0_bytes(amax, "even")
            divisor = decode_block_scale(scales[rows], format)
        empty = (amax == 0) | (divisor == 0)
        scaled = (groups / divisor.unsqueeze(-1)).masked_fill_(empty.unsqueeze(-1), 0.0)
        codes[rows] = pack_nibbles(e2m1_codes(scaled).flatten(-2))
    return FP4Tensor.from_encode(
        codes, scales.view(format.scale_dtype), encode if format.has_tensor_scale else None, format
    )


def _row_chunks(rows: int, cols: int) -> Iterator[slice]:
    step = max(1, _CHUNK_VALUES // max(1, cols))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _e4m3_bytes(values: Tensor) -> Tensor:
    # Clamped first: what a cast makes of values over 448 depends on the version of torch.
    return values.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
