"""Small random language models built in memory: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 96
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def tiny_model(
    kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A two-layer model of hidden width 64, MLP width 96 (MoE: 64 per expert), with a few heavy channels and biases."""
    config_class, model_class, extra = KINDS[kind]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if kind == "mixtral":
        sizes["intermediate_size"] = 64
    torch.manual_seed(seed)
    model = model_class(config_class(**sizes | extra | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter[::13] *= 5
            elif name.endswith(".bias"):
                parameter.normal_(std=0.1)
            elif name.endswith("_proj.weight"):
                # Unequal sizes of q, k, v: a shared tensor scale is then seen to be shared.
                parameter.mul_(2.0 if "q_proj" in name else 3.0)
    return model.to(dtype)


def tokens(batch: int = 2, length: int = 32, seed: int = 1) -> torch.Tensor:
    """Token ids (batch, length)."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def tiny_tokenizer() -> Any:
    """A tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(c) for c in range(32, 32 + VOCABULARY - 3)]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
