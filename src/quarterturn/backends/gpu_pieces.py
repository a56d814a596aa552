"""A block matrix as the Triton kernels multiply it: exact pieces of 16 bits, in the order that each kernel wants."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels import CODES, OUTPUTS
from .capturing import lasting
from .kept import Kept
from .protocol import Blocks


@dataclass(frozen=True)
class Pieces:
    """A block matrix as the kernels multiply it: pieces (P, R, R) whose sum is the matrix, and the factor.

    hopper: for each output, the pieces block-diagonal to a unit's width, transposed, columns in its order.
    matrix: fp32 (R, R), in the direction it is used. near: for codes, hopper has but two of three pieces; scales next
    to a tie have to be made from the matrix. ready: the host has waited until they were written.
    launches: of gpu_launch.py, what is the same for every input of a shape.
    """

    pieces: Tensor
    hopper: dict[int, Tensor]
    matrix: Tensor
    factor: float
    near: bool = False
    ready: bool = True
    launches: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        return self.matrix.shape[0]


def pieces_of(blocks: Blocks, dtype: torch.dtype) -> Pieces:
    """The kernels' form of a block, kept beside the matrix it was made of.

    While a CUDA graph is being captured nothing can be looked at: for bf16 and fp32 the form is then made on the GPU,
    as part of the graph, of as many pieces as any matrix may need (for fp16: `is_met` first). A matrix that was met
    before costs nothing there; what a graph has captured stays as it was, and in memory, though the matrix be written
    to.
    """
    matrix = blocks.matrix
    made = _KEPT.of(matrix)
    key = (blocks.factor, blocks.transpose, dtype)
    capturing = is_capturing(matrix)
    if key not in made:
        if capturing:
            return make_pieces(blocks, dtype, look=False)
        made[key] = lasting(matrix.device, lambda: make_pieces(blocks, dtype))
    pieces: Pieces = made[key]
    if capturing:
        _CAPTURED[id(pieces)] = pieces
    return pieces


def is_met(blocks: Blocks, dtype: torch.dtype) -> bool:
    """Whether the form is kept already, so that nothing has to be looked at."""
    return (blocks.factor, blocks.transpose, dtype) in _KEPT.of(blocks.matrix)


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the tensor's device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


_KEPT = Kept()
_CAPTURED: dict[int, Pieces] = {}
"""What CUDA graphs may read, for as long as the process lives: a graph does not say when it goes."""


def make_pieces(blocks: Blocks, dtype: torch.dtype, look: bool = True) -> Pieces:
    """Split a matrix into pieces of dtype: one for +-1, else as many as bring it to fp32, three of bf16 or two of fp16.

    fp32 input is multiplied in float64 instead, by the one piece that the matrix then is. The sign of the factor and a
    power of two go over to the pieces, exactly: the whole of the factor's, so that no sum overflows which the factor
    would bring back; for fp16, which has few exponents, as much as makes the largest entry 16 to 32. look: read the
    matrix to choose, which waits for the GPU; else (not for fp16) take three pieces.
    """
    factor = float(torch.tensor(blocks.factor, dtype=torch.float32, device="cpu"))
    matrix = blocks.matrix.detach().float()
    if dtype == torch.float16:
        assert look
        power = 5 - math.frexp(float(matrix.abs().max()))[1]
    else:
        power = math.frexp(factor)[1] - 1
    matrix = (matrix.T if blocks.transpose else matrix) * math.copysign(math.ldexp(1.0, power), factor)
    rest, pieces = matrix.double(), []
    enough = 2.0**-22 * float(rest.norm()) if look else 0.0
    for _ in range(1 if dtype == torch.float32 else 3):
        pieces.append(rest.to(torch.float64 if dtype == torch.float32 else dtype))
        rest = rest - pieces[-1].double()
        if look and float(rest.norm()) <= enough:
            break
    stacked = torch.stack(pieces)
    hopper, near = {}, len(pieces) > 2
    if matrix.is_cuda and torch.cuda.get_device_capability(matrix.device)[0] == 9 and dtype != torch.float32:
        hopper = {output: _hopper_pieces(stacked, output) for output in OUTPUTS}
        hopper[CODES] = hopper[CODES][:2]
    return Pieces(stacked, hopper, matrix.contiguous(), math.ldexp(abs(factor), -power), near, ready=look)


def _hopper_pieces(pieces: Tensor, output: int) -> Tensor:
    """(P, R, R) -> (P, W, W): entry [n, k] multiplies value k of a unit for column n of the product.

    wgmma leaves columns 8j + 2q + {0, 1} of every j in thread q of four. So that these are neighbours, 16 of them for
    codes (8 bytes) and 8 for others (16 bytes), the digits (j, q, 0..1) of a column are (q, j, 0..1) of a value.
    Several pieces of a small block are multiplied in units of 32, half the work of 64, where runs of 8 do.
    """
    size = pieces.shape[1]
    width = 32 if size <= 32 and len(pieces) > 1 and output != CODES else max(64, size)
    wide = torch.stack([torch.block_diag(*[piece] * (width // piece.shape[0])) for piece in pieces])
    pairs = 8 if output == CODES else 4
    digits = wide.view(-1, width, width // (8 * pairs), 4, pairs, 2).transpose(3, 4)
    return digits.reshape(-1, width, width).transpose(1, 2).contiguous()
