"""Perplexity, KL, layer errors and verdicts against values worked out another way."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from quarterturn import MXFP4, NVFP4, Refusal, Transform, hadamard, matrix, quantize, random_hadamard
from quarterturn import evaluate as ev
from quarterturn.quantize.rtn import round_to_nearest
from quarterturn.verify import (
    CANNOT_TELL,
    DIFFERENT,
    NEVER,
    OK,
    OTHER,
    REVERSED,
    SCALED,
    TWICE,
    UNDECLARED,
    LayerVerdict,
    check_bias,
    check_layer,
    verify,
)
from tiny_models import VOCABULARY, tiny_model

IDS = torch.randint(3, VOCABULARY, (70,), generator=torch.Generator().manual_seed(1))


def test_perplexity_is_the_mean_over_whole_windows() -> None:
    model = tiny_model()
    result = ev.judge(model, IDS, window=16)
    nll = []
    for start in range(0, 64, 16):
        window = IDS[start : start + 16]
        with torch.no_grad():
            log_p = model(input_ids=window[None]).logits[0].double().log_softmax(-1)
        nll += [-float(log_p[i, window[i + 1]]) for i in range(15)]
    assert (result.predictions, result.windows, result.tokens) == (60, 4, 64)
    # fp32 against float64 log-softmax of logits of a few units: some 2^-22 a term, and the mean is about 4.6.
    assert result.mean_nll == pytest.approx(sum(nll) / 60, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(sum(nll) / 60), rel=1e-6)
    assert sum(result.window_nll) / 4 == pytest.approx(result.mean_nll, rel=1e-12)
    assert ev.perplexity(model, IDS, window=16) == result.perplexity


def test_kl_points_from_the_original_to_the_model(tmp_path: Path) -> None:
    original, model = tiny_model(), tiny_model(seed=3)
    window = IDS[:32]
    with torch.no_grad():
        p = original(input_ids=window[None]).logits[0, :-1].double().log_softmax(-1)
        q = model(input_ids=window[None]).logits[0, :-1].double().log_softmax(-1)
    # In fp32, terms of p (log p - log q) err by 2^-22 of |log p| (about 5), and their sum here is about a tenth.
    forward = float((p.exp() * (p - q)).sum(-1).mean())
    backward = float((q.exp() * (q - p)).sum(-1).mean())
    assert ev.kl_divergence(original, model, window, window=32) == pytest.approx(forward, rel=1e-5)
    assert abs(forward - backward) > 1e-3 * forward
    kept = ev.StoredReference(tmp_path / "logits", 1, 32, VOCABULARY)
    ev.judge(original, window, window=32, keep=kept)
    stored = ev.judge(model, window, window=32, reference=kept)
    assert stored.kl == pytest.approx(forward, rel=1e-5)
    assert stored.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    same = ev.judge(original, window, window=32, reference=kept)
    assert same.kl == 0.0
    assert same.agreement == 1.0
    assert same.original_perplexity == same.perplexity
    assert stored.original_perplexity == same.perplexity != stored.perplexity
    assert ev.judge(model, window, window=32).original_perplexity is None


def test_a_relative_change_knows_its_noise() -> None:
    def judged(*nll: float) -> ev.Judgement:
        mean = sum(nll) / len(nll)
        return ev.Judgement(math.exp(mean), mean, 30, len(nll), 11, 1.0, window_nll=nll)

    change, error = ev.relative_change(judged(2.1, 3.1, 1.1), judged(2.0, 3.0, 1.0))
    assert change == pytest.approx(math.exp(0.1) - 1)
    # The differences are .1 in float64, each within 2^-51 of it.
    assert error == pytest.approx(0.0, abs=2.0**-50)
    _, error = ev.relative_change(judged(2.2, 3.0), judged(2.0, 3.0))
    assert error == pytest.approx(math.exp(0.1) * 0.1)
    assert math.isnan(ev.relative_change(judged(2.0), judged(2.1))[1])


@pytest.mark.parametrize(("ids", "window"), [(IDS[:7], 8), (IDS, 1), (IDS, 257), (IDS.view(2, 35), 8)])
def test_what_fills_no_window_is_refused(ids: torch.Tensor, window: int) -> None:
    with pytest.raises(Refusal, match="cannot be cut into windows"):
        ev.judge(tiny_model(), ids, window=window)


def test_models_of_different_vocabularies_are_not_compared() -> None:
    with pytest.raises(Refusal, match=f"{VOCABULARY + 1} and {VOCABULARY}"):
        ev.kl_divergence(tiny_model(vocab_size=VOCABULARY + 1), tiny_model(), IDS, window=16)


def test_layer_errors_feed_both_layers_the_original_input() -> None:
    original = tiny_model()
    model = quantize(tiny_model(), "nvfp4", "hadamard:16", calibration=IDS, progress=False)
    names = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"]
    errors = ev.layer_errors(model, original, IDS[:32].view(2, 16), names)
    assert list(errors) == names
    x = ev.activations(original, IDS[:32].view(2, 16), names)
    for name in names:
        ours, theirs = model.get_submodule(name), original.get_submodule(name)
        with torch.no_grad():
            y, y0 = ours(x[name]).double(), theirs(x[name]).double()
        # Norms in float64 of the same fp32 outputs, window by window or all at once.
        assert errors[name] == pytest.approx(float((y - y0).norm() / y0.norm()), rel=1e-12)
        # Two roundings of 9.5% each, of weight and input, that know nothing of each other: 13.4%.
        assert errors[name] == pytest.approx(0.095 * 2**0.5, rel=0.15)
    unchanged = ev.layer_errors(original, original, IDS[:16][None], names)
    assert unchanged == dict.fromkeys(names, 0.0)


def test_activation_statistics() -> None:
    x = torch.zeros(4, 32)
    x[:, 0] = 4.0
    stats = ev.activation_statistics(x)
    assert stats.amax == 4.0
    assert stats.rms == pytest.approx(math.sqrt(0.5))
    assert stats.crest == pytest.approx(4 / math.sqrt(0.5))
    assert stats.group_crest == pytest.approx(4.0)
    gauss = ev.activation_statistics(torch.randn(400, 64, generator=torch.Generator().manual_seed(0)))
    # 25,600 samples: one standard error is sqrt(24 / 25600) = .031.
    assert gauss.kurtosis == pytest.approx(3.0, abs=4 * 0.031)
    assert ev.activation_statistics(torch.zeros(2, 16)).crest == 0.0


def test_speed_counts_tokens() -> None:
    result = ev.speed(tiny_model(), IDS[:20], new_tokens=3)
    assert (result.prompt_tokens, result.new_tokens) == (20, 3)
    assert result.prefill > 0
    assert result.decode > 0
    assert ev.peak_memory()["host"] > 50e6


GENERATOR = torch.Generator().manual_seed(5)
WEIGHT = torch.randn(128, 192, generator=GENERATOR) * 0.02
WEIGHT[:, 7] *= 6
V = random_hadamard(32, seed=1)
DENSE = matrix(torch.randn(64, 64, generator=GENERATOR))
U = random_hadamard(64, seed=2)
OTHERS = {"hadamard 16": hadamard(16)}


def verdict(stored: torch.Tensor, format=NVFP4, first: Transform | None = V, last: Transform | None = None) -> str:
    decoded = round_to_nearest(stored.float(), format).dequantize()
    return check_layer("layer", decoded, WEIGHT, format, first, last, OTHERS).verdict


@pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("first", [V, DENSE], ids=["random-hadamard", "dense"])
def test_each_mistake_of_folding_gets_its_verdict(format, first: Transform) -> None:
    once = first.fold_input_weight(WEIGHT)
    transposed = Transform(first.activation_matrix().T).fold_input_weight(WEIGHT)
    found = {
        OK: verdict(once, format, first),
        NEVER: verdict(WEIGHT, format, first),
        TWICE: verdict(first.fold_input_weight(once), format, first),
        REVERSED: verdict(transposed, format, first),
        SCALED: verdict(once * 4, format, first),
        OTHER: verdict(random_hadamard(32, seed=9).fold_input_weight(WEIGHT), format, first),
    }
    assert found == {name: name for name in found}
    assert verdict(first.unfold_input_weight(WEIGHT), format, first) == REVERSED
    assert verdict(hadamard(16).fold_input_weight(WEIGHT), format, first) == OTHER


def test_the_output_side_is_judged_too() -> None:
    inside = V.fold_input_weight(WEIGHT)
    assert verdict(U.fold_output_weight(inside), last=U) == OK
    assert verdict(inside, last=U) == NEVER
    assert verdict(U.inverse().fold_output_weight(inside), last=U) == REVERSED
    assert verdict(U.fold_output_weight(U.fold_output_weight(inside)), last=U) == TWICE
    assert verdict(U.fold_output_weight(WEIGHT), last=U) == NEVER
    tilted = Transform(torch.eye(64).double() + torch.randn(64, 64, generator=GENERATOR).double() / 12)
    assert verdict(tilted.fold_output_weight(inside), last=tilted) == OK


def test_a_forgotten_bias_is_found() -> None:
    bias = torch.randn(128, generator=GENERATOR)
    fine = LayerVerdict("layer", OK, "", 0.1, 0.1, 0.1)
    folded = U.fold_output_bias(bias).bfloat16()
    assert check_bias(fine, folded, bias, U).verdict == OK
    assert check_bias(fine, bias.bfloat16(), bias, U).verdict == NEVER
    assert check_bias(fine, U.unfold_output_bias(bias).bfloat16(), bias, U).verdict == REVERSED
    assert check_bias(fine, bias.bfloat16(), bias).verdict == OK
    assert check_bias(fine, bias * 1.1, bias).verdict == DIFFERENT


def test_a_symmetric_matrix_cannot_tell_never_from_twice_and_says_so() -> None:
    result = verdict(WEIGHT, first=hadamard(16))
    assert result.startswith(NEVER)
    assert "twice" in result


def test_layers_without_a_declared_transform() -> None:
    assert verdict(WEIGHT, first=None) == OK
    assert verdict(hadamard(16).fold_input_weight(WEIGHT), first=None) == UNDECLARED
    assert verdict(torch.randn(128, 192), first=None) == DIFFERENT


def test_noise_is_no_verdict() -> None:
    once = V.fold_input_weight(WEIGHT).float()
    noisy = once + 0.45 * once.std() * torch.randn(once.shape, generator=GENERATOR)
    assert check_layer("layer", noisy, WEIGHT, NVFP4, V).verdict == CANNOT_TELL
    assert check_layer("layer", torch.zeros(128, 192), WEIGHT, NVFP4, V).verdict == CANNOT_TELL
    assert check_layer("layer", once * math.nan, WEIGHT, NVFP4, V).verdict == CANNOT_TELL
    # One value per block of the transform's eigenvector looks the same turned or not.
    column = torch.linalg.eig(hadamard(16).activation_matrix())
    own = column.eigenvectors[:, column.eigenvalues.real.argmax()].real.float()
    same = own.repeat(12).expand(128, 192)
    decoded = round_to_nearest(same, NVFP4).dequantize()
    assert check_layer("layer", decoded, same, NVFP4, hadamard(16)).verdict == CANNOT_TELL


def test_verify_reads_both_folders(tmp_path: Path) -> None:
    original = tiny_model(dtype=torch.bfloat16)
    original.save_pretrained(tmp_path / "original")
    quantize(original, "mxfp4", "random-hadamard:32", output=tmp_path / "made", progress=False)
    result = verify(tmp_path / "made", tmp_path / "original")
    assert result.ok
    assert len(result.layers) == 14
    assert result.changed == []
    other = tiny_model(dtype=torch.bfloat16, seed=8)
    other.save_pretrained(tmp_path / "other")
    wrong = verify(tmp_path / "made", tmp_path / "other")
    assert {v.verdict for v in wrong.layers} == {OTHER}
    assert "lm_head.weight" in wrong.changed
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "short")
    with pytest.raises(Refusal, match=r"model\.layers\.1\."):
        verify(tmp_path / "made", tmp_path / "short")


def test_a_linear_of_another_shape_is_refused() -> None:
    with pytest.raises(Refusal, match="another shape"):
        check_layer("layer", torch.zeros(4, 16), nn.Linear(16, 8).weight.detach(), NVFP4)
