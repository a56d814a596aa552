"""The vendors' packages as recorded: what they accept, checked, and what they compute, in float64.

None of them runs without a Blackwell GPU. A stand-in has the names, parameters, dtypes, shapes, strides and layouts of
the real package, asserts what the real one would refuse or read wrongly, and computes from the bytes that it is handed,
by the vendor's conventions, so that a whole layer can be compared with the reference. Recorded from, as read:

| stand-in         | source                                                                                         |
|---|---|
| QutlassStandIn   | IST-DASLab/qutlass: qutlass/__init__.py and csrc/bindings.cpp at 4ba8ca3 (scales dense) and     |
|                  | 64594ab (128x4); csrc/gemm.cu (alignments); .../epilogue/threadblock/epilogue_quant.h (numbers) |
| FlashinferStandIn | flashinfer-python 0.7.4: flashinfer/gemm/gemm_base.py, csrc/fp4_gemm_cutlass.cu                |
| scaled_mm        | torch 2.13: torch/_meta_registrations.py; aten/src/ATen/native/cuda/ScaledBlas.cpp              |

test_vendor_contract.py compares the second and third with the installed packages.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from quarterturn import reference

GARBAGE = 0x7E
"""What uninitialised memory holds here: 448 as a scale."""


def ceil(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def places(rows: int, cols: int) -> torch.Tensor:
    """The address of each scale (r, c) in the 128x4 layout, written out again from NUMERICS 6."""
    r, c = torch.arange(rows).view(-1, 1), torch.arange(cols)
    return ((r // 128) * (ceil(cols, 4) // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


def read_blocked(stored: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Scale bytes (rows, cols) as a product reads them; the padding, which it reads too, must be zero."""
    flat = stored.view(torch.uint8).reshape(-1)
    assert flat.numel() == ceil(rows, 128) * ceil(cols, 4), "scales are not a whole 128x4 buffer"
    at = places(rows, cols)
    rest = flat.clone()
    rest[at.reshape(-1)] = 0
    assert not rest.any(), "padding of the scales is not zero"
    return flat[at]


def multiply(a, b, a_scale, b_scale, alpha, fmt: str) -> torch.Tensor:
    """alpha * a @ b^T in float64; a (M, K/2), b (N, K/2) codes, scales in the 128x4 layout, alpha one or one a row."""
    group = 16 if fmt == "nvfp4" else 32
    values = []
    for codes, scale in ((a, a_scale), (b, b_scale)):
        rows, cols = codes.shape[0], codes.shape[1] * 2 // group
        values.append(reference.dequantize(codes, read_blocked(scale, rows, cols), 1.0, fmt))
    return values[0] @ values[1].T * alpha.double()


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether kernels that read 16 or 32 bytes at a time can read from there."""
    return all(t.data_ptr() % 32 == 0 for t in tensors)


def is_scalar(alpha: torch.Tensor) -> bool:
    return alpha.dtype == torch.float32 and alpha.numel() == 1


class QutlassStandIn:
    """The package qutlass, of a revision whose quantizers give scales `blocked` (128x4) or dense."""

    def __init__(self, blocked: bool) -> None:
        self.calls: list[str] = []

        def nv(a, b, global_scale, *, method: Literal["quest", "abs_max"] = "abs_max"):
            return self._quantize(a, b, global_scale, method, False)

        def mx(a, b, *, method: Literal["quest", "abs_max"] = "quest", return_mask: bool = False):
            assert not return_mask
            return self._quantize(a, b, None, method, False)

        def nv_blocked(
            a,
            b,
            global_scale,
            *,
            method: Literal["quest", "abs_max"] = "abs_max",
            is_sf_swizzled_layout: bool = True,
        ):
            return self._quantize(a, b, global_scale, method, is_sf_swizzled_layout)

        def mx_blocked(
            a,
            b,
            *,
            method: Literal["quest", "abs_max"] = "quest",
            global_scale: torch.Tensor | None = None,
            return_mask: bool = False,
            is_sf_swizzled_layout: bool = True,
        ):
            assert global_scale is None  # which is 3
            assert not return_mask
            return self._quantize(a, b, None, method, is_sf_swizzled_layout)

        self.fusedQuantizeNv, self.fusedQuantizeMx = (nv_blocked, mx_blocked) if blocked else (nv, mx)

    def _quantize(self, a, b, global_scale, method: str, blocked: bool):
        nvfp4 = global_scale is not None
        self.calls.append("fusedQuantizeNv" if nvfp4 else "fusedQuantizeMx")
        group, size = (16 if nvfp4 else 32), b.shape[0]
        assert method == "abs_max"
        assert a.is_contiguous(), "A must be contiguous"
        assert b.is_contiguous(), "R must be contiguous"
        assert is_aligned(a, b), "CUTLASS cannot implement it"
        assert a.dtype == torch.bfloat16, "A must be bf16"
        assert b.dtype == torch.bfloat16, "R must be bf16"
        assert b.shape == (size, size)
        assert size in ((16, 32, 64, 128) if nvfp4 else (32, 64, 128))
        assert a.shape[-1] % size == 0, "numel alone is checked there: rows would run into each other"
        assert global_scale is None or (global_scale.dtype == torch.float32 and global_scale.shape == (1,))
        m, k = a.shape
        z = (a.double().view(-1, size) @ b.double()).view(m, k // group, group).float()
        # The kernel's comparison overlooks NaN, its conversions saturate and make NaN the largest number.
        amax = z.nan_to_num(0.0, posinf=torch.inf, neginf=torch.inf).abs().amax(-1)
        if nvfp4:
            ideal = (global_scale * (amax * (1 / 6))).clamp(max=448.0)
            byte = reference.e4m3_encode(ideal)
            step = reference.e4m3_decode(byte) / global_scale.double()
        else:
            byte = ((amax + 1e-8).view(torch.int32) >> 23).to(torch.uint8)
            step = reference.e8m0_decode(byte.clamp(max=254)) / 3
        scaled = torch.where(step.unsqueeze(-1) > 0, z.double() / step.unsqueeze(-1), 0.0).nan_to_num(6.0)
        codes = reference.pack(reference.e2m1_encode(scaled.float()).view(m, k))
        cols = k // group
        stored = torch.full((ceil(m, 128) * ceil(cols, 4),), GARBAGE, dtype=torch.uint8)
        stored[places(m, cols).reshape(-1) if blocked else slice(0, m * cols)] = byte.reshape(-1)
        stored = stored.view(torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu)
        return codes, stored if blocked else stored.view(ceil(m, 128), ceil(cols, 4))

    def matmul_nvf4_bf16_tn(self, a, b, a_sf, b_sf, alpha, backend: Literal["cutlass", "flashinfer"] = "cutlass"):
        return self._matmul(a, b, a_sf, b_sf, alpha, "nvfp4")

    def matmul_mxf4_bf16_tn(self, a, b, a_sf, b_sf, alpha, backend: Literal["cutlass", "flashinfer"] = "cutlass"):
        return self._matmul(a, b, a_sf, b_sf, alpha, "mxfp4")

    def _matmul(self, a, b, a_sf, b_sf, alpha, fmt: str):
        self.calls.append(f"matmul {fmt}")
        assert all(t.is_contiguous() for t in (a, b, a_sf, b_sf)), "operands must be contiguous"
        assert is_aligned(a, b, a_sf, b_sf)
        assert a.dtype == b.dtype == torch.uint8
        assert a_sf.dtype == b_sf.dtype == (torch.float8_e4m3fn if fmt == "nvfp4" else torch.float8_e8m0fnu)
        assert a.shape[1] == b.shape[1]
        assert a.shape[0] > 0, "an empty product is launched"
        assert a.shape[1] * 2 % (32 if fmt == "nvfp4" else 128) == 0, "alignment of A and B"
        assert b.shape[0] % 8 == 0, "alignment of D"
        assert is_scalar(alpha)
        return multiply(a, b, a_sf, b_sf, alpha, fmt).to(torch.bfloat16)


KERNELS = {
    "cudnn": (100, 103, 107, 110, 120, 121),
    "trtllm": (100, 103, 107),
    "cutlass": (100, 103, 107, 110, 120, 121),
    "cute-dsl": (100, 103, 107, 120, 121),
    "cutedsl_low_latency": (100, 103, 107),
    "b12x": (120, 121),
}
"""The GPUs that each kernel of mm_fp4 says it runs on."""


class FlashinferStandIn:
    """The package flashinfer, on a GPU of capability `number` / 10."""

    def __init__(self, number: int = 100) -> None:
        self.number = number
        self.calls: list[str] = []
        self.mm_fp4 = _recorded_mm_fp4(self)

    def shuffle_matrix_a(self, input_tensor, epilogue_tile_m):
        assert epilogue_tile_m == 128
        assert input_tensor.shape[0] % 32 == 0, "rows of whole blocks of the order"
        return input_tensor[self.order(input_tensor.shape[0])]

    def shuffle_matrix_sf_a(self, input_tensor, epilogue_tile_m, num_elts_per_sf=16):
        assert epilogue_tile_m == 128
        assert input_tensor.dtype == torch.uint8
        assert input_tensor.shape[0] % 128 == 0, "it pads no rows"
        rows, cols = input_tensor.shape
        flat = torch.zeros(rows * ceil(cols, 4), dtype=torch.uint8)
        flat[places(rows, cols).reshape(-1)] = input_tensor[self.order(rows)].reshape(-1)
        return flat

    def order(self, rows: int) -> torch.Tensor:
        """An order of rows inside blocks of 32, as trtllm's is; which one it is matters to that kernel alone."""
        inside = torch.arange(32).view(2, 16).T.reshape(-1)
        return (torch.arange(0, rows, 32).view(-1, 1) + inside).reshape(-1)


def _recorded_mm_fp4(owner: FlashinferStandIn):
    def mm_fp4(
        a: torch.Tensor,
        b: torch.Tensor,
        a_descale: torch.Tensor,
        b_descale: torch.Tensor,
        alpha: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        out: torch.Tensor | None = None,
        block_size: int = 16,
        use_8x4_sf_layout: bool = False,
        backend: Literal[
            "cudnn", "trtllm", "cutlass", "cute-dsl", "cutedsl_low_latency", "b12x", "cake", "auto"
        ] = "auto",
        use_nvfp4: bool = True,
        enable_pdl: bool = True,
        *,
        batch_invariant: bool = False,
    ) -> torch.Tensor:
        owner.calls.append(backend)
        assert backend == "auto" or owner.number in KERNELS[backend], "the kernel does not run on this GPU"
        assert a.ndim == b.ndim == 2
        assert a.shape[1] == b.shape[0]
        assert a.shape[0] > 0, "an empty product is launched"
        assert a.dtype == b.dtype == torch.uint8
        assert a.is_contiguous(), "a is not compact"
        assert b.stride() == (1, b.shape[0]), "b is not column-major"
        assert is_aligned(a, b, a_descale, b_descale)
        assert block_size == (16 if use_nvfp4 else 32)
        assert not use_8x4_sf_layout
        assert a_descale.dtype == b_descale.dtype == torch.uint8, "as its own quantizers give them"
        m, n, k = a.shape[0], b.shape[1], a.shape[1] * 2
        assert a_descale.shape == (ceil(m, 128), ceil(k // block_size, 4))
        assert b_descale.shape == (ceil(k // block_size, 4), ceil(n, 128))
        assert a_descale.is_contiguous()
        assert b_descale.T.is_contiguous()
        assert alpha is not None, "no alpha is an alpha of 1"
        assert is_scalar(alpha)
        assert out_dtype in (torch.bfloat16, torch.float16)
        assert out is not None
        assert out.dtype == out_dtype
        assert out.shape == (m, n)
        assert out.is_contiguous()
        assert k % 32 == 0, "cutlass: K in multiples of 32"
        assert n % 32 == 0, "cutlass: N in multiples of 32"
        assert use_nvfp4 or backend in ("cudnn", "b12x", "auto")
        assert out_dtype == torch.bfloat16 or backend not in ("trtllm", "cute-dsl")
        assert backend != "cute-dsl" or (n % 64 == 0 and k % 64 == 0)
        y = multiply(a, b.T, a_descale, b_descale.T, alpha, "nvfp4" if use_nvfp4 else "mxfp4")
        if backend == "trtllm":  # which reads its weights in an order of its own
            assert n % 128 == 0
            y = torch.empty_like(y).index_copy_(1, owner.order(n), y)
        out.copy_(y)
        return out

    def is_backend_supported(backend: str, cc: int | None = None) -> bool:
        return backend in KERNELS and (cc is None or cc in KERNELS[backend])

    mm_fp4.is_backend_supported = is_backend_supported
    mm_fp4.is_compute_capability_supported = lambda cc: any(cc in found for found in KERNELS.values())
    return mm_fp4


TORCHS_OWN = getattr(functional, "scaled_mm", None)


def ask_torch(mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype) -> None:
    """The installed torch's own checks, on tensors of a GPU that have shapes and no memory.

    2.13 counts MXFP4's groups along a packed K of half the size, which differs from its kernel's count beyond 128.
    """
    if recipe_a[0] == functional.ScalingType.BlockWise1x32 and mat_a.shape[1] > 64:
        return
    with FakeTensorMode():

        def like(t: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")

        lists = [[like(t) for t in scales] for scales in (scale_a, scale_b)]
        y = TORCHS_OWN(
            like(mat_a), like(mat_b), lists[0], recipe_a, lists[1], recipe_b, swizzle_a, swizzle_b,
            output_dtype=output_dtype,
        )  # fmt: skip
    assert y.shape == (mat_a.shape[0], mat_b.shape[1])
    assert y.dtype == output_dtype


def scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a,
    scale_recipe_a,
    scale_b,
    scale_recipe_b,
    swizzle_a=None,
    swizzle_b=None,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim=(),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_mm for FP4 on a Blackwell; what torch checks without one, torch is asked."""
    listed = [value if isinstance(value, list) else [value] for value in (
        scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b)]  # fmt: skip
    scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b = listed
    recipes, swizzles = functional.ScalingType, functional.SwizzleType
    assert mat_a.dtype == mat_b.dtype == torch.float4_e2m1fn_x2
    assert mat_a.is_contiguous(), "mat_a must be row-major"
    assert mat_b.stride() == (1, mat_b.shape[0]), "mat_b must be column-major"
    assert is_aligned(mat_a, mat_b, scale_a[0], scale_b[0])
    assert mat_a.shape[0] > 0, "an empty product is launched"
    assert mat_a.shape[1] == mat_b.shape[0]
    assert mat_a.shape[1] % 16 == 0
    assert mat_b.shape[1] % 16 == 0, "N in multiples of 16"
    assert bias is None
    assert scale_recipe_a == scale_recipe_b
    assert swizzle_a == swizzle_b
    assert all(scale.is_contiguous() for scale in (*scale_a, *scale_b))
    if scale_recipe_a[0] == recipes.BlockWise1x32:
        fmt, dtype, plain = "mxfp4", torch.float8_e8m0fnu, [recipes.BlockWise1x32]
        assert output_dtype == torch.bfloat16, "MSLK's kernel gives bf16"
    else:
        fmt, dtype, plain = "nvfp4", torch.float8_e4m3fn, [recipes.BlockWise1x16]
    two_level = fmt == "nvfp4" and len(scale_a) == 2
    assert scale_recipe_a == [*plain, *([recipes.TensorWise] if two_level else [])]
    assert swizzle_a == [swizzles.SWIZZLE_32_4_4, *([swizzles.NO_SWIZZLE] if two_level else [])]
    assert scale_a[0].dtype == scale_b[0].dtype == dtype
    ask_torch(
        mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, output_dtype
    )  # fmt: skip
    alpha = torch.ones(1)
    if two_level:
        assert is_scalar(scale_a[1])
        assert is_scalar(scale_b[1])
        alpha = scale_a[1] * scale_b[1]
    a, b = mat_a.view(torch.uint8), mat_b.T.view(torch.uint8)
    return multiply(a, b, scale_a[0], scale_b[0], alpha, fmt).to(output_dtype)
