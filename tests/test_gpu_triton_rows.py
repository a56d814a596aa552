"""Everything about the GPU's rotate + quantize kernels but the numbers: rows, strides, layouts, forms, streams, graphs.

Most compare a call with another call of the same kernels, so that every bit must be equal; test_gpu_triton.py holds
the bits themselves.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import by_hand
from comparing import assert_equal_arrays, assert_same_bits
from gpu_cases import (
    BACKEND,
    DEVICE,
    DTYPES,
    FORMATS,
    INTERPRETED,
    MANNERS,
    NO_TURN,
    USUAL,
    assert_equal_values,
    assert_exact,
    blocked,
    grid,
    here,
    integers,
    manner,
    matrix_of,
    run,
)
from quarterturn import ops
from quarterturn.layouts import BLOCKED_128x4

pytestmark = pytest.mark.gpu
TURNS = {"none": ("", 0), "signed 16": ("random hadamard", 16), "signed 64": ("random hadamard", 64)}
TURNS |= {"signed 128": ("random hadamard", 128), "dense 32": ("dense", 32), "dense 48": ("dense", 48)}
EDGES = sorted(
    {1, 2, 3, 1023, 1024, 1025, 1100} | {t + d for t in (8, 16, 32, 64, 128, 256, 384, 512) for d in (-1, 0, 1)}
)
"""Row counts on both sides of the edge of every plausible tile."""


def turn_of(name: str, transpose: bool = True):
    kind, size = TURNS[name]
    return (*matrix_of(kind, size), transpose) if kind else NO_TURN


def width(name: str) -> int:
    return 384 if name not in ("dense 48", "dense 32") else 192


@pytest.fixture
def poisoned():
    """What torch.empty returns is full of 0xFF or NaN, on the device too, so that what is not written shows."""
    state, filled = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.isnan(torch.empty(64, device=DEVICE)).all(), "torch no longer poisons fresh memory in this mode"
    assert (torch.empty(64, device=DEVICE, dtype=torch.uint8) == 255).all()
    if DEVICE.type == "cuda":  # and what the allocator hands out past torch.empty
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
            torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    yield
    torch.set_deterministic_debug_mode(state)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def same(got: tuple, want: tuple, what: str = "") -> None:
    for part, a, b in zip(("first", "second", "third"), got, want, strict=False):
        assert_same_bits(a, b, f"{what}, {part} result")


def assert_forms_agree(x: torch.Tensor, turn, how: dict) -> None:
    """Blocked scales are the linear ones moved; values are the codes decoded, in every dtype that holds them."""
    name = how["format"].name
    codes, scale, tensor_scale = here(run(ops.rotate_quantize, x, *turn, **how))
    moved = here(run(ops.rotate_quantize, x, *turn, **how, scale_layout="blocked"))
    assert_same_bits(moved[0], codes, "codes beside blocked scales")
    assert_same_bits(moved[2], tensor_scale, "tensor scales beside blocked scales")
    assert moved[1].dtype == scale.dtype
    assert tuple(moved[1].shape) == BLOCKED_128x4.shape(x.shape[0], scale.shape[1])
    assert_equal_arrays(by_hand.numpy(moved[1]).ravel(), blocked(by_hand.numpy(scale)), "padded buffer")
    want = by_hand.values(codes.numpy(), by_hand.numpy(scale), name)
    # Behind a dense matrix, codes of bf16 may be of two of its pieces and values of all three (docs/numerics.md).
    two_ways = x.dtype == torch.bfloat16 and turn[0] is not None and bool((turn[0].abs() != 1).any())
    for out in DTYPES:
        if out == torch.float16 and name == "mxfp4":
            continue  # refused: it can overflow
        values, again = here(run(ops.rotate_quantize_dequantize, x, *turn, **how, out_dtype=out))
        assert values.dtype == out
        assert_same_bits(again, tensor_scale, "tensor scales beside values")
        differ = int((values.double().numpy() != want).sum() - np.isnan(want).sum())
        if two_ways and differ <= max(2, int(1e-4 * want.size)):
            continue
        assert_equal_values(values, want, f"values in {out}")


# ---- the forms of the output


@grid(
    small=lambda turn, how, dtype: (
        dtype == torch.bfloat16 and (turn == "none" or (turn == "signed 64" and how in (*USUAL, MANNERS[1])))
    ),
    keep=lambda turn, how, dtype: (
        (dtype == torch.bfloat16 and how in USUAL)
        or (dtype == torch.bfloat16 and turn in ("none", "signed 64"))
        or (how in USUAL and turn in ("none", "signed 64", "dense 48"))
    ),
    turn=TURNS,
    how=MANNERS,
    dtype=DTYPES,
)
def test_layouts_and_values_agree_with_the_codes(turn: str, how, dtype, poisoned) -> None:
    for m in (33,) if INTERPRETED else (1, 127, 129, 385):
        x = torch.randn(m, width(turn)) * torch.logspace(-2, 1, m)[:, None]
        assert_forms_agree(x.to(dtype), turn_of(turn), manner(*how))


@grid(
    small=lambda name, m: m in (0, 1) or (name, m) in (("mxfp4", 127), ("nvfp4", 129)),
    name=FORMATS,
    m=[0, 1, 7, 31, 33, 127, 128, 129, 255, 257, 385, 1025],
)
def test_padding_of_blocked_scales_is_zero(name: str, m: int, poisoned) -> None:
    """K / group not a multiple of 4, and every leading shape; NaN groups at the edge too."""
    for k in (160,) if INTERPRETED else (32, 96, 160, 416, 928):
        x = torch.randn(m, k)
        x[-1:, -1:] = torch.nan
        assert_forms_agree(x, NO_TURN, manner(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_hold_the_smallest_and_largest_scales(dtype) -> None:
    """MXFP4 scales of 2^-127 to 2^124, whose values are subnormal at one end."""
    lone = torch.zeros(250, 32)
    lone[torch.arange(250), 3] = torch.exp2(torch.arange(250.0, dtype=torch.float64) - 126).float() * 1.5
    lone[:, 9] = lone[:, 3] / 8
    assert_forms_agree(lone.to(dtype), NO_TURN, manner("mxfp4"))


# ---- rows


@grid(
    small=lambda turn, dtype, name: (
        (turn, dtype) == ("signed 64", torch.bfloat16) or (turn, dtype, name) == ("dense 32", torch.float32, "nvfp4")
    ),
    turn=TURNS,
    dtype=DTYPES,
    name=FORMATS,
)
def test_a_row_has_its_bits_in_every_batch(turn: str, dtype, name: str) -> None:
    """All counts to 1,100 on a GPU: every edge of every tile, and rows that do not know of each other."""
    x = torch.randn(130 if INTERPRETED else 1100, width(turn), device=DEVICE).to(dtype)
    side = turn_of(turn)
    whole = run(ops.rotate_quantize, x, *side, **manner(name))
    for m in (1, 16, 17, 65) if INTERPRETED else range(1, 1101, 1 if turn == "signed 64" else 37):
        got = run(ops.rotate_quantize, x[:m], *side, **manner(name))
        assert torch.equal(got[0], whole[0][:m]), f"codes of {m} rows"
        assert torch.equal(got[1].view(torch.uint8), whole[1].view(torch.uint8)[:m]), f"scales of {m} rows"
    for how in (manner(name, "token"), manner(name)):
        batch = run(ops.rotate_quantize, x, *side, **how)
        for first in (1, 64, 77, 129):
            alone = run(ops.rotate_quantize, x[first : first + 1], *side, **how)
            rows = slice(first, first + 1)
            scale = batch[2][rows] if batch[2].numel() > 1 else batch[2]
            same(here(alone), here((batch[0][rows], batch[1][rows], scale)), f"row {first} alone")


@grid(small=lambda turn: turn == "signed 64", turn=[name for name in TURNS if name != "none"])
def test_a_rotated_row_has_its_bits_in_every_batch(turn: str) -> None:
    """Sharper than the quantized form: the fp32 bits themselves."""
    x, side = torch.randn(130 if INTERPRETED else 1100, width(turn), device=DEVICE), turn_of(turn)
    for dtype in DTYPES[:1] if INTERPRETED else DTYPES:
        (whole,) = run(ops.rotate, x.to(dtype), *side, out_dtype=torch.float32)
        for m in (1, 17, 129) if INTERPRETED else EDGES:
            (got,) = run(ops.rotate, x[:m].to(dtype), *side, out_dtype=torch.float32)
            assert torch.equal(got, whole[:m]), f"{m} rows"
        (alone,) = run(ops.rotate, x[77:78].to(dtype), *side, out_dtype=torch.float32)
        assert torch.equal(alone, whole[77:78])


@grid(small=lambda m, name: m in (1, 65), m=EDGES, name=FORMATS)
def test_edges_have_the_bits_of_the_specification(m: int, name: str, poisoned) -> None:
    for turn in ("none", "signed 16", "signed 64", "signed 128"):
        matrix, _, transpose = turn_of(turn)
        x = integers(m, 384 if m < 600 else 128, torch.bfloat16)
        assert_exact(x, (matrix, 0.25, transpose), **manner(name, encode=20.0), what=turn)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (2, 3), (1, 1, 1)], ids=str)
def test_no_rows_and_any_leading_dimensions(name: str, leading: tuple[int, ...], poisoned) -> None:
    x, (matrix, factor, transpose) = torch.randn(*leading, 64), turn_of("signed 16")
    rows, groups = x.numel() // 64, 64 // by_hand.GROUP[name]
    flat = here(run(ops.rotate_quantize, x.reshape(rows, 64), matrix, factor, transpose, **manner(name)))
    for recipe in ("checkpoint", "token"):
        got = here(run(ops.rotate_quantize, x, matrix, factor, transpose, **manner(name, recipe)))
        assert got[0].shape == (*leading, 32)
        assert got[1].shape == (*leading, groups)
        assert got[2].shape == ((rows,) if recipe == "token" and name == "nvfp4" else (1,))
        if recipe == "checkpoint":
            same((got[0].reshape(rows, 32), got[1].reshape(rows, groups), got[2]), flat)
    values = here(run(ops.rotate_quantize_dequantize, x, matrix, factor, transpose, **manner(name)))[0]
    assert values.shape == (*leading, 64)
    assert here(run(ops.rotate, x, matrix, factor, transpose))[0].shape == (*leading, 64)
    moved = here(run(ops.rotate_quantize, x, matrix, factor, transpose, **manner(name), scale_layout="blocked"))[1]
    assert moved.shape == BLOCKED_128x4.shape(rows, groups)


def strided(rows: int, k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    return {
        "columns of a wider tensor": random(rows, k + 40)[:, :k],
        "columns from an odd one on": random(rows, k + 41)[:, 3 : k + 3],
        "every other row": random(2 * rows, k)[::2],
        "a transpose": random(k, rows).t(),
        "every other column": random(rows, 2 * k)[:, ::2],
        "one row expanded": random(1, k).expand(rows, k),
        "an offset that breaks alignment": random(rows * k + 1)[1:].view(rows, k),
        "an offset by eight": random(rows * k + 8)[8:].view(rows, k),
        "a middle slice of three dimensions": random(rows, 3, k)[:, 1],
        "overlapping rows": torch.as_strided(random(rows * 8 + k), (rows, k), (8, 1)),
        "rows in reverse": random(rows, k).flip(0)[:: max(1, rows - 1)],
    }


@grid(
    small=lambda turn, dtype, name: turn == "signed 64" and dtype == torch.bfloat16 and name == "nvfp4",
    turn=["none", "signed 16", "signed 64", "dense 48"],
    dtype=DTYPES,
    name=FORMATS,
)
def test_strided_input_equals_contiguous(turn: str, dtype, name: str) -> None:
    side = turn_of(turn)
    for what, x in strided(17 if INTERPRETED else 133, width(turn), dtype).items():
        dense, kept = x.contiguous().clone(), x.clone()
        for op in (ops.rotate_quantize, ops.rotate_quantize_dequantize):
            how = manner(name) | ({"out_dtype": torch.float32} if op is ops.rotate_quantize_dequantize else {})
            same(here(run(op, x, *side, **how)), here(run(op, dense, *side, **how)), what)
        if side[0] is not None:
            same(here(run(ops.rotate, x, *side)), here(run(ops.rotate, dense, *side)), what)
        assert_same_bits(x, kept, f"{what}: x after the calls")


# ---- repeats, inputs


@grid(small=lambda turn, name: False, turn=TURNS, name=FORMATS)
def test_twenty_repeats_have_equal_bits(turn: str, name: str) -> None:
    x, side = torch.randn(4099, 1536, device=DEVICE, dtype=torch.bfloat16), turn_of(turn)
    for how in (manner(name), manner(name, "token")):
        want = run(ops.rotate_quantize, x, *side, **how)
        for repeat in range(20):
            got = run(ops.rotate_quantize, x, *side, **how)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"repeat {repeat}"


@grid(small=lambda turn, dtype: turn == "dense 32", turn=TURNS, dtype=DTYPES)
def test_inputs_are_unchanged_and_not_aliased(turn: str, dtype) -> None:
    matrix, factor, transpose = turn_of(turn)
    x = torch.randn(32, width(turn)).to(dtype).to(DEVICE)
    matrix = None if matrix is None else matrix.to(DEVICE)
    how = {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in manner("nvfp4").items()}
    given = [t for t in (x, matrix, how["encode_scale"]) if t is not None]
    kept = [t.clone() for t in given]
    made = [t for op in (ops.rotate_quantize, ops.rotate_quantize_dequantize) for t in run(op, x, matrix, factor,
            transpose, **how)]  # fmt: skip
    made += run(ops.rotate, x, matrix, factor, transpose) if matrix is not None else ()
    for before, after in zip(kept, given, strict=True):
        assert_same_bits(after, before, "an input")
    assert all(t.is_contiguous() for t in made)
    places = [t.untyped_storage().data_ptr() for t in (*given, *made)]
    assert len(set(places)) == len(places), "two results, or a result and an input, share memory"


@grid(small=lambda kind: kind == "dense", kind=["random hadamard", "dense"])
def test_a_matrix_is_read_anew_at_every_call(kind: str) -> None:
    """Changed in place, or another one at the address of one that is gone: nothing may be remembered by address."""
    x = torch.randn(5, 64, device=DEVICE)
    first, second = matrix_of(kind, 32)[0], -matrix_of(kind, 32)[0].flip(0)
    wanted = [here(run(ops.rotate_quantize, x, m.clone(), 0.25, False, **manner("nvfp4"))) for m in (first, second)]
    held = first.to(DEVICE).clone()
    same(here(run(ops.rotate_quantize, x, held, 0.25, False, **manner("nvfp4"))), wanted[0], "first")
    held.copy_(second)
    same(here(run(ops.rotate_quantize, x, held, 0.25, False, **manner("nvfp4"))), wanted[1], "changed in place")
    del held
    for turn in range(6):
        again = (first, second)[turn % 2].to(DEVICE).clone()
        got = run(ops.rotate_quantize, x, again, 0.25, False, **manner("nvfp4"))
        same(here(got), wanted[turn % 2], f"address used again, {turn}")
        del again


# ---- what torch is promised


def calls(x: torch.Tensor) -> dict[str, tuple]:
    """Arguments of each operator, as torch sees them."""
    matrix = matrix_of("random hadamard", 16)[0].to(x.device)
    encode = torch.tensor([100.0], device=x.device)
    packed = (x, matrix, 0.25, True, "nvfp4", encode, "checkpoint", "even")
    return {
        "rotate": (x, matrix, 0.25, False, x.dtype, BACKEND),
        "rotate_quantize": (*packed, "linear", BACKEND),
        "rotate_quantize_dequantize": (*packed, x.dtype, BACKEND),
    }


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", ["rotate", "rotate_quantize", "rotate_quantize_dequantize"])
def test_opcheck(op: str) -> None:
    x = torch.randn(5, 64, device=DEVICE, dtype=torch.bfloat16)
    torch.library.opcheck(getattr(torch.ops.quarterturn, op).default, calls(x)[op])
    if op == "rotate_quantize":
        moved = (x, None, 1.0, False, "mxfp4", None, "checkpoint", "ceil", "blocked", BACKEND)
        token = (x, None, 1.0, False, "nvfp4", None, "token", "even", "linear", BACKEND)
        torch.library.opcheck(torch.ops.quarterturn.rotate_quantize.default, moved)
        torch.library.opcheck(torch.ops.quarterturn.rotate_quantize.default, token)
