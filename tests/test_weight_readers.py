"""Models whose code reads the weight of a layer: its dtype is answered, its values are refused, naming the layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quarterturn as qt
from comparing import assert_same_bits
from quarterturn.absent_weight import AbsentWeight, NoWeight
from quarterturn.integrations import hf_quantizer, weight_readers
from quarterturn.quantize import prepare
from test_linear import make
from tiny_models import VOCABULARY, tokens

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip


def mamba() -> Any:
    """Multiplies by the weight of dt_proj in every pass."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(**SIZES, state_size=8, time_step_rank=16)).bfloat16().eval()


def mamba2() -> Any:
    """Passes on the weight of out_proj in training alone, and fills it when a model is made."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    return Mamba2ForCausalLM(Mamba2Config(**SIZES, state_size=16, num_heads=4, head_dim=32, n_groups=1)).bfloat16()


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prepare, hf_quantizer):
        monkeypatch.setattr(module, "weight_readers", lambda model, names: {})


def test_quantizing_names_the_layer_and_what_to_ignore() -> None:
    model = mamba()
    with pytest.raises(qt.Refusal, match=r"layers\.0\.mixer\.dt_proj\n.*MambaMixer\.forward\n.*'re:\.\*dt_proj\$'"):
        qt.quantize(model, calibration=tokens(), progress=False)
    made = qt.quantize(model, calibration=tokens(), ignore=["re:.*dt_proj$", "lm_head"], progress=False)
    assert len(qt.explain(made)) == 6
    assert torch.isfinite(made(input_ids=tokens()).logits).all()


def test_loading_names_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        unread(patch)
        qt.quantize(mamba(), "mxfp4", ignore=["re:.*x_proj$", "re:.*dt_proj$"], output=tmp_path / "a", progress=False)
        model = mamba()
        for layer in model.backbone.layers:
            layer.mixer.dt_proj = nn.Linear(32, layer.mixer.dt_proj.out_features)
        model.config.time_step_rank = 32
        qt.quantize(model, "mxfp4", ignore=["re:.*x_proj$"], output=tmp_path / "b", progress=False)
    assert len(qt.explain(qt.load(tmp_path / "a"))) == 4
    with pytest.raises(qt.Refusal, match=r"in 4 bits\.\n.*\n  layer backbone\.layers\.0\.mixer\.dt_proj\n"):
        qt.load(tmp_path / "b")


def test_what_no_reading_of_the_code_finds_is_refused_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    unread(monkeypatch)
    made = qt.quantize(mamba(), "nvfp4", None, "bf16", progress=False)
    with pytest.raises(NoWeight, match=r"layer backbone\.layers\.0\.mixer\.dt_proj\n"):
        made(input_ids=tokens())


def test_a_weight_that_is_read_in_training_alone_is_no_reason(tmp_path: Path) -> None:
    model = mamba2()
    made = qt.quantize(model, calibration=tokens(), output=tmp_path / "made", progress=False)
    loaded = qt.load(tmp_path / "made")
    assert len(qt.explain(loaded)) == 4
    with torch.no_grad():
        assert_same_bits(loaded(input_ids=tokens()).logits, made(input_ids=tokens()).logits)


class Reader(nn.Module):
    """One way to read a layer's weight for each child."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("dtype", "typed", "used", "off", "on", "input", "never"):
            self.add_module(name, nn.Linear(16, 16))
        self.slices, self.exact = 1, False

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype.weight.dtype)
        if isinstance(self.typed.weight, Tensor) and self.typed.weight.shape[0] == 16:
            x = self.typed(x)
        if self.slices > 1 and self.exact:
            x = x @ self.off.weight
        elif not self.exact or x.sum() > 0:
            x = x @ self.on.weight.T
        if x.sum() > 0:
            x = x @ self.input.weight
        weight = self.never.weight if self.training else None
        return self.helper(x, weight)

    def helper(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.linear(x, self.used.weight)


def test_only_values_under_conditions_that_can_hold_count() -> None:
    model = nn.Sequential(Reader())
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = weight_readers.weight_readers(model, names)
    assert found == {"0.used": "Reader.helper", "0.on": "Reader.forward", "0.input": "Reader.forward"}
    model[0].slices, model[0].exact = 2, True
    assert set(weight_readers.weight_readers(model, names)) == {"0.used", "0.off", "0.input"}


def test_a_layer_answers_for_its_weight() -> None:
    layer = make("nvfp4")
    layer.name = "some.layer"
    layer(torch.randn(2, 96, dtype=torch.float16))
    weight = layer.weight
    assert isinstance(weight, AbsentWeight)
    assert not isinstance(weight, Tensor)
    assert (weight.dtype, weight.device, tuple(weight.shape)) == (torch.float16, torch.device("cpu"), (48, 96))
    assert (weight.size(0), weight.size(), weight.dim(), weight.ndim) == (48, torch.Size((48, 96)), 2, 2)
    x = torch.randn(2, 96)
    uses = (lambda: F.linear(x, weight), lambda: weight @ x.T, lambda: x @ weight, lambda: torch.cat([x, weight]),
            lambda: weight.T, lambda: weight[0], lambda: weight.data, lambda: weight.sum())  # fmt: skip
    for use in uses:
        with pytest.raises(NoWeight, match=r"layer some\.layer\n"):
            use()
    assert "weight" not in layer.state_dict()
