"""Weights in fragments: back bit for bit, and decoded to e2m1 * block_scale by the steps of the kernels."""

from __future__ import annotations

import pytest
import torch

from quarterturn import weight_layout
from quarterturn.errors import Refusal
from quarterturn.formats import E2M1_VALUES, FORMATS, MXFP4, NVFP4
from quarterturn.layouts import unpack_nibbles

SHAPES = [(64, 256), (128, 64), (16, 32), (80, 480), (7, 96), (72, 320), (1, 1056)]


def random_weight(n, k, fmt, seed=0):
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=make)
    low, high = (1, 0x7F) if fmt == NVFP4 else (90, 136)
    scale = torch.randint(low, high, (n, k // fmt.group_size), dtype=torch.uint8, generator=make)
    return codes, scale.view(fmt.scale_dtype)


def expected(codes, scale, fmt):
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)[unpack_nibbles(codes).long()]
    by = scale.double() if fmt == NVFP4 else torch.ldexp(torch.tensor(1.0, dtype=torch.float64), scale.double() - 127)
    return values * by.repeat_interleave(fmt.group_size, dim=1)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_there_and_back(n, k, fmt):
    codes, scale = random_weight(n, k, fmt)
    weight = weight_layout.forward(codes, scale, fmt)
    assert weight.codes.shape == (-(-n // 64) * 4, -(-k // 64), 32, 4)
    assert weight.scales.shape == (-(-n // 64) * 4, -(-k // 256), 32 if fmt == NVFP4 else 16, 8)
    back_codes, back_scale = weight_layout.inverse(weight)
    assert torch.equal(back_codes, codes)
    assert torch.equal(back_scale.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_decoded_as_the_formats_say(n, k, fmt):
    codes, scale = random_weight(n, k, fmt, seed=1)
    found = weight_layout.decoded(weight_layout.forward(codes, scale, fmt))
    assert torch.equal(found.double(), expected(codes, scale, fmt))


def test_a_width_of_whole_groups_only():
    codes, scale = random_weight(9, 464, NVFP4)
    weight = weight_layout.forward(codes, scale, NVFP4)
    assert torch.equal(weight_layout.inverse(weight)[0], codes)
    assert torch.equal(weight_layout.decoded(weight).double(), expected(codes, scale, NVFP4))


def test_every_code_under_every_scale():
    """All pairs of codes, all E4M3 scales and the E8M0 scales that the layout says are exact."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for fmt, bytes_ in ((NVFP4, range(128)), (MXFP4, range(9, 137)), (MXFP4, range(127, 252))):
        scale = torch.tensor(bytes_, dtype=torch.uint8).repeat_interleave(16)[:, None]
        scale = scale.repeat(1, 32 // fmt.group_size).view(fmt.scale_dtype)
        repeated = codes.repeat(len(bytes_), 1)
        found = weight_layout.decoded(weight_layout.forward(repeated, scale, fmt)).double()
        wanted = expected(repeated, scale, fmt)
        if fmt == NVFP4:
            assert found[127 * 16 :].isnan().all()
            found, wanted = found[: 127 * 16], wanted[: 127 * 16]
        assert torch.equal(found, wanted)


def test_nan_scales_give_nan_and_zero_scales_zero():
    for fmt in FORMATS.values():
        codes, scale = random_weight(16, 64, fmt)
        scale.view(torch.uint8)[3, 1] = fmt.nan_byte
        scale.view(torch.uint8)[5, 0] = 0
        weight = weight_layout.forward(codes, scale, fmt)
        found = weight_layout.decoded(weight)
        group = fmt.group_size
        assert found[3, group : 2 * group].isnan().all()
        assert found.isnan().sum() == group
        if fmt == NVFP4:
            assert torch.equal(found[5, :group], torch.zeros(group))
        assert torch.equal(weight_layout.inverse(weight)[1].view(torch.uint8), scale.view(torch.uint8))


def test_one_value_where_the_fragment_has_it():
    """Against the text of the layout, by hand: row 16 + 8 + 3, value 64 + 16 * 2 + 5 is lane 14, word 2, pair 2."""
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[27, (64 + 32 + 5) // 2] = 0x9 << 4  # -0.5 at the odd place
    scale = torch.full((64, 8), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = weight_layout.forward(codes, scale, NVFP4)
    assert weight.codes.count_nonzero() == 1
    word = int(weight.codes[1, 1, 14, 2]) % 2**32
    assert (word << 6 | word >> 26) % 2**32 == 0x80000000 | 1 << 22
    assert (weight.scales[:, 0, :, :4] == 0x38 + 112).all()  # 1.0 in both blocks
    assert not weight.scales[:, 0, :, 4:].any()


def test_negative_scales_are_refused():
    codes, scale = random_weight(16, 64, NVFP4)
    scale.view(torch.uint8)[0, 0] = 0xB8
    with pytest.raises(Refusal, match="negative"):
        weight_layout.forward(codes, scale, NVFP4)
