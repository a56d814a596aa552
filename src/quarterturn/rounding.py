"""Rounding to E2M1 codes and to E8M0 scale bytes, in plain PyTorch: what quantizes weights and activations alike."""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import E8M0_BIAS, E8M0_NAN


def e8m0_bytes(amax: Tensor, rule: str) -> Tensor:
    """Scale bytes of fp32 group maxima by a rule of formats.E8M0_RULES, or 'qutlass' (2^floor(log2 amax)).

    Byte 255 for those that are not finite, 0 for zero.
    """
    finite = amax.isfinite()
    mantissa, exponent = torch.frexp(
        torch.where(finite, amax, 1.0).double()
    )  # amax = mantissa * 2^exponent, in [.5, 1)
    floor_log2 = exponent - 1
    if rule == "even":
        power = floor_log2 + (mantissa >= 0.875) - 2
    elif rule == "floor":
        power = floor_log2 - 2
    elif rule == "ceil":
        power = floor_log2 + (mantissa > 0.5) - 2
    elif rule == "qutlass":
        power = floor_log2
    else:  # rceil: 6 * 2^e >= amax, and 6 = .75 * 2^3
        power = exponent - 3 + (mantissa > 0.75)
    byte = (power.clamp(-E8M0_BIAS, 127) + E8M0_BIAS).masked_fill_(amax == 0, 0).masked_fill_(~finite, E8M0_NAN)
    return byte.to(torch.uint8)


def _steps(scaled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """|v| in three saturating ramps (0..2, 2..4, 4..6), each rounded half to even in its own step: 0.5, 1, 2.

    The number of steps in each (0..4, 0..2, 0..1) adds up to the code's magnitude, and a tie goes to the even code
    since each ramp begins at an even code.
    """
    a = scaled.abs()
    first = a.clamp(max=2).mul_(2).round_()
    second = (a - 2).clamp_(0, 2).round_()
    third = a.sub_(4).clamp_(0, 2).mul_(0.5).round_()
    return first, second, third


def e2m1_codes(scaled: Tensor) -> Tensor:
    """The code 0..15 of each value, uint8, by round to nearest even with saturation at 6; the sign of zero is kept."""
    first, second, third = _steps(scaled)
    magnitude = first.add_(second).add_(third).to(torch.uint8)
    return magnitude | torch.signbit(scaled).to(torch.uint8) << 3


def e2m1_values(scaled: Tensor) -> Tensor:
    """The number that each value's code stands for, in the dtype of the values."""
    first, second, third = _steps(scaled)
    return first.mul_(0.5).add_(second).add_(third, alpha=2).copysign_(scaled)
