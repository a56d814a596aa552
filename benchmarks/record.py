"""Records of benchmarks: one JSON line a run in benchmarks/results, with the machine and the versions it ran on."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from quarterturn.machine import processor, version

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Date, processor, GPU, and the versions that matter."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "triton": version("triton")}
    return facts


def append(name: str, record: dict[str, Any]) -> None:
    """Add a line to results/<name>.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as stream:
        stream.write(json.dumps(record) + "\n")


def read(name: str) -> list[dict[str, Any]]:
    """The lines of results/<name>.jsonl, oldest first; none where nothing was measured yet."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
