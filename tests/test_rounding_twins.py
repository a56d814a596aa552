"""The rounding of the GPU's kernels, alone, over every fp32 number: as the PTX text has it and as plain Triton has it.

Hopper GPUs round by the text of `quarterturn.kernels.ptx`, others by functions of `rotate_quantize`. A GPU compares
the two over all bit patterns, and either with comparisons; Triton's interpreter compares the plain one with `by_hand`
over a sample; and what the GPU would run is compiled where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import by_hand
from ahead_of_time import compile_kernel
from comparing import assert_equal_arrays
from conftest import INTERPRETED
from quarterturn.backends.gpu_pieces import CODES
from quarterturn.formats import E8M0_THRESHOLDS
from quarterturn.kernels import ptx
from quarterturn.kernels.rotate_quantize import _packed, _scaled, e4m3_value
from quarterturn.kernels.rotate_quantize_hopper_asm import quantize_asm

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BLOCK, CHUNK = 256, 1 << 24
RULE_ADD = {rule: 0x7FFFFF - threshold for rule, threshold in E8M0_THRESHOLDS.items()}
RULES = tuple(RULE_ADD)
ENCODES = (1.0, 17.3, 2.0**-90, 2.0**-105, 2.0**105)
"""Encode scales of the short way, and beyond its ends. Scales times tensor scales stay normal numbers: where they do
not, the text, which holds half a reciprocal, keeps one bit more or less than the plain form."""


@triton.jit
def _numbers(first, at):
    """The fp32 numbers whose bits are first + at."""
    return (first + at).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def codes_by_triton(out, first, BLOCK: tl.constexpr):
    """out (n, 2) int32 <- the codes of the numbers whose bits are `first` and on, eight a word."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = _packed(_numbers(first, at[:, None] * 16 + tl.arange(0, 16)[None, :]), BLOCK, 2, False)
    tl.store(out + at[:, None] * 2 + tl.arange(0, 2)[None, :], words)


@triton.jit
def codes_by_ptx(out, first, ASM: tl.constexpr, BLOCK: tl.constexpr):
    """out (n,) int64 <- the same, sixteen a word."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.inline_asm_elementwise(
        ASM,
        "=l,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
        [
            _numbers(first, at * 16), _numbers(first, at * 16 + 1), _numbers(first, at * 16 + 2),
            _numbers(first, at * 16 + 3), _numbers(first, at * 16 + 4), _numbers(first, at * 16 + 5),
            _numbers(first, at * 16 + 6), _numbers(first, at * 16 + 7), _numbers(first, at * 16 + 8),
            _numbers(first, at * 16 + 9), _numbers(first, at * 16 + 10), _numbers(first, at * 16 + 11),
            _numbers(first, at * 16 + 12), _numbers(first, at * 16 + 13), _numbers(first, at * 16 + 14),
            _numbers(first, at * 16 + 15),
        ],
        dtype=tl.int64,
        is_pure=True,
        pack=1,
    )  # fmt: skip
    tl.store(out + at, words)


@triton.jit
def values_by_ptx(out, first, ASM: tl.constexpr, BLOCK: tl.constexpr):
    """out (n, 2) int64 <- e2m1 of the numbers whose bits are `first` and on, four of 16 bits a word."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.inline_asm_elementwise(
        ASM,
        "=l,=l,f,f,f,f,f,f,f,f",
        [
            _numbers(first, at * 8), _numbers(first, at * 8 + 1), _numbers(first, at * 8 + 2),
            _numbers(first, at * 8 + 3), _numbers(first, at * 8 + 4), _numbers(first, at * 8 + 5),
            _numbers(first, at * 8 + 6), _numbers(first, at * 8 + 7),
        ],
        dtype=(tl.int64, tl.int64),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    tl.store(out + at * 2, low)
    tl.store(out + at * 2 + 1, high)


@triton.jit
def groups_by_triton(
    out, byte_out, first, encode, tensor_scale, GROUP: tl.constexpr, RULE_ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """out (n, 2) int32, byte_out (n,) uint8 <- 16 codes and the scale byte of groups whose amax has those bits.

    Value i of a group is its amax times (16 - i) / 16, every other one negative; a group of 32 holds them twice.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, GROUP) % 16
    share = (16 - i).to(tl.float32) * 0.0625
    share = tl.where(i % 2 == 1, -share, share)
    z = _numbers(first, at)[:, None, None] * share[None, None, :]
    scaled, byte, _ = _scaled(z, encode, tensor_scale, GROUP, RULE_ADD)
    words = _packed(scaled, BLOCK, GROUP // 8, False)
    w = tl.arange(0, GROUP // 8)[None, :]
    tl.store(out + at[:, None] * 2 + w, words, mask=w < 2)
    tl.store(byte_out + at[:, None], byte.to(tl.uint8))


@triton.jit
def groups_by_ptx(
    out, byte_out, first, sixth, encode, divisor, width, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out (n,) int64, byte_out (n,) uint8 <- the same by the text that the Hopper kernel runs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = _numbers(first, at)
    nothing = at * 0
    word, byte = tl.inline_asm_elementwise(
        ASM,
        CONSTRAINTS,
        [
            a, a * -0.9375, a * 0.875, a * -0.8125, a * 0.75, a * -0.6875, a * 0.625, a * -0.5625,
            a * 0.5, a * -0.4375, a * 0.375, a * -0.3125, a * 0.25, a * -0.1875, a * 0.125, a * -0.0625,
            tl.abs(a), sixth, encode, divisor, width, nothing.to(tl.int32), nothing, nothing,
        ],
        dtype=(tl.int64, tl.int32),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    tl.store(out + at, word)
    tl.store(byte_out + at, byte.to(tl.uint8))


@triton.jit
def reciprocals(out, byte, exponent, ASM: tl.constexpr, BLOCK: tl.constexpr):
    """out (2^23,) int32 <- bits by which the text's reciprocal of s * divisor differs from the quotient.

    s: the scale of a byte. divisor: every mantissa, with one exponent.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    divisor = ((exponent << 23) + at).to(tl.float32, bitcast=True)
    s = e4m3_value(byte + at * 0)
    r = tl.inline_asm_elementwise(ASM, "=f,f,f", [s, divisor], dtype=tl.float32, is_pure=True, pack=1)
    want = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), s * divisor)
    tl.store(out + at, r.to(tl.int32, bitcast=True) ^ want.to(tl.int32, bitcast=True))


def codes_text(saturate: bool) -> str:
    """16 values -> codes, of the values as they are: r is half of what they are multiplied by."""
    z = [f"z{i}" for i in range(16)]
    lines = [f"mov.f32 r, {ptx.constant(0.5)};", *ptx.codes(z[:8], "w0", saturate), *ptx.codes(z[8:], "w1", saturate)]
    lines.append("mov.b64 $0, {w0, w1};")
    return ptx.block(lines, [f"${1 + i}" for i in range(16)])


def values_text(half: bool, saturate: bool) -> str:
    """8 values -> four words of two numbers, of the values as they are: r is a half, the scale 1."""
    lines = [f"mov.f32 r, {ptx.constant(0.5)};", f"mov.f32 s, {ptx.constant(1.0)};"]
    lines += ptx.values([f"w{i}" for i in range(4)], half, saturate)
    lines += ["mov.b64 $0, {w0, w1};", "mov.b64 $1, {w2, w3};"]
    return ptx.block(lines, [f"${2 + i}" for i in range(8)])


def reciprocal_text() -> str:
    """(scale, divisor) -> r, by the short way."""
    one = ptx.constant(1.0)
    lines = [
        f"mov.f32 z0, {one};",
        "mov.f32 a, $1;",
        *ptx.nvfp4_scale(ptx.clamp(["z0"]), one, one, "$2", "0x76"),
        "mov.f32 $0, r;",
    ]
    return ptx.block(lines)


def group_text(name: str, rule: str) -> tuple[str, str]:
    return quantize_asm(by_hand.GROUP[name], CODES, rule, 0, False)


def short_way(divisor: float) -> int:
    """As the Hopper kernel chooses it."""
    return 0x76 if 1e-30 < divisor < 1e30 else 0


def group_arguments(name: str, encode: float) -> tuple[tuple[float, ...], tuple]:
    """What each kernel of groups is given after `first`: encode, tensor_scale; and sixth, encode, divisor, width."""
    if name == "mxfp4":
        return (1.0, 1.0), (1.0, 1.0, 2.0, 0)
    encode = float(np.float32(encode))
    tensor_scale = float(np.float32(1) / np.float32(encode))
    divisor = float(np.float32(tensor_scale) * np.float32(2))
    return (encode, tensor_scale), (float(by_hand.ONE_SIXTH), encode, divisor, short_way(divisor))


WAYS = [("nvfp4", "even", encode) for encode in ENCODES] + [("mxfp4", rule, 1.0) for rule in RULES]


def expected(values: torch.Tensor) -> torch.Tensor:
    """Codes by seven comparisons: a tie goes to the even code, so every second one includes its edge; NaN to 6."""
    a = values.abs()
    above = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5]
    code = torch.where(values.isnan(), 7, sum(step.to(torch.uint8) for step in above))
    return code.to(torch.uint8) | ((values.view(torch.int32) < 0).to(torch.uint8) << 3)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    packed = words.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).view(-1)


def numbers(first: int, count: int) -> torch.Tensor:
    bits = torch.arange(first, first + count, device=DEVICE)
    return bits.to(torch.int32).view(torch.float32)


def assert_codes(kernel: Callable[[torch.Tensor, int, int], object], first: int, count: int, most: float) -> None:
    """Numbers up to `most` in magnitude (and NaN, where that is infinite) have their code."""
    words = torch.empty(count // 16, dtype=torch.int64, device=DEVICE)
    kernel(words, first, count // 16 // BLOCK)
    values, got = numbers(first, count), unpacked(words)
    counted = (values.abs() < most) if math.isfinite(most) else torch.ones_like(values, dtype=torch.bool)
    wrong = (got != expected(values)) & counted
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {count} from bits {first:#x} differ, first {values[at].item()!r}: "
            f"got {got[at].item()}, want {expected(values)[at].item()}"
        )


def by_triton(words: torch.Tensor, first: int, programs: int) -> None:
    codes_by_triton[(programs,)](words.view(torch.int32), first, BLOCK, enable_fp_fusion=False)


# ---- on a GPU: every number


@pytest.mark.gpu
@pytest.mark.parametrize(("way", "most"), [("triton", math.inf), ("ptx", 7.0), ("saturating ptx", math.inf)])
def test_all_fp32_numbers_round_as_defined(way: str, most: float) -> None:
    """2^32 patterns. The text that does not saturate is for magnitudes under 7, which is all that its groups hold."""

    def by_ptx(words: torch.Tensor, first: int, programs: int) -> None:
        codes_by_ptx[(programs,)](words, first, codes_text(way == "saturating ptx"), BLOCK)

    for first in range(0, 1 << 32, CHUNK):
        assert_codes(by_triton if way == "triton" else by_ptx, first, CHUNK, most)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("saturate", "most"), [(False, 7.0), (True, 8.0)])
def test_all_fp32_numbers_round_to_the_values_of_their_codes(dtype: torch.dtype, saturate: bool, most: float) -> None:
    """2^32 patterns; magnitudes under 7 are all that groups hold, and under 8 where E8M0's rule may fall short."""
    table = torch.tensor(np.concatenate([by_hand.E2M1[:8], -by_hand.E2M1[:8]]), dtype=dtype, device=DEVICE)
    text = values_text(dtype == torch.float16, saturate)
    words = torch.empty(CHUNK // 4, dtype=torch.int64, device=DEVICE)
    for first in range(0, 1 << 32, CHUNK):
        values_by_ptx[(CHUNK // 8 // BLOCK,)](words, first, text, BLOCK, enable_fp_fusion=False)
        values = numbers(first, CHUNK)
        want, got = table[expected(values).long()].view(torch.int16), words.view(torch.int16)
        wrong = (got != want) & (values.abs() < most)
        assert not wrong.any(), f"{int(wrong.sum())} from {first:#x}, first {values[wrong][0].item()!r}"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rule", "encode"), WAYS)
def test_scales_and_codes_of_groups_of_every_amax(name: str, rule: str, encode: float) -> None:
    """2^31 amax, NaN and Inf too: E4M3 bytes by the hardware's conversion, E8M0 bytes, reciprocals, codes."""
    of_triton, of_ptx = group_arguments(name, encode)
    text, constraints = group_text(name, rule)
    words = torch.empty(2, CHUNK, dtype=torch.int64, device=DEVICE)
    scales = torch.empty(2, CHUNK, dtype=torch.uint8, device=DEVICE)
    grid = (CHUNK // BLOCK,)
    for first in range(0, 1 << 31, CHUNK):
        groups_by_triton[grid](
            words[0].view(torch.int32), scales[0], first, *of_triton, by_hand.GROUP[name], RULE_ADD[rule], BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
        groups_by_ptx[grid](words[1], scales[1], first, *of_ptx, text, constraints, BLOCK, enable_fp_fusion=False)
        for what, (want, got) in (("scale bytes", scales), ("codes", words)):
            if not torch.equal(got, want):
                at = int((got != want).nonzero()[0])
                raise AssertionError(
                    f"{what}: {int((got != want).sum())} of {CHUNK} from bits {first:#x} differ, first at amax "
                    f"{numbers(first + at, 1).item()!r}: got {got[at].item():#x}, want {want[at].item():#x}"
                )


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [28, 127, 225])
def test_one_newton_step_gives_the_quotient(exponent: int) -> None:
    """All mantissas of the divisor times all scales that the short way takes, at both ends of it and in the middle."""
    out = torch.empty(1 << 23, dtype=torch.int32, device=DEVICE)
    for byte in range(8, 0x7E):
        reciprocals[(out.numel() // BLOCK,)](out, byte, exponent, reciprocal_text(), BLOCK, enable_fp_fusion=False)
        wrong = out.nonzero()
        assert not wrong.numel(), f"scale byte {byte:#x}: {wrong.shape[0]} differ, first mantissa {int(wrong[0]):#x}"


# ---- in Triton's interpreter, or on a GPU: a sample, against comparisons and by_hand

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0]


def sample() -> list[int]:
    """Where runs of 16 * BLOCK patterns begin: around ties, at the ends of the exponents, anywhere."""
    half = 8 * BLOCK
    around = [int(np.float32(v).view(np.uint32)) - half for v in TIES] + [0, 0x800000 - half, 0x7F800000 - half]
    anywhere = torch.randint(0, 2**31 - 16 * BLOCK, (12,), generator=torch.Generator().manual_seed(5)).tolist()
    return [bits + sign for bits in around + anywhere for sign in (0, 1 << 31)]


@pytest.mark.gpu
@pytest.mark.interpreter
def test_a_sample_rounds_as_defined() -> None:
    for first in sample():
        assert_codes(by_triton, first, 16 * BLOCK, math.inf)


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize(("name", "rule", "encode"), WAYS)
def test_a_sample_of_groups_by_hand(name: str, rule: str, encode: float) -> None:
    size = by_hand.GROUP[name]
    share = (16 - np.arange(size) % 16) / np.float32(16) * np.where(np.arange(size) % 2, -1, 1)
    anywhere = np.random.default_rng(3).integers(0, (1 << 31) - BLOCK, 8).tolist()
    places = [exponent << 23 for exponent in (*range(1, 254, 18), 254, 255)]
    if name == "nvfp4":  # between two scale bytes, subnormal and normal, and where they end
        low = np.array([0, 1, 3, 5, 7, 8, 9, 0x30, 0x31, 0x7D])
        ties = 3 * (by_hand.E4M3[low] + by_hand.E4M3[low + 1]) / encode
        places += ties.astype(np.float32).view(np.int32).tolist()
    for first in [0, *(place - BLOCK // 2 for place in places), *anywhere]:
        words = torch.empty(BLOCK, dtype=torch.int64, device=DEVICE)
        scale = torch.empty(BLOCK, dtype=torch.uint8, device=DEVICE)
        groups_by_triton[(1,)](
            words.view(torch.int32), scale, first, *group_arguments(name, encode)[0], size,
            RULE_ADD[rule], BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
        with np.errstate(all="ignore"):
            amax = numbers(first, BLOCK).cpu().numpy()
            z = (amax[:, None] * share.astype(np.float32)).astype(np.float32)
            codes, want = by_hand.quantize(z, name, encode, rule)
        assert_equal_arrays(scale.cpu().numpy(), want.ravel(), f"scale bytes from bits {first:#x}")
        assert_equal_arrays(unpacked(words).cpu().numpy().reshape(BLOCK, 16), codes[:, :16], f"codes from {first:#x}")


# ---- without a GPU: what the tests above would run on one compiles, and holds what they are to compare


def test_what_a_gpu_would_compare_compiles() -> None:
    codes = {"out": "*i64", "first": "i64"}
    for saturate in (False, True):
        built = compile_kernel(codes_by_ptx, codes, {"ASM": codes_text(saturate), "BLOCK": BLOCK}, 90)
        assert built.sass_counts["VIMNMX3"] == 16 * BLOCK // 128
        assert built.local_accesses == 0
    built = compile_kernel(
        codes_by_triton, {"out": "*i32", "first": "i64"}, {"BLOCK": BLOCK}, 90, enable_fp_fusion=False
    )
    assert not [name for name in built.ptx_counts if name.startswith("fma.")]
    plain = {"out": "*i32", "byte_out": "*u8", "first": "i64", "encode": "fp32", "tensor_scale": "fp32"}
    text = {"out": "*i64", "byte_out": "*u8", "first": "i64", "sixth": "fp32", "encode": "fp32", "divisor": "fp32"}
    for name, rule in (("nvfp4", "even"), ("mxfp4", "even"), ("mxfp4", "floor")):
        asm, constraints = group_text(name, rule)
        built = compile_kernel(
            groups_by_ptx, text | {"width": "i32"}, {"ASM": asm, "CONSTRAINTS": constraints, "BLOCK": BLOCK}, 90
        )
        assert ("F2FP" in built.sass_counts) == (name == "nvfp4")
        constants = {"GROUP": by_hand.GROUP[name], "RULE_ADD": RULE_ADD[rule], "BLOCK": BLOCK}
        built = compile_kernel(groups_by_triton, plain, constants, 90, enable_fp_fusion=False)
        assert not [name for name in built.ptx_counts if name.startswith("fma.")]
    built = compile_kernel(
        reciprocals, {"out": "*i32", "byte": "i32", "exponent": "i32"}, {"ASM": reciprocal_text(), "BLOCK": BLOCK}, 90
    )
    assert built.ptx_counts["rcp.approx.ftz.f32"] == BLOCK // 128
    assert built.ptx_counts["div.rn.f32"] == BLOCK // 128
