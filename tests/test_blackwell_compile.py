"""The machine code of the FP4 product for Blackwell GPUs, none of which was at hand: compiled, read and never run.

Every tile that blackwell_launch.py ships, in both formats, for 10.0, 10.3 and 12.0: that the products are FP4
instructions with block scales and nothing else, that scales reach tensor memory without passing registers, that nothing
spills, and that a chip's memory is enough.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re

import pytest
import torch

from ahead_of_time import Compiled, compile_kernel
from quarterturn.backends.blackwell_launch import TILES, ScaledConfig, ScaledTile
from quarterturn.backends.blackwell_triton import CAPABILITIES
from quarterturn.kernels import matmul_scaled as source
from quarterturn.kernels.matmul_scaled import matmul_scaled
from test_kernels_compile import TYPE, compiled_portable, portable

SHARED_MOST = {10: 232448, 12: 101376}  # bytes that one program can have
TENSOR_MEMORY = 512  # columns of a multiprocessor
GROUPS = {"nvfp4": 16, "mxfp4": 32}
PRODUCT = {
    (10, 16): "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X",
    (10, 32): "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X",
    (12, 16): "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
    # Which the PTX manual lets stand for kind::mxf4 with these scales.
    (12, 32): "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0",
}
SHIPPED = [(major * 10 + minor, tile) for major, minor in CAPABILITIES for tile in TILES[major]]
LISTED = (100, 120)
"""Capabilities whose machine code Triton's own cuobjdump can list; of 10.3 it tells the resources alone."""
EPILOGUES = {"plain": (torch.bfloat16, False), "with all": (torch.float32, True)}
"""bf16 with one tensor scale each; fp32 with a scale each row and output, and bias."""
CASES = [(*shipped, name, epilogue) for shipped in SHIPPED for name in GROUPS for epilogue in EPILOGUES
         if shipped[0] in LISTED or epilogue == "with all"]  # fmt: skip


def compiled(
    capability: int, tile: ScaledTile, group: int, dtype: torch.dtype = torch.bfloat16, all: bool = False,
    unit: int = 16, even: bool = True, **other: object,
) -> Compiled:  # fmt: skip
    """unit: 8 where K is a multiple of 16 and not of 32; even: N is a multiple of 16."""
    config = ScaledConfig(capability // 10, tile, group, unit, all, all, all)
    constants = config.constants(False) | other
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    kind = "fp8e4nv" if group == 16 else "u8"

    def scales(rows: int, tiles: bool) -> str:
        return f"tensordesc<{kind}[1, {rows // 128}, {tile.k // group // 4}, 2, 256]>" if tiles else "*i32"

    signature = {
        "w_ptr": "*u8", "w_scale": scales(tile.outputs, config.w_tiles),
        "x_ptr": "*u8", "x_scale": scales(tile.tokens, config.x_tiles),
        "y_ptr": f"*{TYPE[dtype]}", "w_tensor_scale_ptr": "*fp32", "x_tensor_scale_ptr": "*fp32", "bias_ptr": "*fp32",
    }  # fmt: skip
    signature |= dict.fromkeys(("m", "n", "units", "quads", "padded_m", "padded_n", "steps"), "i32")
    divisible = [name for name, kind in signature.items() if kind.startswith("*")] + ["padded_m", "padded_n"]
    divisible += ["n"] if even else []
    return compile_kernel(matmul_scaled, signature, constants, capability, divisible=divisible, **options)


def assert_products(built: Compiled, capability: int, tile: ScaledTile, group: int) -> None:
    """The format's own instruction, as often as the tile needs it, and no other product."""
    family, name = capability // 10, PRODUCT[capability // 10, group]
    products = {n: count for n, count in built.ptx_counts.items() if re.match(r"(tcgen05\.mma|mma\.|wgmma\.)", n)}
    assert set(products) == {name}, built.summary()
    each = tile.k // 64 * tile.outputs // 128
    if family == 12:
        each = tile.k // 64 * (tile.outputs // 16) * (tile.tokens // 8) // tile.num_warps
    assert products[name] in (each, 2 * each), "a step, which 10.x has once more outside of the loop"


def assert_fits(built: Compiled, capability: int) -> None:
    """No registers spilt, and no more memory than the chip has."""
    assert built.stack == 0, f"{built.name} for sm_{capability}: {built.stack} bytes of local memory"
    assert ".local" not in built.ptx
    assert built.shared <= SHARED_MOST[capability // 10]
    assert built.kernel.metadata.tmem_size <= (TENSOR_MEMORY if capability < 110 else 0)
    if capability in LISTED:
        assert built.local_accesses == 0, built.summary()
    else:
        assert built.spill_stores == built.spill_loads == 0


@pytest.mark.parametrize(
    ("capability", "tile", "name", "epilogue"), CASES,
    ids=[f"sm_{c}-{t.tokens}x{t.outputs}-{name}-{epilogue}" for c, t, name, epilogue in CASES],
)  # fmt: skip
def test_every_tile(capability: int, tile: ScaledTile, name: str, epilogue: str) -> None:
    group, family = GROUPS[name], capability // 10
    built = compiled(capability, tile, group, *EPILOGUES[epilogue])
    assert_products(built, capability, tile, group)
    assert_fits(built, capability)

    counts = built.ptx_counts
    config = ScaledConfig(family, tile, group, 16, False, False, False)
    by_tiles = config.w_tiles + config.x_tiles * tile.tokens // 128
    assert (counts["tcgen05.cp.cta_group::1.warpx4.32x128b"] > 0) == (by_tiles > 0)
    assert counts["tcgen05.cp.cta_group::1.warpx4.32x128b"] % max(1, by_tiles * tile.k // group // 4) == 0
    copies = {n: count for n, count in counts.items() if n.startswith("cp.async.c") and ".global" in n}
    words = not (config.w_tiles and config.x_tiles)
    assert set(copies) == {"cp.async.cg.shared.global", *(["cp.async.ca.shared.global"] if words else [])}
    assert any(n.startswith("cp.async.bulk.tensor.5d") for n in counts) == (by_tiles > 0)
    assert not [n for n in counts if n.startswith("fma.")], "a product is fused into a sum"
    if capability in LISTED:
        assert {i.bits for i in built.sass if i.name == "LDGSTS"} == {128, *([32] if words else [])}
        assert set(built.global_stores) == {128}, built.summary()


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(("capability", "tile"), [(100, TILES[10][0]), (100, TILES[10][-1]), (120, TILES[12][0]),
                                                  (120, TILES[12][-1])])  # fmt: skip
@pytest.mark.parametrize(("unit", "even"), [(8, True), (16, False)], ids=["K = 48", "N = 49"])
def test_rows_that_are_not_aligned(capability: int, tile: ScaledTile, name: str, unit: int, even: bool) -> None:
    """Narrower copies of codes, or stores of y; the same products, and still no spills."""
    built = compiled(capability, tile, GROUPS[name], unit=unit, even=even)
    assert_products(built, capability, tile, GROUPS[name])
    assert_fits(built, capability)
    assert (64 in {i.bits for i in built.sass if i.name == "LDGSTS"}) == (unit == 8), built.summary()


def test_a_spill_would_be_seen() -> None:
    """128 tokens finished at once, each with a scale and all of an output in one thread."""
    built = compiled(100, TILES[10][3]._replace(part=128), 16, torch.float32, True)
    assert built.local_accesses > 0
    assert built.stack > 0


@pytest.mark.parametrize("group", [16, 32])
def test_the_hardware_converts_to_e2m1(group: int) -> None:
    """As for 10.0 and 12.0 in test_kernels_compile.py: rotate + quantize with scales in the 128x4 layout."""
    built = compiled_portable(portable(64, 1, group=group, blocked=True), 103)
    hardware = {name for name in built.ptx_counts if "e2m1x2" in name}
    assert hardware == {"cvt.rn.satfinite.e2m1x2.f32"}
    assert built.stack == built.spill_stores == 0


def test_why_12_1_is_refused() -> None:
    """There Triton 3.6 decodes MXFP4 for bf16 products, and fails on NVFP4."""
    built = compiled(121, TILES[12][0], 32)
    assert {n for n in built.ptx_counts if n.startswith("mma")} == {
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    }
    with pytest.raises(RuntimeError):
        compiled(121, TILES[12][0], 16)


# ---- that the source which the interpreter runs is the one that is compiled


def test_the_definition_takes_the_place_of_one_call() -> None:
    """DEFINITION chooses between `tl.dot_scaled` and two decoders with a product in fp32, and is read nowhere else."""
    kernel = next(
        node for node in ast.walk(ast.parse(inspect.getsource(source)))
        if isinstance(node, ast.FunctionDef) and node.name == "matmul_scaled"
    )  # fmt: skip
    module = ast.parse(inspect.getsource(source))
    reads = [n for n in ast.walk(module) if isinstance(n, ast.Name) and n.id == "DEFINITION"]
    choices = [n for n in ast.walk(kernel) if isinstance(n, ast.If) and ast.unparse(n.test) == "DEFINITION"]
    assert (len(reads), len(choices)) == (1, 1)
    (choice,) = choices
    assert ast.unparse(choice.orelse) == "acc = tl.dot_scaled(w, ws, 'e2m1', tl.trans(x), xs, 'e2m1', acc)"
    assert [ast.unparse(line) for line in choice.body] == [
        "left, right = (_values(w, ws, BLOCK_N, BLOCK_K, GROUP), _values(x, xs, BLOCK_M, BLOCK_K, GROUP))",
        "acc = tl.dot(left, tl.trans(right), acc, input_precision='ieee')",
    ]
    tests = [ast.unparse(n.test) for n in ast.walk(module) if isinstance(n, ast.If | ast.IfExp | ast.While)]
    assert not [test for test in tests if "INTERPRETED" in test], "which is handed on to what rounds to bf16"


def memory_operations(family: int, tile: ScaledTile, group: int, definition: bool) -> list[str]:
    """Loads, stores and copies with their types, in the order of Triton's own intermediate code."""
    built = compiled(10 * family, tile, group, DEFINITION=definition)
    found = re.findall(r"(tt\.(?:load|store|descriptor_load)).*? : (.*?)(?: loc|$)", built.kernel.asm["ttir"], re.M)
    return [" ".join(pair) for pair in found]


@pytest.mark.parametrize(("family", "group"), [*itertools.product((10, 12), (16, 32))])
def test_both_read_and_write_the_same_memory(family: int, group: int) -> None:
    """A tile of few tokens, since the definition's fp32 operands must fit into shared memory to be compiled at all."""
    tile = ScaledTile(16, 128, 128, 16, 4, 1)
    real, defined = (memory_operations(family, tile, group, definition) for definition in (False, True))
    assert len(real) >= 7
    assert real == defined
