"""Tables for the terminal (rich)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..compare import Comparison

if TYPE_CHECKING:
    from rich.table import Table


def comparison_table(result: Comparison) -> Table:
    """One row per variant, the original first."""
    from rich.table import Table

    title = f"{result.model}: {result.original.predictions:,} predictions, windows of {result.original.window} tokens"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for heading in ("format", "transform"):
        table.add_column(heading, no_wrap=True)
    for heading in ("perplexity", "change", "± s.e.", "KL", "same top", "MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("original", "", f"{result.original.perplexity:.2f}", "", "", "", "", megabytes(result.weight_bytes))
    best = min((v.judgement.perplexity for v in result.variants if v.judgement), default=0.0)
    for variant in result.variants:
        judged = variant.judgement
        assert judged is not None
        table.add_row(
            variant.format.upper(),
            variant.transform,
            f"{judged.perplexity:.2f}",
            percent(variant.change),
            f"{variant.change_error:.1%}",
            f"{judged.kl:.3f}",
            f"{judged.agreement:.1%}",
            megabytes(variant.weight_bytes),
            style="bold" if judged.perplexity == best else "",
        )
    return table


def megabytes(count: int) -> str:
    """Bytes in MB (10^6), whole."""
    return f"{count / 1e6:,.0f}"


def percent(change: float, digits: int = 1) -> str:
    """A signed change in percent, with a true minus sign."""
    return f"{change:+.{digits}%}".replace("-", "−")
