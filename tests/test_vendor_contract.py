"""The stand-ins and the adapters against the installed packages: flashinfer-python, read without importing it (which
needs a GPU's libraries), and torch.

Its checks of arguments are taken out of FlashInfer's source and run on what the adapters hand over. QuTLASS is built
on the GPU that it is for, so its stand-in rests on what was read alone.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Optional, get_args

import pytest
import torch
from packaging.version import Version
from torch.nn import functional

import vendor_stand_ins
from quarterturn import hadamard
from quarterturn.backends import blackwell_flashinfer, vendor_ops
from test_vendor_layers import check, normal
from vendor_door import layer_of, opened

ADAPTER = blackwell_flashinfer


@cache
def flashinfer() -> Path:
    """The folder of the installed package. Where it is not installed the tests of this file fail."""
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None, "flashinfer-python is not installed: pip install --no-deps flashinfer-python==0.7.4"
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def source(file: str) -> ast.Module:
    return ast.parse((flashinfer() / file).read_text("utf-8"))


def named(file: str, name: str) -> ast.AST:
    """A function or an assignment at the top of a file."""
    for node in source(file).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if getattr(node, "name", None) == name or any(getattr(target, "id", None) == name for target in targets):
            return node
    raise AssertionError(f"{file} of the installed flashinfer-python has no {name} at its top")


def extracted(file: str, *names: str, decorated: bool = False, **namespace: Any) -> SimpleNamespace:
    """Functions and constants of a file, run alone; `namespace` is all that they find."""
    nodes = [named(file, name) for name in names]
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and not decorated:
            node.decorator_list = []
    found: dict[str, Any] = {"torch": torch, "Optional": Optional, "Literal": Literal, **namespace}
    exec(compile(ast.Module(nodes, []), file, "exec"), found)
    return SimpleNamespace(**{name: found[name] for name in names})


GEMM = "gemm/gemm_base.py"


def arguments(function: ast.AST) -> list[tuple[str, Any]]:
    """Names with their defaults, in order."""
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + args.defaults
    both = [*zip(args.args, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [(arg.arg, "" if default is None else ast.unparse(default)) for arg, default in both]


def test_mm_fp4_has_the_parameters_that_were_recorded() -> None:
    recorded = [
        (name, "" if p.default is p.empty else repr(p.default))
        for name, p in inspect.signature(vendor_stand_ins.FlashinferStandIn().mm_fp4).parameters.items()
    ]
    assert arguments(named(GEMM, "mm_fp4")) == recorded
    assert {name for name, _ in recorded} >= set(ADAPTER.USED)


def test_its_kernels_are_those_that_were_recorded() -> None:
    node = named(GEMM, "mm_fp4")
    (backend,) = [arg for arg in node.args.args if arg.arg == "backend"]
    choices = eval(ast.unparse(backend.annotation), {"Literal": Literal})
    stand_in = vendor_ops.parameters(vendor_stand_ins.FlashinferStandIn().mm_fp4)["backend"].annotation
    assert get_args(choices) == get_args(stand_in)
    assert set(ADAPTER.KERNELS) <= set(get_args(choices))


def test_its_kernels_run_on_the_gpus_that_were_recorded() -> None:
    (requirement,) = [
        decorator for decorator in named(GEMM, "mm_fp4").decorator_list
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "backend_requirement"
    ]  # fmt: skip
    checks = requirement.args[0]
    assert isinstance(checks, ast.Dict)
    told = {}
    for key, value in zip(checks.keys, checks.values, strict=True):
        kernel = ast.literal_eval(key)
        if kernel in vendor_stand_ins.KERNELS:
            (decorator,) = named(GEMM, value.id).decorator_list
            assert decorator.func.id == "supported_compute_capability"
            told[kernel] = tuple(ast.literal_eval(decorator.args[0]))
    assert told == vendor_stand_ins.KERNELS
    assert set(ADAPTER.KERNELS) - {"auto"} <= set(told)


def test_what_the_adapter_asks_a_gpus_support_of_is_there() -> None:
    text = ast.unparse(named("utils.py", "backend_requirement"))
    assert "def is_backend_supported(backend, cc=None):" in text
    assert "def is_compute_capability_supported(cc):" in text
    assert "@functools.wraps(func)" in text  # so that the signature is mm_fp4's own


def test_the_names_are_exported() -> None:
    exported = {
        alias.asname or alias.name
        for node in source("__init__.py").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert exported >= {"mm_fp4", "shuffle_matrix_a", "shuffle_matrix_sf_a"}


def test_its_shuffles_take_what_was_recorded() -> None:
    for name in ("shuffle_matrix_a", "shuffle_matrix_sf_a"):
        recorded = inspect.signature(getattr(vendor_stand_ins.FlashinferStandIn(), name)).parameters
        assert [arg for arg, _ in arguments(named("quantization/fp4_quantization.py", name))] == list(recorded)


@pytest.mark.parametrize("file", ["fp4_gemm_cutlass.cu"])
def test_cutlass_wants_n_and_k_in_multiples_of_32(file: str) -> None:
    text = (flashinfer() / "data/csrc" / file).read_text("utf-8")
    assert re.search(r"constexpr int alignment = 32;\s*TVM_FFI_ICHECK_EQ\(k % alignment, 0\)", text)
    assert "TVM_FFI_ICHECK_EQ(n % alignment, 0)" in text
    assert ADAPTER.KERNELS["cutlass"].align % 32 == 0


def own_checks(number: int) -> tuple[Any, dict[str, Any], Any, Any]:
    """Of the installed mm_fp4: its common check, those of kernels that need no GPU to be asked, its choice among them,
    and its decorator.

    Left out: whether cuDNN and CuTe's packages are there. CUDA is 13.0.
    """
    utils = extracted(
        "utils.py", "supported_compute_capability", "backend_requirement", "_make_bind_with_defaults",
        inspect=inspect, functools=functools, Callable=Callable, Iterable=Iterable, Dict=dict,
        get_compute_capability=lambda device: divmod(number, 10), BackendSupportedError=LookupError,
        experimental_auto_backends_allowed=lambda: False,
    )  # fmt: skip
    found = extracted(
        GEMM, "_is_per_token_alpha", "_check_mm_fp4_problem_size", "_trtllm_gemm_fp4_requirement",
        "_cutlass_gemm_fp4_requirement", "_cute_dsl_gemm_fp4_requirement", "_b12x_gemm_fp4_requirement",
        "_MIN_B12X_CUDA_VERSION", "_heuristic_func_mm_fp4",
        decorated=True,
        supported_compute_capability=utils.supported_compute_capability,
        get_native_fp4_dtype=lambda: torch.float4_e2m1fn_x2,
        _match_sm_version=lambda device, versions: False,
        get_cuda_version=lambda: Version("13.0"), Version=Version, List=list, Tuple=tuple,
        get_compute_capability=lambda device: divmod(number, 10), CUDNN_AVAILABLE=False, CUTE_DSL_AVAILABLE=False,
        _check_cute_dsl_availability=lambda: None, _check_cute_dsl_arch=lambda device: None,
    )  # fmt: skip
    kernels = {
        "trtllm": found._trtllm_gemm_fp4_requirement,
        "cutlass": found._cutlass_gemm_fp4_requirement,
        "cute-dsl": found._cute_dsl_gemm_fp4_requirement,
        "b12x": found._b12x_gemm_fp4_requirement,
    }
    return found._check_mm_fp4_problem_size, kernels, found._heuristic_func_mm_fp4, utils.backend_requirement


@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 96), (5, 200, 80), (130, 64, 192)])
@pytest.mark.parametrize(
    ("name", "fmt"),
    [("flashinfer", "nvfp4"), ("flashinfer cutlass", "nvfp4"), ("flashinfer cute-dsl", "nvfp4"),
     ("flashinfer b12x", "nvfp4"), ("flashinfer b12x", "mxfp4"), ("flashinfer trtllm", "nvfp4")],
)  # fmt: skip
def test_its_own_checks_accept_what_the_adapter_hands_over(name: str, fmt: str, m: int, n: int, k: int) -> None:
    """The stand-in behind the decorator that is around the real mm_fp4."""
    if fmt == "mxfp4" and k % 32:
        k = 96
    with opened(name) as stand_in:
        common, kernels, choose, decorate = own_checks(stand_in.number)
        checked, chosen = [], []

        def common_check(*args: Any, **options: Any) -> bool:
            checked.append(options)
            return common(*args, **options)

        def heuristic(*args: Any, **options: Any) -> list[str]:
            chosen.append(choose(*args, **options))
            return chosen[-1]

        stand_in.mm_fp4 = decorate(kernels, common_check=common_check, heuristic_func=heuristic)(stand_in.mm_fp4)
        check(layer_of(name, fmt, n, k, input_transform=hadamard(16 if k % 32 else 32)), normal(m, k), 1)
        assert len(checked) == 1
        # Of those that are asked; never trtllm, whose weights lie in another order.
        assert chosen == ([["cutlass"]] if name == "flashinfer" else [])


def test_its_decorator_answers_what_the_adapter_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and choices through it, and which kernel runs on which GPU."""
    common, kernels, choose, decorate = own_checks(100)
    package = vendor_stand_ins.FlashinferStandIn()
    plain = vendor_stand_ins.FlashinferStandIn().mm_fp4
    del plain.is_backend_supported, plain.is_compute_capability_supported
    package.mm_fp4 = decorate(kernels, common_check=common, heuristic_func=choose)(plain)
    monkeypatch.setattr(vendor_ops, "flashinfer", lambda: package)
    gpu = torch.device("cuda")
    for kernel in kernels:
        backend = ADAPTER.named(kernel)
        for number in (100, 103, 120, 121):
            lacks = backend.missing(gpu, divmod(number, 10))
            assert (lacks == []) is (number in vendor_stand_ins.KERNELS[kernel]), lacks
    assert ADAPTER.missing(gpu, (10, 0)) == []
    assert len(ADAPTER.missing(gpu, (14, 0))) == 1


def test_its_own_checks_refuse_what_no_adapter_should_hand_over() -> None:
    """Or the test above would say nothing."""
    common, kernels, *_ = own_checks(100)
    a, b, scale = (torch.zeros(shape, dtype=torch.uint8) for shape in ((2, 32), (32, 32), (128, 4)))
    with pytest.raises(ValueError, match="alpha"):
        common(a, b, scale, scale, torch.ones(1).double())
    with pytest.raises(ValueError, match="block_size"):
        common(a, b, scale, scale, torch.ones(1), block_size=32)
    with pytest.raises(ValueError, match="output dtype"):
        common(a, b, scale, scale, torch.ones(1), torch.float32)
    with pytest.raises(ValueError, match="mxfp4"):
        kernels["cutlass"](a, b, scale, scale, use_nvfp4=False)
    with pytest.raises(ValueError, match="bfloat16"):
        kernels["trtllm"](a, b, scale, scale, out_dtype=torch.float16)


def test_trtllm_in_its_real_order() -> None:
    """The order of rows of the installed version, and what it asks of their number."""
    names = ("srcToDstBlk16RowMap", "srcToDstBlk32RowMap", "get_shuffle_block_size", "get_shuffle_matrix_a_row_indices")
    real = extracted("utils.py", *names, _unaligned_rows_message=lambda rows, block: f"{rows} rows, not of {block}")
    with pytest.raises(AssertionError, match="rows, not of"):
        real.get_shuffle_matrix_a_row_indices(torch.zeros(40, 8), ADAPTER.SHUFFLED_ROWS)
    with opened("flashinfer trtllm") as stand_in:
        order = real.get_shuffle_matrix_a_row_indices(torch.zeros(256, 8), ADAPTER.SHUFFLED_ROWS)
        assert sorted(order.tolist()) == list(range(256)) != order.tolist()
        stand_in.order = lambda rows: order[:rows]
        check(layer_of("flashinfer trtllm", "nvfp4", 200, 96), normal(5, 96), 1)


def test_scaled_mm_has_the_parameters_that_were_recorded() -> None:
    assert functional.scaled_mm is vendor_stand_ins.TORCHS_OWN
    real, recorded = (inspect.signature(f).parameters for f in (functional.scaled_mm, vendor_stand_ins.scaled_mm))
    assert list(real) == list(recorded)
    assert {name: p.default for name, p in real.items()} == {name: p.default for name, p in recorded.items()}


def test_torchs_own_checks_refuse_what_the_adapter_should_not_hand_over() -> None:
    """Or asking torch in every layer by cuBLAS would say nothing."""
    recipe, swizzle = functional.ScalingType.BlockWise1x16, functional.SwizzleType
    codes = torch.zeros(32, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scale = torch.zeros(128, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    good = {"mat_a": codes, "mat_b": codes.T, "scale_a": [scale], "recipe_a": [recipe], "scale_b": [scale],
            "recipe_b": [recipe], "swizzle_a": [swizzle.SWIZZLE_32_4_4], "swizzle_b": [swizzle.SWIZZLE_32_4_4],
            "output_dtype": torch.float32}  # fmt: skip
    vendor_stand_ins.ask_torch(**good)
    wrong = {
        "mat_b": codes,
        "scale_a": [scale[:32]],
        "scale_b": [scale.view(torch.uint8)],
        "swizzle_a": [swizzle.NO_SWIZZLE],
        "recipe_a": [functional.ScalingType.BlockWise1x32],
    }
    for name, value in wrong.items():
        with pytest.raises((RuntimeError, ValueError)):
            vendor_stand_ins.ask_torch(**{**good, name: value})


def test_a_revision_of_qutlass_is_told_by_its_signature() -> None:
    for blocked in (False, True):
        package = vendor_stand_ins.QutlassStandIn(blocked)
        for name in ("fusedQuantizeNv", "fusedQuantizeMx"):
            assert vendor_ops.gives_blocked_scales(getattr(package, name)) is blocked
