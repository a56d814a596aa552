"""The writer's half of the checkpoint format: what compressed-tensors calls things, and what it stores.

compressed-tensors stores the encode scale (448 * 6 / amax) as `weight_global_scale` and `input_global_scale`; the
library's multiplier is its reciprocal, so the stored number is kept and written back as it was read or made. A
transform's matrix is stored once, in float64, under the first module that uses it. The folded side of a transform is
listed in the config as well (`weight_input` or `weight_output`, the opposite direction): it needs nothing at load, but
says that the weights are already turned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import refusal
from ..formats import FP4Format
from ..tensor import FP4Tensor
from ..transforms import Transform, hadamard
from .read import INPUT_ENCODE, PACKED, SCALE, WEIGHT_ENCODE

FORMAT_VERSION = "0.17.0"
"""The oldest compressed-tensors that reads what is written here."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are quantized alike. activations: 'fp4' or 'bf16'; targets as compressed-tensors matches them."""

    format: FP4Format
    activations: str
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True)
class TransformGroup:
    """One transform and the layers it applies to. location: 'input' or 'output', the online side."""

    scheme: str
    transform: Transform
    location: str = "input"
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()


def layer_tensors(
    name: str, weight: FP4Tensor, input_encode_scale: Tensor | None = None, bias: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors of one layer by their names in the file. Raises Refusal for a layer of several output ranges."""
    if len(weight.output_sizes) != 1:
        raise refusal(
            "save",
            "a layer fused from several cannot be written as one.",
            layer=name,
            needs=[("one output range", f"{len(weight.output_sizes)} ranges {list(weight.output_sizes)}")],
            do="write its parts as layers of their own",
        )
    tensors = {f"{name}.{PACKED}": weight.codes, f"{name}.{SCALE}": weight.linear_block_scale()}
    if weight.format.has_tensor_scale:
        stored = weight.tensor_scale.reciprocal() if weight.encode_scale is None else weight.encode_scale
        tensors[f"{name}.{WEIGHT_ENCODE}"] = stored.reshape(1)
        if input_encode_scale is not None:
            tensors[f"{name}.{INPUT_ENCODE}"] = input_encode_scale.reshape(1)
    if bias is not None:
        tensors[f"{name}.bias"] = bias
    return tensors


def transform_tensor(module: str, group: TransformGroup) -> tuple[str, Tensor]:
    """Name and float64 matrix of a transform, stored under the first module that uses it."""
    return f"{module}.{group.scheme}_{group.location}.weight", stored_matrix(group.transform)


def stored_matrix(transform: Transform) -> Tensor:
    """The matrix as a file holds it: +-1 for Hadamards, V itself for any other."""
    if transform_type(transform) == "random-matrix":
        return transform.activation_matrix().contiguous()
    return transform.matrix.contiguous()


def transform_type(transform: Transform) -> str:
    """'hadamard', 'random-hadamard' or 'random-matrix'.

    A reader divides the first two by sqrt(R) and inverts them by transposing, so they must be Hadamards indeed.
    """
    m, size = transform.matrix, transform.size
    if not transform.is_hadamard or transform.factor != 1 / size**0.5:
        return "random-matrix"
    sylvester = size & (size - 1) == 0 and torch.equal(m.cpu(), hadamard(size).matrix)
    return "hadamard" if sylvester else "random-hadamard"


def quantization_config(
    groups: Sequence[LayerGroup], transforms: Sequence[TransformGroup] = (), ignore: Sequence[str] = ()
) -> dict[str, Any]:
    """The `quantization_config` entry of config.json."""
    formats = sorted({_format_name(group.format) for group in groups})
    schemes = {group.scheme: _transform_scheme(group) for group in transforms}
    return {
        "config_groups": {f"group_{i}": _scheme(group) for i, group in enumerate(groups)},
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {"config_groups": schemes} if schemes else {},
        "version": FORMAT_VERSION,
    }


def _format_name(format: FP4Format) -> str:
    return f"{format.name}-pack-quantized"


def _scheme(group: LayerGroup) -> dict[str, Any]:
    inputs = None
    if group.activations == "fp4":
        # 'local': block scales are made at run time, the tensor scale is stored.
        stored = group.format.has_tensor_scale
        inputs = _arguments(group.format, "local" if stored else True, "static_minmax" if stored else None)
    return {
        "format": _format_name(group.format),
        "input_activations": inputs,
        "output_activations": None,
        "targets": list(group.targets),
        "weights": _arguments(group.format, False, "memoryless_minmax"),
    }


def _arguments(format: FP4Format, dynamic: bool | str, observer: str | None) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": dynamic,
        "group_size": format.group_size,
        "num_bits": 4,
        "observer": observer,
        "observer_kwargs": {},
        "scale_dtype": str(format.scale_dtype),
        "strategy": "tensor_group" if format.has_tensor_scale else "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }


def _transform_scheme(group: TransformGroup) -> dict[str, Any]:
    kind = transform_type(group.transform)
    # A random-matrix is stored as V, whatever direction it was given in.
    inverse = group.transform.transpose and kind != "random-matrix"

    def entry(location: str, inverse: bool) -> dict[str, Any]:
        return {
            "ignore": list(group.ignore),
            "inverse": inverse,
            "location": location,
            "targets": list(group.targets),
        }

    return {
        "apply": [entry(group.location, inverse), entry(f"weight_{group.location}", not inverse)],
        "head_dim": group.transform.size,
        "precision": "torch.float64",
        "randomize": False,
        "requires_grad": False,
        "type": kind,
    }
