"""The vLLM plugin: FP4 checkpoints with their own arithmetic and online transforms, in the engine people serve with.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Nothing of vLLM is patched: a
quantization method of our own is registered, which is asked before vLLM's for every checkpoint and claims those whose
arithmetic vLLM would not run on the machine at hand.

    claims.py      which checkpoints are claimed, and which of our backends --linear-backend means: no vLLM in it
    contents.py    a checkpoint by the names that vLLM gives its modules; what a shard of a layer can hold: none either
    config.py      the quantization config: who runs each layer of a model
    linear.py      FP4 layers, and unquantized ones behind transforms
    experts.py     mixtures of FP4 experts
"""

from __future__ import annotations

import logging

SUPPORTED = ("0.32", "0.33")
"""Releases of vLLM whose classes the tests have met: 0.32 with the engine, 0.33 by imports and signatures."""

NAME = "quarterturn"
"""What --quantization takes."""

logger = logging.getLogger("vllm.quarterturn")


def register() -> None:
    """Register the quantization method. A vLLM that it does not fit is warned about, and goes on without it."""
    found = _vllm_version()
    if not supported(found):
        logger.warning(
            "quarterturn: vLLM %s is not a version that this plugin was tested with (%s). It is used all the same where"
            " the classes that it builds on are there.",
            found,
            ", ".join(f"{version}.x" for version in SUPPORTED),
        )
    try:
        from .config import QuarterturnConfig
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning(
            "quarterturn: this plugin does not fit vLLM %s (%s: %s) and is left out. FP4 files run as vLLM runs them."
            " Install vLLM %s, or a newer quarterturn.",
            found,
            type(error).__name__,
            error,
            " or ".join(f"{version}.x" for version in SUPPORTED),
        )
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    # The decorator warns of a name that is there already, and a process may load plugins twice.
    if NAME not in _registered():
        register_quantization_config(NAME)(QuarterturnConfig)


def supported(version: str) -> bool:
    """Whether a version of vLLM is one of SUPPORTED."""
    return ".".join(version.split("+")[0].split(".")[:2]) in SUPPORTED


def _registered() -> list[str]:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    return list(QUANTIZATION_METHODS)


def _vllm_version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))
