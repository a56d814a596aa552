"""Inputs and weights for the tests of the C kernels, with and without AMX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quarterturn import FP4Tensor, hadamard
from quarterturn.backends import Weight, cpu_native
from quarterturn.formats import FORMATS
from quarterturn.kernels import cpu_build

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ENCODE = 37.5
every_format = pytest.mark.parametrize("format", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def kernels() -> None:
    """Without a compiler these tests fail: a suite that is green for want of the kernels says nothing."""
    assert cpu_build.reasons() == []


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def hard_rows(k: int, dtype: torch.dtype) -> Tensor:
    """(rows, k): noise over the range of the dtype, ties and their neighbours, zeros of both signs, and no numbers."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    steps = torch.cat((ties, ties.nextafter(torch.tensor(9.0)), ties.nextafter(torch.tensor(0.0)), -ties))
    exponents = torch.tensor([-140, -126, -24, -14, -9, -6, 0, 6, 9, 15, 100, 126], dtype=torch.float64)
    noise = (torch.randn(12, k, dtype=torch.float64) * torch.pow(2.0, exponents).view(-1, 1)).float()
    rows = [
        *noise,
        *(steps.repeat(-(-k // 32))[:k] * 2.0**e for e in (-12, -3, 0, 3, 9)),
        torch.zeros(k),
        -torch.zeros(k),
    ]
    mixed = torch.randn(6, k)
    mixed[0, k // 2 :] = 0
    mixed[1, 3], mixed[2, k - 1], mixed[3, 0] = float("nan"), float("inf"), -float("inf")
    mixed[4, ::7], mixed[5, :16] = -0.0, 1e-30
    return torch.cat((torch.stack(rows), mixed)).to(dtype)


def quantizer(format: str, recipe: str = "checkpoint") -> dict[str, object]:
    given = format == "nvfp4" and recipe == "checkpoint"
    return {"format": format, "recipe": recipe, "encode_scale": torch.tensor([ENCODE]) if given else None}


def packed(n: int, k: int, format: str, sizes: tuple[int, ...] | None = None) -> FP4Tensor:
    """Random codes with scales of a usual spread; one tensor scale per range."""
    fmt = FORMATS[format]
    codes = torch.randint(0, 256, fmt.codes_shape(n, k), dtype=torch.uint8)
    low, high = (0x20, 0x60) if format == "nvfp4" else (118, 131)
    scale = torch.randint(low, high, fmt.scale_shape(n, k), dtype=torch.uint8).view(fmt.scale_dtype)
    parts = sizes or (n,)
    return FP4Tensor(codes, scale, torch.rand(len(parts)) + 0.5, None, fmt, parts)


def operand_weight(weight: FP4Tensor) -> Weight:
    scale = weight.block_scale.view(torch.uint8)
    return Weight(weight.codes, scale, weight.tensor_scale, weight.output_sizes, weight.format)


class Many(NamedTuple):
    """A layer, and many rows that it takes: `run` has it multiply them as it does, or, `own`, as batch-invariant."""

    x: Tensor
    weight: FP4Tensor
    bias: Tensor
    side: tuple[Tensor | None, float]
    run: Callable[..., Tensor]


def many_rows(decoded: bool, activations: str, dtype: torch.dtype, format: str) -> Iterator[Many]:
    """Layers of odd sizes, with and without a transform, and nine times as many rows as are few, and three."""
    odd = 1104 if format == "nvfp4" else 1120  # no whole number of 32, or of 64
    for n, k, turn in ((37, 96, hadamard(32)), (150, odd, hadamard(16)), (32, 32, None)):
        weight, bias = packed(n, k, format, (16, n - 16)), torch.randn(n)
        data = weight.values(torch.bfloat16) if decoded else weight.codes
        scale = None if decoded else weight.block_scale.view(torch.uint8)
        side = (None, 1.0) if turn is None else (turn.matrix.float(), turn.factor)
        encode = torch.tensor([ENCODE]) if format == "nvfp4" else None

        def run(x: Tensor, own: bool = False, given=(data, scale, weight, bias, side, encode)) -> Tensor:
            data, scale, weight, bias, side, encode = given
            return torch.ops.quarterturn.fp4_linear(
                x, data, scale, weight.tensor_scale, weight.output_sizes, bias, format, *side, False, None, 1.0, False,
                activations == "fp4", encode, "checkpoint", "even", "cpu_native", None, own,
            )  # fmt: skip

        yield Many(torch.randn(9 * cpu_native.FEW_ROWS + 3, k).to(dtype), weight, bias, side, run)
