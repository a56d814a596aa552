"""The C kernels: their bits against the specification, rows on their own, threads, and a compiler that is not there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cpu_cases
from comparing import BF16_UNIT, FP32_UNIT, UNIT, assert_refused, assert_same_bits
from cpu_cases import CPU, DTYPES, ENCODE, every_dtype, every_format, hard_rows, many_rows, packed, quantizer
from quarterturn import FP4Tensor, hadamard, ops, random_hadamard, reference
from quarterturn.backends import any_torch, cpu_native, op_backend, select
from quarterturn.formats import E8M0_RULES, FORMATS, NVFP4
from quarterturn.kernels import cpu_build

kernels, threads = cpu_cases.kernels, cpu_cases.threads
pytestmark = pytest.mark.usefixtures("kernels")
TRANSFORMS: dict[str, tuple[Callable[[], Tensor], float]] = {
    "sylvester16": (lambda: hadamard(16).matrix, 16**-0.5),
    "sylvester32": (lambda: hadamard(32).matrix, 32**-0.5),
    "signs64": (lambda: random_hadamard(64, 3).matrix, 64**-0.5),
    "sylvester128": (lambda: hadamard(128).matrix, 128**-0.5),
    "paley24": (lambda: hadamard(24).matrix, 24**-0.5),
    "dense12": (lambda: torch.randn(12, 12, dtype=torch.float64), 1.0),
    "dense64": (lambda: torch.randn(64, 64, dtype=torch.float64) / 8, 1.0),
}


def assert_quantizes_as_specified(
    x: Tensor, matrix: Tensor | None, factor: float, transpose: bool, **how: object
) -> None:
    want = reference.rotate_quantize(x, matrix, factor, transpose, **how)  # type: ignore[arg-type]
    got = ops.rotate_quantize(x, matrix, factor, transpose, **how, backend="cpu_native")  # type: ignore[arg-type]
    for what, a, b in zip(("codes", "scale bytes", "tensor scale"), got, want, strict=True):
        assert_same_bits(a.view(torch.uint8) if what == "scale bytes" else a, b, what)


@every_dtype
@every_format
@pytest.mark.parametrize("k", [32, 96, 384])
def test_hard_inputs_are_quantized_bit_for_bit(k: int, format: str, dtype: torch.dtype) -> None:
    for rule in E8M0_RULES if format == "mxfp4" else ("even",):
        assert_quantizes_as_specified(hard_rows(k, dtype), None, 1.0, False, **quantizer(format), rule=rule)


@every_dtype
@pytest.mark.parametrize("k", [16, 48, 80, 112])
@pytest.mark.parametrize("recipe", ["checkpoint", "token", "qutlass"])
def test_odd_counts_of_groups_and_every_recipe(recipe: str, k: int, dtype: torch.dtype) -> None:
    assert_quantizes_as_specified(hard_rows(k, dtype), None, 1.0, False, **quantizer("nvfp4", recipe))


@every_dtype
@every_format
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_rotated_inputs_are_quantized_bit_for_bit(name: str, transpose: bool, format: str, dtype: torch.dtype) -> None:
    make, factor = TRANSFORMS[name]
    x = torch.randn(40, 384).to(dtype) * torch.tensor([1e-3, 1.0, 30.0, 1.0]).repeat(10).view(-1, 1).to(dtype)
    x[3, 100], x[7, 200:300] = float("nan"), 0
    assert_quantizes_as_specified(x, make().float(), factor, transpose, **quantizer(format))


@pytest.mark.parametrize(
    ("format", "dtype"),
    # Ops refuse MXFP4 values in fp16, where they can overflow.
    [(format, dtype) for format in FORMATS for dtype in DTYPES if (format, dtype) != ("mxfp4", torch.float16)],
)
def test_values_are_those_of_the_codes(format: str, dtype: torch.dtype) -> None:
    x, how = hard_rows(96, dtype), quantizer(format)
    values, tensor_scale = ops.rotate_quantize_dequantize(x, **how, backend="cpu_native")  # type: ignore[arg-type]
    codes, scale, want_scale = reference.rotate_quantize(x, **how)  # type: ignore[arg-type]
    want = reference.dequantize(codes, scale, 1.0, format)
    same = values.double().eq(want) | (values.isnan() & want.isnan())
    assert values.dtype == dtype
    assert bool(same.all()), f"{int((~same).sum())} differ, first at {(~same).nonzero()[0].tolist()}"
    assert_same_bits(tensor_scale, want_scale)


@every_dtype
def test_strides_and_no_rows(dtype: torch.dtype) -> None:
    big = torch.randn(22, 200).to(dtype)
    how, matrix = quantizer("nvfp4"), hadamard(16).matrix.float()
    for view in (big[:, :96], big[::2, 8:104], big.T[:96, :16]):
        assert_quantizes_as_specified(view, matrix, 0.25, False, **how)
    codes, scale, one = ops.rotate_quantize(big[:0, :96], matrix, 0.25, **how, backend="cpu_native")  # type: ignore[arg-type]
    assert (codes.shape, scale.shape, one.tolist()) == ((0, 48), (0, 6), [(1 / torch.tensor(ENCODE)).item()])


@pytest.mark.parametrize("name", TRANSFORMS)
@every_dtype
def test_rotation_is_the_rounded_float64_one(dtype: torch.dtype, name: str) -> None:
    make, factor = TRANSFORMS[name]
    x, matrix = torch.randn(9, 384).to(dtype), make().float()
    want = reference.rotate(x, matrix, factor)
    got = ops.rotate(x, matrix, factor, out_dtype=torch.float32, backend="cpu_native")
    assert_same_bits(got, want.float())


def product64(x: Tensor, x_scale: Tensor, weight: FP4Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product in float64, and the sum of the magnitudes of its terms."""
    w = weight.values().double() * weight.row_scale().double()
    scaled = x.double() * x_scale.double().view(-1, 1)
    return scaled @ w.T + (0 if bias is None else bias.double()), scaled.abs() @ w.abs().T


@every_format
@pytest.mark.parametrize("kind", ["codes", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("m", [0, 1, 2, 7, 33, 70])
def test_product_is_that_of_float64(m: int, kind: str, format: str) -> None:
    for n, k, sizes in ((5, 32, None), (37, 96, (16, 21)), (19, 2080, None)):
        weight, bias = packed(n, k, format, sizes), torch.randn(n)
        x_scale = torch.rand(m) + 0.5
        if kind == "codes":
            x = packed(m, k, format)
            operand, block_scale, values = x.codes, x.block_scale, x.values()
        else:
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
            operand = values = torch.randn(m, k).to(dtype)
            block_scale = None
        got = ops.fp4_matmul(
            operand,
            x_scale,
            weight=weight,
            x_block_scale=block_scale,
            bias=bias,
            out_dtype=torch.float32,
            backend="cpu_native",
        )
        want, size = product64(values, x_scale, weight, bias)
        worst = ((got.double() - want).abs() / (size + bias.abs())).max().item() if m else 0.0
        # K products and sums in fp32, in any order, and the roundings of the two scales and of the bias.
        bound = (k + 3) * FP32_UNIT
        assert got.shape == (m, n)
        # Many bf16 rows go through the library's bf16 product on some CPUs: its sums are rounded to bf16.
        own = cpu_native._has_tiles() or not any_torch.cpu_has_bf16()
        rounded = kind == "bf16" and m > cpu_native.FEW_ROWS and not own
        assert worst <= bound + (BF16_UNIT if rounded else 0), f"{worst:.2e} of the terms at {(n, k)}"


@every_format
def test_a_nan_scale_reaches_its_outputs_alone(format: str) -> None:
    x, weight = packed(3, 96, format), packed(5, 96, format)
    x.block_scale.view(torch.uint8)[1, 2] = x.format.nan_byte
    weight.block_scale.view(torch.uint8)[4, 0] = x.format.nan_byte
    for rows in (slice(0, 3), slice(1, 2)):
        y = ops.fp4_matmul(
            x.codes[rows], torch.ones(1), weight=weight, x_block_scale=x.block_scale[rows], backend="cpu_native"
        )
        want = torch.zeros(3, 5, dtype=torch.bool)
        want[1], want[:, 4] = True, True
        assert torch.equal(y.isnan(), want[rows])


@every_format
@pytest.mark.parametrize("quantized", [True, False])
def test_a_row_does_not_depend_on_the_others_or_the_threads(quantized: bool, format: str, threads: None) -> None:
    weight, x = packed(150, 1120, format), packed(cpu_native.FEW_ROWS, 1120, format)
    floats = torch.randn(cpu_native.FEW_ROWS, 1120).bfloat16()

    def run(rows: slice) -> Tensor:
        scale = x.block_scale[rows] if quantized else None
        operand = x.codes[rows] if quantized else floats[rows]
        one = torch.ones(1) if quantized else None
        return ops.fp4_matmul(
            operand, one, weight=weight, x_block_scale=scale, out_dtype=torch.float32, backend="cpu_native"
        )

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(5, 6), slice(3, 9), slice(30, 34)):
        assert_same_bits(run(rows), whole[rows], f"rows {rows}")
    for _ in range(20):
        assert_same_bits(run(slice(None)), whole, "a repeat")
    torch.set_num_threads(1)
    assert_same_bits(run(slice(None)), whole, "one thread")


def test_quantizing_does_not_depend_on_the_rows_or_the_threads(threads: None) -> None:
    x, how, matrix = torch.randn(300, 640).bfloat16(), quantizer("nvfp4"), hadamard(128).matrix.float()
    whole = ops.rotate_quantize(x, matrix, 128**-0.5, **how, backend="cpu_native")  # type: ignore[arg-type]
    for count in (1, 20):
        for _ in range(20):
            again = ops.rotate_quantize(x[:count], matrix, 128**-0.5, **how, backend="cpu_native")  # type: ignore[arg-type]
            assert_same_bits(again[0], whole[0][:count])
            assert_same_bits(again[1].view(torch.uint8), whole[1][:count].view(torch.uint8))


@every_format
@every_dtype
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
@pytest.mark.parametrize("decoded", [False, True])
def test_many_rows_are_the_few(decoded: bool, activations: str, dtype: torch.dtype, format: str, threads: None) -> None:
    """Tiles, where there are such, and the library's product give what the kernels' own product gives for few rows, up
    to the order of sums."""
    for x, weight, bias, side, run in many_rows(decoded, activations, dtype, format):
        whole = run(x)
        assert bool(whole.isfinite().all())
        few = torch.cat([run(part, own=not decoded) for part in x.split(cpu_native.FEW_ROWS)])
        # Each of the two is off by K sums in fp32 of the same terms and by the rounding of its result; the library's
        # product rounds its sum besides, and W4A16's rotated input is rounded to dtype, in either way.
        if activations == "fp4":
            values, one = ops.rotate_quantize_dequantize(x.float(), *side, **quantizer(format), backend="cpu_native")  # type: ignore[arg-type]
            terms = values.double().abs() * one.double()
        else:
            terms = (x if side[0] is None else ops.rotate(x, *side, backend="cpu_native")).double().abs()
        terms = terms @ (weight.values().double() * weight.row_scale().double()).abs().T + bias.double().abs()
        bound = 2 * (x.shape[1] + 3) * FP32_UNIT * terms + 3 * UNIT[dtype] * (
            whole.double().abs() + bias.double().abs()
        )
        assert bool(((whole.double() - few.double()).abs() <= bound).all())


@every_format
def test_the_table_that_tiles_are_decoded_by_is_right_on_any_cpu(format: str) -> None:
    """Every code under every scale byte, in the upper half of an fp32."""
    fmt = FORMATS[format]
    address = cpu_build.library().qt_values()
    tables = torch.tensor((ctypes.c_uint16 * (2 * 256 * 16)).from_address(address), dtype=torch.int32)
    got = (tables.view(2, 256, 16)[int(format == "mxfp4")] << 16).view(torch.float32)
    pairs = torch.arange(0, 16, 2) | torch.arange(1, 17, 2) << 4
    codes = pairs.to(torch.uint8).repeat(256, fmt.group_size // 16)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    want = FP4Tensor(codes, scale.view(fmt.scale_dtype), torch.ones(1), None, fmt, (256,)).values()[:, :16]
    same = got.view(torch.int32).eq(want.view(torch.int32)) | (got.isnan() & want.isnan())
    assert bool(same.all()), (~same).nonzero()[:3].tolist()


# ---- building


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that has asked nothing yet."""

    def forget() -> None:
        cpu_build.library.cache_clear()
        cpu_build._answer.cache_clear()
        op_backend.cache_clear()

    monkeypatch.setenv("QUARTERTURN_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def compiler(folder: Path, script: str) -> None:
    file = folder / "cc"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_no_compiler_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    (reason,) = cpu_native.missing(CPU)
    assert "compiler" in reason
    assert "install" in reason
    chosen = select(None, CPU)
    assert chosen.name == "any_torch"
    assert chosen.rejected["cpu_native"] == [reason]
    assert_refused(lambda: ops.rotate(torch.ones(1, 16), torch.eye(16), backend="cpu_native"), "cpu_native", "compiler")
    assert ops.rotate(torch.ones(1, 16), torch.eye(16)).sum() == 16


@pytest.mark.parametrize("script", ["echo 'cpu_matmul.c: no such thing' >&2; exit 1", "exit 0", "kill -9 $$"])
def test_a_compiler_that_fails_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    compiler(fresh, script)
    monkeypatch.setenv("PATH", str(fresh))
    (reason,) = cpu_native.missing(CPU)
    assert reason == cpu_native.missing(CPU)[0]
    assert "no such thing" in reason or "echo" not in script
    assert select(None, CPU).name == "any_torch"


def test_a_cache_that_cannot_be_made_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").write_text("")
    monkeypatch.setenv("QUARTERTURN_CACHE", str(fresh / "file" / "below"))
    (reason,) = cpu_native.missing(CPU)
    assert str(fresh / "file") in reason


def test_other_devices_are_refused() -> None:
    assert cpu_native.missing(torch.device("cuda")) == ["needs a CPU, found cuda"]


def test_processes_that_build_at_once_all_succeed(fresh: Path) -> None:
    code = "from quarterturn.kernels import cpu_build; assert cpu_build.reasons() == [], cpu_build.reasons()"
    env = {**os.environ, "PYTHONPATH": str(Path(cpu_build.__file__).parents[2])}
    running = [subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE) for _ in range(3)]
    for process in running:
        error = process.communicate(timeout=280)[1]
        assert process.returncode == 0, error.decode()[-2000:]
    assert len(list((fresh / "cache" / "kernels").iterdir())) == 1


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names instruction sets of x86-64")
def test_the_portable_form_gives_the_same_bits(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX2 and FMA: quantization has no freedom, and products of E4M3 groups are exact before their sum."""
    x, weight = hard_rows(96, torch.bfloat16), packed(21, 96, "nvfp4")
    how, turn = quantizer("nvfp4"), (hadamard(32).matrix.float(), 32**-0.5)

    def run() -> tuple[Tensor, ...]:
        codes, scale, one = ops.rotate_quantize(x, *turn, **how, backend="cpu_native")  # type: ignore[arg-type]
        arguments = {"weight": weight, "x_block_scale": scale, "out_dtype": torch.float32, "backend": "cpu_native"}
        few = ops.fp4_matmul(codes, one, **arguments)  # type: ignore[arg-type]
        single = ops.fp4_matmul(codes[:1], one, **{**arguments, "x_block_scale": scale[:1]})  # type: ignore[arg-type]
        dense = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
        return codes, scale.view(torch.uint8), few, single, ops.rotate(x, dense, backend="cpu_native")

    want = run()
    for native in ("-march=x86-64", "-march=x86-64-v2"):
        monkeypatch.setattr(cpu_build, "NATIVE", ((native,),))
        cpu_build.library.cache_clear()
        for got, expected in zip(run(), want, strict=True):
            same = got.eq(expected) | (got.isnan() & expected.isnan()) if got.is_floating_point() else got.eq(expected)
            assert bool(same.all()), native


def test_every_width_compiles(tmp_path: Path) -> None:
    """Forms that this machine cannot run must still be C: AMX, AVX512 with its dot product, and plain x86-64. What is
    called from other files is declared once, in the header, where its definition is held to it."""
    folder = Path(cpu_build.__file__).parent
    for width in (
        ("x86-64", "x86-64-v3", "icelake-server", "sapphirerapids") if os.uname().machine == "x86_64" else ("native",)
    ):
        for source in cpu_build.SOURCES:
            command = ["cc", f"-march={width}", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-c"]
            command += ["-Wmissing-prototypes", "-Wredundant-decls"]
            done = subprocess.run(
                [*command, str(folder / source), "-o", str(tmp_path / "o")], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{source} for {width}: {done.stderr[-1500:]}"


@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
def test_the_layer_in_one_call_is_the_layer_in_parts(rows: int) -> None:
    """linear() fuses the steps for few rows; the parts are what other tests hold: codes by codes for one row, and where
    there are no tiles; values by codes in tiles."""
    weight = replace(packed(48, 96, "nvfp4"), format=NVFP4)
    x, encode = torch.randn(rows, 96).bfloat16(), torch.tensor([ENCODE])
    turn = hadamard(32)
    side, how = (turn.matrix.float(), turn.factor), quantizer("nvfp4")
    product: dict[str, Any] = {"weight": weight, "backend": "cpu_native"}
    if rows >= cpu_native.TILES_FROM and cpu_native._has_tiles():
        values, one = ops.rotate_quantize_dequantize(x, *side, **how, backend="cpu_native")  # type: ignore[arg-type]
        want = ops.fp4_matmul(values, one, **product)
    else:
        codes, scale, one = ops.rotate_quantize(x, *side, **how, backend="cpu_native")  # type: ignore[arg-type]
        want = ops.fp4_matmul(codes, one, x_block_scale=scale, **product)
    got = torch.ops.quarterturn.fp4_linear(
        x, weight.codes, weight.block_scale.view(torch.uint8), weight.tensor_scale, [48], None, "nvfp4",
        *side, False, None, 1.0, False, True, encode, "checkpoint", "even", "cpu_native",
    )  # fmt: skip
    assert_same_bits(got, want)
