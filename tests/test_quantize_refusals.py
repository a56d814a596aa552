"""What making a checkpoint refuses, each before the model or any file is changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quarterturn.errors import Refusal
from quarterturn.linear import FP4Linear
from quarterturn.quantize import calibrate, quantize
from quarterturn.quantize.atomic import check_target, new_folder
from tiny_models import tiny_model, tiny_tokenizer, tokens


def source_folder(folder: Path, tokenizer: bool = True, **changes: Any) -> Path:
    tiny_model(**changes).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_the_original_model_is_never_inside_what_is_replaced(tmp_path: Path) -> None:
    outer = source_folder(tmp_path / "outer")
    inner = source_folder(outer / "inner")
    link = tmp_path / "link"
    link.symlink_to(outer)
    before = files(tmp_path)
    for source, target, found in (
        (inner, outer, "holds"),
        (outer, inner, "lies in"),
        (outer, outer / "new", "lies in"),
        (link, inner, "lies in"),
        (outer, link / "inner", "lies in"),
    ):
        with pytest.raises(Refusal, match=f"one that {found} the folder of the original model"):
            quantize(source, "mxfp4", output=target, overwrite=True, progress=False)
    assert files(tmp_path) == before


def test_only_a_folder_with_nothing_but_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    target = source_folder(tmp_path / "out")
    for name in ("recipe.yaml", "README.md", ".gitattributes", "chat.jinja", "model.safetensors.index.json"):
        (target / name).write_text("")
    check_target(target, overwrite=True)
    (target / "notes").mkdir()
    (target / "thesis.txt").write_text("all of it")
    before = files(target)
    with pytest.raises(Refusal, match=r"found notes, thesis\.txt"):
        quantize(tiny_model(), "mxfp4", output=target, overwrite=True, progress=False)
    assert files(target) == before


def test_a_folder_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match="the current folder"):
        check_target(Path("."), overwrite=True)
    with pytest.raises(Refusal, match="a mount point"):
        check_target(Path("/"), overwrite=True)
    with new_folder(Path("new/a/..")) as folder:
        (folder / "file").touch()
    assert os.listdir(tmp_path) == ["new"]
    assert os.listdir(tmp_path / "new") == ["file"]
    (tmp_path / "new" / "config.json").touch()
    with pytest.raises(Refusal, match="a folder that is not empty"):
        check_target(Path("new/b/.."), overwrite=False)


def unchanged(model: nn.Module) -> bool:
    return not any(isinstance(m, FP4Linear) for m in model.modules())


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf"), "much", None])
def test_a_calibration_that_is_no_magnitude(bad: Any) -> None:
    model = tiny_model()
    (amax,) = calibrate(model, [None], tokens(), progress=False)
    name = "model.layers.1.mlp.down_proj"
    with pytest.raises(Refusal, match=rf"no magnitude(.|\n)*{name}"):
        quantize(model, "nvfp4", calibration=amax | {name: bad}, progress=False)
    assert unchanged(model)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source", tokenizer=False)
    (source / "chat_template.jinja").write_text("")
    for calibration in (None, ["some text of more than two tokens"]):
        with pytest.raises(Refusal, match="texts cannot be turned into tokens"):
            quantize(source, "nvfp4", calibration=calibration, output=tmp_path / "a" / "out", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    quantize(source, "nvfp4", calibration=tokens(), progress=False)
    quantize(source, "nvfp4", tokenizer=tiny_tokenizer(), samples=1, progress=False)


def test_a_tokenizer_that_gives_almost_nothing() -> None:
    with pytest.raises(Refusal, match=r"not the model's(.|\n)*model's 400; found 96"):
        quantize(tiny_model(vocab_size=400), "nvfp4", tokenizer=tiny_tokenizer(), progress=False)
    with pytest.raises(Refusal, match="next to no tokens"):
        quantize(tiny_model(), "nvfp4", calibration=["a"], tokenizer=tiny_tokenizer(), progress=False)


def test_calibration_is_cut_to_the_context() -> None:
    model = tiny_model(max_position_embeddings=24)
    seen: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    calibrate(model, [None], None, tokenizer=tiny_tokenizer(), samples=2, progress=False)
    calibrate(model, [None], tokens(1, 32), progress=False)
    calibrate(model, [None], ["a" * 100, "a" * 10], tokenizer=tiny_tokenizer(), progress=False)
    assert seen == [24, 24, 24, 24, 10]


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite(name: str, value: float, tmp_path: Path) -> None:
    model = tiny_model("qwen2", torch.bfloat16)
    model.get_parameter(name).data.view(-1)[-1] = value
    with pytest.raises(Refusal, match=rf"not finite(.|\n)*{name}(.|\n)*found 1 of"):
        quantize(model, "mxfp4", output=tmp_path / "out", progress=False)
    assert unchanged(model)
    assert not any(tmp_path.iterdir())


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = tiny_model()
    with pytest.raises(Refusal, match="a place where a folder can be made"):
        quantize(model, "mxfp4", output=tmp_path / "file" / "out", progress=False)
    assert unchanged(model)


@pytest.mark.parametrize("size", ["banana", "1", "", "-5GB", "0GB", "nanGB", 0, -1, True, 1.5])
def test_a_size_that_is_none(size: Any) -> None:
    with pytest.raises(Refusal, match="no size of a file"):
        quantize("nowhere", "mxfp4", max_shard_size=size, progress=False)


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"sequence_length": 0}, {"samples": -1}])
def test_a_calibration_of_nothing(wrong: dict[str, int]) -> None:
    with pytest.raises(Refusal, match="would hold no tokens"):
        quantize("nowhere", "nvfp4", progress=False, **wrong)
    with pytest.raises(Refusal, match="would hold no tokens"):
        calibrate(tiny_model(), [None], progress=False, **wrong)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    for error in (OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left on device")):

        def full(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(Refusal, match=r"room on the disk(.|\n)*No space left"):
            quantize(tiny_model(), "mxfp4", output=tmp_path / "a" / "out", progress=False)
        assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("entry", ["down_proj", "re:down_proj", "re:.*down_prooj$", "nope"])
def test_an_entry_that_matches_nothing(entry: str) -> None:
    model = tiny_model()
    for options in ({"ignore": ("lm_head", entry)}, {"targets": ("Linear", entry)}, {"targets": (entry,)}):
        with pytest.raises(Refusal, match=r"an entry of (targets|ignore) matches nothing(.|\n)*'re:\.\*.*\$'"):
            quantize(model, "mxfp4", progress=False, **options)
    with pytest.raises(Refusal, match=r"'re:\.\*down_proj\$'"):
        quantize(model, "mxfp4", ignore=("down_proj",), progress=False)
    assert unchanged(model)
    del model.lm_head
    quantize(model.model, "mxfp4", "hadamard", ignore=("lm_head", "re:.*down_proj$", "Embedding"), progress=False)


@pytest.mark.parametrize("entry", [r"re:.*experts\..*", r"re:.*experts\.3\..*", "re:.*experts$"])
def test_entries_for_experts_match(entry: str) -> None:
    quantize(tiny_model("qwen3_moe"), "mxfp4", ignore=("lm_head", entry), progress=False)
