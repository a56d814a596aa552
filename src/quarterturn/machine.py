"""Facts of the machine and the process: processor and devices, versions of packages, memory used and free."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def version(package: str) -> str:
    """The installed version of a package, or 'not installed'."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """The CPU's name where the system tells it, its instruction set as torch uses it, and whether that has bf16."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    wide = torch.backends.cpu.get_cpu_capability()
    bf16 = wide.startswith("AVX512") and getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    return f"{named[0] if named else platform.machine()}, {wide}{'-BF16' if bf16 else ''}"


def gpus() -> list[tuple[str, tuple[int, int], int]]:
    """Name, compute capability and bytes of memory of each CUDA device."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append((properties.name, (properties.major, properties.minor), properties.total_memory))
    return found


def facts() -> dict[str, Any]:
    """What belongs to a record of speed: date, processor, GPU, and the versions that matter."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "triton": version("triton")}
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def cache_bytes(device: torch.device) -> int:
    """Bytes of a GPU's last cache; 0 where nobody says, as on CPUs."""
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if device.type == "cuda" else 0


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where the system does not say."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def peak_memory() -> dict[str, int]:
    """Bytes: the most this process has held in main memory ('host') and, where used, on each CUDA device."""
    peaks = {"host": _host_peak()}
    for index in range(len(gpus())):
        if used := torch.cuda.max_memory_allocated(index):
            peaks[f"cuda:{index}"] = used
    return peaks


def _host_peak() -> int:
    try:
        # getrusage's figure is inherited from the process that started this one; the kernel's own is not.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        # Linux counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
