"""An MXFP4 weight as E4M3 with a scale each row, in one tensor, as products of FP8 read it.

value[n, k] = e4m3[n, k] * scale[n], exactly; kernels/to_e4m3.py makes both. The tensor is E4M3 (N, `stored_width`) and
holds, one behind the other, the E4M3 numbers of `rows(N)` rows of K, row by row, and their scales in fp32: rows of
zeros with the scale 1 are behind the weight's own, since products ask for a multiple of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
ALIGN = 16


def rows(n: int) -> int:
    """Rows that are stored of N."""
    return -(-n // ALIGN) * ALIGN


def stored_width(n: int, k: int) -> int:
    """Columns of E4M3 that hold a weight (n, k)."""
    return -(-rows(n) * (k + 4) // max(n, 1))


def empty(n: int, k: int, device: torch.device) -> Tensor:
    """Room for a weight (n, k), as it is to be before it is filled: zeros, and scales of 1."""
    data = torch.zeros(n, stored_width(n, k), dtype=torch.uint8, device=device).view(DTYPE)
    parts(data, k)[1].fill_(1.0)
    return data


def parts(data: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What is stored, as views: E4M3 (rows, K) and fp32 scales (rows)."""
    count, flat = rows(data.shape[0]), data.view(torch.uint8).view(-1)
    values = flat[: count * k].view(count, k).view(DTYPE)
    return values, flat[count * k : count * (k + 4)].view(torch.float32)
