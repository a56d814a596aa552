"""The numeric definition written a second time, in numpy, from its text and sharing no line with the library.

Every expected value of the tests comes from here, from a literal, or from `quarterturn.reference` once the tests of
the reference have compared it with this file. Slow and plain on purpose.
"""

from __future__ import annotations

import numpy as np
import torch

GROUP = {"nvfp4": 16, "mxfp4": 32}
RULES = ("even", "floor", "ceil", "rceil")

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# 4 exponent bits with bias 7, 3 mantissa bits, no infinity: 0x7E is 448 and 0x7F is NaN.
_E4M3_HALF = [(b & 7) * 2.0**-9 if b < 8 else (1 + (b & 7) / 8) * 2.0 ** ((b >> 3) - 7) for b in range(127)] + [np.nan]
E4M3 = np.array(_E4M3_HALF + [-v for v in _E4M3_HALF])
E8M0 = np.array([2.0 ** (b - 127) for b in range(255)] + [np.nan])

ONE_SIXTH = np.array([0x3E2AAAAB], dtype=np.uint32).view(np.float32)[0]


def numpy(t: torch.Tensor) -> np.ndarray:
    """A torch tensor as numpy; bf16 as float32 (exact), float8 as its bytes."""
    t = t.detach().cpu()
    if t.dtype == torch.float8_e4m3fn:
        return t.view(torch.uint8).numpy()
    return t.float().numpy() if t.dtype == torch.bfloat16 else t.numpy()


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an ascending table; a tie goes to the even index, beyond the end to the last."""
    high = np.clip(np.searchsorted(table, values), 1, len(table) - 1)
    low = high - 1
    middle = (table[low] + table[high]) / 2
    up = (values > middle) | ((values == middle) & (high % 2 == 0))
    return np.where(up, high, low).astype(np.uint8)


def e2m1_codes(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    return nearest(np.abs(values), E2M1[:8]) | (np.signbit(values).astype(np.uint8) << 3)


def e4m3_bytes(values: np.ndarray) -> np.ndarray:
    return nearest(np.asarray(values, dtype=np.float64), E4M3[:127])


def e8m0_exponents(amax: np.ndarray, rule: str) -> np.ndarray:
    """The exponent of a positive amax, from its exact mantissa in [1, 2) and exponent; never through a logarithm."""
    half, up = np.frexp(np.asarray(amax, dtype=np.float64))
    mantissa, floor = half * 2, up - 1
    step_up = {
        "floor": np.zeros_like(mantissa, dtype=bool),
        "ceil": mantissa > 1,
        "rceil": mantissa > 1.5,  # amax > 6 * 2^(floor - 2)
        "even": mantissa >= 1.75,
    }[rule]
    return np.clip(floor - 2 + step_up, -127, 127)


def quantize(z: np.ndarray, name: str, encode: object = 1.0, rule: str = "even") -> tuple[np.ndarray, np.ndarray]:
    """float32 (M, K) -> codes (M, K), one a byte, and scale bytes (M, K / group). `encode` is a number or (M, 1)."""
    z = np.asarray(z, dtype=np.float32)
    groups = z.reshape(z.shape[0], -1, GROUP[name])
    finite = np.isfinite(groups).all(axis=-1)
    groups = np.where(finite[..., None], groups, np.float32(0))
    amax = np.abs(groups).max(axis=-1, initial=0)
    if name == "nvfp4":
        encode = np.asarray(encode, dtype=np.float32)
        tensor_scale = np.float32(1) / encode
        with np.errstate(over="ignore", divide="ignore"):
            scale = e4m3_bytes(np.minimum(encode * (amax * ONE_SIXTH), np.float32(448)))
            step = E4M3[scale].astype(np.float32) * tensor_scale
            inverse = np.where(scale == 0, np.float32(0), np.float32(1) / step)
            codes = e2m1_codes(groups * inverse[..., None])
        codes = np.where((scale == 0)[..., None], 0, codes)
    else:
        exponent = np.where(amax > 0, e8m0_exponents(np.where(amax > 0, amax, 1), rule), -127)
        scale = (exponent + 127).astype(np.uint8)
        codes = e2m1_codes(groups.astype(np.float64) * 2.0 ** -exponent[..., None].astype(np.float64))
        codes = np.where((amax == 0)[..., None], 0, codes)
    scale = np.where(finite, scale, 0x7F if name == "nvfp4" else 255)
    codes = np.where(finite[..., None], codes, 0)
    return codes.reshape(z.shape).astype(np.uint8), scale.astype(np.uint8)


def pack(codes: np.ndarray) -> np.ndarray:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def values(packed: np.ndarray, scale: np.ndarray, name: str) -> np.ndarray:
    """e2m1(code) * block_scale in float64 (exact), without the tensor scale."""
    table = E4M3 if name == "nvfp4" else E8M0
    return E2M1[unpack(packed)] * np.repeat(table[scale], GROUP[name], axis=-1)


def blocked_offset(r: int, c: int, cols: int) -> int:
    return ((r // 128) * -(-cols // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


def blocked(scale: np.ndarray) -> np.ndarray:
    rows, cols = scale.shape
    out = np.zeros(-(-rows // 128) * 128 * -(-cols // 4) * 4, dtype=np.uint8)
    for r in range(rows):
        for c in range(cols):
            out[blocked_offset(r, c, cols)] = scale[r, c]
    return out


def rotate(x: np.ndarray, side: np.ndarray) -> np.ndarray:
    """x @ V for every block of R along the last dimension, in float64. `side` is V with its factor in it."""
    size = side.shape[0]
    blocks = np.asarray(x, dtype=np.float64).reshape(*x.shape[:-1], -1, size)
    return (blocks @ side).reshape(x.shape)


def sylvester(n: int) -> np.ndarray:
    """The +-1 Hadamard of a power of two: (-1)^popcount(i & j)."""
    return np.array([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)])


def four_by_four() -> np.ndarray:
    """M = D H^T with D = diag(1, -1, 1, 1) and H = Sylvester 4 / 2, which is not symmetric."""
    return np.diag([1.0, -1.0, 1.0, 1.0]) @ (sylvester(4) / 2).T
