"""One launch of the FP4 product on Blackwell: how it is cut for a GPU and a number of tokens, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import FP4Format
from ..layouts import BLOCKED_128x4
from ..settings import triton_interprets
from ..tensor import per_output
from .protocol import Weight


class ScaledTile(NamedTuple):
    """A program's part of the product: tokens by outputs, K values a step; tokens that are finished at a time, so that
    a thread can hold them; and how it runs."""

    tokens: int
    outputs: int
    k: int
    part: int
    num_warps: int
    num_stages: int


TILES: dict[int, tuple[ScaledTile, ...]] = {
    10: (
        ScaledTile(16, 128, 256, 16, 4, 4),
        ScaledTile(32, 128, 256, 16, 4, 4),
        ScaledTile(64, 128, 256, 32, 4, 4),
        ScaledTile(128, 128, 256, 32, 4, 4),
        ScaledTile(256, 128, 256, 32, 8, 4),
    ),
    12: (
        ScaledTile(16, 128, 256, 16, 4, 3),
        ScaledTile(32, 128, 256, 32, 4, 3),
        ScaledTile(64, 128, 128, 64, 4, 3),
        ScaledTile(128, 128, 128, 64, 8, 3),
    ),
}
"""By the major number of the capability, tokens ascending: 10.x multiplies in tensor memory, 12.x in registers. Chosen
by what the compiler says of registers and memory; none was measured, since no Blackwell was at hand."""


class ScaledConfig(NamedTuple):
    """What the kernel is compiled for. family: 10 or 12; unit: bytes of which a row of codes has a whole number, 16 or
    8; by_output, by_row: tensor scales of w, of x, are one each."""

    family: int
    tile: ScaledTile
    group: int
    unit: int
    by_output: bool
    by_row: bool
    bias: bool

    @property
    def w_tiles(self) -> bool:
        """Whether the weights' scales come as tiles through TMA, as tensor memory takes them."""
        return self.family == 10

    @property
    def x_tiles(self) -> bool:
        return self.family == 10 and self.tile.tokens >= 128

    def constants(self, definition: bool) -> dict[str, Any]:
        """The constexpr arguments of the kernel, and the compiler's options."""
        return {
            "UNIT": self.unit, "BLOCK_N": self.tile.outputs, "BLOCK_M": self.tile.tokens, "BLOCK_K": self.tile.k,
            "PART": self.tile.part, "GROUP": self.group,
            "W_TILES": self.w_tiles, "X_TILES": self.x_tiles, "BY_OUTPUT": self.by_output, "BY_ROW": self.by_row,
            "BIAS": self.bias, "DEFINITION": definition, "INTERPRETED": triton_interprets(),
            "num_warps": self.tile.num_warps, "num_stages": self.tile.num_stages, "enable_fp_fusion": False,
        }  # fmt: skip


def tile_for(family: int, tokens: int) -> ScaledTile:
    """The smallest tile that holds the tokens, or the largest there is."""
    return next((tile for tile in TILES[family] if tile.tokens >= tokens), TILES[family][-1])


@dataclass(frozen=True)
class ScaledWeight:
    """A weight as the product reads it: codes (N, K/2), scales in the 128x4 layout, tensor scale (1,) or (N,) and
    bias (N,), both fp32."""

    codes: Tensor
    block_scale: Tensor
    tensor_scale: Tensor
    bias: Tensor | None
    format: FP4Format


def scaled_weight(weight: Weight, bias: Tensor | None) -> ScaledWeight:
    """Made once for a layer; the scales are moved, the codes are not."""
    assert weight.block_scale is not None
    return ScaledWeight(
        weight.data.contiguous(),
        BLOCKED_128x4.forward(weight.block_scale),
        per_output(weight.tensor_scale, weight.output_sizes),
        None if bias is None else bias.detach().float(),
        weight.format,
    )


def multiply(
    codes: Tensor, block_scale: Tensor, tensor_scale: Tensor, weight: ScaledWeight, out_dtype: torch.dtype, family: int
) -> Tensor:
    """Codes (M, K/2) with scales in the 128x4 layout and tensor scale (1,) or (M,) -> (M, N) of out_dtype; K not 0.

    On a CPU, in Triton's interpreter, the scaled product is replaced by its definition.
    """
    (m, half), n = codes.shape, weight.codes.shape[0]
    y = torch.empty(m, n, dtype=out_dtype, device=codes.device)
    if not y.numel():
        return y
    from ..kernels.matmul_scaled import matmul_scaled

    group, tile, unit = weight.format.group_size, tile_for(family, m), 8 if half % 16 else 16
    by_output, by_row = weight.tensor_scale.numel() > 1, tensor_scale.numel() > 1
    config = ScaledConfig(family, tile, group, unit, by_output, by_row, weight.bias is not None)
    quads, k = -(-2 * half // (4 * group)), tile.k
    steps: Any = -(-2 * half // k)
    if triton_interprets():
        import triton.language as tl

        steps = tl.constexpr(steps)  # with NumPy 2.4 the interpreter makes no `range` of an argument
    grid = (-(-m // tile.tokens), -(-n // tile.outputs))
    matmul_scaled[grid](
        weight.codes, _scales(weight.block_scale, n, quads, weight.format, tile.outputs, k, config.w_tiles),
        codes, _scales(block_scale, m, quads, weight.format, tile.tokens, k, config.x_tiles),
        y, weight.tensor_scale, tensor_scale, tensor_scale if weight.bias is None else weight.bias,
        m, n, half // unit, quads, -(-m // 128) * 128, -(-n // 128) * 128, steps, **config.constants(not codes.is_cuda),
    )  # fmt: skip
    return y


def _scales(stored: Tensor, rows: int, quads: int, format: FP4Format, block: int, k: int, tiles: bool) -> Any:
    """Scales in the 128x4 layout as the kernel takes them: a descriptor of its tiles, or words of four."""
    if not tiles:
        return stored.view(torch.uint8).view(-1).view(torch.int32)
    from triton.tools.tensor_descriptor import TensorDescriptor

    down = -(-rows // 128)
    return TensorDescriptor(
        stored.view(format.scale_dtype),
        [1, down, quads, 2, 256],
        [down * quads * 512, quads * 512, 512, 256, 1],
        [1, block // 128, k // format.group_size // 4, 2, 256],
    )
