"""What is timed of a model: its prompt, its decode steps, the linear layers of a step alone, beside a copy's speed.

Times are seconds: the median of three rounds, with the device idle before and after a round. On a GPU steps are replays
of a CUDA graph; a prompt is called as it is. Every time comes after a check of what is timed: each linear layer against
the plain definition (any_torch), and a captured or compiled step against the eager one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import refusal
from ..integrations.decoding import StaticDecoder, captured
from ..linear import FP4Linear

PREFIX = 8
"""Tokens in the cache before the first step. A step reads the whole static cache, however full it is."""

ROUNDS = 3

_LAYER_BOUND = 2.0**-7
"""Relative difference of a layer, as norms: two roundings to bf16 make 2^-9, a code in 10^5 may fall the other way at a
tie."""

_LOGITS_BOUNDS = {"fp4": 1.0, "bf16": 0.25}
"""The same of logits, by activations. Steps should be equal, bit for bit; but one value that is rounded otherwise turns
FP4 codes over, layer after layer. On an H200, embeddings disturbed by 2^-9 moved the logits of 8 random layers by 0.67
where they quantize activations and by 0.04 where they do not; those of another token are 1.3 away."""


def now(device: torch.device) -> float:
    """The time when all that was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_seconds(run: Callable[[], object], device: torch.device, times: int = 1, rounds: int = ROUNDS) -> float:
    """Seconds of a call: the median over rounds of `times` calls each, after one that is not counted."""
    run()
    taken = []
    for _ in range(rounds):
        began = now(device)
        for _ in range(times):
            run()
        taken.append((now(device) - began) / times)
    return statistics.median(taken)


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written, of the copy of a tensor that no cache holds."""
    size = 1 << 30 if device.type == "cuda" else 1 << 28
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device, times=10 if device.type == "cuda" else 1)


def first_token(model: Any, prompt: int) -> float:
    """Seconds from a prompt of one sequence to its first token."""
    device = model.device
    decoder = StaticDecoder(model, 1, prompt)
    ids = _tokens(model, 1, prompt)

    def run() -> int:
        return int(decoder.prompt(ids).argmax(-1))

    if device.type == "cuda":
        return median_seconds(run, device)
    decoder.prompt(ids[:, :PREFIX])  # a whole one only to warm up would take minutes
    began = now(device)
    run()
    return now(device) - began


def decode_step(model: Any, batch: int, cache: int, new: int, way: str) -> float:
    """Seconds of a decode step of `batch` sequences, the choice of the likeliest tokens included."""
    decoder, ids = StaticDecoder(model, batch, cache, way), _tokens(model, batch, PREFIX)
    if way != "eager":
        _check_step(model, decoder, ids)
    taken = []
    for _ in range(ROUNDS):
        logits = decoder.prompt(ids)
        began = now(model.device)
        for _ in range(new):
            logits = decoder.step(logits.argmax(-1))
        taken.append((now(model.device) - began) / new)
    return statistics.median(taken)


def _check_step(model: Any, decoder: StaticDecoder, ids: Tensor) -> None:
    plain = StaticDecoder(model, decoder.batch, decoder.length)
    want, got = plain.prompt(ids), decoder.prompt(ids)
    quantizes = any(isinstance(m, FP4Linear) and m.activations == "fp4" for m in model.modules())
    bound = _LOGITS_BOUNDS["fp4" if quantizes else "bf16"]
    for _ in range(3):
        tokens = want.argmax(-1)
        want, got = plain.step(tokens), decoder.step(tokens)
        _check_close(f"a {decoder.way} step gives other logits than the eager one.", got, want, bound)


def linear_step(layers: list[nn.Module], batch: int, device: torch.device, times: int, capture: bool) -> float:
    """Seconds of all linear layers for `batch` tokens, one after the other, each on inputs of its width."""
    inputs = {layer.in_features: _input(layer, batch, device) for layer in layers}

    def step() -> Tensor:
        with torch.no_grad():
            for layer in layers:
                last: Tensor = layer(inputs[layer.in_features])
        return last

    run = captured(step, device)[0] if capture else step
    return median_seconds(run, device, times)


def check_layers(layers: list[FP4Linear], rows: tuple[int, ...]) -> None:
    """Compare a layer of each size with the plain definition. Raises Refusal where one is wrong."""
    seen = set()
    for layer in layers:
        size = (layer.out_features, layer.in_features)
        if size in seen:
            continue
        seen.add(size)
        plain = FP4Linear.from_tensor(
            layer.weight_tensor(), bias=layer.bias, input_encode_scale=layer.input_encode_scale,
            activations=layer.activations, input_transform=layer.input_transform, backend="any_torch", weights="packed",
        )  # fmt: skip
        for m in rows:
            x = _input(layer, m, layer.device)
            headline = f"a layer of {size[0]} x {size[1]} is wrong on {m} rows."
            _check_close(headline, layer(x), plain(x), _LAYER_BOUND, layer.name)


def _check_close(headline: str, got: Tensor, want: Tensor, bound: float, layer: str = "") -> None:
    got, want = got.float(), want.float()
    error = float((got - want).norm() / want.norm())
    if not error <= bound:  # NaN is no less
        raise refusal(
            "bench",
            headline,
            layer=layer or None,
            needs=[(f"a relative difference up to {bound:.4f}", f"{error:.4f}")],
            do="report it: no time is taken of a wrong result; --backend any_torch gives the plain one",
        )


def _input(layer: Any, rows: int, device: torch.device) -> Tensor:
    make = torch.Generator(device).manual_seed(rows)
    return torch.randn(rows, layer.in_features, device=device, generator=make).bfloat16()


def _tokens(model: Any, batch: int, length: int) -> Tensor:
    make = torch.Generator("cpu").manual_seed(batch)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=make, device="cpu").to(model.device)


def step_bytes(model: Any, layers: list[Any]) -> tuple[int, int]:
    """Bytes of weights that a decode step reads in the form they are kept in: of all, and of the layers alone."""
    biases = sum(layer.bias.nbytes for layer in layers if layer.bias is not None)
    linear = biases + sum(_weight_bytes(layer) for layer in layers)
    ours = {id(p) for layer in layers for p in layer.parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight is not head.weight:
        ours.add(id(embedding.weight))  # a row a token
    return linear + sum(p.nbytes for p in model.parameters() if id(p) not in ours), linear


def _weight_bytes(layer: Any) -> int:
    if not isinstance(layer, FP4Linear):
        return int(layer.weight.nbytes)
    if layer.values is not None and layer.values.is_floating_point():
        return layer.values.nbytes
    return int(layer.out_features * layer.in_features * layer.format.bits_per_value / 8)


def model_bytes(model: Any) -> int:
    """Bytes of all that the model holds."""
    held = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in held.values())
