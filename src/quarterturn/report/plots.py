"""Plots (matplotlib) as SVG text whose colours are the page's CSS variables, so one drawing serves light and dark.

Matplotlib is given stand-in colours; `svg` replaces each by `var(--name)`. `standalone` writes the same drawing with
the light colours, as a file of its own.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compare import Comparison, Study, Variant
from ..errors import missing_package
from .tables import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIGHT = {
    "ink": "#1d1f23",
    "muted": "#6a6d75",
    "line": "#dcdad5",
    "c0": "#8a8d94",
    "c1": "#0b7a75",
    "c2": "#c4541c",
    "c3": "#5b57c2",
    "c4": "#a3295f",
    "paper": "#fdfcfa",
}
DARK = {
    "ink": "#e8e6e1",
    "muted": "#9b9da6",
    "line": "#34363d",
    "c0": "#8d9099",
    "c1": "#45c4b4",
    "c2": "#f0894d",
    "c3": "#a5a1f5",
    "c4": "#ee7fb0",
    "paper": "#16171b",
}
# What matplotlib draws with: colours that nothing else in a drawing has.
_STAND_IN = {name: f"#fe{index:02x}dc" for index, name in enumerate(LIGHT)}
_SERIES = ("c0", "c1", "c2", "c3", "c4")
_DASHES = ("-", "-", (0, (4, 1.5)), (0, (1, 1.2)), "-.")

KINDS = (
    ("q, k, v", ("q_proj", "k_proj", "v_proj")),
    ("o", ("o_proj",)),
    ("gate, up", ("gate_proj", "up_proj")),
    ("down", ("down_proj",)),
)


def plot_all(result: Comparison) -> dict[str, Figure]:
    """Every plot of a comparison by name. Raises Refusal without matplotlib."""
    with _style():
        return {
            "perplexity": _perplexity(result),
            "layers": _layers(result),
            "distribution": _distribution(result.study),
            "channels": _channels(result.study),
        }


def svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for the page: colours are CSS variables, ids are its own."""
    text = _svg(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r'(width|height)="[\d.]+pt" ?', "", text, count=2)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Several drawings share the page, so each one's ids get its name.
    text = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, stand_in in _STAND_IN.items():
        text = text.replace(stand_in, f"var(--{colour})")
    return text


def standalone(figure: Figure) -> str:
    """The figure as an SVG file in the light colours."""
    text = _svg(figure)
    for colour, stand_in in _STAND_IN.items():
        text = text.replace(stand_in, LIGHT[colour])
    return text


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    # The transparent background leaves the page's own to be seen.
    with _style():
        figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", pad_inches=0.02)
    return buffer.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib as mpl
    except ImportError:
        raise missing_package("report", "matplotlib", "pip install 'quarterturn[report]'") from None
    c = _STAND_IN
    settings: dict[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "quarterturn",
        "font.family": "sans-serif",
        "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"],
        "font.size": 9.5,
        "axes.edgecolor": c["line"],
        "axes.labelcolor": c["muted"],
        "axes.titlecolor": c["ink"],
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": c["line"],
        "grid.linewidth": 0.7,
        "text.color": c["ink"],
        "xtick.color": c["line"],
        "xtick.labelcolor": c["muted"],
        "ytick.color": c["line"],
        "ytick.labelcolor": c["muted"],
        "legend.frameon": False,
        "legend.labelcolor": c["ink"],
        "lines.linewidth": 1.4,
    }
    with mpl.rc_context(settings):
        yield


def _figure(width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Not pyplot: it keeps figures alive and may look for a screen.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots(**options)


def _perplexity(result: Comparison) -> Figure:
    """A dot per variant, joined to the original's line: the distance is what quantization costs."""
    c, variants = _STAND_IN, result.variants
    figure, axes = _figure(8.2, 0.75 + 0.34 * len(variants))
    base = result.original.perplexity
    colours = _format_colours(variants)
    rows = list(range(len(variants)))[::-1]
    for y, variant in zip(rows, variants, strict=True):
        assert variant.judgement is not None
        value, colour = variant.judgement.perplexity, c[colours[variant.format]]
        axes.plot([base, value], [y, y], color=colour, linewidth=2.2, solid_capstyle="butt", alpha=0.45)
        error = base * variant.change_error
        if error == error:
            axes.plot([value - error, value + error], [y, y], color=colour, linewidth=5, alpha=0.35)
        axes.plot([value], [y], "o", color=colour, markersize=7)
        label = f"{value:.2f}  ({percent(variant.change, 0)})"
        axes.annotate(
            label, (value + (error if error == error else 0), y), (9, 0), textcoords="offset points", va="center"
        )
    axes.axvline(base, color=c["ink"], linewidth=1)
    axes.annotate(f"original {base:.2f}", (base, len(variants) - 0.35), (4, 0), textcoords="offset points", va="bottom")
    axes.set_yticks(rows, [v.label for v in variants])
    axes.tick_params(axis="y", length=0, labelcolor=c["ink"])
    axes.grid(axis="y", visible=False)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + (high - low) * 0.16)
    axes.set_ylim(-0.6, len(variants) + 0.1)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("perplexity (lower is better)")
    return figure


def _layers(result: Comparison) -> Figure:
    """Relative output error by depth: a row per format, a column per kind of layer, a line per transform."""
    c = _STAND_IN
    formats = list(dict.fromkeys(v.format for v in result.variants))
    kinds = _kinds(result.variants)
    figure, grid = _figure(8.2, 0.7 + 1.75 * len(formats), nrows=len(formats), ncols=len(kinds), sharey="row",
                           sharex=True, squeeze=False)  # fmt: skip
    for index, (row, fmt) in enumerate(zip(grid, formats, strict=True)):
        variants = [v for v in result.variants if v.format == fmt]
        for axes, (title, belongs) in zip(row, kinds, strict=True):
            for place, variant in enumerate(variants):
                depth, errors = _by_depth(variant.layers, belongs)
                style = {"color": c[_SERIES[place % 5]], "linestyle": _DASHES[place % 5], "label": variant.transform}
                axes.plot(depth, errors, **style, marker="o" if len(depth) < 4 else "", markersize=3.5)
            axes.set_ylim(bottom=0)
            if index == 0:
                axes.set_title(title)
        row[0].set_ylabel(f"{fmt.upper()}\nrelative error")
        row[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.8, borderaxespad=0.2)
    figure.supxlabel("block of the model", color=c["muted"], fontsize=9.5)
    return figure


def _kinds(variants: Sequence[Variant]) -> list[tuple[str, Callable[[str], bool]]]:
    names = {name for v in variants for name in v.layers}
    known = {part for _, parts in KINDS for part in parts}
    kinds: list[tuple[str, Callable[[str], bool]]] = []
    for title, parts in KINDS:
        if any(name.endswith(parts) for name in names):
            kinds.append((title, lambda name, parts=parts: name.endswith(parts)))  # type: ignore[misc]
    if any(name.rsplit(".", 1)[-1] not in known for name in names):
        kinds.append(("other", lambda name: name.rsplit(".", 1)[-1] not in known))
    return kinds


def _by_depth(errors: dict[str, float], belongs: Callable[[str], bool]) -> tuple[list[int], list[float]]:
    """Mean error per block of the model: the first number in a layer's name is its block."""
    blocks: dict[int, list[float]] = {}
    for name, error in errors.items():
        if belongs(name):
            number = re.search(r"\d+", name)
            blocks.setdefault(int(number[0]) if number else 0, []).append(error)
    depth = sorted(blocks)
    return depth, [sum(blocks[d]) / len(blocks[d]) for d in depth]


def _distribution(study: Study) -> Figure:
    """The share of values above a magnitude, in units of the rms: a tail that ends early is easy to quantize."""
    c = _STAND_IN
    figure, axes = _figure(8.2, 2.9)
    names = _shown(study)
    top = max(study.statistics[name].crest for name in names)
    for index, name in enumerate(names):
        size, share = _share_above(study.x[name])
        style = {"color": c[_SERIES[index % 5]], "linestyle": _DASHES[index % 5]}
        axes.plot(size, share, label=f"{_turned(name)}: largest {study.statistics[name].crest:.0f} × rms", **style)
    gauss = torch.logspace(math.log10(0.3), 1, 400, dtype=torch.float64)
    tail = torch.special.erfc(gauss / 2**0.5)
    floor = 1 / study.x[names[0]].numel()
    seen = tail > floor
    axes.plot(gauss[seen], tail[seen], color=c["ink"], linewidth=1.1, linestyle=(0, (1, 1.5)), label="Gaussian")
    axes.set(xscale="log", yscale="log", xlabel="magnitude / rms", ylabel="share of values above it")
    ticks = [t for t in (0.3, 1, 3, 10, 30, 100, 300) if t <= top * 1.3]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.{max(0, -round(math.log10(share)) - 2)}%}")
    axes.minorticks_off()
    axes.set_xlim(0.3, top * 1.15)
    axes.set_ylim(bottom=floor * 0.7)
    axes.legend(loc="lower left")
    return figure


def _share_above(x: Tensor, points: int = 300) -> tuple[Tensor, Tensor]:
    values = x.double().abs().flatten().sort(descending=True).values
    values = values / values.square().mean().sqrt()
    # Few points suffice on a log axis, but the largest values are kept one by one.
    ranks = torch.logspace(0, math.log10(len(values)), points, dtype=torch.float64, device="cpu").long().unique()
    ranks = ranks.clamp(max=len(values))
    return values[ranks - 1], ranks / len(values)


def _shown(study: Study) -> list[str]:
    """Transforms worth a line: a random Hadamard does to a distribution what the plain one of its size does."""
    names = list(study.x)
    return [name for name in names if name.removeprefix("random-") == name or name.removeprefix("random-") not in names]


def _channels(study: Study) -> Figure:
    """The largest magnitude of each channel: outlier channels stand out before, and are spread after."""
    c = _STAND_IN
    shown = _shown(study)[:3]
    figure, grid = _figure(8.2, 2.3, ncols=len(shown), sharey=True, squeeze=False)
    for index, (axes, name) in enumerate(zip(grid[0], shown, strict=True)):
        x = study.x[name].double()
        peaks = x.abs().amax(0) / x.square().mean().sqrt()
        axes.vlines(range(len(peaks)), 0, peaks, color=c[_SERIES[index % 5]], linewidth=0.6)
        axes.set_title(_turned(name))
        axes.set_xlabel("channel")
        axes.grid(axis="x", visible=False)
        axes.set_xlim(-len(peaks) * 0.01, len(peaks) * 1.01)
    grid[0][0].set_ylim(bottom=0)
    grid[0][0].set_ylabel("largest magnitude / rms")
    return figure


def _turned(transform: str) -> str:
    return "as it is" if transform == "none" else f"after {transform}"


def _format_colours(variants: Sequence[Variant]) -> dict[str, str]:
    formats = dict.fromkeys(v.format for v in variants)
    return {fmt: _SERIES[1 + index % 4] for index, fmt in enumerate(formats)}
