"""The product for a few tokens, compiled for GPUs that are not here: its machine code, and how launches are cut."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ahead_of_time import Compiled, compile_kernel
from quarterturn.backends import gpu_matmul
from quarterturn.backends.gpu_matmul import Config, cut_of
from quarterturn.kernels.matmul_few import matmul_few

BF16, FP16 = torch.bfloat16, torch.float16
SHARED_MOST = {80: 166912, 90: 232448, 100: 232448, 120: 101376}  # bytes that one program can have
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, 120: 84}
SHAPES = [
    (28672, 4096), (4096, 14336), (8192, 8192), (6144, 4096), (4096, 4096), (464, 464), (4096, 11008), (5120, 13824),
    (3584, 18944), (8192, 28672), (18944, 3584), (16, 16), (1000, 53248),
]  # fmt: skip


def config_of(n: int, k: int, m: int, capability: int, dtype: torch.dtype = BF16, form: str = "nvfp4") -> Config:
    count, found = MULTIPROCESSORS[capability], divmod(capability, 10)
    cut = cut_of(n, k, m, count, found)
    _, _, most = gpu_matmul.shares(-(-n // 16), cut, count)
    tiles = gpu_matmul.owned(most, cut) if cut.cluster else 0
    whole = -(-k // 64) == 4 * gpu_matmul.room(cut)
    return Config(torch.device("cuda"), cut, form, dtype, BF16, 1 if m <= 8 else 2, tiles, whole, 2, 2, found >= (9, 0))


def build(config: Config, capability: int) -> Compiled:
    kind = "bf16" if config.dtype == BF16 else "fp16"
    pointers = {"x": kind, "codes": "i32", "scales": "i32", "w_scale": "fp32", "x_scale": "fp32", "bias": "bf16",
                "out": kind, "partial": "fp32", "count": "i32"}  # fmt: skip
    signature = {f"{name}_ptr": f"*{t}" for name, t in pointers.items()}
    signature |= dict.fromkeys(("m", "n", "k", "tiles", "blocks", "chunks", "each", "more"), "i32") | {"factor": "fp32"}
    aligned = [f"{name}_ptr" for name in ("x", "codes", "scales", "partial", "count")]
    return compile_kernel(
        matmul_few, signature, gpu_matmul.constants(config), capability, num_warps=config.cut.num_warps,
        divisible=aligned,
    )  # fmt: skip


@pytest.mark.parametrize("capability", SHARED_MOST)
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (8192, 8192), (4096, 14336), (464, 464)])
def test_fits(n: int, k: int, m: int, capability: int) -> None:
    """In registers and shared memory, with as many programs a multiprocessor as the cut says."""
    config = config_of(n, k, m, capability)
    built = build(config, capability)
    assert built.local_accesses == built.stack == 0, built.summary()
    programs = config.cut.programs
    assert built.registers * 32 * config.cut.num_warps * programs <= 65536, built.summary()
    assert (built.shared + 1024) * programs <= SHARED_MOST[capability] + 1024, built.summary()
    assert built.sass_counts["HMMA"] >= 16 * config.tokens8 * config.cut.chunks


@pytest.mark.parametrize(("dtype", "form"), [(BF16, "nvfp4"), (BF16, "mxfp4"), (FP16, "nvfp4")])
@pytest.mark.parametrize("m", [1, 16])
def test_instructions_a_weight(m: int, dtype: torch.dtype, form: str) -> None:
    """A tile and a chunk have 128 weights a lane; a memory at 4.3 TB/s leaves an H200 4.4 instructions for each."""
    config = config_of(4096, 4096, m, 90, dtype, form)
    built = build(config, 90)
    loop = built.shortest_pass(max(built.loops, key=len))
    most = (2.2 if m == 1 else 2.4) + (dtype == FP16)
    assert len(loop) / (128 * config.cut.chunks) < most, built.summary()
    assert Counter(i.name for i in loop)["HMMA"] == 16 * config.tokens8 * config.cut.chunks


def test_only_weights_are_read_before_the_kernel_before_has_ended() -> None:
    for n, k, m in ((4096, 4096, 1), (8192, 8192, 16)):
        names = [i.name for i in build(config_of(n, k, m, 90), 90).sass]
        waits = names.index("ACQBULK")
        assert "LDG" not in names[:waits]
        assert {"STG", "ATOMG"}.isdisjoint(names[:waits])
        assert "LDGSTS" in names[:waits]


def test_copies_go_to_shared_memory_from_its_start() -> None:
    """The texts count bytes from the start of shared memory, where the kernel's only allocation must lie."""
    for n, k, m in ((4096, 4096, 1), (4096, 14336, 16)):
        ir = build(config_of(n, k, m, 90), 90).kernel.asm["llir"]
        assert ir.count("@global_smem = external") == 1
        text = build(config_of(n, k, m, 90), 90).kernel.asm["ttgir"]
        assert text.count("ttg.local_alloc") == 1, text


@pytest.mark.parametrize("capability", MULTIPROCESSORS)
@pytest.mark.parametrize("m", [1, 8, 9, 16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_cuts(n: int, k: int, m: int, capability: int) -> None:
    """Every part of K and every tile belongs to one program, and no program waits for a place."""
    count = MULTIPROCESSORS[capability]
    cut = cut_of(n, k, m, count, divmod(capability, 10))
    assert gpu_matmul.room(cut) * 256 >= k
    programs, each, most = gpu_matmul.shares(-(-n // 16), cut, count)
    more = -(-n // 16) - programs * each
    assert 0 <= more < programs
    assert most == each + (more > 0)
    assert each >= 1
    assert programs * cut.split <= count * cut.programs
    assert programs <= 1024  # counts
    assert not cut.cluster or cut.split == 2  # larger ones do not all find a place at once
