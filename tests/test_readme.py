"""The README's blocks are run in order: Python is executed and its output compared, cheap commands too."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quarterturn.backends import BACKENDS
from quarterturn.cli import main
from quarterturn.cli.app import app

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.M | re.S)
# Commands that are run here with their output compared; the others are minutes of work or an installation.
CHEAP = ("inspect", "verify", "doctor")


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {kind for kind, _ in BLOCKS} <= {"python", "text", "console"}
    assert len(BLOCKS) == README.count("\n```") / 2


def test_blocks_do_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quarterturn.demo_model import demo_model

    monkeypatch.chdir(tmp_path)
    # As wide as the README's own console, so that lines break where they do there.
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("ORIGINAL", str(demo_model()))
    names: dict[str, Any] = {}
    printed = ""
    for kind, text in BLOCKS:
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(compile(text, "README.md", "exec"), names)
            printed = stdout.getvalue()
        elif kind == "text":
            assert printed.strip() == text.strip()
        else:
            for command, expected in commands(text):
                check(command, expected)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, output) pairs of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def check(command: str, expected: str) -> None:
    import os

    words = shlex.split(os.path.expandvars(command), comments=True)
    if words[0] != "quarterturn":
        if words[0] == "python":
            assert (Path(__file__).parent.parent / words[1]).is_file(), command
        else:  # of the engine, tests_vllm/test_server.py starts the same server
            assert words[0] in ("pip", "make", "git") or words[:2] == ["vllm", "serve"], f"nobody checks: {command}"
        return
    if words[1] not in CHEAP:
        return
    with contextlib.redirect_stdout(io.StringIO()) as stdout, pytest.raises(SystemExit) as left:
        main(words[1:])
    assert left.value.code in (0, None), command
    assert [line.rstrip() for line in stdout.getvalue().strip().splitlines()] == [
        line.rstrip() for line in expected.strip().splitlines()
    ], command


def test_the_table_of_commands_is_that_of_the_command() -> None:
    named = re.findall(r"^\| `quarterturn (\w+)", README, flags=re.M)
    assert named == [command.callback.__name__ for command in app.registered_commands if command.callback]


def test_make_targets_that_are_named_exist() -> None:
    root = Path(__file__).parent.parent
    makefile = (root / "Makefile").read_text("utf-8")
    for text in (README, (root / "CONTRIBUTING.md").read_text("utf-8")):
        for target in re.findall(r"make ([a-z-]+)\b", text):
            if target not in ("a",):
                assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_the_page_and_the_table_of_backends_are_what_the_backends_say() -> None:
    root = Path(__file__).parent.parent
    made = subprocess.run(
        [sys.executable, str(root / "docs" / "make_backends.py"), "--check"], capture_output=True, text=True, cwd=root
    )
    assert made.returncode == 0, made.stderr
    page = (root / "docs" / "backends.md").read_text("utf-8")
    assert [line for line in page.splitlines() if line.startswith("## ")] == [f"## {b.NAME}" for b in BACKENDS]
    assert page.count("| run on |") == len(BACKENDS)
