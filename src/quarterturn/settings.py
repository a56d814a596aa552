"""Where the library keeps what it makes once: the only file that reads an environment variable."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "QUARTERTURN_CACHE"


def cache_dir() -> Path:
    """The cache folder: $QUARTERTURN_CACHE, else $XDG_CACHE_HOME/quarterturn or ~/.cache/quarterturn. Not created here."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "quarterturn"
