"""Launches of kernels/hadamard_wide_hopper.py: which wide matrices it takes, its words of signs, and how it is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gpu_device import Described, multiprocessors, require_barriers, share_all_memory

PADDED = 128
"""The dense factor's order, padding included; of 64 and less half of it would be padding."""
INNERS = (64, 128, 256)
"""Products of the factors of order 2 inside it: values of a row that are neighbours."""


class Cut(NamedTuple):
    """Rows that have room in shared memory; of the dense factor's index, how many values make a unit, and units on
    their way; programs a multiprocessor, and the registers a thread that so many leave."""

    stages: int
    chunk: int
    flight: int
    programs: int
    registers: int | None


CUTS = {
    (256, False): Cut(2, 32, 3, 1, None),
    (256, True): Cut(2, 32, 3, 1, None),
    (128, False): Cut(2, 16, 6, 2, 80),
    (128, True): Cut(2, 32, 3, 2, 64),
    (64, False): Cut(4, 32, 4, 2, 80),
    (64, True): Cut(4, 32, 4, 2, 64),
}
"""By INNER and whether signs of x change, which takes four warps more. Measured on an H200 at 2^26 values: some 40 KB
are on their way to each multiprocessor; more is slower."""


def takes(order: int, outer: int, inner: int) -> bool:
    """Whether a dense factor of that order between such products of factors of order 2 is the kernel's."""
    return PADDED // 2 < order <= PADDED and outer == 1 and inner in INNERS


def left_words(signs: Tensor, order: int, inner: int) -> Tensor:
    """int32 (inner / 32, 128): the signs (order * inner,) of x, as the kernel's threads change them.

    A thread has 16 bytes of every 16th row of every slice of 64; four such pieces are a word, first values low.
    """
    # (16 rows, row, slice, pair / 4, pair % 4, which of the pair)
    bits = _padded(signs, order, inner).view(8, 16, -1, 8, 4, 2).permute(0, 2, 1, 3, 4, 5)
    # (word, which quarter, row, pair / 4, pair % 4, which of the pair)
    return _words(bits.reshape(-1, 4, 16, 8, 4, 2).permute(0, 2, 3, 5, 1, 4))


def right_words(signs: Tensor, order: int, inner: int) -> Tensor:
    """int32 (inner / 64, 256): the signs (order * inner,) of the output, as the kernel's threads hold it."""
    # (warp, half of its rows, row, slice, n / 32, n / 8 % 4, n % 8)
    bits = _padded(signs, order, inner).view(8, 2, 8, -1, 2, 4, 8).permute(3, 0, 2, 5, 1, 4, 6)
    return _words(bits)


def _padded(signs: Tensor, order: int, inner: int) -> Tensor:
    """Whether a sign is negative, int64 (PADDED, inner)."""
    negative = torch.zeros(PADDED, inner, dtype=torch.int64, device=signs.device)
    negative[:order] = (signs < 0).view(order, inner)
    return negative


def _words(bits: Tensor) -> Tensor:
    """int32 (n, threads) of bits (n, ..., ...) that are 32 a word, the lowest first."""
    places = torch.arange(32, dtype=torch.int64, device=bits.device)
    words = (bits.reshape(bits.shape[0], -1, 32) << places).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


class Config(NamedTuple):
    """What the kernel is compiled for. left, right: whether it reads signs."""

    device: torch.device
    order: int
    inner: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    left: bool
    right: bool

    @property
    def cut(self) -> Cut:
        return CUTS[self.inner, self.left]

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments of the kernel."""
        from ..kernels import ring_ptx
        from ..kernels.hadamard_wide_hopper import NUM_WARPS

        how = self.cut
        return {
            "ORDER": self.order, "SLICES": self.inner // 64, "CHUNK": how.chunk, "STAGES": how.stages,
            "FLIGHT": how.flight, "LEFT": self.left, "RIGHT": self.right, "WAIT": ring_ptx.wait_asm(),
            "LEAVE": ring_ptx.leave_asm(), "num_warps": NUM_WARPS,
        }  # fmt: skip


def launch(
    x: Tensor, dense: Tensor, left: Tensor | None, right: Tensor | None, factor: float, order: int, inner: int,
    out: Tensor,
) -> None:  # fmt: skip
    """x (rows, blocks of order * inner), contiguous -> out. left, right: words of signs."""
    if x.data_ptr() % 16:
        x = x.clone()
    rows = x.numel() // (order * inner)
    config = Config(x.device, order, inner, x.dtype, out.dtype, left is not None, right is not None)
    programs = config.cut.programs * multiprocessors(x.device)
    launcher(config)(min(rows, programs), x, out, dense, left, right, rows, factor)


@lru_cache(maxsize=512)
def launcher(config: Config) -> Callable[..., None]:
    """The kernel of a configuration, compiled at the first call and launched with little Python after that."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import driver

    from ..kernels.hadamard_wide_hopper import barriers_at
    from ..kernels.hadamard_wide_hopper import hadamard_wide_hopper as kernel

    constants, how, order, inner = config.constants(), config.cut, config.order, config.inner
    strides = [order * inner, inner, 1]
    # Any memory will do to compile for: 16-byte aligned, as what the op allocates is and x was made to be.
    like = torch.empty(1, order, inner, dtype=config.dtype, device=config.device)
    words, out = like.view(-1)[:256].view(torch.int32), torch.empty(16, dtype=config.out_dtype, device=config.device)
    layout = NVMMASharedLayout(128, 16, 3)
    compiled = kernel.warmup(
        TensorDescriptor(like, [1, order, inner], strides, [1, how.chunk, 64], layout), out, like, words, words, 2,
        1.5, **constants, maxnreg=how.registers, launch_pdl=True, grid=(1,),
    )  # fmt: skip
    require_barriers("rotate", compiled, barriers_at(inner // 64, how.stages), 'backend="any_torch"')
    compiled._init_handles()
    share_all_memory(compiled.function)
    index, run, function, metadata = config.device.index, compiled.run, compiled.function, compiled.packed_metadata
    constexprs = [constants[name] for name in kernel.arg_names if name in constants]
    stream_of = driver.active.get_current_stream

    def start(
        programs: int, x: Tensor, out: Tensor, dense: Tensor, left: Tensor | None, right: Tensor | None, rows: int,
        factor: float,
    ) -> None:  # fmt: skip
        run(
            programs, 1, 1, stream_of(index), function, metadata, None, None, None,
            Described(x, [rows, order, inner], strides), out, dense, dense if left is None else left,
            dense if right is None else right, rows, factor, *constexprs,
        )  # fmt: skip

    return start
