"""How good and how fast a model is: perplexity, KL divergence from the original, speed, memory, errors per layer.

Perplexity is exp of the mean negative log-likelihood over windows of a fixed length that do not overlap; each window
stands alone, so its first token is context only and a window of W tokens is W - 1 predictions. What does not fill a
window is left out. KL divergence is KL(original || model) of the next-token distributions at the same positions, in
nats per token. Likelihoods are taken in fp32 and summed in float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from .errors import refusal
from .integrations.models import cache_argument, check_tokens, context_length, refuse_encoder_decoder
from .machine import peak_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Rows of logits turned into probabilities at a time: bounds the memory beside the logits themselves.
_ROWS = 128

Advance = Callable[[int], None]


def _silent(tokens: int) -> None:
    """The `advance` of a caller that shows no progress."""


@dataclass(frozen=True)
class Judgement:
    """A model on a text. kl, agreement (share of positions with the original's top token) and original_perplexity need
    an original.

    window_nll: the mean negative log-likelihood of each window, for judging whether a difference is more than noise.
    """

    perplexity: float
    mean_nll: float
    predictions: int
    windows: int
    window: int
    seconds: float
    kl: float | None = None
    agreement: float | None = None
    window_nll: tuple[float, ...] = ()
    original_perplexity: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens that went through the model."""
        return self.windows * self.window

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Speed:
    """Tokens per second for one sequence: a prompt at once (prefill), then greedy decoding token by token."""

    prompt_tokens: int
    new_tokens: int
    prefill: float
    decode: float


class Reference(Protocol):
    """Where the original's logits come from."""

    def logits(self, index: int, window: Tensor) -> Tensor:
        """fp32 (W, vocabulary) of window number `index` (int64 (W,))."""


class LiveReference:
    """The original itself, run beside the model that is judged."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def logits(self, index: int, window: Tensor) -> Tensor:
        return window_logits(self.model, window)


class StoredReference:
    """The original's logits in a file, for judging several models with the original run once.

    4 bytes a token and vocabulary entry: 0.8 GB for 4,096 tokens of SmolLM2. The pages are the system's to drop.
    """

    def __init__(self, path: Path, windows: int, window: int, vocabulary: int) -> None:
        size = windows * window * vocabulary
        self._data = torch.from_file(str(path), shared=True, size=size).view(windows, window, vocabulary)

    def store(self, index: int, logits: Tensor) -> None:
        """Keep the logits (W, vocabulary) of window number `index`."""
        self._data[index].copy_(logits)

    def logits(self, index: int, window: Tensor) -> Tensor:
        return self._data[index]


def cut_windows(ids: Tensor, window: int, context: int | None = None) -> Tensor:
    """Token ids (T,) -> (T // window, window), the remainder left out.

    `context` is the longest sequence the model takes. Raises Refusal for less than one window, or one too long.
    """
    problems = []
    if window < 2 or (context is not None and window > context):
        problems.append((f"a window of 2 to {context or 'the model length'} tokens", str(window)))
    if ids.dim() != 1 or ids.numel() < window:
        problems.append((f"at least one window of {window} tokens", f"{ids.numel()} tokens"))
    if problems:
        raise refusal(
            "evaluate",
            "the text cannot be cut into windows.",
            needs=problems,
            do="give a longer text or another window",
        )
    return ids[: ids.numel() // window * window].view(-1, window)


@torch.no_grad()
def window_logits(model: PreTrainedModel, window: Tensor) -> Tensor:
    """Token ids (W,) -> fp32 logits (W, vocabulary) on the model's device. Raises Refusal past the model's context."""
    check_tokens("evaluate", model, window, do="judge on shorter windows")
    return model(input_ids=window[None].to(model.device), use_cache=False).logits[0].float()


@torch.no_grad()
def judge(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    window: int = 512,
    reference: Reference | None = None,
    keep: StoredReference | None = None,
    advance: Advance = _silent,
) -> Judgement:
    """Perplexity of token ids (T,), and KL and agreement against `reference` in the same pass.

    keep: where to store this model's logits, for it to be the reference of others. advance: called with the number of
    tokens after every window. Raises Refusal where the ids fill no window or are not the model's, where the two
    vocabularies differ, and for encoder-decoder models.
    """
    refuse_encoder_decoder("evaluate", model, "judge it by its own task")
    cut = cut_windows(ids, window, context_length(model))
    nlls: list[float] = []
    divergence, agreed, seconds, original_nll = 0.0, 0, 0.0, 0.0
    for index, piece in enumerate(cut):
        began = time.perf_counter()
        logits = window_logits(model, piece)
        seconds += time.perf_counter() - began
        if keep is not None:
            keep.store(index, logits)
        nlls.append(_nll(logits[:-1], piece[1:].to(logits.device)))
        if reference is not None:
            original = reference.logits(index, piece)[:-1].to(logits.device)
            kl, same = _kl(original, logits[:-1])
            divergence, agreed = divergence + kl, agreed + same
            original_nll += _nll(original, piece[1:].to(logits.device))
        advance(window)
    count = cut.shape[0] * (window - 1)
    kl_mean, agreement = (divergence / count, agreed / count) if reference is not None else (None, None)
    mean = sum(nlls) / count
    means = tuple(nll / (window - 1) for nll in nlls)
    original_perplexity = None if reference is None else _exp(original_nll / count)
    return Judgement(
        _exp(mean), mean, count, cut.shape[0], window, seconds, kl_mean, agreement, means, original_perplexity
    )


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


def relative_change(new: Judgement, old: Judgement) -> tuple[float, float]:
    """Perplexity of `new` over `old` less 1, and its standard error from the windows that both were judged on.

    The error comes from the paired differences per window; NaN for fewer than two windows.
    """
    after, before = (torch.tensor(j.window_nll, dtype=torch.float64, device="cpu") for j in (new, old))
    differences = after - before
    spread = float(differences.std()) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    change = math.expm1(new.mean_nll - old.mean_nll)
    return change, (1 + change) * spread


def perplexity(model: PreTrainedModel, ids: Tensor, *, window: int = 512) -> float:
    """exp of the mean negative log-likelihood of token ids (T,) over windows of a fixed length."""
    return judge(model, ids, window=window).perplexity


def kl_divergence(original: PreTrainedModel, model: PreTrainedModel, ids: Tensor, *, window: int = 512) -> float:
    """KL(original || model) of the next-token distributions over token ids (T,), nats per token."""
    result = judge(model, ids, window=window, reference=LiveReference(original)).kl
    assert result is not None
    return result


def _nll(logits: Tensor, targets: Tensor) -> float:
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for rows, goal in zip(logits.split(_ROWS), targets.split(_ROWS), strict=True):
        total += nn.functional.cross_entropy(rows, goal, reduction="none").double().sum()
    return float(total)


def _kl(original: Tensor, model: Tensor) -> tuple[float, int]:
    if original.shape != model.shape:
        found = f"{original.shape[-1]} and {model.shape[-1]}"
        raise refusal(
            "evaluate",
            "the model and the original have different vocabularies.",
            needs=[("one vocabulary", found)],
            do="compare with the model it was made from",
        )
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    same = 0
    for p_rows, q_rows in zip(original.split(_ROWS), model.split(_ROWS), strict=True):
        log_p, log_q = p_rows.log_softmax(-1), q_rows.log_softmax(-1)
        total += nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).double().sum()
        same += int((p_rows.argmax(-1) == q_rows.argmax(-1)).sum())
    return float(total), same


@torch.no_grad()
def speed(model: PreTrainedModel, prompt: Tensor, new_tokens: int = 32) -> Speed:
    """Time one sequence: the prompt (int64 (T,)) at once, then `new_tokens` greedy steps with a cache, no early end.

    Raises Refusal for encoder-decoder models, and where prompt and new tokens are longer than the model's context.
    """
    refuse_encoder_decoder("evaluate", model, "time its own task")
    check_tokens("evaluate", model, prompt, new_tokens, do="time a shorter prompt, or fewer new tokens")
    ids = prompt[None].to(model.device)
    model(input_ids=ids[:, :8], use_cache=True)
    began = _now(model.device)
    out = model(input_ids=ids, use_cache=True)
    prefill = _now(model.device) - began
    cache = cache_argument(model)
    began = _now(model.device)
    for _ in range(new_tokens):
        token = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=token, use_cache=True, **{cache: out.past_key_values})
    decode = _now(model.device) - began
    return Speed(ids.shape[1], new_tokens, ids.shape[1] / prefill, new_tokens / decode)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def layer_errors(
    model: nn.Module, original: PreTrainedModel, windows: Tensor, names: Sequence[str], advance: Advance = _silent
) -> dict[str, float]:
    """Per layer, |y - y0| / |y0|: both layers get the input that the original's layer gets, so no error accumulates.

    windows: token ids (B, W) run through the original. names: modules that both models have. Layers that no token
    reaches are left out. Norms are Frobenius over all tokens, in float64.
    """
    theirs = dict(original.named_modules())
    ours = {name: module for name, module in model.named_modules() if name in set(names)}
    sums = {name: [0.0, 0.0] for name in ours}

    def compare(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if args[0].numel():
                # Not a call of the module: its hooks are this one where a model is compared with itself.
                y = ours[name].forward(args[0].to(_device_of(ours[name])))
                sums[name][0] += float((y.to(output.device).double() - output.double()).square().sum())
                sums[name][1] += float(output.double().square().sum())

        return hook

    with _hooks({theirs[name]: compare(name) for name in ours}):
        _run(original, windows, list(ours), advance)
    return {name: math.sqrt(error / size) for name, (error, size) in sums.items() if size > 0}


def activations(
    model: PreTrainedModel, windows: Tensor, names: Sequence[str], advance: Advance = _silent
) -> dict[str, Tensor]:
    """The inputs of some layers over token ids (B, W): fp32 (B * W, K) each, on the CPU."""
    modules = dict(model.named_modules())
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            found[name].append(args[0].detach().flatten(0, -2).float().cpu())

        return hook

    with _hooks({modules[name]: record(name) for name in names}):
        _run(model, windows, names, advance)
    return {name: torch.cat(parts) for name, parts in found.items() if parts}


@dataclass(frozen=True)
class ActivationStatistics:
    """How hard a tensor is to quantize: its largest magnitude over its rms, its kurtosis (3 for a Gaussian), and the
    median over groups of amax / rms, which is what a block scale has to cope with."""

    rms: float
    amax: float
    crest: float
    kurtosis: float
    group_crest: float


def activation_statistics(x: Tensor, group_size: int = 16) -> ActivationStatistics:
    """Statistics of activations (M, K), K a multiple of group_size, in float64."""
    v = x.double()
    rms = float(v.square().mean().sqrt())
    amax = float(v.abs().max())
    if rms == 0:
        return ActivationStatistics(0.0, 0.0, 0.0, 0.0, 0.0)
    groups = v.reshape(-1, group_size)
    group_rms = groups.square().mean(-1).sqrt()
    crest = (groups.abs().amax(-1) / group_rms)[group_rms > 0].median()
    centred = v - v.mean()
    kurtosis = centred.pow(4).mean() / centred.square().mean().square()
    return ActivationStatistics(rms, amax, amax / rms, float(kurtosis), float(crest))


@torch.no_grad()
def _run(model: PreTrainedModel, windows: Tensor, names: Sequence[str], advance: Advance) -> None:
    # The logits are the largest product of a small model, and not looked at unless the head is asked for.
    prefix = model.base_model_prefix
    inside = all(name.startswith(f"{prefix}.") for name in names)
    body = getattr(model, prefix, model) if inside else model
    check_tokens("evaluate", model, windows, do="run shorter windows")
    for window in windows:
        body(input_ids=window[None].to(model.device), use_cache=False)
        advance(window.numel())


@contextmanager
def _hooks(hooks: Mapping[nn.Module, Callable[..., None]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _device_of(module: nn.Module) -> torch.device:
    return next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))


__all__ = [
    "ActivationStatistics",
    "Judgement",
    "LiveReference",
    "Speed",
    "StoredReference",
    "activation_statistics",
    "activations",
    "cut_windows",
    "judge",
    "kl_divergence",
    "layer_errors",
    "peak_memory",
    "perplexity",
    "relative_change",
    "speed",
    "window_logits",
]
