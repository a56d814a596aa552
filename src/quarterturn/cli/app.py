"""The typer application: one command per function of inspecting, running and making."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import benching, inspecting, making, running

app = typer.Typer(
    name="quarterturn",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    help="Make, load, run and judge language models in 4-bit float (NVFP4, MXFP4) behind online rotations.",
    epilog="--debug, anywhere on the line, shows where an error happened.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"quarterturn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


for function in (
    inspecting.inspect,
    inspecting.doctor,
    running.generate,
    running.evaluate,
    running.verify,
    benching.bench,
    making.quantize,
    making.compare,
    making.demo,
):
    app.command()(function)
