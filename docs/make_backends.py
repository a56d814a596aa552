"""Write docs/backends.md, and the README's table, from the docstrings of the backends.

    python docs/make_backends.py [--check]

A backend's docstring begins with a sentence and a table of four rows: needs, provides, does not, run on. What follows
the table is told below it. --check writes nothing and fails where the files are not what the docstrings say.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from quarterturn.backends import BACKENDS, Backend

PAGE = Path(__file__).parent / "backends.md"
README = Path(__file__).parent.parent / "README.md"
ROWS = ("needs", "provides", "does not", "run on")
BEGIN, END = "<!-- table: backends -->", "<!-- end of table: backends -->"


class Described(NamedTuple):
    """A backend in its own words: `rows` has the text of each of ROWS."""

    name: str
    summary: str
    rows: dict[str, str]
    more: str


def described(backend: Backend) -> Described:
    """Raises ValueError for a docstring that lacks a row."""
    text = backend.__doc__ or ""
    found = re.findall(r"^\| ([a-z ]+?) +\| (.*?) +\|$", text, flags=re.M)
    rows = dict(found)
    if tuple(rows) != ROWS:
        raise ValueError(f"{backend.NAME}: its docstring has the rows {', '.join(rows)}, not {', '.join(ROWS)}")
    before, _, rest = text.partition("\n| ")
    more = rest.split("|\n")[-1] if "|\n" in rest else ""
    return Described(backend.NAME, " ".join(before.split()), rows, more.strip())


def page() -> str:
    """docs/backends.md as the docstrings have it."""
    parts = [
        "# Backends",
        "",
        "Made from the docstrings of `src/quarterturn/backends/` by `python docs/make_backends.py`.",
        "",
        '`backend="auto"` takes the first of this order with no reason against it, for each layer by itself:',
        f"{', '.join(f'`{backend.NAME}`' for backend in BACKENDS)}. A named backend is run or refused, never replaced.",
        "What stands behind `any_torch`, which takes everything, runs only where it is named.",
        "`quarterturn doctor CHECKPOINT` prints which one runs each layer and every reason against the others;",
        '`--capability 10.0` asks about a GPU that is not at hand. "Run on" names machines where the tests were run.',
    ]
    for backend in BACKENDS:
        told = described(backend)
        parts += ["", f"## {told.name}", "", told.summary, "", "| | |", "|---|---|"]
        parts += [f"| {row} | {told.rows[row]} |" for row in ROWS]
        parts += ["", told.more] if told.more else []
    return "\n".join(parts) + "\n"


def table() -> str:
    """The README's table."""
    lines = ["| backend | needs | run on |", "|---|---|---|"]
    for told in map(described, BACKENDS):
        lines.append(f"| `{told.name}` | {told.rows['needs']} | {told.rows['run on']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    readme = README.read_text("utf-8")
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    wanted = {PAGE: page(), README: f"{head}{BEGIN}\n{table()}\n{END}{tail}"}
    for path, text in wanted.items():
        if not check:
            path.write_text(text, "utf-8")
        elif not path.exists() or path.read_text("utf-8") != text:
            raise SystemExit(f"{path.name} is not what the backends say: run `python docs/make_backends.py`")


if __name__ == "__main__":
    main()
