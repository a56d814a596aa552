"""config.json -> groups of FP4 layers and online transforms, parsed by compressed-tensors' own classes.

What is not run is refused here, with the group or scheme named: other formats, a quantized KV cache, quantized
outputs, sparsity, transforms of attention states.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import missing_package
from ..formats import MXFP4, NVFP4, FP4Format
from .files import refuse

FORMAT_NAMES = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}
TRANSFORM_TYPES = ("hadamard", "random-hadamard", "random-matrix")
ONLINE = ("input", "output")
OFFLINE = ("weight_input", "weight_output")


@dataclass(frozen=True)
class Group:
    """Layers quantized alike: compressed-tensors' targets, the format, and whether activations are quantized."""

    name: str
    format: FP4Format
    activations: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class OtherGroup:
    """Layers quantized in a format that is not run here: an engine's own."""

    name: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Apply:
    """One online use of a scheme: 'input' or 'output' of the layers that match."""

    location: str
    inverse: bool
    targets: tuple[str, ...]
    ignore: tuple[str, ...]


@dataclass(frozen=True)
class Scheme:
    """A transform of the config: its matrix type, block size (None: the whole width), and where it is applied."""

    name: str
    type: str
    size: int | None
    permuted: bool
    apply: tuple[Apply, ...]


@dataclass(frozen=True)
class QuantConfig:
    """What config.json says of the weights."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    schemes: tuple[Scheme, ...]
    version: str
    others: tuple[OtherGroup, ...] = ()


def quantization_entry(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization part of a config.json, also where it lies in a nested text_config; None where there is none."""
    for holder in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(holder, dict) and isinstance(holder.get(key), dict):
                entry: dict[str, Any] = holder[key]
                return entry
    return None


def declared_transforms(entry: dict[str, Any]) -> dict[str, Any]:
    """Scheme name -> its part of a quantization entry, online and folded ones; {} of one that is malformed, which
    `parse` refuses."""
    transforms = entry.get("transform_config")
    found = transforms.get("config_groups") if isinstance(transforms, dict) else None
    return found if isinstance(found, dict) else {}


def parse(entry: dict[str, Any], file: Path, others: bool = False) -> QuantConfig:
    """Parse a compressed-tensors entry. Raises CheckpointRefusal, naming the group or scheme, for what is not run.

    others: groups of other formats and a quantized KV cache are somebody else's, and are left to them.
    """
    from_ct, transform_class = _classes()
    for key in ("transform_config", "sparsity_config"):
        if not isinstance(entry.get(key) or {}, dict):
            needs = [(f"{key}: an object or nothing", repr(entry[key]))]
            raise refuse(file, f"the {key} is malformed.", needs, "fetch the file again")
    raw_transforms = entry.get("transform_config") or {}
    plain = {
        key: value for key, value in entry.items() if key not in ("transform_config", "sparsity_config", "version")
    }
    parsed = _validated(from_ct, plain, file, "quantization_config")
    sparsity = entry.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise refuse(
            file,
            "sparse weights are not run.",
            [("dense weights", f"sparsity {sparsity['format']}")],
            "decompress the sparsity first",
        )
    if parsed.kv_cache_scheme is not None and not others:
        raise refuse(
            file,
            "a quantized KV cache is not run.",
            [("kv_cache_scheme: none", "a scheme")],
            "make the checkpoint without it, or serve it with vLLM",
        )
    named = parsed.config_groups.items()
    for n, scheme in named:
        _check_patterns(f"targets of group '{n}'", scheme.targets, file)
    _check_patterns("ignore", parsed.ignore or (), file)
    apart = {n for n, scheme in named if others and _format(scheme, parsed.format) not in FORMAT_NAMES}
    groups = tuple(_group(n, scheme, parsed.format, file) for n, scheme in named if n not in apart)
    schemes: tuple[Scheme, ...] = ()
    # Files without transforms hold an empty entry, which the class refuses.
    if raw_transforms.get("config_groups"):
        transforms = _validated(transform_class, raw_transforms, file, "transform_config")
        schemes = tuple(_scheme(name, scheme, file) for name, scheme in transforms.config_groups.items())
    left = tuple(OtherGroup(n, tuple(scheme.targets)) for n, scheme in named if n in apart)
    return QuantConfig(groups, tuple(parsed.ignore or ()), schemes, str(entry.get("version", "unknown")), left)


def matches(name: str, module: torch.nn.Module, targets: Sequence[str], ignore: Sequence[str] = ()) -> bool:
    """compressed-tensors' rule: a class name, a whole name, or 're:' and a pattern; ignore wins."""
    from compressed_tensors.utils.match import is_match

    return bool(is_match(name, module, list(targets), list(ignore)))


def asked_for(names: set[str], module: torch.nn.Module, targets: Sequence[str], ignore: Sequence[str] = ()) -> bool:
    """`matches` for a module that file and model call differently: any name counts, in targets and in ignore."""
    targeted = any(matches(name, module, targets) for name in names)
    return targeted and not (ignore and any(matches(name, module, ignore) for name in names))


def chosen_group(groups: Sequence[Group | OtherGroup], name: str, module: torch.nn.Module) -> Group | OtherGroup | None:
    """The group that compressed-tensors gives a module: a whole name goes before a pattern, that before a class name.

    Of two groups with the same target the later counts.
    """
    from compressed_tensors.utils.match import match_targets

    by_target = {target: group for group in groups for target in group.targets}
    matched = match_targets(name, module, list(by_target))
    return by_target[matched[0]] if matched else None


def _classes() -> tuple[Any, Any]:
    try:
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.transform import TransformConfig
    except ImportError:
        raise missing_package("load", "compressed-tensors", "pip install 'compressed-tensors>=0.17'") from None
    return QuantizationConfig, TransformConfig


def _validated(cls: Any, raw: dict[str, Any], file: Path, what: str) -> Any:
    try:
        return cls.model_validate(raw)
    except (ValueError, NotImplementedError, KeyError, TypeError) as error:  # pydantic's error is a ValueError
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise refuse(
            file,
            f"compressed-tensors does not accept the {what}.",
            [("a valid one", "; ".join(lines[:4]))],
            "check that the file is whole, or install a newer compressed-tensors",
        ) from error


def _check_patterns(where: str, targets: Sequence[str], file: Path) -> None:
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise refuse(
                file,
                f"the {where}: this is no pattern.",
                [("a regular expression behind 're:'", f"'{target}' ({error})")],
                "correct it, or fetch the file again",
            ) from error


def _format(scheme: Any, default_format: str) -> str:
    return str(getattr(scheme.format, "value", scheme.format) or default_format)


def _group(name: str, scheme: Any, default_format: str, file: Path) -> Group:
    written = _format(scheme, default_format)
    fmt = FORMAT_NAMES.get(written)
    if fmt is None:
        known = " or ".join(FORMAT_NAMES)
        raise refuse(
            file,
            f"group '{name}' has a format that is not run.",
            [(known, str(written))],
            "make the checkpoint with FP4 groups only; other groups are for vLLM",
        )
    where = f"group '{name}'"
    _check_arguments(f"{where}, weights", scheme.weights, fmt, file, weights=True)
    if scheme.output_activations is not None:
        raise refuse(
            file,
            f"{where} quantizes outputs, which is not run.",
            [("output_activations: none", "a scheme")],
            "make the checkpoint without it",
        )
    if scheme.input_activations is not None:
        _check_arguments(f"{where}, input activations", scheme.input_activations, fmt, file, weights=False)
    return Group(name, fmt, "bf16" if scheme.input_activations is None else "fp4", tuple(scheme.targets))


def _check_arguments(where: str, args: Any, fmt: FP4Format, file: Path, *, weights: bool) -> None:
    if args is None:
        raise refuse(file, f"{where} are not described.", [("4-bit float weights", "none")], "check the config")
    strategy = getattr(args.strategy, "value", args.strategy)
    kind = getattr(args.type, "value", args.type)
    dynamic = getattr(args.dynamic, "value", args.dynamic)
    needs = []
    if (args.num_bits, kind) != (4, "float"):
        needs.append(("num_bits 4, type float", f"num_bits {args.num_bits}, type {kind}"))
    if args.group_size != fmt.group_size:
        needs.append((f"group_size {fmt.group_size}", str(args.group_size)))
    if not args.symmetric:
        needs.append(("symmetric", "not symmetric"))
    wanted = "tensor_group" if fmt.has_tensor_scale else "group"
    if strategy != wanted:
        needs.append((f"strategy {wanted}", str(strategy)))
    right_dynamic = False if weights else ("local" if fmt.has_tensor_scale else True)
    if dynamic != right_dynamic:
        needs.append((f"dynamic {right_dynamic}", str(dynamic)))
    if needs:
        raise refuse(file, f"{where}: this is not run.", needs, "make the checkpoint with the NVFP4 or MXFP4 preset")


def _scheme(name: str, scheme: Any, file: Path) -> Scheme:
    if scheme.type not in TRANSFORM_TYPES:
        raise refuse(
            file,
            f"transform '{name}' has a type that is not known.",
            [(f"one of {', '.join(TRANSFORM_TYPES)}", str(scheme.type))],
            "update quarterturn",
        )
    apply = []
    for args in scheme.apply:
        _check_patterns(f"targets of transform '{name}'", (*args.targets, *args.ignore), file)
        location = getattr(args.location, "value", args.location)
        if location in ONLINE:
            apply.append(Apply(location, bool(args.inverse), tuple(args.targets), tuple(args.ignore)))
        elif location not in OFFLINE:
            raise refuse(
                file,
                f"transform '{name}' applies to '{location}', which is not run.",
                [(f"one of {', '.join(ONLINE + OFFLINE)}", f"{location} of {', '.join(args.targets)}")],
                "make the checkpoint without the rotation of attention states (R3)",
            )
    return Scheme(name, scheme.type, scheme.head_dim, bool(scheme.randomize), tuple(apply))
