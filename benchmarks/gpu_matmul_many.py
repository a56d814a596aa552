"""The product for many tokens on a Hopper GPU: microseconds beside the library's bf16 product and the physical floor.

    python -m benchmarks.gpu_matmul_many

Every shape is first checked against float64 on random weights, and no time is printed where one is wrong. A time is the
median over replays of a CUDA graph that runs over as many copies of the weight as exceed the cache (300 MB, at least
4). `ordered`: x lies as kernels/order_tokens.py writes it; `plain`: it does not, what is done about it included. Floor:
the greater of bytes over 4.27 TB/s and operations over 790 TFLOP/s. Appends a line a case to
results/gpu_matmul_many.jsonl.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch

from benchmarks.gpu_rotate_quantize import graph_us
from benchmarks.record import append, machine
from quarterturn import weight_layout
from quarterturn.backends.gpu_matmul_many import Workspace, cut, many, order, workspace
from quarterturn.formats import NVFP4

NAME = "gpu_matmul_many"
SHAPES = ((28672, 4096), (4096, 14336), (8192, 8192), (6144, 4096), (4096, 4096))
TOKENS = (17, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096)
COLD, FEWEST = 300e6, 4
BYTES_A_US, OPERATIONS_A_US = 4.27e6, 790e6
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def floor_us(m: int, n: int, k: int) -> float:
    """What memory and the matrix units allow: NVFP4 weights, bf16 x and y."""
    return max((n * k * 9 / 16 + 2 * m * (n + k)) / BYTES_A_US, 2 * m * n * k / OPERATIONS_A_US)


def check(m: int, n: int, k: int, space: Workspace) -> None:
    """Raises SystemExit where a result is further from float64 than its rounding and the order of additions allow."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(0, 0x60, (n, k // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    made, x = weight_layout.forward(codes, scale, NVFP4), torch.randn(m, k, device="cuda").bfloat16()
    alpha = (torch.rand(n, device="cuda") + 0.5) * 2.0**made.exponent
    y = many(x, made, alpha, torch.ones(1, device="cuda"), None, space).double()
    values = torch.tensor(E2M1, dtype=torch.float64, device="cuda")[torch.stack((codes & 15, codes >> 4), -1).long()]
    exact = (
        values.view(n, k) * scale.double().repeat_interleave(16, 1) * (alpha.double() * 2.0**-made.exponent)[:, None]
    )
    want, size = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    if bool(((y - want).abs() > want.abs() * 2.0**-8 + size * 2e-6).any()) or bool(y.isnan().any()):
        raise SystemExit(f"M={m} N={n} K={k}: wrong; no time is taken")


def measured(m: int, n: int, k: int, space: Workspace) -> dict[str, Any]:
    """Microseconds of a product, of the library's, and of what reorders x."""
    copies = max(FEWEST, -(-int(COLD) // (n * k * 9 // 16)))
    alpha, one = torch.ones(n, device="cuda"), torch.ones(1, device="cuda")
    weights = []
    for _ in range(copies):
        codes = torch.randint(-(2**31), 2**31 - 1, (n // 16, k // 64, 32, 4), dtype=torch.int32, device="cuda")
        scales = torch.randint(0x60, 0xE0, (n // 16, k // 256, 32, 8), dtype=torch.uint8, device="cuda")
        weights.append(weight_layout.Fragments(codes, scales, n, k, NVFP4, 8))
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(FEWEST)]
    x = torch.randn(m, k, device="cuda").bfloat16()
    turned, y = order(x), x.new_empty(m, n)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "m": m, "n": n, "k": k, "cut": list(cut(m, n, k, count, True)), "floor_us": floor_us(m, n, k),
        "library_us": graph_us([lambda d=d: torch.mm(x, d.T, out=y) for d in dense], None),
        "ordered_us": graph_us([lambda w=w: many(turned, w, alpha, one, None, space, y, True) for w in weights], None),
        "plain_us": graph_us([lambda w=w: many(x, w, alpha, one, None, space, y) for w in weights], None),
    }  # fmt: skip


def line(record: dict[str, Any]) -> str:
    ours, plain, library = record["ordered_us"], record.get("plain_us"), record["library_us"]
    return (
        f"N={record['n']:<6} K={record['k']:<6} M={record['m']:<5} {ours:8.2f} us ordered  {plain or 0:8.2f} plain  "
        f"{library:8.2f} library ({library / ours:4.2f}x)  {record['floor_us'] / ours:4.2f} of the floor"
    )


def main() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("this needs a Hopper GPU")
    torch.manual_seed(0)
    space = workspace(torch.device("cuda", 0))
    for n, k in (*SHAPES[3:], (464, 464)):
        for m in TOKENS[:7]:
            check(m, n, k, space)
    run_of = {**machine(), "run": datetime.datetime.now().isoformat(timespec="seconds")}
    for n, k in SHAPES:
        for m in TOKENS:
            record = measured(m, n, k, space)
            print(line(record))
            append(NAME, {**record, **run_of})
            torch.cuda.empty_cache()
    print({key: run_of[key] for key in ("gpu", "driver", "torch", "triton")})


if __name__ == "__main__":
    main()
