"""Layouts are permutations with two inverse methods; nothing of fresh memory shows through their padding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import by_hand
from comparing import assert_equal_arrays, assert_refused, assert_same_bits
from quarterturn import layouts

# (rows, columns) around the tile of 128 x 4: M in 1, 7, 127, 129, 385, K / 16 or K / 32 not a multiple of 4
SHAPES = [(1, 1), (1, 4), (7, 3), (3, 5), (2, 3), (127, 4), (128, 4), (129, 6), (385, 5), (256, 8), (0, 4)]
DTYPES = [torch.uint8, torch.float8_e4m3fn]


def marked(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Scales with no zero byte, so that a zero is padding and nothing else."""
    return torch.randint(1, 0x7F, (rows, cols), dtype=torch.uint8).view(dtype)


def test_names() -> None:
    assert layouts.get_layout("linear") is layouts.LINEAR
    assert layouts.LINEAR.name == "linear"
    assert layouts.get_layout("blocked") is layouts.BLOCKED_128x4
    assert layouts.BLOCKED_128x4.name == "blocked"
    with pytest.raises(ValueError, match=r"linear.*blocked|blocked.*linear"):
        layouts.get_layout("swizzled")


def test_nibbles_of_a_literal_byte() -> None:
    assert layouts.unpack_nibbles(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [1, 2]  # .5, 1.0
    assert layouts.pack_nibbles(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0x21]


def test_nibbles_of_every_byte_and_back() -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    codes = layouts.unpack_nibbles(every)
    assert codes.dtype == torch.uint8
    assert_equal_arrays(codes.numpy(), by_hand.unpack(every.numpy()), "codes")
    assert_same_bits(layouts.pack_nibbles(codes), every, "bytes")


def test_nibbles_of_strided_and_empty_tensors() -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    for view in (every.t(), every[::2], every[:, 4:8]):
        assert_equal_arrays(layouts.unpack_nibbles(view).numpy(), by_hand.unpack(view.numpy()), "codes")
        assert_equal_arrays(layouts.pack_nibbles(view % 16).numpy(), by_hand.pack(view.numpy() % 16), "bytes")
    assert layouts.unpack_nibbles(torch.empty(0, 8, dtype=torch.uint8)).shape == (0, 16)
    assert layouts.pack_nibbles(torch.empty(0, 8, dtype=torch.uint8)).shape == (0, 4)


def test_blocked_literals() -> None:
    for rows, cols, (r, c), offset in [(34, 4, (33, 2), 22), (131, 8, (130, 5), 1569)]:
        scale = torch.zeros(rows, cols, dtype=torch.uint8)
        scale[r, c] = 9
        assert layouts.BLOCKED_128x4.forward(scale).flatten().nonzero().tolist() == [[offset]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_blocked_whole_buffer(rows: int, cols: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    layout = layouts.BLOCKED_128x4
    scale = marked(rows, cols, dtype)
    stored = layout.forward(scale)
    assert stored.dtype == dtype
    assert tuple(stored.shape) == tuple(layout.shape(rows, cols))
    assert math.prod(layout.shape(rows, cols)) == -(-rows // 128) * 128 * -(-cols // 4) * 4
    assert_equal_arrays(by_hand.numpy(stored).ravel(), by_hand.blocked(by_hand.numpy(scale)), "padded buffer")
    assert_same_bits(layout.inverse(stored, rows, cols), scale, "scales taken back")


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_the_identity(dtype: torch.dtype) -> None:
    scale = marked(7, 5, dtype)
    assert tuple(layouts.LINEAR.shape(7, 5)) == (7, 5)
    assert_same_bits(layouts.LINEAR.forward(scale), scale)
    assert_same_bits(layouts.LINEAR.inverse(scale, 7, 5), scale)


def test_blocked_of_strided_scales() -> None:
    big = marked(260, 16, torch.uint8)
    for view in (big[::2], big[:, 3:9], big[:16].t()):
        got = layouts.BLOCKED_128x4.forward(view).flatten().numpy()
        assert_equal_arrays(got, by_hand.blocked(np.ascontiguousarray(view.numpy())), "padded buffer")


def test_inverse_refuses_a_buffer_of_another_size() -> None:
    stored = layouts.BLOCKED_128x4.forward(marked(129, 6, torch.uint8))
    assert_refused(lambda: layouts.BLOCKED_128x4.inverse(stored, 128, 6), "128")
    assert_refused(lambda: layouts.LINEAR.inverse(marked(4, 4, torch.uint8), 4, 5))
