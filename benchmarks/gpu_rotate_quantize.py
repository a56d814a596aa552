"""Rotate + quantize on a GPU: microseconds, the fraction of a copy's speed, the ratio to compiled PyTorch.

    python -m benchmarks.gpu_rotate_quantize [--quick] [--forms full,rotate] [--backend gpu_triton]
                                             [--compiled all|one|none]

Every case is checked against any_torch on the same GPU before its time is taken, and one that is wrong ends the run. A
time is the median over replays of a CUDA graph that runs the case on many inputs: 300 MB of them, at least 4,
so that none is left in the L2 cache from the last replay; cases too small for that take 64, and the cache is
overwritten before each replay. Beside each time, in the same run: a device copy that reads and writes as many bytes,
any_torch eagerly, and `torch.compile` of the plain definition below. Appends a line a case to
results/gpu_rotate_quantize.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from benchmarks.record import append, machine
from quarterturn import hadamard, ops, random_hadamard
from quarterturn.formats import INV6

NAME = "gpu_rotate_quantize"
SIZES = (16, 32, 64, 128)
WIDTHS = (4096, 8192, 14336, 28672)
ROWS = (1, 16, 64, 512, 4096, 16384)
EXTRA = (8192, 8192)
FORMS = ("packed", "dense", "values", "blocked", "rotate")
"""NVFP4 codes behind +-1 and behind a dense T, bf16 quantize-dequantize, blocked scales, the rotation alone."""
FULL, SIGNED = "full", "full_signed"
"""The rotation by a Hadamard matrix as wide as a row, and by one with random signs at its rows."""
FULL_WIDTHS = (4096, 8192, 14336, 16384, 28672)
FULL_ROWS = (1, 64, 512)
MANY = 1 << 26
"""Values of the largest case of each of those."""
ROTATIONS = ("rotate", FULL, SIGNED)
"""Forms that write values of x's dtype, not quantized."""
QUICK = ((1, 4096), (16, 4096), (64, 4096), EXTRA)
COLD, FEWEST, MOST = 300e6, 4, 64
ENCODE = 300.0


@dataclass(frozen=True)
class Case:
    """One launch: x (rows, width) in bf16 behind blocks of `size`, in one of FORMS."""

    form: str
    size: int
    rows: int
    width: int

    @property
    def bytes_read(self) -> int:
        return 2 * self.rows * self.width

    @property
    def bytes_written(self) -> int:
        elements = self.rows * self.width
        if self.form in ("values", *ROTATIONS):
            return 2 * elements
        scales = elements // 16
        if self.form == "blocked":
            scales = -(-self.rows // 128) * 128 * (-(-self.width // 64) * 4)
        return elements // 2 + scales

    @property
    def copies(self) -> int:
        """How many inputs take turns."""
        return max(FEWEST, min(MOST, -(-int(COLD) // (self.bytes_read + self.bytes_written))))

    @property
    def stays_cold(self) -> bool:
        """Whether one round of the inputs is enough to push the first one out of the cache."""
        return self.copies * (self.bytes_read + self.bytes_written) >= COLD


def cases(quick: bool, forms: Collection[str]) -> list[Case]:
    shapes = QUICK if quick else (*((m, k) for k in WIDTHS for m in ROWS), EXTRA)
    blocks = [Case(form, size, m, k) for size in SIZES for form in FORMS for m, k in shapes if form in forms]
    few = () if quick else FULL_ROWS
    return blocks + [
        Case(form, k, m, k) for k in FULL_WIDTHS for form in (FULL, SIGNED) for m in (*few, MANY // k) if form in forms
    ]


# ---- what is run


@lru_cache(maxsize=2)
def matrix_of(form: str, size: int, device: str) -> tuple[torch.Tensor, float]:
    if form == SIGNED:  # a matrix of 28672 takes a while to make: once
        matrix, factor = matrix_of(FULL, size, device)
        return matrix * (torch.randint(0, 2, (size, 1), device=device) * 2 - 1), factor
    if form == "dense":
        generator = torch.Generator("cpu").manual_seed(size)
        return (torch.randn(size, size, generator=generator) / size**0.5).to(device), 1.0
    turn = hadamard(size) if form == FULL else random_hadamard(size)
    return turn.matrix.float().to(device), turn.factor


Call = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def call_of(case: Case, backend: str, device: str = "cuda") -> Call:
    matrix, factor = matrix_of(case.form, case.size, device)
    encode = torch.tensor([ENCODE], device=device)
    how: dict[str, Any] = {"format": "nvfp4", "encode_scale": encode, "backend": backend}
    if case.form in ROTATIONS:
        return lambda x: (ops.rotate(x, matrix, factor, backend=backend),)
    if case.form == "values":
        return lambda x: ops.rotate_quantize_dequantize(x, matrix, factor, **how)
    layout = "blocked" if case.form == "blocked" else "linear"
    return lambda x: ops.rotate_quantize(x, matrix, factor, scale_layout=layout, **how)


def plain(x: torch.Tensor, matrix: torch.Tensor, factor: float, form: str, encode: float = ENCODE):
    """The definition as one would write it in PyTorch: what `torch.compile` makes its kernels of.

    A +-1 matrix is exact in bf16, so its product runs on the matrix units with fp32 sums; a dense one needs fp32.
    """
    blocks = x.reshape(-1, matrix.shape[0])
    if form == "dense" or not x.is_cuda:
        z = blocks.float() @ matrix * factor
    else:
        z = torch.mm(blocks, matrix.bfloat16(), out_dtype=torch.float32) * factor
    if form == "rotate":
        return (z.to(x.dtype).view(x.shape),)
    groups = z.view(x.shape[0], -1, 16)
    amax = groups.abs().amax(-1)
    stored = (encode * (amax * INV6)).clamp(max=448.0).to(torch.float8_e4m3fn)
    scale = stored.float()
    r = torch.where(scale == 0, 0.0, 1.0 / (scale * (1.0 / encode)))
    scaled = groups * r.unsqueeze(-1)
    a = scaled.abs()
    first, second, third = a.clamp(max=2).mul(2).round(), (a - 2).clamp(0, 2).round(), (a - 4).clamp(0, 2).mul(0.5)
    third = third.round()
    if form == "values":
        magnitude = first * 0.5 + second + third * 2
        return ((magnitude.copysign(scaled) * scale.unsqueeze(-1)).to(x.dtype).view(x.shape),)
    sign = torch.signbit(scaled) & (scale > 0).unsqueeze(-1)
    codes = ((first + second + third).to(torch.uint8) | (sign.to(torch.uint8) << 3)).view(x.shape[0], -1, 2)
    return codes[..., 0] | (codes[..., 1] << 4), stored


# ---- whether it is right


def differing(got: torch.Tensor, want: torch.Tensor) -> int:
    return int((got.view(torch.uint8) != want.view(torch.uint8)).sum())


def faults(case: Case, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> str:
    """Empty where docs/numerics.md allows what differs; the tests say in addition that each is next to a tie."""
    if case.form in ("values", *ROTATIONS):
        if [t.shape for t in got[:1]] != [t.shape for t in want[:1]]:
            return f"shape {tuple(got[0].shape)}"
        # Another rounding of z to bf16, or another code next to a tie: at most the step of one code.
        wrong = int(((got[0] != want[0]) | got[0].isnan()).sum())
        allowed = max(16, int(got[0].numel() * (2.6e-4 if case.form == "values" else 1e-3)))
        return f"{wrong} of {got[0].numel()} values differ, {allowed} may" if wrong > allowed else ""
    scales, codes = differing(got[1], want[1]), differing(got[0], want[0])
    most_scales, most_codes = max(1, int(1e-5 * got[1].numel())), max(1, int(1e-4 * 2 * got[0].numel()))
    most_codes += 8 * scales  # a scale that may differ takes the codes of its group along
    if scales > most_scales or codes > most_codes:
        return f"{scales} of {got[1].numel()} scales (may: {most_scales}), {codes} bytes of codes (may: {most_codes})"
    return ""


# ---- what time it takes


class Memory:
    """Random bf16 numbers that every case takes its inputs from, as much as the largest needs."""

    def __init__(self, largest: Case) -> None:
        self.pool = torch.empty(largest.copies * largest.rows * largest.width, device="cuda", dtype=torch.bfloat16)
        for part in self.pool.split(1 << 28):
            part.normal_()
        self.flush = torch.empty(256 << 20, device="cuda", dtype=torch.uint8)

    def inputs(self, case: Case) -> list[torch.Tensor]:
        """The views that take turns, spread over the pool."""
        size = case.rows * case.width
        step = (self.pool.numel() - size) // max(1, case.copies - 1) // 64 * 64
        return [self.pool[i * step : i * step + size].view(case.rows, case.width) for i in range(case.copies)]


def graph_us(runs: list[Callable[[], object]], flush: torch.Tensor | None, repeats: int = 11) -> float:
    """Microseconds of one of `runs`: the median over replays of a graph of all of them, each with its own output."""
    return graphs_us([runs], flush, repeats)[0]


def graphs_us(all_runs: list[list[Callable[[], object]]], flush: torch.Tensor | None, repeats: int = 11) -> list[float]:
    """The same of several, whose graphs take turns: what one does to the GPU's clock, the others meet too."""
    graphs, kept = [], []
    for runs in all_runs:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for run in runs[:3]:
                run()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            kept.extend(run() for run in runs)
    times: list[list[float]] = [[] for _ in graphs]
    for repeat in range(repeats + 2):
        for graph, runs, found in zip(graphs, all_runs, times, strict=True):
            if flush is not None:
                flush.fill_(repeat)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / len(runs))
    del kept
    return [statistics.median(found[2:]) for found in times]


def eager_us(run: Callable[[], object], repeats: int = 3) -> float:
    """Microseconds of a call by device events, launches included: what an eager caller waits for."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def host_us(run: Callable[[], object], calls: int = 400) -> float:
    """Microseconds that the host spends on a call, the device running behind: the median over 9 rounds."""
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(times[2:])


def copy_us(case: Case, memory: Memory) -> float:
    """Of a copy that reads and writes as many bytes as the case does: half its traffic each way."""
    half = (case.bytes_read + case.bytes_written) // 2
    each = -(-half // 16) * 16
    pool = memory.pool.view(torch.uint8)
    step = (pool.numel() - each) // max(1, case.copies - 1) // 128 * 128
    sources = [pool[i * step : i * step + each] for i in range(case.copies)]
    return graph_us([source.clone for source in sources], None if case.stays_cold else memory.flush)


def measured(
    case: Case, memory: Memory, calls: tuple[Call, Call], compiled: Call | None, copies: dict[tuple, float]
) -> dict:
    """Check one case, then time it and what stands beside it. calls: ours and any_torch's.

    Raises SystemExit where it is wrong.
    """
    inputs, flush = memory.inputs(case), None if case.stays_cold else memory.flush
    ours, plainest = calls
    want = plainest(inputs[-1])
    if fault := faults(case, ours(inputs[-1]), want):
        raise SystemExit(f"{case}: {fault}; no time is taken")
    result: dict[str, Any] = {"us": graph_us([lambda x=x: ours(x) for x in inputs], flush)}
    key = (case.copies, case.bytes_read + case.bytes_written)
    if key not in copies:
        copies[key] = copy_us(case, memory)
    result["copy_us"] = copies[key]
    result["copy_gb_s"] = key[1] / copies[key] / 1e3
    result["any_torch_us"] = eager_us(lambda: plainest(inputs[0]))
    if compiled is not None:
        fault = faults(case, compiled(inputs[-1]), want)
        result["compiled_us"] = graph_us([lambda x=x: compiled(x) for x in inputs], flush)
        result["compiled_is_right"] = not fault
    return result


def compiled_of(case: Case, which: str) -> Call | None:
    """`plain` compiled for a form and a size, sizes of x dynamic; blocked scales are no single PyTorch operation, and a
    whole row's matrix no block's."""
    if (
        case.form in ("blocked", FULL, SIGNED)
        or which == "none"
        or (which == "one" and (case.form, case.size) != ("packed", 64))
    ):
        return None
    torch._dynamo.reset()
    matrix, factor = matrix_of(case.form, case.size, "cuda")
    form = case.form
    run = torch.compile(lambda x: plain(x, matrix, factor, form), fullgraph=True, dynamic=True)
    return run


def by_kernel(todo: list[Case]) -> Iterator[list[Case]]:
    """Cases of one form and size together, since they share what is compiled."""
    for size, form in dict.fromkeys((case.size, case.form) for case in todo):
        yield [case for case in todo if (case.size, case.form) == (size, form)]


def launch_costs(backend: str) -> dict[str, float]:
    """Host microseconds a call at M = 1, K = 4096: ours in three forms, any_torch's, and compiled PyTorch's."""
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    calls = {form: call_of(Case(form, 64, 1, 4096), backend) for form in ("packed", "values", "rotate")}
    calls["any_torch"] = call_of(Case("packed", 64, 1, 4096), "any_torch")
    compiled = compiled_of(Case("packed", 64, 1, 4096), "one")
    assert compiled is not None
    calls["compiled"] = compiled
    for call in calls.values():
        call(x)
    return {name: host_us(lambda call=call: call(x)) for name, call in calls.items()}


# ---- the table


def line(record: dict[str, Any]) -> str:
    share = record["copy_us"] / record["us"]
    ratio = f"{record['compiled_us'] / record['us']:6.2f}x" if "compiled_us" in record else "      -"
    note = "" if record.get("compiled_is_right", True) else "  (compiled: not within the bounds)"
    return (
        f"{record['form']:11} R={record['size']:<4} M={record['rows']:<6} K={record['width']:<6}"
        f"{record['us']:9.2f} us  {share:5.2f} of copy ({record['copy_gb_s']:5.0f} GB/s)  {ratio} compiled"
        f"  {record['any_torch_us'] / record['us']:7.1f}x any_torch{note}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="M = K = 8192 and few rows only: under a minute")
    parser.add_argument("--backend", default="gpu_triton")
    parser.add_argument("--compiled", choices=("all", "one", "none"), help="default: all, with --quick one (R = 64)")
    parser.add_argument("--forms", help="which, separated by commas; default: all, with --quick those of blocks")
    given = parser.parse_args()
    forms = (given.forms or ",".join(FORMS if given.quick else (*FORMS, FULL, SIGNED))).split(",")
    if unknown := set(forms) - {*FORMS, FULL, SIGNED}:
        parser.error(f"no form {', '.join(sorted(unknown))}; there are {', '.join((*FORMS, FULL, SIGNED))}")
    if not torch.cuda.is_available():
        raise SystemExit("this needs an NVIDIA GPU; `python -m benchmarks.cpu_kernels` is for the CPU")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    todo, which = cases(given.quick, forms), given.compiled or ("one" if given.quick else "all")
    memory = Memory(max(todo, key=lambda case: case.copies * case.rows * case.width))
    run_of = {**machine(), "run": datetime.datetime.now().isoformat(timespec="seconds"), "backend": given.backend}
    copies: dict[tuple, float] = {}
    for group in by_kernel(todo):
        compiled = compiled_of(group[0], which)
        calls = call_of(group[0], given.backend), call_of(group[0], "any_torch")
        for case in group:
            record = {**vars(case), **measured(case, memory, calls, compiled, copies)}
            print(line(record), flush=True)
            append(NAME, {**record, **run_of})
            torch.cuda.empty_cache()
    costs = launch_costs(given.backend)
    append(NAME, {"form": "launch", "host_us": costs, **run_of})
    print("host time of a call, M = 1, K = 4096, R = 64:", ", ".join(f"{n} {us:.1f} us" for n, us in costs.items()))
    print({key: run_of[key] for key in ("gpu", "driver", "torch", "triton")})


if __name__ == "__main__":
    main()
