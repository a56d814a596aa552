"""Imports point downward only, and importing the library reads no variable, writes no file and needs torch alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import quarterturn

ROOT = Path(quarterturn.__file__).parent
# The way of the data, from the bottom up.
ORDER = [
    "errors", "formats", "reference", "layouts", "weight_layout", "e4m3_layout", "rounding", "tensor", "transforms",
    "settings", "texts", "machine",
    "kernels", "checks", "eager", "backends",
    "plan", "renewal", "known", "ops", "compiled", "fused", "sharing", "stored_weight", "absent_weight", "explanation",
    "linear", "rotated_linear",
    "checkpoint", "integrations", "demo_model", "quantize",
    "evaluate", "verify", "compare", "report", "bench", "cli",
]  # fmt: skip
LEVEL = {name: level for level, name in enumerate(ORDER)}
ANYWHERE = {"__init__", "__main__", "py.typed", "_version"}
OPTIONAL = [
    "transformers",
    "triton",
    "compressed_tensors",
    "typer",
    "rich",
    "matplotlib",
    "safetensors",
    "gguf",
    "pandas",
    "vllm",
]
# Subclasses of other libraries' classes, themselves imported inside a function: `load`, or what vLLM calls.
SUBCLASSES = {"hf_quantizer.py", "vllm/config.py", "vllm/linear.py", "vllm/experts.py"}


def modules() -> list[tuple[str, Path]]:
    """(top-level name, file) of every source file but the package's own __init__."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        top = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if top not in ANYWHERE:
            found.append((top, path))
    return found


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, top-level name) of every import of the library in a file, wherever in the file it stands."""
    package = ["quarterturn", *path.relative_to(ROOT).parts[:-1]]
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            targets = [".".join([*base, alias.name]) for alias in node.names]
        for target in targets:
            parts = target.split(".")
            if parts[0] == "quarterturn":
                names.append((node.lineno, parts[1] if len(parts) > 1 else "__init__"))
    return names


def test_the_walk_finds_the_core() -> None:
    """Or the tests of this file would hold of nothing."""
    assert {"errors", "formats", "reference", "backends", "ops", "linear"} <= {top for top, _ in modules()}


def test_the_order_that_contributors_are_told_is_this_one() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    told = re.findall("`([a-z0-9_]+)`", text[text.index("`cli` >") : text.index("A test holds that")])
    levels = [LEVEL[name] for name in told if name != "evaluate"]
    assert sorted(levels, reverse=True) == levels
    assert set(told) == set(ORDER)


def placed() -> dict[str, float]:
    """Levels, with helpers outside the list put just above the highest module that they import."""
    levels: dict[str, float] = dict(LEVEL)
    helpers = {top for top, _ in modules()} - set(LEVEL)
    for _ in helpers:
        for helper in helpers:
            below = [
                levels[name]
                for top, path in modules()
                if top == helper
                for _, name in imported(path)
                if name in levels and name != helper
            ]
            levels[helper] = max(below, default=-1.0) + 0.01
    return levels


@pytest.mark.parametrize(("top", "path"), modules(), ids=[str(path.relative_to(ROOT)) for _, path in modules()])
def test_imports_point_downward(top: str, path: Path) -> None:
    levels = placed()
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for line, name in imported(path)
        if name != top and name in levels and levels[name] >= levels[top]
    ]
    assert not wrong, f"imports that point upward: {wrong}"


def test_the_reference_imports_formats_only_and_shares_no_code() -> None:
    assert {name for _, name in imported(ROOT / "reference.py")} <= {"formats"}
    low = {"errors", "formats", "layouts", "tensor", "transforms", "kernels", "backends", "ops"}
    low |= {"plan", "sharing", "linear"}
    users = {
        str(path.relative_to(ROOT))
        for top, path in modules()
        if top in low
        for _, name in imported(path)
        if name == "reference"
    }
    assert not users, f"the specification is used by what it is to judge: {users}"


def test_optional_packages_are_imported_inside_functions() -> None:
    """The command is a leaf that nothing imports, so it alone may need its own packages at once."""
    assert not [path for top, path in modules() for _, name in imported(path) if name == "cli" != top]
    for top, path in modules():
        if top == "cli" or {path.name, f"{path.parent.name}/{path.name}"} & SUBCLASSES:
            continue
        top_level = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
        for node in top_level:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""] * (node.level == 0)
            )
            found = [name for name in names if name.split(".")[0] in OPTIONAL and top != "kernels"]
            assert not found, f"{path.relative_to(ROOT)}:{node.lineno} imports {found} at its top"


def run(code: str) -> str:
    """Runs in a fresh interpreter that writes no bytecode; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120,
        env={"PYTHONPATH": str(ROOT.parent), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": "/nonexistent"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_import_and_ops_need_torch_alone() -> None:
    code = f"""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {OPTIONAL!r}:
                    raise ModuleNotFoundError("No module named " + repr(name), name=name)

        sys.meta_path.insert(0, Blocked())
        import torch
        import quarterturn
        from quarterturn import FP4Linear, FP4Tensor, hadamard, ops
        x = torch.randn(2, 64)
        codes, scale, tensor_scale = ops.rotate_quantize(
            x, hadamard(16).matrix.float(), .25, format="nvfp4", encode_scale=100.0)
        w = FP4Tensor.from_encode(codes, scale, torch.tensor([100.0]), quarterturn.NVFP4)
        layer = FP4Linear.from_tensor(w, input_encode_scale=torch.tensor([100.0]), input_transform=hadamard(16))
        print(layer(x).shape)
        """
    assert "torch.Size([2, 2])" in run(code)


@pytest.mark.parametrize(("call", "package"), [("quarterturn.load('nowhere')", "transformers")])
def test_a_missing_package_is_named_when_it_is_needed(call: str, package: str) -> None:
    code = f"""
        import sys
        sys.modules[{package!r}] = None
        import quarterturn
        try:
            {call}
        except ValueError as refusal:
            print("REFUSED", refusal)
        """
    printed = run(code)
    assert "REFUSED" in printed
    assert "\n  do " in printed


def test_the_command_without_its_packages_says_what_to_install() -> None:
    code = """
        import sys
        sys.modules["typer"] = None
        sys.stderr = sys.stdout
        sys.argv, sys.stderr = ["quarterturn", "--help"], sys.stdout
        from quarterturn.cli import main
        try:
            main()
        except (SystemExit, ValueError) as end:
            print("ENDED", end)
        """
    printed = run(code)
    assert "ENDED" in printed
    assert "typer" in printed
    assert "install" in printed


def test_nothing_is_run_at_import() -> None:
    """No file opened for writing, no process or connection started, no variable read by our code, nothing patched."""
    code = """
        import os, sys
        import torch, torch.nn.functional  # what torch does at import is torch's

        seen = []
        WATCHED = {"subprocess.Popen", "os.system", "socket.connect", "os.mkdir", "os.remove", "ctypes.dlopen"}

        def hook(event, args):
            if event in WATCHED:
                seen.append(f"{event} {args[:1]}")
            if event == "open" and isinstance(args[1], str) and any(c in args[1] for c in "wax+"):
                seen.append(f"open {args[:2]}")

        plain = type(os.environ).__getitem__

        def watched(self, key):
            frame = sys._getframe(1)
            while frame and frame.f_code.co_filename.endswith(("os.py", "_collections_abc.py", "<frozen os>")):
                frame = frame.f_back
            if frame and "/quarterturn/" in frame.f_code.co_filename.replace(os.sep, "/"):
                seen.append(f"variable {key} read at {frame.f_code.co_filename}:{frame.f_lineno}")
            return plain(self, key)

        owners = [torch, torch.nn, torch.nn.functional, torch.nn.Linear, torch.nn.Module, torch.Tensor]
        before = [{k: id(v) for k, v in vars(owner).items()} for owner in owners]
        threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
        type(os.environ).__getitem__ = watched
        sys.addaudithook(hook)
        import quarterturn
        from quarterturn import backends, linear, ops
        type(os.environ).__getitem__ = plain
        for owner, old in zip(owners, before):
            now = {k: id(v) for k, v in vars(owner).items() if not k.startswith("__")}
            changed = [k for k in now if now[k] != old.get(k, now[k])]
            seen += [f"{owner} {k} was replaced" for k in changed]
        assert not torch.cuda.is_initialized()
        assert (threads, dtype) == (torch.get_num_threads(), torch.get_default_dtype())
        print("SEEN", seen)
        """
    assert run(code).strip().endswith("SEEN []"), run(code)


def test_import_loads_no_optional_package() -> None:
    heavy = [name for name in OPTIONAL if name != "triton"]  # torch itself may import triton
    code = f"import sys, quarterturn; print(sorted(set(sys.modules) & set({heavy!r})))"
    assert run(code).strip() == "[]"


def test_public_names() -> None:
    wanted = {
        "load", "quantize", "explain", "FP4Linear", "FP4Tensor", "Transform", "hadamard", "random_hadamard", "matrix",
        "NVFP4", "MXFP4", "Refusal", "ops",
    }  # fmt: skip
    missing = {name for name in wanted if not hasattr(quarterturn, name)}
    assert not missing, f"not exported: {missing}"
    assert set(quarterturn.__all__) <= set(dir(quarterturn)), "a name in __all__ that is not there"
