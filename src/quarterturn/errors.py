"""Every refusal of the library, in one form.

A refusal says which operation, which layer or tensor, what was needed, what was found and what to do:

    ValueError: fp4_linear: backend 'cpu_native' cannot run this layer.
      layer model.layers.0.mlp.down_proj
      needs a C compiler; found none
      do install gcc or clang, or choose backend='any_torch'
"""

from __future__ import annotations

from collections.abc import Sequence


class Refusal(ValueError):
    """What the library raises when it will not do what it was asked, and nothing was changed."""


class CheckpointRefusal(Refusal):
    """A file or folder that cannot be read, or that asks for what is not run."""


class BackendRefusal(Refusal):
    """A backend that cannot run on this machine, or not this layer."""


class MissingPackage(Refusal, ImportError):
    """An optional package that the operation needs is not installed."""


def refusal(
    operation: str,
    headline: str,
    *,
    layer: str | None = None,
    tensor: str | None = None,
    file: object | None = None,
    needs: Sequence[tuple[str, str]] = (),
    do: str,
    kind: type[Refusal] = Refusal,
) -> Refusal:
    """Build (not raise) a refusal. `needs` is a list of (needed, found) pairs, all of them; `do` the remedy."""
    lines = [f"{operation}: {headline}"]
    for key, value in (("file", file), ("layer", layer), ("tensor", tensor)):
        if value is not None:
            lines.append(f"  {key} {value}")
    lines.extend(f"  needs {needed}; found {found}" for needed, found in needs)
    lines.append(f"  do {do}")
    return kind("\n".join(lines))


def missing_package(operation: str, package: str, install: str) -> Refusal:
    """The refusal for an optional package that is not there; `install` is the whole command."""
    return refusal(
        operation,
        f"the package '{package}' is not installed.",
        needs=[(package, "no such package in this environment")],
        do=install,
        kind=MissingPackage,
    )
