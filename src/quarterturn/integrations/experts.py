"""Experts one by one: the Linear layers of a mixture that Transformers 5 builds as two fused tensors.

Transformers 5 holds all experts of a block in `gate_up_proj` (E, 2I, H) and `down_proj` (E, H, I), and writes and reads
them as one tensor per expert and layer. Checkpoints name them per expert too, and so does everything that quantizes
them, so a fused block is taken apart into `experts.<i>.gate_proj`, `.up_proj`, `.down_proj` (or the names that the
model's files use, such as Mixtral's w1, w3, w2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

DEFAULT_NAMES = ("gate_proj", "up_proj", "down_proj")


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)), with three Linear layers under the names of the model's files."""

    def __init__(self, layers: tuple[nn.Module, nn.Module, nn.Module], names: tuple[str, str, str], act: nn.Module):
        super().__init__()
        for name, layer in zip(names, layers, strict=True):
            self.add_module(name, layer)
        self.names, self.act_fn = names, act

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class SeparateExperts(nn.ModuleList):
    """Takes the place of a fused block: children '0' .. 'E-1', each an Expert; same arguments, same result."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (T, H), top_k_index and top_k_weights (T, top_k) -> (T, H)."""
        total = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self):
            tokens, position = torch.where(top_k_index == index)
            if tokens.numel():
                result = expert(hidden_states[tokens]) * top_k_weights[tokens, position, None]
                total.index_add_(0, tokens, result.to(total.dtype))
        return total


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that holds several experts in tensors of its own, whatever their form."""
    for name, module in model.named_modules():
        owns_matrices = any(p.dim() >= 2 for p in module.parameters(recurse=False))
        if "Expert" in type(module).__name__ and owns_matrices and not isinstance(module, nn.Linear):
            yield name, module


def cannot_separate(experts: Any) -> list[tuple[str, str]]:
    """Why a fused block cannot be taken apart, as (needed, found) pairs; empty where it can."""
    gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor) and gate_up.dim() == 3 and down.dim() == 3):
        shapes = {name: tuple(p.shape) for name, p in experts.named_parameters(recurse=False)}
        return [("gate_up_proj (E, 2I, H) and down_proj (E, H, I)", str(shapes))]
    problems = []
    for flag, wanted, meaning in (
        ("has_gate", True, "a gate"),
        ("has_bias", False, "no bias"),
        ("is_transposed", False, "weights stored (out, in)"),
        ("is_concatenated", True, "gate and up one after the other"),
    ):
        if getattr(experts, flag, wanted) != wanted:
            problems.append((meaning, f"{flag}={getattr(experts, flag)}"))
    gating = getattr(type(experts), "_apply_gate", None)
    if gating is not None and gating.__module__ != "transformers.integrations.moe":
        problems.append(("act(gate) * up", f"a gating of its own in {type(experts).__name__}"))
    if not callable(getattr(experts, "act_fn", None)):
        problems.append(("an activation act_fn", "none"))
    if not problems and (gate_up.shape[1] != 2 * down.shape[2] or gate_up.shape[2] != down.shape[1]):
        problems.append(("shapes that fit", f"{tuple(gate_up.shape)} and {tuple(down.shape)}"))
    return problems


def expert_names(model: nn.Module) -> tuple[str, str, str]:
    """What the model's files call the gate, up and down layer of an expert."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
    except (ImportError, AttributeError):
        return DEFAULT_NAMES
    found: dict[str, list[str]] = {}
    for conversion in conversions:
        for target in conversion.target_patterns:
            sources = [s for s in conversion.source_patterns if ".*." in s and s.removesuffix("$").endswith(".weight")]
            found.setdefault(target.rsplit(".", 1)[-1], [s.rsplit(".", 2)[-2] for s in sources])
    gate_up, down = found.get("gate_up_proj", []), found.get("down_proj", [])
    return (gate_up[0], gate_up[1], down[0]) if len(gate_up) == 2 and len(down) == 1 else DEFAULT_NAMES


def separate(
    experts: Any, names: tuple[str, str, str] = DEFAULT_NAMES, linear: Callable[[Tensor], nn.Module] | None = None
) -> SeparateExperts:
    """A SeparateExperts of a fused block for which `cannot_separate` is empty; the weights are views, not copies.

    `linear` makes a layer from a weight (N, K), by default a torch.nn.Linear without bias.
    """
    make = linear or _linear
    gate_up, down, act = experts.gate_up_proj, experts.down_proj, experts.act_fn
    half = gate_up.shape[1] // 2
    return SeparateExperts(
        Expert((make(gate_up[i, :half]), make(gate_up[i, half:]), make(down[i])), names, act)
        for i in range(gate_up.shape[0])
    )


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return layer
