"""How the tests compare: bit for bit where arithmetic is exact, counted where it is not, refusals by their parts."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import by_hand
from quarterturn.backends import BACKENDS
from quarterturn.errors import Refusal

CPU = torch.device("cpu")
HERE = [backend.NAME for backend in BACKENDS if not backend.missing(CPU)]
FP32_UNIT = 2.0**-24  # relative error of one rounding to fp32
BF16_UNIT = 2.0**-8  # of one rounding to bf16, which keeps 8 bits
UNIT = {torch.float32: FP32_UNIT, torch.bfloat16: BF16_UNIT, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}  # half the smallest subnormal


def as_bits(t: torch.Tensor) -> np.ndarray:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.detach().contiguous().cpu().view(width).numpy()


def mismatch(got: np.ndarray, want: np.ndarray, what: str) -> str:
    """Empty when equal; else how many differ, where the first one is and both its values."""
    if got.shape != want.shape:
        return f"{what}: shape {got.shape}, not {want.shape}"
    wrong = np.argwhere(got != want)
    if not len(wrong):
        return ""
    at = tuple(int(i) for i in wrong[0])
    return f"{what}: {len(wrong)} of {want.size} differ, the first at {at}: got {got[at]!r}, want {want[at]!r}"


def assert_equal_arrays(got: np.ndarray, want: np.ndarray, what: str = "values") -> None:
    assert not (text := mismatch(np.asarray(got), np.asarray(want), what)), text


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "tensor") -> None:
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, not {want.dtype}"
    assert tuple(got.shape) == tuple(want.shape), f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if text := mismatch(as_bits(got), as_bits(want), what):
        raise AssertionError(text)


def assert_within(got: torch.Tensor, want: np.ndarray, bound: np.ndarray, what: str = "values") -> None:
    """|got - want| <= bound in every element, NaN only where NaN is wanted."""
    value = by_hand.numpy(got).astype(np.float64)
    assert value.shape == want.shape, f"{what}: shape {value.shape}, not {want.shape}"
    assert_equal_arrays(np.isnan(value), np.isnan(want), f"{what}, where NaN")
    excess = np.where(np.isnan(want), 0, np.abs(value - want) - bound)
    if (excess > 0).any():
        at = np.unravel_index(int(excess.argmax()), excess.shape)
        margin = np.broadcast_to(bound, want.shape)[at]
        raise AssertionError(
            f"{what}: {(excess > 0).sum()} of {want.size} beyond the bound, the worst at "
            f"{tuple(int(i) for i in at)}: got {value[at]!r}, want {want[at]!r} +- {margin:.3g}"
        )


def rotation_bound(x: np.ndarray, side: np.ndarray) -> np.ndarray:
    """What fp32 may lose on x @ V: R - 1 additions and 3 roundings (of T, of a product, of the factor) per term."""
    return (side.shape[0] + 2) * FP32_UNIT * by_hand.rotate(np.abs(x), np.abs(side))


def rounded(want: np.ndarray, bound: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The bound once the value is rounded to dtype."""
    return bound + UNIT[dtype] * (np.abs(want) + bound) + TINY[dtype]


def _next_to_scale_tie(
    low: np.ndarray, amax: np.ndarray, slack: np.ndarray, name: str, encode, rule: str
) -> np.ndarray:
    if name == "nvfp4":
        middle = (by_hand.E4M3[low] + by_hand.E4M3[low + 1]) / 2
        return np.abs(encode * amax / 6 - middle) <= encode * slack / 6 + 4 * FP32_UNIT * middle
    start = {"floor": 2.0, "ceil": 1.0, "rceil": 1.5, "even": 1.75}[rule]  # where byte `low` gives way to low + 1
    edge = start * 2.0 ** (low.astype(np.float64) - 127 + 2)
    return np.abs(amax - edge) <= slack


def compare_quantized(
    got, want, z: np.ndarray, dz: np.ndarray, name: str, encode=1.0, rule: str = "even", groups: int | None = None
) -> None:
    """Scale bytes first: at most 1e-5 differ, each a neighbour at a tie. Then codes given equal scales: at most 1e-4.

    got, want: (packed codes, scales). z: the exact float64 input of the quantizer; dz: how far fp32 may be from it.
    groups: the size of the sample, where only those of its groups that differ are given.
    One difference is allowed in a sample too small for the rate to mean anything, and it too must sit at a tie.
    """
    size = by_hand.GROUP[name]
    got_scale, want_scale = by_hand.numpy(got[1]).astype(int), by_hand.numpy(want[1]).astype(int)
    assert got_scale.shape == want_scale.shape, f"scales: shape {got_scale.shape}, not {want_scale.shape}"
    amax = np.abs(z).reshape(z.shape[0], -1, size).max(axis=-1, initial=0)
    slack = dz.reshape(z.shape[0], -1, size).max(axis=-1, initial=0) + 2 * FP32_UNIT * amax
    encode = np.broadcast_to(np.asarray(encode, dtype=np.float64), (z.shape[0], 1))
    wrong = got_scale != want_scale
    text = mismatch(got_scale, want_scale, "scale bytes")
    groups = wrong.size if groups is None else groups
    assert wrong.sum() <= max(1, int(1e-5 * groups)), f"{text}; of {groups} groups in all"
    low = np.minimum(got_scale, want_scale)
    per_group = np.broadcast_to(encode, wrong.shape)
    fair = (np.abs(got_scale - want_scale) == 1)[wrong]
    fair &= _next_to_scale_tie(low[wrong], amax[wrong], slack[wrong], name, per_group[wrong], rule)
    assert fair.all(), f"not neighbours at a tie: {text}"

    got_codes, want_codes = (by_hand.unpack(by_hand.numpy(side[0])).astype(int) for side in (got, want))
    same_scale = np.repeat(~wrong, size, axis=-1)
    off = (got_codes != want_codes) & same_scale
    text = mismatch(np.where(same_scale, got_codes, 0), np.where(same_scale, want_codes, 0), "codes")
    assert off.sum() <= max(1, int(1e-4 * groups * size)), f"{text}; of {groups * size} codes in all"
    rank = np.where(np.arange(16) < 8, np.arange(16) + 8, 15 - np.arange(16))  # codes in the order of their values
    ladder = E2M1_BY_RANK
    first, second = np.minimum(rank[got_codes], rank[want_codes]), np.maximum(rank[got_codes], rank[want_codes])
    step = _step(want_scale, name, encode)
    unit = np.repeat(step, size, axis=-1)
    middle = (ladder[first] + ladder[second]) / 2 * unit
    near = np.abs(z - middle) <= dz + 6 * FP32_UNIT * np.abs(middle)
    assert ((second - first == 1) & near)[off].all(), f"not neighbours at a tie: {text}"


E2M1_BY_RANK = np.concatenate([by_hand.E2M1[:7:-1], by_hand.E2M1[:8]])


def _step(scale: np.ndarray, name: str, encode: np.ndarray) -> np.ndarray:
    return by_hand.E4M3[scale] / encode if name == "nvfp4" else by_hand.E8M0[scale]


def assert_refused(call: Callable[[], object], *words: str, kind: type[Exception] = Refusal) -> str:
    """The call raises a Refusal that says the operation, what was needed, what was found and what to do."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert re.match(r"[\w. -]+: \S", text), f"no operation at the start: {text}"
    assert re.search(r"\n  needs .+; found .+", text), f"no needs/found line: {text}"
    assert re.search(r"\n  do \S.+", text), f"no line that says what to do: {text}"
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    return text
