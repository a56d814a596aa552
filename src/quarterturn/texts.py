"""English that every Python has: the language reference in `pydoc_data.topics`, in two halves.

Some 465,000 characters, which differ a little between Python versions. One half sets input scales, the other judges,
so that a model is not judged by the text that set its scales.
"""

from __future__ import annotations


def builtin_text() -> str:
    """The second half, quantize's built-in calibration text."""
    text = _whole()
    return text[len(text) // 2 :]


def held_out_text() -> str:
    """The first half, which judges models."""
    text = _whole()
    return text[: len(text) // 2]


def _whole() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))
