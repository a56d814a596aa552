"""The page: whole, alone, honest about noise, and in both colour schemes."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from quarterturn.compare import Comparison, Study, Variant
from quarterturn.evaluate import Judgement, activation_statistics, relative_change
from quarterturn.report import comparison_table, findings, write_page


def judged(*nll: float, kl: float | None = 0.25) -> Judgement:
    mean = sum(nll) / len(nll)
    return Judgement(math.exp(mean), mean, 100, len(nll), 26, 2.0, kl, None if kl is None else 0.75, nll)


def variant(format: str, transform: str, *nll: float) -> Variant:
    made = Variant(format, transform, "fp4", judgement=judged(*nll), weight_bytes=300_000_000)
    made.change, made.change_error = relative_change(made.judgement, ORIGINAL)
    made.layers = {f"model.layers.{i}.{part}": 0.1 + i / 100 for i in range(3) for part in ("q_proj", "mlp.odd")}
    made.sample, made.ran = "Paris <b>", "6 layers: any_torch, W4A4"
    return made


ORIGINAL = judged(2.0, 3.0, 2.5, kl=None)
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def result() -> Comparison:
    variants = [
        variant("nvfp4", "none", 2.1, 3.1, 2.6),
        variant("nvfp4", "hadamard:16", 2.2, 3.2, 2.7001),
        variant("mxfp4", "none", 2.4, 3.4, 2.9),
        variant("mxfp4", "hadamard:32", 2.2, 3.2, 2.7001),
    ]
    x = {"none": X, "hadamard:16": X / 2, "random-hadamard:16": X, "hadamard:32": X * 3}
    stats = {name: activation_statistics(t) for name, t in x.items()}
    rounding = {"nvfp4": {"none": 0.1, "hadamard:16": 0.11}, "mxfp4": {"none": 0.12, "hadamard:32": 0.1}}
    study = Study("model.layers.0.q_proj", 2, 55.0, x, stats, rounding)
    return Comparison("<tiny>", ORIGINAL, variants, study, "Where?", "Paris", "a text", 10**9,
                      {"torch": "2", "device": "CPU"}, {"calibrate": 1.0})  # fmt: skip


class Tags(HTMLParser):
    """Counts open tags and collects ids and addresses."""

    VOID = ("meta", "path", "use", "br", "img", "rect", "circle", "line")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self._collect(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._collect(attrs)

    def _collect(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_stands_alone(result: Comparison, tmp_path: Path) -> None:
    page = write_page(result, tmp_path).read_text("utf-8")
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids)), "an id is there twice"
    assert all(address.startswith("#") for address in tags.addresses)
    assert {address[1:] for address in tags.addresses} <= set(tags.ids)
    assert page.count("<svg") == 4
    assert "url(http" not in page
    assert "<script" not in page
    assert "&lt;tiny&gt;" in page
    assert "Paris &lt;b&gt;" in page
    assert "2 tokens are left out" in page


def test_drawings_take_their_colours_from_the_page(result: Comparison, tmp_path: Path) -> None:
    page = write_page(result, tmp_path).read_text("utf-8")
    assert "prefers-color-scheme: dark" in page
    drawn = set(re.findall(r"var\(--(\w+)\)", "".join(re.findall(r"<svg.*?</svg>", page, flags=re.S))))
    assert {"ink", "muted", "line", "c0", "c1", "c2"} <= drawn
    defined = set(re.findall(r"--(\w+):", page))
    assert drawn <= defined
    colours = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", page))
    assert colours == set(), "a colour that does not follow the scheme"
    alone = (tmp_path / "plots" / "perplexity.svg").read_text("utf-8")
    assert "var(" not in alone
    assert "#fe0" not in alone


def test_findings_call_noise_noise(result: Comparison) -> None:
    sentences = findings(result)
    assert sentences[0].startswith("Best of 4: NVFP4 with no rotation")
    assert "NVFP4: rotation makes round-to-nearest worse" in sentences[1]
    assert "MXFP4: rotation helps" in sentences[2]
    result.variants[1] = variant("nvfp4", "hadamard:16", 2.9, 2.7, 2.3)
    assert "NVFP4: no clear difference" in findings(result)[1]
    result.variants = [variant("nvfp4", "none", 2.1), variant("nvfp4", "hadamard:16", 2.2)]
    result.original = judged(2.0, kl=None)
    assert "no clear difference" in findings(result)[1]


@pytest.mark.parametrize(("width", "left_out"), [(80, ""), (60, "MB, same top"), (30, "MB, same top, ± s.e., KL")])
def test_the_table_fits_a_terminal(width: int, left_out: str, result: Comparison) -> None:
    from rich.console import Console

    console = Console(width=width, record=True, soft_wrap=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table(result))
    lines = console.export_text().splitlines()
    assert "…" not in "".join(lines)
    row = next(line for line in lines if "MXFP4" in line and "hadamard:32" in line)
    assert ("0.250" in row) == ("KL" not in left_out)
    assert lines[-1] == f"(no room for: {left_out})" if left_out else "no room" not in lines[-1]
    # The title goes over the edge, and names and perplexity are never dropped.
    assert width < 60 or max(map(len, lines[1:])) <= width


def test_results_are_written_for_machines(result: Comparison, tmp_path: Path) -> None:
    import json

    write_page(result, tmp_path)
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["variants"][0]["judgement"]["perplexity"] == pytest.approx(math.exp(2.6))
    assert "x" not in data["study"]


def test_without_matplotlib_the_refusal_says_what_to_install(
    result: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="quarterturn\\[report\\]"):
        write_page(result, tmp_path / "none")
    assert not (tmp_path / "none").exists()
