"""A whole model on a CPU: SmolLM2-135M in bf16, and as W4A4 NVFP4 behind hadamard:16, each in a process of its own.

    python -m benchmarks.cpu_model [--tokens 8192] [--only NAME ...] [--random]

For every way to run it: load time, peak memory, time of the perplexity over 8,192 tokens (16 windows of 512), tokens/s
of greedy decoding after a prompt of 64. Prints the ratio to the bf16 model of the same run, and the bound: the bf16
products alone at the rate that F.linear reaches here. Appends one line to results/cpu_model.jsonl.
--random takes random weights and tokens of the same shape, for a machine without the demo's model: times mean the same,
perplexities nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import append, machine

WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "quarterturn": {},
    "quarterturn, packed": {"weights": "packed"},
    "quarterturn, decoded": {"weights": "decoded"},
    "quarterturn, any_torch": {"backend": "any_torch"},
    "compressed-tensors": {},
}
NOTES = {"compressed-tensors": "plain Transformers: leaves the transform out, so its perplexity is not the file's"}


def measure(way: str, original: Path, checkpoint: Path, tokens: int) -> dict[str, Any]:
    """Everything about one way to run the model; called in a fresh process."""
    import torch
    import transformers

    import quarterturn
    from quarterturn.demo_model import held_out_text
    from quarterturn.evaluate import judge, peak_memory, speed

    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    before = peak_memory()["host"]
    began = time.perf_counter()
    if way.startswith("quarterturn"):
        model = quarterturn.load(checkpoint, dtype="bfloat16", device="cpu", **WAYS[way])
    else:
        folder = original if way == "bf16" else checkpoint
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loaded = time.perf_counter() - began
    after_load = peak_memory()["host"]
    if (original / "tokenizer_config.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(original)
        ids = tokenizer(held_out_text(), return_tensors="pt").input_ids[0][:tokens]
    else:
        ids = torch.randint(0, model.config.vocab_size, (tokens,))
    fast = speed(model, ids[:64], 48)
    result = judge(model, ids, window=512)
    return {
        "load_s": loaded,
        "load_peak_mib": (after_load - before) / 2**20,
        "peak_mib": peak_memory()["host"] / 2**20,
        "perplexity": result.perplexity,
        "perplexity_s": result.seconds,
        "tokens": result.tokens,
        "decode_tokens_per_s": fast.decode,
        "prefill_tokens_per_s": fast.prefill,
    }


def random_model(folder: Path) -> Path:
    """SmolLM2-135M's shape with random weights, bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def product_rate() -> float:
    """GFLOP/s of bf16 F.linear at the model's shapes, 512 tokens: the bound of the bf16 model's products."""
    import torch

    flops, seconds = 0, 0.0
    for n, k, count in ((576, 576, 2), (192, 576, 2), (1536, 576, 2), (576, 1536, 1)):
        x, w = torch.randn(512, k, dtype=torch.bfloat16), torch.randn(n, k, dtype=torch.bfloat16)
        torch.nn.functional.linear(x, w)
        began = time.perf_counter()
        for _ in range(3):
            torch.nn.functional.linear(x, w)
        seconds += (time.perf_counter() - began) / 3 * count
        flops += 2 * 512 * n * k * count
    return flops / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", nargs="*", default=list(WAYS))
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folders", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, *arguments.folders, arguments.tokens)))
        return
    import torch

    import quarterturn
    from quarterturn.demo_model import demo_model

    with tempfile.TemporaryDirectory() as work:
        original = random_model(Path(work) / "random") if arguments.random else demo_model()
        checkpoint, texts = Path(work) / "nvfp4", torch.randint(0, 49152, (2, 64)) if arguments.random else None
        quarterturn.quantize(
            original, "nvfp4", transform="hadamard:16", calibration=texts, output=checkpoint, progress=False
        )
        results = {way: in_a_process(way, original, checkpoint, arguments.tokens) for way in arguments.only}
    rate = product_rate()
    show(results, rate)
    append(
        "cpu_model",
        {
            "random": arguments.random,
            "tokens": arguments.tokens,
            "results": results,
            "bf16_linear_gflops": rate,
            "notes": NOTES,
            **machine(),
        },
    )


def in_a_process(way: str, original: Path, checkpoint: Path, tokens: int) -> dict[str, Any]:
    """measure() in a fresh interpreter, so that peaks and caches are its own."""
    command = [sys.executable, "-m", "benchmarks.cpu_model", "--one", way, "--tokens", str(tokens)]
    command += ["--folders", str(original), str(checkpoint)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{way}: {result['perplexity_s']:.1f} s, {result['decode_tokens_per_s']:.1f} tokens/s", file=sys.stderr)
    return result


def show(results: dict[str, dict[str, Any]], rate: float) -> None:
    base = results.get("bf16")
    print("| way | load s | load peak MiB | peak MiB | perplexity | seconds | of bf16 | decode tok/s | of bf16 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for way, r in results.items():
        of_time = f"{r['perplexity_s'] / base['perplexity_s']:.2f}" if base else ""
        of_speed = f"{r['decode_tokens_per_s'] / base['decode_tokens_per_s']:.2f}" if base else ""
        print(
            f"| {way} | {r['load_s']:.1f} | {r['load_peak_mib']:.0f} | {r['peak_mib']:.0f} | {r['perplexity']:.3f} "
            f"| {r['perplexity_s']:.1f} | {of_time} | {r['decode_tokens_per_s']:.1f} | {of_speed} |"
        )
    if base:
        # 106.2 M weights in the quantized layers and 28.3 M in the head, two operations each per token.
        bound = 2 * 134.5e6 * base["tokens"] / rate / 1e9
        print(f"bf16 F.linear reaches {rate:.0f} GFLOP/s here: {bound:.1f} s for the products of the bf16 model alone")


if __name__ == "__main__":
    main()
