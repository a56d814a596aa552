"""Checkpoints for the engine, prompts, and how its log-probabilities are judged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import quarterturn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from tiny_models import tiny_model, tiny_tokenizer, tokens  # noqa: E402

SHARED = ROOT.parent / "shared" / "checkpoints"
VOCABULARY = 96
Run = Callable[..., list[dict[str, Any]]]


def written(
    folder: Path,
    kind: str,
    format: str,
    transform: str | None,
    activations: str = "fp4",
    changes: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A tiny model, with changes of its config, quantized by us; with a tokenizer that has a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    quarterturn.quantize(
        tiny_model(kind, **(changes or {})),
        format,
        transform=transform,
        activations=activations,
        calibration=tokens(4, 32, seed=7),
        tokenizer=tokenizer,
        output=folder,
        progress=False,
        **more,
    )
    return folder


def prompts(vocabulary: int, count: int = 3, length: int = 40) -> list[list[int]]:
    """Random token ids that a model of this vocabulary takes."""
    return [
        torch.randint(3, vocabulary, (length - 7 * i,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(count)
    ]


def expected(path: Path | str, ids: list[list[int]]) -> list[list[float]]:
    """Log-probability of every prompt token but the first, by quarterturn.load in float32."""
    return logprobs(quarterturn.load(path, dtype="float32", device="cpu"), ids)


def logprobs(model: Any, ids: list[list[int]]) -> list[list[float]]:
    """The same, by a model that is loaded."""
    result = []
    with torch.no_grad():
        for prompt in ids:
            x = torch.tensor([prompt])
            log = model(x).logits.log_softmax(-1)[0, :-1]
            result.append(log.gather(-1, x[0, 1:, None])[:, 0].tolist())
    return result


def parts_of(name: str) -> list[str]:
    """The library's layers in one that vLLM fuses."""
    parent, _, own = name.rpartition(".")
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    return [f"{parent}.{part}" for part in fused.get(own, (own,))]


def differences(got: list[list[float]], want: list[list[float]]) -> torch.Tensor:
    """|got - want| of every token."""
    flat = [torch.tensor([v for row in rows for v in row], dtype=torch.float64) for rows in (got, want)]
    return (flat[0] - flat[1]).abs()


def agree(got: list[list[float]], want: list[list[float]]) -> None:
    """The tolerance: 1e-3 for 99 of 100 tokens, 0.05 for each (see test_engine.py)."""
    off = differences(got, want)
    assert len(off) > 50
    assert off.isfinite().all()
    told = f"max {off.max():.2e}, mean {off.mean():.2e}"
    assert off.quantile(0.99) <= 1e-3, told
    assert off.max() <= 0.05, told
