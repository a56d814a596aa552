"""The machine code of the wide Hadamard kernel, compiled for GPUs that are not here.

Held is what makes it fast: the matrix unit, 16-byte loads and stores, registers and shared memory that let as many
programs run as the launch starts, and instructions a value. A copy leaves some 28 issue slots a value on an H200.
"""

from __future__ import annotations

import pytest
import torch

from ahead_of_time import CAPABILITIES, Compiled, compile_kernel
from quarterturn.backends.gpu_wide import Wide, constants, cut, fits, make_wide
from quarterturn.kernels.hadamard_wide import hadamard_wide
from test_kernels_compile import MATRIX_UNIT, SHARED_MOST, TYPE
from wide_matrices import factors

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARED = {80: 167936, 90: 233472, 100: 233472, 120: 102400}
"""Bytes a multiprocessor has for its programs, each of which takes 1,024 more than it asks for."""
REGISTERS = 65536
# Orders of the factors, whether random signs are read, dtypes of x and output; instructions a value on 9.0 at most, and
# on the others.
CASES = {
    "256": ((256,), False, BF16, BF16, 7.5, 8),
    "4096": ((4096,), False, FP16, FP16, 9.5, 12),
    "8192": ((8192,), False, BF16, BF16, 10.2, 12.5),
    "8192 to fp32, signs": ((8192,), True, BF16, FP32, 16, 18.5),
    "768, small inside, signs": ((64, 12), True, BF16, FP32, 18.5, 20),
    "3584, small inside": ((128, 28), False, BF16, BF16, 12.5, 13.5),
    "14336": ((28, 512), False, BF16, BF16, 11.5, 16),
    "11008": ((172, 64), False, BF16, BF16, 14.5, 23),
    "28672": ((28, 1024), False, BF16, BF16, 13, 17),
    "28672 to fp32": ((28, 1024), False, BF16, FP32, 13.5, 17),
    "28672, small inside": ((1024, 28), False, BF16, BF16, 15, 17.5),
    "28672, signs": ((28, 1024), True, BF16, BF16, 16, 23),
}
SPILLS = {"28672, signs": {80: 64, 120: 64}}
"""Where registers do not suffice, and how many accesses to local memory a thread has for its 128 values."""


def form(name: str) -> Wide:
    orders, signed, dtype, *_ = CASES[name]
    wide = make_wide(factors(*orders, signed=signed), 0.01, False, dtype, torch.device("cpu"))
    assert wide is not None
    return wide


def compiled(name: str, capability: int, one_row: bool = False) -> Compiled:
    x, out = (TYPE[dtype] for dtype in CASES[name][2:4])
    given = constants(form(name), (capability // 10, capability % 10)) | {"INTERPRETED": False}
    options = {option: given.pop(option) for option in ("num_warps", "maxnreg")}
    signature = {
        "x_ptr": f"*{x}", "dense_ptr": f"*{x}", "left_ptr": "*i16", "right_ptr": "*i16", "out_ptr": f"*{out}",
        "rows": "i32", "factor": "fp32",
    }  # fmt: skip
    if one_row:  # as a launch has it, whose arguments that are 1 are constants
        del signature["rows"]
        given["rows"] = 1
    return compile_kernel(hadamard_wide, signature, given, capability, **options)


def per_value(built: Compiled, threads: int, values: int) -> float:
    """Instructions a thread of one tile, the loop's, for each of its values that is stored."""
    loop = max(built.loops, key=len)
    assert any(i.name == "STG" for i in loop), built.summary()
    return len(loop) * threads / values


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel(name: str, capability: int) -> None:
    wide, at, (_, _, _, out, on_hopper, elsewhere) = form(name), (capability // 10, capability % 10), CASES[name]
    if not fits(wide, at):
        assert (name, capability) == ("11008", 120)
        return
    built, made = compiled(name, capability), cut(wide, at)
    threads, values = 32 * made.num_warps, made.rows * wide.size
    tile = made.rows * wide.padded * wide.outer * wide.inner
    assert built.local_accesses <= SPILLS.get(name, {}).get(capability, 0), built.summary()
    assert built.shared <= SHARED_MOST[capability], built.summary()
    assert made.programs * (built.shared + 1024) <= SHARED[capability], built.summary()
    assert made.programs * threads * built.registers <= REGISTERS, built.summary()
    assert sum(built.sass_counts[unit] for unit in MATRIX_UNIT) > 0
    assert per_value(built, threads, values) <= (on_hopper if capability == 90 else elsewhere), built.summary()

    # 16 bytes a thread, each value once: padding that no thread has to touch is left out
    assert set(built.global_loads) <= {128}, built.summary()
    assert set(built.global_stores) == {128}, built.summary()
    most = tile * out.itemsize // 16 // threads
    assert most * wide.order // wide.padded <= built.global_stores[128] <= most, built.summary()
    if capability == 90:
        warp_groups = wide.padded >= 64
        assert (built.sass_counts["HGMMA"] > 0) == warp_groups


def test_one_row_by_itself() -> None:
    built = compiled("8192", 90, one_row=True)
    assert built.local_accesses == 0
    assert built.sass_counts["HGMMA"] > 0


def test_the_widest_are_compiled() -> None:
    """Or the limits of shared memory would be those of nothing."""
    assert max(form(name).size for name in CASES) == 28672
    assert max(form(name).padded for name in CASES) == 256
