"""Our classes in Transformers' registry of quantizers, under a name of our own. Imported when a model is loaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint import Checkpoint
from ..checkpoint.config import quantization_entry
from ..checkpoint.files import refuse
from ..linear import FP4Linear
from .builder import Builder
from .fitting import check_headers, shapes
from .weight_readers import weight_readers

METHOD = "quarterturn"


@register_quantization_config(METHOD)
class QuarterturnConfig(QuantizationConfigMixin):
    """Carries an opened checkpoint through from_pretrained; writes itself as what the checkpoint held."""

    def __init__(
        self, checkpoint: Checkpoint, activations: str, backend: str, weights: str, batch_invariant: bool
    ) -> None:
        self.quant_method = METHOD
        self.checkpoint = checkpoint
        self.activations, self.backend, self.weights = activations, backend, weights
        self.batch_invariant = batch_invariant

    def to_dict(self) -> dict[str, Any]:
        return dict(quantization_entry(self.checkpoint.config) or {})

    def get(self, key: str, default: Any = None) -> Any:
        """As a dict would: Transformers asks a config it was given for its quant_method this way."""
        return getattr(self, key, default)

    def __deepcopy__(self, memo: Any) -> QuarterturnConfig:
        return self


@register_quantizer(METHOD)
class QuarterturnQuantizer(HfQuantizer):
    """Replaces linears before the weights come, and takes part in the change of names."""

    requires_calibration = True

    def __init__(self, quantization_config: QuarterturnConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.builder = Builder(quantization_config)
        self.shapes: dict[str, torch.Size] = {}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.builder.build(model)
        layers = [name for name, module in model.named_modules() if isinstance(module, FP4Linear)]
        for name, method in weight_readers(model, layers).items():
            raise refuse(
                self.builder.checkpoint.path,
                "the model's code uses the weight of this layer itself, which the file holds in 4 bits.",
                [("a layer that is called, so that its input can be rounded and turned", f"its weight in {method}")],
                "make the checkpoint with this layer in ignore",
                layer=name,
            )
        check_headers(model, self.builder.checkpoint, self.builder.conversions(get_model_conversion_mapping(model)))
        self.shapes = shapes(model)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *_: Any) -> list[Any]:
        return self.builder.conversions(weight_conversions)

    def is_serializable(self, safe_serialization: Any = None) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True
