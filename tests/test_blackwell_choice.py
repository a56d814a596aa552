"""Where blackwell_triton is chosen, where it is refused and in which words, and how a product is cut. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from comparing import assert_refused
from conftest import BLACKWELL
from quarterturn import MXFP4, NVFP4
from quarterturn.backends import BACKENDS, Problem, blackwell_launch, blackwell_triton, gpu_triton, select
from quarterturn.backends.blackwell_launch import TILES, ScaledConfig, tile_for
from quarterturn.settings import triton_interprets

CUDA = torch.device("cuda")
W4A4 = Problem(NVFP4, "fp4", torch.bfloat16, 4096, 4096, 64)


def test_it_is_chosen_where_it_runs_and_before_gpu_triton() -> None:
    names = [backend.NAME for backend in BACKENDS]
    assert names.index("blackwell_triton") < names.index("gpu_triton")
    assert blackwell_triton.CAPABILITIES == BLACKWELL
    for capability in BLACKWELL:
        assert blackwell_triton.missing(CUDA, capability) == []
        assert blackwell_triton.missing(CUDA, capability) == gpu_triton.missing(CUDA, capability)


@pytest.mark.parametrize(
    ("capability", "why"),
    [
        ((7, 5), "no FP4 matrix units"),
        ((8, 0), "no FP4 matrix units"),
        ((9, 0), "no FP4 matrix units"),
        ((10, 1), "never compiled"),
        ((11, 0), "no assembler"),
        ((12, 1), "no FP4 products"),
        ((13, 0), "never compiled"),
    ],
)
def test_every_other_capability_is_refused_with_what_to_choose(capability: tuple[int, int], why: str) -> None:
    (reason,) = blackwell_triton.missing(CUDA, capability)
    assert f"needs a GPU of capability 10.0, 10.3, 12.0, found {capability[0]}.{capability[1]}" in reason
    assert why in reason
    assert reason.endswith("choose gpu_triton" if capability >= (8, 0) else "choose any_torch")
    chosen = lambda: select(W4A4, CUDA, "blackwell_triton", capability=capability)  # noqa: E731
    assert_refused(chosen, "blackwell_triton", reason)


def test_a_cpu_is_refused() -> None:
    assert not triton_interprets(), "in the interpreter it runs there"
    assert blackwell_triton.missing(torch.device("cpu")) == ["needs an NVIDIA GPU, found cpu"]


def test_an_old_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_triton, "triton_version", lambda: (3, 5))
    (reason,) = blackwell_triton.missing(CUDA, (10, 0))
    assert "Triton 3.6 or newer, found 3.5" in reason


def test_layers_that_it_takes_and_refuses() -> None:
    for fmt in (NVFP4, MXFP4):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert blackwell_triton.refuses(Problem(fmt, "fp4", dtype, 49, 96, 16, 7, True)) == []
        (reason,) = blackwell_triton.refuses(Problem(fmt, "bf16", torch.bfloat16, 48, 96))
        assert reason == "needs FP4 activations (W4A4), found bf16 (W4A16): choose gpu_triton"


@pytest.mark.parametrize("family", TILES)
def test_the_smallest_tile_that_holds_the_tokens(family: int) -> None:
    tiles = TILES[family]
    assert [tile.tokens for tile in tiles] == sorted({tile.tokens for tile in tiles})
    for m in range(1, 400):
        found = tile_for(family, m)
        assert found.tokens >= m or found is tiles[-1]
        assert all(tile.tokens < m for tile in tiles[: tiles.index(found)])


@pytest.mark.parametrize("family", TILES)
@pytest.mark.parametrize("group", [16, 32])
def test_tiles_are_cut_as_layouts_and_instructions_are(family: int, group: int) -> None:
    for tile in TILES[family]:
        config = ScaledConfig(family, tile, group, 16, False, False, False)
        assert tile.outputs % 128 == 0
        assert tile.k % (4 * group) == 0, "whole tiles of scales"
        assert tile.tokens % tile.part == 0
        assert not config.x_tiles or tile.tokens % 128 == 0
        assert config.constants(False)["DEFINITION"] is False
        assert config.constants(False)["enable_fp_fusion"] is False


def test_both_families_are_capabilities() -> None:
    assert {major for major, _ in blackwell_triton.CAPABILITIES} == set(TILES)


def test_scales_are_described_tile_by_tile() -> None:
    """A matrix of 130 rows and 6 groups: two tiles down and two across, 512 bytes each."""
    stored = torch.zeros(256, 8, dtype=torch.uint8)
    told = blackwell_launch._scales(stored, 130, 2, NVFP4, 128, 256, True)
    assert (told.shape, told.strides) == ([1, 2, 2, 2, 256], [2048, 1024, 512, 256, 1])
    assert told.block_shape == [1, 1, 4, 2, 256]
    assert told.base.dtype == torch.float8_e4m3fn
    words = blackwell_launch._scales(stored, 130, 2, MXFP4, 16, 256, False)
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (512,))
