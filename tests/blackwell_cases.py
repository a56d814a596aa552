"""What the tests of the Blackwell product share: operands of packed codes on the device, and their product by hand.

The same tests run on a Blackwell GPU, and on a CPU through Triton's interpreter where TRITON_INTERPRET=1, with the
scaled product replaced by its definition. No Blackwell was at hand: the first is for whoever has one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import by_hand
from gpu_cases import DEVICE, FORMATS
from quarterturn import MXFP4
from quarterturn.backends.blackwell_launch import multiply, scaled_weight
from quarterturn.backends.blackwell_triton import _family
from quarterturn.backends.protocol import Weight

NAME = "blackwell_triton"
MARKS = [pytest.mark.gpu, pytest.mark.interpreter, pytest.mark.blackwell]
FAMILIES = (10, 12)
ONE_BYTE = {"nvfp4": 0x38, "mxfp4": 127}  # scale 1; E4M3 doubles every 8 bytes, E8M0 every one


def families() -> tuple[int, ...]:
    """Both where the interpreter runs (or nothing does), or the one of this GPU."""
    if DEVICE.type == "cpu" or not torch.cuda.is_available():
        return FAMILIES
    return (_family(torch.empty(0, device=DEVICE)),)


@dataclass
class Side:
    """Packed codes (rows, K/2) and scale bytes (rows, K/group), both numpy, and the tensor scales fp32, one or each."""

    codes: np.ndarray
    scale: np.ndarray
    tensor_scale: np.ndarray
    name: str

    def values(self) -> np.ndarray:
        """e2m1 * block_scale, float64 (rows, K)."""
        return by_hand.values(self.codes, self.scale, self.name)


def side(name: str, rows: int, k: int, tensor_scale: tuple[float, ...] = (1.0,), small: bool = True) -> Side:
    """Random codes. small: block scales of .5, 1 and 2, so that sums are exact; else of every byte that is a number
    (of E8M0: those whose products fp32 holds)."""
    codes = torch.randint(0, 256, (rows, k // 2)).numpy().astype(np.uint8)
    shape = (rows, k // by_hand.GROUP[name])
    if small:
        scale = ONE_BYTE[name] + torch.randint(-1, 2, shape).numpy() * (8 if name == "nvfp4" else 1)
    else:
        scale = torch.randint(*((0, 0x7F) if name == "nvfp4" else (87, 168)), shape).numpy()
    return Side(codes, scale.astype(np.uint8), np.array(tensor_scale, dtype=np.float32), name)


def stored(scale: np.ndarray) -> torch.Tensor:
    """Scale bytes in the 128x4 layout, put there by hand."""
    rows, cols = scale.shape
    padded = torch.from_numpy(by_hand.blocked(scale)).view(-(-rows // 128) * 128, -(-cols // 4) * 4)
    return padded.to(DEVICE)


def product(
    x: Side, w: Side, sizes: tuple[int, ...] = (), bias: np.ndarray | None = None,
    dtype: torch.dtype = torch.float32, family: int = 10,
) -> torch.Tensor:  # fmt: skip
    """The kernel's y (M, N), on the CPU."""
    codes, scale, tensor_scale = (torch.from_numpy(part).to(DEVICE) for part in (w.codes, w.scale, w.tensor_scale))
    weight = Weight(codes, scale, tensor_scale, sizes or (len(w.codes),), FORMATS[w.name])
    kept = scaled_weight(weight, None if bias is None else torch.from_numpy(bias).to(DEVICE))
    x_codes, x_scale = torch.from_numpy(x.codes).to(DEVICE), stored(x.scale)
    return multiply(x_codes, x_scale, torch.from_numpy(x.tensor_scale).to(DEVICE), kept, dtype, family).cpu()


def by_output(w: Side, sizes: tuple[int, ...]) -> np.ndarray:
    """w's tensor scale of each output, or the one of all."""
    return np.repeat(w.tensor_scale, sizes) if sizes else w.tensor_scale


def exact(x: Side, w: Side, sizes: tuple[int, ...] = (), bias: np.ndarray | None = None) -> np.ndarray:
    """y in fp32, step by step as the definition has it, for sums that fp32 holds exactly."""
    acc = x.values() @ w.values().T
    assert np.array_equal(acc.astype(np.float32), acc), "these sums are not exact"
    y = acc.astype(np.float32) * (x.tensor_scale.reshape(-1, 1) * by_output(w, sizes))
    return y if bias is None else y + bias


def wide(x: Side, w: Side, sizes: tuple[int, ...] = (), bias: np.ndarray | None = None) -> tuple:
    """y in float64, and how far fp32 sums may be from it: K + 3 roundings of a term, one of the bias."""
    alpha = x.tensor_scale.reshape(-1, 1).astype(np.float64) * by_output(w, sizes)
    a, b = x.values(), w.values()
    y, bound = (a @ b.T) * alpha, (a.shape[1] + 3) * 2.0**-24 * (np.abs(a) @ np.abs(b).T) * alpha
    y = y if bias is None else y + bias
    return y, bound + 2.0**-24 * np.abs(y) + 1e-38 * (w.name == MXFP4.name)
