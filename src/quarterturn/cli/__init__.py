"""The command `quarterturn`: parses, calls the library, prints.

Results go to stdout (with --json nothing but JSON), progress and errors to stderr. Exit codes: 0 done, 1 refused or
failed (or, for `verify`, a layer that is not as declared), 2 a wrong command line, 130 interrupted, 141 the reader of
a pipe went away (as `| head` does), which is no error and says nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from ..errors import Refusal, missing_package


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit code; every error is one paragraph on stderr."""
    # A stream that was closed before the command began (`>&-`) is None; the descriptor is taken, so that no file is it.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        try:
            _run(arguments)
        finally:
            # Here, and not when the interpreter ends, where a closed pipe would be noise.
            sys.stdout.flush()
    except BaseException as end:
        if not _pipe_closed(end):
            raise
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(141)


def _pipe_closed(end: BaseException | None) -> bool:
    """Whether an exit goes back to a closed pipe: typer and rich turn those into exits of their own."""
    while end is not None and not isinstance(end, BrokenPipeError):
        end = end.__context__
    return end is not None


def _run(arguments: Sequence[str] | None) -> None:
    try:
        from .app import app
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"Error: {missing_package('command', error.name, f'pip install {error.name}')}", file=sys.stderr)
        sys.exit(1)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    try:
        app([argument for argument in arguments if argument != "--debug"], prog_name="quarterturn")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        raise
    except Refusal as error:
        _fail(str(error), debug)
    except OSError as error:
        named = f"{error.strerror}: {error.filename}\n  do check the path and its permissions"
        _fail(named if error.strerror and error.filename else str(error) or type(error).__name__, debug)
    except Exception as error:
        # Our bug, or a library's refusal that nobody translated: still no traceback unless asked for.
        text = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        _fail(f"{text}\n  do run it again with --debug for where it happened, and report it", debug)


def _fail(text: str, debug: bool) -> None:
    if debug:
        raise
    print(f"Error: {text}", file=sys.stderr)
    sys.exit(1)
