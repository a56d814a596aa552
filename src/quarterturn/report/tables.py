"""Tables for the terminal: columns that say least are left out where there is no room, and no cell is ever cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..compare import Comparison

if TYPE_CHECKING:
    from rich.text import Text

_GAP = 2


@dataclass
class Table:
    """Rows of text under headings, printed by rich; what a cell holds is never taken for markup.

    right: columns that are aligned to the right. spare: columns to leave out one by one, in this order, on a terminal
    too narrow for all; columns with nothing but '-' go before them. Where that is not enough, lines are longer than the
    terminal, which wraps them.
    """

    headings: Sequence[str]
    rows: list[Sequence[str]]
    title: str = ""
    right: Sequence[str] = ()
    spare: Sequence[str] = ()
    bold: set[int] = field(default_factory=set)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Text]:
        from rich.text import Text

        columns, left_out = self._columns(options.max_width)
        if self.title:
            yield Text(self.title, style="bold", no_wrap=True, overflow="ignore")
        widths = [self._width(column) for column in columns]
        for number, row in enumerate([self.headings, *self.rows]):
            cells = [
                f"{row[column]:>{width}}" if self.headings[column] in self.right else f"{row[column]:<{width}}"
                for column, width in zip(columns, widths, strict=True)
            ]
            style = "dim" if number == 0 else "bold" if number - 1 in self.bold else ""
            yield Text((" " * _GAP).join(cells).rstrip(), style=style, no_wrap=True, overflow="ignore")
        if left_out:
            names = ", ".join(self.headings[column] for column in left_out)
            yield Text(f"(no room for: {names})", style="dim", no_wrap=True, overflow="ignore")

    def _columns(self, room: int) -> tuple[list[int], list[int]]:
        """The columns to show, and those left out that hold something."""
        columns = list(range(len(self.headings)))
        empty = [c for c in columns if self.rows and all(row[c] in ("", "-") for row in self.rows)]
        left_out = []
        for column in [*empty, *(self.headings.index(name) for name in self.spare)]:
            if sum(self._width(c) + _GAP for c in columns) - _GAP <= room:
                break
            if column in columns:
                columns.remove(column)
                left_out += [] if column in empty else [column]
        return columns, left_out

    def _width(self, column: int) -> int:
        return max(len(row[column]) for row in [self.headings, *self.rows])


def comparison_table(result: Comparison) -> Table:
    """One row per variant, the original first."""
    title = f"{result.model}: {result.original.predictions:,} predictions, windows of {result.original.window} tokens"
    figures = ("perplexity", "change", "± s.e.", "KL", "same top", "MB")
    original = ("original", "", f"{result.original.perplexity:.2f}", "", "", "", "", megabytes(result.weight_bytes))
    table = Table(("format", "transform", *figures), [original], title, figures, ("MB", "same top", "± s.e.", "KL"))
    best = min((v.judgement.perplexity for v in result.variants if v.judgement), default=0.0)
    for variant in result.variants:
        judged = variant.judgement
        assert judged is not None
        if judged.perplexity == best:
            table.bold.add(len(table.rows))
        table.rows.append((
            variant.format.upper(),
            variant.transform,
            f"{judged.perplexity:.2f}",
            percent(variant.change),
            f"{variant.change_error:.1%}",
            f"{judged.kl:.3f}",
            f"{judged.agreement:.1%}",
            megabytes(variant.weight_bytes),
        ))  # fmt: skip
    return table


def megabytes(count: int) -> str:
    """Bytes in MB (10^6), whole."""
    return f"{count / 1e6:,.0f}"


def percent(change: float, digits: int = 1) -> str:
    """A signed change in percent, with a true minus sign."""
    return f"{change:+.{digits}%}".replace("-", "−")
