"""The machine code of the wide Hadamard kernel for Hopper: that programs fit, and how many instructions a value takes.

A copy leaves some 28 issue slots a value on an H200, and instructions that do not fit in its caches cost more than
those that do.
"""

from __future__ import annotations

import pytest
import torch

from ahead_of_time import Compiled, compile_kernel
from quarterturn.backends.gpu_wide_hopper import CUTS, INNERS, Config
from quarterturn.kernels import ring_ptx
from quarterturn.kernels.hadamard_wide_hopper import barriers_at, hadamard_wide_hopper
from test_kernels_compile import TYPE

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARED, REGISTERS, THREADS = 233472, 65536, (384, 512)
"""Of a multiprocessor, which keeps 1,024 bytes for each program; threads that a program takes registers for, without
and with signs of x."""
PER_VALUE = {False: 16.6, True: 24}
"""Instructions of all code but the prologue, for each of the 128 values of a row that a thread has: what copies, waits
and changes signs included."""


def compiled(inner: int, left: bool, right: bool, dtype: torch.dtype = BF16, out: torch.dtype = BF16) -> Compiled:
    from triton.experimental.gluon.language import NVMMASharedLayout

    config = Config(torch.device("cpu"), 112, inner, dtype, out, left, right)
    x = f"tensordesc<{TYPE[dtype]}[1, {config.cut.chunk}, 64],{NVMMASharedLayout(128, 16, 3)!r}>"
    signature = {
        "x_desc": x, "z_ptr": f"*{TYPE[out]}", "dense_ptr": f"*{TYPE[dtype]}", "left_ptr": "*i32", "right_ptr": "*i32",
        "rows": "i32", "factor": "fp32",
    }  # fmt: skip
    constants = config.constants()
    return compile_kernel(
        hadamard_wide_hopper, signature, constants, 90, num_warps=constants["num_warps"],
        divisible=["z_ptr", "dense_ptr", "left_ptr", "right_ptr"], maxnreg=config.cut.registers,
    )  # fmt: skip


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP32)], ids=str)
@pytest.mark.parametrize("signs", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("inner", INNERS)
def test_the_kernel(inner: int, signs: tuple[bool, bool], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    built, how = compiled(inner, *signs, *dtypes), CUTS[inner, signs[0]]
    assert ring_ptx.barriers_in(built.ptx) == barriers_at(inner // 64, how.stages)
    # A few words of signs may be left without a register.
    assert built.local_accesses <= (32 if any(signs) else 0), built.summary()
    assert how.programs * (built.shared + 1024) <= SHARED, built.summary()
    assert how.programs * THREADS[signs[0]] * built.registers <= REGISTERS, built.summary()
    assert set(built.global_stores) == {128}, built.summary()
    assert built.global_stores[128] == inner // 16 * dtypes[1].itemsize // 2, built.summary()
    assert built.sass_counts["HGMMA"] == inner // 8
    assert built.sass_counts["SHFL"] == inner // 2
    assert built.sass_counts["UTMALDG"] > 0
    # The warp that copies waits for the kernel before, and all others for what it copies.
    assert built.ptx.count("griddepcontrol.wait") == 1
    assert built.ptx.index("griddepcontrol.wait") < built.ptx.index("cp.async.bulk.tensor")


@pytest.mark.parametrize("signed", [False, True])
def test_the_widest_takes_few_instructions(signed: bool) -> None:
    built = compiled(256, signed, False)
    assert len(built.sass) <= PER_VALUE[signed] * 128 + 200, built.summary()
