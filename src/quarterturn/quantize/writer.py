"""Saving: a model that holds FP4Linear layers becomes a compressed-tensors checkpoint.

Everything is read off the layers themselves (format, activations, transforms), so a model that was loaded is saved the
same way as one that was just quantized. Names go from the model's modules to those of its files the way Transformers'
own `save_pretrained` does it; that works on the model too, with the same tensors, but not atomically.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.config import declared_transforms
from ..checkpoint.save import check_shard_size, write_json, write_tensors, write_tokenizer
from ..checkpoint.stored import StoredMatrix
from ..checkpoint.write import (
    LayerGroup,
    TransformGroup,
    layer_tensors,
    quantization_config,
    stored_matrix,
    transform_tensor,
)
from ..errors import missing_package, refusal
from ..integrations.builder import RENAMED
from ..integrations.experts import fused_experts
from ..linear import FP4Linear
from ..rotated_linear import RotatedLinear
from ..transforms import Transform
from .atomic import new_folder


def save_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    tokenizer: Any = None,
    source: str | Path | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> Path:
    """Write a Transformers model with FP4Linear layers to a folder; the folder appears whole or not at all.

    tokenizer: saved beside the model; source: a folder whose tokenizer files are copied instead. max_shard_size: bytes,
    or text such as '5GB'. overwrite: replace a checkpoint that is there. Raises Refusal where the target is taken,
    where the model has no FP4Linear layer, and where a layer holds what the format cannot say. Returns the path.
    """
    target, kept = Path(path), None if source is None else Path(source)
    check_shard_size(max_shard_size)
    with new_folder(target, overwrite, kept) as folder:
        write_files(model, folder, tokenizer=tokenizer, source=kept, max_shard_size=max_shard_size)
    return target


def write_files(
    model: Any, folder: Path, *, tokenizer: Any, source: Path | None, max_shard_size: int | str = "5GB"
) -> None:
    """Everything that save_checkpoint writes, into a folder that is there."""
    layers, transforms, config = _described(model)
    write_tensors(_tensors(model, layers, transforms), folder, max_shard_size)
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        # Sampling settings that Transformers finds odd are the model's own affair: they are kept, not judged.
        write_json(folder / "generation_config.json", generation.to_diff_dict())
    write_tokenizer(folder, tokenizer, source)


def make_saveable(model: Any) -> None:
    """Let Transformers' own `save_pretrained` write a model that was quantized in memory.

    It gets its quantization_config, the matrices of its transforms, and the renaming of the layers' buffers.
    """
    from transformers.core_model_loading import WeightRenaming

    _, transforms, config = _described(model)
    for group, first in transforms:
        model.get_submodule(first).add_module(
            f"{group.scheme}_{group.location}", StoredMatrix(weight=stored_matrix(group.transform))
        )
    renamings = [WeightRenaming(rf"\.{theirs}", f".{ours}") for theirs, ours in RENAMED.items()]
    model._weight_conversions = _conversions(model) + renamings
    model.config.quantization_config = config.quantization_config


def _described(model: Any) -> tuple[dict[str, FP4Linear], list[tuple[TransformGroup, str]], Any]:
    """The model's 4-bit layers, their transforms with the first layer of each, and the config that says so."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, FP4Linear)}
    _check_layers(model, layers)
    file_name = _file_names(model)
    transforms = _transform_groups(layers, _unquantized(model), file_name)
    _check_nothing_lost(model, transforms)
    return layers, transforms, _config(model, layers, [group for group, _ in transforms], file_name)


def _check_layers(model: nn.Module, layers: Mapping[str, FP4Linear]) -> None:
    rotated = next((name for name, m in model.named_modules() if isinstance(m, RotatedLinear)), None)
    if rotated is not None:
        raise refusal(
            "save",
            "an online transform on an unquantized layer cannot be written here.",
            layer=rotated,
            needs=[("transforms on 4-bit layers", "RotatedLinear")],
            do="use the model's own save_pretrained, which writes what was loaded",
        )
    if not layers:
        raise refusal(
            "save",
            "the model has no 4-bit layer.",
            needs=[("FP4Linear layers", "none")],
            do="quantize the model first, or use its own save_pretrained",
        )
    for name, layer in layers.items():
        needs = []
        if layer.device.type == "meta":
            needs.append(("weights in memory", "the meta device"))
        if layer.format.has_e8m0_scale and layer.rule != "even":
            needs.append(("the scale rule 'even', which such files mean", f"'{layer.rule}'"))
        if layer.format.has_tensor_scale and layer.activations == "fp4" and layer.input_encode_scale is None:
            needs.append(("an input scale", f"none (recipe '{layer.recipe}')"))
        if needs:
            raise refusal(
                "save",
                "the format cannot hold this layer.",
                layer=name,
                needs=needs,
                do="quantize the model again, with calibration for W4A4",
            )


def _check_nothing_lost(model: Any, transforms: list[tuple[TransformGroup, str]]) -> None:
    """A loaded file can declare transforms that were folded away and left no trace in the layers."""
    present = getattr(model.config, "quantization_config", None)
    entry = present if isinstance(present, dict) or present is None else present.to_dict()
    declared = list(declared_transforms(entry or {}))
    if declared and len(declared) != len(transforms):
        raise refusal(
            "save",
            "the transforms of this loaded model cannot all be read off its layers.",
            needs=[(f"the {len(declared)} declared ones ({', '.join(declared)})", f"{len(transforms)} in the layers")],
            do="use the model's own save_pretrained, which writes what was loaded",
        )


def _tensors(
    model: nn.Module, layers: Mapping[str, FP4Linear], transforms: list[tuple[TransformGroup, str]]
) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name in the file; nothing is copied."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError:
        raise missing_package("save", "transformers", "pip install 'transformers>=5.17'") from None
    prefixes = tuple(f"{name}." for name in layers)
    state = {name: t for name, t in model.state_dict().items() if not name.startswith(prefixes)}
    skipped = getattr(model, "_keys_to_ignore_on_save", None) or ()
    state = remove_tied_weights_from_state_dict({n: t for n, t in state.items() if n not in skipped}, model)
    for name, layer in layers.items():
        state |= layer_tensors(name, layer.weight_tensor(), layer.input_encode_scale, layer.bias)
    for group, first in transforms:
        name, matrix = transform_tensor(first, group)
        state[name] = matrix
    for name, tensor in state.items():
        if tensor.device.type == "meta":
            raise refusal(
                "save",
                "a tensor is not in memory.",
                tensor=name,
                needs=[("values", "the meta device (offloaded)")],
                do="load the model without offloading",
            )
    return revert_weight_conversion(model, state)


def _config(
    model: nn.Module, layers: Mapping[str, FP4Linear], transforms: list[TransformGroup], file_name: Callable[[str], str]
) -> Any:
    """The model's config with its architecture, dtype and the quantization_config of these layers."""
    config: Any = copy.deepcopy(model.config)
    if not getattr(config, "architectures", None):
        config.architectures = [type(model).__name__]
    config.dtype = getattr(model, "dtype", torch.float32)
    kinds: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        kinds.setdefault((layer.format, layer.activations), []).append(file_name(name))
    # One kind is said by class and ignore list, as producers write it; several kinds need the names of their layers.
    groups = [
        LayerGroup(format, activations, ("Linear",) if len(kinds) == 1 else tuple(names))
        for (format, activations), names in kinds.items()
    ]
    ignore = [file_name(name) for name in _unquantized(model)]
    config.quantization_config = quantization_config(groups, transforms, ignore)
    return config


def _unquantized(model: nn.Module) -> list[str]:
    """What stayed as it was, for the ignore list: Linear layers, routers and experts.

    Other software takes routers for Linear layers whatever their class, and sees fused experts one by one.
    """
    fused = dict(fused_experts(model))
    names = []
    for name, module in model.named_modules():
        router = re.search(r"Router|Gating|Gate(?![a-z])", type(module).__name__)
        if isinstance(module, nn.Linear) or (router and any(p.dim() == 2 for p in module.parameters(recurse=False))):
            names.append(name)
        elif name in fused:
            names.append(f"re:{re.escape(name)}\\..*")
    return names


def _transform_groups(
    layers: Mapping[str, FP4Linear], ignore: Iterable[str], file_name: Callable[[str], str]
) -> list[tuple[TransformGroup, str]]:
    """Each different transform with the layers behind it, and the first of them (by module name)."""
    users: dict[Any, tuple[Transform, list[str]]] = {}
    for name, layer in layers.items():
        for location, transform in (("input", layer.input_transform), ("output", layer.output_transform)):
            if transform is not None:
                users.setdefault((location, *_identity(transform)), (transform, []))[1].append(name)
    groups, count = [], {"input": 0, "output": 0}
    for (location, *_), (transform, names) in users.items():
        count[location] += 1
        letter = {"input": "v", "output": "u"}[location]
        scheme = letter if count[location] == 1 else f"{letter}{count[location]}"
        everywhere = len(names) == len(layers)
        targets = ("Linear",) if everywhere else tuple(file_name(name) for name in names)
        ignored = tuple(file_name(name) for name in ignore) if everywhere else ()
        groups.append((TransformGroup(scheme, transform, location, targets, ignored), names[0]))
    return groups


def _identity(transform: Transform) -> tuple[Any, ...]:
    return transform.factor, transform.transpose, transform.size, transform.matrix.cpu().numpy().tobytes()


def _file_names(model: nn.Module) -> Callable[[str], str]:
    """From a module's name to its name in the file: the renamings of Transformers, backwards."""
    from transformers.core_model_loading import WeightRenaming

    renamings = [c.reverse_transform() for c in reversed(_conversions(model)) if isinstance(c, WeightRenaming)]

    def rename(name: str) -> str:
        if name.startswith("re:"):
            return name
        key = name + ".weight"
        for renaming in renamings:
            key, _ = renaming.rename_source_key(key)
        return key.removesuffix(".weight")

    return rename


def _conversions(model: Any) -> list[Any]:
    """What Transformers did to the names of this model's files, or would do, as its own saving takes it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        return list(conversions)
    # Whether a prefix was in the files is known of loaded models alone.
    return [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
