"""The two 4-bit formats and every size that follows from them.

A value is `e2m1(code) * block_scale * tensor_scale`; all three are multipliers. Codes are E2M1 (sign, two exponent
bits, one mantissa bit). NVFP4 has an E4M3 scale per 16 values and one fp32 scale per tensor; MXFP4 has an E8M0 scale
(a power of two, bias 127) per 32 values and no tensor scale. Source: OCP Microscaling Formats v1.0 for E2M1, E8M0
and MXFP4; NVIDIA's documentation of NVFP4 for its scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import refusal

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E8M0_NAN = 255
E8M0_BIAS = 127
INV6 = float.fromhex("0x1.555556p-3")
"""The fp32 number nearest to 1/6 (bits 0x3E2AAAAB)."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code 0..15; code 8 is -0."""

E8M0_RULES = ("even", "floor", "ceil", "rceil")
"""How a group's amax becomes a power of two. EVEN is what compressed-tensors files mean, FLOOR the OCP document's."""

E8M0_THRESHOLDS = {"even": 0x5FFFFF, "floor": 0x7FFFFF, "ceil": 0, "rceil": 0x400000}
"""For each rule the mantissa bits of a group's amax (fp32) above which the power of two goes up by one."""

RECIPES = ("checkpoint", "token", "qutlass")
"""Where the NVFP4 encode scale of activations comes from: the file, each row's amax, or QuTLASS's constant 6."""


@dataclass(frozen=True)
class FP4Format:
    """One 4-bit format: `group_size` values along K share one block scale of `scale_dtype`."""

    name: str
    group_size: int
    scale_dtype: torch.dtype
    has_tensor_scale: bool
    nan_byte: int

    @property
    def bits_per_value(self) -> float:
        """Storage per value, block scales included: 4.5 (NVFP4) or 4.25 (MXFP4) bits."""
        return 4 + 8 / self.group_size

    @property
    def has_e8m0_scale(self) -> bool:
        """Block scales are powers of two in a byte; else they are E4M3 numbers."""
        return self.scale_dtype == torch.uint8

    def codes_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the packed uint8 codes of a (rows, cols) matrix."""
        return rows, cols // 2

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the linear (row-major) block scales of a (rows, cols) matrix."""
        return rows, cols // self.group_size


NVFP4 = FP4Format("nvfp4", 16, torch.float8_e4m3fn, True, E4M3_NAN)
MXFP4 = FP4Format("mxfp4", 32, torch.uint8, False, E8M0_NAN)
FORMATS = {f.name: f for f in (NVFP4, MXFP4)}


def get_format(name: str | FP4Format) -> FP4Format:
    """The format of that name. Raises Refusal for any other name."""
    if isinstance(name, FP4Format):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise refusal(
            "format",
            f"there is no 4-bit format '{name}'.",
            needs=[(f"one of {', '.join(FORMATS)}", repr(name))],
            do="name one of them",
        )
    return FORMATS[name]
