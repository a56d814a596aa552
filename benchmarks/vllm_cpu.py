"""Throughput of vLLM's CPU engine: SmolLM2-135M in bf16, and as W4A4 NVFP4 behind hadamard:16 by the plugin.

    python -m benchmarks.vllm_cpu [--tokens 64] [--rounds 3] [--eager]

Each engine runs in a process of its own, both in one run; after a first round that is not counted, rounds of a batch
of 1 and of 16 sequences are timed: a prompt of 64 tokens each, then `--tokens` tokens by greedy decoding. Tokens/s are
those of decoding (the time of a run to one token is taken off), medians of the rounds. The bound: reading the weights
once a token. Appends one line to results/vllm_cpu.jsonl. Needs vllm-cpu (docs/scaling.md).
"""

from __future__ import annotations

import argparse
import json
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


def measure(path: str, tokens: int, rounds: int, eager: bool) -> dict[str, Any]:
    """Start time and tokens/s of each batch; called in a fresh process."""
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(path, dtype="bfloat16", max_model_len=512, max_num_seqs=16, enforce_eager=eager, seed=0,
              enable_prefix_caching=False)  # fmt: skip
    found: dict[str, Any] = {"start_s": time.perf_counter() - began}

    def run(batch: int, count: int) -> float:
        prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 40000 + 5 for i in range(PROMPT)]} for j in range(batch)]
        wanted = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, wanted, use_tqdm=False)
        return time.perf_counter() - start

    for batch in BATCHES:
        run(batch, 4)
        times = [run(batch, tokens) - run(batch, 1) for _ in range(rounds)]
        found[f"tokens_per_s_{batch}"] = batch * (tokens - 1) / statistics.median(times)
        found[f"spread_{batch}"] = max(times) / min(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="without vLLM's compilation")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        found = measure(arguments.measure, arguments.tokens, arguments.rounds, arguments.eager)
        print("RESULT " + json.dumps(found))
        return
    ways = _both(arguments)
    bf16, ours = ways["bf16"], ways["quarterturn"]
    for batch in BATCHES:
        ratio = ours[f"tokens_per_s_{batch}"] / bf16[f"tokens_per_s_{batch}"]
        print(f"batch {batch}: {bf16[f'tokens_per_s_{batch}']:.1f} bf16, {ours[f'tokens_per_s_{batch}']:.1f} W4A4, "
              f"{ratio:.2f} of bf16")  # fmt: skip
    record = machine() | {"vllm": _version(), "eager": arguments.eager, "tokens": arguments.tokens, "ways": ways}
    append("vllm_cpu", record)


def _both(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    import quarterturn
    from quarterturn.demo_model import demo_model

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "smollm2-nvfp4"
        quarterturn.quantize(demo_model(), "nvfp4", transform="hadamard:16", output=checkpoint, progress=False)
        ways = {}
        for way, path in (("bf16", demo_model()), ("quarterturn", checkpoint)):
            command = [sys.executable, "-m", "benchmarks.vllm_cpu", "--measure", str(path)]
            command += ["--tokens", str(arguments.tokens), "--rounds", str(arguments.rounds)]
            command += ["--eager"] if arguments.eager else []
            environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            ways[way] = json.loads(line.removeprefix("RESULT "))
    return ways


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
