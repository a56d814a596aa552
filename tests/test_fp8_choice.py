"""Where gpu_fp8 runs, what it refuses and in which words, the arithmetic it rests on, and its machine code. No GPU."""

from __future__ import annotations

import pytest
import torch

from ahead_of_time import Compiled, compile_kernel
from comparing import assert_refused
from fp8_cases import E4M3_BY_HAND, decoded, operand_of
from quarterturn import MXFP4, NVFP4, checks, e4m3_layout
from quarterturn.backends import BACKENDS, Problem, any_torch, fp8_launch, gpu_fp8, gpu_triton, select
from quarterturn.bench import needs
from quarterturn.bench.random_model import FourBits
from quarterturn.errors import BackendRefusal
from quarterturn.formats import E2M1_VALUES
from quarterturn.kernels.matmul_left import matmul_left
from quarterturn.kernels.to_e4m3 import to_e4m3

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
W4A4 = Problem(MXFP4, "fp4", torch.bfloat16, 4096, 4096, 64)


def test_it_runs_only_where_it_is_named() -> None:
    names = [backend.NAME for backend in BACKENDS]
    assert names.index("gpu_fp8") > names.index("any_torch")
    assert select(W4A4, CUDA, capability=(9, 0)).name == "gpu_triton"
    assert select(W4A4, CUDA, "gpu_fp8", capability=(9, 0)).name == "gpu_fp8"


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (10, 0), (10, 3), (11, 0), (12, 1)])
def test_other_gpus_are_refused(capability: tuple[int, int]) -> None:
    found = f"(8.9, 9.0, 12.0), found {capability[0]}.{capability[1]}"
    assert any(found in reason for reason in gpu_fp8.missing(CUDA, capability))
    assert_refused(lambda: select(W4A4, CUDA, "gpu_fp8", capability=capability), "gpu_fp8", found)


@pytest.mark.parametrize("capability", gpu_fp8.CAPABILITIES)
def test_those_with_fp8_units_are_taken(capability: tuple[int, int]) -> None:
    assert gpu_fp8.missing(CUDA, capability) == gpu_triton.missing(CUDA, capability)


def test_a_cpu_and_an_old_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_fp8.missing(torch.device("cpu")) == ["needs an NVIDIA GPU, found cpu"]
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert any("torch 2.11 or newer" in reason for reason in gpu_fp8.missing(CUDA, (9, 0)))


def test_layers_that_it_takes_and_refuses() -> None:
    assert gpu_fp8.refuses(W4A4) == []
    (reason,) = gpu_fp8.refuses(Problem(NVFP4, "fp4", torch.bfloat16, 64, 64))
    assert "needs MXFP4" in reason
    assert "found nvfp4: choose 'gpu_triton'" in reason
    (reason,) = gpu_fp8.refuses(Problem(MXFP4, "bf16", torch.bfloat16, 64, 64))
    assert "found activations in bf16" in reason
    (reason,) = gpu_fp8.refuses(Problem(MXFP4, "fp4", torch.bfloat16, 0, 64))
    assert "found 64 and 0" in reason


def test_packed_weights_are_refused_before_anything_is_made() -> None:
    with pytest.raises(BackendRefusal, match="weights 'auto' or 'decoded'"):
        gpu_fp8.prepare(None, "packed")  # type: ignore[arg-type]


def test_a_weight_that_does_not_fit_is_left_to_gpu_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = operand_of(8, 64)
    monkeypatch.setattr(fp8_launch, "weight_in_e4m3", lambda weight: (e4m3_layout.empty(8, 64, CPU), 3))
    values = gpu_fp8.prepare(weight, "decoded")
    assert torch.equal(values, any_torch.prepare(weight, "decoded"))
    told = gpu_fp8.remark(weight, values)
    assert told is not None
    assert "multiplied as by 'gpu_triton' all the same: 3 of 8 rows" in told
    assert gpu_fp8.remark(weight, e4m3_layout.empty(8, 64, CPU)) is None


# ---- arithmetic


def test_e4m3_holds_e2m1_times_fifteen_powers_of_two() -> None:
    """Those of kernels/to_e4m3.py, from -8 to 6, and neither the one below nor the one above."""
    numbers = set(E4M3_BY_HAND.tolist())
    holds = {e for e in range(-20, 20) if all(abs(v) * 2.0**e in numbers for v in E2M1_VALUES)}
    assert holds == set(range(-8, 7))
    assert len(holds) == 15


def test_bytes_by_hand_are_torchs() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    want = byte.view(torch.float8_e4m3fn).double()
    assert torch.equal(decoded(byte).nan_to_num(), want.nan_to_num())
    assert torch.equal(decoded(byte).isnan(), want.isnan())


@pytest.mark.parametrize(("n", "k"), [(1, 32), (15, 32), (16, 64), (17, 96), (4096, 4096)])
def test_what_is_stored(n: int, k: int) -> None:
    data = e4m3_layout.empty(n, k, CPU)
    values, scale = e4m3_layout.parts(data, k)
    assert data.shape == (n, e4m3_layout.stored_width(n, k))
    assert values.shape == (len(scale), k)
    assert 0 <= len(scale) - n < 16
    assert len(scale) % 16 == 0
    assert values.data_ptr() == data.data_ptr(), "as aligned as memory comes"
    assert scale.data_ptr() == data.data_ptr() + values.numel()
    assert data.numel() - values.numel() - 4 * len(scale) < n, "no more columns than it takes"


def test_a_stored_weight_of_another_width_is_refused() -> None:
    data, one = e4m3_layout.empty(32, 64, CPU), torch.ones(1)
    checks.weight("fp4_linear", 64, data, None, one, [32], None, MXFP4)
    assert_refused(lambda: checks.weight("fp4_linear", 96, data, None, one, [32], None, MXFP4), "E4M3 rows (32, 100)")


def test_its_memory_is_reckoned() -> None:
    layer = torch.nn.Linear(4096, 1000, device="meta")
    made = FourBits(format="mxfp4", backend="gpu_fp8")
    beside = 1000 * e4m3_layout.stored_width(1000, 4096)
    assert needs._linear_bytes(layer, "float8_e4m3fn", made) == 1000 * 4096 * 4.25 / 8 + beside


# ---- machine code


CONVERT = {"codes_ptr": "*i32", "scales_ptr": "*u8", "tensor_scale_ptr": "*fp32", "out_ptr": "*u8",
           "row_scale_ptr": "*fp32", "left_ptr": "*i32", "count_ptr": "*i32"}  # fmt: skip
WHERE = [major * 10 + minor for major, minor in gpu_fp8.CAPABILITIES]


@pytest.mark.parametrize("capability", WHERE)
@pytest.mark.parametrize("k", [32, 4096, 14336])
def test_the_conversion(k: int, capability: int) -> None:
    constants = fp8_launch.conversion(k // 8)
    warps = constants.pop("num_warps")
    built = compile_kernel(to_e4m3, CONVERT, constants, capability, num_warps=warps)
    assert built.local_accesses == built.spill_stores == 0
    assert built.registers <= 64
    assert any(name.startswith("cvt.rn.satfinite.e4m3x2") for name in built.ptx_counts)
    if k > 32:
        assert set(built.global_stores) == {64, 32}, "eight bytes a thread, and what there is once a row"
        assert 128 in built.global_loads


@pytest.mark.parametrize("capability", WHERE)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_product_of_rows_that_are_left(dtype: str, capability: int) -> None:
    built = compiled_left(dtype, capability)
    assert built.local_accesses == built.spill_stores == 0, built.summary()
    assert built.shared <= 101376
    products = {name for name in built.ptx_counts if "mma" in name and "bf16.bf16" in name}
    kind = "wgmma.mma_async.sync.aligned.m64n64k16" if capability == 90 else "mma.sync.aligned.m16n8k16"
    assert [name for name in products if name.startswith(kind)] == list(products)


def compiled_left(dtype: str, capability: int) -> Compiled:
    signature = {"codes_ptr": "*u8", "scales_ptr": "*u8", "tensor_scale_ptr": "*fp32", "w_ptr": "*u8",
                 "w_scale_ptr": "*fp32", "bias_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "left_ptr": "*i32",
                 "count_ptr": "*i32", "n": "i32"}  # fmt: skip
    tile = dict(fp8_launch.TILE)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    constants = {"K": 14336, "HAS_BIAS": True, "INTERPRETED": False, **tile}
    return compile_kernel(matmul_left, signature, constants, capability, **options)
