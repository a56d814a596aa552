"""The C kernels on the CPU (in the making)."""

from __future__ import annotations

import torch

NAME = "cpu_native"


def missing(device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
    """Not there yet."""
    return ["not built yet"]
