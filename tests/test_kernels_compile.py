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
from quarterturn.backends.gpu_launch import HopperConfig, PortableConfig, Tiling, few_tiling, tiling
from quarterturn.backends.gpu_triton import FUSED_SIZES, fuses
from quarterturn.formats import E8M0_RULES
from quarterturn.kernels import CODES, ROTATED, VALUES
from quarterturn.kernels.rotate_quantize import rotate_quantize
from quarterturn.kernels.rotate_quantize_hopper import rotate_quantize_hopper
from quarterturn.kernels.rotate_quantize_hopper_asm import (
    RUN,
    amax_asm,
    quantize_asm,
    quantize_pairs_asm,
)

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
    rule: str = "even", half: bool = False, near: bool = False, ordered: bool = False,
) -> HopperConfig:  # fmt: skip
    device = torch.device("cuda", 0)
    return HopperConfig(device, width, pieces, size or width, output, blocked, group, rule, half, near, cut, ordered)


def compiled_hopper(config: HopperConfig) -> Compiled:
    constants, width = config.constants(), config.width
    assert constants.pop("launch_pdl") is config.tiling.pdl
    layout = repr(NVMMASharedLayout(min(128, 2 * width), 16, 2))
    kind = TYPE[config.dtype]
    out = "*i32" if config.ordered else {CODES: "*i64", VALUES: "*i32", ROTATED: f"*{kind}"}[config.output]
    signature = {
        "x_desc": f"tensordesc<{kind}[{config.tiling.block}, {width}],{layout}>",
        "pieces_desc": f"tensordesc<{kind}[{width // config.tiling.parts}, {width}],{layout}>",
        "x_ptr": f"*{kind}", "pieces_ptr": f"*{kind}", "matrix_ptr": "*fp32", "out_ptr": out, "scale_ptr": "*u8",
        "tensor_scale_ptr": "*fp32", "encode_ptr": "*fp32",
    }  # fmt: skip
    signature |= dict.fromkeys(("units", "padded_units", "units_per_row", "reciprocal"), "i32")
    signature |= dict.fromkeys(("factor", "twice_inverse", "amax_factor"), "fp32")
    aligned = ["x_ptr", "pieces_ptr", "matrix_ptr", "out_ptr", "scale_ptr", "tensor_scale_ptr"]
    return compile_kernel(
        rotate_quantize_hopper, signature, constants, 90, num_warps=config.tiling.num_warps, divisible=aligned
    )


def usual_pass(built: Compiled) -> list[Instruction]:
    """One tile whose groups are all usual: the shortest way through the loop that multiplies."""
    loops = [loop for loop in built.loops if any(i.name == "HGMMA" for i in loop)]
    return built.shortest_pass(min(loops, key=len))


OUTPUT = {CODES: "codes", VALUES: "values", ROTATED: "rotated"}
DENSE = [(64, 2, CODES), (128, 2, CODES), *itertools.product((32, 64, 128), (2, 3), (VALUES, ROTATED))]
SHAPES = [*itertools.product((64, 128), (1,), OUTPUT), *DENSE]
"""Width of a unit, pieces, output: codes are made with two pieces of three (in bf16) or of two (in fp16), other outputs
with all."""


def plain(width: int, pieces: int, output: int, columns: int = 0) -> HopperConfig:
    """NVFP4 as its tiling cuts it; columns: where there are few values."""
    cut = few_tiling(width, columns, rows=16, k=4096) if columns else tiling(width, pieces, output)
    return hopper(
        cut, width, pieces, output, half=pieces == 2 and output != CODES, near=pieces == 2 and output == CODES
    )


PLAIN = {f"{width} wide, {pieces} pieces, {OUTPUT[output]}": plain(width, pieces, output)
         for width, pieces, output in SHAPES}  # fmt: skip
FEW_SHAPES = [(64, 1, CODES, 32), (128, 1, CODES, 32), (64, 1, CODES, 64), (128, 2, CODES, 64), (32, 3, VALUES, 32),
              (128, 3, ROTATED, 32)]  # fmt: skip
FEW = {f"few, {width} wide, {pieces} pieces, {OUTPUT[output]}, {columns} columns": plain(width, pieces, output, columns)
       for width, pieces, output, columns in FEW_SHAPES}  # fmt: skip
T64, T128 = Tiling(64, 1, 4, 4), Tiling(64, 1, 8, 2)
OTHER = {
    "blocked": hopper(T64, 64, 1, CODES, blocked=True),
    "blocked, 128 wide": hopper(T128, 128, 1, CODES, blocked=True, group=32),
    "mxfp4": hopper(T64, 64, 1, CODES, group=32),
    "mxfp4, floor": hopper(T64, 64, 1, CODES, group=32, rule="floor"),
    "mxfp4 values": hopper(Tiling(128, 1, 8, 2), 64, 1, VALUES, group=32),
    "R = 16": hopper(T64, 64, 1, CODES, size=16),
    "R = 16, dense": hopper(T64, 64, 2, CODES, size=16, near=True),
    "R = 16, mxfp4, dense": hopper(T64, 64, 2, CODES, size=16, group=32),
    "R = 16, mxfp4, floor, few": hopper(
        few_tiling(64, 32, rows=16, k=8192), 64, 1, CODES, size=16, group=32, rule="floor"
    ),
    "R = 32, values, fp16": hopper(T64, 64, 1, VALUES, size=32, half=True),
    "R = 32, rotated": hopper(Tiling(128, 2, 4, 4), 64, 1, ROTATED, size=32),
    "R = 32, dense": hopper(tiling(64, 2, CODES, 32), 64, 2, CODES, size=32, near=True),
    "values in order": hopper(tiling(64, 1, VALUES), 64, 1, VALUES, ordered=True),
    "rotated in order, 128 wide": hopper(tiling(128, 1, ROTATED), 128, 1, ROTATED, ordered=True),
    "values in order, few": hopper(few_tiling(64, 64, rows=16, k=8192), 64, 1, VALUES, ordered=True),
    "values in order, dense": hopper(tiling(64, 3, VALUES), 64, 3, VALUES, ordered=True),
}


ALL = PLAIN | FEW | OTHER


@pytest.mark.parametrize("name", ALL)
def test_the_hopper_kernel(name: str) -> None:
    config = ALL[name]
    built, cut = compiled_hopper(config), config.tiling
    threads, columns = 32 * cut.num_warps, config.width // cut.parts
    assert_all_in_registers(built)
    assert -(-built.registers // 8) * 8 * threads * cut.programs <= REGISTERS, built.summary()
    assert (-(-built.shared // 128) * 128 + 1024) * cut.programs <= SHARED, built.summary()

    loop = Counter(i.name for i in usual_pass(built))
    groups = cut.num_warps // 4
    across = 2 if 64 * groups > cut.block else 1
    runs = cut.block * columns // threads // RUN[config.output]
    products = cut.block // (64 * groups // across) * config.width // 16 * config.pieces
    assert loop["HGMMA"] == products, built.summary()
    assert any(i.opcode.startswith(f"HGMMA.64x{columns // across}x16.F32") for i in usual_pass(built)), built.summary()
    assert loop["UTMALDG"] == (cut.stages > 0), "the tile that follows"
    assert built.sass_counts["UTMALDG"] == 0 or cut.stages > 0
    assert (loop["LDSM"] > 0) == cut.from_registers
    assert loop["LDG"] == loop["LDS"] == loop["STS"] == 0, "values go from the product to memory in their registers"
    wide = Counter(i.bits for i in usual_pass(built) if i.name == "STG")
    if config.output == CODES:
        assert wide == {64: runs, 8: runs}
        assert loop["VIMNMX3"] == 16 * runs
        assert loop["SHFL"] == (runs * (3 + (config.group == 32)) if columns == 32 else runs * (config.group == 32))
    else:
        assert wide == {128: runs}
        assert loop["VIADDMNMX"] == (8 * runs if config.output == VALUES else 0)
    waits = [i.address for i in built.sass if i.name == "ACQBULK"]
    assert len(waits) == cut.pdl, "what came before in the stream has ended"
    if cut.pdl:
        before = Counter(i.name for i in built.sass if i.address < waits[0])
        assert before["UTMALDG"] == (config.pieces if cut.stages else 0), "only the matrix is read before"
        assert not before.keys() & {"LDG", "LDGSTS", "STG"}
        if cut.stages == 0:
            first = next(i for i in built.sass if i.address > waits[0] and i.name in ("LDG", "LDGSTS", "STG"))
            launches = [i.address for i in built.sass if i.name == "PREEXIT"]
            assert len(launches) == 1
            assert launches[0] < first.address, "the kernel behind starts before this one's loads have arrived"
            assert (launches[0] < waits[0]) == cut.early


INSTRUCTIONS = {
    "64 wide, 1 pieces, codes": 10.81,
    "64 wide, 1 pieces, values": 12.28,
    "64 wide, 1 pieces, rotated": 3.41,
    "128 wide, 1 pieces, codes": 10.09,
    "128 wide, 1 pieces, values": 12.75,
    "128 wide, 1 pieces, rotated": 2.72,
    "64 wide, 2 pieces, codes": 11.16,
    "R = 32, dense": 11.34,
    "128 wide, 2 pieces, codes": 11.47,
    "32 wide, 2 pieces, values": 12.72,
    "32 wide, 2 pieces, rotated": 3.62,
    "32 wide, 3 pieces, values": 12.88,
    "32 wide, 3 pieces, rotated": 3.78,
    "64 wide, 2 pieces, values": 13.09,
    "64 wide, 2 pieces, rotated": 3.72,
    "64 wide, 3 pieces, values": 13.50,
    "64 wide, 3 pieces, rotated": 4.70,
    "128 wide, 2 pieces, values": 12.11,
    "128 wide, 2 pieces, rotated": 4.94,
    "128 wide, 3 pieces, values": 12.73,
    "128 wide, 3 pieces, rotated": 5.88,
    "few, 64 wide, 1 pieces, codes, 32 columns": 11.50,
    "few, 128 wide, 1 pieces, codes, 32 columns": 11.69,
    "few, 64 wide, 1 pieces, codes, 64 columns": 10.00,
    "few, 128 wide, 2 pieces, codes, 64 columns": 11.97,
    "few, 32 wide, 3 pieces, values, 32 columns": 12.44,
    "few, 128 wide, 3 pieces, rotated, 32 columns": 7.62,
    "blocked": 12.97,
    "blocked, 128 wide": 13.00,
    "mxfp4": 10.75,
    "mxfp4, floor": 11.69,
    "mxfp4 values": 12.25,
    "R = 16": 11.12,
    "R = 16, dense": 11.88,
    "R = 16, mxfp4, dense": 11.59,
    "R = 16, mxfp4, floor, few": 13.38,
    "R = 32, values, fp16": 12.81,
    "R = 32, rotated": 4.38,
    "values in order": 13.31,
    "rotated in order, 128 wide": 4.13,
    "values in order, few": 12.63,
    "values in order, dense": 14.66,
}


@pytest.mark.parametrize("name", ALL)
def test_instructions_a_value(name: str) -> None:
    """What the loop executes for a usual tile, a value of a thread: where memory waits for it, the kernel is slow."""
    config = ALL[name]
    values = config.tiling.block * config.width / config.tiling.parts / (32 * config.tiling.num_warps)
    found = len(usual_pass(compiled_hopper(config))) / values
    assert found <= 1.05 * INSTRUCTIONS[name], f"{found:.2f} instructions a value, not {INSTRUCTIONS[name]}"


# ---- what ptxas of Triton 3.6.0 must be kept from


def asm_texts() -> list[str]:
    """Every text that a configuration can put together."""
    texts = [amax_asm(output, repair, half)[0] for output in RUN for repair in (0, 16, 32) for half in (False, True)]
    for (group, rule), output in itertools.product([(16, "even"), *((32, r) for r in E8M0_RULES)], RUN):
        if output != ROTATED:
            texts += [quantize_asm(group, output, rule, r, half)[0] for r in (0, 16, 32) for half in (False, True)]
        texts += [quantize_pairs_asm(group, rule, r, half, 64)[0] for r in (0, 16) for half in (False, True)]
    texts += [quantize_asm(16, CODES, "even", r % 64, False, r)[0] for r in FUSED_SIZES]
    return texts


def test_no_text_packs_the_16_bits_that_a_conversion_to_e4m3_made() -> None:
    """ptxas schedules the unpacking of `mov.b32 u, {e, e}` before the conversion that makes e."""
    for text in asm_texts():
        made = set(re.findall(r"cvt\.\S*e4m3x2\.f32 (\w+),", text))
        packed = set(itertools.chain(*(re.findall(r"\w+", p) for p in re.findall(r"mov\.b32 \w+, \{(.+?)\}", text))))
        assert not made & packed, text
        assert "cvt.u32.u16 byte, e;" in text or not made


@pytest.mark.parametrize("name", ["64 wide, 1 pieces, codes", "64 wide, 1 pieces, values", "R = 16"])
def test_scales_are_converted_before_they_are_read(name: str) -> None:
    """In the usual tile: the product, the conversions, and next the 16 bits that each made, alone in their register."""
    config = ALL[name]
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
    config = ALL[name]
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
        assert all(after == '.pragma "nounroll";' for after in re.findall(r"AGAIN\d?:\n(.*)", text))
