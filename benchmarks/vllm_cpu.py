"""Throughput of vLLM's CPU engine: SmolLM2-135M in bf16, and as W4A4 NVFP4 behind hadamard:16 by the plugin.

    python -m benchmarks.vllm_cpu [--tokens 64] [--rounds 5] [--eager] [--checkpoint FOLDER]

Each engine runs in a process of its own, both at once, and they take turns, so that what else the machine does falls on
both. A round decodes `--tokens` tokens greedily after prompts of 64, for 1 sequence and for 16; the time of a run to
one token is taken off. Tokens/s and their ratio are medians of the rounds, after one that is not counted. The bound of
the bf16 model is in the record: its weights read once a step, at the rate of a copy here. Appends one line to
results/vllm_cpu.jsonl. Needs vllm-cpu (docs/scaling.md).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import append, machine

BATCHES = (1, 16)
PROMPT = 64
MARK = "ANSWER "


def serve(path: str, eager: bool) -> None:
    """An engine that answers lines of "BATCH TOKENS" with the seconds it took; in a process of its own."""
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(path, dtype="bfloat16", max_model_len=512, max_num_seqs=max(BATCHES), enforce_eager=eager, seed=0,
              max_num_batched_tokens=PROMPT * max(BATCHES), enable_prefix_caching=False)  # fmt: skip
    print(f"{MARK}{time.perf_counter() - began}", flush=True)
    for line in sys.stdin:
        batch, count = map(int, line.split())
        prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 40000 + 5 for i in range(PROMPT)]} for j in range(batch)]
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True), use_tqdm=False)
        print(f"{MARK}{time.perf_counter() - start}", flush=True)


class Engine:
    """The other end of `serve`."""

    def __init__(self, path: Path, eager: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.vllm_cpu", "--serve", str(path), *(["--eager"] if eager else [])]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.start_s = self._answer()

    def seconds(self, batch: int, tokens: int) -> float:
        """How long a batch took."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{batch} {tokens}\n")
        self.process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> float:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return float(line.removeprefix(MARK))
        raise SystemExit("an engine ended: see its log above")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="without vLLM's compilation")
    parser.add_argument("--checkpoint", type=Path, help="one that is there; else it is made")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.eager)
        return
    from quarterturn.demo_model import demo_model

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.checkpoint or quantized(Path(folder) / "smollm2-nvfp4")
        engines = {"bf16": Engine(demo_model(), arguments.eager), "quarterturn": Engine(checkpoint, arguments.eager)}
        ways = compare(engines, arguments.tokens, arguments.rounds)
        for engine in engines.values():
            engine.stop()
    record = machine() | {"vllm": _version(), "eager": arguments.eager, "tokens": arguments.tokens, "ways": ways}
    record["bf16_bound_steps_per_s"] = bound(demo_model() / "model.safetensors")
    append("vllm_cpu", record)


def compare(engines: dict[str, Engine], tokens: int, rounds: int) -> dict[str, Any]:
    """Medians for each way and batch; prints them."""
    found: dict[str, Any] = {way: {"start_s": engine.start_s} for way, engine in engines.items()}
    for batch in BATCHES:
        times: dict[str, list[float]] = {way: [] for way in engines}
        for i in range(rounds + 1):
            for way, engine in engines.items():
                taken = engine.seconds(batch, tokens) - engine.seconds(batch, 1)
                if i:
                    times[way].append(taken)
        for way in engines:
            found[way][f"tokens_per_s_{batch}"] = batch * (tokens - 1) / statistics.median(times[way])
        ratios = [a / b for a, b in zip(times["bf16"], times["quarterturn"], strict=True)]
        found[f"ratio_{batch}"], found[f"ratios_{batch}"] = statistics.median(ratios), ratios
        speeds = ", ".join(f"{way} {found[way][f'tokens_per_s_{batch}']:.1f} tokens/s" for way in engines)
        print(
            f"batch {batch}: {speeds}; {statistics.median(ratios):.2f} of bf16 ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return found


def quantized(folder: Path) -> Path:
    import quarterturn
    from quarterturn.demo_model import demo_model

    quarterturn.quantize(demo_model(), "nvfp4", transform="hadamard:16", samples=2, output=folder, progress=False)
    return folder


def bound(file: Path) -> float:
    """How often a second the bytes of a file could be read from memory, by the rate of a copy (bytes read)."""
    import torch

    data = torch.empty(file.stat().st_size, dtype=torch.uint8)
    into = torch.empty_like(data)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        into.copy_(data)
        times.append(time.perf_counter() - start)
    return 1 / statistics.median(times)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    main()
