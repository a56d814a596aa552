"""An FP4 checkpoint as an ordinary Transformers model: module names unchanged, `.generate()` working.

Transformers builds the model on the meta device; our quantizer class, registered under a name of our own, replaces the
quantized linears by FP4Linear before the weights come, and Transformers streams the files into them. On the way the
tensors take the library's names (and the file's again when the model is saved), and keep their bytes.

Extension points used: register_quantizer, register_quantization_config, update_weight_conversions.
"""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoint import Checkpoint, LayerSpec, open_checkpoint
from ..checkpoint.config import matches
from ..checkpoint.files import refuse
from ..checkpoint.read import INPUT_ENCODE, PACKED, SCALE, WEIGHT_ENCODE
from ..errors import missing_package, refusal
from ..formats import FP4Format
from ..linear import Explanation, FP4Linear, RotatedLinear
from .experts import cannot_separate, expert_names, fused_experts, separate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHOD = "quarterturn"
RENAMED = {PACKED: "codes", SCALE: "block_scale", WEIGHT_ENCODE: "encode_scale", INPUT_ENCODE: "input_encode_scale"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load(
    path: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    activations: str = "checkpoint",
    backend: str = "auto",
    weights: str = "auto",
    device_map: str | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a compressed-tensors FP4 checkpoint with its online transforms and exact arithmetic.

    path: a folder, or a hub id. device: 'auto' (the GPU where there is one) or a device; device_map: as Transformers
    takes it, for several devices. dtype: of everything that is not FP4; 'auto' is the checkpoint's own.
    activations: 'checkpoint' runs what the file says, 'bf16' leaves activations unquantized (W4A16).
    backend: 'auto', or a name that is then run or refused. weights: 'packed', 'decoded', or 'auto'.
    Returns the model in evaluation mode, without gradients. Raises CheckpointRefusal or BackendRefusal: nothing that
    the file asks for is left out silently.
    """
    transformers = _transformers()
    checkpoint = open_checkpoint(path)
    config = _config(transformers, checkpoint)
    config.quantization_config = _config_class()(checkpoint, activations, backend, weights)
    where: dict[str, Any] = {"device_map": device_map} if device_map is not None else {}
    model_class = getattr(transformers, (config.architectures or [""])[0], None) or transformers.AutoModelForCausalLM
    model, info = model_class.from_pretrained(
        str(checkpoint.path),
        config=config,
        dtype=_dtype(dtype, checkpoint),
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **where,
    )
    _check_loaded(checkpoint, model, info)
    if device_map is None:
        target = ("cuda" if torch.cuda.is_available() else "cpu") if str(device) == "auto" else device
        model.to(target)
    model.requires_grad_(False)
    result: PreTrainedModel = model.eval()
    return result


def explain(model: nn.Module, dtype: torch.dtype | None = None) -> list[Explanation]:
    """What runs each FP4 layer of a model, and why, in the model's order. dtype: of the inputs, default the model's."""
    own = dtype or getattr(model, "dtype", torch.bfloat16)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, FP4Linear):
            module.name = module.name or name
            found.append(module.explain(own))
    return found


class StoredMatrix(nn.Module):
    """The matrix of a transform as the file holds it, so that saving writes it back; nothing computes with it."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        super().__init__()
        for name, info in checkpoint.tensors.items():
            if name.startswith(f"{prefix}."):
                self.register_buffer(name.removeprefix(f"{prefix}."), checkpoint.read(name).to("meta"))
                assert info.shape

    def _apply(self, fn: Any, recurse: bool = True) -> StoredMatrix:
        super()._apply(lambda t: t.to(fn(t).device), recurse)
        return self


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise missing_package("load", "transformers", "pip install 'quarterturn[models]'") from None
    _register()
    return transformers


def _config(transformers: Any, checkpoint: Checkpoint) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(str(checkpoint.path), trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refuse(checkpoint.path / "config.json", "Transformers does not know this model.",
                     [("a model type of the installed Transformers; code in a checkpoint is not run", reason)],
                     "update Transformers, or use a model that it has") from error  # fmt: skip


def _dtype(dtype: str | torch.dtype, checkpoint: Checkpoint) -> torch.dtype:
    text = checkpoint.config.get("text_config") or {}
    own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or text.get("dtype") or "bfloat16"
    wanted = str(own if dtype == "auto" else dtype).removeprefix("torch.")
    if wanted not in DTYPES:
        raise refusal("load", "the dtype is not run.", needs=[(f"auto or one of {', '.join(DTYPES)}", wanted)],
                      do="pass dtype='bfloat16'")  # fmt: skip
    return DTYPES[wanted]


@cache
def _config_class() -> Any:
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class QuarterturnConfig(QuantizationConfigMixin):  # type: ignore[misc]
        """Carries an opened checkpoint through from_pretrained; writes itself as what the checkpoint held."""

        def __init__(self, checkpoint: Checkpoint, activations: str, backend: str, weights: str) -> None:
            self.quant_method = METHOD
            self.checkpoint = checkpoint
            self.activations, self.backend, self.weights = activations, backend, weights

        def to_dict(self) -> dict[str, Any]:
            from ..checkpoint.config import quantization_entry

            return dict(quantization_entry(self.checkpoint.config) or {})

        def get(self, key: str, default: Any = None) -> Any:
            """As a dict would: Transformers asks a config it was given for its quant_method this way."""
            return getattr(self, key, default)

        def __deepcopy__(self, memo: Any) -> QuarterturnConfig:
            return self

    return QuarterturnConfig


@cache
def _register() -> None:
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.auto import register_quantization_config, register_quantizer

    class QuarterturnQuantizer(HfQuantizer):  # type: ignore[misc]
        """Replaces linears before the weights come, and checks them after."""

        requires_calibration = True

        def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
            super().__init__(quantization_config, **kwargs)
            self.builder = _Builder(quantization_config)

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            self.builder.build(model)
            return model

        def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
            return self.builder.conversions(weight_conversions)

        def is_serializable(self, safe_serialization: Any = None) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return False

        @property
        def is_compileable(self) -> bool:
            return True

    register_quantization_config(METHOD)(_config_class())
    register_quantizer(METHOD)(QuarterturnQuantizer)


class _Builder:
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
                layer.add_module(child, StoredMatrix(self.checkpoint, f"{name}.{child}"))
            model.set_submodule(target, layer)
        self._rest(model, owners, to_module)

    def conversions(self, conversions: list[Any]) -> list[Any]:
        """Transformers' own conversions without the fusing of experts, and the change of names."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        kept = [c for c in conversions if not (self.separated and isinstance(c, WeightConverter)
                                               and all("experts" in p for p in c.source_patterns))]  # fmt: skip
        return kept + [WeightRenaming(rf"\.{theirs}$", f".{ours}") for theirs, ours in RENAMED.items()]

    def _layer(self, spec: LayerSpec, module: nn.Module | None, target: str) -> FP4Linear:
        if not isinstance(module, nn.Linear):
            found = "no such module" if module is None else type(module).__name__
            raise refuse(self.checkpoint.path, "a packed layer has no place in the model.",
                         [(f"a torch.nn.Linear named {target}", found)],
                         "check that config.json is of this model", layer=spec.name)  # fmt: skip
        size, has_bias = (module.out_features, module.in_features), module.bias is not None
        if size != (spec.n, spec.k) or has_bias != spec.has_bias:
            raise refuse(self.checkpoint.path, "a layer's size is not the model's.",
                         [(f"{size}, bias {has_bias}", f"{(spec.n, spec.k)}, bias {spec.has_bias}")],
                         "check that config.json is of this model", layer=spec.name)  # fmt: skip
        wanted = self.options.activations
        return FP4Linear(
            spec.k, spec.n, format=spec.format, activations=spec.activations if wanted == "checkpoint" else wanted,
            bias=has_bias, input_transform=spec.input_transform, output_transform=spec.output_transform,
            rule=spec.rule, device="meta", dtype=module.weight.dtype, backend=self.options.backend,
            weights=self.options.weights, name=target,
        )  # fmt: skip

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
                raise refuse(self.checkpoint.path, "the experts of this model are not run.", problems,
                             "ask for this architecture", layer=prefix)  # fmt: skip
            model.set_submodule(prefix, separate(fused[prefix], names))
            self.separated = True

    def _rest(self, model: Any, owners: dict[str, list[str]], to_module: Any) -> None:
        """Layers that stay unquantized: what the config asks of them is run or refused."""
        checkpoint = self.checkpoint
        for name, module in list(model.named_modules()):
            if isinstance(module, (FP4Linear, StoredMatrix)) or not name:
                continue
            linear = isinstance(module, nn.Linear)
            for group in checkpoint.quant.groups:
                if linear and matches(name, module, group.targets, checkpoint.quant.ignore):
                    raise refuse(checkpoint.path, "config and tensors disagree.",
                                 [(f"packed weights ('{group.name}' targets it)", "an unquantized layer")],
                                 "put the layer into ignore, or quantize it", layer=name)  # fmt: skip
            self._rotate_unquantized(model, name, module)
        for name, module in fused_experts(model):
            stand_in = nn.Linear(1, 1, bias=False, device="meta")
            for scheme in checkpoint.quant.schemes:
                if any(matches(f"{name}.0.gate_proj", stand_in, a.targets, a.ignore) for a in scheme.apply):
                    raise refuse(checkpoint.path, "an online transform asks for fused experts.",
                                 [("experts as layers of their own", type(module).__name__)],
                                 "quantize the experts too, or leave them out of the transform", layer=name)  # fmt: skip
        for owner, children in owners.items():
            holder = dict(model.named_modules()).get(to_module(owner))
            for child in children:
                if holder is not None:
                    holder.add_module(child, StoredMatrix(checkpoint, f"{owner}.{child}"))

    def _rotate_unquantized(self, model: Any, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            first, last, _ = self.checkpoint.online_transforms(name, module, module.out_features, module.in_features)
            if first is not None or last is not None:
                model.set_submodule(name, RotatedLinear(module, first, last))
            return
        for scheme in self.checkpoint.quant.schemes:
            if any(matches(name, module, apply.targets, apply.ignore) for apply in scheme.apply):
                raise refuse(self.checkpoint.path, f"online transform '{scheme.name}' asks for a module that is not run.",
                             [("a linear layer", type(module).__name__)],
                             "leave it out of the transform's targets", layer=name)  # fmt: skip


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


def _check_loaded(checkpoint: Checkpoint, model: Any, info: dict[str, Any]) -> None:
    missing, mismatched = sorted(info["missing_keys"]), sorted(map(str, info["mismatched_keys"]))
    layers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, FP4Linear))
    unexpected = sorted(info["unexpected_keys"])
    ours = [key for key in unexpected if key.startswith(layers)]
    for headline, keys in (("tensors are missing.", missing), ("tensors are misshapen.", mismatched),
                           ("tensors of FP4 layers were not used.", ours)):  # fmt: skip
        if keys:
            shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            raise refuse(checkpoint.path, headline, [("every tensor of the model, of its shape", shown)],
                         "make or fetch the checkpoint again")  # fmt: skip
    if unexpected:
        warnings.warn(f"{checkpoint.path}: {len(unexpected)} tensors have no place in the model and were not loaded: "
                      f"{', '.join(unexpected[:5])}", stacklevel=3)  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, FP4Linear):
            if module.codes.device.type != "meta":
                module.weight_tensor().validate(name)
            module.refresh()
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta" and not bool(torch.isfinite(parameter.sum(dtype=torch.float32))):
            if not bool(torch.isfinite(parameter).all()):
                raise refuse(checkpoint.path, "a tensor is not finite.", [("finite numbers", "NaN or Inf")],
                             "make or fetch the checkpoint again", tensor=name)  # fmt: skip


__all__ = ["FP4Format", "explain", "load"]
