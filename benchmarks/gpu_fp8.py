"""MXFP4 by MXFP4 in FP8 matrix units: microseconds beside the library's bf16 product, and how far its sums are off.

    python -m benchmarks.gpu_fp8

Every shape is first compared with float64 on random operands, and no time is printed where a sum is further off than
gpu_fp8 says, or a row that E4M3 does not hold further than fp32 sums are. A time is the median over replays of a CUDA
graph of COPIES calls with operands of their own. Errors are those of sums before the rounding to bf16, in units of the
sum of magnitudes: the largest, and the root mean square. Appends a line a case to results/gpu_fp8.jsonl.

| time      | of                                                                                       |
|---|---|
| library   | torch.mm in bf16                                                                         |
| rows      | the product as gpu_fp8 takes it for bf16 results: scales by rows, sums moved to fp32     |
| rows fast | the same with sums left in the matrix units' precision                                   |
| bare      | the product without scales, bf16 results, sums moved to fp32; and `bare fast`            |
| sums      | the product as gpu_fp8 takes it for other results: without scales, in fp32               |
| codes     | all that follows the quantization: conversion of x, product, search for rows that are left |
| left      | the same with LEFT rows that E4M3 does not hold                                          |
| layer     | all of FP4Linear behind a Hadamard of 64                                                 |
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_rotate_quantize import graph_us
from benchmarks.record import append, machine
from quarterturn import MXFP4, e4m3_layout, hadamard
from quarterturn.backends import fp8_launch, gpu_fp8
from quarterturn.linear import FP4Linear
from quarterturn.tensor import FP4Tensor

NAME = "gpu_fp8"
SHAPES = ((28672, 4096), (4096, 14336), (8192, 8192))
TOKENS = (2048, 4096, 8192)
COPIES, LEFT = 2, 64
CHECKED = 512
"""Rows that are compared with float64."""
FP8_SUMS, FP32_SUMS = 4 * 33 * 2.0**-13, 4e-6
"""Bounds of a sum's error: that of gpu_fp8.py, and of fp32."""


def random_operand(rows: int, k: int) -> FP4Tensor:
    """Random codes whose scales span eight exponents."""
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(120, 128, (rows, k // 32), dtype=torch.uint8, device="cuda")
    return FP4Tensor.from_encode(codes, scale, None, MXFP4)


def converted(x: FP4Tensor) -> fp8_launch.E4M3Operand:
    return fp8_launch.operand(x.codes, x.block_scale, torch.ones(1, device="cuda"), torch.bfloat16)


def errors(got: Tensor, want: Tensor, size: Tensor) -> list[float]:
    """The largest and the root mean square error of sums, in units of `size`."""
    off = (got.double() - want).abs() / size
    return [float(off.max()), float(off.square().mean().sqrt())]


def check(n: int, k: int) -> dict[str, list[float]]:
    """Errors of each product. Raises SystemExit where one is beyond its bound."""
    x, w = random_operand(CHECKED, k), random_operand(n, k)
    x.block_scale[::8, : k // 64] = 127 - 20  # rows that E4M3 does not hold
    x.block_scale[::8, k // 64 :] = 127
    stored, unfit = fp8_launch.weight_in_e4m3(w)
    values, scale = e4m3_layout.parts(stored, k)
    made = converted(x)
    exact_x, exact_w = x.values().double(), w.values().double()
    want, size = exact_x @ exact_w.T, exact_x.abs() @ exact_w.abs().T
    fit = torch.ones(CHECKED, dtype=torch.bool, device="cuda")
    fit[made.left[: int(made.count), 0].long()] = False
    both = made.row_scale.double() * scale[:n].double()
    sums = {fast: fp8_launch.bare_sums(made.data, values, fast=fast)[:, :n] * both for fast in (False, True)}
    whole = fp8_launch.multiply(made, values, scale, n, None, torch.float32)
    rounded = fp8_launch.multiply(made, values, scale, n, None, torch.bfloat16)
    bf16 = torch.mm(x.values(torch.bfloat16), w.values(torch.bfloat16).T, out_dtype=torch.float32)
    found = {
        "sums": errors(sums[False][fit], want[fit], size[fit]), "fast": errors(sums[True][fit], want[fit], size[fit]),
        "left": errors(whole[~fit], want[~fit], size[~fit]), "bf16": errors(bf16, want, size),
    }  # fmt: skip
    beyond = (rounded.double() - want).abs() > want.abs() * 2.0**-8 + size * FP8_SUMS
    wrong = unfit or int((~fit).sum()) != CHECKED // 8 or bool(beyond.any()) or bool(rounded.isnan().any())
    if wrong or not (found["sums"][0] <= FP8_SUMS and found["left"][0] <= FP32_SUMS):
        raise SystemExit(f"N={n} K={k}: wrong ({found}); no time is taken")
    return found


def calls(m: int, n: int, k: int) -> dict[str, list[Callable[[], object]]]:
    """What is timed, COPIES of each."""
    todo: dict[str, list[Callable[[], object]]] = {}

    def add(name: str, call: Callable[[], object]) -> None:
        todo.setdefault(name, []).append(call)

    one = torch.ones(1, device="cuda")
    for _ in range(COPIES):
        x, w = random_operand(m, k), random_operand(n, k)
        values, scale = e4m3_layout.parts(fp8_launch.weight_in_e4m3(w)[0], k)
        layer = FP4Linear.from_tensor(w, activations="fp4", backend=gpu_fp8.NAME, input_transform=hadamard(64))
        made, input = converted(x), torch.randn(m, k, device="cuda").bfloat16()
        dense_x, dense_w = x.values(torch.bfloat16), w.values(torch.bfloat16)
        apart = x.block_scale.clone()
        apart[:LEFT, 0] = 90

        def whole(codes: Tensor, block_scale: Tensor, values: Tensor = values, scale: Tensor = scale) -> Tensor:
            made = fp8_launch.operand(codes, block_scale, one, torch.bfloat16)
            return fp8_launch.multiply(made, values, scale, n, None, torch.bfloat16)

        def bare(
            dtype: torch.dtype, fast: bool, x: Tensor = made.data, values: Tensor = values
        ) -> Callable[[], Tensor]:
            return lambda: fp8_launch.bare_sums(x, values, dtype, fast)

        add("library", lambda x=dense_x, w=dense_w: torch.mm(x, w.T))
        for fast, name in ((False, "rows"), (True, "rows fast")):
            add(name, lambda x=made, v=values, s=scale, f=fast: fp8_launch.by_rows(x.data, x.row_scale, v, s, fast=f))
        add("bare", bare(torch.bfloat16, False))
        add("bare fast", bare(torch.bfloat16, True))
        add("sums", bare(torch.float32, False))
        add("codes", lambda x=x, w=whole: w(x.codes, x.block_scale))
        add("left", lambda x=x, a=apart, w=whole: w(x.codes, a))
        add("layer", lambda x=input, run=layer: run(x))
    return todo


def measured(m: int, n: int, k: int) -> dict[str, Any]:
    """Microseconds of each call; None and the reason where torch has no such product."""
    record: dict[str, Any] = {"m": m, "n": n, "k": k, "us": {}, "refused": {}}
    for name, runs in calls(m, n, k).items():
        try:
            runs[0]()
        except RuntimeError as error:
            record["refused"][name] = str(error).splitlines()[0]
            continue
        record["us"][name] = graph_us(runs, None)
    return record


def line(record: dict[str, Any]) -> str:
    us = record["us"]
    times = "  ".join(f"{name} {us[name]:.0f} ({us['library'] / us[name]:.2f}x)" for name in us if name != "library")
    refused = "".join(f"  {name}: {why}" for name, why in record["refused"].items())
    return f"N={record['n']:<6} K={record['k']:<6} M={record['m']:<5} library {us['library']:.0f} us  {times}{refused}"


def main() -> None:
    if not torch.cuda.is_available() or (reasons := gpu_fp8.missing(torch.device("cuda", 0))):
        raise SystemExit(f"this needs a GPU with FP8 matrix units: {reasons if torch.cuda.is_available() else 'none'}")
    torch.manual_seed(0)
    run_of = {**machine(), "run": datetime.datetime.now().isoformat(timespec="seconds")}
    for n, k in SHAPES:
        off = check(n, k)
        told = "  ".join(f"{name} {largest:.1e}, {rms:.1e}" for name, (largest, rms) in off.items())
        print(f"N={n:<6} K={k:<6} sums off by (largest, rms): {told}")
        for m in TOKENS:
            record = measured(m, n, k)
            print(line(record), flush=True)
            append(NAME, {**record, "errors": off, **run_of})
            torch.cuda.empty_cache()
    print({key: run_of[key] for key in ("gpu", "driver", "torch", "triton")})


if __name__ == "__main__":
    main()
