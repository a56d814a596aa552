"""What the environment decides: the only file that reads its variables."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "QUARTERTURN_CACHE"


def cache_dir() -> Path:
    """The cache folder: $QUARTERTURN_CACHE, or ~/.cache/quarterturn. It is not created here."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/quarterturn").expanduser()


def triton_interprets() -> bool:
    """Whether Triton runs kernels in its interpreter, also on CPU tensors: a variable of its own."""
    return os.environ.get("TRITON_INTERPRET") == "1"
