"""What runs a layer, in words: what `FP4Linear.explain` and `quarterturn.explain` give."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .backends import Problem


@dataclass(frozen=True)
class Explanation:
    """What runs a layer: backend, arithmetic, why, what speaks against the others, and how the weights are kept."""

    layer: str
    backend: str
    arithmetic: str
    reason: str
    rejected: dict[str, list[str]]
    weights: str


def arithmetic(problem: Problem) -> str:
    """The numbers of a layer: operands, format, transforms, and what is not as usual."""
    quantizes = problem.activations == "fp4"
    parts = [f"{'W4A4' if quantizes else 'W4A16'} {problem.format.name}"]
    sides = (("input", problem.input_size), ("output", problem.output_size))
    parts += [f"{side} transform {size}" for side, size in sides if size is not None]
    if quantizes and problem.recipe != "checkpoint":
        parts.append(f"recipe {problem.recipe}")
    if problem.batch_invariant:
        parts.append("batch-invariant")
    return ", ".join(parts)


def kept(values: Tensor | None) -> str:
    """How a layer keeps weights of which it has made `values`."""
    held = "packed" if values is None else str(values.dtype).removeprefix("torch.")
    return {"packed": "packed", "int32": "packed, in fragments"}.get(held, f"decoded to {held}")
