"""Rotation by a wide +-1 matrix on a GPU: its factors as kernels/hadamard_wide.py multiplies them, and the launch. On
Hopper kernels/hadamard_wide_hopper.py takes those of its forms (gpu_wide_hopper.py).

| takes    | bf16 or fp16 x; blocks of 256 and more that have factors, of order 2 all but a product of up to 256       |
| does not | more than 32,768 values a block, padding of the dense factor included: a tile must fit in the registers   |
|          | of one multiprocessor; fp32 x, whose products float64 holds and 16-bit pieces do not; dense factors over  |
|          | 128 where a program has no 164 KB of shared memory (8.6, 8.9, 12.x) or for tiles over 16,384 values (8.0);|
|          | a matrix that was not met before, while a CUDA graph is captured: nothing can be looked at then           |
| run on   | NVIDIA H200; compiled for 8.0, 10.0 and 12.0, and run by Triton's interpreter on a CPU                    |

What is not taken is rotated by any_torch, in float64, by the same factors where the matrix has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..settings import triton_interprets
from . import gpu_wide_hopper
from .capturing import lasting
from .factors import WIDE, Factors, factors_of
from .gpu_device import capability, multiprocessors, on_device, runs_gluon
from .gpu_pieces import is_capturing
from .kept import Kept
from .protocol import Blocks

TILE = 1 << 15
"""Values of a tile at most: 128 registers of each of 256 threads, or 64 of 512."""
SMALL = 1 << 13
"""Values of the tiles that are made of several short rows, and of which several programs fit on a multiprocessor."""
DENSE = 256
"""The order of the dense factor at most, padding included."""
RUN_ON: tuple[tuple[int, int], ...] = ((9, 0),)
"""Capabilities of GPUs on which its tests were run. On others any_torch rotates until they are."""
RUN = 8
"""Values that lie together, for loads and stores of 16 bytes."""


@dataclass(frozen=True, eq=False)
class Wide:
    """A wide matrix, in the direction it is used, as the kernel takes it.

    dense: (P, P) of x's dtype, [output, input], zeros from `order` on. left, right: int16 (R,) sign bits, or words of
    them in the order of the Hopper kernel, or None where nothing is negated. factor: what their product lacks. outer,
    inner: the product of the factors of order 2 around. hopper: the form is that of the Hopper kernel.
    """

    dense: Tensor
    left: Tensor | None
    right: Tensor | None
    factor: float
    order: int
    outer: int
    inner: int
    hopper: bool = False

    @property
    def size(self) -> int:
        return self.order * self.outer * self.inner

    @property
    def padded(self) -> int:
        return self.dense.shape[0]


class Cut(NamedTuple):
    """How the kernel is cut: rows a tile, warps a program, tiles in flight a program, programs a multiprocessor, the
    registers a thread that the compiler is held to; and the digits of n, from the second on, that are left to the end.
    """

    rows: int
    num_warps: int
    stages: int
    programs: int
    registers: int | None
    late: int


def rotate(x: Tensor, blocks: Blocks, out_dtype: torch.dtype) -> Tensor | None:
    """x (M, K) @ V per block, fp32 sums, rounded once to out_dtype; None where the kernel does not take it."""
    if x.is_cuda and capability(x.device) not in RUN_ON:
        return None
    wide = wide_of(blocks, x)
    return None if wide is None else rotate_wide(x, wide, out_dtype)


def rotate_wide(x: Tensor, wide: Wide, out_dtype: torch.dtype) -> Tensor:
    """x (M, K), K a multiple of wide.size and not 0, rotated by a matrix in the kernel's form."""
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.numel():
        with on_device(x.device):
            _launch(x.contiguous(), wide, out)
    return out


def wide_of(blocks: Blocks, x: Tensor) -> Wide | None:
    """The kernel's form of a block, kept beside the matrix it was made of; None where the kernel does not take it."""
    matrix = blocks.matrix
    if x.dtype not in (torch.bfloat16, torch.float16) or matrix.shape[0] < WIDE:
        return None
    made = _KEPT.of(matrix)
    key = (blocks.factor, blocks.transpose, x.dtype)
    capturing = is_capturing(matrix)
    if key not in made:
        factors = factors_of(matrix)
        if capturing:
            return None
        hopper = runs_gluon(x.device)
        made[key] = None if factors is None else lasting(
            matrix.device, lambda: make_wide(factors, *key, matrix.device, hopper)
        )  # fmt: skip
    wide: Wide | None = made[key]
    if wide is None or not (wide.hopper or fits(wide, capability(x.device) if x.is_cuda else (8, 0))):
        return None
    if capturing:
        _CAPTURED[id(wide)] = wide
    return wide


_KEPT = Kept()
_CAPTURED: dict[int, Wide] = {}
"""What CUDA graphs may read, for as long as the process lives: a graph does not say when it goes."""


def fits(wide: Wide, at: tuple[int, int]) -> bool:
    """Whether the dense factor and a tile find room in the shared memory of a program."""
    most = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448}.get(at, 101376)
    return 2 * wide.padded * (wide.padded + wide.outer * wide.inner) <= most


def make_wide(
    factors: Factors, factor: float, transpose: bool, dtype: torch.dtype, device: torch.device, hopper: bool = False
) -> Wide | None:
    """The form of the matrix that has these factors; None where it is too wide or its dense factor too large.

    hopper: the Hopper kernel's form where the matrix has one.

    For bf16 the sign of the factor and its power of two go over to the dense factor, so that no sum overflows which the
    factor would bring back; fp16 has no number that large.
    """
    factors = factors.transposed() if transpose else factors
    parts = [part.cpu() for part in factors.parts]
    window = _window(parts, gpu_wide_hopper.PADDED) if hopper else None
    hopper = window is not None and gpu_wide_hopper.takes(*_orders(parts, window))
    window = window if hopper else _window(parts)
    if window is None:
        return None
    order, outer, inner = _orders(parts, window)
    dense = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    for part in parts[window]:
        dense = torch.kron(dense, part)
    left, signs_in = _absorbed(factors.left.cpu(), outer, order, inner)
    right, signs_out = _absorbed(factors.right.cpu(), outer, order, inner)
    factor = float(torch.tensor(factor, dtype=torch.float32, device="cpu"))
    power = max(-64, min(64, math.frexp(factor)[1] - 1)) if dtype == torch.bfloat16 else 0
    dense = dense * signs_in.view(-1, 1) * signs_out * math.copysign(math.ldexp(1.0, power), factor)
    size = max(16, _power_above(order))  # what a matrix unit takes
    padded = torch.zeros(size, size, dtype=dtype, device="cpu")
    padded[:order, :order] = dense.T
    if left is not None:
        left = (gpu_wide_hopper.left_words(left, order, inner) if hopper else _sign_bits(left)).to(device)
    if right is not None:
        right = (gpu_wide_hopper.right_words(right, order, inner) if hopper else _sign_bits(right)).to(device)
    return Wide(padded.to(device), left, right, math.ldexp(abs(factor), -power), order, outer, inner, hopper)


def _orders(parts: list[Tensor], window: slice) -> tuple[int, int, int]:
    """Of the factors of a window, of those outside and of those inside."""
    order, outer, inner = (math.prod(map(len, p)) for p in (parts[window], parts[: window.start], parts[window.stop :]))
    return order, outer, inner


def _window(parts: list[Tensor], enough: int | None = None) -> slice | None:
    """The neighbouring factors that are multiplied into one: all that are not H, and as many more as are worth it, up
    to an order of `enough`.

    More from the inner side as long as whole runs of values are left there, else from the outer side.
    """
    others = [i for i, part in enumerate(parts) if len(part) != 2 or float(part[1, 1]) != -1]
    start, stop = (others[0], others[-1] + 1) if others else (0, 0)

    def order() -> int:
        return math.prod(map(len, parts[start:stop]))

    values = _power_above(order()) * (math.prod(map(len, parts)) // order())
    if order() > DENSE or values > TILE:
        return None
    enough = enough or (64 if values <= SMALL else 128)
    while 2 * order() <= enough:
        inner = math.prod(map(len, parts[stop:]))
        if 1 < inner < RUN or inner > RUN:
            stop += 1
        elif start > 0:
            start -= 1
        else:
            break
    return slice(start, stop)


def _power_above(order: int) -> int:
    """The least power of two that is not less."""
    return 1 << (order - 1).bit_length()


def _absorbed(signs: Tensor, outer: int, order: int, inner: int) -> tuple[Tensor | None, Tensor]:
    """Signs (R,) as those of whole rows, None if there are none, and those of the dense factor (order,)."""
    own = signs.view(outer, order, inner)[0, :, 0]
    rest = signs.view(outer, order, inner) * own.view(-1, 1)
    return (None, own) if bool((rest == 1).all()) else (signs, torch.ones_like(own))


def _sign_bits(signs: Tensor) -> Tensor:
    """int16: the sign bit of a 16-bit number where a sign is negative, else 0."""
    return torch.where(signs < 0, -(1 << 15), 0).to(torch.int16)


def cut(wide: Wide, at: tuple[int, int]) -> Cut:
    """On a GPU of a capability; from what the compiler makes of it. Others, measured, are 1 to 3% faster and spill.

    As many programs as shared memory lets, and registers without spills, of which signs and runs along d take more. The
    widest tiles leave room for one program, which on Hopper has its next tile on the way (signs would be too: there is
    no shared memory for those). The product leaves the second and third digit of n with a thread's neighbours; where
    runs lie along d, the tile changes hands earlier.
    """
    values, signed = wide.padded * wide.outer * wide.inner, wide.left is not None or wide.right is not None
    late = min(2 if wide.inner > 1 else 1, (wide.outer * wide.inner).bit_length() - 2)
    if values <= SMALL:
        most = 2 if wide.padded > 64 else 3 if signed else 4
        return Cut(SMALL // values, 4, 1, most, 128 if most == 4 else None, late)
    if values < TILE:
        two = at[0] in (9, 10) and wide.padded < DENSE and wide.inner > 1 and not signed
        return Cut(1, 8, 1, 2 if two else 1, 128 if two else None, late)
    ahead = at[0] == 9 and wide.padded < DENSE and wide.inner >= RUN and not signed
    return Cut(1, 8, 2 if ahead else 1, 1, None, late)


def constants(wide: Wide, at: tuple[int, int]) -> dict[str, Any]:
    """The constexpr arguments of the kernel, and the compiler's options."""
    made = cut(wide, at)
    return {
        "ORDER": wide.order, "PADDED": wide.padded, "OUTER": wide.outer, "INNER": wide.inner, "ROWS": made.rows,
        "STEPS": (wide.outer * wide.inner).bit_length() - 1, "LATE": made.late, "STAGES": made.stages,
        "LEFT": wide.left is not None, "RIGHT": wide.right is not None, "INTERPRETED": triton_interprets(),
        "num_warps": made.num_warps, "maxnreg": made.registers,
    }  # fmt: skip


def _launch(x: Tensor, wide: Wide, out: Tensor) -> None:
    if wide.hopper:
        gpu_wide_hopper.launch(x, wide.dense, wide.left, wide.right, wide.factor, wide.order, wide.inner, out)
        return
    from ..kernels.hadamard_wide import hadamard_wide as kernel

    at = capability(x.device) if x.is_cuda else (8, 0)
    made = cut(wide, at)
    rows = x.numel() // wide.size
    tiles = -(-rows // made.rows)
    fit = made.programs * multiprocessors(x.device) if x.is_cuda else 2
    kernel[(min(tiles, fit),)](
        x, wide.dense, x if wide.left is None else wide.left, x if wide.right is None else wide.right, out,
        rows, wide.factor, **constants(wide, at),
    )  # fmt: skip
