"""A folder that appears whole or not at all.

Everything is written into a hidden folder beside the target, flushed to the disk, and renamed. A killed run leaves that
hidden folder (the next run to the same target removes it), and the target as it was.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from ..checkpoint.files import CHECKPOINT_FILES
from ..errors import Refusal, refusal

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_target(target: Path, overwrite: bool, source: Path | None = None) -> None:
    """Raise Refusal where a checkpoint may not be written to `target`; source is the model it is made from.

    A folder is replaced with overwrite=True alone, and where everything in it belongs to a checkpoint.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise _refuse(target, "a folder that does not exist", "a file or a link", "name another folder")
    # What 'a/..' means must not depend on whether there is an 'a'.
    target = target.resolve()
    if source is not None and source.exists():
        _check_apart(target, source.resolve())
    if not target.exists():
        return
    if os.path.ismount(target):
        raise _refuse(target, "a folder that can be replaced", "a mount point", "name a folder inside it")
    if target.samefile(Path.cwd()):
        raise _refuse(target, "a folder that can be replaced", "the current folder", "name a folder inside it")
    if not any(target.iterdir()):
        return
    if not overwrite:
        found, remedy = "a folder that is not empty", "name another folder, or pass overwrite=True (--overwrite)"
        raise _refuse(target, "a folder that does not exist", found, remedy)
    if not (target / "config.json").is_file():
        raise _refuse(
            target, "a checkpoint to replace", "a folder without config.json", "name another folder, or empty it"
        )
    strangers = sorted(entry.name for entry in target.iterdir() if not _of_checkpoint(entry))
    if strangers:
        named = ", ".join(strangers[:5]) + (f" and {len(strangers) - 5} more" if len(strangers) > 5 else "")
        raise _refuse(target, "a folder with nothing but a checkpoint", named, "name another folder, or move them away")


def _check_apart(target: Path, source: Path) -> None:
    """Replacing a folder that holds the original model, or lies in it, would delete that model or part of it."""
    relations = ((target == source, "is"), (target in source.parents, "holds"), (source in target.parents, "lies in"))
    for holds, relation in relations:
        if holds:
            found = f"one that {relation} the folder of the original model"
            raise _refuse(target, "a folder of its own", found, "name another folder")


def _of_checkpoint(entry: Path) -> bool:
    return entry.is_file() and any(fnmatch(entry.name, pattern) for pattern in CHECKPOINT_FILES)


def _refuse(target: Path, needed: str, found: str, remedy: str) -> Refusal:
    return refusal("save", "nothing is written here.", file=target, needs=[(needed, found)], do=remedy)


@contextmanager
def new_folder(target: Path, overwrite: bool = False, source: Path | None = None) -> Iterator[Path]:
    """A folder to fill; on leaving the block it takes the place of `target`, on an exception it disappears.

    Raises Refusal where the target is taken, see check_target, also if it was taken while the block ran; where no
    folder can be made; and where the disk is full.
    """
    check_target(target, overwrite, source)
    # Only now: a link has been refused, and '.' or 'a/..' has no name to put a folder beside.
    place = target.resolve()
    made = [parent for parent in place.parents if not parent.exists()]
    work = None
    try:
        work = _work_folder(place, target)
        yield work
        _make_readable(work)
        _flush(work)
        check_target(target, overwrite, source)
        _put_in_place(work, place)
        _flush_folder(place.parent)
        made.clear()
    except OSError as error:
        if error.errno not in _FULL:
            raise
        found = error.strerror or str(error)
        raise _refuse(target, "room on the disk", found, "free some, or name a folder elsewhere") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def _work_folder(place: Path, named: Path) -> Path:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(place)
        return Path(tempfile.mkdtemp(prefix=f"{_prefix(place)}{os.getpid()}-", dir=place.parent))
    except OSError as error:
        needed, found = "a place where a folder can be made", error.strerror or str(error)
        raise _refuse(named, needed, found, "name another folder") from error


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
