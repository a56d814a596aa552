"""The vendors' functions as operators of torch: where they are looked up, their schemas, and fakes for tracing.

| operator          | calls                                                | why not the function itself |
|---|---|---|
| qutlass_quantize  | qutlass.fusedQuantizeNv, fusedQuantizeMx ('abs_max') | no fake, two scale layouts  |
| qutlass_matmul    | qutlass.matmul_nvf4_bf16_tn, matmul_mxf4_bf16_tn     | no fake                     |
| flashinfer_matmul | flashinfer.mm_fp4, which writes `out` (declared)     | no fake, mutates            |

None returns a tensor that it was given. QuTLASS's raw operators do (they return the buffers they fill), and their
arguments and scale layout differ between revisions that all call themselves 0.2.0; so its public functions are called,
whose signature tells the layout: with a parameter `is_sf_swizzled_layout` they give scales in the 128x4 layout, without
it row by row, written densely into a buffer that is padded. Sources: IST-DASLab/qutlass, qutlass/__init__.py at 4ba8ca3
(dense), 64594ab and 7827852 (128x4); flashinfer-python 0.7.4, flashinfer/gemm/gemm_base.py.

torch.nn.functional.scaled_mm needs no operator here: torch brings its fake.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..formats import get_format
from ..layouts import BLOCKED_128x4

_library = torch.library.Library("quarterturn_vendor", "DEF")


@cache
def flashinfer() -> Any:
    """The package flashinfer. Raises ImportError where it is not installed or does not import here."""
    return importlib.import_module("flashinfer")


@cache
def qutlass() -> Any:
    """The package qutlass. Raises ImportError where it is not installed or does not import here."""
    return importlib.import_module("qutlass")


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function of the installed version, annotations resolved."""
    return dict(inspect.signature(function, eval_str=True).parameters)


def gives_blocked_scales(quantizer: Callable[..., Any]) -> bool:
    """Whether a quantizer of QuTLASS gives its scales in the 128x4 layout, as this revision's signature says."""
    return "is_sf_swizzled_layout" in parameters(quantizer)


def _qutlass_quantize(x: Tensor, matrix: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    vendor, (m, k) = qutlass(), x.shape
    if global_scale is None:
        quantizer, group = vendor.fusedQuantizeMx, 32
        arguments: tuple[Tensor, ...] = (x, matrix)
    else:
        quantizer, group = vendor.fusedQuantizeNv, 16
        arguments = (x, matrix, global_scale)
    blocked = gives_blocked_scales(quantizer)
    layout = {"is_sf_swizzled_layout": True} if blocked else {}
    codes, scale = quantizer(*arguments, method="abs_max", **layout)
    scale, groups = scale.view(torch.uint8), k // group
    if blocked:
        return codes, BLOCKED_128x4.inverse(scale, m, groups)
    # The buffer is padded to (128, 4), its rows are not: the first m * groups bytes are the scales.
    return codes, scale.reshape(-1)[: m * groups].view(m, groups).clone()


def _fake_qutlass_quantize(x: Tensor, matrix: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    group = 32 if global_scale is None else 16
    codes = x.new_empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8)
    return codes, x.new_empty(x.shape[0], x.shape[1] // group, dtype=torch.uint8)


def _qutlass_matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, alpha: Tensor, format: str) -> Tensor:
    vendor = qutlass()
    nvfp4 = format == "nvfp4"
    product = vendor.matmul_nvf4_bf16_tn if nvfp4 else vendor.matmul_mxf4_bf16_tn
    dtype = torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu
    y: Tensor = product(a, b, a_scale.view(dtype), b_scale.view(dtype), alpha)
    return y


def _fake_qutlass_matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, alpha: Tensor, format: str) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


def _flashinfer_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, alpha: Tensor, out: Tensor, format: str, kernel: str
) -> None:
    fmt = get_format(format)
    # Scales stay uint8, as FlashInfer's own quantizers give them in either format.
    flashinfer().mm_fp4(
        a,
        b.T,
        a_scale,
        b_scale.T,
        alpha,
        out.dtype,
        out,
        block_size=fmt.group_size,
        use_8x4_sf_layout=False,
        backend=kernel,
        use_nvfp4=fmt.has_tensor_scale,
    )


def _fake_flashinfer_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, alpha: Tensor, out: Tensor, format: str, kernel: str
) -> None:
    return None


_OPERANDS = "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor alpha, "
for _schema, _real, _fake in (
    (
        "qutlass_quantize(Tensor x, Tensor matrix, Tensor? global_scale) -> (Tensor, Tensor)",
        _qutlass_quantize,
        _fake_qutlass_quantize,
    ),
    (f"qutlass_matmul({_OPERANDS}str format) -> Tensor", _qutlass_matmul, _fake_qutlass_matmul),
    (
        f"flashinfer_matmul({_OPERANDS}Tensor(a!) out, str format, str kernel) -> ()",
        _flashinfer_matmul,
        _fake_flashinfer_matmul,
    ),
):
    _library.define(_schema)
    _name = _schema[: _schema.index("(")]
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"quarterturn_vendor::{_name}", _fake, lib=_library)
