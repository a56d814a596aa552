"""What the commands share: consoles, progress on stderr, quiet libraries, text from files, JSON."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from ..errors import refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Track = Callable[[str, int], Callable[[int], None]]

# Paths and names are printed as they are, whatever brackets and colons they hold.
out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_json(data: Any) -> None:
    """One JSON document on stdout and nothing else."""
    from ..compare import to_json

    print(to_json(data))


@contextmanager
def progress() -> Iterator[Track]:
    """Bars on stderr; where stderr is no terminal, a line as each piece of work begins, and one every 15 seconds."""
    if not err.is_terminal:
        yield _lines(time.perf_counter())
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    described = TextColumn("{task.description}", markup=False)
    columns = (described, BarColumn(bar_width=28), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err) as bars:

        def track(text: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(text, total=total)
            return lambda steps: bars.advance(task, steps)

        yield track


def _lines(began: float) -> Track:
    def line(text: str) -> float:
        now = time.perf_counter()
        print(f"[{now - began:6.1f} s] {text}", file=err.file, flush=True)
        return now

    def track(text: str, total: int) -> Callable[[int], None]:
        done, said = 0, line(text)

        def advance(steps: int) -> None:
            nonlocal done, said
            done += steps
            if time.perf_counter() - said >= _BETWEEN_LINES and done < total:
                said = line(f"{text}: {done / total:.0%}")

        return advance

    return track


_BETWEEN_LINES = 15.0
"""Seconds."""


@contextmanager
def work(text: str) -> Iterator[None]:
    """A spinner on stderr for work without a length; a line where stderr is no terminal."""
    if not err.is_terminal:
        print(text, file=err.file, flush=True)
        yield
        return
    from rich.text import Text

    with err.status(Text(text)):
        yield


def quiet() -> None:
    """Keep Transformers' own bars and advice off the terminal; errors still come."""
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError:
        return
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("quarterturn").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")


def read_text(file: Path) -> str:
    """A UTF-8 text. Raises Refusal for a file that is none, or is empty."""
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise refusal("text", "the file is not UTF-8 text.", file=file, needs=[("UTF-8", str(error))],
                      do="convert it, or give another file") from error  # fmt: skip
    if not text.strip():
        raise refusal("text", "the file is empty.", file=file, needs=[("text", "none")], do="give another file")
    return text


def tokenizer_of(path: Path | str, fallback: Path | str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, or of the fallback folder. Raises Refusal where there is none."""
    from transformers import AutoTokenizer

    for place in filter(None, (path, fallback)):
        try:
            return AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError):
            continue
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise refusal("tokenizer", "this is no model's folder.", file=path,
                      needs=[("config.json", "no such file")], do="check the path")  # fmt: skip
    raise refusal("tokenizer", "there is no tokenizer in the folder.", file=path,
                  needs=[("tokenizer.json and tokenizer_config.json", "none that can be read")],
                  do="copy them from the original model")  # fmt: skip


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, limit: int | None = None) -> torch.Tensor:
    """Text as token ids (T,), at most `limit` of them; special tokens are left out."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long, device="cpu")[:limit]


def size(count: float) -> str:
    """Bytes for people: 1.2 GB, 73.4 MB (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
