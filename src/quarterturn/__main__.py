"""Runs the command as `python -m quarterturn`."""

from .cli import main

main()
