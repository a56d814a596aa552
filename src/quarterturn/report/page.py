"""One self-contained HTML page: what was asked, what came out, the plots, samples, and how it was measured."""

from __future__ import annotations

import html
from pathlib import Path

from ..compare import Comparison, Study, Variant
from ..evaluate import relative_change
from .plots import DARK, LIGHT, plot_all, standalone, svg
from .style import STYLE
from .tables import megabytes, percent

# A difference is called one where it is at least this many standard errors.
_CLEAR = 2.0


def write_page(result: Comparison, out: Path) -> Path:
    """Write out/report.html, out/plots/*.svg and out/results.json; returns the page's path.

    Raises Refusal without matplotlib.
    """
    figures = plot_all(result)
    (out / "plots").mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        (out / "plots" / f"{name}.svg").write_text(standalone(figure), "utf-8")
    (out / "results.json").write_text(result.to_json(), "utf-8")
    page = out / "report.html"
    page.write_text(_page(result, {name: svg(figure, name) for name, figure in figures.items()}), "utf-8")
    return page


def findings(result: Comparison) -> list[str]:
    """What the figures say, in sentences; a difference within two standard errors is called noise."""
    base, best = result.original.perplexity, min(result.variants, key=_perplexity)
    sentences = [
        f"Best of {len(result.variants)}: {best.format.upper()} with {_name(best)}, perplexity {_perplexity(best):.2f} "
        f"against the original's {base:.2f} ({percent(best.change, 0)}), "
        f"at {best.weight_bytes / result.weight_bytes:.0%} of its bytes."
    ]
    for fmt in dict.fromkeys(v.format for v in result.variants):
        variants = [v for v in result.variants if v.format == fmt]
        plain = next((v for v in variants if v.transform == "none"), None)
        turned = [v for v in variants if v.transform != "none"]
        if plain is not None and turned:
            sentences.append(_rotation(fmt, plain, min(turned, key=_perplexity)))
    return sentences


def _rotation(fmt: str, plain: Variant, turned: Variant) -> str:
    assert plain.judgement is not None
    assert turned.judgement is not None
    change, error = relative_change(turned.judgement, plain.judgement)
    figures = (
        f"{_perplexity(turned):.2f} with {_name(turned)}, the better rotation, "
        f"against {_perplexity(plain):.2f} without: {percent(change)} ± {error:.1%}"
    )
    # NaN, from a single window, is no clear difference either.
    if not abs(change) >= _CLEAR * error:
        return f"{fmt.upper()}: no clear difference from rotation ({figures})."
    word = "helps" if change < 0 else "makes round-to-nearest worse"
    return f"{fmt.upper()}: rotation {word} ({figures})."


def _count(ways: int) -> str:
    words = (
        "No ways",
        "One way",
        "Two ways",
        "Three ways",
        "Four ways",
        "Five ways",
        "Six ways",
        "Seven ways",
        "Eight ways",
    )
    return words[ways] if ways < len(words) else f"{ways} ways"


def _perplexity(variant: Variant) -> float:
    assert variant.judgement is not None
    return variant.judgement.perplexity


def _name(variant: Variant) -> str:
    return "no rotation" if variant.transform == "none" else variant.transform


def _page(result: Comparison, plots: dict[str, str]) -> str:
    esc = html.escape
    widths = " and ".join(dict.fromkeys("W4A4" if v.activations == "fp4" else "W4A16" for v in result.variants))
    judged = result.original
    lead = (
        f"{_count(len(result.variants))} to make {esc(result.model)} a 4-bit float model ({widths}), each written as "
        "a compressed-tensors checkpoint, loaded back, run with the exact FP4 arithmetic, and judged on "
        f"{esc(result.text)}."
    )
    meta = f"{judged.predictions:,} predictions · windows of {judged.window} tokens · {esc(result.facts['device'])}"
    sections = [
        _section("What came out", "<ul>" + "".join(f"<li>{esc(s)}</li>" for s in findings(result)) + "</ul>"),
        _section("Perplexity", _figure(plots["perplexity"], _perplexity_caption(result)) + _table(result)),
        _section("Error per layer", _figure(plots["layers"], _LAYERS_CAPTION)),
        _section("What rotation does to a real activation", _study(result, plots)),
        _section("What the models say", _samples(result)) if result.sample else "",
        _section("How this was measured", _method(result)),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(result.model)} in 4-bit float</title>
<style>
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
{STYLE}</style>
</head>
<body>
<header>
<p class="kicker">Quarterturn report</p>
<h1>{esc(result.model)} in 4-bit float</h1>
<p class="lead">{lead}</p>
<p class="meta">{meta}</p>
</header>
<main>
{"".join(sections)}
</main>
</body>
</html>
"""


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{body}\n</section>\n"


def _figure(drawing: str, caption: str) -> str:
    return f"<figure>\n{drawing}\n<figcaption>{caption}</figcaption>\n</figure>\n"


def _perplexity_caption(result: Comparison) -> str:
    return (
        "exp of the mean negative log-likelihood of the next token. The wide bar at a dot is one standard error of its "
        f"difference from the original, from {result.original.windows} windows."
    )


_LAYERS_CAPTION = (
    "|y − y₀| / |y₀| of each linear layer's output, when both the 4-bit layer and the original's get the original's "
    "own input; layers of one kind in one block are averaged. Errors of earlier layers are not in it."
)


def _table(result: Comparison) -> str:
    best = min(_perplexity(v) for v in result.variants)
    rows = [
        f'<tr class="original"><th scope="row">original</th><td></td><td>{result.original.perplexity:.2f}</td><td></td>'
        f"<td></td><td></td><td>{megabytes(result.weight_bytes)}</td></tr>"
    ]
    for v in result.variants:
        assert v.judgement is not None
        mark = ' class="best"' if _perplexity(v) == best else ""
        rows.append(
            f'<tr{mark}><th scope="row">{html.escape(v.format.upper())}</th><td>{html.escape(v.transform)}</td>'
            f"<td>{_perplexity(v):.2f}</td><td>{percent(v.change)} <small>± {v.change_error:.1%}</small></td>"
            f"<td>{v.judgement.kl:.3f}</td><td>{v.judgement.agreement:.1%}</td><td>{megabytes(v.weight_bytes)}</td></tr>"
        )
    headings = ("format", "rotation", "perplexity", "change ± s.e.", "KL <small>nats / token</small>", "same top token",
                "file <small>MB</small>")  # fmt: skip
    head = "".join(f"<th>{text}</th>" for text in headings)
    body = "".join(rows)
    return (
        f'<div class="wide"><table class="variants"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _study(result: Comparison, plots: dict[str, str]) -> str:
    study = result.study
    name = html.escape(study.layer)
    first = _figure(
        plots["distribution"],
        f"The input of <code>{name}</code>, the layer whose input has the heaviest tails.{_left_out(study)}",
    )
    second = _figure(plots["channels"], "The largest magnitude that each channel of the same input reaches.")
    formats = list(study.rounding)
    head = "".join(f"<th>{html.escape(f.upper())} rounding error</th>" for f in formats)
    rows = []
    for spec, s in study.statistics.items():
        cells = "".join(f"<td>{_percent(study.rounding[f].get(spec))}</td>" for f in formats)
        rows.append(
            f'<tr><th scope="row">{"as it is" if spec == "none" else html.escape(spec)}</th><td>{s.crest:,.0f}</td>'
            f"<td>{s.kurtosis:,.0f}</td><td>{s.group_crest:.2f}</td>{cells}</tr>"
        )
    table = (
        '<div class="wide"><table><thead><tr><th>rotation</th><th>largest / rms</th><th>kurtosis</th>'
        f"<th>in a group of 16: largest / rms</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    note = (
        "<p>A block scale only has to reach over its own 16 or 32 values, so an outlier costs its neighbours in the "
        "group and nobody else. A rotation spreads it over the block: the largest value falls, but every value of the "
        "block then shares the error. Which of the two wins is what the figures above decide.</p>"
    )
    return first + second + table + note


def _left_out(study: Study) -> str:
    if not study.left_out:
        return ""
    count = "One token is" if study.left_out == 1 else f"{study.left_out} tokens are"
    peak = f"{study.left_out_peak:,.0f}"
    return (
        f" {count} left out for massive values, up to {peak} times the rms of the others, beside which nothing shows."
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _samples(result: Comparison) -> str:
    said = [("original", result.sample), *((v.label, v.sample) for v in result.variants)]
    items = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in said)
    return f'<p class="prompt">{html.escape(result.prompt)}</p>\n<dl>{items}</dl>\n<p class="note">Greedy decoding.</p>'


def _method(result: Comparison) -> str:
    ran = "".join(f"<li><b>{html.escape(v.label)}</b>: {html.escape(v.ran)}</li>" for v in result.variants)
    facts = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in result.facts.items())
    return (
        "<p>Weights are rounded to nearest after the rotation was folded into them in float64; q, k, v and gate, up "
        "share a tensor scale; input scales come from calibration texts that are not among the judged ones. Windows do "
        "not overlap and each stands alone. KL is KL(original ‖ variant) per token.</p>\n"
        f'<h3>What ran</h3>\n<ul class="ran">{ran}</ul>\n<h3>Versions and machine</h3>\n'
        f'<dl class="facts">{facts}</dl>'
    )
