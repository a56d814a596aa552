"""Transformers models as everything above meets them: opened from a folder, and asked what input they can take."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import Refusal, missing_package, refusal
from .transformers import DTYPES


def load_original(operation: str, place: str | Path, dtype: str | torch.dtype = "auto") -> Any:
    """An unquantized language model, decoder-only or encoder-decoder, on the CPU; no code of its folder is run.

    dtype: 'auto' is the file's own. Raises Refusal where there is none, where it is quantized, and for another dtype.
    """
    try:
        import transformers
    except ImportError:
        raise missing_package(operation, "transformers", "pip install 'transformers>=5.17'") from None
    name = str(dtype).removeprefix("torch.")
    if name != "auto" and name not in DTYPES:
        raise refusal(
            operation,
            "the dtype is not run.",
            needs=[(f"auto or one of {', '.join(DTYPES)}", name)],
            do="pass dtype='bfloat16'",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(place), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _no_model(operation, place, error) from error
    _check_unquantized(operation, config)
    auto = transformers.AutoModelForSeq2SeqLM if is_encoder_decoder(config) else transformers.AutoModelForCausalLM
    try:
        return auto.from_pretrained(
            str(place), config=config, dtype=DTYPES.get(name, "auto"), use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise _no_model(operation, place, error) from error


def _no_model(operation: str, place: str | Path, error: Exception) -> Refusal:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return refusal(
        operation,
        "there is no language model here that can be loaded.",
        file=place,
        needs=[("config.json and safetensors files of one", reason)],
        do="check the path",
    )


def _check_unquantized(operation: str, config: Any) -> None:
    present = getattr(config, "quantization_config", None)
    if present:
        method = present.get("quant_method") if isinstance(present, dict) else getattr(present, "quant_method", "?")
        raise refusal(
            operation,
            "the model is quantized already.",
            needs=[("a model in floating point", f"quantization_config of '{method}'")],
            do="start from the original model",
        )


def is_encoder_decoder(config: Any) -> bool:
    """Whether a config is of a model with an encoder and a decoder, such as T5."""
    return bool(getattr(config, "is_encoder_decoder", False))


def refuse_encoder_decoder(operation: str, model: Any, do: str) -> None:
    """Raise Refusal for a model that needs inputs for an encoder and for a decoder."""
    if is_encoder_decoder(getattr(model, "config", None)):
        raise refusal(
            operation,
            "this does not run encoder-decoder models.",
            needs=[("a model that continues one sequence of tokens", type(model).__name__)],
            do=do,
        )


def cache_argument(model: Any) -> str:
    """What a model's forward calls its cache: 'cache' from Transformers 5.24 on."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def context_length(model: Any) -> int | None:
    """How many positions the model has, None where its config does not say."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def vocabulary(model: Any) -> int | None:
    """How many tokens the model's input embeddings know, None where it has none."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return int(embedding.weight.shape[0]) if embedding is not None else None


def check_tokens(operation: str, model: Any, ids: Tensor, new: int = 0, *, do: str) -> None:
    """Raise Refusal where the model cannot take token ids (..., T) and write `new` more.

    Past its context a model with learned positions fails, and one with rotary positions goes on in nonsense.
    """
    context, known, length = context_length(model), vocabulary(model), ids.shape[-1]
    total = max(length, new) if is_encoder_decoder(getattr(model, "config", None)) else length + new
    if context is not None and total > context:
        found = f"{length} and {new} to be written" if new else str(length)
        raise refusal(
            operation,
            "this is longer than the model's context.",
            needs=[(f"at most {context} tokens (max_position_embeddings)", found)],
            do=do,
        )
    if known is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < known:
        raise refusal(
            operation,
            "there are tokens that the model does not know.",
            needs=[(f"ids from 0 to {known - 1}", f"{int(ids.min())} to {int(ids.max())}")],
            do="use the tokenizer of this model",
        )
