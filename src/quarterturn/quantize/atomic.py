"""A folder that appears whole or not at all.

Everything is written into a hidden folder beside the target, flushed to the disk, and renamed. A killed run leaves that
hidden folder (the next run to the same target removes it), and the target as it was.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import Refusal, refusal

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check_target(target: Path, overwrite: bool, source: Path | None = None) -> None:
    """Raise Refusal where a checkpoint may not be written to `target`; source is the model it is made from."""
    found = None
    if source is not None and source.exists() and target.exists() and target.samefile(source):
        raise _refuse(target, "a folder of its own", "the folder of the original model", "name another folder")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        found = "a file or a link"
    elif target.exists() and any(target.iterdir()):
        found = "a folder that is not empty"
        if overwrite and not (target / "config.json").is_file():
            raise _refuse(
                target, "a checkpoint to replace", "a folder without config.json", "name another folder, or empty it"
            )
        if overwrite:
            return
    if found:
        raise _refuse(target, "a folder that does not exist", found, "name another folder, or pass overwrite=True")


def _refuse(target: Path, needed: str, found: str, remedy: str) -> Refusal:
    return refusal("save", "nothing is written here.", file=target, needs=[(needed, found)], do=remedy)


@contextmanager
def new_folder(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill; on leaving the block it takes the place of `target`, on an exception it disappears.

    Raises Refusal where the target is taken, see check_target, also if it was taken while the block ran.
    """
    check_target(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    work = Path(tempfile.mkdtemp(prefix=f"{_prefix(target)}{os.getpid()}-", dir=target.parent))
    try:
        yield work
        _make_readable(work)
        _flush(work)
        check_target(target, overwrite)
        _put_in_place(work, target)
        _flush_folder(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}.writing-{socket.gethostname()}-"


def _remove_abandoned(target: Path) -> None:
    """Remove what a killed run of this machine left behind; a run that still lives keeps its folder."""
    for folder in target.parent.glob(_prefix(target).replace("[", "[[]") + "*"):
        pid = folder.name.removeprefix(_prefix(target)).split("-")[0]
        if pid.isdecimal() and not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _put_in_place(work: Path, target: Path) -> None:
    """Rename; an existing target changes places with the new folder, which then holds the old files, in one step."""
    if not target.exists() or not any(target.iterdir()):
        os.rename(work, target)
    elif not _exchange(work, target):
        # No such system call here: for a moment there is no target, and a kill leaves the old files in `aside`.
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.replaced-", dir=target.parent))
        os.rename(target, aside / target.name)
        os.rename(work, target)
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places atomically, where the system can (Linux, most file systems)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _make_readable(folder: Path) -> None:
    """mkdtemp and safetensors make private folders and files; a checkpoint is as readable as anything else."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def _flush(folder: Path) -> None:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
