"""FP4Linear in the places of the packed layers: a Transformers model on the meta device, before its weights come."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ..checkpoint import Checkpoint, LayerSpec
from ..checkpoint.config import asked_for, matches
from ..checkpoint.files import refuse
from ..checkpoint.read import INPUT_ENCODE, PACKED, SCALE, WEIGHT_ENCODE
from ..checkpoint.stored import StoredMatrix
from ..linear import FP4Linear
from ..rotated_linear import RotatedLinear
from .experts import cannot_separate, expert_names, fused_experts, separate

RENAMED = {PACKED: "codes", SCALE: "block_scale", WEIGHT_ENCODE: "encode_scale", INPUT_ENCODE: "input_encode_scale"}
"""What the tensors of a file are called in FP4Linear."""


class Builder:
    """Puts FP4Linear where the checkpoint has packed layers, in a model on the meta device."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.checkpoint: Checkpoint = options.checkpoint
        self.separated = False

    def build(self, model: Any) -> None:
        to_module = _name_map(model, self.checkpoint)
        self._separate_experts(model, to_module)
        modules = dict(model.named_modules())
        owners: dict[str, list[str]] = {}
        for stored in self.checkpoint.transforms:
            owners.setdefault(stored.module, []).append(f"{stored.scheme}_{stored.location}")
        for name, spec in self.checkpoint.layers.items():
            target = to_module(name)
            layer = self._layer(spec, modules.get(target), target)
            for child in owners.pop(name, []):
                layer.add_module(child, self.checkpoint.stored_matrix(f"{name}.{child}"))
            model.set_submodule(target, layer)
        self._rest(model, owners, to_module)

    def conversions(self, conversions: list[Any]) -> list[Any]:
        """Transformers' own conversions without the fusing of experts, and the change of names."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        kept = [
            c
            for c in conversions
            if not (
                self.separated and isinstance(c, WeightConverter) and all("experts" in p for p in c.source_patterns)
            )
        ]
        return kept + [WeightRenaming(rf"\.{theirs}", f".{ours}") for theirs, ours in RENAMED.items()]

    def _layer(self, spec: LayerSpec, module: nn.Module | None, target: str) -> FP4Linear:
        if not isinstance(module, nn.Linear):
            found = "no such module" if module is None else type(module).__name__
            raise refuse(
                self.checkpoint.path,
                "a packed layer has no place in the model.",
                [(f"a torch.nn.Linear named {target}", found)],
                "check that config.json is of this model",
                layer=spec.name,
            )
        size, has_bias = (module.out_features, module.in_features), module.bias is not None
        if size != (spec.n, spec.k) or has_bias != spec.has_bias:
            raise refuse(
                self.checkpoint.path,
                "a layer's size is not the model's.",
                [(f"{size}, bias {has_bias}", f"{(spec.n, spec.k)}, bias {spec.has_bias}")],
                "check that config.json is of this model",
                layer=spec.name,
            )
        has_input_scale = f"{spec.name}.{INPUT_ENCODE}" in self.checkpoint.tensors
        layer = FP4Linear(
            spec.k,
            spec.n,
            format=spec.format,
            activations="fp4" if has_input_scale else spec.activations,
            bias=has_bias,
            input_transform=spec.input_transform,
            output_transform=spec.output_transform,
            rule=spec.rule,
            device="meta",
            dtype=module.weight.dtype,
            backend=self.options.backend,
            weights=self.options.weights,
            batch_invariant=self.options.batch_invariant,
            name=target,
        )
        # A layer keeps the input scale that it does not use, so that saving gives the file back.
        wanted = self.options.activations
        layer.activations = spec.activations if wanted == "checkpoint" else wanted
        return layer

    def _separate_experts(self, model: Any, to_module: Any) -> None:
        fused = dict(fused_experts(model))
        pattern = re.compile(r"(.*\.experts)\.\d+\.([^.]+)$")
        found: dict[str, set[str]] = {}
        for tensor in self.checkpoint.tensors:
            layer, _, kind = tensor.rpartition(".")
            match = pattern.match(to_module(layer)) if kind in (PACKED, "weight") else None
            if match and match[1] in fused:
                found.setdefault(match[1], set()).add(match[2])
        packed = {to_module(name) for name in self.checkpoint.layers}
        if not any(name.startswith(f"{prefix}.") for prefix in found for name in packed):
            found = {}
        names = expert_names(model)
        for prefix, parts in found.items():
            problems = cannot_separate(fused[prefix])
            if parts != set(names):
                problems.append((f"experts of {', '.join(names)}", ", ".join(sorted(parts))))
            if problems:
                raise refuse(
                    self.checkpoint.path,
                    "the experts of this model are not run.",
                    problems,
                    "ask for this architecture",
                    layer=prefix,
                )
            model.set_submodule(prefix, separate(fused[prefix], names))
            self.separated = True

    def _names(self, to_module: Any) -> dict[str, str]:
        """model's module name -> the file's, for layers that are not packed."""
        layers = {tensor.rpartition(".")[0] for tensor in self.checkpoint.tensors}
        return {to_module(layer): layer for layer in layers if layer}

    def _rest(self, model: Any, owners: dict[str, list[str]], to_module: Any) -> None:
        """Layers that stay unquantized: what the config asks of them is run or refused."""
        checkpoint, in_file = self.checkpoint, self._names(to_module)
        for name, module in list(model.named_modules()):
            if isinstance(module, (FP4Linear, StoredMatrix)) or not name:
                continue
            linear = isinstance(module, nn.Linear)
            for group in checkpoint.quant.groups:
                names = {name, in_file.get(name, name)}
                if linear and asked_for(names, module, group.targets, checkpoint.quant.ignore):
                    raise refuse(
                        checkpoint.path,
                        "config and tensors disagree.",
                        [(f"packed weights ('{group.name}' targets it)", "an unquantized layer")],
                        "put the layer into ignore, or quantize it",
                        layer=name,
                    )
            self._rotate_unquantized(model, name, in_file.get(name, name), module)
        for name, module in fused_experts(model):
            stand_in = nn.Linear(1, 1, bias=False, device="meta")
            for scheme in checkpoint.quant.schemes:
                if any(matches(f"{name}.0.gate_proj", stand_in, a.targets, a.ignore) for a in scheme.apply):
                    raise refuse(
                        checkpoint.path,
                        "an online transform asks for fused experts.",
                        [("experts as layers of their own", type(module).__name__)],
                        "quantize the experts too, or leave them out of the transform",
                        layer=name,
                    )
        for owner, children in owners.items():
            holder = dict(model.named_modules()).get(to_module(owner))
            for child in children:
                if holder is not None:
                    holder.add_module(child, checkpoint.stored_matrix(f"{owner}.{child}"))

    def _rotate_unquantized(self, model: Any, name: str, in_file: str, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            n, k = module.out_features, module.in_features
            first, last, _ = self.checkpoint.online_transforms(in_file, module, n, k, also=name)
            if first is not None or last is not None:
                model.set_submodule(name, RotatedLinear(module, first, last))
            return
        for scheme in self.checkpoint.quant.schemes:
            if any(asked_for({name, in_file}, module, a.targets, a.ignore) for a in scheme.apply):
                raise refuse(
                    self.checkpoint.path,
                    f"online transform '{scheme.name}' asks for a module that is not run.",
                    [("a linear layer", type(module).__name__)],
                    "leave it out of the transform's targets",
                    layer=name,
                )


def _name_map(model: Any, checkpoint: Checkpoint) -> Any:
    """file's module name -> model's module name, by Transformers' own renamings for this architecture."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]
    known = {f"{name}.weight": True for name, _ in model.named_modules()}
    mapped: dict[str, str] = {}

    def to_module(name: str) -> str:
        if name not in mapped:
            key = f"{name}.weight"
            if key not in known:
                key, _ = rename_source_key(key, renamings, [], model.base_model_prefix, known)
            mapped[name] = key.removesuffix(".weight")
        return mapped[name]

    return to_module
