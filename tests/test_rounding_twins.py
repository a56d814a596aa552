"""The rounding in the GPU's kernels, alone, over every fp32 number: its PTX and its portable form, against comparisons.

`quarterturn.kernels.rotate_quantize` gives functions of Triton that take an fp32 tile and return the codes of it, one
integer each. TWINS names them: one that is added there is added here.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.gpu
TWINS = ("e2m1_codes_portable",)
BLOCK = 4096
CHUNK = 1 << 26


@triton.jit
def codes_of_bits(out, first, TWIN: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = the code of the fp32 number whose bits are first + i; first is int64."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = (first + at).to(tl.int32, bitcast=False).to(tl.float32, bitcast=True)
    tl.store(out + at, TWIN(values).to(tl.uint8))


def expected(values: torch.Tensor) -> torch.Tensor:
    """Codes by seven comparisons: a tie goes to the even code, so every second one includes its edge."""
    a = values.abs()
    above = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5]
    return sum(step.to(torch.uint8) for step in above) | (torch.signbit(values).to(torch.uint8) << 3)


@pytest.mark.parametrize("name", TWINS)
def test_all_fp32_numbers_round_as_defined(name: str) -> None:
    """2^32 patterns; the kernels never round NaN, so those are left out."""
    from quarterturn.kernels import rotate_quantize

    twin = getattr(rotate_quantize, name)
    out = torch.empty(CHUNK, dtype=torch.uint8, device="cuda")
    for first in range(0, 1 << 32, CHUNK):
        codes_of_bits[(CHUNK // BLOCK,)](out, first, twin, BLOCK)
        bits = torch.arange(first, first + CHUNK, device="cuda").to(torch.int32)
        values = bits.view(torch.float32)
        wrong = (out != expected(values)) & ~values.isnan()
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {CHUNK} from bits {first:#x} differ, first {values[at].item()!r}: "
                f"got {out[at].item()}, want {expected(values)[at].item()}"
            )
