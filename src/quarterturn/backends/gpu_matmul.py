"""Launches of the product for a few tokens (kernels/matmul_few.py): how it is cut, and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import FORMATS, MXFP4
from ..weight_layout import SCALE_BLOCKS, Fragments
from .gpu_launch import _multiprocessors as multiprocessors
from .gpu_launch import capability

MOST_TOKENS = 16
"""Rows of x that one launch takes."""


class Cut(NamedTuple):
    """How the kernel is cut; what the names mean is said there. programs: a multiprocessor."""

    num_warps: int
    split: int
    chunks: int
    stages: int
    slots: int
    programs: int
    cluster: bool


class Config(NamedTuple):
    """What the kernel is compiled for. w_scales, x_scales: 0, 1 or 2, for none, one, one a row."""

    device: torch.device
    cut: Cut
    format: str
    dtype: torch.dtype
    bias: torch.dtype | None
    tokens8: int
    tiles: int
    whole: bool
    w_scales: int
    x_scales: int
    after: bool


def few(
    x: Tensor,
    weight: Fragments,
    w_scale: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    after: bool = False,
    cut: Cut | None = None,
) -> None:
    """out (M, N) = x (M, K) @ weight^T * (x_scale * w_scale) + bias, M <= 16, on the GPU that all are on.

    x, out: bf16, or fp16 with an NVFP4 weight; contiguous, x 16-byte aligned. w_scale fp32 (1,) or (N,), x_scale fp32
    (1,) or (M,). bias (N,). after: start while the kernel before still runs (capability 9.0 or more), which is right
    unless that kernel writes this weight.
    """
    m, k = x.shape
    if not m:
        return
    assert m <= MOST_TOKENS and k == weight.k
    assert x.is_contiguous() and out.is_contiguous() and x.data_ptr() % 16 == 0
    count = multiprocessors(x.device)
    cut = cut or cut_of(weight.n, k, m, count, capability(x.device))
    tiles, (_, blocks, _, _), chunks = -(-weight.n // 16), weight.codes.shape, weight.scales.shape[1]
    room = count if cut.split < 4 or not cut.cluster else count // 16 * 16  # a GPC's multiprocessors are 16 or 18
    programs = min(max(room * cut.programs // cut.split, 1), tiles)
    each, more = divmod(tiles, programs)
    config = Config(
        x.device, cut, weight.format.name, x.dtype, None if bias is None else bias.dtype, 1 if m <= 8 else 2,
        _power_of_two(each + (more > 0)) if cut.cluster else 0, blocks == SCALE_BLOCKS * _chunks(cut),
        _kind(w_scale), _kind(x_scale), after,
    )  # fmt: skip
    partial, counts = workspace(x.device, cut.split * tiles * config.tokens8 * 128 if cut.split > 1 and not cut.cluster else 0)
    launcher(config)(
        programs, x, weight.codes, weight.scales, w_scale, x_scale, bias, out, partial, counts, m, weight.n, k, tiles,
        blocks, chunks, each, more, 2.0**weight.exponent,
    )  # fmt: skip


def cut_of(n: int, k: int, m: int, count: int, found: tuple[int, int]) -> Cut:
    """Measured on an H200; parts of K are spread over the warps of a program, then over programs.

    n, k, m: of the product; count: multiprocessors; found: capability.
    """
    chunks = -(-k // 256)
    num_warps = 16 if chunks > 8 else 8 if chunks > 4 else 4
    wide = 2 if m <= 8 and chunks > 16 else 1
    split = -(-chunks // (num_warps * wide))
    cluster = split > 1 and found[0] >= 9 and split <= 8
    if cluster:
        split = 1 << (split - 1).bit_length()
    return Cut(num_warps, split, wide, 3, 4 if m <= 8 else 2, max(16 // num_warps, 1), cluster)


def _chunks(cut: Cut) -> int:
    """Chunks of K that a launch has room for."""
    return cut.num_warps * cut.split * cut.chunks


def _kind(scale: Tensor | None) -> int:
    return 0 if scale is None else 1 if scale.numel() == 1 else 2


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def workspace(device: torch.device, floats: int) -> tuple[Tensor, Tensor]:
    """Memory for `floats` sums, and counts that are zero between launches: a stream's own, or a captured graph's."""
    if not floats:
        nothing = _nothing(device)
        return nothing, nothing
    if torch.cuda.is_current_stream_capturing():
        return _make_workspace(device, floats)
    return _kept_workspace(device, torch.cuda.current_stream(device).cuda_stream, _power_of_two(max(floats, 1 << 18)))


def _make_workspace(device: torch.device, floats: int) -> tuple[Tensor, Tensor]:
    counts = torch.zeros(1024, dtype=torch.int32, device=device)
    return torch.empty(floats, dtype=torch.float32, device=device), counts


@lru_cache(maxsize=64)
def _kept_workspace(device: torch.device, stream: int, floats: int) -> tuple[Tensor, Tensor]:
    return _make_workspace(device, floats)


@lru_cache(maxsize=64)
def _nothing(device: torch.device) -> Tensor:
    return torch.zeros(64, dtype=torch.float32, device=device)


def constants(config: Config) -> dict[str, Any]:
    """The constexpr arguments of the kernel."""
    from ..kernels import matmul_few

    cut, half = config.cut, config.dtype == torch.float16
    assert not (half and config.format == MXFP4.name)
    texts = matmul_few.texts(
        config.tokens8, FORMATS[config.format], half, config.whole, cut.stages, cut.num_warps
    )  # fmt: skip
    return {
        "TOKENS8": config.tokens8, "CHUNKS": cut.chunks, "STAGES": cut.stages, "SLOTS": cut.slots, "SPLIT": cut.split,
        "W_SCALES": config.w_scales, "X_SCALES": config.x_scales, "BIAS": config.bias is not None,
        "AFTER": config.after, "CLUSTER": config.tiles, **texts, "num_warps": cut.num_warps,
    }  # fmt: skip


@lru_cache(maxsize=512)
def launcher(config: Config) -> Callable[..., None]:
    """The kernel of a configuration, compiled at the first call and launched with little Python after that."""
    from triton.runtime import driver

    from ..kernels.matmul_few import matmul_few as kernel

    values = constants(config)
    like = torch.empty(64, dtype=config.dtype, device=config.device)
    fp32, words = like.view(torch.float32), like.view(torch.int32)
    bias = fp32 if config.bias is None else torch.empty(64, dtype=config.bias, device=config.device)
    numbers = (2,) * 8
    compiled = kernel.warmup(
        like, words, words, fp32, fp32, bias, like, fp32, words, *numbers, 1.5, **values, grid=(1,),
        launch_pdl=config.after,
    )  # fmt: skip
    compiled._init_handles()
    share_all_memory(compiled.function)
    index, run, function = config.device.index, compiled.run, compiled.function
    split = config.cut.split
    # Compiled for one program, launched as clusters of `split`: what the launcher takes the size of a cluster from.
    num_warps, _, shared = compiled.packed_metadata
    metadata = (num_warps, split if config.cut.cluster else 1, shared)
    across = 1 if config.cut.cluster else split
    constexprs = [values[name] for name in kernel.arg_names if name in values]
    stream_of = driver.active.get_current_stream

    def start(
        programs: int, x: Tensor, codes: Tensor, scales: Tensor, w_scale: Tensor | None, x_scale: Tensor | None,
        bias: Tensor | None, out: Tensor, *rest: Any,
    ) -> None:  # fmt: skip
        run(
            programs * across, 1, 1, stream_of(index), function, metadata, None, None, None, x, codes, scales, w_scale,
            x_scale, bias, out, *rest, *constexprs,
        )  # fmt: skip

    return start


def share_all_memory(function: int) -> None:
    from .gpu_launch import _share_all_memory

    _share_all_memory(function)
