"""FlashInfer's FP4 products (mm_fp4), behind our own rotate + quantize.

| needs     | a Blackwell GPU (10.x or 12.x), flashinfer-python with the mm_fp4 of 0.7 (0.7.4 was read), and Triton |
| provides  | W4A4 of bf16 and fp16: NVFP4 and MXFP4, any size and transform, bias, q/k/v with a scale each |
| does not  | fp32 (its kernels give 16 bits); W4A16; the recipe 'token' |
| run on    | not run |

mm_fp4 has several kernels. 'blackwell_flashinfer' leaves the choice to mm_fp4 ('auto': by GPU, CUDA and cuDNN, among
those that read the same weights); 'blackwell_flashinfer:trtllm', or another of KERNELS, is that one or a refusal. Which
of them the installed version has, and on which GPUs, it is asked (the choices of mm_fp4's `backend`, and its
`is_backend_supported`); KERNELS only says what each wants of weights and shapes, which cannot be asked.

Alpha is applied in fp32 before the one rounding. A bias or an output transform comes after it: rounded twice. Source:
flashinfer-python 0.7.4, flashinfer/gemm/gemm_base.py (mm_fp4 and its *_requirement functions), flashinfer/quantization/
fp4_quantization.py (shuffle_matrix_a, shuffle_matrix_sf_a), csrc/fp4_gemm_cutlass.cu (N and K in multiples of 32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch import Tensor

from . import vendor, vendor_ops
from .protocol import Backend, Layer, Operand, Problem, Weight
from .vendor import prepare, rotate, rotate_quantize, rotate_quantize_dequantize, together

__all__ = [
    "NAME", "matmul", "missing", "named", "operand", "prepare", "product", "refuses", "rotate", "rotate_quantize",
    "rotate_quantize_dequantize", "together",
]  # fmt: skip

NAME = "blackwell_flashinfer"
PACKAGE = "flashinfer-python"
USED = (
    "a", "b", "a_descale", "b_descale", "alpha", "out_dtype", "out", "block_size", "use_8x4_sf_layout", "backend",
    "use_nvfp4",
)  # fmt: skip
"""Parameters of mm_fp4 that are passed to it."""
SHUFFLED_ROWS = 128
"""The tile that trtllm's weights are shuffled for."""


@dataclass(frozen=True)
class Kernel:
    """What a kernel of mm_fp4 wants. align: N in multiples of it. shuffled: rows of the weight in trtllm's order."""

    align: int = 32
    mxfp4: bool = True
    fp16: bool = True
    shuffled: bool = False


KERNELS = {
    "auto": Kernel(),
    "cutlass": Kernel(mxfp4=False),
    "cudnn": Kernel(),
    "cute-dsl": Kernel(align=64, mxfp4=False, fp16=False),
    "b12x": Kernel(),
    "trtllm": Kernel(align=SHUFFLED_ROWS, mxfp4=False, fp16=False, shuffled=True),
}
"""K is in whole tiles of scales for all of them: 64 values of NVFP4, 128 of MXFP4."""


class FlashInfer:
    """The backend with one of its kernels."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.NAME = NAME if kernel == "auto" else f"{NAME}:{kernel}"

    prepare = staticmethod(prepare)
    rotate = staticmethod(rotate)
    rotate_quantize = staticmethod(rotate_quantize)
    rotate_quantize_dequantize = staticmethod(rotate_quantize_dequantize)
    together = staticmethod(together)

    def missing(self, device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
        """Reasons against this machine: no Blackwell, no Triton, no FlashInfer, one too old, or without the kernel."""
        reasons = vendor.missing_gpu(device, capability)
        load = None if reasons else vendor_ops.flashinfer
        absent = vendor.missing_package("flashinfer", PACKAGE, f"pip install {PACKAGE}", load)
        # A GPU that is no Blackwell is not asked about a second time.
        return [*reasons, *absent] or self._lacks(device, capability)

    def _lacks(self, device: torch.device, capability: tuple[int, int] | None) -> list[str]:
        mm_fp4 = getattr(vendor_ops.flashinfer(), "mm_fp4", None)
        has = {} if mm_fp4 is None else vendor_ops.parameters(mm_fp4)
        version, upgrade = vendor.version_of(PACKAGE), f"pip install -U {PACKAGE}"
        if lacking := [name for name in USED if name not in has]:
            return [f"needs {PACKAGE} with mm_fp4({', '.join(lacking)}), found {version}: {upgrade}"]
        choices = get_args(has["backend"].annotation)
        if self.kernel not in choices:
            have = ", ".join(name for name in choices if name in KERNELS)
            return [f"needs mm_fp4's kernel '{self.kernel}', found {have} in {PACKAGE} {version}: choose one of them"]
        found = _capability(device, capability)
        if found is None or _runs_on(mm_fp4, self.kernel, found):
            return []
        text = f"needs a GPU that mm_fp4's kernel '{self.kernel}' runs on, found {found[0]}.{found[1]}"
        return [f"{text}: choose '{NAME}', or another backend"]

    def refuses(self, problem: Problem) -> list[str]:
        """Reasons against a layer: W4A16, fp32, a tensor scale for each row, and what the kernel does not take."""
        reasons, kernel = vendor.refuses_layer(problem), KERNELS[self.kernel]
        dtypes = self._dtypes()
        if problem.dtype not in dtypes:
            names = [str(dtype).removeprefix("torch.") for dtype in (*dtypes, problem.dtype)]
            needed, instead = " or ".join(names[:-1]), "convert the model, or choose 'blackwell_triton'"
            reasons.append(f"needs {needed}, which kernel '{self.kernel}' gives, found {names[-1]}: {instead}")
        if problem.recipe == "token" and problem.format.has_tensor_scale:
            reasons.append(vendor.PER_ROW)
        if not problem.format.has_tensor_scale and not kernel.mxfp4:
            reasons.append(f"needs NVFP4 for kernel '{self.kernel}', found MXFP4: choose '{NAME}' or '{NAME}:cudnn'")
        return reasons

    def operand(self, x: Tensor, layer: Layer) -> Operand:
        """x (M, K), rotated and quantized: codes, and scales in the 128x4 layout."""
        return vendor.quantized(x, layer)

    def product(self, operand: Operand, layer: Layer) -> Tensor:
        """The operand times the weight: (M, N) of the operand's dtype."""
        made = vendor.prepared(layer, self.NAME, self._parts)
        y = self._multiply(operand, made.parts, made.alphas, layer.weight)
        return vendor.finished(y, layer, operand.dtype)

    def renewal(self, old: Layer, new: Layer) -> list[tuple[Any, Any]]:
        """See `FusedBackend.renewal`."""
        return vendor.renewal(old, new, self.NAME, self._parts)

    def matmul(
        self,
        x: Tensor,
        x_block_scale: Tensor | None,
        x_tensor_scale: Tensor | None,
        weight: Weight,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Packed codes (M, K/2) x (N, K/2)^T -> (M, N) of 16 bits, no bias. Raises BackendRefusal for any other."""
        codes = vendor.packed_operand(x, x_block_scale, x_tensor_scale, weight, self.NAME)
        dtypes = self._dtypes()
        return vendor.bare_product(self.NAME, codes, weight, bias, out_dtype, dtypes, self._parts, self._multiply)

    def _dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16) if KERNELS[self.kernel].fp16 else (torch.bfloat16,)

    def _parts(self, weight: Weight) -> tuple[vendor.Part, ...]:
        kernel = KERNELS[self.kernel]
        parts = vendor.parts_of(weight, kernel.align, blocked=not kernel.shuffled)
        return tuple(_shuffled(part) for part in parts) if kernel.shuffled else parts

    def _multiply(
        self, operand: Operand, parts: tuple[vendor.Part, ...], alphas: tuple[Tensor, ...], weight: Weight
    ) -> Tensor:
        """(M, N) of the operand's dtype, one product a part."""
        a, dtype = operand.data, operand.dtype
        if operand.rows == 0:
            return a.new_empty(0, sum(part.outputs for part in parts), dtype=dtype)
        results = []
        for part, alpha in zip(parts, alphas, strict=True):
            out = torch.empty(operand.rows, part.codes.shape[0], dtype=dtype, device=a.device)
            torch.ops.quarterturn_vendor.flashinfer_matmul(
                a, part.codes, operand.block_scale, part.block_scale, alpha, out, weight.format.name, self.kernel
            )
            results.append(out)
        return vendor.joined(results, parts)


def _shuffled(part: vendor.Part) -> vendor.Part:
    """A part with scales row by row -> its rows in trtllm's order, its scales in the 128x4 layout of that order."""
    package = vendor_ops.flashinfer()
    scale = package.shuffle_matrix_sf_a(part.block_scale, SHUFFLED_ROWS)
    return part._replace(
        codes=package.shuffle_matrix_a(part.codes, SHUFFLED_ROWS),
        block_scale=scale.view(torch.uint8).reshape(part.block_scale.shape),
    )


def _capability(device: torch.device, given: tuple[int, int] | None) -> tuple[int, int] | None:
    if given is not None or device.type != "cuda" or not torch.cuda.is_available():
        return given
    return vendor.capability_of(device)


def _runs_on(mm_fp4: Any, kernel: str, capability: tuple[int, int]) -> bool:
    """What mm_fp4 itself says of a GPU; versions that cannot be asked find out when they run."""
    number = capability[0] * 10 + capability[1]
    if kernel == "auto":
        asked = getattr(mm_fp4, "is_compute_capability_supported", None)
        return asked is None or bool(asked(number))
    asked = getattr(mm_fp4, "is_backend_supported", None)
    return asked is None or bool(asked(kernel, number))


def named(kernel: str) -> Backend:
    """The backend with a kernel of mm_fp4. Raises BackendRefusal for one that KERNELS does not know."""
    if kernel not in KERNELS:
        raise vendor.refusal(
            "backend",
            f"'{NAME}' has no kernel '{kernel}'.",
            needs=[(f"one of {', '.join(KERNELS)}", repr(kernel))],
            do="name one of them",
            kind=vendor.BackendRefusal,
        )
    return cast(Backend, _NAMED.setdefault(kernel, FlashInfer(kernel)))


_AUTO = FlashInfer("auto")
_NAMED = {"auto": _AUTO}
missing, refuses = _AUTO.missing, _AUTO.refuses
operand, product, renewal, matmul = _AUTO.operand, _AUTO.product, _AUTO.renewal, _AUTO.matmul
