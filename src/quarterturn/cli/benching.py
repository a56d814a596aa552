"""`bench`: how fast a model of a known shape is in 4 bits, beside bf16."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from ..errors import refusal
from .common import out, print_json, progress, quiet, size
from .running import Backend, BatchInvariant, Device, Json, Weights, _check_device

if TYPE_CHECKING:
    from ..bench import Result


def bench(
    model_shape: Annotated[str, typer.Option(help="llama-3.1-8b, qwen2.5-7b, ...; a wrong name lists all.")],
    batch: Annotated[str, typer.Option(help="Sequences decoded at once, comma-separated.")] = "1",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens read before the first is written.")] = 4096,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps a round; three rounds.")] = 32,
    cache: Annotated[int, typer.Option(min=1, help="Tokens of the static cache while decoding.")] = 1024,
    format: Annotated[str, typer.Option(help="nvfp4 or mxfp4.")] = "nvfp4",
    activations: Annotated[str, typer.Option(help="fp4 (W4A4) or bf16 (W4A16).")] = "fp4",
    transform: Annotated[str, typer.Option(help="none, hadamard[:R] or random-hadamard[:R].")] = "hadamard:64",
    weights: Weights = "auto",
    backend: Backend = "auto",
    batch_invariant: BatchInvariant = False,
    device: Device = "auto",
    layers: Annotated[int | None, typer.Option(min=1, help="Only so many of the model's layers.")] = None,
    bf16: Annotated[bool, typer.Option(help="Measure the bf16 model too.")] = True,
    compile: Annotated[bool, typer.Option(help="On a GPU, compile a step before it is captured.")] = True,
    record: Annotated[Path | None, typer.Option(help="Append the result to this file, as a line of JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Time a model of a known shape with random weights in 4 bits, and in bf16: prompt, decoding, memory."""
    quiet()
    from ..bench import Ask, FourBits
    from ..bench import bench as run

    made = FourBits(format, activations, transform, weights, backend, batch_invariant)
    ask = Ask(model_shape, _batches(batch), prompt, new_tokens, cache, made, layers, compile, bf16)
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    _check_device(target)
    if record is not None and not record.parent.is_dir():
        raise refusal("bench", "the record's folder is not there.", file=record, needs=[("a folder", "none")],
                      do="make it, or give another path")  # fmt: skip
    if record is not None and record.is_dir():
        raise refusal("bench", "the record is a folder.", file=record, needs=[("a file, or a new name", "a folder")],
                      do="name a file in it")  # fmt: skip
    with progress() as track:
        result = run(ask, torch.device(target), track)
    if record is not None:
        with record.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(result.record()) + "\n")
    if as_json:
        print_json(result.record())
    else:
        _show(result)


def _batches(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise refusal("bench", "there is no such batch.", needs=[("numbers of sequences, such as 1,16", repr(text))],
                      do="pass --batch 1,16")  # fmt: skip
    return tuple(int(part) for part in parts)


def _show(result: Result) -> None:
    from ..report.tables import Table

    ask, machine = result.ask, result.machine
    name = machine["gpu"] if result.device.startswith("cuda") else machine["processor"]
    cut = f", {result.layers} layers" if ask.layers is not None else ""
    out.print(f"{ask.shape}{cut}, random weights, on {name}", style="bold")
    for model in result.models:
        ways = dict.fromkeys(decode.way for decode in model.decodes)
        out.print(f"  {model.name:<6}{model.ran}; a step: {'; '.join(ways)}")
    out.print(f"  copy  {result.copy_speed / 1e9:,.0f} GB/s read and written; the ceiling is a step's weights at that")
    for note in result.notes:
        out.print(f"  note  {note}")
    out.print()
    headings = ("", *(model.name for model in result.models), *(["of bf16"] if len(result.models) > 1 else []))
    out.print(Table(headings, _rows(result), right=headings[1:]))


def _rows(result: Result) -> list[Sequence[str]]:
    models, prompt = result.models, result.ask.prompt
    rows: list[Sequence[str]] = [_row("weights", [m.model_bytes for m in models], size)]
    if all(m.peak_bytes is not None for m in models):
        rows.append(_row("memory at most", [m.peak_bytes or 0 for m in models], size))
    rows.append(_row(f"first token after {prompt}, ms", [m.first_token * 1e3 for m in models], "{:,.1f}".format))
    rows.append(_row("reading, tokens/s", [prompt / m.first_token for m in models], "{:,.0f}".format))
    for index, decode in enumerate(models[0].decodes):
        all_of = [m.decodes[index] for m in models]
        at = f"batch {decode.batch}: "
        rows.append(_row(f"{at}step, ms", [d.step * 1e3 for d in all_of], "{:,.2f}".format))
        rows.append(_row(f"{at}writing, tokens/s", [d.tokens_per_second for d in all_of], "{:,.1f}".format))
        rows.append(_row(f"{at}of the ceiling", [d.share for d in all_of], "{:.0%}".format, False))
        rows.append(_row(f"{at}linear layers, ms", [d.linear * 1e3 for d in all_of], "{:,.2f}".format))
        rows.append(_row(f"{at}linear, of the ceiling", [d.linear_share for d in all_of], "{:.0%}".format, False))
    return rows


def _row(name: str, values: list[float], form: Callable[[float], str], compared: bool = True) -> tuple[str, ...]:
    """A line of the table: the last cell is the first value over the second, where there are two."""
    ratio = [] if len(values) < 2 else [f"{values[0] / values[1]:.2f}" if compared else ""]
    return (name, *(form(value) for value in values), *ratio)


__all__ = ["bench"]
