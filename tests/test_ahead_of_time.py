"""Compiling for GPUs that are not here: what the helper reads, on kernels whose machine code is known beforehand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ahead_of_time import CAPABILITIES, Instruction, compile_kernel

every_capability = pytest.mark.parametrize("capability", CAPABILITIES)
POINTERS = {"x": "*bf16", "y": "*bf16"}


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def sum_in_a_loop(x, y, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x + start + tl.arange(0, BLOCK)).to(tl.float32) * 3.0
    tl.store(y + tl.arange(0, BLOCK), total.to(tl.bfloat16))


@triton.jit
def product(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(y + at, tl.dot(tl.load(x + at), tl.load(y + at)).to(tl.bfloat16))


@gluon.jit
def gluon_copy(x, y, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(y + at, gl.load(x + at, mask=at < n), mask=at < n)


@every_capability
@pytest.mark.parametrize("kernel", [copy, gluon_copy], ids=["triton", "gluon"])
def test_a_copy_of_aligned_memory_moves_128_bits_a_thread(kernel, capability: int) -> None:
    built = compile_kernel(kernel, POINTERS | {"n": "i32"}, {"BLOCK": 2048}, capability, divisible=["x", "y", "n"])
    assert built.global_loads == {128: 2}
    assert built.global_stores == {128: 2}
    assert built.sass_counts["LDG"] == built.sass_counts["STG"] == 2
    assert sum(n for name, n in built.ptx_counts.items() if name.startswith("ld.global")) == 2
    assert 8 <= built.registers <= 64
    assert built.shared == built.spill_stores == built.spill_loads == built.stack == built.local_accesses == 0
    assert not built.loops


def test_unaligned_memory_is_not_moved_in_128_bits() -> None:
    """So that the test above can fail."""
    built = compile_kernel(copy, POINTERS | {"n": "i32"}, {"BLOCK": 1024}, 90, divisible=[])
    assert built.global_loads == {16: 8}
    assert built.global_stores == {16: 8}


@every_capability
def test_a_loop_is_found(capability: int) -> None:
    signature = {"x": "*bf16", "y": "*bf16", "n": "i32"}
    built = compile_kernel(sum_in_a_loop, signature, {"BLOCK": 1024}, capability, num_stages=1)
    assert built.loops
    longest = max(built.loops, key=len)
    assert any(i.name == "LDG" for i in longest)
    assert not any(i.name == "STG" for i in longest)


@triton.jit
def branch_in_a_loop(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(n):
        if start % 7 == 3:
            total -= tl.sum(total)
        total += tl.load(x + start * BLOCK + at).to(tl.float32)
    tl.store(y + at, total.to(tl.bfloat16))


@every_capability
def test_the_shortest_pass_leaves_out_what_only_some_passes_do(capability: int) -> None:
    signature = {"x": "*bf16", "y": "*bf16", "n": "i32"}
    built = compile_kernel(branch_in_a_loop, signature, {"BLOCK": 1024}, capability, num_stages=1)
    loop = min((loop for loop in built.loops if any(i.name == "LDG" for i in loop)), key=len)
    short = built.shortest_pass(loop)
    assert (short[0], short[-1]) == (loop[0], loop[-1])
    assert any(i.name == "LDG" for i in short)
    assert not any(i.name == "SHFL" for i in short)
    assert any(i.name == "SHFL" for i in loop)


def test_contraction_can_be_switched_off() -> None:
    signature, constants = {"x": "*bf16", "y": "*bf16", "n": "i32"}, {"BLOCK": 1024}
    fused = compile_kernel(sum_in_a_loop, signature, constants, 90)
    apart = compile_kernel(sum_in_a_loop, signature, constants, 90, enable_fp_fusion=False)
    assert any(name.startswith("fma.") for name in fused.ptx_counts)
    assert not any(name.startswith("fma.") for name in apart.ptx_counts)
    assert apart.sass_counts["FMUL"] > 0 == fused.sass_counts["FMUL"]


@pytest.mark.parametrize(("capability", "instruction"), [(80, "HMMA"), (90, "HGMMA"), (100, "UTCHMMA"), (120, "HMMA")])
def test_a_product_runs_on_the_matrix_unit_of_the_generation(capability: int, instruction: str) -> None:
    built = compile_kernel(product, POINTERS, {"BLOCK": 64}, capability)
    assert built.sass_counts[instruction] > 0
    assert built.shared > 0


def test_spills_are_seen() -> None:
    """A product whose accumulators cannot fit in 32 registers a thread."""
    built = compile_kernel(product, POINTERS, {"BLOCK": 128}, 80, maxnreg=32)
    assert built.spill_stores > 0
    assert built.spill_loads > 0
    assert built.local_accesses > 0
    assert built.registers <= 32


def test_equal_arguments_are_compiled_once() -> None:
    arguments = (copy, POINTERS | {"n": "i32"}, {"BLOCK": 512}, 90)
    assert compile_kernel(*arguments) is compile_kernel(*arguments)
    assert compile_kernel(*arguments, num_warps=8) is not compile_kernel(*arguments)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"missing \['n'\], unknown \['m'\]"):
        compile_kernel(copy, POINTERS | {"m": "i32"}, {"BLOCK": 512})
    with pytest.raises(TypeError, match="TRITON_INTERPRET"):
        compile_kernel(max, {})


@pytest.mark.parametrize(("opcode", "bits"), [
    ("LDG.E", 32), ("LDG.E.128.CONSTANT", 128), ("STG.E.U8", 8), ("LDG.E.U16.CONSTANT", 16),
    ("LDGSTS.E.BYPASS.128", 128), ("LDG.E.LTC128B.64", 64),
])  # fmt: skip
def test_widths_of_opcodes(opcode: str, bits: int) -> None:
    assert Instruction(0, "", opcode, "").bits == bits


def test_the_command_line() -> None:
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(here)}
    done = subprocess.run(
        [sys.executable, "-m", "ahead_of_time", "test_ahead_of_time:copy", "--signature", "x=*bf16", "y=*bf16", "n=i32",
         "--constexpr", "BLOCK=1024", "--capability", "90", "--divisible", "x", "y", "n"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "copy for sm_90" in done.stdout
    assert "global loads  1 of 128 bits" in done.stdout
