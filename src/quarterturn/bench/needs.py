"""What memory a benchmark of a whole model needs, reckoned before anything is made, and the refusal where it is more
than there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import e4m3_layout
from ..errors import refusal
from ..formats import get_format
from ..linear import FP4Linear
from ..machine import free_memory
from ..weight_layout import stored_width
from .random_model import FourBits, linear_layers, random_weight

_SPARE = {"cuda": 1 << 30, "cpu": 1 << 28}
"""Bytes for what is not counted one by one: contexts, workspaces, graphs, compiled code."""


def needed(model: Any, device: torch.device, made: FourBits | None, batch: int, cache: int, prompt: int) -> int:
    """Bytes that a `meta_model` takes with its caches and activations, in bf16 or as `made` says.

    The larger counts of a decode step (batch sequences, a cache of `cache` tokens) and of a prompt (one sequence).
    """
    config = model.config.get_text_config()
    heads, pairs = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = linear_layers(model)
    inside = {id(layer.weight) for layer in layers.values()}
    rest = {id(p): p.nbytes for p in model.parameters() if id(p) not in inside}
    weights = sum(_linear_bytes(layer, _kept(made, device), made) for layer in layers.values())
    # Twice, since the eager step that a captured one is checked against has a cache too.
    caches = 4 * config.num_hidden_layers * pairs * head * max(2 * batch * cache, prompt)
    wide = 4 * config.hidden_size + 3 * config.intermediate_size + 2 * (heads + 2 * pairs) * head
    activations = 2 * prompt * wide + 3 * 4 * batch * config.vocab_size
    largest = max((4 * layer.weight.numel() for layer in layers.values()), default=0)
    return sum(rest.values()) + weights + caches + activations + largest + _SPARE.get(device.type, 1 << 30)


def _kept(made: FourBits | None, device: torch.device) -> str:
    """How the weights of a 4-bit model are kept beside their codes there: what a small layer makes of its own."""
    if made is None:
        return "bf16"
    k = 256
    small = FP4Linear.from_tensor(
        random_weight(64, k, get_format(made.format), device), activations=made.activations, weights=made.weights,
        backend=made.backend, input_encode_scale=1.0, batch_invariant=made.batch_invariant,
    )  # fmt: skip
    return "packed" if small.values is None else str(small.values.dtype).removeprefix("torch.")


def _linear_bytes(layer: torch.nn.Linear, kept: str, made: FourBits | None) -> float:
    n, k = layer.out_features, layer.in_features
    if made is None:
        return 2 * n * k
    fmt = get_format(made.format)
    fragments, e4m3 = 4 * n * stored_width(n, k, fmt), n * e4m3_layout.stored_width(n, k)
    sizes = {"packed": 0, "int32": fragments, "float8_e4m3fn": e4m3, "float32": 4 * n * k}
    beside = sizes.get(kept, 2 * n * k)
    return beside if kept == "int32" else n * k * fmt.bits_per_value / 8 + beside


def check(name: str, need: Callable[[int], int], layers: int, device: torch.device, another: str = "") -> None:
    """Raise Refusal where a model of `layers` layers needs more bytes than the device has free.

    need: bytes by the number of layers. another: a remedy other than fewer layers, where there is one.
    """
    found, whole = free_memory(device), need(layers)
    if found is None or whole <= found:
        return
    # All that does not grow with the layers is in the first.
    first = need(1)
    a_layer = (whole - first) / max(layers - 1, 1)
    fit = 0 if first > found else min(layers - 1, 1 + int((found - first) / a_layer))
    remedy = f"pass --layers {fit}" if fit else "take a smaller shape, --batch, --cache or --prompt"
    raise refusal(
        "bench",
        f"the memory does not reach for {name} with {layers} layers.",
        needs=[(f"{whole / 1e9:.1f} GB on {device}", f"{found / 1e9:.1f} GB free")],
        do=remedy + (f", or {another}" if another else ""),
    )
