"""Every GPU kernel on a few small inputs, for NVIDIA's compute-sanitizer: `make sanitize`.

Sizes end inside tiles, so that what lies behind them is what is read or written by mistake. Memory comes from the
driver itself (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that neighbours in a pool do not hide it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from quarterturn import ops, random_hadamard, weight_layout
from quarterturn.backends import compose, gpu_fp8, gpu_triton, gpu_wide
from quarterturn.backends.gpu_device import capability
from quarterturn.backends.gpu_matmul import Cut, few
from quarterturn.backends.gpu_matmul_many import Cut as ManyCut
from quarterturn.backends.gpu_matmul_many import by_library, many, workspace
from quarterturn.backends.gpu_pieces import pieces_of
from quarterturn.backends.protocol import Blocks, Layer, Quantizer, Weight
from quarterturn.formats import FORMATS, MXFP4, NVFP4, FP4Format
from quarterturn.kernels import ROTATED
from quarterturn.tensor import FP4Tensor
from quarterturn.transforms import hadamard
from quarterturn.weight_layout import Fragments

BF16 = torch.bfloat16


def turns() -> list[tuple[Tensor | None, float]]:
    made: list[tuple[Tensor | None, float]] = [(None, 1.0)]
    for size in (16, 32, 64, 128):
        made.append((random_hadamard(size).matrix.float().cuda(), size**-0.5))
        made.append((torch.randn(size, size, device="cuda") / size**0.5, 1.0))
    return made


def rotate_quantize() -> None:
    """Both kernels, few and many rows, every output."""
    encode = torch.tensor([150.0], device="cuda")
    for matrix, factor in turns():
        for rows, width in ((5, 384), (300, 640), (1100, 1024)):
            for dtype in (BF16, torch.float32):
                x = torch.randn(rows, width, device="cuda").to(dtype)
                for name in FORMATS:
                    scale = encode if name == "nvfp4" else None
                    how = {"format": name, "encode_scale": scale, "backend": "gpu_triton"}
                    ops.rotate_quantize(x, matrix, factor, **how)
                    ops.rotate_quantize(x, matrix, factor, scale_layout="blocked", **how)
                    ops.rotate_quantize_dequantize(x, matrix, factor, **how)
                ops.rotate_quantize(x, matrix, factor, format="nvfp4", recipe="token", backend="gpu_triton")
                if matrix is not None:
                    ops.rotate(x, matrix, factor, backend="gpu_triton")


def ordered() -> None:
    """Rotated, and quantized and dequantized, in the order of the product's fragments."""
    encode = torch.tensor([150.0], device="cuda")
    for matrix, factor in turns()[1:]:
        assert matrix is not None
        blocks = Blocks(matrix, factor, False)
        if pieces_of(blocks, BF16).hopper[ROTATED].shape[2] < 64:  # of no whole blocks of that order: nobody asks
            continue
        for rows, width in ((5, 384), (300, 640), (1100, 1024)):
            x = torch.randn(rows, width, device="cuda").to(BF16)
            gpu_triton.rotate(x, blocks, BF16, ordered=True)
            for fmt in FORMATS.values():
                quantizer = Quantizer(fmt, encode if fmt == NVFP4 else None, "checkpoint", "even")
                gpu_triton.rotate_quantize_dequantize(x, blocks, quantizer, BF16, ordered=True)


def wide() -> None:
    for turn in (hadamard(256), hadamard(768), hadamard(4096), hadamard(8192), random_hadamard(8192)):
        size = turn.matrix.shape[0]
        blocks = Blocks(turn.matrix.float().cuda(), size**-0.5, False)
        gpu_wide.rotate(torch.randn(7, size, device="cuda").to(BF16), blocks, BF16)


def fragments(n: int, k: int, fmt: FP4Format) -> Fragments:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    low, high = (0x08, 0x60) if fmt == NVFP4 else (116, 130)
    scale = torch.randint(low, high, (n, k // fmt.group_size), dtype=torch.uint8, device="cuda")
    return weight_layout.forward(codes, scale.view(fmt.scale_dtype), fmt)


def matmul_few() -> None:
    cuts = [None, Cut(8, 2, 1, 2, 2, 1, True), Cut(8, 2, 1, 2, 2, 1, False), Cut(4, 1, 1, 3, 4, 2, False)]
    for fmt in FORMATS.values():
        for n, k, with_cuts in ((464, 960, True), (1000, 4096, False), (16, 32, False), (80, 8192, False)):
            weight = fragments(n, k, fmt)
            for m in (1, 9, 16):
                x, out = torch.randn(m, k, device="cuda").to(BF16), torch.empty(m, n, dtype=BF16, device="cuda")
                scale, bias = torch.rand(n, device="cuda"), torch.randn(n, device="cuda").to(BF16)
                for cut in cuts if with_cuts else cuts[:1]:
                    if cut is None or not cut.cluster or capability(x.device) >= (9, 0):
                        few(x, weight, scale, torch.rand(m, device="cuda"), bias, out, cut=cut)


def matmul_many() -> None:
    hopper = capability(torch.device("cuda", torch.cuda.current_device()))[0] == 9
    for fmt in FORMATS.values():
        for n, k in ((464, 1088), (333, 2080)):
            weight, alpha = fragments(n, k, fmt), torch.rand(n, device="cuda")
            for m in (17, 60, 300):
                x, one = torch.randn(m, k, device="cuda").to(BF16), torch.rand(m, device="cuda")
                by_library(x, weight, alpha, one, alpha)
                for split in (1, 2, 4, 8) if hopper else ():
                    cut = ManyCut(128, 64, split, False, 2)
                    many(x, weight, alpha, one, alpha, workspace(x.device), chosen=cut)
                if hopper:
                    many(x, weight, alpha, one, None, workspace(x.device))
                    forms = [
                        ManyCut(128, 256, 1, True, 1),
                        ManyCut(128, 128, 1, False, 1, 4),
                        ManyCut(128, 128, 2, False, 1, rounds=1),
                    ]
                    for cut in forms:
                        many(x, weight, alpha, one, None, workspace(x.device), chosen=cut)
                    if fmt == NVFP4:
                        many(x.half(), weight, alpha, one, None, workspace(x.device))


def fp8() -> None:
    """to_e4m3 and matmul_left, with rows that E4M3 does not hold."""
    n, k = 333, 1056
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(116, 128, (n, k // 32), dtype=torch.uint8, device="cuda").view(MXFP4.scale_dtype)
    weight = FP4Tensor.from_encode(codes, scale, torch.ones(1, device="cuda"), MXFP4)
    stored = gpu_fp8.prepare(weight, "auto")
    assert stored is not None
    for bias in (None, torch.randn(n, device="cuda")):
        quantizer = Quantizer(MXFP4, None, "checkpoint", "even")
        layer = Layer(Weight(stored, None, torch.ones(1, device="cuda"), (n,), MXFP4), bias, None, None, quantizer)
        for m in (1, 70, 300):
            x = torch.randn(m, k, device="cuda").to(BF16)
            x[::3, :32] *= 2.0**20
            compose.linear(gpu_fp8, x, layer)


KERNELS: dict[str, Callable[[], None]] = {
    "rotate_quantize": rotate_quantize, "ordered": ordered, "wide": wide, "matmul_few": matmul_few,
    "matmul_many": matmul_many, "fp8": fp8,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", default=list(KERNELS), help=", ".join(KERNELS))
    torch.manual_seed(0)
    for name in parser.parse_args().kernels:
        KERNELS[name]()
        torch.cuda.synchronize()
        print(f"{name}: ran", flush=True)


if __name__ == "__main__":
    main()
