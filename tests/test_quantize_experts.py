"""Mixtures of experts that Transformers builds fused: taken apart, calibrated, written per expert, or refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import quarterturn
from quarterturn.errors import Refusal
from quarterturn.integrations.experts import SeparateExperts, expert_names, fused_experts, separate
from quarterturn.linear import FP4Linear
from quarterturn.quantize import calibrate, quantize
from tiny_models import tiny_model, tokens


def run(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def starve(model: Any, layer: int, *experts: int) -> None:
    """Let the router of one block never choose these experts."""
    fed = [i for i in range(4) if i not in experts]

    def choose(module: Any, args: Any, output: Any) -> Any:
        logits, scores, chosen = output
        return logits, scores, torch.tensor(fed).expand_as(chosen)

    model.model.layers[layer].mlp.gate.register_forward_hook(choose)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_separate_experts_compute_the_same(kind: str) -> None:
    model, ids = tiny_model(kind), tokens()
    want, names = run(model, ids), expert_names(model)
    assert names == {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}[kind]
    blocks = dict(fused_experts(model))
    assert list(blocks) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for name, block in blocks.items():
        model.set_submodule(name, separate(block, names))
    # The order in which experts are added up may differ: two of them a token, so an ulp or two of logits of about 1.
    torch.testing.assert_close(run(model, ids), want, rtol=0, atol=2.0**-20)


def test_experts_are_layers_of_their_own() -> None:
    original, ids = tiny_model("qwen3_moe"), tokens(2, 48)
    fused = original.model.layers[0].mlp.experts.gate_up_proj.detach()
    model = quantize(copy.deepcopy(original), "nvfp4", calibration=ids, progress=False)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, SeparateExperts)
    for i, expert in enumerate(experts):
        for layer, want in ((expert.gate_proj, fused[i, :64]), (expert.up_proj, fused[i, 64:])):
            assert isinstance(layer, FP4Linear)
            error = (layer.weight_tensor().dequantize() - want).norm() / want.norm()
            assert 0.08 < float(error) < 0.11, "NVFP4 rounds 9.5% of Gaussian values away; another expert's are at 1.4"
        assert expert.gate_proj.encode_scale == expert.up_proj.encode_scale
        assert expert.gate_proj.input_encode_scale == expert.up_proj.input_encode_scale
    assert type(model.model.layers[0].mlp.gate).__name__ == "Qwen3MoeTopKRouter"


def test_an_expert_without_tokens_borrows_the_scale_of_its_siblings(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    starve(model, 1, 2, 3)
    quantize(model, "nvfp4", calibration=tokens(2, 48), output=tmp_path / "out", progress=False)
    experts = model.model.layers[1].mlp.experts
    for part in ("gate_proj", "up_proj", "down_proj"):
        scales = [getattr(expert, part).input_encode_scale.item() for expert in experts]
        # The largest amax is the smallest encode scale.
        assert scales[2] == scales[3] == min(scales[:2])
    starved = [note for note in model.quantization_notes if "no calibration token" in note]
    assert len(starved) == 6
    assert all("layers.1.mlp.experts.2" in note or "layers.1.mlp.experts.3" in note for note in starved)


def test_a_block_without_tokens_is_refused() -> None:
    model = tiny_model("qwen3_moe")
    (amax,) = calibrate(model, [None], tokens(2, 48), progress=False)
    fewer = {name: value for name, value in amax.items() if "layers.1.mlp.experts" not in name}
    assert len(fewer) < len(amax)
    with pytest.raises(Refusal, match=r"layer model\.layers\.1\.mlp\.experts\.0\.gate_proj(.|\n)*no sibling"):
        quantize(model, "nvfp4", calibration=fewer, progress=False)
    assert not any(isinstance(m, SeparateExperts) for m in model.modules())


def test_calibrating_leaves_experts_fused() -> None:
    model, ids = tiny_model("qwen3_moe"), tokens()
    want = run(model, ids)
    calibrate(model, ["hadamard:16"], ids, progress=False)
    assert len(list(fused_experts(model))) == 2
    assert torch.equal(run(model, ids), want)


def test_ignored_experts_stay_fused_and_are_named_in_the_file(tmp_path: Path) -> None:
    model, ids = tiny_model("qwen3_moe"), tokens()
    quantize(model, "nvfp4", "hadamard:16", calibration=ids, ignore=("lm_head", "re:.*experts.*"),
             output=tmp_path / "out", progress=False)  # fmt: skip
    assert len(list(fused_experts(model))) == 2
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (64, 64)
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    from compressed_tensors.utils.match import is_match

    layer = torch.nn.Linear(1, 1)
    assert not is_match("model.layers.1.mlp.experts.3.up_proj", layer, ["Linear"], entry["ignore"])
    assert is_match("model.layers.1.self_attn.q_proj", layer, ["Linear"], entry["ignore"])
    assert torch.equal(run(quarterturn.load(tmp_path / "out", device="cpu"), ids), run(model, ids))


def test_experts_of_another_form_are_refused() -> None:
    model = tiny_model("gpt_oss")
    with pytest.raises(Refusal, match=r"GptOssExperts(.|\n)*experts(.|\n)*has_bias=True(.|\n)*into ignore"):
        quantize(model, "mxfp4", progress=False)
    quantize(model, "mxfp4", ignore=("lm_head", "re:.*experts.*"), progress=False)
    assert isinstance(model.model.layers[0].self_attn.q_proj, FP4Linear)
