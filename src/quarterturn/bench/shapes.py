"""The shapes of known models, as their published configs have them, so that none has to be downloaded.

Parameters of Transformers' config classes; what is left out is the class's own default. Positions are not scaled
(Llama 3.1 scales them for long texts), which takes no time.
"""

from __future__ import annotations

from typing import Any

from ..errors import refusal

_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
_QWEN_2 = {"model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}

# hidden width, MLP width, layers, heads, heads of keys and values
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _shape(base: dict[str, Any], sizes: tuple[int, ...], theta: float, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta}
    tied = {"tie_word_embeddings": False}
    return {**base, **dict(zip(_SIZES, sizes, strict=True)), "rope_parameters": rope, **tied, **more}


SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _shape(
        {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        (4096, 11008, 32, 32, 32),
        1e4,
    ),
    "llama-2-13b": _shape(
        {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        (5120, 13824, 40, 40, 40),
        1e4,
    ),
    "llama-3.1-8b": _shape(_LLAMA_3, (4096, 14336, 32, 32, 8), 5e5),
    "llama-3.1-70b": _shape(_LLAMA_3, (8192, 28672, 80, 64, 8), 5e5),
    "llama-3.2-1b": _shape(_LLAMA_3, (2048, 8192, 16, 32, 8), 5e5, tie_word_embeddings=True),
    "llama-3.2-3b": _shape(_LLAMA_3, (3072, 8192, 28, 24, 8), 5e5, tie_word_embeddings=True),
    "mistral-7b": _shape(
        {"model_type": "mistral", "vocab_size": 32768, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
        (4096, 14336, 32, 32, 8),
        1e6,
        sliding_window=None,
    ),
    "qwen2.5-0.5b": _shape(_QWEN_2, (896, 4864, 24, 14, 2), 1e6, vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-7b": _shape(_QWEN_2, (3584, 18944, 28, 28, 4), 1e6, vocab_size=152064),
    "qwen2.5-14b": _shape(_QWEN_2, (5120, 13824, 48, 40, 8), 1e6, vocab_size=152064),
    "qwen2.5-32b": _shape(_QWEN_2, (5120, 27648, 64, 40, 8), 1e6, vocab_size=152064),
    "qwen2.5-72b": _shape(_QWEN_2, (8192, 29568, 80, 64, 8), 1e6, vocab_size=152064),
    "qwen3-8b": _shape(
        {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6},
        (4096, 12288, 36, 32, 8),
        1e6,
        head_dim=128,
    ),
    "smollm2-135m": _shape(
        {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
        (576, 1536, 30, 9, 3),
        1e5,
        tie_word_embeddings=True,
    ),
    "smollm2-1.7b": _shape(
        {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
        (2048, 8192, 24, 32, 32),
        1.3e5,
        tie_word_embeddings=True,
    ),
}


def config_of(name: str, layers: int | None = None) -> Any:
    """Transformers' config of a named shape, with at most `layers` layers. Raises Refusal for a name that is none."""
    if name not in SHAPES:
        raise refusal(
            "bench",
            "there is no such model shape.",
            needs=[(f"one of {', '.join(SHAPES)}", repr(name))],
            do="name one of them",
        )
    from transformers import AutoConfig

    values = dict(SHAPES[name])
    if layers is not None:
        values["num_hidden_layers"] = min(layers, values["num_hidden_layers"])
    return AutoConfig.for_model(values.pop("model_type"), **values)
