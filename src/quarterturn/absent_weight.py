"""What stands for the `weight` of a 4-bit layer: its dtype, device and shape, and a refusal of everything else.

Code of models asks layers for their weight's dtype (T5, DeepSeek V3.2), which has an answer, or multiplies by the
weight itself (Mamba), which has none: decoded values would leave out the rounding of activations and the transforms.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .errors import Refusal, refusal


class NoWeight(Refusal, AttributeError):
    """The values of a weight were asked for that a layer holds in 4 bits only."""


class AbsentWeight:
    """Not a tensor: torch functions refuse it, naming the layer. dtype: of the layer's inputs and outputs."""

    # Transformers asks tensors so before it fills them, and these are not to be filled.
    _is_hf_initialized = True

    def __init__(self, layer: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, int]) -> None:
        self.layer, self.dtype, self.device, self.shape = layer, dtype, device, torch.Size(shape)
        self.ndim, self.requires_grad = 2, False

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"weight.{name}")

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse("a part of the weight")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        flat = [*args, *(kwargs or {}).values()]
        flat += [item for item in flat if isinstance(item, (list, tuple)) for item in item]
        weight = next(item for item in flat if isinstance(item, AbsentWeight))
        weight._refuse(f"{getattr(func, '__name__', func)} of the weight")

    def _refuse(self, found: str) -> NoReturn:
        raise refusal(
            "fp4_linear",
            "the model's code uses the weight of this layer itself, which is held in 4 bits.",
            layer=self.layer or None,
            needs=[("calls of the layer; of its weight dtype, device and shape alone", found)],
            do="quantize the model with this layer in ignore",
            kind=NoWeight,
        )
