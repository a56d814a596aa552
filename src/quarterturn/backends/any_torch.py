"""Plain PyTorch, on every device that PyTorch runs on.

| needs     | nothing but torch |
| provides  | every op, format, rule, recipe, dtype and size; W4A4 and W4A16, bias, transforms on both sides |
| does not  | fuse: each step passes over memory, so it is the slowest way |
| run on    | CPU (x86-64), NVIDIA H200 |

z is computed in float64 and rounded to fp32, as the specification says it, so its bits do not depend on the order of a
library's sums in any but about one case in 2^29. A row's bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..formats import E4M3_MAX, E8M0_NAN, INV6
from ..layouts import get_layout, pack_nibbles
from ..rounding import e2m1_codes, e2m1_values, e8m0_bytes
from ..tensor import FP4Tensor, decode_block_scale, decode_codes
from .compose import epilogue
from .factors import WIDE, factors_of
from .protocol import Blocks, Problem, Quantizer, Weight

NAME = "any_torch"
CHUNK = 1 << 18
"""Elements of x that are quantized at a time: the fp32 intermediates of one chunk stay in a core's cache."""
SCRATCH = 1 << 22
"""Weights that are decoded at a time when they are kept packed: 16 MB of fp32."""
Turn = Callable[[Tensor], Tensor]


def missing(device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
    """Nothing: torch is what the library is made of."""
    return []


def refuses(problem: Problem) -> list[str]:
    """Nothing that `ops` lets through."""
    return []


def prepare(weight: FP4Tensor, mode: str) -> Tensor | None:
    """bf16 values (N, K), e2m1 * block_scale, exact; None where the weight stays packed.

    mode 'auto' decodes while a fifth of the device's memory stays free: to decode at every call is many times slower.
    """
    n, k = weight.shape
    wanted = mode == "decoded" or (mode == "auto" and _leaves_room(weight.device, 2 * n * k))
    return weight.values(torch.bfloat16) if wanted else None


def _leaves_room(device: torch.device, nbytes: int) -> bool:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free - nbytes > total / 5
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True  # only Linux tells; elsewhere the system pages
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kib["MemAvailable"] * 1024 - nbytes > kib["MemTotal"] * 1024 / 5


def rotate(x: Tensor, blocks: Blocks, out_dtype: torch.dtype) -> Tensor:
    """x (M, K) @ V per block in float64, rounded to fp32, then to out_dtype."""
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    turn = _turn(blocks)
    for rows in _chunks(x):
        out[rows] = turn(x[rows])
    return out


def rotate_quantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, scale_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K) -> packed codes (M, K/2), block scales in the layout, tensor scale (1,) or (M,)."""
    m, k = x.shape
    fmt = quantizer.format
    codes = torch.empty(fmt.codes_shape(m, k), dtype=torch.uint8, device=x.device)
    scale = torch.empty(fmt.scale_shape(m, k), dtype=torch.uint8, device=x.device)
    turn = _turn(blocks)
    tensor_scales = []
    for rows in _chunks(x):
        z = turn(x[rows])
        encode, tensor_scale = _encode(z, quantizer)
        tensor_scales.append(tensor_scale)
        scaled, scale[rows], _ = _scaled(z, quantizer, encode, tensor_scale)
        codes[rows] = pack_nibbles(e2m1_codes(scaled)).view(-1, k // 2)
    stored = get_layout(scale_layout).forward(scale) if scale_layout != "linear" else scale
    return codes, stored, _tensor_scale(tensor_scales, x, quantizer)


def rotate_quantize_dequantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x (M, K) -> e2m1 * block_scale (M, K) of out_dtype, exact, and the tensor scale (1,) or (M,)."""
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    turn = _turn(blocks)
    tensor_scales = []
    for rows in _chunks(x):
        z = turn(x[rows])
        encode, tensor_scale = _encode(z, quantizer)
        tensor_scales.append(tensor_scale)
        scaled, _, scale = _scaled(z, quantizer, encode, tensor_scale)
        out[rows] = (e2m1_values(scaled) * scale.unsqueeze(-1)).view(z.shape)
    return out, _tensor_scale(tensor_scales, x, quantizer)


def matmul(
    x: Tensor,
    x_block_scale: Tensor | None,
    x_tensor_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """(M, K) x (N, K)^T -> (M, N); packed weights are decoded slice by slice, never as a whole."""
    assert weight.data.dtype != torch.int32, "fragments are gpu_triton's to multiply"
    if x_block_scale is not None:
        x = decode_codes(x, decode_block_scale(x_block_scale, weight.format), weight.format.group_size, torch.float32)
    n, k = weight.data.shape[0], x.shape[1]
    acc = torch.empty(x.shape[0], n, dtype=torch.float32, device=x.device)
    dtype = product_dtype(x, weight)
    x = dense(x.to(dtype))
    step = n if weight.block_scale is None else max(1, min(n, SCRATCH // max(k, 1)))
    with _no_tf32(x):
        for start in range(0, n, step):
            rows = slice(start, start + step)
            _product(x, _values(weight, rows, dtype), acc[:, rows])
    return epilogue(acc, x_tensor_scale, weight, bias, out_dtype)


def product_dtype(x: Tensor, weight: Weight) -> torch.dtype:
    """The dtype of the operands of a product: exact for the operands, and the fastest the device has for it.

    On GPUs bf16 and fp16 products keep their sums in fp32. On CPUs a bf16 product rounds its sum to bf16, before the
    tensor scale, which may move a result by one bf16 ulp; it is used where the CPU has instructions for it, and is
    slower than fp32 where it has none.
    """
    if x.dtype == torch.float32 or (x.dtype == torch.float16 and not weight.format.has_tensor_scale):
        return torch.float32
    if x.device.type == "cuda":
        return x.dtype
    return torch.bfloat16 if x.dtype == torch.bfloat16 and cpu_has_bf16() else torch.float32


@lru_cache(maxsize=1)
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in instructions of its own (AVX512-BF16 or AMX)."""
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, question, bool)()) for question in questions)


def _values(weight: Weight, rows: slice, dtype: torch.dtype) -> Tensor:
    data = weight.data[rows]
    if weight.block_scale is None:
        return data.to(dtype)
    scale = decode_block_scale(weight.block_scale[rows], weight.format)
    return decode_codes(data, scale, weight.format.group_size, dtype)


def dense(x: Tensor) -> Tensor:
    """x (M, K) with its rows one behind the other: a bf16 product of a CPU's library reads what stands between them."""
    apart = x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.stride(0) != x.shape[1]
    return x.clone(memory_format=torch.contiguous_format) if apart else x


def _product(x: Tensor, values: Tensor, out: Tensor) -> None:
    if x.is_cuda and x.dtype != torch.float32:
        out.copy_(torch.mm(x, values.T, out_dtype=torch.float32))
    else:
        out.copy_(x @ values.T)


def _no_tf32(x: Tensor) -> AbstractContextManager[object]:
    """fp32 products stay fp32 on a GPU, whatever the process has set."""
    return _Fp32Products() if x.is_cuda and x.dtype == torch.float32 else nullcontext()


class _Fp32Products:
    """Switches TF32 off for its body."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *exc: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before


def _chunks(x: Tensor) -> list[slice]:
    step = max(1, CHUNK // max(x.shape[1], 1)) if x.device.type == "cpu" else max(1, x.shape[0])
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]


def _turn(blocks: Blocks | None) -> Turn:
    """A rotation in float64: of rows (m, K) -> z, fp32 (m, K)."""
    if blocks is None:
        return lambda x: x.float()
    factor = float(torch.tensor(blocks.factor, dtype=torch.float32, device="cpu"))
    factors = factors_of(blocks.matrix) if blocks.matrix.shape[0] >= WIDE else None
    if factors is not None:
        factors = factors.transposed() if blocks.transpose else factors
        return lambda x: factors.rotate(x, factor).float()
    matrix = blocks.matrix.float().double()  # rounded to fp32, once
    block = (matrix.T if blocks.transpose else matrix) * factor
    # A sum that is zero is +0, whatever the signs of its terms.
    return lambda x: (x.double().reshape(-1, len(block)) @ block).add_(0.0).float().view(x.shape)


def _encode(z: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """encode and tensor scale, each (1, 1) or (m, 1), of a chunk of rows."""
    if not quantizer.format.has_tensor_scale:
        encode = torch.full((1, 1), 3.0 if quantizer.recipe == "qutlass" else 1.0, dtype=torch.float32, device=z.device)
        return encode, encode.reciprocal()
    if quantizer.recipe == "token":
        amax = z.abs().amax(1, keepdim=True) if z.shape[1] else z.sum(1, keepdim=True)
        encode = torch.full_like(amax, 2688.0) / amax
        encode = torch.where(encode.isfinite(), encode, 1.0)
    elif quantizer.recipe == "qutlass":
        encode = torch.full((1, 1), 6.0, dtype=torch.float32, device=z.device)
    else:
        assert quantizer.encode_scale is not None
        encode = quantizer.encode_scale.view(1, 1)
    return encode, encode.reciprocal()


def _tensor_scale(parts: list[Tensor], x: Tensor, quantizer: Quantizer) -> Tensor:
    if quantizer.per_row:
        return torch.cat(parts).view(-1) if parts else torch.empty(0, dtype=torch.float32, device=x.device)
    return _encode(x[:0].float(), quantizer)[1].view(1)


def _scaled(z: Tensor, quantizer: Quantizer, encode: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z (m, K) -> values to round (m, G, g), scale bytes (m, G), decoded scales fp32 (m, G)."""
    fmt = quantizer.format
    groups = z.view(z.shape[0], -1, fmt.group_size)
    amax = groups.abs().amax(-1)
    if fmt.has_tensor_scale:
        # A NaN or Inf in the group makes the scale NaN here: clamp keeps NaN, and Inf is made NaN before it.
        ideal = (encode * (amax * INV6)).masked_fill_(~amax.isfinite(), float("nan"))
        stored = ideal.clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
        scale = stored.float()
        reciprocal = (scale * tensor_scale).reciprocal_().clamp_(max=torch.finfo(torch.float32).max)
        reciprocal.masked_fill_(scale == 0, 0.0)
        scaled = groups * reciprocal.unsqueeze(-1)
        empty = ~(scale > 0)
        byte = stored.view(torch.uint8)
    else:
        byte = e8m0_bytes(amax, quantizer.recipe if quantizer.recipe == "qutlass" else quantizer.rule)
        scale = decode_block_scale(byte, fmt)
        # 2^-e of the largest e is subnormal but exact, and z * 2^-e never loses a bit that rounding would see.
        scaled = (groups.double() / scale.double().unsqueeze(-1)).float()
        if quantizer.recipe == "qutlass":
            scaled = scaled.mul_(encode)
        empty = ~(amax > 0) | (byte == E8M0_NAN)
    return scaled.masked_fill_(empty.unsqueeze(-1), 0.0), byte, scale
