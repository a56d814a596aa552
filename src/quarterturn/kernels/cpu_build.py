"""The C kernels for CPUs: compiled once with the system's compiler, kept in the cache folder, loaded through ctypes.

The library's name is a digest of the sources, the compiler and the processor, so a change of any makes a new one, and
processes that build at the same time write files of their own and put them in place whole. Nothing happens at import.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from ..settings import cache_dir

SOURCES = ("cpu_quantize.c", "cpu_matmul.c", "cpu_amx.c")
HEADERS = ("cpu_common.h",)
COMPILERS = ("cc", "gcc", "clang")
# No contraction and no fast math: every fp32 step is rounded by itself, as the specification says.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")
# The names that compilers have for this machine's own instructions; some know only the second, some know neither.
NATIVE = (("-march=native",), ("-mcpu=native",), ())

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_P, _I = _POINTER, _INT
_SIGNATURES = {
    "qt_quantize": [_P, _P, _I, _I, _I, _P, _P, _P, _P, _I, _I, _I],
    "qt_matmul": [_P, _P, _I, _I, _P, _P, _I, _I, _P, _I, _I],
    "qt_linear": [_P, _I, _P, _I, _I, _I, _P, _I, _I, _I],
    "qt_amx_matmul": [_P, _P, _P, _I, _I, _P, _I, _I],
    "qt_amx_ready": [],
    "qt_values": [],
    "qt_decode": [_P, _P, _I, _I, _I, _P, _I, _I],
    "qt_set_pool": [_P],
}
_ANSWERS = {"qt_decode": None, "qt_set_pool": None, "qt_values": _P}
"""Of those that do not answer an int."""


class Layer(ctypes.Structure):
    """cpu_common.h's struct of that name: what a layer is beside its input."""

    _fields_ = (
        ("t", _P), ("sign", _P), ("R", _I), ("factor", _DOUBLE),
        ("format", _I), ("rule", _I), ("encode", _P), ("token", _I),
        ("codes", _P), ("scales", _P), ("group", _I), ("n", _I), ("k", _I),
        ("w_ts", _P), ("ends", _P), ("bias", _P), ("bias_dtype", _I),
    )  # fmt: skip


class CannotBuild(RuntimeError):
    """Why the kernels cannot be compiled or loaded here; its text is the reason."""


def reasons() -> list[str]:
    """Why the kernels are not to be had on this machine; empty where they are. Builds them on the first call."""
    return list(_answer())


@lru_cache(maxsize=1)
def _answer() -> tuple[str, ...]:
    # Kept, so that a compiler which fails is not asked again for every layer of a model.
    if os.name != "posix":
        return (f"needs Linux, macOS or another POSIX system, found {os.name}",)
    try:
        library()
    except CannotBuild as error:
        return (str(error),)
    return ()


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded kernels, their arguments declared. Raises CannotBuild."""
    loaded = _load(_built())
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = _ANSWERS.get(name, ctypes.c_int)
    pool = _openmp_pool()
    if pool is not None:
        loaded.qt_set_pool(pool)
    return loaded


def _built() -> Path:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise CannotBuild(f"needs a C compiler ({', '.join(COMPILERS)}) on PATH, found none: install gcc or clang")
    folder = Path(__file__).parent
    sources = [folder / name for name in SOURCES]
    digest = hashlib.sha256()
    for file in (*sources, *(folder / name for name in HEADERS)):
        digest.update(file.read_bytes())
    digest.update("\0".join((_version(compiler), _processor(), *FLAGS, str(NATIVE))).encode())
    target = cache_dir() / "kernels" / f"cpu-{digest.hexdigest()[:20]}.so"
    if not target.exists():
        _compile(compiler, sources, target)
    return target


def _compile(compiler: str, sources: list[Path], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
        os.close(descriptor)
    except OSError as error:
        raise CannotBuild(f"needs a folder to build in, found none at {target.parent}: {error.strerror}") from error
    try:
        for native in NATIVE:
            command = [compiler, *FLAGS, *native, *map(str, sources), "-o", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if not done.returncode:
                break
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CannotBuild(f"needs a compiler that takes the kernels, but {compiler} says: {last}")
        os.replace(name, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"needs a compiler that runs, but {compiler} does not: {error}") from error
    finally:
        Path(name).unlink(missing_ok=True)


def _load(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise CannotBuild(f"needs the built kernels to load, but: {error}") from error


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"needs a compiler that runs, but {compiler} does not: {error}") from error
    return done.stdout


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(
        next((line for line in lines if line.startswith(word)), "") for word in ("model name", "flags", "Feat")
    )


def _openmp_pool() -> int | None:
    """The entry of the OpenMP pool that torch computes with: a second pool beside it would fight for the cores.

    Other packages bring pools of their own, so it is the one in torch's folders that counts, or the only one there is.
    """
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    except OSError:
        return None
    pools = sorted(path for path in mapped if "libgomp" in Path(path).name)
    of_torch = [path for path in pools if {"torch", "torch.libs"} & set(Path(path).parts)]
    chosen = of_torch or pools
    if len(chosen) != 1:
        return None
    entry = getattr(ctypes.CDLL(chosen[0]), "GOMP_parallel", None)
    return None if entry is None else ctypes.cast(entry, ctypes.c_void_p).value
