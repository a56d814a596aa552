"""The C kernels of a CPU: ns per element of rotate + quantize, GFLOP/s of the products, beside bounds of the same run.

    python -m benchmarks.cpu_kernels [--threads 1] [--seconds 0.5]

Checks the results against the specification first and prints no time if they are wrong. Times are minima over runs that
take turns, so that what else runs on the machine falls on all of them. Bounds: a copy of the activations; F.linear in
bf16 and fp32 with weights of that dtype. Appends one line to results/cpu_kernels.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.record import append, machine
from quarterturn import FP4Tensor, hadamard, ops, reference
from quarterturn.backends import Blocks, Quantizer, Weight, cpu_native
from quarterturn.formats import FORMATS, NVFP4

Run = Callable[[], object]
SHAPES = ((4096, 4096), (1536, 576))
ROWS = (1, 4, 16, 64, 256)


def fastest(runs: dict[str, Run], seconds: float) -> dict[str, float]:
    """Seconds of the fastest call of each, all in turn until the time is up."""
    for run in runs.values():
        run()
    best = dict.fromkeys(runs, float("inf"))
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def weight_of(n: int, k: int) -> FP4Tensor:
    codes = torch.randint(0, 256, NVFP4.codes_shape(n, k), dtype=torch.uint8)
    scale = torch.randint(0x30, 0x48, NVFP4.scale_shape(n, k), dtype=torch.uint8).view(NVFP4.scale_dtype)
    return FP4Tensor(codes, scale, torch.ones(1), None, NVFP4, (n,))


def operand_of(weight: FP4Tensor) -> Weight:
    scale = weight.block_scale.view(torch.uint8)
    return Weight(weight.codes, scale, weight.tensor_scale, weight.output_sizes, NVFP4)


def check() -> None:
    """Codes equal the specification's, and the product is its float64 product to 1e-6."""
    x, turn, encode = torch.randn(8, 512).bfloat16(), hadamard(16), torch.tensor([300.0])
    for name in FORMATS:
        how: dict[str, Any] = {"format": name, "encode_scale": encode if name == "nvfp4" else None}
        want = reference.rotate_quantize(x, turn.matrix, turn.factor, **how)
        got = ops.rotate_quantize(x, turn.matrix.float(), turn.factor, **how, backend="cpu_native")
        assert torch.equal(got[0], want[0]), name
        assert torch.equal(got[1].view(torch.uint8), want[1]), name
    weight = weight_of(24, 512)
    y = ops.fp4_matmul(x, weight=weight, out_dtype=torch.float32, backend="cpu_native").double()
    exact = x.double() @ weight.values().double().T
    assert ((y - exact).abs() <= 1e-6 * (x.double().abs() @ weight.values().double().abs().T)).all()


def quantizing(seconds: float) -> dict[str, dict[str, float]]:
    """ns per element: NVFP4 codes and bf16 quantize-dequantize of 16 x 4096 bf16, by transform; a copy beside them."""
    x, encode = torch.randn(16, 4096).bfloat16(), torch.tensor([300.0])
    found: dict[str, dict[str, float]] = {}
    sides: dict[str, Blocks | None] = {"none": None}
    sides |= {f"hadamard {r}": Blocks(hadamard(r).matrix.float(), r**-0.5, False) for r in (16, 32, 64, 128)}
    sides |= {f"dense {r}": Blocks(torch.randn(r, r), 1.0, False) for r in (16, 64, 128)}
    how = Quantizer(NVFP4, encode)
    for name, blocks in sides.items():
        runs: dict[str, Run] = {
            "codes": lambda b=blocks: cpu_native.rotate_quantize(x, b, how, "linear"),
            "values": lambda b=blocks: cpu_native.rotate_quantize_dequantize(x, b, how, x.dtype),
            "copy": x.clone,
        }
        found[name] = {what: t / x.numel() * 1e9 for what, t in fastest(runs, seconds).items()}
        print(f"{name:14}" + "".join(f"  {what} {ns:6.3f} ns" for what, ns in found[name].items()), flush=True)
    return found


def multiplying(seconds: float) -> dict[str, dict[str, float]]:
    """GFLOP/s of y = x w^T by shape and rows, and what F.linear does with plain weights."""
    found: dict[str, dict[str, float]] = {}
    for n, k in SHAPES:
        weight = weight_of(n, k)
        w_fp32 = weight.values()
        w_bf16 = w_fp32.bfloat16()
        for m in ROWS:
            x, packed = torch.randn(m, k).bfloat16(), operand_of(weight_of(m, k))
            w, wide, one = operand_of(weight), x.float(), torch.ones(1)
            runs: dict[str, Run] = {
                "W4A4": lambda p=packed, w=w, s=one: cpu_native.matmul(
                    p.data, p.block_scale, s, w, None, torch.bfloat16
                ),
                "W4A16": lambda x=x, w=w: cpu_native.matmul(x, None, None, w, None, torch.bfloat16),
                "F.linear bf16": lambda x=x, w=w_bf16: linear(x, w),
                "F.linear fp32": lambda x=wide, w=w_fp32: linear(x, w),
            }
            name = f"{n} x {k}, M = {m}"
            found[name] = {what: 2 * m * n * k / t / 1e9 for what, t in fastest(runs, seconds).items()}
            rates = "".join(f"  {what} {rate:6.1f}" for what, rate in found[name].items())
            print(f"{name:22}{rates}  GFLOP/s", flush=True)
    return found


def overhead(seconds: float) -> dict[str, float]:
    """Microseconds of a product of one row with 16 x 64 weights, which is next to no work: what a call costs."""
    weight, x = weight_of(16, 64), torch.randn(1, 64).bfloat16()
    w = operand_of(weight)
    runs: dict[str, Run] = {
        "backend": lambda: cpu_native.matmul(x, None, None, w, None, torch.bfloat16),
        "operator": lambda: ops.fp4_matmul(x, weight=weight, backend="cpu_native"),
    }
    return {name: t * 1e6 for name, t in fastest(runs, seconds).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="for every time that is taken")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if reasons := cpu_native.missing(torch.device("cpu")):
        raise SystemExit(f"cpu_native cannot run here: {'; '.join(reasons)}")
    check()
    record = {
        **machine(),
        "ns_per_element": quantizing(arguments.seconds),
        "gflops": multiplying(arguments.seconds),
        "call_us": overhead(arguments.seconds),
    }
    print("a call costs", ", ".join(f"{us:.1f} us ({name})" for name, us in record["call_us"].items()))
    append("cpu_kernels", record)


if __name__ == "__main__":
    main()
