"""Input scales: texts run through the model while hooks record the largest magnitude each layer's input reaches.

What is recorded is the amax of z = x V, the input after its transform, because z is what gets quantized. The model
runs as it is, unquantized. Layers that read the same input share the largest amax, as their engines fuse them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import refusal
from ..ops import rotate
from ..texts import builtin_text
from ..transforms import Transform
from .walk import expert_siblings, shared_groups

Texts = Sequence[str] | Tensor | None
Transforms = Mapping[str, Transform | None]


def token_batches(
    calibration: Texts,
    tokenizer: Any,
    vocabulary: int | None,
    samples: int = 8,
    length: int = 256,
    context: int | None = None,
) -> list[Tensor]:
    """Token ids (1, T) to run one after the other.

    calibration: texts (each cut to `length` tokens), ids (T,) or (B, T), or None for `samples` pieces of the built-in
    text. Nothing is longer than `context`, the model's. Raises Refusal where there is nothing to run, no tokenizer for
    texts or one that is not the model's, or an id outside the vocabulary.
    """
    length = length if context is None else min(length, context)
    if isinstance(calibration, Tensor):
        batches = _given_ids(calibration)
    elif tokenizer is None:
        raise refusal(
            "quantize",
            "texts cannot be turned into tokens.",
            needs=[("a tokenizer for the calibration texts", "none")],
            do="put the tokenizer's files into the model's folder, pass tokenizer=, or give calibration= token ids",
        )
    elif calibration is None:
        _check_tokenizer(tokenizer, vocabulary)
        ids = _encode(tokenizer, builtin_text())
        step = max(length, ids.numel() // samples)
        batches = [ids[None, start : start + length] for start in range(0, ids.numel(), step)][:samples]
    else:
        _check_tokenizer(tokenizer, vocabulary)
        texts = [calibration] if isinstance(calibration, str) else calibration
        batches = [_encode(tokenizer, text)[None, :length] for text in texts]
    batches = [batch[:, :context] for batch in batches if batch.numel()]
    _check_batches(batches, vocabulary)
    if not isinstance(calibration, Tensor) and sum(batch.numel() for batch in batches) < 2:
        raise refusal(
            "quantize",
            "the calibration texts give next to no tokens.",
            needs=[("at least 2 tokens", "1")],
            do="give longer texts, or the tokenizer of this model",
        )
    return batches


def check_sizes(samples: int, length: int) -> None:
    """Raise Refusal for a calibration of nothing."""
    wrong = [(f"{n} of at least 1", str(v)) for n, v in (("samples", samples), ("sequence_length", length)) if v < 1]
    if wrong:
        raise refusal("quantize", "the calibration would hold no tokens.", needs=wrong, do="give positive numbers")


def given_amax(calibration: Mapping[str, float]) -> dict[str, float]:
    """What `calibrate` returned, as plain numbers. Raises Refusal for one that is no magnitude."""
    found = {}
    for name, value in calibration.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            found[name] = math.nan
        if not 0 <= found[name] < math.inf:
            raise refusal(
                "quantize",
                "the calibration of this layer is no magnitude.",
                layer=name,
                needs=[("a finite number that is not negative", repr(value))],
                do="calibrate again, or drop this layer from the mapping and put it into ignore",
            )
    return found


def _check_tokenizer(tokenizer: Any, vocabulary: int | None) -> None:
    """Without files of its own, Transformers makes an empty tokenizer that turns any text into one unknown token."""
    known = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    if known is not None and vocabulary is not None and known * 4 < vocabulary:
        raise refusal(
            "quantize",
            "this tokenizer is not the model's.",
            needs=[(f"about as many tokens as the model's {vocabulary}", str(known))],
            do="put the tokenizer's files into the model's folder, pass tokenizer=, or give calibration= token ids",
        )


def _given_ids(ids: Tensor) -> list[Tensor]:
    if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise refusal(
            "quantize",
            "these are no token ids.",
            needs=[("whole numbers, (T,) or (B, T)", f"{ids.dtype} {tuple(ids.shape)}")],
            do="pass the input_ids of a tokenizer",
        )
    rows = ids[None] if ids.dim() == 1 else ids
    return list(rows.long().split(1))


def _encode(tokenizer: Any, text: str) -> Tensor:
    # Long texts are cut afterwards, so a tokenizer's warning about the model's length would mislead.
    ids = tokenizer(text, verbose=False)["input_ids"]
    return torch.as_tensor(ids, dtype=torch.long, device="cpu").reshape(-1)


def _check_batches(batches: list[Tensor], vocabulary: int | None) -> None:
    if not batches:
        raise refusal(
            "quantize",
            "the calibration holds no tokens.",
            needs=[("at least one token", "none")],
            do="give texts or ids that are not empty",
        )
    low, high = min(int(b.min()) for b in batches), max(int(b.max()) for b in batches)
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        raise refusal(
            "quantize",
            "the calibration holds tokens that the model does not know.",
            needs=[(f"ids from 0 to {(vocabulary or 0) - 1}", f"{low} to {high}")],
            do="use the tokenizer of this model",
        )


def collect_amax(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    plans: Sequence[Transforms],
    batches: Sequence[Tensor],
    advance: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """Run the batches once; per plan of transforms, the amax of each layer's transformed input.

    A layer that no token reached is absent. Raises Refusal where an input is not finite.
    """
    found: list[dict[str, float]] = [{} for _ in plans]
    run = _runner(model, layers)
    device = next(model.parameters()).device
    with _recording(layers, plans, found), _fp32_products(model), torch.no_grad():
        for batch in batches:
            run(input_ids=batch.to(device), use_cache=False)
            advance()
    for amax in found:
        for name, value in amax.items():
            if not math.isfinite(value):
                raise refusal(
                    "quantize",
                    "the input of this layer is not finite on the calibration texts.",
                    layer=name,
                    needs=[("finite activations", str(value))],
                    do="check the model, or run it in a wider dtype",
                )
    return found


def _runner(model: nn.Module, layers: Mapping[str, nn.Module]) -> Callable[..., Any]:
    """The model without its head where no layer of the head is asked for: the logits are the largest product of all."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else None
    if isinstance(base, nn.Module) and all(name.startswith(prefix + ".") for name in layers):
        return base
    return model


@contextmanager
def _recording(
    layers: Mapping[str, nn.Module], plans: Sequence[Transforms], found: Sequence[dict[str, float]]
) -> Iterator[None]:
    handles = [
        layer.register_forward_pre_hook(_recorder(name, [plan[name] for plan in plans], found), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _fp32_products(model: nn.Module) -> Iterator[None]:
    """On a CPU, multiply half-precision weights in fp32, rounded once: without bf16 units that is many times faster."""
    half = (torch.bfloat16, torch.float16)
    slow = [m for m in model.modules() if type(m) is nn.Linear and m.weight.dtype in half and m.weight.is_cpu]

    def widened(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        bias = None if layer.bias is None else layer.bias.float()
        return lambda input: F.linear(input.float(), layer.weight.float(), bias).to(input.dtype)

    for layer in slow:
        layer.forward = widened(layer)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layer in slow:
            del layer.forward


def _recorder(
    name: str, transforms: Sequence[Transform | None], found: Sequence[dict[str, float]]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        if not x.numel():
            return
        for transform, amax in zip(transforms, found, strict=True):
            value = float(_transformed(x, transform).abs().amax())
            # NaN must win: max() would drop it.
            amax[name] = value if math.isnan(value) else max(amax.get(name, 0.0), value)

    return record


def _transformed(x: Tensor, transform: Transform | None) -> Tensor:
    """The z that the layer will quantize, by the operator that will make it."""
    if transform is None:
        return x.detach().float()
    matrix = transform.matrix.to(x.device)
    return rotate(x.detach(), matrix, transform.factor, transform.transpose, out_dtype=torch.float32)


def share_amax(amax: Mapping[str, float], names: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Give every name an amax: the largest of its fused group, or of its sibling experts where no token reached it.

    Returns the amax per name and notes on what was borrowed. Raises Refusal where there is nothing to borrow from.
    """
    shared: dict[str, float] = {}
    for group in shared_groups(names):
        seen = [amax[name] for name in group if name in amax]
        if seen:
            shared.update(dict.fromkeys(group, max(seen)))
    notes, missing = [], [name for name in names if name not in shared]
    borrowed = {}
    for name in missing:
        values = [shared[other] for other in expert_siblings(name, shared)]
        if not values:
            raise refusal(
                "quantize",
                "no calibration token reached this layer.",
                layer=name,
                needs=[("an input scale from calibration", "no input, and no sibling expert that had one")],
                do="give other or more calibration texts, or put the layer into ignore",
            )
        borrowed[name] = max(values)
        notes.append(f"{name}: no calibration token reached it; input scale of its {len(values)} sibling experts")
    return shared | borrowed, notes
