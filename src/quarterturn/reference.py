"""The specification in code: float64 where the definition is exact, then fp32 step by step.

Slow on purpose, and independent: it imports the format constants and nothing else of the library. Every rounding goes
through a table of the representable numbers and a search, not through a cast, so that it cannot share a fault with the
backends. All fp32 steps are IEEE round-to-nearest, one operation at a time, in this order:

    z    = x @ T per block, float64, rounded once to fp32
    NVFP4 s = E4M3(min(encode * (amax * fp32(1/6)), 448));  r = 1 / (s * tensor_scale);  code = E2M1(z * r)
    MXFP4 s = 2^e by the rule;                              code = E2M1(z * 2^-e)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .formats import E2M1_VALUES, E4M3_MAX, E8M0_BIAS, E8M0_NAN, INV6, FP4Format, get_format

_FP32_MAX = torch.finfo(torch.float32).max
_E2M1_MAGNITUDES = torch.tensor(E2M1_VALUES[:8], dtype=torch.float64, device="cpu")


def e2m1_decode(codes: Tensor) -> Tensor:
    """Codes 0..15 -> float64 values."""
    return torch.tensor(E2M1_VALUES, dtype=torch.float64, device=codes.device)[codes.long()]


def e2m1_encode(values: Tensor) -> Tensor:
    """Finite values -> codes 0..15 (uint8): to nearest, a tie to the even code, saturating at 6; -0 keeps its sign."""
    v = values.to(torch.float64)
    magnitude = _nearest_even(v.abs(), _E2M1_MAGNITUDES)
    return (magnitude + 8 * torch.signbit(v)).to(torch.uint8)


def e4m3_decode(byte: Tensor) -> Tensor:
    """E4M3 bytes -> float64; 0x7F and 0xFF are NaN."""
    b = byte.long()
    exponent, mantissa = (b >> 3) & 15, (b & 7).double()
    normal = (1 + mantissa / 8) * _power_of_two(exponent - 7)
    value = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    value = torch.where((b & 0x7F) == 0x7F, torch.full_like(value, math.nan), value)
    return torch.where(b >= 128, -value, value)


def e4m3_encode(values: Tensor) -> Tensor:
    """Non-negative finite values -> E4M3 bytes (uint8): to nearest, ties to even, clamped to 448 (0x7E) first."""
    clamped = values.to(torch.float64).clamp(max=E4M3_MAX)
    return _nearest_even(clamped, e4m3_decode(torch.arange(0x7F, device=values.device))).to(torch.uint8)


def e8m0_decode(byte: Tensor) -> Tensor:
    """E8M0 bytes -> float64 powers of two; 255 is NaN."""
    value = _power_of_two(byte.long() - E8M0_BIAS)
    return torch.where(byte == E8M0_NAN, torch.full_like(value, math.nan), value)


def e8m0_encode(amax: Tensor, rule: str = "even") -> Tensor:
    """Finite group maxima (fp32) -> E8M0 bytes by a rule of E8M0_RULES; 0 gives byte 0."""
    a = amax.to(torch.float64)
    if rule == "even":
        # The mantissa of amax rounds to one bit, half up: from 1.75 on it is the next power of two.
        exponent = _floor_log2(a) + (a >= 1.75 * _power_of_two(_floor_log2(a))) - 2
    elif rule == "floor":
        exponent = _floor_log2(a) - 2
    elif rule == "ceil":
        exponent = _ceil_log2(a) - 2
    elif rule == "rceil":
        # amax / 6 = (amax / 3) / 2, and a power of two divided by 3 is never one, so the quotient is compared exactly.
        exponent = _ceil_log2_of_sixth(a)
    else:
        raise ValueError(f"no such E8M0 rule: {rule}")
    byte = exponent.clamp(-E8M0_BIAS, 127) + E8M0_BIAS
    return torch.where(a == 0, torch.zeros_like(byte), byte).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Codes (..., K) -> bytes (..., K/2), the even element in the low nibble."""
    return (codes[..., ::2].int() + 16 * codes[..., 1::2].int()).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Bytes (..., K/2) -> codes (..., K)."""
    both = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.uint8, device=packed.device)
    both[..., ::2] = packed % 16
    both[..., 1::2] = packed // 16
    return both


def swizzle(scales: Tensor) -> Tensor:
    """Scale bytes (rows, cols) -> the flat 128x4 layout, padded with zeros, address by address (docs/numerics.md)."""
    rows, cols = scales.shape
    tile_cols = -(-cols // 4)
    flat = torch.zeros(-(-rows // 128) * 128 * tile_cols * 4, dtype=torch.uint8, device=scales.device)
    for r in range(rows):
        for c in range(cols):
            at = ((r // 128) * tile_cols + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            flat[at] = scales[r, c]
    return flat


def rotate(x: Tensor, matrix: Tensor, factor: float = 1.0, transpose: bool = False) -> Tensor:
    """x (..., K) -> float64 (..., K): every block of R times factor * matrix (or its transpose).

    The matrix is rounded once to fp32 and the factor to fp32, as a backend receives them.
    """
    block = matrix.float().double() * torch.tensor(factor, dtype=torch.float32, device="cpu").double()
    if transpose:
        block = block.T
    blocks = x.to(torch.float64).reshape(*x.shape[:-1], -1, block.shape[0])
    # A sum that is zero is +0, whatever the signs of its terms.
    return (blocks @ block + 0.0).reshape(x.shape)


def encode_scales(
    z: Tensor, format: FP4Format, encode_scale: Tensor | float | None, recipe: str
) -> tuple[Tensor, Tensor]:
    """The fp32 encode scale of each row, (M, 1), and the tensor scale, (1,) or (M,) for recipe 'token'."""
    rows = z.shape[0]
    if not format.has_tensor_scale:
        encode = torch.full((1, 1), 3.0 if recipe == "qutlass" else 1.0, dtype=torch.float32, device=z.device)
        return encode.expand(rows, 1), (1.0 / encode).view(1)
    if recipe == "token":
        amax = z.abs().amax(1, keepdim=True) if z.shape[1] else z.sum(1, keepdim=True)
        encode = torch.full_like(amax, 2688.0) / amax
        encode = torch.where(torch.isfinite(encode), encode, torch.ones_like(encode))
        return encode, (1.0 / encode).view(-1)
    value = 6.0 if recipe == "qutlass" else encode_scale
    if value is None:
        raise ValueError("recipe 'checkpoint' needs an encode scale")
    encode = torch.as_tensor(value, dtype=torch.float32, device=z.device).reshape(1, 1)
    return encode.expand(rows, 1), (1.0 / encode).view(1)


def quantize(
    z: Tensor,
    format: str | FP4Format,
    encode_scale: Tensor | float | None = None,
    rule: str = "even",
    recipe: str = "checkpoint",
) -> tuple[Tensor, Tensor]:
    """z fp32 (M, K) -> packed codes uint8 (M, K/2) and scale bytes uint8 (M, K/group_size)."""
    fmt = get_format(format)
    m, k = z.shape
    groups = z.float().reshape(m, k // fmt.group_size, fmt.group_size)
    amax = groups.abs().amax(-1) if groups.numel() else groups.sum(-1)
    bad = ~torch.isfinite(groups).all(-1)
    amax = torch.where(bad, torch.zeros_like(amax), amax)
    if not fmt.has_e8m0_scale:
        encode, tensor_scale = encode_scales(z.float(), fmt, encode_scale, recipe)
        scale = e4m3_encode(torch.clamp(encode * (amax * INV6), max=E4M3_MAX))
        decoded = e4m3_decode(scale).float()
        product = decoded * tensor_scale.view(-1, 1)
        # The clamp only matters where 1/product overflows: 0 * Inf would be NaN, and 0 must stay 0.
        reciprocal = torch.where(decoded == 0, torch.zeros_like(product), 1.0 / product).clamp(max=_FP32_MAX)
        scaled = (groups * reciprocal.unsqueeze(-1)).double()
        empty = decoded == 0
    else:
        # QuTLASS's scale is 2^floor(log2 amax), four times the FLOOR rule's, and its codes are of 3z/s.
        qutlass = recipe == "qutlass"
        scale = e8m0_encode(amax.double() * 4 if qutlass else amax, "floor" if qutlass else rule)
        # Dividing by a power of two in float64 is exact, subnormals included.
        scaled = groups.double() / e8m0_decode(scale).unsqueeze(-1)
        scaled = (scaled.float() * 3.0).double() if qutlass else scaled
        empty = amax == 0
    codes = e2m1_encode(torch.where((bad | empty).unsqueeze(-1), torch.zeros_like(scaled), scaled))
    scale = torch.where(bad, torch.full_like(scale, fmt.nan_byte), scale)
    return pack(codes.reshape(m, k)), scale


def rotate_quantize(
    x: Tensor,
    matrix: Tensor | None = None,
    factor: float = 1.0,
    transpose: bool = False,
    *,
    format: str | FP4Format,
    encode_scale: Tensor | float | None = None,
    recipe: str = "checkpoint",
    rule: str = "even",
) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K) -> packed codes, scale bytes, and the fp32 tensor scale ((1,), or (M,) for recipe 'token')."""
    fmt = get_format(format)
    z = x.float() if matrix is None else rotate(x, matrix, factor, transpose).float()
    codes, scale = quantize(z, fmt, encode_scale, rule, recipe)
    return codes, scale, encode_scales(z, fmt, encode_scale, recipe)[1]


def dequantize(codes: Tensor, scale: Tensor, tensor_scale: Tensor | float, format: str | FP4Format) -> Tensor:
    """Packed codes (M, K/2), scale bytes (M, K/g), tensor scale (one, or one a row) -> float64 (M, K)."""
    fmt = get_format(format)
    decoded = e8m0_decode(scale) if fmt.has_e8m0_scale else e4m3_decode(scale)
    values = e2m1_decode(unpack(codes)) * decoded.repeat_interleave(fmt.group_size, dim=1)
    return values * torch.as_tensor(tensor_scale, device=values.device).double().reshape(-1, 1)


def linear(
    x: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    w_tensor_scale: Tensor,
    output_sizes: tuple[int, ...] | list[int],
    *,
    format: str | FP4Format,
    activations: str = "fp4",
    encode_scale: Tensor | float | None = None,
    bias: Tensor | None = None,
    input_transform: tuple[Tensor, float, bool] | None = None,
    output_transform: tuple[Tensor, float, bool] | None = None,
    recipe: str = "checkpoint",
    rule: str = "even",
) -> Tensor:
    """A whole layer in float64, x (M, K) -> (M, N): transform, quantize or round z to x.dtype, product, bias, turn."""
    fmt = get_format(format)
    if activations == "fp4":
        transform = input_transform or (None, 1.0, False)
        quantized = rotate_quantize(x, *transform, format=fmt, encode_scale=encode_scale, recipe=recipe, rule=rule)
        operand = dequantize(*quantized, fmt)
    else:
        operand = (rotate(x, *input_transform).to(x.dtype) if input_transform else x).double()
    row_scale = (
        w_tensor_scale.reshape(-1).double().repeat_interleave(torch.tensor(output_sizes, device=w_tensor_scale.device))
    )
    y = operand @ dequantize(w_codes, w_scale, row_scale, fmt).T
    if bias is not None:
        y = y + bias.double()
    return rotate(y, *output_transform) if output_transform else y


def _nearest_even(values: Tensor, table: Tensor) -> Tensor:
    """Index of the entry of an ascending table nearest to each value; of two as near, the even index."""
    # Beyond the table both neighbours would be as far in float64, so what lies there is brought to its end first.
    values = values.clamp(max=float(table[-1]))
    above = torch.searchsorted(table, values).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = (table[above] - values).abs(), (values - table[below]).abs()
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return torch.where(take_above, above, below)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64 for integers from -1022 to 1023, by its bits: not every pow is exact."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _floor_log2(a: Tensor) -> Tensor:
    """floor(log2 a) of positive float64 numbers, exact, from the exponent."""
    return torch.frexp(a).exponent - 1


def _ceil_log2(a: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(a)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def _ceil_log2_of_sixth(a: Tensor) -> Tensor:
    """The least e with 6 * 2^e >= a, exact in float64 for fp32 a."""
    e = _floor_log2(a) - 3
    for _ in range(3):
        e = torch.where(6.0 * _power_of_two(e) < a, e + 1, e)
    return e
