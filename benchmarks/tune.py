"""Measure how the products are best cut on the GPU at hand, and keep it in src/quarterturn/backends/tuned.

    python -m benchmarks.tune [--shape llama-3.1-8b ...] [--size 28672x4096 ...] [--tokens 1 16 64 ...] [--dry]

For each weight (N, K) and class of tokens: the formula's cut is checked against float64, then cuts of a small grid are
tried, all with the formula's order of sums. One that gives other bits than the formula's, or that cannot be compiled or
launched, is passed over; the fastest is kept if it is at least 2% faster than the formula's, twice. NVFP4 weights, bf16
x; a time is the median over replays of a CUDA graph over copies of the weight that exceed the cache, and the cuts'
graphs take turns. Kernels are compiled beforehand by all cores. --dry prints and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from benchmarks.gpu_matmul import COLD, FEWEST
from benchmarks.gpu_rotate_quantize import graphs_us
from benchmarks.record import machine
from quarterturn import weight_layout
from quarterturn.backends import gpu_device, gpu_matmul, gpu_matmul_many, gpu_tuned
from quarterturn.bench.shapes import SHAPES, config_of
from quarterturn.formats import NVFP4
from quarterturn.weight_layout import Fragments

GAIN = 0.98
"""A cut is kept if it takes less than this of the formula's time: smaller gains are noise."""

FINALISTS = 3
"""Cuts that are timed a second time, beside the formula's: the least of fifty times is least by chance too."""

DEFAULT_SHAPES = ("llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b")
CLASSES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

Cut = TypeVar("Cut")


def sizes_of(shape: str) -> list[tuple[int, int]]:
    """(N, K) of the linear layers of a model's shape, each once, and of those that are one product together."""
    c = config_of(shape)
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    q, kv = head * c.num_attention_heads, head * c.num_key_value_heads
    h, i = c.hidden_size, c.intermediate_size
    return list(dict.fromkeys([(q + 2 * kv, h), (q, h), (kv, h), (h, q), (2 * i, h), (i, h), (h, i)]))


def few_grid(m: int, n: int, k: int, count: int, capability: tuple[int, int]) -> list[gpu_matmul.Cut]:
    """The formula's cut, and others with its order of sums that shared memory has room for."""
    first = gpu_matmul.cut_of(n, k, m, count, capability)
    made = [first]
    kib = gpu_matmul.shared_kib(capability)
    for programs in (1, 2, 3, 4):
        for stages in (1, 2, 3, 4):
            for slots in (1, 2, 4, 8):
                for cluster in (False, True) if first.split == 2 and capability >= (9, 0) else (False,):
                    cut = first._replace(programs=programs, stages=stages, slots=slots, cluster=cluster)
                    threads = 32 * cut.num_warps * programs
                    need = gpu_matmul.shared_bytes(cut, n, m, count)
                    if cut != first and threads <= 1024 and need <= kib * 1024 // programs - 1024:
                        made.append(cut)
    return made


def many_grid(m: int, n: int, k: int, count: int) -> list[gpu_matmul_many.Cut]:
    """The formula's cut, and others that add K in its order."""
    first = gpu_matmul_many.cut(m, n, k, count, False)
    made = [first]
    if first.rounds:  # another cut would make other tiles in parts
        return made
    for tokens in (32, 64, 128, 256):
        for programs in (1, 2):
            cut = first._replace(tokens=tokens, programs=programs)
            fits = tokens < 4 * m and (programs == 1 or tokens <= 64)  # registers of two programs hold no more sums
            if cut != first and fits and gpu_matmul_many.has_room(cut, m, n, count):
                made.append(cut)
    return made


def fastest(
    cuts: list[Cut], result: Callable[[Cut], torch.Tensor], times: Callable[[list[Cut]], list[float]]
) -> tuple[Cut, float, float]:
    """The fastest of cuts whose result has the bits of the first one's, its time, and the first one's.

    The first is kept where none takes less than GAIN of its time. Errors of others only pass them over.
    """
    want, alike = result(cuts[0]), cuts[:1]
    for cut in cuts[1:]:
        try:
            if torch.equal(result(cut), want):
                alike.append(cut)
        except Exception as error:
            print(f"  {cut}: {str(error).splitlines()[0] if str(error) else type(error).__name__}", flush=True)
    taken = dict(zip(alike, times(alike), strict=True))
    last = [cuts[0], *sorted(alike[1:], key=taken.__getitem__)[:FINALISTS]]
    again = {cut: max(us, taken[cut]) for cut, us in zip(last, times(last), strict=True)}
    first = min(again[cuts[0]], taken[cuts[0]])
    best = min(last, key=again.__getitem__)
    return (best, again[best], first) if again[best] < GAIN * first else (cuts[0], first, first)


class Case:
    """Weights (n, k) that exceed the cache together, m tokens, and the product by a cut."""

    def __init__(self, m: int, n: int, k: int, device: torch.device, copies: int | None = None) -> None:
        copies = copies or max(FEWEST, -(-int(COLD) // (n * k * 9 // 16)))
        self.x = torch.randn(m, k, device=device).bfloat16()
        self.weights = [_fragments(n, k, device) for _ in range(copies)]
        self.alpha, self.one = torch.ones(n, device=device), torch.ones(1, device=device)
        self.raised = self.alpha * 2.0 ** self.weights[0].exponent
        self.few = m <= gpu_matmul.MOST_TOKENS
        self.space = None if self.few else gpu_matmul_many.workspace(device)

    def product(self, cut: Any, weight: Fragments) -> torch.Tensor:
        out = self.x.new_empty(self.x.shape[0], weight.n)
        if self.few:
            after = gpu_device.capability(self.x.device)[0] == 9
            gpu_matmul.few(self.x, weight, self.alpha, None, None, out, after=after, cut=cut)
        else:
            assert self.space is not None
            gpu_matmul_many.many(self.x, weight, self.raised, self.one, None, self.space, out, chosen=cut)
        return out

    def result(self, cut: Any) -> torch.Tensor:
        # Triton prints the whole program, and raises, where the assembler finds no registers for a cut.
        with contextlib.redirect_stdout(io.StringIO()):
            return self.product(cut, self.weights[0])

    def times(self, cuts: list[Any]) -> list[float]:
        """Microseconds of each."""
        return graphs_us([[lambda c=cut, w=w: self.product(c, w) for w in self.weights] for cut in cuts], None, 7)

    def check(self, cut: Any) -> None:
        """Raises SystemExit where a result is further from float64 than rounding and the order of additions allow."""
        y, exact = self.result(cut).double(), weight_layout.decoded(self.weights[0]).double()
        want, size = self.x.double() @ exact.T, self.x.double().abs() @ exact.abs().T
        if bool(y.isnan().any()) or bool(((y - want).abs() > want.abs() * 2.0**-8 + size * 2e-6).any()):
            raise SystemExit(f"M={len(y)} N={y.shape[1]} K={self.x.shape[1]}, {cut}: wrong; nothing is measured")


def _fragments(n: int, k: int, device: torch.device) -> Fragments:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(0x20, 0x60, (n, k // 16), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return weight_layout.forward(codes, scale, NVFP4)


def cases(
    sizes: list[tuple[int, int]], classes: list[int], device: torch.device
) -> Iterator[tuple[int, int, int, list[Any]]]:
    """(M, N, K) and the cuts to try, of every size and class that the kernels take; the formula's cut comes first."""
    count, capability = gpu_device.multiprocessors(device), gpu_device.capability(device)
    for n, k in sizes:
        for m in classes:
            if m <= gpu_matmul.MOST_TOKENS:
                yield m, n, k, few_grid(m, n, k, count, capability)
            elif capability[0] == 9:  # the kernel for many tokens is Hopper's
                yield m, n, k, many_grid(m, n, k, count)


def _compile(job: tuple[int, int, int, list[Any]]) -> None:
    """Leave the kernels of some cuts in Triton's cache. What cannot be compiled is told where it is measured."""
    (m, n, k, cuts), device = job, torch.device("cuda", torch.cuda.current_device())
    case = Case(m, n, k, device, copies=1)
    for cut in cuts:
        with contextlib.suppress(Exception):
            case.result(cut)


def compile_all(of: list[tuple[int, int, int, list[Any]]]) -> None:
    """All kernels, by as many processes as there are cores, up to 16."""
    jobs = [(m, n, k, cuts[i : i + 4]) for m, n, k, cuts in of for i in range(0, len(cuts), 4)]
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        for done, _ in enumerate(pool.imap_unordered(_compile, jobs), 1):
            if done % 50 == 0 or done == len(jobs):
                print(f"compiled {done} of {len(jobs)} sets of kernels", flush=True)


def tuned(of: list[tuple[int, int, int, list[Any]]], device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kernel, entry) of every case, one after the other."""
    for m, n, k, cuts in of:
        case = Case(m, n, k, device)
        case.check(cuts[0])
        cut, us, formula_us = fastest(cuts, case.result, case.times)
        kept = "as the formula" if cut == cuts[0] else str(cut)
        print(f"N={n:<6} K={k:<6} M={m:<5} {us:8.2f} us, formula {formula_us:8.2f}: {kept}", flush=True)
        entry = {"tokens": m, "n": n, "k": k, "cut": cut._asdict(), "us": us, "formula_us": formula_us}
        yield ("few" if m <= gpu_matmul.MOST_TOKENS else "many"), entry
        del case
        torch.cuda.empty_cache()


def write(name: str, kernel: str, entry: dict[str, Any], measured: dict[str, Any]) -> None:
    """Put an entry into the table of a device, in the place of an older one of the same sizes, which goes too where the
    formula's cut is the best: tables hold what is faster than it."""
    path = gpu_tuned.file_of(name)
    data = json.loads(path.read_text("utf-8")) if path.exists() else {"device": name}
    if data["device"] != name:
        raise SystemExit(f"{path} is the table of {data['device']}, not of {name}")
    for each in gpu_tuned.CUTS:
        of_sizes = {(e["n"], e["k"], e["tokens"]): e for e in [*data.get(each, []), *[entry] * (each == kernel)]}
        data[each] = [e for _, e in sorted(of_sizes.items()) if e["us"] < e["formula_us"]]
    data["measured"] = measured if any(data[each] for each in gpu_tuned.CUTS) else None
    path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    gpu_tuned.forget()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=None, choices=list(SHAPES))
    parser.add_argument("--size", nargs="*", default=[], help="N and K of a weight, such as 28672x4096")
    parser.add_argument("--tokens", nargs="*", type=int, default=list(CLASSES))
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise SystemExit("this needs an NVIDIA GPU of capability 8.0 or more")
    torch.manual_seed(0)
    sizes = [tuple(map(int, size.split("x"))) for size in given.size]
    shapes = given.shape if given.shape is not None else () if sizes else DEFAULT_SHAPES
    sizes = list(dict.fromkeys([*sizes, *(size for shape in shapes for size in sizes_of(shape))]))
    classes = sorted({c for m in given.tokens if (c := gpu_tuned.tokens_class(m)) is not None})
    about = {key: value for key, value in machine().items() if key in ("date", "driver", "torch", "triton")}
    device = torch.device("cuda", torch.cuda.current_device())
    of = list(cases(sizes, classes, device))
    compile_all(of)
    for kernel, entry in tuned(of, device):
        if not given.dry:
            write(torch.cuda.get_device_name(), kernel, entry, about)


if __name__ == "__main__":
    main()
