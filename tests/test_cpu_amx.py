"""Products in AMX tiles: where they are used, and what a row and a weight give there.

Those marked `amx` need such a CPU and fail on any other; `make test` leaves them out by name there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cpu_cases
from comparing import assert_same_bits
from cpu_cases import DTYPES, ENCODE, every_format, many_rows, operand_weight, packed
from quarterturn import FP4Tensor, ops
from quarterturn.backends import Layer, Quantizer, cpu_native
from quarterturn.formats import FORMATS, NVFP4

kernels, threads = cpu_cases.kernels, cpu_cases.threads
pytestmark = pytest.mark.usefixtures("kernels")


def cpu_flags() -> set[str]:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def test_tiles_are_used_where_the_machine_has_them() -> None:
    """Or the tests of them would hold of nothing. Where the system withholds the tiles of a CPU that has them (the flag
    is there, and asking for them fails), no kernel may use them."""
    has = {"amx_tile", "amx_bf16", "avx512bw", "avx512vbmi"} <= cpu_flags()
    granted = has and torch.cpu._init_amx()
    layer = Layer(operand_weight(packed(32, 64, "nvfp4")), None, None, None, Quantizer(NVFP4, torch.tensor([ENCODE])))
    form = cpu_native.operand(torch.randn(100, 64).bfloat16(), layer).form
    assert cpu_native._has_tiles() == granted
    assert (form == cpu_native.TILES) == granted


# Where bf16 holds what is multiplied: see cpu_native._in_tiles.
IN_TILES = [(a, d, f) for f in FORMATS for d in DTYPES for a in ("fp4", "bf16")
            if d == torch.bfloat16 or (a, f) == ("fp4", "nvfp4")]  # fmt: skip


@pytest.mark.amx
@pytest.mark.parametrize(("activations", "dtype", "format"), IN_TILES)
@pytest.mark.parametrize("decoded", [False, True])
def test_a_row_does_not_depend_on_those_beside_it(
    decoded: bool, activations: str, dtype: torch.dtype, format: str, threads: None
) -> None:
    """Nor on what lies in memory behind them, nor on the threads."""
    rows = cpu_native.FEW_ROWS
    for x, *_, run in many_rows(decoded, activations, dtype, format):
        whole = run(x)
        x[5 * rows] = float("nan")
        changed = run(x)
        assert bool(changed[5 * rows].isnan().all())
        changed[5 * rows] = whole[5 * rows]
        assert_same_bits(changed, whole, "the rows beside one that is no number")
        for some in (cpu_native.TILES_FROM, 5, 16, 17, 32, 33, rows, rows + 1):
            assert_same_bits(run(x[:some]), whole[:some], f"{some} rows")
        torch.set_num_threads(1)
        assert_same_bits(run(x[: rows + 6]), whole[: rows + 6], "one thread")
        torch.set_num_threads(2)


@pytest.mark.amx
def test_a_w4a4_row_alone_has_the_bits_of_its_own_product() -> None:
    """As the documentation has it: tiles begin with two rows, where the order of sums changes; `batch_invariant` is
    for whoever wants one."""
    x, *_, run = list(many_rows(False, "fp4", torch.float32, "nvfp4"))[1]
    assert not torch.equal(run(x[:1]), run(x[:2])[:1])
    assert_same_bits(run(x[:1]), run(x[:2], own=True)[:1])
    assert_same_bits(run(x[:1], own=True), run(x, own=True)[:1])


@pytest.mark.amx
@every_format
@pytest.mark.parametrize("rows", [32, 64])
def test_tiles_multiply_by_what_a_weight_decodes_to(rows: int, format: str) -> None:
    """Every code under every scale byte, picked out by rows of an identity: for few rows of x and for many."""
    fmt, k = FORMATS[format], 64
    groups = k // fmt.group_size
    scale = torch.arange(256, dtype=torch.uint8).repeat_interleave(groups).view(256, groups)
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 2)
    codes = codes | codes.flip(1) << 4
    weight = FP4Tensor(codes, scale.view(fmt.scale_dtype), torch.ones(1), None, fmt, (256,))
    want = weight.values()
    numbers = want.isfinite().all(1)
    # The tile unit takes numbers below 2^-126 for zero.
    want = torch.where(want.abs() < 2.0**-126, 0, want)
    for first in range(0, k, rows):
        x = torch.eye(k)[first : first + rows].bfloat16()
        got = ops.fp4_matmul(x, weight=weight, out_dtype=torch.float32, backend="cpu_native").T
        assert torch.equal(got[numbers], want[numbers, first : first + rows])
        assert bool(got[~numbers].isnan().all())
