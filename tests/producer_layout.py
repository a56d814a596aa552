"""A checkpoint as llm-compressor lays it out, made by the specification and by hand: no code of the library's own
writer is in it, so that writer and loader cannot be wrong in the same way.

Beside the model lies `expected.safetensors`: inputs and outputs of every layer, and logits, all from a float64 model.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quarterturn import reference
from tiny_models import tiny_model, tokens

SIZE = 16
INPUT_ENCODE = 300.0


def hadamard_signs(size: int, seed: int) -> Tensor:
    """A +-1 Hadamard matrix with rows of random signs, not symmetric: Sylvester's H[i, j] is (-1)^popcount(i & j)."""
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]).double()
    signs = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    return signs * matrix


def quantization(dtype: str, group: int, has_tensor_scale: bool) -> dict[str, Any]:
    """`quantization_config` for W4A4 of every linear layer but the head, behind one transform of their inputs."""
    shared = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group, "actorder": None,
              "strategy": "tensor_group" if has_tensor_scale else "group",
              "scale_dtype": "torch.float8_e4m3fn" if has_tensor_scale else "torch.uint8"}  # fmt: skip
    weights = shared | {"dynamic": False, "observer": "memoryless_minmax"}
    inputs = shared | {"dynamic": "local" if has_tensor_scale else True, "observer": None}
    online = {"location": "input", "targets": ["Linear"], "ignore": ["lm_head"], "inverse": False}
    folded = {"location": "weight_input", "targets": ["Linear"], "ignore": ["lm_head"], "inverse": True}
    scheme = {"type": "random-hadamard", "head_dim": SIZE, "randomize": False, "requires_grad": False,
              "precision": "torch.float64", "apply": [online, folded]}  # fmt: skip
    packed = f"{dtype}-pack-quantized"
    return {
        "quant_method": "compressed-tensors", "format": packed, "quantization_status": "compressed",
        "version": "0.19.0", "ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": None,
        "sparsity_config": {}, "transform_config": {"config_groups": {"v": scheme}},
        "config_groups": {"group_0": {"targets": ["Linear"], "format": packed, "weights": weights,
                                      "input_activations": inputs, "output_activations": None}},
    }  # fmt: skip


class Specified(nn.Module):
    """A layer as the specification has it."""

    def __init__(self, stored: dict[str, Tensor], bias: Tensor | None, matrix: Tensor, format: str) -> None:
        super().__init__()
        self.stored, self.bias, self.matrix, self.format = stored, bias, matrix, format

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N)."""
        scaled = self.format == "nvfp4"
        encode = self.stored["weight_global_scale"] if scaled else torch.ones(1)
        codes, scale = self.stored["weight_packed"], self.stored["weight_scale"].view(torch.uint8)
        y = reference.linear(
            x.reshape(-1, x.shape[-1]), codes, scale, 1 / encode, (codes.shape[0],), format=self.format,
            encode_scale=self.stored["input_global_scale"] if scaled else None, bias=self.bias,
            input_transform=(self.matrix, 1 / math.sqrt(SIZE), False),
        )  # fmt: skip
        return y.to(x.dtype).view(*x.shape[:-1], -1)


def stored_layer(weight: Tensor, matrix: Tensor, format: str) -> dict[str, Tensor]:
    """What a file holds of W (N, K) behind x V, V = H / sqrt(R): W V^-T = W V per block, since V is orthogonal."""
    turned = (weight.double().unflatten(-1, (-1, SIZE)) @ matrix / math.sqrt(SIZE)).flatten(-2).float()
    if format == "mxfp4":
        codes, scale = reference.quantize(turned, format)
        return {"weight_packed": codes, "weight_scale": scale}
    encode = (448 * 6 / turned.abs().max()).float().reshape(1)
    codes, scale = reference.quantize(turned, format, encode)
    return {"weight_packed": codes, "weight_scale": scale.view(torch.float8_e4m3fn), "weight_global_scale": encode,
            "input_global_scale": torch.tensor([INPUT_ENCODE])}  # fmt: skip


def write(folder: Path, kind: str, format: str) -> Path:
    """The checkpoint of a tiny model in `folder`."""
    model, matrix = tiny_model(kind, dtype=torch.bfloat16), hadamard_signs(SIZE, seed=7)
    tensors, expected = dict(model.state_dict()), {"input_ids": tokens()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    model.float()
    with torch.no_grad():
        expected["logits_unquantized"] = model(expected["input_ids"]).logits
        layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
        for seed, (name, linear) in enumerate(layers.items()):
            stored = stored_layer(tensors.pop(f"{name}.weight"), matrix, format)
            tensors |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
            layer = Specified(stored, linear.bias, matrix, format)
            model.set_submodule(name, layer)
            x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(seed))
            expected |= {f"layers.{name}.input": x, f"layers.{name}.output": layer(x)}
        expected["logits_specified"] = model(expected["input_ids"]).logits
    tensors[f"{next(iter(layers))}.v_input.weight"] = matrix  # once, under the first layer that uses it
    folder.mkdir()
    group = 16 if format == "nvfp4" else 32
    config = model.config.to_dict() | {"quantization_config": quantization(format, group, format == "nvfp4")}
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    save_file({n: t.contiguous() for n, t in expected.items()}, folder / "expected.safetensors")
    return folder
