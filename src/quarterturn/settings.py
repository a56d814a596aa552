"""Where the library keeps what it makes once: the only file that reads an environment variable."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "QUARTERTURN_CACHE"


def cache_dir() -> Path:
    """The cache folder: $QUARTERTURN_CACHE, or ~/.cache/quarterturn. It is not created here."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/quarterturn").expanduser()
