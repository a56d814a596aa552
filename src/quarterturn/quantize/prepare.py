"""The state in which a model can be walked: eval mode, experts apart; undone where nothing comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import refusal
from ..formats import FP4Format
from ..integrations.experts import cannot_separate, expert_names, fused_experts, separate
from ..integrations.weight_readers import weight_readers
from ..linear import FP4Linear
from .walk import Selection, layer_matcher, select_layers


@contextmanager
def prepared(model: nn.Module, format: FP4Format, targets: Sequence[str], ignore: Sequence[str]) -> Iterator[Selection]:
    """Select the layers of a model whose fused experts stand apart, in eval mode.

    On leaving, experts are fused again and the mode is restored, unless `settle` was called on the selection. Raises
    Refusal for a model that is quantized already, and for experts that cannot be taken apart.
    """
    _check_model(model)
    mode, selection = model.training, None
    fused = dict(_targeted_experts(model, targets, ignore))
    names = expert_names(model)
    try:
        for name, experts in fused.items():
            model.set_submodule(name, separate(experts, names))
        model.eval()
        selection = select_layers(model, format, targets, ignore)
        _check_weights_are_called(model, selection)
        # Dropped when the selection is settled: the separate layers are views, which then go one by one.
        selection.replaced = fused
        yield selection
    finally:
        for name, experts in fused.items():
            model.set_submodule(name, experts)
        if selection is None or not selection.settled:
            model.train(mode)


def _check_model(model: nn.Module) -> None:
    quantized = next((name for name, m in model.named_modules() if isinstance(m, FP4Linear)), None)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantized is not None or config:
        raise refusal(
            "quantize",
            "the model is quantized already.",
            layer=quantized,
            needs=[("a model in floating point", "FP4Linear layers" if quantized else "a quantization_config")],
            do="start from the original model",
        )


def _check_weights_are_called(model: nn.Module, selection: Selection) -> None:
    for name, method in weight_readers(model, selection.layers).items():
        raise refusal(
            "quantize",
            "the model's code uses the weight of this layer itself.",
            layer=name,
            needs=[("a layer that is called, so that its input can be rounded and turned", f"its weight in {method}")],
            do=f"put it into ignore: 're:.*{name.rsplit('.', 1)[-1]}$'",
        )


def _targeted_experts(
    model: nn.Module, targets: Sequence[str], ignore: Sequence[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Fused experts whose layers would be targets if they stood alone."""
    match, names = layer_matcher(), expert_names(model)
    # Matching looks at a layer's class and name only.
    layer = nn.Linear(1, 1, bias=False, device=torch.device("meta"))
    for name, experts in fused_experts(model):
        if not match(name, experts, [name], ignore) or not any(
            match(f"{name}.0.{part}", layer, targets, ignore) for part in names
        ):
            continue
        problems = cannot_separate(experts)
        if problems:
            raise refusal(
                "quantize",
                f"the experts of this block ({type(experts).__name__}) cannot be taken apart into Linear layers.",
                layer=name,
                needs=problems,
                do=f"put them into ignore: 're:.*{name.rsplit('.', 1)[-1]}.*'",
            )
        yield name, experts
