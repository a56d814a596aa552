"""Decoding token by token with a static cache: one step of fixed shape, on a GPU captured in a CUDA graph.

A Transformers StaticCache keeps its tensors and its length in place, so that a step is the same launches every time. On
a GPU they are captured once and replayed: a step then costs no host time beyond its start. Compiled first, what lies
between the linear layers is fused too, which takes a minute and is worth it for a benchmark, not for a hundred tokens.

| step      | is                                                                                               |
|---|---|
| eager     | the model called with the cache: any device                                                      |
| captured  | the launches of the eager step in a CUDA graph                                                   |
| compiled  | by torch.compile, whole (fullgraph); on a GPU captured too                                       |

Run on a CPU (eager) and on an NVIDIA H200 (all).
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..compiled import compile_options
from .experts import SeparateExperts
from .models import cache_argument, is_encoder_decoder

WARM_UP = 3
"""Steps before a capture: what is compiled or allocated at a first call must not be in the graph."""

RUN_ON: tuple[tuple[int, int], ...] = ((9, 0),)
"""Capabilities of GPUs on which the tests of captured steps were run; on others `generate` does without them."""

_ROUND = 16
"""Cache lengths are multiples of this: masks of other widths are copied at every step."""


def obstacle(model: Any) -> str | None:
    """Why a step of this model cannot be captured, None where nothing that can be known beforehand is in the way."""
    device = getattr(model, "device", torch.device("cpu"))
    if not _captures(device):
        return f"the model is on {device.type}; only CUDA devices capture launches"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) not in RUN_ON:
        return f"captured steps were not run on a GPU of capability {found[0]}.{found[1]} yet"
    if len({p.device for p in model.parameters()}) > 1:
        return "the model is on several devices"
    return unfit(model)


def _captures(device: torch.device) -> bool:
    return device.type == "cuda"


def unfit(model: Any) -> str | None:
    """Why a step of this model has no fixed shape, on whatever device; None where it has."""
    if is_encoder_decoder(getattr(model, "config", None)):
        return "an encoder-decoder model"
    if any(isinstance(module, SeparateExperts) for module in model.modules()):
        return "experts are called by what the router says, which the host has to read"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"Transformers does not say of {type(model).__name__} that a step can be traced whole"
    from transformers.cache_utils import StaticCache, StaticLayer

    kinds = {type(layer) for layer in StaticCache(config=model.config, max_cache_len=_ROUND).layers}
    if kinds != {StaticLayer}:
        others = ", ".join(sorted(kind.__name__ for kind in kinds - {StaticLayer}))
        return f"its cache has layers whose length the host counts: {others}"
    return None


class StaticDecoder:
    """Prompt and steps of a batch of sequences of equal length, with a static cache of `length` tokens.

    way: 'eager', 'captured' or 'compiled', as in the table above; what a model is fit for, `obstacle` says. Raises
    RuntimeError, or torch's own errors of tracing, where a step cannot be captured after all; nothing is lost then.
    `prompt` and `step` return logits (batch, vocabulary) of the model's dtype; those of a captured step are overwritten
    by the next one.
    """

    def __init__(self, model: Any, batch: int, length: int, way: str = "eager") -> None:
        from transformers import StaticCache

        assert way in ("eager", "captured", "compiled"), way
        self.model, self.batch, self.way = model, batch, way
        self.length = -(-max(length, WARM_UP + 2) // _ROUND) * _ROUND
        self.cache = StaticCache(config=model.config, max_cache_len=self.length)
        self._named = {cache_argument(model): self.cache, "use_cache": True}
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
        self._tokens = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self._run = self._prepared(way)

    def prompt(self, ids: Tensor) -> Tensor:
        """Token ids (batch, T), T at most `length`, as the beginning of new sequences -> logits after them."""
        assert ids.shape[0] == self.batch, (ids.shape, self.batch)
        assert ids.shape[1] <= self.length, (ids.shape, self.length)
        self.cache.reset()
        with torch.no_grad():
            return self.model(input_ids=ids.to(self.model.device), **self._named, **self._last).logits[:, -1]

    def step(self, tokens: Tensor) -> Tensor:
        """The next tokens (batch,) or (batch, 1) -> logits after them. The caller counts: `length` in all."""
        self._tokens.copy_(tokens.view(self.batch, 1))
        return self._run()

    def _prepared(self, way: str) -> Callable[[], Tensor]:
        model, tokens, named = self.model, self._tokens, self._named

        def step() -> Tensor:
            logits: Tensor = model(input_ids=tokens, **named).logits[:, -1]
            return logits

        run: Callable[[], Tensor] = step
        if way == "compiled":
            # Rounded where the model's own code rounds: FP4 makes another code of what is rounded elsewhere.
            options = compile_options(emulate_precision_casts=True)
            run = torch.compile(step, fullgraph=True, dynamic=False, options=options)

        def without_gradients() -> Tensor:
            with torch.no_grad():
                return run()

        if way == "eager":
            return without_gradients
        # The cache makes its tensors at the first call, which must be in no graph.
        self.prompt(tokens)
        if not _captures(tokens.device):
            return without_gradients
        replay, logits = captured(without_gradients, tokens.device)

        def again() -> Tensor:
            replay()
            return logits

        return again


def captured(step: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """A step's launches as a CUDA graph: what replays it, and the tensor that then holds its result.

    The step is called WARM_UP times on a stream of its own first, and once to be captured, when nothing runs. Where it
    cannot be captured, its error is raised and the device is as it was.
    """
    with torch.cuda.device(device):
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                result = step()
        except BaseException:
            # A capture that failed leaves the generator waiting for its end, and every random number would be refused.
            generator = torch.cuda.default_generators[device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
            raise
    return graph.replay, result


def capture(model: Any, batch: int, length: int) -> tuple[StaticDecoder | None, str]:
    """A decoder whose step is captured; or none, and why."""
    reason = obstacle(model)
    if reason is not None:
        return None, reason
    try:
        return StaticDecoder(model, batch, length, "captured"), ""
    except (RuntimeError, NotImplementedError) as error:
        # A step that the host has to wait in, or a cache that there is no memory for.
        return None, next(iter(str(error).strip().splitlines()), type(error).__name__)


def generate(model: Any, decoder: StaticDecoder, inputs: Any, streamer: Any = None, **options: Any) -> Tensor:
    """`model.generate` of inputs (1, T) without padding, its steps by the decoder -> token ids (1, T + new).

    Options, and what a model's generation config asks for (processors of logits, stopping), are Transformers'.
    """

    def loop(
        model: nn.Module, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        **others: Any,
    ) -> Tensor:  # fmt: skip
        logits, sampled = decoder.prompt(input_ids), generation_config.do_sample
        while True:
            scores = logits_processor(input_ids, logits.to(torch.float32, copy=True))
            chosen = torch.multinomial(scores.softmax(-1), 1)[:, 0] if sampled else scores.argmax(-1)
            input_ids = torch.cat([input_ids, chosen[:, None]], dim=-1)
            if streamer is not None:
                streamer.put(chosen.cpu())
            if bool(stopping_criteria(input_ids, scores).all()):
                break
            logits = decoder.step(chosen)
        if streamer is not None:
            streamer.end()
        return input_ids

    made: Tensor = model.generate(**inputs, streamer=streamer, custom_generate=loop, **options)
    return made


__all__ = ["StaticDecoder", "capture", "captured", "generate", "obstacle", "unfit"]
