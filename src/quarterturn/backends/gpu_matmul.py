"""Launches of the product for a few tokens (kernels/matmul_few.py): how it is cut, and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import FORMATS, MXFP4
from ..weight_layout import ROWS, SCALE_BLOCKS, Fragments
from . import capturing, gpu_device

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
    """What the kernel is compiled for. tiles: that a program in a cluster owns at most, or 0; w_scales, x_scales: 0, 1
    or 2, for none, one number, one a row."""

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
    *,
    after: bool = False,
    cut: Cut | None = None,
    tokens8: int | None = None,
    work: tuple[Tensor, Tensor] | None = None,
) -> None:
    """out (M, N) = x (M, K) @ weight^T * (x_scale * w_scale) + bias for M <= 16, on the GPU that all are on.

    x, out: bf16, or fp16 with an NVFP4 weight; contiguous, x 16-byte aligned. w_scale fp32 (1,) or (N,), x_scale fp32
    (1,) or (M,), bias (N,), or None. after: start while the kernel before still runs (capability 9.0 or more), which is
    right unless a kernel writes this weight that the host has not waited for (kept.wait_for_writes). tokens8: of 8
    tokens, how many the kernel has room for, 1 or 2; default by M. work: of `workspace`, for a caller that captures
    graphs.
    """
    m, k = x.shape
    if not m:
        return
    assert k == weight.k, (k, weight.k)
    assert m <= MOST_TOKENS, m
    count = gpu_device.multiprocessors(x.device)
    tiles, blocks, chunks = -(-weight.n // ROWS), weight.codes.shape[1], weight.scales.shape[1]
    cut = cut or cut_of(weight.n, k, m, count, gpu_device.capability(x.device))
    tokens8 = tokens8 or tokens8_of(m)
    programs, each, most = shares(tiles, cut, count)
    config = Config(
        x.device, cut, weight.format.name, x.dtype, None if bias is None else bias.dtype, tokens8,
        owned(most, cut) if cut.cluster else 0, blocks == SCALE_BLOCKS * room(cut), _kind(w_scale), _kind(x_scale),
        after,
    )  # fmt: skip
    with gpu_device.on_device(x.device):
        floats = floats_of(weight.n, 8 * tokens8, cut)
        partial, counts = work or workspace(x.device, floats)
        assert not floats or programs <= counts.numel(), (programs, counts.numel())
        launcher(config)(
            programs, x, weight.codes, weight.scales, w_scale, x_scale, bias, out, partial, counts, m, weight.n, k,
            tiles, blocks, chunks, each, tiles - programs * each, 2.0**weight.exponent,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def cut_of(n: int, k: int, m: int, count: int, capability: tuple[int, int]) -> Cut:
    """How a product (m, k) x (n, k)^T is cut on a GPU of `count` multiprocessors.

    Measured on an H200 (docs/notes.md); elsewhere the same, as far as shared memory reaches.
    """
    chunks, tiles, hopper = -(-k // 256), -(-n // ROWS), capability >= (9, 0)
    shared = shared_kib(capability)
    if m <= 8:
        if chunks > 16:
            split = -(-chunks // 32)
            cut = Cut(16, split, 2, 3 if split == 1 else 2, 4, 1, hopper and split == 2)
        elif chunks > 8:
            if tiles > 6 * count:
                cut = Cut(8, 1, 2, 4, 8, 2 if shared >= 227 else 1, False)
            else:
                cut = Cut(8, 1, 2, 2 if tiles <= 2 * count else 3, 4, 1, False)
        else:
            cut = Cut(8 if chunks > 4 else 4, 1, 1, 3, 4, 2, False)
    elif chunks > 16:
        split = -(-chunks // 16)
        cut = Cut(16, split, 1, 2, 4, 1, hopper and split == 2)
    elif chunks > 8:
        # Elsewhere K alone decides how it is added (gpu_product.py).
        short = capability[0] == 9 and tiles <= 4 * count
        cut = Cut(8, 1, 2, 2, 4, 1, False) if short else Cut(16, 1, 1, 2, 4, 1, False)
    else:
        cut = Cut(8 if chunks > 4 else 4, 1, 1, 2, 2, 2, False)
    return _fitting(cut, n, m, count, shared)


_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
"""KiB of shared memory that the programs of a multiprocessor can have, by capability."""
_SHARED_ELSEWHERE = 99


def shared_kib(capability: tuple[int, int]) -> int:
    return _SHARED.get(capability, _SHARED_ELSEWHERE)


def _fitting(cut: Cut, n: int, m: int, count: int, kib: int) -> Cut:
    """The cut with fewer slots, stages or programs where shared memory does not reach."""
    while shared_bytes(cut, n, m, count) > kib * 1024 // cut.programs - 1024:
        if cut.cluster:
            cut = cut._replace(cluster=False)
        elif cut.slots > 1:
            cut = cut._replace(slots=cut.slots // 2)
        elif cut.stages > 1:
            cut = cut._replace(stages=cut.stages - 1)
        else:
            assert cut.programs > 1
            cut = cut._replace(programs=1)
    return cut


def shared_bytes(cut: Cut, n: int, m: int, count: int) -> int:
    """Shared memory of a program."""
    threads, tokens8 = 32 * cut.num_warps, tokens8_of(m)
    sums, stages = 16 * threads * cut.slots * tokens8, 72 * threads * cut.stages
    if not cut.cluster:
        return sums + stages
    _, _, most = shares(-(-n // ROWS), cut, count)
    return sums + stages + 512 * cut.split * owned(most, cut) * tokens8


def shares(tiles: int, cut: Cut, count: int) -> tuple[int, int, int]:
    """Programs that tiles are shared out to (each with `split` parts of K), the fewest and the most tiles of one."""
    programs = min(max(count * cut.programs // cut.split, 1), tiles)
    return programs, tiles // programs, -(-tiles // programs)


def owned(most: int, cut: Cut) -> int:
    """Tiles of at most `most` that one of a cluster's programs adds; rounded up, so that few kernels are compiled."""
    each = -(-most // cut.split)
    return each if each <= 4 else -(-each // 4) * 4


def room(cut: Cut) -> int:
    """Chunks of K that a launch has room for."""
    return cut.num_warps * cut.split * cut.chunks


def tokens8_of(m: int) -> int:
    return 1 if m <= 8 else 2


def _kind(scale: Tensor | None) -> int:
    return 0 if scale is None else 1 if scale.numel() == 1 else 2


def power_of_two(x: int) -> int:
    """The smallest that is at least x."""
    return 1 << (x - 1).bit_length()


def floats_of(n: int, m: int, cut: Cut) -> int:
    """Sums that programs leave to each other in memory."""
    return cut.split * -(-n // ROWS) * tokens8_of(m) * 128 if cut.split > 1 and not cut.cluster else 0


def workspace(device: torch.device, floats: int) -> tuple[Tensor, Tensor]:
    """Memory for `floats` sums, and counts that are zero between launches.

    A stream keeps its own, since launches that run at the same time must not share one; a graph under capture has
    counters of its own (capturing.py).
    """
    if not floats:
        nothing = gpu_device.constant(0.0, device)  # an address that nothing reads
        return nothing, nothing
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(floats, dtype=torch.float32, device=device), capturing.counters(device)
    capturing.provide(device)
    return _kept_workspace(device, torch.cuda.current_stream(device).cuda_stream, power_of_two(max(floats, 1 << 18)))


@cache  # one that went could be in use
def _kept_workspace(device: torch.device, stream: int, floats: int) -> tuple[Tensor, Tensor]:
    def make() -> tuple[Tensor, Tensor]:
        counts = torch.zeros(capturing.counters_of(device), dtype=torch.int32, device=device)
        return torch.empty(floats, dtype=torch.float32, device=device), counts

    return capturing.lasting(device, make)


def constants(config: Config) -> dict[str, Any]:
    """The constexpr arguments of the kernel."""
    from ..kernels.matmul_few_ptx import texts

    cut, half = config.cut, config.dtype == torch.float16
    assert not (half and config.format == MXFP4.name), "e2m1 * 2^e has no place in fp16"
    return {
        "TOKENS8": config.tokens8, "CHUNKS": cut.chunks, "STAGES": cut.stages, "SLOTS": cut.slots, "SPLIT": cut.split,
        "W_SCALES": config.w_scales, "X_SCALES": config.x_scales, "BIAS": config.bias is not None,
        "AFTER": config.after, "CLUSTER": config.tiles,
        **texts(config.tokens8, FORMATS[config.format], half, config.whole, cut.stages, cut.num_warps),
        "num_warps": cut.num_warps,
    }  # fmt: skip


def _alone(programs: int, capability: tuple[int, int]) -> int:
    """Shared memory with which not one program more finds its place on a multiprocessor.

    Where launches overlap, programs of the one behind would take the places that are left, two on one multiprocessor
    and none where the rotation before them still runs: the slowest has twice the work.
    """
    return (shared_kib(capability) + 1) * 1024 // (programs + 1) - 1024 + 128


@lru_cache(maxsize=512)
def launcher(config: Config) -> Callable[..., None]:
    """The kernel of a configuration, compiled at the first call and launched with little Python after that."""
    from triton.runtime import driver

    from ..kernels.matmul_few import matmul_few as kernel

    values = constants(config)
    like = torch.empty(64, dtype=config.dtype, device=config.device)
    fp32, words = like.view(torch.float32), like.view(torch.int32)
    bias = fp32 if config.bias is None else torch.empty(64, dtype=config.bias, device=config.device)
    compiled = kernel.warmup(
        like, words, words, fp32, fp32, bias, like, fp32, words, 2, 2, 2, 2, 2, 2, 2, 2, 1.5, **values, grid=(1,),
        launch_pdl=config.after,
    )  # fmt: skip
    compiled._init_handles()
    index, run, function = config.device.index, compiled.run, compiled.function
    num_warps, _, shared = compiled.packed_metadata
    if config.after:
        shared = max(shared, _alone(config.cut.programs, gpu_device.capability(config.device)))
    gpu_device.share_all_memory(function, 1024 * shared_kib(gpu_device.capability(config.device)))
    # The kernel is one of a single program; launched as clusters of `split`, whose size the launcher takes from here.
    cluster, across = (config.cut.split, 1) if config.cut.cluster else (1, config.cut.split)
    metadata = (num_warps, cluster, shared)
    constexprs = [values[name] for name in kernel.arg_names if name in values]
    stream_of = driver.active.get_current_stream

    def start(programs: int, *args: Any) -> None:
        run(
            programs * across, 1, 1, stream_of(index), function, metadata, None, None, None, *args, *constexprs
        )  # fmt: skip

    return start
