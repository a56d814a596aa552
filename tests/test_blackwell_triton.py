"""The numbers of the FP4 product for Blackwell, against the definition by hand.

In the interpreter the kernel runs with DEFINITION set: the tiles, tails, scale layouts and epilogue of both families
are those that a GPU would run, the one call of `tl.dot_scaled` is not. test_blackwell_compile.py holds that nothing
else hangs on that switch, and test_the_interpreters_own_scaled_product runs the call itself where Triton can.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from blackwell_cases import MARKS, NAME, Side, exact, families, product, side, wide
from comparing import assert_same_bits, assert_within, rounded
from conftest import INTERPRETED
from gpu_cases import DEVICE, FORMATS
from quarterturn import FP4Tensor, ops
from quarterturn.backends import blackwell_launch
from quarterturn.backends.gpu_device import triton_version
from quarterturn.kernels.matmul_scaled import _codes, _row_scales

pytestmark = MARKS
SHAPES = [(1, 16, 32), (1, 130, 96), (16, 128, 256), (17, 129, 288), (33, 64, 544), (65, 257, 160), (129, 127, 320),
          (257, 130, 96)]  # fmt: skip
"""M, N, K: one and odd rows, one more than each tile, outputs that fill no tile, K of one group of MXFP4 and tails."""
each_family = pytest.mark.parametrize("family", families(), ids=lambda f: f"{f}.x")
each_format = pytest.mark.parametrize("name", FORMATS)


@each_family
@each_format
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_exact_sums_are_hit(name: str, m: int, n: int, k: int, family: int, poisoned_memory: None) -> None:
    x, w = side(name, m, k, (0.75,)), side(name, n, k, (1.5,))
    assert_same_bits(product(x, w, family=family), torch.from_numpy(exact(x, w)), "y")


@each_family
@pytest.mark.parametrize("k", [16, 48, 80, 272])
def test_k_of_an_odd_number_of_nvfp4_groups(k: int, family: int) -> None:
    """Rows of codes that are no multiple of 16 bytes, and scales whose last tile is a part."""
    x, w = side("nvfp4", 5, k), side("nvfp4", 20, k)
    assert_same_bits(product(x, w, family=family), torch.from_numpy(exact(x, w)), "y")


@each_family
@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("each_row", [False, True], ids=["", "a scale each row"])
def test_ranges_bias_and_one_rounding(name: str, dtype: torch.dtype, each_row: bool, family: int) -> None:
    """Tensor scales of several ranges that end within a tile, as fused q/k/v has them; bias added in fp32."""
    m, sizes = 20, (100, 30, 26)
    x = side(name, m, 96, tuple(2.0 ** -(i % 5) + i / 64 for i in range(m)) if each_row else (0.3,))
    w = side(name, sum(sizes), 96, (0.02, 0.2, 2.0))
    bias = torch.randn(sum(sizes)).numpy()
    want = torch.from_numpy(exact(x, w, sizes, bias))
    got = product(x, w, sizes, bias, dtype, family)
    assert_same_bits(got, want.to(dtype), "y")


@each_family
@each_format
@pytest.mark.parametrize(("m", "n", "k"), SHAPES[1::2])
def test_every_scale_byte(name: str, m: int, n: int, k: int, family: int) -> None:
    """Scales of every size: sums as good as fp32's."""
    x, w = side(name, m, k, (2.0**-7,), small=False), side(name, n, k, (0.3,), small=False)
    y, bound = wide(x, w)
    assert_within(product(x, w, family=family), y, bound, "y")
    got = product(x, w, dtype=torch.bfloat16, family=family)
    assert_within(got, y, rounded(y, bound, torch.bfloat16), "y in bf16")


@each_family
@each_format
@pytest.mark.parametrize("m", [3, 130])
def test_a_nan_scale_makes_its_row_nan_and_no_other(name: str, m: int, family: int) -> None:
    x, w = side(name, m, 320), side(name, 70, 320)
    clean = product(x, w, family=family)
    spoilt = Side(x.codes.copy(), x.scale.copy(), x.tensor_scale, name)
    spoilt.scale[m - 2, -1] = FORMATS[name].nan_byte
    spoilt.codes[m - 2, -by_group(name) // 2 :] = 0
    y = product(spoilt, w, family=family)
    assert torch.isnan(y[m - 2]).all()
    others = [row for row in range(m) if row != m - 2]
    assert_same_bits(y[others], clean[others], "the other rows")


def by_group(name: str) -> int:
    return FORMATS[name].group_size


@each_family
def test_no_rows_and_no_outputs(family: int) -> None:
    for m, n in ((0, 48), (3, 0), (0, 0)):
        assert product(side("nvfp4", m, 64), side("nvfp4", n, 64), family=family).shape == (m, n)


@each_family
def test_a_row_does_not_depend_on_the_tile_it_is_in(family: int) -> None:
    """Sums that are exact are the same in any order; others, in the same order of K, on the CPU at least near."""
    x, w = side("nvfp4", 300, 96), side("nvfp4", 40, 96)
    whole = product(x, w, family=family)
    for rows in (1, 16, 17, 60, 128, 200):
        part = product(Side(x.codes[:rows], x.scale[:rows], x.tensor_scale, x.name), w, family=family)
        assert_same_bits(part, whole[:rows], f"the first {rows} rows")


@each_format
@pytest.mark.parametrize("m", [0, 1, 40])
def test_the_op_takes_linear_scales(name: str, m: int) -> None:
    x, w = side(name, m, 96, (0.5,)), side(name, 48, 96, (2.0,) if name == "nvfp4" else (1.0,))
    fmt = FORMATS[name]
    parts = [torch.from_numpy(a).to(DEVICE) for a in (x.codes, x.scale, x.tensor_scale, w.codes, w.scale)]
    weight = FP4Tensor(
        parts[3], parts[4].view(fmt.scale_dtype), torch.from_numpy(w.tensor_scale).to(DEVICE), None, fmt, (48,)
    )
    got = ops.fp4_matmul(
        parts[0], parts[2], weight=weight, x_block_scale=parts[1].view(fmt.scale_dtype), out_dtype=torch.float32,
        backend=NAME,
    )  # fmt: skip
    assert_same_bits(got.cpu(), torch.from_numpy(exact(x, w)), "y")


@triton.jit
def _read_codes(ptr, out, row, count, half, BLOCK_K: tl.constexpr):
    rows = row + tl.arange(0, 2)
    at = tl.arange(0, 2)[:, None] * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)[None, :]
    tl.store(out + at, _codes(ptr, rows, count, 0, half, BLOCK_K))


@triton.jit
def _read_scales(ptr, out, row, padded, quads, quad, GROUPS: tl.constexpr):
    rows = row + tl.arange(0, 2)
    at = tl.arange(0, 2)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    tl.store(out + at, _row_scales(ptr, rows, padded, quad, quads, 2, GROUPS, 32))


def test_nothing_is_read_behind_the_last_row_or_column() -> None:
    """Zeros come in its place. In a product such codes meet scales of zero, so no result would show it."""
    codes = torch.randint(1, 256, (4, 24), dtype=torch.uint8, device=DEVICE)
    got = torch.empty(2, 32, dtype=torch.uint8, device=DEVICE)
    _read_codes[(1,)](codes, got, 1, 2, 24, BLOCK_K=64)
    want = torch.zeros(2, 32, dtype=torch.uint8)
    want[0, :24] = codes[1].cpu()
    assert_same_bits(got.cpu(), want, "codes")
    words = torch.full((3 * 128,), 0x01010101, dtype=torch.int32, device=DEVICE)
    got = torch.empty(2, 8, dtype=torch.uint8, device=DEVICE)
    _read_scales[(1,)](words, got, 127, 128, 1, 0, GROUPS=8)
    assert got.cpu().tolist() == [[1] * 4 + [0] * 4, [0] * 8]


def test_addresses_beyond_32_bits() -> None:
    """Rows at and behind 2^31 bytes; of the memory only the pages that are written here are real on a CPU."""
    half = 2**24 + 16
    codes = torch.empty(130 * half, dtype=torch.uint8, device=DEVICE)
    row = 2**31 // half
    want = torch.randint(0, 256, (2, 128), dtype=torch.uint8, device=DEVICE)
    for i in range(2):
        codes[(row + i) * half :][:128] = want[i]
    got = torch.empty(2, 128, dtype=torch.uint8, device=DEVICE)
    _read_codes[(1,)](codes, got, row, 130, half, BLOCK_K=256)
    assert row * half < 2**31 < (row + 1) * half
    assert_same_bits(got.cpu(), want.cpu(), "codes")
    quads = 2**15 + 1
    words = torch.empty(129 * quads * 128, dtype=torch.int32, device=DEVICE)
    row = 128 * 128  # the first of the last tiles; its last columns lie behind 2^31 bytes
    first = (128 * quads + quads - 2) * 128
    assert first * 4 > 2**31
    for i in range(2):
        for quad in range(2):
            words[first + quad * 128 + i * 4] = 0x03020100 + 0x01010101 * (16 * i + 4 * quad)
    got = torch.empty(2, 8, dtype=torch.uint8, device=DEVICE)
    _read_scales[(1,)](words, got, row, 129 * 128, quads, quads - 2, GROUPS=8)
    assert got.cpu().tolist() == [list(range(16 * i, 16 * i + 8)) for i in range(2)]


@pytest.mark.skipif(not INTERPRETED, reason="is about the interpreter; on a GPU every test here runs the call itself")
@each_family
def test_the_interpreters_own_scaled_product(family: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why DEFINITION is there: 3.6 fails, 3.9 takes E4M3 scales for E8M0; its MXFP4 is right, and so is this call."""
    constants = blackwell_launch.ScaledConfig.constants
    monkeypatch.setattr(blackwell_launch.ScaledConfig, "constants", lambda self, definition: constants(self, False))
    x, w = side("mxfp4", 17, 288), side("mxfp4", 129, 288)
    if triton_version() < (3, 9):
        with pytest.raises(Exception, match="'str' object has no attribute 'value'"):
            product(x, w, family=family)
        return
    assert_same_bits(product(x, w, family=family), torch.from_numpy(exact(x, w)), "y of MXFP4")
    x, w = side("nvfp4", 17, 288), side("nvfp4", 129, 288)
    assert not np.array_equal(product(x, w, family=family).numpy(), exact(x, w)), "the interpreter knows E4M3 now"
