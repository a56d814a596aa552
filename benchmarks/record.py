"""Records of benchmarks: one JSON line a run in benchmarks/results, with the machine and the versions it ran on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quarterturn.machine import facts as machine

RESULTS = Path(__file__).parent / "results"


def append(name: str, record: dict[str, Any]) -> None:
    """Add a line to results/<name>.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as stream:
        stream.write(json.dumps(record) + "\n")


def read(name: str) -> list[dict[str, Any]]:
    """The lines of results/<name>.jsonl, oldest first; none where nothing was measured yet."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


__all__ = ["RESULTS", "append", "machine", "read"]
