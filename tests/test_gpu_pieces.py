"""The form in which the GPU's kernels multiply a matrix, as far as a CPU can tell."""

from __future__ import annotations

import pytest
import torch

from quarterturn.backends.gpu_pieces import _hopper_pieces, make_pieces
from quarterturn.backends.protocol import Blocks
from quarterturn.kernels import CODES, OUTPUTS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_a_thread_of_the_product_holds_neighbours(size: int, output: int) -> None:
    """wgmma leaves thread q of four the columns 8j + 2q + {0, 1}: their values are runs of 16 (codes) or 8."""
    pieces, run = torch.randn(2, size, size), 16 if output == CODES else 8
    width = max(64 if output == CODES else 32, size)
    made = _hopper_pieces(pieces, output)
    whole = torch.stack([torch.block_diag(*[piece] * (width // size)) for piece in pieces])
    value = [int(torch.nonzero((whole[0] == made[0, n].unsqueeze(1)).all(0))) for n in range(width)]
    assert torch.equal(made, whole[:, :, value].transpose(1, 2))
    for q in range(4):
        held = [value[8 * j + 2 * q + e] for j in range(width // 8) for e in (0, 1)]
        runs = [held[i : i + run] for i in range(0, len(held), run)]
        assert all(r[0] % run == 0 and r == list(range(r[0], r[0] + run)) for r in runs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, -0.125, 0.3, 2.0**-40])
@pytest.mark.parametrize("transpose", [False, True])
def test_the_pieces_add_up_to_the_matrix(dtype: torch.dtype, factor: float, transpose: bool) -> None:
    matrix = torch.randn(16, 16)
    made = make_pieces(Blocks(matrix, factor, transpose), dtype)
    whole = made.pieces.double().sum(0) * made.factor
    want = (matrix.T if transpose else matrix).double() * torch.tensor(factor).double()
    # 22 bits of the matrix as a whole, and the factor, which fp32 holds.
    assert (whole - want).norm() <= 2.0**-22 * want.norm()
    assert made.factor > 0


def test_signs_take_one_piece_and_others_what_they_need() -> None:
    signs = torch.randint(0, 2, (32, 32)).float() * 2 - 1
    counts = {d: make_pieces(Blocks(signs, 0.25, False), d).pieces.shape[0] for d in DTYPES}
    assert counts == dict.fromkeys(DTYPES, 1)
    dense = {d: make_pieces(Blocks(torch.randn(32, 32), 1.0, False), d).pieces.shape[0] for d in DTYPES}
    assert dense == {torch.bfloat16: 3, torch.float16: 2, torch.float32: 1}


def test_without_a_look_three_pieces_are_the_same_matrix() -> None:
    blocks = Blocks(torch.randn(16, 16), 0.3, False)
    looked, blind = make_pieces(blocks, torch.bfloat16), make_pieces(blocks, torch.bfloat16, look=False)
    assert torch.equal(looked.pieces, blind.pieces)
    assert looked.factor == blind.factor
