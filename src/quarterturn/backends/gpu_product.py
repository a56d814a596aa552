"""The product on NVIDIA GPUs with weights in fragments: which kernel runs, by the number of rows, and its arguments.

| rows of x                  | runs                                                                         |
|----------------------------|------------------------------------------------------------------------------|
| up to 16                   | gpu_matmul.few: mma.sync, on any GPU of capability 8.0 or more               |
| more, on Hopper            | gpu_matmul_many.many: wgmma                                                  |
| more, elsewhere            | gpu_matmul_many.by_library: slices of decoded weights, the library's product |
| a result of another dtype  | by_library                                                                   |
| fp32, or fp16 with MXFP4   | any_torch, of the codes and scales made again from the fragments             |

How a product is cut, the table of the device says (gpu_tuned.py), or a formula where it says nothing.

Batch-invariant products take one way for every number of rows, so that a row's sums are always added in one order:

| on              | runs                                                                                       |
|---|---|
| Hopper          | many with x in order and K in parts that follow from K alone, which programs add up where  |
|                 | all run at once, and a program by itself where there are too many: the same sums. Its tiles |
|                 | still follow the rows: each adds K by wgmma, m64nNk16, into one accumulator, whatever N is |
| 8.x, 12.x       | few, by 16 rows of x, with the cut for 16: what decides how sums are added (the warps, the |
|                 | parts and the chunks of K) follows from K alone                                            |

Neither depends on N, so siblings in one product have the bits that each has alone. That wgmma adds alike for every N is
no promise of the hardware: tests/test_batch_invariant_device.py compares the bits on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import weight_layout
from ..formats import FP4Format
from ..tensor import FP4Tensor, per_output
from ..weight_layout import Fragments
from . import any_torch, capturing, gpu_device, gpu_pieces
from .gpu_matmul import MOST_TOKENS, cut_of, few
from .gpu_matmul_many import Workspace, by_library, invariant_cut, many, workspace
from .gpu_tuned import few_cut, many_cut
from .protocol import Problem, Weight


def runs_on(device: torch.device) -> bool:
    """Whether weights can be kept in fragments there: capability 8.0, and the Triton that the kernels were run with."""
    if device.type != "cuda" or gpu_device.triton_version() not in gpu_device.HOPPER_TRITON:
        return False
    return gpu_device.capability(device) >= (8, 0) and torch.version.hip is None


def prepare(weight: FP4Tensor) -> Tensor | None:
    """int32 (N, weight_layout.stored_width), of codes, scales and the factor of each row; None for a weight that has
    no such form: a negative block scale, or MXFP4 scales above 2^9."""
    scales = weight.linear_block_scale()
    if weight.format.has_tensor_scale and bool((scales.view(torch.uint8) > 0x7F).any()):
        return None
    n, _ = weight.shape
    fragments = weight_layout.forward(weight.codes, scales, weight.format)
    alpha = per_output(weight.tensor_scale, weight.output_sizes) * 2.0**weight_layout.STORED_EXPONENT
    made = weight_layout.stored(fragments, alpha.expand(n))
    if made is not None and made.is_cuda:
        torch.cuda.current_stream(made.device).synchronize()  # kernels ask for weights before others have ended
    return made


INVARIANT = (8, 9, 12)
"""Major capabilities where a batch-invariant product is known: of the others, 10.x rotates few rows and many by
different matrix units."""


def varies(problem: Problem) -> list[str]:
    """Reasons why there is no batch-invariant product for a layer on a GPU."""
    reasons, found, triton = [], problem.capability, gpu_device.triton_version()
    if found is None or found[0] not in INVARIANT:
        there = "none" if found is None else f"{found[0]}.{found[1]}"
        reasons.append(f"needs a GPU of capability 8.x, 9.0 or 12.x for batch_invariant, found {there}")
    if triton not in gpu_device.HOPPER_TRITON:
        there = "none" if triton is None else ".".join(map(str, triton))
        reasons.append(f"needs Triton 3.6 for weights in fragments, as batch_invariant does, found {there}")
    if problem.dtype == torch.float32 or (problem.dtype == torch.float16 and problem.format.has_e8m0_scale):
        short = str(problem.dtype).removeprefix("torch.")
        reasons.append(f"needs bfloat16, or float16 with NVFP4, for batch_invariant, found {short}: convert the model")
    if problem.output_size is not None:
        reasons.append(f"needs no output transform for batch_invariant, found one of {problem.output_size}")
    return reasons


def takes_order(x: Tensor, fmt: FP4Format, invariant: bool = False) -> bool:
    """Whether the product of x (M, K) and weights of a format is one that takes x in the order of fragments."""
    of_values = x.dtype == torch.bfloat16 or (x.dtype == torch.float16 and not fmt.has_e8m0_scale)
    return x.is_cuda and _hopper(x) and of_values and (invariant or x.shape[0] > MOST_TOKENS)


def fills(device: torch.device, m: int, n: int) -> bool:
    """Whether a product of m rows and n outputs keeps a device busy for several rounds of tiles: one of more outputs
    then takes no less time for each."""
    return m * n >= _FILLED and m * n >= _ROUNDS * _TILE * gpu_device.multiprocessors(device)


_ROUNDS = 4
_TILE = 128 * 256
_FILLED = 32 * _ROUNDS * _TILE
"""Less fills no GPU of 32 multiprocessors or more: looked at first, since few rows count microseconds."""


def matmul(
    x: Tensor,
    x_tensor_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    ordered: bool = False,
    invariant: bool = False,
) -> Tensor:
    """x (M, K) values times a weight that `prepare` made -> (M, N) of out_dtype. ordered: see takes_order. invariant:
    batch-invariant, of what `varies` has no reason against."""
    fmt, (m, k), n = weight.format, x.shape, weight.n
    assert not invariant or (out_dtype == x.dtype != torch.float32)
    fragments, alpha = weight_layout.from_stored(weight.data, k, fmt, weight.rows)
    if x.dtype == torch.float32 or (x.dtype == torch.float16 and fmt.has_e8m0_scale):
        codes, scales = weight_layout.inverse(fragments)
        scale, sizes = ranges(weight)
        packed = Weight(codes, scales.view(torch.uint8), scale, sizes, fmt)
        return any_torch.matmul(x, None, x_tensor_scale, packed, bias, out_dtype)
    out = torch.empty(m, n, dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    if gpu_pieces.is_capturing(x):
        _CAPTURED[weight.data] = True
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    with gpu_device.on_device(x.device):
        if invariant and not _hopper(x):
            return _few_by_few(x, fragments, alpha, x_tensor_scale, bias, out)
        if out_dtype == x.dtype and m <= MOST_TOKENS and not invariant:
            part, found = replace(fragments, exponent=0), few_cut(x.device, m, n, k)
            few(x, part, alpha, x_tensor_scale, bias, out, after=_hopper(x), cut=found)
            return out
        scale = gpu_device.constant(1.0, x.device) if x_tensor_scale is None else x_tensor_scale.view(-1)
        bias = None if bias is None else bias.float()
        if out_dtype == x.dtype and _hopper(x):
            chosen = None if invariant else many_cut(x.device, m, n, k)
            if invariant:
                chosen = invariant_cut(m, n, k, gpu_device.multiprocessors(x.device))
            elif chosen is not None:
                chosen = chosen._replace(natural=chosen.natural and not ordered)
            return many(x, fragments, alpha, scale, bias, _space(x.device), out, ordered, chosen)
        assert not ordered
        return by_library(x, fragments, alpha, scale, bias, out)


def _few_by_few(
    x: Tensor, fragments: Fragments, alpha: Tensor, x_scale: Tensor | None, bias: Tensor | None, out: Tensor
) -> Tensor:
    """The product for a few tokens, 16 by 16, cut in the same way however many there are."""
    (m, k), part = x.shape, replace(fragments, exponent=0)
    device = x.device
    chosen = cut_of(part.n, k, MOST_TOKENS, gpu_device.multiprocessors(device), gpu_device.capability(device))
    for start in range(0, m, MOST_TOKENS):
        rows = slice(start, start + MOST_TOKENS)
        scale = x_scale if x_scale is None or x_scale.numel() == 1 else x_scale.view(-1)[rows]
        few(x[rows], part, alpha, scale, bias, out[rows], cut=chosen, tokens8=2)
    return out


def is_captured(data: Tensor) -> bool:
    """Whether a CUDA graph may read this weight, which must then stay where it is."""
    return data in _CAPTURED


_CAPTURED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def ranges(weight: Weight) -> tuple[Tensor, tuple[int, ...]]:
    """Tensor scales and sizes of the output ranges that the weight's rows are in."""
    if weight.rows is None:
        return weight.tensor_scale, weight.output_sizes
    ends = list(accumulate(weight.output_sizes))
    first, last = weight.rows[0], sum(weight.rows)
    inside = [min(end, last) - max(end - size, first) for end, size in zip(ends, weight.output_sizes, strict=True)]
    kept = [i for i, size in enumerate(inside) if size > 0]
    return weight.tensor_scale[kept[0] : kept[-1] + 1], tuple(inside[i] for i in kept)


def _hopper(x: Tensor) -> bool:
    return gpu_device.capability(x.device)[0] == 9


def _space(device: torch.device) -> Workspace:
    """Of the current stream; a graph under capture has counters of its own (capturing.py)."""
    if torch.cuda.is_current_stream_capturing():
        return workspace(device, capturing.counters(device))
    capturing.provide(device)
    return _kept_space(device, torch.cuda.current_stream(device).cuda_stream)


@cache  # one that went could be in use
def _kept_space(device: torch.device, stream: int) -> Workspace:
    return capturing.lasting(device, lambda: workspace(device))
