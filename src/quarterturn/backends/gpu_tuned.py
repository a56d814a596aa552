"""Cuts of the products on GPUs that were measured, as data: tuned/<device>.json, made by `python -m benchmarks.tune`.

A table holds, for a kernel ('few': gpu_matmul, 'many': gpu_matmul_many), a class of tokens and the sizes N and K of a
weight, the cut that was fastest on the device of that name among those with the same bits as the formula's: a table
changes times and no results. Where a table or an entry is missing the formulas cut_of and cut decide. A table is read
once, at the first product on such a device; nothing is measured then.

    {"device": "NVIDIA H200", "measured": {"date": ..., "driver": ..., "torch": ..., "triton": ...},
     "few":  [{"tokens": 8, "n": 4096, "k": 4096, "cut": {...}, "us": ..., "formula_us": ...}, ...],
     "many": [...]}
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from . import gpu_matmul, gpu_matmul_many

TABLES = Path(__file__).parent / "tuned"
CUTS: dict[str, Any] = {"few": gpu_matmul.Cut, "many": gpu_matmul_many.Cut}
MOST_TOKENS = 4096
"""The largest class. What fits so many tokens need not fit more."""


def few_cut(device: torch.device, m: int, n: int, k: int) -> gpu_matmul.Cut | None:
    """What was measured for (m, k) x (n, k)^T, m at most 16; None where nothing was."""
    found: gpu_matmul.Cut | None = _cut("few", device, tokens_class(m), n, k)
    return found


def many_cut(device: torch.device, m: int, n: int, k: int) -> gpu_matmul_many.Cut | None:
    """The same for more tokens."""
    found: gpu_matmul_many.Cut | None = _cut("many", device, tokens_class(m), n, k)
    return found


def tokens_class(m: int) -> int | None:
    """The class of m tokens, named by its largest number: 8, 16, 32 ... MOST_TOKENS; None beyond."""
    return None if m > MOST_TOKENS else max(8, gpu_matmul.power_of_two(m))


def file_of(name: str) -> Path:
    """Where the table of a device of that name is."""
    return TABLES / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


@lru_cache(maxsize=4096)
def _cut(kernel: str, device: torch.device, tokens: int | None, n: int, k: int) -> Any:
    if device.type != "cuda":
        return None
    return table(torch.cuda.get_device_name(device)).get((kernel, tokens, n, k))


@lru_cache(maxsize=16)
def table(name: str) -> dict[tuple[str, int | None, int, int], Any]:
    """The cuts of a device by kernel, class of tokens, N and K; empty for a device without a table."""
    try:
        data = json.loads(file_of(name).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    if data["device"] != name:  # of another device whose name makes the same file's
        return {}
    return {(kernel, e["tokens"], e["n"], e["k"]): CUTS[kernel](**e["cut"]) for kernel in CUTS for e in data[kernel]}
