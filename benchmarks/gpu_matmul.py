"""The product with NVFP4 weights on a GPU: microseconds beside the library's bf16 product and the physical floor.

    python -m benchmarks.gpu_matmul [--quick] [--batch-invariant]

Every product with bf16 tokens as they are is first checked against float64 on random weights, and no time is printed
where one is wrong. A time is the median over replays of a CUDA graph that runs over as many copies of the weight as
exceed the cache (300 MB, at least 4); the graphs take turns, since with many tokens the GPU's power limits its clock.
Beside the library's product in bf16, in the same run:

    W4A16    bf16 tokens as they are
    turned   the same behind hadamard:64, as a layer runs it
    W4A4     the same with the turned tokens quantized: a layer of a W4A4 model
    rotate, quantize   what turned and W4A4 do before their product, alone

With --batch-invariant the layers are so: a row's bits are the same for every number of tokens, which is looked at.

Floor: the greater of bytes over 4.27 TB/s (what a copy reaches on an H200) and operations over 790 TFLOP/s. Appends a
line a case to results/gpu_matmul.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_rotate_quantize import graphs_us
from benchmarks.record import append, machine
from quarterturn.backends import compose, gpu_triton
from quarterturn.backends.protocol import Blocks, Layer, Quantizer, Weight
from quarterturn.formats import NVFP4
from quarterturn.tensor import FP4Tensor
from quarterturn.transforms import random_hadamard

NAME = "gpu_matmul"
SHAPES = ((28672, 4096), (4096, 14336), (8192, 8192), (6144, 4096), (4096, 4096))
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK = (1, 16, 64, 256, 4096)
COLD, FEWEST = 300e6, 4
BYTES_A_US, OPERATIONS_A_US = 4.27e6, 790e6
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def floor_us(m: int, n: int, k: int) -> float:
    """What memory and the matrix units allow: NVFP4 weights, bf16 x and y."""
    return max((n * k * 9 / 16 + 2 * m * (n + k)) / BYTES_A_US, 2 * m * n * k / OPERATIONS_A_US)


def weights(n: int, k: int, copies: int) -> tuple[list[Weight], torch.Tensor]:
    """Random weights in fragments, and the values of the first, float64 (n, k)."""
    made = []
    for _ in range(copies):
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scale = torch.randint(0, 0x60, (n, k // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        one = torch.ones(1, device="cuda")
        data = gpu_triton.prepare(FP4Tensor.from_encode(codes, scale, one, NVFP4), "packed")
        assert data is not None
        assert data.dtype == torch.int32, "the weights are not in fragments"
        if not made:
            pairs = torch.stack((codes & 15, codes >> 4), -1).view(n, k).long()
            values = torch.tensor(E2M1, dtype=torch.float64, device="cuda")[pairs]
            exact = values * scale.double().repeat_interleave(16, 1)
        made.append(Weight(data, None, one, (n,), NVFP4))
    return made, exact


def layers(of: list[Weight], turned: bool, quantized: bool, invariant: bool) -> list[Layer]:
    turn = random_hadamard(64)
    blocks = Blocks(turn.matrix.float().cuda(), turn.factor, turn.transpose) if turned else None
    quantizer = Quantizer(NVFP4, torch.full((1,), 300.0, device="cuda"), "checkpoint", "even") if quantized else None
    return [Layer(weight, None, blocks, None, quantizer, invariant) for weight in of]


def check(x: torch.Tensor, layer: Layer, exact: torch.Tensor) -> None:
    """Raises SystemExit where a result is further from float64 than its rounding and the order of additions allow."""
    y, (m, k) = compose.linear(gpu_triton, x, layer).double(), x.shape
    want, size = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    if bool(((y - want).abs() > want.abs() * 2.0**-8 + size * 2e-6).any()) or bool(y.isnan().any()):
        raise SystemExit(f"M={m} N={exact.shape[0]} K={k}: wrong; no time is taken")


def measured(
    m: int, of: list[Weight], dense: list[torch.Tensor], exact: torch.Tensor, invariant: bool
) -> dict[str, Any]:
    """Microseconds of a product, of whole layers, of what comes before their product, and of the library's."""
    n, k = dense[0].shape
    x = torch.randn(m, k, device="cuda").bfloat16()
    plain, turned, quantized = (layers(of, *how, invariant) for how in ((False, False), (True, False), (True, True)))
    check(x, plain[0], exact)
    for layer in (plain[0], turned[0], quantized[0]) if invariant else ():
        alone, beside = (compose.linear(gpu_triton, rows, layer)[:1] for rows in (x[:1], x))
        if not torch.equal(alone.view(torch.int16), beside.view(torch.int16)):
            raise SystemExit(f"M={m} N={n} K={k}: a row has other bits alone; no time is taken")

    def over(call: Callable[[Any], object], given: list[Any]) -> list[Callable[[], object]]:
        return [lambda one=one: call(one) for one in given]

    runs = {
        "library_us": over(lambda d: torch.mm(x, d.T), dense),
        "w4a16_us": over(lambda layer: compose.linear(gpu_triton, x, layer), plain),
        "turned_us": over(lambda layer: compose.linear(gpu_triton, x, layer), turned),
        "w4a4_us": over(lambda layer: compose.linear(gpu_triton, x, layer), quantized),
        "rotate_us": over(lambda layer: compose.operand(gpu_triton, x, layer), turned),
        "quantize_us": over(lambda layer: compose.operand(gpu_triton, x, layer), quantized),
    }
    return {
        "m": m, "n": n, "k": k, **({"batch_invariant": True} if invariant else {}), "floor_us": floor_us(m, n, k),
        **dict(zip(runs, graphs_us(list(runs.values()), None, 7), strict=True)),
    }  # fmt: skip


def line(record: dict[str, Any]) -> str:
    ours, library = record["w4a16_us"], record["library_us"]
    return (
        f"N={record['n']:<6} K={record['k']:<6} M={record['m']:<5} {ours:8.2f} us W4A16  {library:8.2f} library "
        f"({library / ours:4.2f}x)  {record['floor_us'] / ours:4.2f} of the floor   turned {record['turned_us']:8.2f} "
        f"(rotate {record['rotate_us']:6.2f})  W4A4 {record['w4a4_us']:8.2f} (quantize {record['quantize_us']:6.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer numbers of tokens")
    parser.add_argument("--batch-invariant", action="store_true", help="layers whose rows do not depend on the batch")
    asked = parser.parse_args()
    tokens = QUICK if asked.quick else TOKENS
    if not torch.cuda.is_available():
        raise SystemExit("this needs an NVIDIA GPU; `python -m benchmarks.cpu_kernels` is for the CPU")
    torch.manual_seed(0)
    run_of = {**machine(), "run": datetime.datetime.now().isoformat(timespec="seconds")}
    for n, k in SHAPES:
        of, exact = weights(n, k, max(FEWEST, -(-int(COLD) // (n * k * 9 // 16))))
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(FEWEST)]
        for m in tokens:
            record = measured(m, of, dense, exact, asked.batch_invariant)
            print(line(record), flush=True)
            append(NAME, {**record, **run_of})
        del of, exact, dense
        torch.cuda.empty_cache()
    print({key: run_of[key] for key in ("gpu", "driver", "torch", "triton")})


if __name__ == "__main__":
    main()
