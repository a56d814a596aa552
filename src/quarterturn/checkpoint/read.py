"""A checkpoint, layer by layer: what the config says and what the files hold, with every disagreement refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..formats import FP4Format
from ..tensor import FP4Tensor, is_scale
from ..transforms import Transform
from .config import (
    OFFLINE,
    ONLINE,
    Apply,
    Group,
    OtherGroup,
    QuantConfig,
    Scheme,
    asked_for,
    chosen_group,
    declared_transforms,
    matches,
    parse,
    quantization_entry,
)
from .files import (
    TensorInfo,
    TensorReader,
    list_tensors,
    read_json,
    refuse,
    resolve,
)
from .notes import suspicious
from .stored import StoredMatrix, StoredTransform, stored_transforms

PACKED, SCALE = "weight_packed", "weight_scale"
WEIGHT_ENCODE, INPUT_ENCODE = "weight_global_scale", "input_global_scale"
KINDS = {
    "modelopt": "ModelOpt (NVIDIA TensorRT Model Optimizer)",
    "nvfp4": "ModelOpt (NVIDIA TensorRT Model Optimizer)",
    "quark": "Quark",
    "fp_quant": "FP-Quant",
    "unquantized": "unquantized",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "mxfp4": "MXFP4 of the GPT-OSS kind",
}
"""What `recognise` answers, in the words of people; compressed-tensors kinds stand for themselves."""


@dataclass(frozen=True)
class LayerSpec:
    """One FP4 layer as config and headers describe it: y (.., n) = x (.., k) w^T, with transforms and bias."""

    name: str
    group: str
    format: FP4Format
    activations: str
    rule: str
    n: int
    k: int
    has_bias: bool
    input_transform: Transform | None = None
    output_transform: Transform | None = None
    scheme_names: tuple[str, ...] = ()


@dataclass
class Checkpoint:
    """An opened checkpoint folder; tensors are read when asked for."""

    path: Path
    config: dict[str, Any]
    quant: QuantConfig
    tensors: dict[str, TensorInfo]
    transforms: list[StoredTransform] = field(default_factory=list)
    layers: dict[str, LayerSpec] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _reader: TensorReader = field(default_factory=TensorReader, repr=False)

    def read(self, name: str) -> Tensor:
        """A tensor of the file, on the CPU. Raises CheckpointRefusal where there is none."""
        if name not in self.tensors:
            raise refuse(self.path, "a tensor is missing.", [(name, "no such tensor")], "fetch the checkpoint again")
        return self._reader.read(name, self.tensors[name])

    def weight(self, layer: str) -> FP4Tensor:
        """The weight of a layer, validated."""
        spec = self.layers[layer]
        encode = self.read(f"{layer}.{WEIGHT_ENCODE}") if spec.format.has_tensor_scale else None
        codes, scale = self.read(f"{layer}.{PACKED}"), self.read(f"{layer}.{SCALE}")
        return FP4Tensor.from_encode(codes, scale, encode, spec.format).validate(layer)

    def input_encode_scale(self, layer: str) -> Tensor | None:
        """The stored encode scale of a layer's activations, fp32 (1,); None where the format or W4A16 has none."""
        spec = self.layers[layer]
        needed = spec.format.has_tensor_scale and spec.activations == "fp4"
        return self.read(f"{layer}.{INPUT_ENCODE}").reshape(1) if needed else None

    def bias(self, layer: str) -> Tensor | None:
        """The bias of a layer in the file's dtype, (n,), or None."""
        return self.read(f"{layer}.bias") if self.layers[layer].has_bias else None

    def stored_matrix(self, prefix: str) -> StoredMatrix:
        """The place of a transform's tensors `prefix`.* in a model on the meta device."""
        names = [name for name in self.tensors if name.startswith(f"{prefix}.")]
        return StoredMatrix(**{name.removeprefix(f"{prefix}."): self.read(name).to("meta") for name in names})

    def offline_schemes(self, layer: str) -> list[str]:
        """Schemes that only a layer's weight carries: they cancel between layers, and their matrices are not stored."""
        entry = quantization_entry(self.config) or {}
        stand_in = torch.nn.Linear(1, 1, bias=False, device="meta")
        found = []
        for scheme, body in declared_transforms(entry).items():
            for apply in body["apply"]:
                offline = str(apply["location"]) in OFFLINE and scheme not in self.layers[layer].scheme_names
                if offline and matches(layer, stand_in, apply["targets"], apply.get("ignore") or ()):
                    found.append(scheme)
        return found

    def online_transforms(
        self, name: str, module: torch.nn.Module, n: int, k: int, also: str | None = None
    ) -> tuple[Transform | None, Transform | None, tuple[str, ...]]:
        """Input transform, output transform and scheme names of any module, quantized or not.

        name: in the file; also: in the model, where that differs.
        """
        found: dict[str, list[Transform]] = {"input": [], "output": []}
        names = []
        for scheme in self.quant.schemes:
            for apply in scheme.apply:
                if asked_for({name, also or name}, module, apply.targets, apply.ignore):
                    width = k if apply.location == "input" else n
                    found[apply.location].append(self._transform(scheme, apply, name, width))
                    names.append(scheme.name)
        return _composed(found["input"]), _composed(found["output"]), tuple(names)

    def _transform(self, scheme: Scheme, apply: Apply, name: str, width: int) -> Transform:
        size = scheme.size or width
        wanted_inverse = apply.inverse and scheme.type == "random-matrix"
        own = f"{name}.{scheme.name}_{apply.location}"
        usable = [t for t in self.transforms if t.scheme == scheme.name and t.size == size]
        usable = [t for t in usable if t.inverse == wanted_inverse]
        usable = [t for t in usable if f"{t.module}.{t.scheme}_{t.location}" == own] or usable
        if not usable:
            needs = [(f"a {size} x {size} matrix of '{scheme.name}' ({own}.weight or shared)", "none in the file")]
            raise refuse(
                self.path,
                "an online transform has no matrix.",
                needs,
                "make the checkpoint again with the matrices saved",
                layer=name,
            )
        if any(not torch.equal(t.transform.matrix, usable[0].transform.matrix) for t in usable[1:]):
            owners = ", ".join(t.tensor for t in usable[:4])
            raise refuse(
                self.path,
                "several matrices could be meant.",
                [(f"one for '{own}'", owners)],
                "store the matrix under each layer that uses it",
                layer=name,
            )
        if width % size:
            raise refuse(
                self.path,
                "a transform does not fit its layer.",
                [(f"a size that divides {width}", f"'{scheme.name}' of {size}")],
                "make the checkpoint with another block size",
                layer=name,
            )
        stored = usable[0].transform
        return stored.inverse() if apply.inverse and scheme.type != "random-matrix" else stored


def recognise(path: str | Path) -> str:
    """What kind of checkpoint a folder holds, by its config and headers: the first word of what `inspect` says."""
    folder = resolve(path)
    config = read_json(folder / "config.json")
    entry = quantization_entry(config)
    if (folder / "hf_quant_config.json").exists() and entry is None:
        return "modelopt"
    if entry is None:
        return "unquantized"
    method = str(entry.get("quant_method", "unknown"))
    if method != "compressed-tensors":
        return method
    groups = entry.get("config_groups")
    names = [
        g.get("format") or entry.get("format")
        for g in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(g, dict)
    ]
    kinds = {str(name) for name in names} or {str(entry.get("format"))}
    return "compressed-tensors " + " + ".join(sorted(kinds))


def open_checkpoint(path: str | Path, others: bool = False) -> Checkpoint:
    """Open a compressed-tensors FP4 checkpoint: a folder, or a hub id.

    Reads config, headers, transform matrices and tensor scales; refuses what is not run, what is missing or misshapen,
    and what config and tensors disagree on, naming it (CheckpointRefusal). others: layers of other formats and a
    quantized KV cache are left to the caller, and not refused.
    """
    folder = resolve(path)
    file = folder / "config.json"
    config = read_json(file)
    _refuse_foreign(recognise(folder), file)
    entry = quantization_entry(config)
    assert entry is not None
    checkpoint = Checkpoint(folder, config, parse(entry, file, others), list_tensors(folder))
    checkpoint.transforms = stored_transforms(checkpoint.quant, checkpoint.tensors, checkpoint.read)
    names = [name.removesuffix(f".{PACKED}") for name in checkpoint.tensors if name.endswith(f".{PACKED}")]
    names = [name for name in names if not _is_other(checkpoint.quant, name)]
    if not names:
        raise refuse(
            folder,
            "no layer is packed FP4.",
            [(f"tensors named *.{PACKED}", "none")],
            "check that this is the compressed model",
        )
    for name in names:
        checkpoint.layers[name] = _layer(checkpoint, name)
    _check_strays(checkpoint)
    by_design = {f"{name}.{part}" for name in checkpoint.layers for part in (PACKED, SCALE)}
    checkpoint.notes += suspicious(checkpoint, by_design)
    return checkpoint


def _is_other(quant: QuantConfig, name: str) -> bool:
    """Whether a packed layer is of a group that is not FP4: other formats use the same names."""
    stand_in = torch.nn.Linear(1, 1, bias=False, device="meta")
    return bool(quant.others) and isinstance(chosen_group((*quant.groups, *quant.others), name, stand_in), OtherGroup)


def _refuse_foreign(kind: str, file: Path) -> None:
    if kind.startswith("compressed-tensors"):
        return
    named = KINDS.get(kind, kind)
    needs = [("quant_method compressed-tensors with an FP4 format", f"{named} ({kind})" if named != kind else named)]
    do = "load it with Transformers as it is" if kind == "unquantized" else f"run it with software that reads {named}"
    raise refuse(file, "this is not a compressed-tensors FP4 checkpoint.", needs, do)


def _layer(checkpoint: Checkpoint, name: str) -> LayerSpec:
    info = checkpoint.tensors[f"{name}.{PACKED}"]
    if len(info.shape) != 2:
        raise refuse(
            info.file,
            "a weight is misshapen.",
            [("two dimensions (N, K/2)", str(info.shape))],
            "check the model; fused 3-D experts are not read",
            tensor=f"{name}.{PACKED}",
        )
    n, k = info.shape[0], info.shape[1] * 2
    stand_in = torch.nn.Linear(k, n, bias=False, device="meta")
    group = _group_of(checkpoint, name, stand_in)
    has_bias = f"{name}.bias" in checkpoint.tensors
    _check_tensors(checkpoint, name, group, n, k, has_bias)
    first, last, schemes = checkpoint.online_transforms(name, stand_in, n, k)
    # compressed-tensors writes E8M0 scales by its rounding rule, and activations are quantized by the same.
    return LayerSpec(name, group.name, group.format, group.activations, "even", n, k, has_bias, first, last, schemes)


def _group_of(checkpoint: Checkpoint, name: str, stand_in: torch.nn.Module) -> Group:
    quant = checkpoint.quant
    if quant.ignore and matches(name, stand_in, quant.ignore):
        raise refuse(
            checkpoint.path,
            "config and tensors disagree.",
            [("an unquantized layer (it is in ignore)", PACKED)],
            "take the layer out of ignore, or store it unquantized",
            layer=name,
        )
    group = chosen_group(quant.groups, name, stand_in)
    if isinstance(group, Group):
        return group
    targets = "; ".join(f"{g.name}: {', '.join(g.targets)}" for g in quant.groups)
    raise refuse(
        checkpoint.path,
        "config and tensors disagree.",
        [("a config group whose targets match this packed layer", targets or "no groups")],
        "check targets in config.json",
        layer=name,
    )


def _check_tensors(checkpoint: Checkpoint, name: str, group: Group, n: int, k: int, has_bias: bool) -> None:
    fmt = group.format
    if k % fmt.group_size:
        raise refuse(
            checkpoint.path,
            "a layer is not whole groups.",
            [(f"K a multiple of {fmt.group_size}", f"K = {k}")],
            "check the file",
            layer=name,
        )
    expected: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        PACKED: (("U8",), fmt.codes_shape(n, k)),
        SCALE: (("U8",) if fmt.has_e8m0_scale else ("F8_E4M3",), fmt.scale_shape(n, k)),
    }
    if fmt.has_tensor_scale:
        expected[WEIGHT_ENCODE] = (("F32",), (1,))
        if group.activations == "fp4":
            expected[INPUT_ENCODE] = (("F32",), (1,))
    if has_bias:
        expected["bias"] = (("BF16", "F16", "F32"), (n,))
    for suffix, (dtypes, shape) in expected.items():
        full = f"{name}.{suffix}"
        info = checkpoint.tensors.get(full)
        if info is None:
            found = (
                f"'{group.name}' says {fmt.name} {'W4A4' if group.activations == 'fp4' else 'W4A16'}, no such tensor"
            )
            raise refuse(
                checkpoint.path,
                "a tensor is missing.",
                [(f"{full} {dtypes[0]} {shape}", found)],
                "make or fetch the checkpoint again",
                layer=name,
            )
        scalar = math.prod(shape) == 1 and math.prod(info.shape) == 1
        if info.dtype not in dtypes or (info.shape != shape and not scalar):
            raise refuse(
                info.file,
                "a tensor is misshapen.",
                [(f"{' or '.join(dtypes)} {shape}", f"{info.dtype} {info.shape}")],
                "make or fetch the checkpoint again",
                tensor=full,
            )
        if suffix in (WEIGHT_ENCODE, INPUT_ENCODE):
            value = checkpoint.read(full).reshape(()).float()
            if not is_scale(value):
                raise refuse(
                    info.file,
                    "a tensor scale is no scale.",
                    [("a positive number that is finite in fp32, as is its reciprocal", str(float(value)))],
                    "make or fetch the checkpoint again",
                    tensor=full,
                )
    if f"{name}.weight" in checkpoint.tensors:
        raise refuse(
            checkpoint.path,
            "config and tensors disagree.",
            [("one weight", f"both {name}.weight and {name}.{PACKED}")],
            "check the file",
            layer=name,
        )


def _check_strays(checkpoint: Checkpoint) -> None:
    """Refuse tensors of an FP4 layer that nothing in the config explains, such as the matrix of a dropped scheme."""
    known = {PACKED, SCALE, WEIGHT_ENCODE, INPUT_ENCODE, "bias"}
    for scheme in checkpoint.quant.schemes:
        for location in (*ONLINE, *OFFLINE):
            known |= {f"{scheme.name}_{location}.weight", f"{scheme.name}_{location}.perm"}
    for tensor, info in checkpoint.tensors.items():
        parts = tensor.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            layer, rest = ".".join(parts[:cut]), ".".join(parts[cut:])
            if layer in checkpoint.layers and rest not in known:
                raise refuse(
                    info.file,
                    "config and tensors disagree.",
                    [("a tensor that the config explains", f"{tensor} {info.dtype} {info.shape}")],
                    "check quantization_config in config.json: a transform may have been dropped from it",
                    layer=layer,
                )
    for name, spec in checkpoint.layers.items():
        if spec.activations == "bf16" and f"{name}.{INPUT_ENCODE}" in checkpoint.tensors:
            checkpoint.notes.append(f"{name}: has an input scale, but its group leaves activations as they are (W4A16)")


def _composed(transforms: list[Transform]) -> Transform | None:
    result = None
    for transform in transforms:
        result = transform if result is None else result.compose(transform)
    return result
