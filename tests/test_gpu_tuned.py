"""Tables of cuts: what is in those that are shipped, what gpu_product takes from them, and how one is made.

Measuring needs a GPU; the grid, the choice and the file do not.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks is no part of the package

from benchmarks import tune

from quarterturn import NVFP4
from quarterturn.backends import gpu_device, gpu_matmul, gpu_matmul_many, gpu_product, gpu_triton, gpu_tuned
from quarterturn.backends.protocol import Weight
from test_gpu_product import weight_of

GPU = torch.device("cuda", 0)
NAME = "A GPU of Tests"
H200 = (132, (9, 0))
SIZES = [(28672, 4096), (4096, 14336), (6144, 4096), (464, 464), (18944, 3584), (3584, 18944), (16, 64)]


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of tables, on a machine whose GPU has a name, and the numbers of an H200."""
    monkeypatch.setattr(gpu_tuned, "TABLES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: NAME)
    monkeypatch.setattr(gpu_device, "multiprocessors", lambda device: H200[0])
    monkeypatch.setattr(gpu_device, "capability", lambda device: H200[1])
    gpu_tuned.forget()
    yield tmp_path
    gpu_tuned.forget()


def entry(cut: Any, tokens: int, n: int, k: int) -> dict[str, Any]:
    return {"tokens": tokens, "n": n, "k": k, "cut": cut._asdict(), "us": 1.0, "formula_us": 2.0}


# ---- what is shipped


@pytest.mark.parametrize("path", sorted(gpu_tuned.TABLES.glob("*.json")), ids=lambda path: path.name)
def test_a_shipped_table_is_whole_and_gives_the_formulas_bits(path: Path) -> None:
    data = json.loads(path.read_text())
    assert path == gpu_tuned.file_of(data["device"])
    assert set(data) == {"device", "measured", *gpu_tuned.CUTS}
    assert (data["measured"] is None) == (not data["few"] + data["many"])
    assert len(gpu_tuned.table(data["device"])) == len(data["few"]) + len(data["many"])
    for (kernel, tokens, n, k), cut in gpu_tuned.table(data["device"]).items():
        assert tokens == gpu_tuned.tokens_class(tokens)
        if kernel == "few":
            formula: Any = gpu_matmul.cut_of(n, k, tokens, *H200)
            assert gpu_matmul.room(cut) * 256 >= k
        else:
            formula = gpu_matmul_many.cut(tokens, n, k, H200[0], False)
        assert gpu_tuned._order(kernel, cut) == gpu_tuned._order(kernel, formula)


def test_there_is_a_table_to_check() -> None:
    assert [path.name for path in gpu_tuned.TABLES.glob("*.json")] == ["nvidia-h200.json"]


# ---- what is looked up


def test_classes_of_tokens() -> None:
    named = {1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 64: 64, 65: 128, 4096: 4096, 4097: None}
    assert {m: gpu_tuned.tokens_class(m) for m in named} == named


def test_a_device_without_a_table_has_no_cuts(tables: Path) -> None:
    assert gpu_tuned.few_cut(GPU, 1, 4096, 4096) is None
    assert gpu_tuned.many_cut(GPU, 300, 4096, 4096) is None
    assert gpu_tuned.few_cut(torch.device("cpu"), 1, 4096, 4096) is None


def test_what_is_written_is_found(tables: Path) -> None:
    few = gpu_matmul.cut_of(96, 64, 8, *H200)._replace(stages=1)
    many = gpu_matmul_many.cut(64, 96, 64, H200[0], False)._replace(programs=1)
    tune.write(NAME, "few", entry(few._replace(slots=1), 8, 96, 64), {"date": "2026-01-01"})
    tune.write(NAME, "few", entry(few, 8, 96, 64), {"date": "2026-01-02"})
    assert gpu_tuned.few_cut(GPU, 5, 96, 64) == few
    assert gpu_tuned.many_cut(GPU, 60, 96, 64) is None
    tune.write(NAME, "many", entry(many, 64, 96, 64), {"date": "2026-01-03"})
    assert gpu_tuned.many_cut(GPU, 60, 96, 64) == many
    assert [gpu_tuned.few_cut(GPU, *of) for of in ((9, 96, 64), (5, 97, 64), (5, 96, 128))] == [None] * 3
    assert gpu_tuned.many_cut(GPU, 65, 96, 64) is gpu_tuned.many_cut(GPU, 5000, 96, 64) is None
    data = json.loads((tables / "a-gpu-of-tests.json").read_text())
    assert data["measured"] == {"date": "2026-01-03"}
    assert len(data["few"]) == len(data["many"]) == 1
    tune.write(NAME, "few", {**entry(few, 8, 96, 64), "us": 2.0}, {"date": "2026-01-04"})
    assert gpu_tuned.few_cut(GPU, 5, 96, 64) is None, "the formula is as fast"
    tune.write(NAME, "many", {**entry(many, 64, 96, 64), "us": 2.0}, {"date": "2026-01-05"})
    assert json.loads((tables / "a-gpu-of-tests.json").read_text())["measured"] is None, "nothing is left"


def test_the_table_of_another_device_is_not_taken(tables: Path) -> None:
    cut = gpu_matmul.Cut(8, 1, 2, 3, 2, 1, False)
    tune.write("A GPU of-Tests", "few", entry(cut, 8, 96, 64), {})
    assert gpu_tuned.few_cut(GPU, 5, 96, 64) is None
    with pytest.raises(SystemExit, match="A GPU of-Tests"):
        tune.write(NAME, "few", entry(cut, 8, 96, 64), {})


OTHERS = [
    ("few", 8, 28672, 4096, {"split": 2}),
    ("few", 8, 28672, 4096, {"num_warps": 4}),
    ("few", 16, 28672, 4096, {"chunks": 4}),
    ("many", 64, 4096, 14336, {"split": 1}),
    ("many", 256, 28672, 4096, {"tokens": 256}),  # which tiles are in parts follows from everything
]


@pytest.mark.parametrize(("kernel", "tokens", "n", "k", "change"), OTHERS)
def test_an_entry_that_would_change_results_is_left_out_and_named(
    tables: Path, kernel: str, tokens: int, n: int, k: int, change: dict[str, int]
) -> None:
    formula = gpu_tuned._formula(kernel, GPU, tokens, n, k)
    other = formula._replace(**change)
    assert other != formula
    tune.write(NAME, kernel, entry(other, tokens, n, k), {})
    ask = gpu_tuned.few_cut if kernel == "few" else gpu_tuned.many_cut
    with pytest.warns(UserWarning, match="a measured cut is left out") as told:
        assert ask(GPU, tokens, n, k) is ask(GPU, tokens - 1, n, k) is None
    assert len(told) == 1
    (name, value), text = *change.items(), str(told[0].message)
    assert re.search(rf"needs for {tokens} tokens, .* {name} {getattr(formula, name)}.*; found .*{name} {value}", text)
    assert str(tables) in text
    assert f"--size {n}x{k} --tokens {tokens}" in text


def test_fewer_tokens_that_the_formula_cuts_otherwise_are_cut_by_it(tables: Path) -> None:
    """A class is measured at its most tokens; with fewer there are fewer tiles, and K may be shared out more."""
    n, k = 2048, 4096
    orders = {m: gpu_tuned._order("many", gpu_matmul_many.cut(m, n, k, H200[0], False)) for m in range(1025, 2049)}
    assert len(set(orders.values())) > 1
    tuned = gpu_matmul_many.cut(2048, n, k, H200[0], False)._replace(programs=2)
    assert gpu_tuned._order("many", tuned) == orders[2048]
    tune.write(NAME, "many", entry(tuned, 2048, n, k), {})
    for m, order in orders.items():
        assert gpu_tuned.many_cut(GPU, m, n, k) == (tuned if order == orders[2048] else None)


def test_a_cut_for_more_multiprocessors_is_left_out(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process was given a part of the device; not because of its order, of which a warning would tell."""
    tuned = gpu_matmul_many.cut(64, 4096, 14336, H200[0], False)._replace(programs=1)
    assert tuned.split == 8
    tune.write(NAME, "many", entry(tuned, 64, 4096, 14336), {})
    for count, found in ((2 * H200[0], tuned), (H200[0], None)):
        monkeypatch.setattr(gpu_device, "multiprocessors", lambda device, count=count: count)
        gpu_tuned.forget()
        assert gpu_tuned.many_cut(GPU, 64, 4096, 14336) == found


def test_where_groups_follow_rounds_every_other_tile_is_another_order() -> None:
    cut = gpu_matmul_many.Cut(128, 128, 2, False, 1, rounds=1)
    others = [cut._replace(tokens=256), cut._replace(programs=2), cut._replace(rounds=2), cut._replace(rounds=0)]
    assert len({gpu_tuned._order("many", other) for other in [cut, *others]}) == 5
    alike = cut._replace(rounds=0)
    assert gpu_tuned._order("many", alike) == gpu_tuned._order("many", alike._replace(tokens=256, programs=2))


@pytest.mark.parametrize("m", [5, 60])
def test_the_product_takes_the_tables_cut_before_the_formulas(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few = gpu_matmul.Cut(8, 1, 2, 3, 2, 1, False)
    many = gpu_matmul_many.Cut(128, 64, 1, False, 2)
    taken: list[Any] = []
    asked: list[tuple[int, int, int]] = []
    there = [True]
    for name, made in (("few_cut", few), ("many_cut", many)):
        monkeypatch.setattr(
            gpu_product, name, lambda device, *of, made=made: asked.append(of) or (made if there else None)
        )
    monkeypatch.setattr(gpu_product, "few", lambda *_, after, cut: taken.append(cut))
    monkeypatch.setattr(gpu_product, "many", lambda *rest: taken.append(rest[-1]))
    monkeypatch.setattr(gpu_product, "_space", lambda device: None)
    monkeypatch.setattr(gpu_device, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu_device, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(gpu_device, "on_device", lambda device: nullcontext())
    weight = weight_of(NVFP4, 96, 64)
    data = gpu_product.prepare(weight)
    assert data is not None
    for _ in range(2):
        gpu_triton.matmul(torch.zeros(m, 64, dtype=torch.bfloat16), None, None,
                          Weight(data, None, weight.tensor_scale, (96,), NVFP4), None, torch.bfloat16)  # fmt: skip
        there.clear()
    assert taken == [few if m <= 16 else many, None]
    assert asked == [(m, 96, 64)] * 2


# ---- how one is made


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0)])
def test_the_grid_for_few_tokens_keeps_the_order_of_sums(n: int, k: int, capability: tuple[int, int]) -> None:
    for m in (8, 16):
        cuts = tune.few_grid(m, n, k, 132, capability)
        first = cuts[0]
        assert first == gpu_matmul.cut_of(n, k, m, 132, capability)
        assert 2 < len(cuts) == len(set(cuts)) <= 128
        kib = gpu_matmul.shared_kib(capability)
        for cut in cuts:
            assert (cut.num_warps, cut.split, cut.chunks) == (first.num_warps, first.split, first.chunks)
            assert cut.programs * (gpu_matmul.shared_bytes(cut, n, m, 132) + 1024) <= kib * 1024
            assert not cut.cluster or capability >= (9, 0)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("m", [32, 64, 256, 4096])
def test_the_grid_for_many_tokens_keeps_the_parts(n: int, k: int, m: int) -> None:
    cuts = tune.many_grid(m, n, k, 132)
    assert cuts[0] == gpu_matmul_many.cut(m, n, k, 132, False)
    assert len(cuts) == len(set(cuts)) <= 16
    assert not cuts[0].rounds or len(cuts) == 1, "other tiles would be added in parts"
    assert len(cuts) > 1 or cuts[0].rounds or cuts[0].split > 1, "whole tiles of any size have room"
    assert all(cut.programs == 1 or cut.tokens <= 64 for cut in cuts), "registers hold no more"
    for cut in cuts:
        assert (cut.split, cut.inside, cut.natural) == (cuts[0].split, 1, cuts[0].natural)
        assert gpu_matmul_many.has_room(cut, m, n, 132)
        programs, _, _ = gpu_matmul_many.shares(-(-n // cut.rows) * -(-m // cut.tokens), cut, 132)
        assert programs <= 132 * cut.programs
        if cut.split > 1:  # the workspace of gpu_matmul_many.workspace
            assert programs * cut.rows * cut.tokens <= 2 * 132 * 128 * 128


def test_the_fastest_with_the_same_bits_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {
        "formula": (10.0, 10.1), "wrong": (1.0, 1.0), "broken": (1.0, 1.0), "fast": (7.0, 7.0), "faster": (5.9, 6.0),
        "same": (9.9, 9.9), "lucky": (5.0, 9.9),
    }  # fmt: skip

    def result(cut: str) -> torch.Tensor:
        if cut == "broken":
            raise RuntimeError("out of resources\nand so on")
        return torch.tensor([1.0, 2.0 + (cut == "wrong") * 2**-20])

    def choose(*cuts: str) -> tuple[str, float, float]:
        rounds = iter((0, 1))

        def times(of: list[str]) -> list[float]:
            which = next(rounds)
            return [measured[cut][which] for cut in of]

        return tune.fastest(list(cuts), result, times)

    assert choose("formula", "wrong", "broken", "fast", "faster", "same") == ("faster", 6.0, 10.0)
    assert "broken: out of resources" in capsys.readouterr().out
    assert choose("formula", "wrong", "broken", "same") == ("formula", 10.0, 10.0)
    assert choose("formula", "lucky", "fast") == ("fast", 7.0, 10.0)
    assert choose("formula", "lucky") == ("formula", 10.0, 10.0), "fast once is not fast"
    with pytest.raises(RuntimeError):
        choose("broken", "fast")


def test_the_sizes_of_a_shape() -> None:
    found = tune.sizes_of("llama-3.1-8b")
    assert found == [(6144, 4096), (4096, 4096), (1024, 4096), (28672, 4096), (14336, 4096), (4096, 14336)]
    assert (18944, 3584) in tune.sizes_of("qwen2.5-7b")


def test_weights_of_a_case_are_what_the_check_takes_them_for() -> None:
    weight = tune._fragments(48, 128, torch.device("cpu"))
    assert (weight.n, weight.k, weight.exponent) == (48, 128, 8)
    assert weight.codes.shape == (4, 2, 32, 4)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tune"])
    with pytest.raises(SystemExit, match="NVIDIA GPU"):
        tune.main()


@pytest.mark.gpu
def test_a_table_is_made_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tuned, "TABLES", tmp_path)
    gpu = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name()
    of = list(tune.cases([(512, 768)], [8, 32], gpu))
    assert len(of) == 1 + (gpu_device.capability(gpu)[0] == 9)
    tune.compile_all([(m, n, k, cuts[:5]) for m, n, k, cuts in of])
    for kernel, found in tune.tuned([(m, n, k, cuts[:5]) for m, n, k, cuts in of], gpu):
        assert 0 < found["us"] <= found["formula_us"]
        tune.write(name, kernel, found, {"date": "today"})
        kept = gpu_tuned.few_cut(gpu, 3, 512, 768) if kernel == "few" else gpu_tuned.many_cut(gpu, 32, 512, 768)
        assert (kept is not None) == (found["us"] < found["formula_us"])
    gpu_tuned.forget()
