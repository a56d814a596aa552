"""The quantization config that vLLM asks: who runs each layer of a claimed checkpoint.

FP4 layers and FP4 experts are ours. Layers of other formats, unquantized layers and an FP8 KV cache go to vLLM's own
compressed-tensors classes, which this config extends, behind our transforms where the file asks for them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from ...checkpoint.files import refuse, resolve
from ...checkpoint.read import INPUT_ENCODE
from .claims import METHOD, Machine, claims, fp4_groups, our_backend
from .contents import Contents
from .linear import FP4LinearMethod, RotatedMethod

logger = logging.getLogger("vllm.quarterturn")


class QuarterturnConfig(CompressedTensorsConfig):
    """vLLM's compressed-tensors config, with the FP4 layers run here. Must be importable by name: it is pickled."""

    contents: Contents | None = None

    def get_name(self) -> str:
        """The name it is registered under."""
        return "quarterturn"

    @classmethod
    def get_min_capability(cls) -> int:
        """Of an NVIDIA GPU: what the backends need is asked layer by layer."""
        return 75

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuarterturnConfig:
        """Of the `quantization_config` entry; transforms are ours, so vLLM's classes do not see them."""
        made = super().from_config({**config, "transform_config": None})
        assert isinstance(made, QuarterturnConfig)
        return made

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Our name for a checkpoint to claim, None for every other one."""
        if claims(hf_quant_cfg, user_quant, machine()):
            return "quarterturn"
        if user_quant == "quarterturn" and not fp4_groups(hf_quant_cfg):
            found = hf_quant_cfg.get("quant_method") if isinstance(hf_quant_cfg, dict) else None
            raise refuse(
                "config.json",
                "--quantization quarterturn was asked for, and this is not a checkpoint that it runs.",
                [(f"quant_method {METHOD} with an NVFP4 or MXFP4 group", str(found))],
                "leave --quantization out: vLLM then takes its own method",
            )
        return None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Called once, in the process that starts the engine: the file is opened here, so that it refuses early."""
        folder = resolve(model_name, revision)
        self.contents = Contents(Path(folder).absolute())
        self.contents.checkpoint  # noqa: B018

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """vLLM's names of modules, where they are not the file's."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self._contents().rename(hf_to_vllm_mapper.map_name)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:  # type: ignore[override, unused-ignore]
        """Takes out of the stream of weights what is no weight: the transforms' matrices, which are stored once and
        read from the file, and tensors of files that lie in the folder and are not the model's. Raises
        CheckpointRefusal, here or while weights are read, for a reload behind other transforms."""
        first, now = self._contents().first_load, get_current_vllm_config_or_none()
        if now is not None:
            # vLLM keeps the path of a reload there.
            first.check_folder(Path(now.model_config.model).absolute())
        dropped = dict.fromkeys(first.suffixes)
        mapper = super().get_checkpoint_weight_mapper() | WatchingMapper(first.check_tensor, dropped)
        strays = self._contents().stray_tensors()
        if strays:
            files = ", ".join(sorted(set(strays.values())))
            logger.warning("quarterturn: not loaded, since config.json's model has no such tensors: %s", files)
            pattern = re.compile(f"^(?:{'|'.join(map(re.escape, strays))})$")
            mapper |= WeightsMapper(orig_to_new_regex={pattern: None})
        return mapper

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Who runs a layer that vLLM calls `prefix`. Raises Refusal for what the file asks and nobody runs."""
        if isinstance(layer, LinearBase):
            return self._linear(layer, prefix)
        if isinstance(layer, RoutedExperts):
            from .experts import expert_method

            ours = expert_method(layer, prefix, self._contents(), _backend)
            return ours or super().get_quant_method(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            self._refuse_embedding(layer, prefix)
        return super().get_quant_method(layer, prefix)

    def _linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        contents = self._contents()
        names = contents.parts(prefix, self.packed_modules_mapping)
        specs = contents.specs(prefix, names)
        if specs is not None:
            scaled = any(f"{name}.{INPUT_ENCODE}" in contents.checkpoint.tensors for name in names)
            return FP4LinearMethod(specs, prefix, _backend(specs[0].format.name, specs[0].activations), scaled)
        others = contents.checkpoint.quant.others
        inner = super().get_quant_method(layer, prefix) if others else UnquantizedLinearMethod()
        assert inner is not None
        stand_in = torch.nn.Linear(1, 1, bias=False, device="meta")
        if contents.asks(names, stand_in) is None:
            return inner
        n, k = layer.output_size, layer.input_size
        first, last = contents.transforms_of(prefix, names, stand_in, n, k)
        return RotatedMethod(inner, prefix, first, last)

    def _refuse_embedding(self, layer: torch.nn.Module, prefix: str) -> None:
        """Embeddings and heads stay as they are; a file that asks for more is refused."""
        contents = self._contents()
        name = contents.name_in_file(prefix)
        kind = type(layer).__name__
        if name in contents.checkpoint.layers:
            needs = [("an unquantized embedding or head", f"FP4 weights for a {kind}")]
        elif scheme := contents.asks([name], torch.nn.Linear(1, 1, bias=False, device="meta")):
            # A head is a linear layer to compressed-tensors, an embedding is not.
            if "Head" not in kind:
                return
            needs = [("no online transform of the head", f"'{scheme}' asks for it")]
        else:
            return
        raise refuse(
            contents.folder,
            "a head or embedding asks for what the plugin does not run.",
            needs,
            "leave it out of targets, or load the file with quarterturn.load",
            layer=prefix,
        )

    def _contents(self) -> Contents:
        assert self.contents is not None, "vLLM did not call maybe_update_config"
        return self.contents


class WatchingMapper(WeightsMapper):
    """A mapper that shows every tensor, by its name in the file, to `look`; joined with others, it stays one."""

    def __init__(self, look: Callable[[str, torch.Tensor], None], dropped: Mapping[str, None]) -> None:
        super().__init__(orig_to_new_suffix=dropped)
        self._look = look

    def __or__(self, other: WeightsMapper) -> WatchingMapper:
        return self._with(WeightsMapper.__or__(self, other))

    def __ror__(self, other: WeightsMapper) -> WatchingMapper:
        return self._with(WeightsMapper.__or__(other, self))

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors that are kept, by vLLM's names."""
        return super().apply(self._shown(weights))

    def _shown(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        for name, data in weights:
            self._look(name, data)
            yield name, data

    def _with(self, joined: WeightsMapper) -> WatchingMapper:
        made = copy(self)
        for entry in fields(WeightsMapper):
            setattr(made, entry.name, getattr(joined, entry.name))
        return made


def machine() -> Machine:
    """What vLLM found to run on."""
    if current_platform.is_cuda():
        found = current_platform.get_device_capability()
        return Machine("cuda", None if found is None else (found.major, found.minor))
    return Machine("cpu" if current_platform.is_cpu() else str(current_platform.device_name))


def _backend(format_name: str, activations: str) -> str:
    """Our backend by --linear-backend, or by its override for this kind of layer."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return "auto"
    kernel = config.kernel_config
    kind = format_name + {"nvfp4": "_w4a4" if activations == "fp4" else "_w4a16"}.get(format_name, "")
    per_quant = getattr(kernel, "linear_backend_per_quant", None) or {}
    return our_backend(str(per_quant.get(kind) or kernel.linear_backend))
