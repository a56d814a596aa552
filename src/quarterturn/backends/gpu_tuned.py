"""Cuts of the products on GPUs that were measured, as data: tuned/<device>.json, made by `python -m benchmarks.tune`.

A table holds, for a kernel ('few': gpu_matmul, 'many': gpu_matmul_many), a class of tokens and the sizes N and K of a
weight, the cut that was fastest on the device of that name among those with the same bits as the formula's. A table
changes times and no results: an entry that would add in another order (ORDER) than the formula on the GPU at hand is
left out, with a warning, and one that would do so for fewer tokens than were measured is left out for those. Where a
table or an entry is missing the formulas cut_of and cut decide. A table is read once, at the first product on such a
device; nothing is measured then.

    {"device": "NVIDIA H200", "measured": {"date": ..., "driver": ..., "torch": ..., "triton": ...},
     "few":  [{"tokens": 8, "n": 4096, "k": 4096, "cut": {...}, "us": ..., "formula_us": ...}, ...],
     "many": [...]}
"""

from __future__ import annotations

import json
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..errors import refusal
from . import gpu_device, gpu_matmul, gpu_matmul_many

TABLES = Path(__file__).parent / "tuned"
CUTS: dict[str, Any] = {"few": gpu_matmul.Cut, "many": gpu_matmul_many.Cut}
MOST_TOKENS = 4096
"""The largest class. What fits so many tokens need not fit more."""

ORDER = {"few": ("num_warps", "split", "chunks"), "many": ("split", "inside", "natural")}
"""What of a cut decides the order in which K is added. Where groups make tiles after rounds of whole ones, everything
does: it decides which tiles those are."""


def few_cut(device: torch.device, m: int, n: int, k: int) -> gpu_matmul.Cut | None:
    """What was measured for (m, k) x (n, k)^T, m at most 16; None where nothing was."""
    found: gpu_matmul.Cut | None = _entry("few", device, tokens_class(m), n, k)
    return found


@lru_cache(maxsize=4096)
def many_cut(device: torch.device, m: int, n: int, k: int) -> gpu_matmul_many.Cut | None:
    """The same for more tokens; None too where the formula gives fewer tokens than were measured other parts of K."""
    found: gpu_matmul_many.Cut | None = _entry("many", device, tokens_class(m), n, k)
    if found is not None and _order("many", found) != _order("many", _formula("many", device, m, n, k)):
        return None
    return found


def tokens_class(m: int) -> int | None:
    """The class of m tokens, named by its largest number: 8, 16, 32 ... MOST_TOKENS; None beyond."""
    return None if m > MOST_TOKENS else max(8, gpu_matmul.power_of_two(m))


def file_of(name: str) -> Path:
    """Where the table of a device of that name is."""
    return TABLES / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


@lru_cache(maxsize=4096)
def _entry(kernel: str, device: torch.device, tokens: int | None, n: int, k: int) -> Any:
    """The cut of a table; None for one that this GPU has no room for, and, with a warning, for one that would change
    results."""
    if device.type != "cuda" or tokens is None:
        return None
    name = torch.cuda.get_device_name(device)
    found = table(name).get((kernel, tokens, n, k))
    if found is None:
        return None
    needed, there = _order(kernel, _formula(kernel, device, tokens, n, k)), _order(kernel, found)
    count = gpu_device.multiprocessors(device)
    if kernel == "many" and not gpu_matmul_many.has_room(found, tokens, n, count):
        return None  # measured on one of that name with more multiprocessors
    if there == needed:
        return found
    reason = refusal(
        "fp4_linear",
        "a measured cut is left out, since it would add in another order than the formula's.",
        file=file_of(name),
        needs=[(f"for {tokens} tokens, N = {n}, K = {k} on this GPU {needed}", there)],
        do=f"measure it again: python -m benchmarks.tune --size {n}x{k} --tokens {tokens}",
    )
    warnings.warn(str(reason), stacklevel=2)
    return None


def forget() -> None:
    """Read tables again, which have been written to."""
    for known in (table, _entry, many_cut):
        known.cache_clear()


def _formula(kernel: str, device: torch.device, m: int, n: int, k: int) -> Any:
    count = gpu_device.multiprocessors(device)
    if kernel == "few":
        return gpu_matmul.cut_of(n, k, m, count, gpu_device.capability(device))
    return gpu_matmul_many.cut(m, n, k, count, False)


def _order(kernel: str, cut: Any) -> str:
    names = cut._fields if kernel == "many" and cut.rounds else ORDER[kernel]
    return ", ".join(f"{name} {getattr(cut, name)}" for name in names)


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
