"""`quantize`, `compare` and `demo`: making checkpoints, and finding out which is best."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint import resolve
from ..errors import missing_package
from ..formats import FORMATS
from .common import err, out, print_json, progress, quiet, read_text, size, token_ids, tokenizer_of, work

Model = Annotated[str, typer.Argument(metavar="MODEL", help="An unquantized model: a folder, or a hub id.")]
Transforms = Annotated[str, typer.Option(help="Comma-separated: none, hadamard[:R], random-hadamard[:R].")]
Formats = Annotated[str, typer.Option(help="Comma-separated: nvfp4, mxfp4.")]
Activations = Annotated[str, typer.Option(help="fp4 (W4A4) or bf16 (W4A16).")]
Calibration = Annotated[
    Path | None, typer.Option(help="A UTF-8 text that sets the input scales; default: the built-in one.")
]
Overwrite = Annotated[bool, typer.Option(help="Replace checkpoints that are there.")]
Tokens = Annotated[int, typer.Option(min=4, help="Tokens to judge on.")]
Window = Annotated[int, typer.Option(min=2, help="Tokens that are judged together.")]
PROMPT = "What is the capital of France, and what is it known for?"


def quantize(
    model: Model,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it appears whole or not at all.")],
    format: Annotated[str, typer.Option(help="nvfp4 or mxfp4.")] = "nvfp4",
    transform: Annotated[str, typer.Option(help="none, hadamard[:R] or random-hadamard[:R] on every input.")] = "none",
    activations: Activations = "fp4",
    calibration: Calibration = None,
    target: Annotated[list[str] | None, typer.Option(help="Class, name or 're:...' to quantize; repeatable.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Name or 're:...' to leave out; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Of random-hadamard.")] = 0,
    max_shard_size: Annotated[str, typer.Option(help="Larger checkpoints are split.")] = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Round a model to 4-bit floats and write a compressed-tensors checkpoint."""
    quiet()
    from ..quantize import quantize as run

    began = time.perf_counter()
    texts = None if calibration is None else _pieces(read_text(calibration))
    with work(f"quantizing {model}"):
        made = run(
            str(resolve(model)),
            format,
            None if transform == "none" else transform,
            activations,
            texts,
            targets=tuple(target or ("Linear",)),
            ignore=tuple(ignore or ("lm_head",)),
            output=output,
            seed=seed,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=False,
        )
    written = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    for note in getattr(made, "quantization_notes", ()):
        err.print(f"note: {note}")
    out.print(f"{output}: {size(written)}, {time.perf_counter() - began:.0f} s")


def _pieces(text: str, count: int = 8) -> list[str]:
    """A text as up to `count` pieces from all over it; quantize cuts each to its length in tokens."""
    step = max(1, len(text) // count)
    return [text[start : start + step] for start in range(0, len(text), step)][:count]


def compare(
    model: Model,
    out_: Annotated[Path, typer.Option("--out", help="Folder for checkpoints, plots and the page.")],
    formats: Formats = "nvfp4,mxfp4",
    transforms: Transforms = "none,hadamard,random-hadamard",
    activations: Activations = "fp4",
    text: Annotated[Path | None, typer.Option(help="The UTF-8 text to judge on; default: the built-in one.")] = None,
    calibration: Calibration = None,
    tokens: Tokens = 4096,
    window: Window = 512,
    prompt: Annotated[str, typer.Option(help="What each variant goes on from.")] = PROMPT,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Try formats and transforms on a model: one table, plots, and one HTML page."""
    quiet()
    _need_matplotlib()
    from ..compare import planned

    named = _list(formats), _list(transforms)
    planned(*named, activations)
    content = None if text is None else read_text(text)
    texts = None if calibration is None else _pieces(read_text(calibration))
    _compare(resolve(model), out_, *named, activations, content, str(text), texts, tokens, window, prompt, overwrite,
             as_json)  # fmt: skip


def demo(
    out_: Annotated[Path, typer.Option("--out", help="Folder for checkpoints, plots and the page.")] = Path(
        "quarterturn-demo"
    ),
    tokens: Tokens = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """The whole job on SmolLM2-135M: quantize it in both formats, write, load, run, judge, and show (minutes)."""
    quiet()
    _need_matplotlib()
    from ..demo_model import demo_model

    with work("opening SmolLM2 (converted from GGUF the first time, about 40 s)"):
        folder = demo_model()
    transforms = ["none", "hadamard", "random-hadamard"]
    _compare(folder, out_, list(FORMATS), transforms, "fp4", None, "", None, tokens, 256, PROMPT, True, as_json)


def _compare(
    model: Path,
    folder: Path,
    formats: list[str],
    transforms: list[str],
    activations: str,
    content: str | None,
    text_name: str,
    calibration: list[str] | None,
    tokens: int,
    window: int,
    prompt: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    from rich.text import Text

    from ..compare import compare as run
    from ..report import comparison_table, findings, write_page
    from ..texts import held_out_text

    began = time.perf_counter()
    ids = token_ids(tokenizer_of(model), content or held_out_text(), tokens)
    about = "Python's language reference (pydoc_data.topics)" if content is None else text_name
    with progress() as track:
        result = run(model, ids, folder, formats=formats, transforms=transforms, activations=activations,
                     calibration=calibration, window=window, prompt=prompt, text=about, overwrite=overwrite,
                     track=track)  # fmt: skip
    page = write_page(result, folder)
    if as_json:
        print(result.to_json())
        return
    out.print()
    out.print(comparison_table(result))
    out.print()
    for sentence in findings(result):
        out.print(sentence)
    out.print()
    for variant in result.variants:
        out.print(Text.assemble((variant.label, "bold"), f"  {variant.ran}"))
        out.print(f"  {variant.sample}")
    out.print(f"\n{time.perf_counter() - began:.0f} s. The page: {page.resolve()}")


def _need_matplotlib() -> None:
    # Asked before the work, not after it.
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise missing_package("report", "matplotlib", "pip install 'quarterturn[report]'")


def _list(text: str) -> list[str]:
    return [name.strip().lower() for name in text.split(",") if name.strip()]


__all__ = ["compare", "demo", "print_json", "quantize"]
