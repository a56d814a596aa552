"""The op `rotate` of the GPU's kernels alone, on a GPU and through Triton's interpreter.

Bit for bit where fp32 holds the sums, within what fp32 may lose elsewhere; full-width Hadamard matrices too.
"""

from __future__ import annotations

import pytest
import torch

from comparing import assert_same_bits
from gpu_cases import (
    DEVICE,
    DTYPES,
    EXACT_KINDS,
    INTERPRETED,
    SIZES,
    assert_rotates,
    grid,
    here,
    integers,
    matrix_of,
    run,
)
from quarterturn import ops, reference

pytestmark = pytest.mark.gpu


@grid(
    small=lambda kind, size, transpose: size in (16, 48, 128) and transpose,
    kind=EXACT_KINDS,
    size=SIZES,
    transpose=[False, True],
)
def test_rotate_is_exact_where_arithmetic_is(kind: str, size: int, transpose: bool) -> None:
    turn = (*matrix_of(kind, size), transpose)
    for dtype in DTYPES:
        x = integers(33, 3 * size, dtype)
        want = reference.rotate(x, *turn).float()
        for out in DTYPES if dtype == torch.bfloat16 else (torch.float32,):
            (got,) = here(run(ops.rotate, x, *turn, out_dtype=out))
            assert_same_bits(got, want.to(out), f"{dtype} to {out}")


@grid(
    small=lambda scale, size, dtype: size == 16,
    scale=[1e-30, 1e-6, 1e5, 1e20],
    size=[16, 128],
    dtype=DTYPES,
)
def test_a_matrix_far_from_one_loses_nothing(scale: float, size: int, dtype: torch.dtype) -> None:
    """fp16, of whose kind the pieces of a matrix are, holds neither such numbers nor their last bits."""
    turn = (torch.randn(size, size) * scale, 1.0, False)
    assert_rotates(torch.randn(33, 2 * size).to(dtype), turn, torch.float32)


@grid(
    small=lambda kind, size, dtype: size in (48, 64) and kind == "dense",
    kind=["hadamard", "dense"],
    size=SIZES,
    dtype=DTYPES,
)
def test_rotate_is_accurate_to_fp32(kind: str, size: int, dtype) -> None:
    x = torch.randn(33 if INTERPRETED else 1025, 3 * size if size > 64 else 192).to(dtype)
    for transpose in (False, True):
        for out in (torch.float32, dtype):
            assert_rotates(x, (*matrix_of(kind, size), transpose), out)


def doubled(base: int, size: int) -> torch.Tensor:
    """The Hadamard matrix of `size` on the device, Sylvester's times the one of order `base`; fp32, up to 3.3 GB."""
    matrix = matrix_of("hadamard", base)[0].to(DEVICE)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


@grid(
    small=lambda orders, transpose: orders[1] < 100 and transpose,
    orders=[(1, 2048), (1, 8192), (12, 12), (12, 768), (28, 28), (28, 56), (28, 3584), (28, 14336), (28, 28672)],
    transpose=[False, True],
)
def test_rotate_by_a_hadamard_of_full_width(orders: tuple[int, int], transpose: bool) -> None:
    base, k = orders
    matrix, factor = doubled(base, k), k**-0.5
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randint(-8, 9, (5, k), device=DEVICE).to(dtype)
        side = (matrix.T if transpose else matrix).double()
        want = (x.double() @ side) * torch.tensor(factor, dtype=torch.float32).double().item()
        del side
        (got,) = run(ops.rotate, x, matrix, factor, transpose, out_dtype=torch.float32)
        assert_same_bits(got.cpu(), (want.float() + 0.0).cpu(), f"integers in {dtype}")
        random = torch.randn(5, k, device=DEVICE).to(dtype)
        assert_rotates(random, (matrix, factor, transpose), dtype)
