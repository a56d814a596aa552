"""`verify` beyond the transforms: a factor a few percent off, and single rows that are not the original's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from altered import altered
from quarterturn import MXFP4, NVFP4, Transform, quantize, random_hadamard
from quarterturn.cli import main
from quarterturn.quantize.rtn import encode_scale, round_to_nearest
from quarterturn.verify import BIAS, COLUMNS, OK, ROWS, SCALED, LayerVerdict, check_layer, verify
from tiny_models import tiny_model

GENERATOR = torch.Generator().manual_seed(5)
WEIGHT = torch.randn(192, 256, generator=GENERATOR) * 0.02
WEIGHT[:, 7] *= 6
V = random_hadamard(32, seed=1)
every_format = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)
every_transform = pytest.mark.parametrize("first", [None, V], ids=["plain", "turned"])


def turned(weight: Tensor, first: Transform | None) -> Tensor:
    return weight if first is None else first.fold_input_weight(weight).float()


def check(stored: Tensor, format: Any, first: Transform | None) -> LayerVerdict:
    return check_layer("layer", stored, WEIGHT, format, first)


@every_format
@every_transform
@pytest.mark.parametrize("factor", [0.85, 0.94, 1.06, 1.15, 2.0, -1.0])
def test_a_wrong_factor_is_found_and_named(format, first: Transform | None, factor: float) -> None:
    decoded = round_to_nearest(turned(WEIGHT, first), format).dequantize() * factor
    found = check(decoded, format, first)
    assert found.verdict == SCALED
    assert found.factor == pytest.approx(factor, rel=1e-5)
    assert f"{factor:.3g} times" in found.detail


@every_transform
def test_other_roundings_are_no_wrong_factor(first: Transform | None) -> None:
    """A tensor scale for a larger layer, scales by a search for the least error, and half as much noise again."""
    w = turned(WEIGHT, first)
    shared = round_to_nearest(w, NVFP4, encode_scale(w.abs().max() * 7)).dequantize()
    groups = w.unflatten(-1, (-1, 32))
    tries = torch.stack([round_to_nearest(w * f, MXFP4).dequantize() / f for f in (1.0, 1.25, 1.5, 1.75)])
    errors = (tries.unflatten(-1, (-1, 32)) - groups).square().sum(-1)
    best = tries.unflatten(-1, (-1, 32)).gather(0, errors.argmin(0)[None, ..., None].expand(1, *groups.shape))[0]
    noisy = shared + 0.1 * w.std() * torch.randn(w.shape, generator=torch.Generator().manual_seed(1))
    for stored, format in ((shared, NVFP4), (best.flatten(-2), MXFP4), (noisy, NVFP4)):
        found = check(stored, format, first)
        assert (found.verdict, found.rows) == (OK, ())
        # Within the square of the error: see the derivation in rows.py.
        assert abs(found.factor - 1) < found.error**2 + 0.005


@every_format
@every_transform
def test_single_wrong_rows_are_named(format, first: Transform | None) -> None:
    decoded = round_to_nearest(turned(WEIGHT, first), format).dequantize()
    garbage, empty, scaled, swapped, many = (decoded.clone() for _ in range(5))
    garbage[[3, 150]] = decoded.std() * torch.randn(2, 256, generator=GENERATOR)
    empty[-1] = 0
    scaled[17] *= 1.25
    swapped[[5, 90]] = decoded[[90, 5]]
    many[40:120] = decoded.std() * torch.randn(80, 256, generator=GENERATOR)
    for stored, rows in ((garbage, [3, 150]), (empty, [191]), (scaled, [17]), (swapped, [5, 90])):
        found = check(stored, format, first)
        assert (found.verdict, list(found.rows)) == (ROWS, rows)
        assert ", ".join(map(str, rows)) in found.detail
    assert "row 5 holds row 90; row 90 holds row 5" in check(swapped, format, first).detail
    found = check(many, format, first)
    assert (found.verdict, list(found.rows)) == (ROWS, list(range(40, 120)))
    assert "rows 40, 41, 42, 43, 44, 45, 46, 47 and 72 more of 192" in found.detail


@every_format
@every_transform
@pytest.mark.parametrize("columns", [[9], [0, 255], list(range(30, 40)), list(range(64, 128))], ids=len)
def test_single_wrong_columns_are_named(format, first: Transform | None, columns: list[int]) -> None:
    decoded = round_to_nearest(turned(WEIGHT, first), format).dequantize()
    garbage, negated, permuted = (decoded.clone() for _ in range(3))
    size = decoded[:, columns].std(0)
    garbage[:, columns] = size * torch.randn(192, len(columns), generator=torch.Generator().manual_seed(7))
    negated[:, columns] *= -1
    permuted[:, columns] = decoded.roll(1, 0)[:, columns]
    for stored in (garbage, negated, permuted):
        found = check(stored, format, first)
        assert (found.verdict, list(found.columns)) == (COLUMNS, columns)
        assert f"column{'s' * (len(columns) > 1)} {columns[0]}" in found.detail
        assert "of 256: not the original's" in found.detail


def by_gptq(weight: Tensor, x: Tensor, format: Any, damp: float = 0.01) -> Tensor:
    """Columns rounded one after the other, each leaving its error to those that are left (Frantar et al., 2022), with
    the block scales of rounding to nearest."""
    rounded = round_to_nearest(weight, format).dequantize().double()
    step = rounded.abs().unflatten(1, (-1, format.group_size)).amax(2) / 6
    step = step.repeat_interleave(format.group_size, 1).clamp(min=1e-9)
    hessian = (x.T @ x).double()
    dead = hessian.diagonal() == 0
    hessian += torch.diag(dead.double()) + damp * hessian.diagonal().mean() * torch.eye(len(hessian)).double()
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    left, done = weight.double().clone(), torch.zeros_like(rounded)
    left[:, dead] = 0
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    for j in range(weight.shape[1]):
        scaled = left[:, j] / step[:, j]
        nearest = values[(scaled.abs()[:, None] - values).abs().argmin(1)]
        done[:, j] = nearest.copysign(scaled) * step[:, j]
        left[:, j:] -= torch.outer((left[:, j] - done[:, j]) / inverse[j, j], inverse[j, j:])
    return done.float()


@every_format
@every_transform
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_columns_that_take_errors_of_others_are_right(format, first: Transform | None, spread: float) -> None:
    """Activations of very different size that go together, and some that are always zero, whose columns are emptied."""
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(64, 256, generator=generator)
    x = torch.randn(512, 64, generator=generator) @ mixed + 0.3 * torch.randn(512, 256, generator=generator)
    x *= torch.exp(spread * torch.randn(256, generator=generator))
    if first is None:
        x[:, [11, 200]] = 0
    stored = by_gptq(turned(WEIGHT, first), x, format)
    assert first is not None or not stored[:, [11, 200]].any()
    assert check(stored, format, first).columns == ()


@every_transform
def test_rows_in_another_order_are_no_other_weight(first: Transform | None) -> None:
    decoded = round_to_nearest(turned(WEIGHT, first), NVFP4).dequantize()
    found = check(decoded.roll(1, 0), NVFP4, first)
    assert found.verdict == ROWS
    assert "another order: row 0 holds row 191" in found.detail


@every_format
def test_rows_of_any_size_are_right(format) -> None:
    """Empty rows, rows far smaller than the smallest block scale, one huge value: rounding explains all of them."""
    weight = WEIGHT.clone()
    weight[2], weight[9], weight[11] = 0, weight[9] * 1e-7, weight[11] * 1e-3
    weight[13, 5] = 3.0
    stored = round_to_nearest(weight, format).dequantize()
    assert check_layer("layer", stored, weight, format).verdict == OK
    stored[2, 40] = 0.02
    found = check_layer("layer", stored, weight, format)
    assert (found.verdict, found.rows) == (ROWS, (2,))


def test_a_checkpoint_with_a_wrong_scale_and_wrong_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = tiny_model(dtype=torch.bfloat16)
    original.save_pretrained(tmp_path / "original")
    made = tmp_path / "made"
    quantize(original, "nvfp4", "random-hadamard:32", "bf16", output=made, progress=False)
    scaled, rows = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj"

    def spoil(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"{scaled}.weight_global_scale"] /= 1.15
        tensors[f"{rows}.weight_packed"][[4, 60]] = tensors[f"{rows}.weight_packed"][[60, 4]]
        tensors[f"{rows}.weight_scale"].view(torch.uint8)[[4, 60]] = (
            tensors[f"{rows}.weight_scale"].view(torch.uint8)[[60, 4]]
        )  # fmt: skip

    altered(made, tmp_path / "spoilt", spoil)
    found = {v.layer: v for v in verify(tmp_path / "spoilt", tmp_path / "original").layers if not v.ok}
    assert {name: v.verdict for name, v in found.items()} == {scaled: SCALED, rows: ROWS}
    assert found[rows].rows == (4, 60)
    with pytest.raises(SystemExit) as left:
        main(["verify", str(tmp_path / "spoilt"), "--against", str(tmp_path / "original"), "--json"])
    assert left.value.code == 1
    layers = {v["layer"]: v for v in json.loads(capsys.readouterr().out)["layers"]}
    assert layers[scaled]["factor"] == pytest.approx(1.15, abs=0.03)
    assert layers[rows]["rows"] == [4, 60]


@pytest.fixture(scope="module", params=["qwen2", "tied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`original`, and `made` of it: one with biases, one whose head is its embedding."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model(request.param, dtype=torch.bfloat16)
    model.save_pretrained(folder / "original")
    quantize(model, "mxfp4", "hadamard:32", output=folder / "made", progress=False)
    return folder


def drop(*names: str) -> Any:
    return lambda config, tensors: [tensors.pop(name) for name in names]


def test_nothing_is_missing_where_nothing_is(pair: Path, tmp_path: Path) -> None:
    found = verify(pair / "made", pair / "original")
    assert (found.ok, found.missing, found.added) == (True, [], [])

    def untie(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)

    untied = altered(pair / "original", tmp_path / "untied", untie)
    assert verify(pair / "made", untied).ok
    made = altered(pair / "made", tmp_path / "made", untie)
    assert verify(made, pair / "original").ok


def test_missing_and_strange_tensors_are_named(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone, one = ["model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"], "model.norm.weight"
    made = altered(pair / "made", tmp_path / "made", drop(*gone))
    original = altered(pair / "original", tmp_path / "original", drop(one))
    found = verify(made, original)
    assert all(layer.ok for layer in found.layers)
    assert (found.ok, sorted(found.missing), found.added) == (False, sorted(gone), [one])
    with pytest.raises(SystemExit) as left:
        main(["verify", str(made), "--against", str(original)])
    assert left.value.code == 1
    printed = capsys.readouterr().out
    assert "2 tensors of the original are missing" in printed
    assert "1 tensors are not in the original" in printed
    assert all(name in printed for name in (*gone, one))


def test_a_shape_that_is_not_the_originals_makes_it_fail(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight"]

    def cut(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name] = tensors[name][:-1]

    found = verify(altered(pair / "made", tmp_path / "made", cut), pair / "original")
    assert all(layer.ok for layer in found.layers)
    assert (found.ok, sorted(found.misshapen), found.missing, found.added) == (False, names, [], [])
    with pytest.raises(SystemExit) as left:
        main(["verify", str(tmp_path / "made"), "--against", str(pair / "original"), "--json"])
    assert left.value.code == 1
    assert sorted(json.loads(capsys.readouterr().out)["misshapen"]) == names


def test_a_bias_on_one_side_is_a_finding(tmp_path: Path) -> None:
    model, name = tiny_model("qwen2", dtype=torch.bfloat16), "model.layers.1.self_attn.k_proj"
    model.save_pretrained(tmp_path / "original")
    quantize(model, "mxfp4", output=tmp_path / "made", progress=False)
    without = altered(tmp_path / "made", tmp_path / "without", drop(f"{name}.bias"))
    lacking = altered(tmp_path / "original", tmp_path / "lacking", drop(f"{name}.bias"))
    for made, original, words in (
        (without, tmp_path / "original", "the checkpoint has no bias"),
        (tmp_path / "made", lacking, "the original has none"),
    ):
        found = verify(made, original)
        assert [(v.layer, v.verdict) for v in found.layers if not v.ok] == [(name, BIAS)]
        assert words in next(v.detail for v in found.layers if not v.ok)
        assert (found.ok, found.missing, found.added) == (False, [], [])
    assert verify(without, lacking).ok
