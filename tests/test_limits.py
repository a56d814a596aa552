"""What a model cannot take is refused before anything is computed: its context, its vocabulary, its kind, a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import quarterturn as qt
from quarterturn import compare as comparing
from quarterturn import evaluate as ev
from quarterturn.cli.running import open_model
from quarterturn.verify import verify
from test_cli import TEXT, assert_paragraph, run, save_tokenizer
from tiny_models import VOCABULARY, tiny_model, tokens


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`original` and `made` of a model with a context of 64 tokens; `text.txt`."""
    base = tmp_path_factory.mktemp("short")
    model = tiny_model(dtype=torch.bfloat16, max_position_embeddings=64)
    model.save_pretrained(base / "original")
    save_tokenizer(base / "original")
    qt.quantize(model, "mxfp4", output=base / "made", progress=False)
    save_tokenizer(base / "made")
    (base / "text.txt").write_text(TEXT)
    return base


@pytest.mark.parametrize("which", ["original", "made"])
@pytest.mark.parametrize(
    ("command", "options", "found"),
    [
        ("generate", ("a" * 65, "--max-new-tokens", 1), "65 and 1 to be written"),
        ("generate", ("a" * 60, "--max-new-tokens", 5), "60 and 5 to be written"),
        ("evaluate", ("--window", 65, "--tokens", 200), "65"),
        ("evaluate", ("--window", 32, "--tokens", 64, "--new-tokens", 64), "1 and 64 to be written"),
    ],
)
def test_past_the_context(
    which: str, command: str, options: Any, found: str, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ("--text", short / "text.txt") if command == "evaluate" else ()
    assert run(command, short / which, *options, *text) == 1
    captured = capsys.readouterr()
    assert_paragraph(captured)
    assert f"at most 64 tokens (max_position_embeddings); found {found}\n" in captured.err


def test_up_to_the_context(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", short / "made", "a" * 60, "--max-new-tokens", 4) == 0
    arguments = ("--text", short / "text.txt", "--tokens", 128, "--new-tokens", 40)
    assert run("evaluate", short / "made", *arguments, "--window", 64, "--json") == 0
    assert '"prompt_tokens": 24' in capsys.readouterr().out


def test_functions_refuse_what_the_model_cannot_take() -> None:
    model, ids = tiny_model(max_position_embeddings=16), tokens(1, 17)[0]
    for call in (
        lambda: ev.window_logits(model, ids),
        lambda: ev.speed(model, ids[:10], 7),
        lambda: ev.activations(model, ids[None], ["model.layers.0.mlp.up_proj"]),
        lambda: ev.judge(tiny_model(), ids, window=17, reference=ev.LiveReference(model)),
    ):
        with pytest.raises(qt.Refusal, match=r"at most 16 tokens \(max_position_embeddings\)"):
            call()
    strange = torch.tensor([3, VOCABULARY])
    for call in (lambda: ev.speed(model, strange, 1), lambda: ev.judge(model, strange, window=2)):
        with pytest.raises(qt.Refusal, match=f"ids from 0 to {VOCABULARY - 1}; found 3 to {VOCABULARY}"):
            call()


# Encoder-decoder models


def t5(feed_forward: str = "relu") -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "d_ff": 96, "d_kv": 32, "num_layers": 2, "num_heads": 2}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    config = T5Config(**sizes, **special, feed_forward_proj=feed_forward)
    return T5ForConditionalGeneration(config).bfloat16().eval()


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_an_encoder_decoder_model_is_quantized_and_loaded(feed_forward: str, tmp_path: Path) -> None:
    t5(feed_forward).save_pretrained(tmp_path / "original")
    made = qt.quantize(tmp_path / "original", "mxfp4", "hadamard:16", output=tmp_path / "made", progress=False)
    loaded = qt.load(tmp_path / "made")
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(length=5)}
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, made(**inputs).logits)
    assert loaded.generate(input_ids=tokens(), max_new_tokens=3).shape[0] == 2
    assert verify(tmp_path / "made", tmp_path / "original").ok


def test_what_is_not_done_with_encoder_decoder_models_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t5().save_pretrained(tmp_path / "original")
    save_tokenizer(tmp_path / "original")
    (tmp_path / "text.txt").write_text(TEXT)
    text = ("--text", tmp_path / "text.txt")
    for arguments, do in (
        (("quantize", tmp_path / "original", tmp_path / "made"), "mxfp4"),
        (("evaluate", tmp_path / "original", *text, "--window", 16), "its own task"),
        (("compare", tmp_path / "original", "--out", tmp_path / "out", *text, "--window", 16), "its own task"),
    ):
        assert run(*arguments) == 1
        error = capsys.readouterr().err
        assert "this does not run encoder-decoder models" in error
        assert do in error
        assert "Traceback" not in error
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "out").exists()


def test_no_language_model_is_a_refusal(tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(qt.Refusal, match="no language model"):
        open_model(str(tmp_path))
    with pytest.raises(qt.Refusal, match="float99"):
        open_model(str(tmp_path), dtype="float99")


# The plan of `compare`


def test_a_plan_names_every_variant_once() -> None:
    transforms = ["hadamard", "hadamard:16", "hadamard:016", "none", "random-hadamard:full", "none"]
    found = [(v.format, v.transform) for v in comparing.planned(["nvfp4", "mxfp4", "nvfp4"], transforms)]
    assert found == [
        ("nvfp4", "hadamard:16"), ("nvfp4", "none"), ("nvfp4", "random-hadamard:full"),
        ("mxfp4", "hadamard:32"), ("mxfp4", "hadamard:16"), ("mxfp4", "none"), ("mxfp4", "random-hadamard:full"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"transforms": ["none", "fourier"]}, "'fourier'"),
        ({"transforms": ["hadamard:0"]}, "'hadamard:0'"),
        ({"transforms": ["none", "hadamard:48"]}, "divides the input of 64; found 48"),
        ({"transforms": []}, "nothing to compare"),
        ({"formats": ["nvfp4", "int4"]}, "'int4'"),
        ({"activations": "int8"}, "'int8'"),
        ({"window": 65}, "at most 64 tokens"),
        ({"window": 32, "prompt": "a" * 60, "new_tokens": 5}, "60 and 5 to be written"),
        ({"ids": torch.tensor([VOCABULARY] * 32)}, f"found {VOCABULARY} to {VOCABULARY}"),
        ({"ids": torch.tensor([3])}, "1 tokens"),
    ],
)
def test_a_plan_is_checked_before_anything_is_computed(
    changes: dict[str, Any], named: str, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*_: Any, **__: Any) -> None:
        raise AssertionError("something was computed")

    for name in ("judge", "calibrate", "quantize", "activations"):
        monkeypatch.setattr(comparing, name, computed)
    arguments: dict[str, Any] = {"ids": tokens(1, 200)[0], "window": 32} | changes
    with pytest.raises(qt.Refusal) as refused:
        comparing.compare(short / "original", arguments.pop("ids"), tmp_path / "out", **arguments)
    assert named in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_taken_is_found_before_anything_is_computed(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / "mxfp4-hadamard32").mkdir(parents=True)
    (tmp_path / "out" / "mxfp4-hadamard32" / "thesis.txt").write_text("all of it")
    monkeypatch.setattr(comparing, "_original", None)
    for overwrite, found in ((False, "not empty"), (True, "without config.json")):
        with pytest.raises(qt.Refusal, match=found):
            comparing.compare(
                short / "original", tokens(1, 64)[0], tmp_path / "out", window=32, overwrite=overwrite
            )  # fmt: skip
