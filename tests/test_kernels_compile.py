"""The machine code of the rotate + quantize kernels, compiled for GPUs that are not here.

Compiled as the launches in gpu_launch.py would, from their own configurations. What is held is what makes them fast
(matrix units, wide loads and stores, the programs a multiprocessor that a tiling counts on, instructions a value) and
what makes them exact (no contraction, E2M1 by the hardware only where it has it, two facts of ptxas worked around).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from ahead_of_time import CAPABILITIES, Compiled, Instruction, compile_kernel
from quarterturn.backends.gpu_launch import HopperConfig, PortableConfig, Tiling, tiling
from quarterturn.backends.gpu_triton import FUSED_SIZES, fuses
from quarterturn.formats import E8M0_RULES
from quarterturn.kernels import CODES, ROTATED, VALUES
from quarterturn.kernels.rotate_quantize import rotate_quantize
from quarterturn.kernels.rotate_quantize_hopper import RUN, amax_asm, quantize_asm, rotate_quantize_hopper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPE = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
MULTIPROCESSORS = 132
REGISTERS, SHARED = 65536, 233472  # of a Hopper multiprocessor
SHARED_MOST = {80: 166912, 90: 232448, 100: 232448, 120: 101376}  # bytes that one program can have
MATRIX_UNIT = ("HMMA", "HGMMA", "UTCHMMA", "DMMA")


def assert_all_in_registers(built: Compiled) -> None:
    assert built.local_accesses == built.stack == 0, built.summary()


# ---- the portable kernel


def portable(
    size: int, pieces: int, dtype: torch.dtype = BF16, output: int = CODES, group: int = 16, rule: str = "even",
    m: int = 4096, blocked: bool = False, token: bool = False,
) -> PortableConfig:  # fmt: skip
    return PortableConfig(dtype, size, pieces, m, output, blocked, group, rule, token, False)


PORTABLE = {
    "nvfp4 codes": portable(64, 1),
    "nvfp4 codes, few rows, fp16, blocked": portable(128, 1, FP16, m=16, blocked=True),
    "nvfp4 codes, a scale each token": portable(64, 3, token=True),
    "nvfp4 codes of fp32, no transform": portable(0, 0, FP32, m=16),
    "mxfp4 codes, blocked": portable(16, 1, group=32, blocked=True),
    "mxfp4 codes, dense": portable(128, 3, group=32, rule="floor"),
    "nvfp4 values, dense fp16": portable(16, 2, FP16, VALUES),
    "mxfp4 values, dense, few rows": portable(128, 3, BF16, VALUES, 32, m=16),
    "rotated, dense": portable(128, 3, BF16, ROTATED),
    "rotated fp16": portable(64, 1, FP16, ROTATED),
}


def compiled_portable(config: PortableConfig, capability: int, **other: object) -> Compiled:
    constants = config._replace(hardware=capability >= 100).constants() | other
    options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    x = TYPE[config.dtype]
    signature = {
        "x_ptr": f"*{x}", "x_stride": "i32", "pieces_ptr": "*fp64" if config.size and x == "fp32" else f"*{x}",
        "out_ptr": "*i32" if config.output == CODES else f"*{x}", "scale_ptr": "*u8", "tensor_scale_ptr": "*fp32",
        "encode_ptr": "*fp32", "m": "i32", "k": "i32", "padded_rows": "i32", "padded_cols": "i32", "factor": "fp32",
    }  # fmt: skip
    even = [*(name for name, kind in signature.items() if kind.startswith("*")), "x_stride", "k"]
    return compile_kernel(rotate_quantize, signature, constants, capability, divisible=even, **options)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", PORTABLE)
def test_the_portable_kernel(name: str, capability: int) -> None:
    config = PORTABLE[name]
    built = compiled_portable(config, capability)
    cut = config.constants()
    threads, values = 32 * cut["num_warps"], cut["BLOCK_M"] * cut["WIDTH"]
    passes = 2 if config.by_row else 1
    assert_all_in_registers(built)
    assert built.shared <= SHARED_MOST[capability]
    assert (sum(built.sass_counts[unit] for unit in MATRIX_UNIT) > 0) == (config.size > 0)

    # x by 16 bytes a thread, and narrow only a matrix of 16 x 16 (two values a thread) and the encode scale
    loads, stores = built.global_loads, built.global_stores
    assert loads[128] >= passes * max(1, values * config.dtype.itemsize // 16 // threads), built.summary()
    assert set(loads) <= {32, 128}
    assert loads[32] <= (config.pieces if config.size == 16 else 0) + (not config.by_row), built.summary()
    if config.output == CODES:
        words = max(1, values // 8 // threads)
        assert stores[32] <= words + 1, built.summary()
        assert set(stores) <= {8, 32}
    else:
        assert stores[128] == values * 2 // 16 // threads, built.summary()
        assert set(stores) <= {32, 128}

    hardware = {name: n for name, n in built.ptx_counts.items() if "e2m1x2" in name}
    if config.output == CODES and capability >= 100:
        assert hardware == {"cvt.rn.satfinite.e2m1x2.f32": max(4, values // 2 // threads)}
    else:
        assert hardware == {}
    assert not [name for name in built.ptx_counts if name.startswith("fma.")], "a product is fused into a sum"
    assert built.ptx_counts["div.full.f32"] == built.ptx_counts["div.approx.f32"] == 0


def test_the_launch_forbids_contraction_which_would_be_seen() -> None:
    config = PORTABLE["nvfp4 values, dense fp16"]
    assert config.constants()["enable_fp_fusion"] is False
    built = compiled_portable(config, 90, enable_fp_fusion=True)
    assert [name for name in built.ptx_counts if name.startswith("fma.")]


@pytest.mark.parametrize(("capability", "size"), [
    (c, size) for c, size in itertools.product(CAPABILITIES, FUSED_SIZES) if fuses(size, FP32, (c // 10, c % 10))
])  # fmt: skip
def test_fp32_behind_a_matrix_is_multiplied_in_float64_where_there_are_units_for_it(capability: int, size: int) -> None:
    built = compiled_portable(portable(size, 1, FP32), capability)
    assert_all_in_registers(built)
    assert built.shared <= SHARED_MOST[capability]
    assert built.sass_counts["DMMA"] > 0
    assert built.sass_counts["HMMA"] == built.sass_counts["HGMMA"] == 0  # no TF32


def test_where_fp32_is_turned_by_a_product_before() -> None:
    assert [c for c in CAPABILITIES if fuses(64, FP32, (c // 10, c % 10))] == [80, 90]
    assert not fuses(128, FP32, (8, 6))
    assert all(fuses(size, BF16, (c // 10, c % 10)) for size in FUSED_SIZES for c in CAPABILITIES)
    assert not fuses(48, BF16, (9, 0))


# ---- the Hopper kernel


def hopper(
    cut: Tiling, width: int, pieces: int, output: int, *, size: int = 0, blocked: bool = False, group: int = 16,
    rule: str = "even", half: bool = False,
) -> HopperConfig:  # fmt: skip
    device = torch.device("cuda", 0)
    return HopperConfig(device, width, pieces, size or width, output, blocked, group, rule, half, cut)


def compiled_hopper(config: HopperConfig) -> Compiled:
    constants, layout, width = config.constants(), repr(NVMMASharedLayout(128, 16, 2)), config.width
    kind = TYPE[config.dtype]
    out = {CODES: "*i64", VALUES: "*i32", ROTATED: f"*{kind}"}[config.output]
    signature = {
        "x_desc": f"tensordesc<{kind}[{config.tiling.block}, {width}],{layout}>",
        "pieces_desc": f"tensordesc<{kind}[{width}, {width}],{layout}>",
        "x_ptr": f"*{kind}", "matrix_ptr": "*fp32", "out_ptr": out, "scale_ptr": "*u8", "tensor_scale_ptr": "*fp32",
        "encode_ptr": "*fp32",
    }  # fmt: skip
    signature |= dict.fromkeys(("units", "padded_units", "units_per_row", "reciprocal"), "i32")
    signature |= dict.fromkeys(("factor", "twice_inverse", "amax_factor"), "fp32")
    aligned = ["x_ptr", "matrix_ptr", "out_ptr", "scale_ptr", "tensor_scale_ptr"]
    return compile_kernel(
        rotate_quantize_hopper, signature, constants, 90, num_warps=config.tiling.num_warps, divisible=aligned
    )


def usual_pass(built: Compiled) -> list[Instruction]:
    """One tile whose groups are all usual: the shortest way through the loop that multiplies."""
    loops = [loop for loop in built.loops if any(i.name == "HGMMA" for i in loop)]
    return built.shortest_pass(min(loops, key=len))


MANY, FEW = 1 << 20, 1
PLAIN = {
    f"{width} wide, {pieces} pieces, {('codes', 'values', 'rotated')[output]}, {'many' if units == MANY else 'few'}": (
        hopper(tiling(width, pieces, output, units, MULTIPROCESSORS), width, pieces, output, half=pieces == 2)
    )
    for width, pieces, output, units in itertools.product((64, 128), (1, 2, 3), (CODES, VALUES, ROTATED), (MANY, FEW))
    if units == MANY or pieces != 2
}
"""NVFP4 as every tiling cuts it; two pieces is what fp16 needs for a dense matrix, three is what bf16 needs."""
T64, T128 = Tiling(64, 1, 4, 4), Tiling(64, 1, 8, 2)
OTHER = {
    "blocked": hopper(T64, 64, 1, CODES, blocked=True),
    "blocked, 128 wide": hopper(T128, 128, 1, CODES, blocked=True, group=32),
    "mxfp4": hopper(T64, 64, 1, CODES, group=32),
    "mxfp4, floor": hopper(T64, 64, 1, CODES, group=32, rule="floor"),
    "mxfp4 values": hopper(Tiling(128, 1, 8, 2), 64, 1, VALUES, group=32),
    "R = 16": hopper(T64, 64, 1, CODES, size=16),
    "R = 16, mxfp4, dense": hopper(T64, 64, 3, CODES, size=16, group=32),
    "R = 32, values, fp16": hopper(T64, 64, 1, VALUES, size=32, half=True),
    "R = 32, rotated": hopper(Tiling(128, 2, 4, 4), 64, 1, ROTATED, size=32),
}


@pytest.mark.parametrize("name", PLAIN | OTHER)
def test_the_hopper_kernel(name: str) -> None:
    config = (PLAIN | OTHER)[name]
    built, cut = compiled_hopper(config), config.tiling
    threads = 32 * cut.num_warps
    # Few units are no more than two tiles a multiprocessor.
    programs = min(cut.programs, 2) if name.endswith("few") else cut.programs
    assert_all_in_registers(built)
    assert -(-built.registers // 8) * 8 * threads * programs <= REGISTERS, built.summary()
    assert (-(-built.shared // 128) * 128 + 1024) * programs <= SHARED, built.summary()

    loop = Counter(i.name for i in usual_pass(built))
    groups = cut.num_warps // 4
    rows, columns = (64 * groups, config.width) if config.width == 64 else (64, config.width // groups)
    runs = cut.block * config.width // threads // RUN[config.output]
    assert loop["HGMMA"] == cut.block // rows * config.width // 16 * config.pieces, built.summary()
    assert any(i.opcode.startswith(f"HGMMA.64x{columns}x16.F32") for i in usual_pass(built)), built.summary()
    assert loop["UTMALDG"] == 1, "the tile that follows"
    assert loop["LDG"] == loop["LDS"] == loop["STS"] == 0, "values go from the product to memory in their registers"
    wide = Counter(i.bits for i in usual_pass(built) if i.name == "STG")
    if config.output == CODES:
        assert wide == {64: runs, 8: runs}
        assert loop["VIMNMX3"] == 16 * runs
    else:
        assert wide == {128: runs}
        assert loop["VIMNMX3"] == (8 * runs if config.output == VALUES else 0)


INSTRUCTIONS = {
    "64 wide, 1 pieces, codes, many": 10.84,
    "64 wide, 1 pieces, values, many": 14.94,
    "64 wide, 1 pieces, rotated, many": 3.14,
    "64 wide, 2 pieces, codes, many": 10.80,
    "64 wide, 2 pieces, values, many": 15.47,
    "64 wide, 2 pieces, rotated, many": 3.72,
    "64 wide, 3 pieces, codes, many": 11.64,
    "64 wide, 3 pieces, values, many": 15.88,
    "64 wide, 3 pieces, rotated, many": 4.70,
    "128 wide, 1 pieces, codes, many": 10.11,
    "128 wide, 1 pieces, values, many": 13.70,
    "128 wide, 1 pieces, rotated, many": 3.53,
    "128 wide, 2 pieces, codes, many": 12.44,
    "128 wide, 2 pieces, values, many": 14.48,
    "128 wide, 2 pieces, rotated, many": 4.94,
    "128 wide, 3 pieces, codes, many": 13.41,
    "128 wide, 3 pieces, values, many": 15.11,
    "128 wide, 3 pieces, rotated, many": 5.88,
    "blocked": 13.03,
    "blocked, 128 wide": 13.00,
    "mxfp4": 10.75,
    "mxfp4, floor": 11.69,
    "mxfp4 values": 14.53,
    "R = 16": 11.47,
    "R = 16, mxfp4, dense": 12.00,
    "R = 32, values, fp16": 15.19,
    "R = 32, rotated": 4.38,
}


@pytest.mark.parametrize("name", [name for name in PLAIN | OTHER if not name.endswith("few")])
def test_instructions_a_value(name: str) -> None:
    """What the loop executes for a usual tile, a value of a thread: where memory waits for it, the kernel is slow."""
    config = (PLAIN | OTHER)[name]
    values = config.tiling.block * config.width / (32 * config.tiling.num_warps)
    found = len(usual_pass(compiled_hopper(config))) / values
    assert found <= 1.05 * INSTRUCTIONS[name], f"{found:.2f} instructions a value, not {INSTRUCTIONS[name]}"


# ---- what ptxas of Triton 3.6.0 must be kept from


def asm_texts() -> list[str]:
    """Every text that a configuration can put together."""
    texts = [amax_asm(output, repair, half)[0] for output in RUN for repair in (0, 16, 32) for half in (False, True)]
    for (group, rule), output in itertools.product([(16, "even"), *((32, r) for r in E8M0_RULES)], RUN):
        if output != ROTATED:
            texts += [quantize_asm(group, output, rule, r, half)[0] for r in (0, 16, 32) for half in (False, True)]
    return texts


def test_no_text_packs_the_16_bits_that_a_conversion_to_e4m3_made() -> None:
    """ptxas schedules the unpacking of `mov.b32 u, {e, e}` before the conversion that makes e."""
    for text in asm_texts():
        made = set(re.findall(r"cvt\.\S*e4m3x2\.f32 (\w+),", text))
        packed = set(itertools.chain(*(re.findall(r"\w+", p) for p in re.findall(r"mov\.b32 \w+, \{(.+?)\}", text))))
        assert not made & packed, text
        assert "cvt.u32.u16 byte, e;" in text or not made


@pytest.mark.parametrize("name", ["64 wide, 1 pieces, codes, many", "64 wide, 1 pieces, values, many", "R = 16"])
def test_scales_are_converted_before_they_are_read(name: str) -> None:
    """In the usual tile: the product, the conversions, and next the 16 bits that each made, alone in their register."""
    config = (PLAIN | OTHER)[name]
    code = usual_pass(compiled_hopper(config))
    last = max(place for place, i in enumerate(code) if i.name == "HGMMA")
    places = [place for place, i in enumerate(code) if i.opcode.startswith("F2FP.SATFINITE.E4M3.F32")]
    assert len(places) == config.tiling.block * config.width // (32 * config.tiling.num_warps) // RUN[config.output]
    for place in places:
        assert place > last
        register, *_, beside = code[place].operands.split(", ")
        assert beside == "RZ", code[place]
        reads = [i for i in code[place + 1 :] if re.search(rf"\b{register}\b", i.operands.partition(",")[2])]
        assert (reads[0].name, "0xffff" in reads[0].operands) == ("LOP3", True), reads[0]


@pytest.mark.parametrize("name", ["R = 16", "R = 32, values, fp16", "R = 32, rotated"])
def test_the_repair_stays_a_loop(name: str) -> None:
    """Unrolled by ptxas it would be most of the kernel: one step multiplies each of a run's values once."""
    config = (PLAIN | OTHER)[name]
    built = compiled_hopper(config)
    runs = config.tiling.block * config.width // (32 * config.tiling.num_warps) // RUN[config.output]
    repairs = [
        loop for loop in built.loops
        if any(i.name == "LDG" and i.bits == 16 for i in loop) and not any(i.name == "HGMMA" for i in loop)
    ]  # fmt: skip
    assert len(repairs) == runs
    for loop in repairs:
        assert sum(i.name == "FFMA" for i in loop) == RUN[config.output], len(loop)
        assert len(loop) <= 2 * RUN[config.output] + 16
    for text in asm_texts():
        assert "AGAIN:" not in text or 'AGAIN:\n.pragma "nounroll";\n' in text
