"""A model of a given shape with random weights, in bf16 or in 4 bits, made on its device module by module.

No weight is ever there in two forms beyond one layer's, so the most memory that building takes is the model's own and
one layer's more. In 4 bits every linear layer but the output embeddings becomes an FP4Linear, as `quantize` would have
it. Codes are uniform and scales lie within a factor of 4: random bits, since zeros run faster than a model's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..formats import E2M1_VALUES, FP4Format, get_format
from ..linear import FP4Linear
from ..quantize.walk import plan_transforms
from ..sharing import tie
from ..tensor import FP4Tensor, decode_block_scale
from ..transforms import Transform

SPREAD = 0.02
"""Standard deviation of the weights."""

_INPUT_ENCODE = 448 * 6 / 5.0
"""The encode scale of inputs whose largest magnitude is 5, as behind a norm."""

Advance = Callable[[int], None]


@dataclass(frozen=True)
class FourBits:
    """How the linear layers of a 4-bit model are made; the words are FP4Linear's and quantize's."""

    format: str = "nvfp4"
    activations: str = "fp4"
    transform: str = "none"
    weights: str = "auto"
    backend: str = "auto"
    batch_invariant: bool = False


def meta_model(config: Any) -> Any:
    """The bf16 model of a config on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """The layers that are in 4 bits in a 4-bit model, by name, in the model's order."""
    head = model.get_output_embeddings()
    return {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m is not head}


def filled(model: Any, device: torch.device, made: FourBits | None = None, advance: Advance = lambda _: None) -> Any:
    """A `meta_model` with random weights on a device, its linear layers in 4 bits where `made` says how.

    advance: called with 1 after every linear layer. Raises Refusal where a transform, a format or a backend does not
    fit.
    """
    layers = linear_layers(model)
    if made is not None:
        fmt = get_format(made.format)
        transforms = plan_transforms(made.transform, layers, fmt)
        for name, layer in layers.items():
            model.set_submodule(name, _in_four_bits(name, layer, made, transforms[name], device))
            advance(1)
        tie(model, FP4Linear)
    known: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):  # what it holds follows from the config, and is not there on meta
            model.set_submodule(name, type(module)(module.config).to(device))
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                if parameter not in known:
                    known[parameter] = nn.Parameter(_random(parameter, key, device), False)
                module._parameters[key] = known[parameter]
        advance(int(name in layers and made is None))
    return model


def _random(like: Tensor, key: str, device: torch.device) -> Tensor:
    """Matrices and biases spread around 0; the weights of norms are 1."""
    if like.dim() == 1 and key == "weight":
        return torch.ones(like.shape, dtype=like.dtype, device=device)
    return torch.empty(like.shape, dtype=like.dtype, device=device).normal_(std=SPREAD)


def _in_four_bits(
    name: str, layer: nn.Linear, made: FourBits, transform: Transform | None, device: torch.device
) -> FP4Linear:
    bias = None if layer.bias is None else _random(layer.bias, "bias", device)
    scaled = made.format == "nvfp4" and made.activations == "fp4"
    return FP4Linear.from_tensor(
        random_weight(layer.out_features, layer.in_features, get_format(made.format), device),
        bias=bias,
        input_encode_scale=_INPUT_ENCODE if scaled else None,
        activations=made.activations,
        input_transform=transform,
        weights=made.weights,
        backend=made.backend,
        batch_invariant=made.batch_invariant,
        name=name,
    )


def random_weight(n: int, k: int, fmt: FP4Format, device: torch.device) -> FP4Tensor:
    """A weight (n, k) of random codes, with values of standard deviation SPREAD (MXFP4: within a factor of 2)."""
    codes = torch.randint(0, 256, fmt.codes_shape(n, k), dtype=torch.uint8, device=device)
    first, last = (119, 121) if fmt.has_e8m0_scale else (0x70, 0x7E)
    scale = torch.randint(first, last + 1, fmt.scale_shape(n, k), dtype=torch.uint8, device=device)
    encode = None
    if fmt.has_tensor_scale:
        scales = decode_block_scale(torch.arange(first, last + 1, dtype=torch.uint8), fmt).double()
        values = torch.tensor(E2M1_VALUES, dtype=torch.float64)
        size = float(values.square().mean().sqrt() * scales.square().mean().sqrt())
        encode = torch.full((1,), size / SPREAD, dtype=torch.float32, device=device)
    return FP4Tensor.from_encode(codes, scale.view(fmt.scale_dtype), encode, fmt)
