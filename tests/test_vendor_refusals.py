"""What the vendor adapters say of machines, packages and layers that they do not run; asked without a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Literal

import pytest
import torch

import vendor_stand_ins
from comparing import CPU, assert_refused
from quarterturn import MXFP4, NVFP4, FP4Linear, backends
from quarterturn.backends import (
    Problem,
    blackwell_cublas,
    blackwell_flashinfer,
    blackwell_qutlass,
    get_backend,
    reasons_against,
    run_on,
    select,
    vendor,
    vendor_ops,
)
from quarterturn.backends.protocol import Weight
from quarterturn.errors import BackendRefusal

GPU = torch.device("cuda")
NAMES = (blackwell_cublas.NAME, blackwell_flashinfer.NAME, blackwell_qutlass.NAME)
FLASHINFER = [f"{blackwell_flashinfer.NAME}:{kernel}" for kernel in blackwell_flashinfer.KERNELS]
LAYER = Problem(NVFP4, "fp4", torch.bfloat16, 4096, 4096, 64)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Both packages are there."""
    monkeypatch.setattr(vendor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(vendor, "version_of", lambda package: "0.7.4")
    monkeypatch.setattr(vendor_ops, "flashinfer", lambda: vendor_stand_ins.FlashinferStandIn())
    monkeypatch.setattr(vendor_ops, "qutlass", lambda: vendor_stand_ins.QutlassStandIn(blocked=False))
    return monkeypatch


def said(reasons: list[str], *words: str) -> bool:
    return len(reasons) == 1 and all(word in reasons[0] for word in words)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("installed")
def test_machines(name: str) -> None:
    backend = get_backend(name)
    assert said(backend.missing(CPU), "needs an NVIDIA GPU, found cpu")
    assert said(backend.missing(GPU, (9, 0)), "needs a Blackwell GPU", "found 9.0", "choose backend 'gpu_triton'")
    for capability in ((10, 0), (10, 3), (12, 0), (12, 1)):
        assert backend.missing(GPU, capability) == []
    for capability in ((11, 0), (13, 0), (14, 0)):
        assert said(backend.missing(GPU, capability), "10.x or 12.x", f"found {capability[0]}.{capability[1]}")
    assert backend.missing(GPU, (7, 5))[-1].endswith("choose backend 'any_torch'")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (blackwell_flashinfer.NAME, ("flashinfer-python", "not installed", "pip install flashinfer-python")),
        (blackwell_qutlass.NAME, ("QuTLASS", "not installed", "github.com/IST-DASLab/qutlass")),
    ],
)
def test_a_package_that_is_not_there(name: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor.importlib.util, "find_spec", lambda name: None)
    backend = get_backend(name)
    assert said(backend.missing(GPU, (10, 0)), *words)
    assert len(backend.missing(GPU, (9, 0))) == 2  # every reason


@pytest.mark.parametrize("name", [blackwell_flashinfer.NAME, blackwell_qutlass.NAME])
def test_a_package_that_does_not_import(name: str, installed: pytest.MonkeyPatch) -> None:
    def load() -> object:
        raise OSError("libcuda.so.1: cannot open shared object file")

    installed.setattr(vendor_ops, "flashinfer", load)
    installed.setattr(vendor_ops, "qutlass", load)
    assert said(get_backend(name).missing(GPU, (10, 0)), "does not import here", "libcuda.so.1", "install")


def test_a_flashinfer_that_is_too_old(installed: pytest.MonkeyPatch) -> None:
    class Old:
        def mm_fp4(a, b, a_descale, b_descale, alpha, out_dtype, out=None, block_size=16, use_8x4_sf_layout=False,
                   backend: Literal["cudnn", "cutlass"] = "cudnn"):  # fmt: skip
            raise AssertionError

    installed.setattr(vendor_ops, "flashinfer", lambda: Old)
    installed.setattr(vendor, "version_of", lambda package: "0.3.1")
    words = ("use_nvfp4", "found 0.3.1", "pip install -U flashinfer-python")
    assert said(get_backend(blackwell_flashinfer.NAME).missing(GPU, (10, 0)), *words)
    installed.setattr(vendor_ops, "flashinfer", lambda: object())
    assert said(get_backend(blackwell_flashinfer.NAME).missing(GPU, (10, 0)), "mm_fp4", "found 0.3.1")


def test_a_qutlass_that_is_too_old(installed: pytest.MonkeyPatch) -> None:
    class Old:
        fusedQuantizeMx = matmul_mxf4_bf16_tn = None

    installed.setattr(vendor_ops, "qutlass", lambda: Old)
    words = ("QuTLASS 0.2 or newer", "without fusedQuantizeNv, matmul_nvf4_bf16_tn")
    assert said(get_backend(blackwell_qutlass.NAME).missing(GPU, (10, 0)), *words)


def test_kernels_that_the_installed_flashinfer_does_not_have(installed: pytest.MonkeyPatch) -> None:
    class Fewer(vendor_stand_ins.FlashinferStandIn):
        def __init__(self) -> None:
            super().__init__()
            self.mm_fp4.__annotations__["backend"] = Literal["cudnn", "cutlass", "auto"]

    installed.setattr(vendor_ops, "flashinfer", Fewer)
    words = ("'b12x'", "found cudnn, cutlass, auto", "choose one of them")
    assert said(get_backend(f"{blackwell_flashinfer.NAME}:b12x").missing(GPU, (12, 0)), *words)
    assert get_backend(f"{blackwell_flashinfer.NAME}:cutlass").missing(GPU, (12, 0)) == []


@pytest.mark.usefixtures("installed")
def test_kernels_on_gpus_that_they_do_not_run_on() -> None:
    for name in FLASHINFER:
        kernel = name.partition(":")[2]
        for capability, number in (((10, 0), 100), ((12, 0), 120)):
            reasons = get_backend(name).missing(GPU, capability)
            if kernel == "auto" or number in vendor_stand_ins.KERNELS[kernel]:
                assert reasons == []
            else:
                assert said(reasons, f"'{kernel}'", f"found {capability[0]}.{capability[1]}", "choose")
    assert said(get_backend(blackwell_flashinfer.NAME).missing(GPU, (14, 0)), "found 14.0")


def test_a_kernel_that_nobody_knows() -> None:
    call = lambda: get_backend(f"{blackwell_flashinfer.NAME}:cuda")  # noqa: E731
    assert_refused(call, "'cuda'", "trtllm", "name one of them", kind=BackendRefusal)
    assert_refused(lambda: get_backend("blackwell_cublas:fast"), "blackwell_cublas", kind=BackendRefusal)
    assert get_backend(FLASHINFER[1]) is get_backend(FLASHINFER[1])
    assert get_backend(f"{blackwell_flashinfer.NAME}:auto").NAME == blackwell_flashinfer.NAME


@pytest.mark.parametrize("name", [*NAMES, *FLASHINFER])
def test_layers_that_none_runs(name: str) -> None:
    backend = get_backend(name)
    assert backend.refuses(LAYER) == []
    plain = dataclasses.replace(LAYER, activations="bf16")
    assert said(backend.refuses(plain), "W4A4", "found activations in bf16", "'gpu_triton'")
    for empty in ({"n": 0}, {"k": 0}):
        assert said(backend.refuses(dataclasses.replace(LAYER, **empty)), "inputs and outputs", "'any_torch'")


REFUSED = [
    (blackwell_qutlass.NAME, {"dtype": torch.float16}, ("bfloat16", "found float16", "convert")),
    (blackwell_qutlass.NAME, {"dtype": torch.float32}, ("bfloat16", "found float32")),
    (blackwell_qutlass.NAME, {"recipe": "token"}, ("one tensor scale for all rows", "'token'")),
    (blackwell_flashinfer.NAME, {"dtype": torch.float32}, ("bfloat16 or float16", "found float32")),
    (blackwell_flashinfer.NAME, {"recipe": "token"}, ("one tensor scale for all rows", "'token'")),
    (FLASHINFER[-1], {"dtype": torch.float16}, ("needs bfloat16", "'trtllm'", "found float16")),
    (FLASHINFER[-1], {"format": MXFP4}, ("NVFP4", "'trtllm'", "found MXFP4", "cudnn")),
    (blackwell_cublas.NAME, {"format": MXFP4, "capability": (12, 0)}, ("10.x", "found 12.0")),
    (blackwell_cublas.NAME, {"format": MXFP4, "dtype": torch.float16}, ("bfloat16", "found float16")),
    (blackwell_cublas.NAME, {"format": MXFP4, "recipe": "qutlass"}, ("alpha", "1/3")),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_layers_that_one_does_not_run(name: str, change: dict, words: tuple[str, ...]) -> None:
    reasons = get_backend(name).refuses(dataclasses.replace(LAYER, **change))
    assert said(reasons, *words)
    remedy = reasons[0].rpartition(": ")[2]
    assert remedy.startswith(("choose", "convert")), "what to do"


def test_layers_that_only_one_runs() -> None:
    for change in ({"dtype": torch.float16}, {"dtype": torch.float32}, {"recipe": "token"}, {"recipe": "qutlass"}):
        assert blackwell_cublas.refuses(dataclasses.replace(LAYER, **change)) == []
    on_b200 = dataclasses.replace(LAYER, format=MXFP4, capability=(10, 0))
    for name in NAMES:
        assert get_backend(name).refuses(on_b200) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("installed")
def test_an_explicit_choice_is_obeyed_or_refused(name: str) -> None:
    assert select(LAYER, GPU, name, capability=(10, 0)).name == name
    assert_refused(
        lambda: select(LAYER, GPU, name, capability=(9, 0), layer="a.b"), "layer a.b", name, "9.0", kind=BackendRefusal
    )
    plain = dataclasses.replace(LAYER, activations="bf16")
    assert_refused(lambda: select(plain, GPU, name, capability=(10, 0)), "W4A4", kind=BackendRefusal)
    both = lambda: select(plain, GPU, name, capability=(9, 0))  # noqa: E731
    assert_refused(both, "found 9.0", "W4A4", kind=BackendRefusal)  # every reason, of the machine and of the layer


@pytest.mark.usefixtures("installed")
def test_every_reason_is_told_behind_the_chosen_one_too() -> None:
    half = dataclasses.replace(LAYER, dtype=torch.float16)
    against = reasons_against(half, GPU, (10, 0))
    assert list(against) == [backend.NAME for backend in backends.BACKENDS]
    assert select(half, GPU, capability=(10, 0)).name == blackwell_cublas.NAME
    assert [name for name, reasons in against.items() if reasons] == ["cpu_native", blackwell_qutlass.NAME, "gpu_fp8"]
    assert said(against[blackwell_qutlass.NAME], "found float16")
    of_mxfp4 = reasons_against(dataclasses.replace(LAYER, format=MXFP4), GPU, (12, 0))
    assert said(of_mxfp4[blackwell_cublas.NAME], "found 12.0")


def test_what_was_never_run_says_so() -> None:
    for backend in backends.BACKENDS:
        assert run_on(backend).startswith("not run") is backend.NAME.startswith("blackwell"), backend.NAME


@pytest.mark.usefixtures("installed")
def test_the_capability_asked_about_is_the_layers() -> None:
    layer = dataclasses.replace(LAYER, format=MXFP4)
    assert select(layer, GPU, blackwell_cublas.NAME, capability=(10, 3)).name == blackwell_cublas.NAME
    call = lambda: select(layer, GPU, blackwell_cublas.NAME, capability=(12, 0))  # noqa: E731
    assert_refused(call, "10.x", "12.0", kind=BackendRefusal)


@pytest.mark.usefixtures("installed")
def test_automatic_choice_tells_its_reasons() -> None:
    plain = dataclasses.replace(LAYER, activations="bf16")
    chosen = select(plain, GPU, capability=(10, 0))
    assert chosen.name == "gpu_triton"
    assert all("W4A4" in chosen.rejected[name][0] for name in NAMES[:2])
    chosen = select(LAYER, GPU, capability=(9, 0))
    assert chosen.name == "gpu_triton"
    assert all("9.0" in chosen.rejected[name][0] for name in NAMES[:2])


def test_a_layer_names_what_speaks_against_its_backend() -> None:
    layer = FP4Linear(64, 32, format="nvfp4", backend=blackwell_qutlass.NAME, name="model.q_proj")
    assert_refused(layer.refresh, "model.q_proj", blackwell_qutlass.NAME, "NVIDIA GPU", kind=BackendRefusal)


def test_qutlass_runs_only_where_it_is_named() -> None:
    """Its codes may differ from the definition's: automatic choice ends before it."""
    order = [backend.NAME for backend in backends.BACKENDS]
    assert order.index(blackwell_qutlass.NAME) > order.index("any_torch")


def test_a_package_is_not_imported_for_a_gpu_that_it_could_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported() -> None:
        raise AssertionError("imported")

    monkeypatch.setattr(vendor_ops, "flashinfer", imported)
    monkeypatch.setattr(vendor_ops, "qutlass", imported)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for backend in (blackwell_flashinfer, blackwell_qutlass):
        reasons = backend.missing(torch.device("cuda"), (9, 0))
        assert len(reasons) == 1
        assert "found 9.0" in reasons[0]
        assert "imported" in backend.missing(torch.device("cuda"), (10, 0))[0]


def test_of_scales_that_keep_no_version_nothing_is_kept() -> None:
    """Tensors of inference mode: a write to them leaves no trace, so parts are made again for every call."""
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    with torch.inference_mode():
        scale = torch.full((16, 4), 0x38, dtype=torch.uint8)
    made = []

    def make(weight: Weight) -> tuple[vendor.Part, ...]:
        made.append(weight)
        return ()

    weight = Weight(codes, scale, torch.ones(1), (16,), NVFP4)
    for _ in range(2):
        vendor._kept_parts(weight, "some", make)
    assert len(made) == 2
    kept = dataclasses.replace(weight, block_scale=scale.clone())
    for _ in range(2):
        vendor._kept_parts(kept, "some", make)
    assert len(made) == 3
