"""What making a checkpoint refuses, each before the model or any file is changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quarterturn.errors import Refusal
from quarterturn.quantize import quantize
from quarterturn.quantize.atomic import check_target, new_folder
from tiny_models import tiny_model, tiny_tokenizer


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
