"""Where bytes lie: two codes in a byte, and block scales in rows or in the 128x4 tiles of Blackwell's products.

A layout is an object with two inverse methods, `forward` and `inverse`. All of it moves bytes and computes nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .errors import refusal


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 of shape (..., K) -> bytes (..., K/2); the element with the even index in the low nibble."""
    if codes.shape[-1] % 2:
        raise refusal(
            "pack_nibbles",
            "the last dimension is odd.",
            needs=[("an even number of codes", str(codes.shape[-1]))],
            do="pad the codes by one",
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes (..., K/2) -> uint8 codes 0..15 of shape (..., K); the low nibble first."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


class ScaleLayout(Protocol):
    """An arrangement of a (rows, cols) matrix of block scales, one byte each."""

    name: str

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the stored buffer, padding included."""

    def forward(self, scales: Tensor) -> Tensor:
        """(rows, cols) row-major -> a new stored buffer; padding bytes are zero."""

    def inverse(self, stored: Tensor, rows: int, cols: int) -> Tensor:
        """The stored buffer -> a new (rows, cols) row-major matrix."""


class Linear:
    """Row-major: the scale of row r, group c at r * cols + c."""

    name = "linear"

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        return rows, cols

    def forward(self, scales: Tensor) -> Tensor:
        return scales.clone(memory_format=torch.contiguous_format)

    def inverse(self, stored: Tensor, rows: int, cols: int) -> Tensor:
        _check_stored(self, stored, rows, cols)
        return stored.reshape(rows, cols).clone()


class Blocked128x4:
    """The tiles that Blackwell's FP4 products read.

    Scale (r, c) of a matrix with C columns lies at
    ((r // 128) * ceil(C / 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4.
    Rows are padded to 128, columns to 4; every padding byte is zero. Source: cuBLAS documentation, "1D block scaling
    factors layout".
    """

    name = "blocked"

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        return (-(-rows // 128) * 128, -(-cols // 4) * 4)

    def forward(self, scales: Tensor) -> Tensor:
        rows, cols = scales.shape
        padded_rows, padded_cols = self.shape(rows, cols)
        # Bytes are moved as uint8 because float8 tensors do not take every indexing operation.
        padded = torch.zeros(padded_rows, padded_cols, dtype=torch.uint8, device=scales.device)
        padded[:rows, :cols] = scales.view(torch.uint8)
        tiles = padded.view(padded_rows // 128, 4, 32, padded_cols // 4, 4).permute(0, 3, 2, 1, 4)
        return tiles.reshape(padded_rows, padded_cols).view(scales.dtype)

    def inverse(self, stored: Tensor, rows: int, cols: int) -> Tensor:
        _check_stored(self, stored, rows, cols)
        padded_rows, padded_cols = self.shape(rows, cols)
        tiles = stored.view(torch.uint8).reshape(padded_rows // 128, padded_cols // 4, 32, 4, 4)
        rows_major = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_cols)
        return rows_major[:rows, :cols].clone(memory_format=torch.contiguous_format).view(stored.dtype)


LINEAR = Linear()
BLOCKED_128x4 = Blocked128x4()
LAYOUTS: dict[str, ScaleLayout] = {layout.name: layout for layout in (LINEAR, BLOCKED_128x4)}


def get_layout(name: str) -> ScaleLayout:
    """The scale layout of that name, 'linear' or 'blocked'. Raises Refusal for any other name."""
    if not isinstance(name, str) or name not in LAYOUTS:
        raise refusal(
            "scale layout",
            f"there is no layout '{name}'.",
            needs=[(f"one of {', '.join(LAYOUTS)}", repr(name))],
            do="name one of them",
        )
    return LAYOUTS[name]


def _check_stored(layout: ScaleLayout, stored: Tensor, rows: int, cols: int) -> None:
    expected = layout.shape(rows, cols)
    count = 1
    for size in expected:
        count *= size
    if stored.numel() != count:
        raise refusal(
            "scale layout",
            f"the buffer does not hold the '{layout.name}' scales of a ({rows}, {cols}) matrix.",
            needs=[(f"{count} bytes, {expected}", f"{stored.numel()} bytes, {tuple(stored.shape)}")],
            do="pass the rows and columns of the matrix before padding",
        )
