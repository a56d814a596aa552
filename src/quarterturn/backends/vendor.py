"""What the vendors' FP4 products have in common: operands in their layout, alpha, padding, and the end of a product.

A product of two packed matrices with scales in the 128x4 layout: y = alpha * sum over K of (e2m1 * scale) (e2m1 *
scale). Alpha is the tensor scale of x times that of w, both multipliers, fp32 in this order. What a kernel cannot take
is brought to what it can: K is padded to whole tiles of scales (codes and scales zero, in both operands), N to the
kernel's alignment (and the result sliced), a range of outputs with a tensor scale of its own is a product of its own.

x is rotated and quantized by gpu_triton (`own`), to the bit as that backend does it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import BackendRefusal, refusal
from ..layouts import LINEAR, BLOCKED_128x4
from ..tensor import FP4Tensor
from . import gpu_triton as own
from .gpu_device import capability as capability_of
from .gpu_pieces import is_capturing
from .kept import Kept
from .protocol import Blocks, Layer, Operand, Problem, Quantizer, Together, Weight

FORM = "128x4"
"""The form of an operand: codes (M, K padded to whole tiles / 2), scale bytes in the 128x4 layout."""
FAMILIES = (10, 12)
"""Major numbers of the capabilities whose FP4 products the vendors' packages have in common."""
PER_ROW = (
    "needs one tensor scale for all rows, found recipe 'token' with one a row: "
    "choose 'blackwell_cublas' or 'blackwell_triton'"
)
"""The reason of products that take one alpha."""
TILE = 4
"""Groups of K in a tile of scales."""


class Part(NamedTuple):
    """Outputs that share a tensor scale, as a kernel reads them: rows padded, scales (uint8) in its layout."""

    codes: Tensor
    block_scale: Tensor
    tensor_scale: Tensor
    outputs: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a product makes of a layer once."""

    parts: tuple[Part, ...]
    alphas: tuple[Tensor, ...]


def missing_gpu(device: torch.device, capability: tuple[int, int] | None) -> list[str]:
    """Reasons against a machine, as far as its GPU goes: FP4 products need a Blackwell, 10.x or 12.x."""
    reasons = own.missing(device, capability)
    if device.type != "cuda" or torch.version.hip is not None:
        return reasons or [f"needs an NVIDIA GPU, found {device.type}"]
    found = capability or capability_of(device)
    if found[0] not in FAMILIES:
        text = f"needs a Blackwell GPU (capability 10.x or 12.x), found {found[0]}.{found[1]}"
        reasons.append(f"{text}: choose backend '{own_or_any(found)}'")
    return reasons


def own_or_any(capability: tuple[int, int]) -> str:
    """The backend to choose on a GPU that has no FP4 products."""
    return "gpu_triton" if capability >= (8, 0) else "any_torch"


def version_of(package: str) -> str:
    """The installed version of a distribution, or 'an unknown version'."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "an unknown version"


def missing_package(module: str, package: str, install: str, load: Callable[[], object] | None) -> list[str]:
    """Reasons against a package: not there, or it does not import here. `install` is what to do, with all that it
    needs in the second case. load: None where it need not be imported, since the machine is refused already."""
    if importlib.util.find_spec(module) is None:
        return [f"needs {package}, which is not installed: {install}"]
    if load is None:
        return []
    try:
        load()
    except Exception as error:
        # A package may raise anything where its GPU libraries are missing.
        found = f"{version_of(package)} is installed, but does not import here ({error})"
        return [f"needs {package} and what it imports; {found}: {install}"]
    return []


def refuses_layer(problem: Problem) -> list[str]:
    """Reasons against a layer that hold for every product of two FP4 operands."""
    reasons = []
    if problem.activations != "fp4":
        reasons.append(f"multiplies FP4 by FP4 (W4A4), found activations in {problem.activations}: choose 'gpu_triton'")
    if not (problem.n and problem.k):
        reasons.append(f"needs inputs and outputs, found {problem.k} and {problem.n}: choose 'any_torch'")
    return reasons


def rotate(x: Tensor, blocks: Blocks, out_dtype: torch.dtype) -> Tensor:
    """x (M, K) @ V per block, rounded once to out_dtype, by our own kernel."""
    return own.rotate(x, blocks, out_dtype)


def rotate_quantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, scale_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K) -> packed codes, scale bytes in the layout, tensor scale (1,) or (M,), by our own kernel."""
    return own.rotate_quantize(x, blocks, quantizer, scale_layout)


def rotate_quantize_dequantize(
    x: Tensor, blocks: Blocks | None, quantizer: Quantizer, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x (M, K) -> e2m1 * block_scale of out_dtype, and the tensor scale, by our own kernel."""
    return own.rotate_quantize_dequantize(x, blocks, quantizer, out_dtype)


def prepare(weight: FP4Tensor, mode: str) -> Tensor | None:
    """None, whatever the mode: packed weights are what FP4 products run on. In their layout they are kept besides."""
    return None


def together(layers: Sequence[Layer]) -> Together | None:
    """None: a layer is two launches or more whoever calls them."""
    return None


def activation_scale(quantizer: Quantizer, device: torch.device) -> Tensor:
    """The tensor scale of x, fp32 (1,), a multiplier: 1 / encode. QuTLASS's recipe: 1/6, for MXFP4 1/3."""
    nvfp4, of_qutlass = quantizer.format.has_tensor_scale, quantizer.recipe == "qutlass"
    if nvfp4 and not of_qutlass:
        assert quantizer.encode_scale is not None
        return quantizer.encode_scale.view(1).reciprocal()
    encode = (6.0 if nvfp4 else 3.0) if of_qutlass else 1.0
    return torch.full((1,), encode, dtype=torch.float32, device=device).reciprocal()


def quantized(x: Tensor, layer: Layer) -> Operand:
    """x (M, K) rotated and quantized by our own kernel, as an operand of a product."""
    assert layer.quantizer is not None
    made = rotate_quantize(x, layer.input_blocks, layer.quantizer, BLOCKED_128x4.name)
    return as_operand(*made, x, layer.quantizer)


def as_operand(codes: Tensor, scale: Tensor, tensor_scale: Tensor, x: Tensor, quantizer: Quantizer) -> Operand:
    """Codes and 128x4 scales of x (M, K) as an operand: K padded to whole tiles."""
    codes = padded(codes, columns=TILE * quantizer.format.group_size // 2)
    return Operand(codes, scale, tensor_scale, x.shape[0], x.dtype, FORM)


def aligned(tensor: Tensor) -> Tensor:
    """The same values, contiguous and at a multiple of 32 bytes, which the vendors' kernels read from."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 32 else tensor


def padded(codes: Tensor, rows: int = 1, columns: int = 1) -> Tensor:
    """Codes with zeros behind them, up to multiples of `rows` and `columns`; the same where there is nothing to add."""
    below, right = -codes.shape[0] % rows, -codes.shape[1] % columns
    return functional.pad(codes, (0, right, 0, below)) if below or right else aligned(codes)


def parts_of(weight: Weight, align: int, apart: bool = True, blocked: bool = True) -> tuple[Part, ...]:
    """The weight as a kernel reads it: N of each part a multiple of `align`, K of whole tiles.

    apart: one part for each range that has a tensor scale of its own; else one of all. blocked: scales in the 128x4
    layout; else row by row, padded as the codes are.
    """
    assert weight.block_scale is not None
    fmt = weight.format
    sizes = weight.output_sizes if apart else (weight.data.shape[0],)
    parts, start = [], 0
    for index, size in enumerate(sizes):
        rows = slice(start, start + size)
        codes = padded(weight.data[rows], align, TILE * fmt.group_size // 2)
        scale = padded(weight.block_scale[rows], align, TILE)
        stored = (BLOCKED_128x4 if blocked else LINEAR).forward(scale)
        tensor_scale = weight.tensor_scale[index : index + 1] if apart else weight.tensor_scale
        parts.append(Part(codes, stored, tensor_scale, size))
        start += size
    return tuple(parts)


def prepared(layer: Layer, name: str, make: Callable[[Weight], tuple[Part, ...]]) -> Prepared:
    """The parts of a layer and their alphas, made at its first use and kept with it under the backend's name."""
    kept: Prepared | None = layer.kept.get(name)
    if kept is None:
        parts, quantizer = _kept_parts(layer.weight, name, make), layer.quantizer
        assert quantizer is not None
        alphas: tuple[Tensor, ...] = ()
        if not quantizer.per_row:
            scale = activation_scale(quantizer, layer.weight.data.device)
            alphas = tuple(scale * part.tensor_scale for part in parts)
        kept = Prepared(parts, alphas)
        if not is_capturing(layer.weight.data):
            layer.kept[name] = kept
    return kept


def renewal(old: Layer, new: Layer, name: str, make: Callable[[Weight], tuple[Part, ...]]) -> list[tuple[Any, Any]]:
    """What was made of the weight of `old` under a backend's name, each once, with what `new`'s gives."""
    kept: Prepared | None = old.kept.get(name)
    beside = _KEPT.of(old.weight.data).get(name)
    if kept is None and beside is None:
        return []
    fresh = prepared(new, name, make)
    pairs: list[tuple[Any, Any]] = [] if kept is None else [(kept, fresh)]
    if beside is not None and (kept is None or beside[1] is not kept.parts):
        pairs.append((Prepared(beside[1], ()), Prepared(fresh.parts, ())))
    return pairs


def _kept_parts(weight: Weight, name: str, make: Callable[[Weight], tuple[Part, ...]]) -> tuple[Part, ...]:
    """The parts of a weight, kept beside its codes too: the operator, which a compiled model calls, has a new Layer
    for every call. What is made while a CUDA graph is captured lies in the graph's memory, and is not kept."""
    scale = weight.block_scale
    assert scale is not None
    made = _KEPT.of(weight.data)
    if name in made:
        (version, *tensors), parts = made[name]
        same = [t.data_ptr() for t in tensors] == [scale.data_ptr(), weight.tensor_scale.data_ptr()]
        if same and version == _version(weight):
            found: tuple[Part, ...] = parts
            return found
    parts = make(weight)
    if not is_capturing(weight.data) and _version(weight) is not None:
        # The tensors are held, so that no other can take their memory.
        made[name] = ((_version(weight), scale, weight.tensor_scale), parts)
    return parts


_KEPT = Kept()


def _version(weight: Weight) -> tuple[Any, ...] | None:
    """What changes when the scales are written to; None where nothing would: tensors of inference mode."""
    scales = [t for t in (weight.block_scale, weight.tensor_scale) if t is not None]
    if any(t.is_inference() for t in scales):
        return None
    return (*(t._version for t in scales), weight.output_sizes, weight.format.name)


def joined(results: list[Tensor], parts: tuple[Part, ...]) -> Tensor:
    """The results of the parts (M, N padded) side by side without their padding, (M, N), contiguous."""
    outputs = [y[:, : part.outputs] for y, part in zip(results, parts, strict=True)]
    return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, dim=1)


def finished(y: Tensor, layer: Layer, dtype: torch.dtype) -> Tensor:
    """A product rounded to 16 bits already: bias added and output turned in fp32, rounded once more where there are."""
    if layer.bias is not None:
        turned = layer.output_blocks is not None
        y = (y.float() + layer.bias.float()).to(torch.float32 if turned else dtype)
    return y if layer.output_blocks is None else rotate(y, layer.output_blocks, dtype)


def packed_operand(x: Tensor, scale: Tensor | None, tensor_scale: Tensor | None, weight: Weight, name: str) -> Operand:
    """Operands of the bare product, x packed codes (M, K/2) with scales row by row. Raises BackendRefusal for values.

    The operand's dtype is not known here: float32.
    """
    if scale is None or weight.block_scale is None:
        raise refusal(
            "fp4_matmul",
            f"backend '{name}' multiplies packed codes by packed codes.",
            needs=[("x and weight as codes with block scales", "values")],
            do="choose backend 'auto', or pass what rotate_quantize gives",
            kind=BackendRefusal,
        )
    codes = padded(x, columns=TILE * weight.format.group_size // 2)
    return Operand(codes, BLOCKED_128x4.forward(scale), tensor_scale, x.shape[0], torch.float32, FORM)


def bare_product(
    name: str,
    operand: Operand,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...],
    parts_of: Callable[[Weight], tuple[Part, ...]],
    multiply: Callable[[Operand, tuple[Part, ...], tuple[Tensor, ...], Weight], Tensor],
) -> Tensor:
    """The product of a kernel with one alpha and no bias that gives `dtypes`. Raises BackendRefusal for any other."""
    scale, needs = operand.tensor_scale, []
    if out_dtype not in dtypes:
        needs.append(f"needs a result of {' or '.join(map(str, dtypes))}, found {out_dtype}")
    if bias is not None:
        needs.append("needs no bias, which it would add to rounded results, found one")
    if scale is not None and scale.numel() != 1:
        needs.append(f"needs one tensor scale of x, found {scale.numel()}")
    if needs:
        raise cannot_give(name, needs)
    parts = parts_of(weight)
    alphas = tuple(part.tensor_scale if scale is None else scale * part.tensor_scale for part in parts)
    return multiply(replace(operand, dtype=out_dtype), parts, alphas, weight)


def cannot_give(name: str, needs: list[str]) -> Exception:
    """The refusal of a bare product that a kernel cannot do; each need as 'needed, found what'."""
    pairs = [tuple(text.removeprefix("needs ").split(", found ", 1)) for text in needs]
    return refusal(
        "fp4_matmul",
        f"backend '{name}' cannot do this product.",
        needs=[(pair[0], pair[-1]) for pair in pairs],
        do="choose backend 'auto'",
        kind=BackendRefusal,
    )
