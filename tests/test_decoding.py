"""Decoding with a static cache: the same tokens as Transformers' own, steps of fixed shape, and what has none.

What captures launches needs a GPU; here its place is taken by one that calls the step again and writes where the first
result was, as a replay does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quarterturn
from quarterturn.integrations import decoding
from quarterturn.integrations.decoding import StaticDecoder
from quarterturn.integrations.models import cache_argument
from tiny_models import tiny_model, tiny_tokenizer, tokens


def replaying(step: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    for _ in range(decoding.WARM_UP):
        step()
    result = torch.empty_like(step())

    def replay() -> None:
        result.copy_(step())

    return replay, result


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models on the CPU are taken for ones on a GPU."""
    monkeypatch.setattr(decoding, "captured", replaying)
    monkeypatch.setattr(decoding, "_captures", lambda device: True)


def continued(model: Any, ids: Tensor, new: int, **options: Any) -> Tensor:
    return model.generate(ids, max_new_tokens=new, attention_mask=torch.ones_like(ids), **options)


@pytest.mark.parametrize("way", ["eager", "captured", "compiled"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_tokens_are_those_of_transformers(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **how: plain(step, backend="aot_eager", **how))
    model = tiny_model(kind)
    decoder = StaticDecoder(model, 1, 40, way)
    assert decoder.length == 48
    # Twice, of two lengths: the second sequence finds nothing of the first.
    for length in (20, 7):
        ids = tokens(1, length)
        want = continued(model, ids, 20, do_sample=False)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        got = decoding.generate(model, decoder, inputs, max_new_tokens=20, do_sample=False)
        assert torch.equal(got, want)
    torch.compiler.reset()


def test_a_batch_gets_the_logits_of_its_sequences() -> None:
    model, ids = tiny_model(), tokens(3, 12)
    decoder = StaticDecoder(model, 3, 16)
    whole = model(ids, use_cache=False).logits
    found = [decoder.prompt(ids[:, :10]), decoder.step(ids[:, 10]), decoder.step(ids[:, 11:])]
    for place, logits in zip((9, 10, 11), found, strict=True):
        torch.testing.assert_close(logits, whole[:, place])


def test_sampling_and_processors_are_those_of_transformers() -> None:
    model, ids = tiny_model(), tokens(1, 9)
    options = {"do_sample": True, "temperature": 0.7, "top_k": 12, "repetition_penalty": 1.3}
    torch.manual_seed(5)
    want = continued(model, ids, 16, **options)
    torch.manual_seed(5)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    got = decoding.generate(model, StaticDecoder(model, 1, 25), inputs, max_new_tokens=16, **options)
    assert torch.equal(got, want)


def test_it_stops_where_the_model_ends() -> None:
    model, ids = tiny_model(), tokens(1, 9)
    first = int(continued(model, ids, 8, do_sample=False)[0, 12])
    model.generation_config.eos_token_id = first
    want = continued(model, ids, 30, do_sample=False)
    assert want.shape[1] < 39
    seen: list[list[int]] = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            seen.append(value.flatten().tolist())

        def end(self) -> None:
            seen.append([])

    decoder = StaticDecoder(model, 1, 39)
    got = decoding.generate(model, decoder, {"input_ids": ids}, Streamer(), max_new_tokens=30, do_sample=False)
    assert torch.equal(got, want)
    assert [token for part in seen for token in part] == want[0].tolist()
    assert seen[-1] == []


@pytest.mark.parametrize("way", ["captured", "compiled"])
def test_a_four_bit_model_has_such_steps_too(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quarterturn.quantize(tiny_model(dtype=torch.bfloat16), "nvfp4", transform="hadamard:16", calibration=tokens(),
                         output=tmp_path / "made", tokenizer=tiny_tokenizer(), progress=False)  # fmt: skip
    model, ids = quarterturn.load(tmp_path / "made", device="cpu"), tokens(1, 8)
    on_a_gpu(monkeypatch)
    assert decoding.obstacle(model) is None
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **how: plain(step, backend="aot_eager", **how))
    got = decoding.generate(
        model, StaticDecoder(model, 1, 24, way), {"input_ids": ids}, max_new_tokens=16, do_sample=False
    )
    assert torch.equal(got, continued(model, ids, 16, do_sample=False))


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("gpt_oss", {}, "StaticSlidingWindowLayer"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "StaticSlidingWindow"),
    ],
)
def test_models_without_steps_of_one_shape_are_named(kind: str, changes: dict[str, Any], named: str) -> None:
    assert named in (decoding.unfit(tiny_model(kind, **changes)) or "")
    assert decoding.unfit(tiny_model("llama")) is None


def test_separate_experts_are_no_fixed_step(tmp_path: Path) -> None:
    quarterturn.quantize(tiny_model("qwen3_moe", dtype=torch.bfloat16), "nvfp4", activations="bf16",
                         output=tmp_path / "made", progress=False)  # fmt: skip
    assert "router" in (decoding.unfit(quarterturn.load(tmp_path / "made", device="cpu")) or "")


def test_on_a_cpu_nothing_is_captured() -> None:
    decoder, reason = decoding.capture(tiny_model(), 1, 32)
    assert decoder is None
    assert "cpu" in reason


def test_a_capture_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(decoding, "captured", fails)
    decoder, reason = decoding.capture(tiny_model(), 1, 32)
    assert decoder is None
    assert reason == "CUDA error: operation not permitted when stream is capturing"


def test_the_name_of_the_cache() -> None:
    assert cache_argument(tiny_model()) in ("cache", "past_key_values")


def test_the_command_says_why_nothing_is_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quarterturn.cli import running

    model, ids = tiny_model(), tokens(1, 9)
    want = continued(model, ids, 12, do_sample=False)[0, 9:].tolist()
    seen: list[int] = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            pass

    def write() -> list[int]:
        seen.clear()
        options = {"streamer": Streamer(), "max_new_tokens": 12, "do_sample": False}
        running._generate_captured(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 21, options)
        return seen[9:]

    assert write() == want
    assert "without a CUDA graph: the model is on cpu" in capsys.readouterr().err
    on_a_gpu(monkeypatch)
    used: list[int] = []
    step = StaticDecoder.step
    monkeypatch.setattr(StaticDecoder, "step", lambda self, t: used.append(1) or step(self, t))
    assert write() == want
    assert len(used) == 11
    assert "without" not in capsys.readouterr().err


@pytest.fixture
def this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured on the GPU at hand, whether or not these tests were ever run on one like it."""
    monkeypatch.setattr(decoding, "RUN_ON", (torch.cuda.get_device_capability(),))


@pytest.mark.gpu
@pytest.mark.usefixtures("this_gpu")
@pytest.mark.parametrize("way", ["captured", "compiled"])
@pytest.mark.parametrize("four_bit", [False, True])
def test_on_a_gpu_steps_from_a_graph_are_the_eager_ones(way: str, four_bit: bool) -> None:
    from quarterturn.bench import random_model
    from quarterturn.bench.shapes import config_of

    made = random_model.FourBits(transform="hadamard:64", weights="packed") if four_bit else None
    gpu = torch.device("cuda", torch.cuda.current_device())
    model = random_model.filled(random_model.meta_model(config_of("smollm2-135m", 2)), gpu, made)
    assert decoding.obstacle(model) is None
    for batch in (1, 3):
        plain, decoder = StaticDecoder(model, batch, 64), StaticDecoder(model, batch, 64, way)
        ids = torch.randint(0, 49152, (batch, 9), device=gpu)
        for length in (9, 5):  # the second sequence finds nothing of the first
            want, got = plain.prompt(ids[:, :length]), decoder.prompt(ids[:, :length])
            for _ in range(20):
                chosen = want.argmax(-1)
                want, got = plain.step(chosen), decoder.step(chosen)
                assert (got - want).norm() <= 1e-3 * want.norm()  # compiled code rounds where the model's own does
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.usefixtures("this_gpu")
def test_on_a_gpu_generate_is_captured(tmp_path: Path) -> None:
    model, ids = tiny_model().cuda(), tokens(1, 9).cuda()
    decoder, reason = decoding.capture(model, 1, 40)
    assert decoder is not None, reason
    got = decoding.generate(model, decoder, {"input_ids": ids}, max_new_tokens=20, do_sample=False)
    assert torch.equal(got, continued(model, ids, 20, do_sample=False))


@pytest.mark.gpu
@pytest.mark.usefixtures("this_gpu")
def test_on_a_gpu_a_step_that_waits_for_the_host_is_no_loss() -> None:
    model, ids = tiny_model().cuda(), tokens(1, 9).cuda()
    want = continued(model, ids, 8, do_sample=False)
    forward = model.model.norm.forward
    model.model.norm.forward = lambda x: forward(x) * float(x.isfinite().all().item())
    decoder, reason = decoding.capture(model, 1, 40)
    assert decoder is None
    assert reason
    assert torch.equal(continued(model, ids, 8, do_sample=False), want)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_random_numbers_to_others() -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())

    def step() -> Tensor:
        x = torch.randn(3, device=gpu)
        return x / x.sum().item()  # the host waits, which no graph can

    with pytest.raises(RuntimeError):
        decoding.captured(step, gpu)
    assert torch.randn(3, device=gpu).isfinite().all()
    replay, result = decoding.captured(lambda: torch.randn(1000, device=gpu), gpu)
    replay()
    before = result.clone()
    replay()
    assert not torch.equal(result, before)
