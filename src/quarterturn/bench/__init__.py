"""Speed of whole models of known shapes with random weights, in 4 bits and in bf16 in one run: `bench`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..errors import refusal
from ..integrations.decoding import obstacle
from ..linear import WEIGHTS, FP4Linear
from ..machine import cache_bytes, facts
from . import measure
from .needs import check, needed
from .random_model import FourBits, filled, linear_layers, meta_model
from .shapes import SHAPES, config_of

Track = Callable[[str, int], Callable[[int], None]]

CHECKED_ROWS = 256
"""Rows of a prompt that layers are checked on at most."""


@dataclass(frozen=True)
class Ask:
    """What to measure. batches: sequences decoded at once; cache: tokens of the static cache; layers: None for all.

    compiled: whether steps on a GPU are compiled before they are captured. bf16: whether the bf16 model runs too.
    """

    shape: str
    batches: tuple[int, ...] = (1,)
    prompt: int = 4096
    new_tokens: int = 32
    cache: int = 1024
    made: FourBits = field(default_factory=FourBits)
    layers: int | None = None
    compiled: bool = True
    bf16: bool = True


@dataclass(frozen=True)
class Decode:
    """A decode step: how it was run; seconds, those of its linear layers alone, and both as shares of the ceiling."""

    batch: int
    way: str
    step: float
    linear: float
    share: float
    linear_share: float

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.step


@dataclass(frozen=True)
class Measured:
    """A model: what ran it, seconds to the first token, bytes. peak_bytes: at most on the GPU, None on a CPU."""

    name: str
    ran: str
    first_token: float
    decodes: tuple[Decode, ...]
    model_bytes: int
    step_bytes: int
    linear_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Result:
    """All of a run. copy_speed: bytes a second read and written by a copy, the ceiling of what reads weights."""

    ask: Ask
    layers: int
    device: str
    copy_speed: float
    models: tuple[Measured, ...]
    machine: dict[str, Any]
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it, tokens a second included."""
        data = asdict(self)
        for model, measured in zip(data["models"], self.models, strict=True):
            model["prompt_tokens_per_second"] = self.ask.prompt / measured.first_token
            for decode, of in zip(model["decodes"], measured.decodes, strict=True):
                decode["tokens_per_second"] = of.tokens_per_second
        return data


def bench(ask: Ask, device: torch.device, track: Track = lambda text, total: lambda steps: None) -> Result:
    """Measure a shape in 4 bits and, where asked, in bf16, one model after the other on the device.

    track: called with a text and a number of steps, gives what is called as they are done. Raises Refusal for names and
    sizes that do not fit, where memory does not reach, and where a result is wrong.
    """
    config = config_of(ask.shape, ask.layers)
    layers = config.num_hidden_layers
    _check_sizes(ask, config)
    kinds: list[tuple[str, FourBits | None]] = [(ask.made.format, ask.made)]
    if ask.bf16:
        kinds.append(("bf16", None))
    for name, made in kinds:
        spared = "pass --no-bf16" if made is None else ""
        check(name, lambda count, made=made: _needed(ask, count, device, made), layers, device, spared)  # type: ignore[misc]
    speed = measure.copy_speed(device)
    models = []
    for name, made in kinds:
        models.append(_measured(ask, name, made, config, device, speed, track))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    notes = _notes(min(model.linear_bytes for model in models), device)
    return Result(ask, layers, str(device), speed, tuple(models), facts(), notes)


def _notes(smallest: int, device: torch.device) -> tuple[str, ...]:
    held = cache_bytes(device)
    if smallest >= 4 * held:
        return ()
    sizes = f"{smallest / 1e6:.0f} MB of weights, {held / 1e6:.0f} MB of cache"
    return (f"a step's weights may stay in the GPU's cache ({sizes}): its times are not those of memory",)


def _check_sizes(ask: Ask, config: Any) -> None:
    least = measure.PREFIX + ask.new_tokens
    needs = []
    most = SHAPES[ask.shape]["num_hidden_layers"]
    if ask.layers is not None and ask.layers > most:
        needs.append((f"at most the {most} layers of {ask.shape}", str(ask.layers)))
    if ask.cache < least:
        needs.append((f"a cache of {measure.PREFIX} tokens and those to be written", f"{ask.cache}, less than {least}"))
    if ask.made.activations not in ("fp4", "bf16"):
        needs.append(("activations fp4 or bf16", repr(ask.made.activations)))
    if ask.made.weights not in WEIGHTS:
        needs.append((f"weights {', '.join(WEIGHTS)}", repr(ask.made.weights)))
    if not ask.batches or min(ask.batches) < 1:
        needs.append(("batches of 1 or more", str(list(ask.batches))))
    if max(ask.cache, ask.prompt) > config.max_position_embeddings:
        needs.append((f"at most {config.max_position_embeddings} tokens", f"{max(ask.cache, ask.prompt)}"))
    if needs:
        raise refusal("bench", "these sizes do not fit.", needs=needs, do="change what is named")


def _needed(ask: Ask, layers: int, device: torch.device, made: FourBits | None) -> int:
    model = meta_model(config_of(ask.shape, layers))
    return needed(model, device, made, max(ask.batches), ask.cache, ask.prompt)


def _measured(
    ask: Ask, name: str, made: FourBits | None, config: Any, device: torch.device, speed: float, track: Track
) -> Measured:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    model = meta_model(config)
    names = list(linear_layers(model))
    torch.manual_seed(0)
    filled(model, device, made, track(f"making the {name} model", len(names)))
    layers = [model.get_submodule(name) for name in names]
    building = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    if made is not None:
        measure.check_layers(layers, (*ask.batches, min(ask.prompt, CHECKED_ROWS)))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)  # what the plain definition takes is not the model's
    done = track(f"timing the {name} model", 1 + 2 * len(ask.batches))
    first = measure.first_token(model, ask.prompt)
    done(1)
    whole, linear = measure.step_bytes(model, layers)
    decodes = []
    for batch in ask.batches:
        step, way = _step(model, ask, batch, on_gpu)
        done(1)
        alone = measure.linear_step(layers, batch, device, ask.new_tokens, capture=on_gpu)
        done(1)
        decodes.append(Decode(batch, way, step, alone, whole / speed / step, linear / speed / alone))
    peak = max(building, torch.cuda.max_memory_allocated(device)) if on_gpu else None
    size = measure.model_bytes(model)
    return Measured(name, _ran(layers), first, tuple(decodes), size, whole, linear, peak)


def _step(model: Any, ask: Ask, batch: int, on_gpu: bool) -> tuple[float, str]:
    """Seconds of a decode step by the fastest way that there is, and that way in words."""
    why = obstacle(model) if on_gpu else ""
    ways = ["compiled"] * ask.compiled + ["captured"] if on_gpu and why is None else []
    words = {"compiled": "static cache, compiled, in a CUDA graph", "captured": "static cache, in a CUDA graph"}
    for way in ways:
        try:
            seconds = measure.decode_step(model, batch, ask.cache, ask.new_tokens, way)
            return seconds, words[way] + (f" ({why})" if why else "")
        except RuntimeError as error:
            # What was found first is what there is to cure.
            why = why or f"not {way}: {next(iter(str(error).strip().splitlines()), type(error).__name__)}"
        finally:
            torch.compiler.reset()
    seconds = measure.decode_step(model, batch, ask.cache, ask.new_tokens, "eager")
    return seconds, f"static cache, eager{f' ({why})' if why else ''}"


def _ran(layers: list[Any]) -> str:
    if not isinstance(layers[0], FP4Linear):
        return "bf16"
    found = layers[0].explain(torch.bfloat16)
    return f"{found.arithmetic}, {found.backend}, weights {found.weights}"


__all__ = ["SHAPES", "Ask", "Decode", "FourBits", "Measured", "Result", "bench"]
