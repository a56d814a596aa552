"""Records of benchmarks: one JSON line a run in benchmarks/results, with the machine and the versions it ran on."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Date, processor, GPU, and the versions that matter."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "triton": _version("triton")}
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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    wide = "AVX512-BF16" if "avx512_bf16" in flags else "AVX512" if "avx512f" in flags else "AVX2"
    return f"{names[0] if names else platform.processor()}, {wide}"
