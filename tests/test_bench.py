"""`quarterturn bench`: shapes as published, models made whole and random, memory reckoned, wrong results not timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quarterturn import bench
from quarterturn.bench import Ask, FourBits, measure, needs, random_model
from quarterturn.bench.shapes import SHAPES, config_of
from quarterturn.cli import main
from quarterturn.errors import Refusal
from quarterturn.formats import FORMATS
from quarterturn.integrations import decoding
from quarterturn.linear import FP4Linear
from test_decoding import on_a_gpu

CPU = torch.device("cpu")
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
}
"""As the models' pages state them."""

SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setitem(SHAPES, "small-qwen", SMALL | {"model_type": "qwen2", "tie_word_embeddings": True})


def small(made: FourBits | None = None, name: str = "small", layers: int | None = None) -> Any:
    return random_model.filled(random_model.meta_model(config_of(name, layers)), CPU, made)


def four_bit_layers(model: nn.Module) -> list[FP4Linear]:
    return [module for module in model.modules() if isinstance(module, FP4Linear)]


# ---- shapes and models


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    model = random_model.meta_model(config_of(name))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_step_of_every_shape_can_be_captured(name: str) -> None:
    assert decoding.unfit(random_model.meta_model(config_of(name, 1))) is None


def test_every_shape_is_compared_with_what_is_published() -> None:
    assert set(PARAMETERS) == set(SHAPES) - {"small", "small-qwen"}


def test_layers_can_be_fewer() -> None:
    assert config_of("llama-3.1-8b", 2).num_hidden_layers == 2
    assert config_of("llama-3.1-8b", 99).num_hidden_layers == 32


@pytest.mark.parametrize("name", ["small", "small-qwen"])
@pytest.mark.parametrize("made", [None, FourBits(transform="hadamard:32"), FourBits("mxfp4", "bf16")])
def test_a_model_is_whole_and_random(name: str, made: FourBits | None) -> None:
    model, steps = random_model.meta_model(config_of(name)), []
    random_model.filled(model, CPU, made, steps.append)
    assert not [key for key, t in (*model.named_parameters(), *model.named_buffers()) if t.device.type == "meta"]
    assert sum(steps) == 21
    assert len(four_bit_layers(model)) == (0 if made is None else 21)
    plain = type(model)(model.config)
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "small-qwen")
    ids = torch.randint(0, 160, (2, 9))
    logits = model(ids).logits
    assert logits.isfinite().all()
    assert logits.float().std() > 0.01
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("fmt", FORMATS)
def test_weights_are_spread_as_they_say(fmt: str) -> None:
    values = random_model.random_weight(256, 512, FORMATS[fmt], CPU).validate().dequantize()
    assert 0.5 * random_model.SPREAD < float(values.std()) < 2 * random_model.SPREAD
    if fmt == "nvfp4":
        assert float(values.std()) == pytest.approx(random_model.SPREAD, rel=0.02)


def test_a_four_bit_layer_is_as_asked_for() -> None:
    layer = four_bit_layers(small(FourBits("mxfp4", "bf16", "hadamard:32", "decoded", "any_torch")))[0]
    assert (layer.format.name, layer.activations, layer.weights) == ("mxfp4", "bf16", "decoded")
    assert layer.input_transform is not None
    assert layer.input_transform.size == 32
    assert layer.explain().backend == "any_torch"
    assert layer.name == "model.layers.0.self_attn.q_proj"
    assert layer.siblings is not None


# ---- bytes


def test_bytes_of_a_step() -> None:
    model = small(FourBits(weights="packed"))
    whole, linear = measure.step_bytes(model, four_bit_layers(model))
    weights = 3 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 192 * 128)
    assert linear == weights * 9 // 16
    # The head and 7 norms in bf16; of the embeddings a step reads a row.
    assert whole == linear + 2 * (160 * 128 + 7 * 128)
    plain = small()
    layers = list(random_model.linear_layers(plain).values())
    assert measure.step_bytes(plain, layers) == (2 * (weights + 160 * 128 + 7 * 128), 2 * weights)
    decoded = small(FourBits(weights="decoded", backend="any_torch"))
    assert measure.step_bytes(decoded, four_bit_layers(decoded))[1] == 2 * weights
    tied = small(name="small-qwen")
    layers = list(random_model.linear_layers(tied).values())
    assert measure.step_bytes(tied, layers)[0] == 2 * (sum(p.numel() for p in tied.parameters()))


@pytest.mark.parametrize("made", [None, FourBits(weights="packed"), FourBits(weights="decoded", backend="any_torch")])
def test_what_is_reckoned_is_what_a_model_takes(made: FourBits | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "_SPARE", {"cpu": 0})
    meta = random_model.meta_model(config_of("small"))
    reckoned = needs.needed(meta, CPU, made, 1, 1, 1)
    taken = measure.model_bytes(small(made))
    assert taken <= reckoned <= 1.5 * taken + 4 * 192 * 128
    # 2 (keys and values) x 2 bytes x layers x width, for twice the batch; and more activations for a longer prompt.
    more = needs.needed(meta, CPU, made, 4, 100, 1) - needs.needed(meta, CPU, made, 4, 50, 1)
    assert more == 4 * 3 * 64 * 2 * 4 * 50
    assert needs.needed(meta, CPU, made, 1, 1, 4000) > reckoned + 4000 * 128


@pytest.mark.parametrize("free", [60, 100, 109, 30])
def test_too_little_memory_says_how_many_layers_fit(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "free_memory", lambda device: free)
    with pytest.raises(Refusal, match="does not reach") as refused:
        needs.check("bf16", lambda layers: 40 + 7 * layers, 10, CPU, "pass --no-bf16")
    text = str(refused.value)
    fit = (free - 40) // 7
    assert (f"--layers {fit}" if fit > 0 else "smaller shape") in text
    assert "--no-bf16" in text
    if fit > 0:
        needs.check("bf16", lambda layers: 40 + 7 * layers, fit, CPU)


def test_memory_is_asked_for_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "_SPARE", {"cpu": 0})
    monkeypatch.setattr(bench, "filled", None)
    meta, made = random_model.meta_model(config_of("small")), FourBits(weights="packed", backend="any_torch")
    ours, plain = (needs.needed(meta, CPU, kind, 1, 16, 8) for kind in (made, None))
    monkeypatch.setattr(needs, "free_memory", lambda device: (ours + plain) // 2)
    with pytest.raises(Refusal, match=r"--layers [12], or pass --no-bf16"):
        bench.bench(Ask("small", cache=16, prompt=8, new_tokens=1, made=made), CPU)


def test_fragments_are_counted_once() -> None:
    layer = torch.nn.Linear(4096, 1024, device="meta")
    packed, fragments, decoded = (
        needs._linear_bytes(layer, kept, FourBits()) for kept in ("packed", "int32", "bfloat16")
    )
    assert packed == 4096 * 1024 * 4.5 / 8
    assert packed <= fragments < 1.01 * packed
    assert decoded == packed + 2 * 4096 * 1024


def test_free_memory_is_a_number_here() -> None:
    from quarterturn.machine import free_memory

    free = free_memory(CPU)
    assert free is not None
    assert free > 10**7


# ---- what is wrong is not timed


def test_a_wrong_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = four_bit_layers(small(FourBits(transform="hadamard:16")))
    measure.check_layers(layers, (1, 16))
    right = FP4Linear.forward
    monkeypatch.setattr(
        FP4Linear,
        "forward",
        lambda self, x: right(self, x) * (1.02 if self.requested_backend == "auto" and x.shape[0] == 16 else 1),
    )
    with pytest.raises(Refusal, match="128 x 128 is wrong on 16 rows"):
        measure.check_layers(layers, (1, 16))
    monkeypatch.setattr(FP4Linear, "forward", lambda self, x: right(self, x) * float("nan"))
    with pytest.raises(Refusal, match="nan"):
        measure.check_layers(layers, (1,))


def test_a_step_that_reads_old_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    on_a_gpu(monkeypatch)
    assert measure.decode_step(model, 2, 32, 3, "captured") > 0

    def stale(step: Any, device: torch.device) -> Any:
        result = step()
        return lambda: None, result

    monkeypatch.setattr(decoding, "captured", stale)
    with pytest.raises(Refusal, match="other logits than the eager one"):
        measure.decode_step(model, 2, 32, 3, "captured")


def test_the_way_of_a_step_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    broken: list[str] = []

    def step(model: Any, batch: int, cache: int, new: int, way: str) -> float:
        tried.append(way)
        if way in broken:
            raise RuntimeError(f"no {way} here\nmore")
        return 1.0

    monkeypatch.setattr(measure, "decode_step", step)
    monkeypatch.setattr(bench, "obstacle", lambda model: None)
    ask = Ask("small")
    for way, words in (
        ("compiled", "compiled, in a CUDA graph"),
        ("captured", "in a CUDA graph (not compiled: no compiled here)"),
        ("eager", "eager (not compiled: no compiled here)"),
    ):
        assert bench._step(None, ask, 1, True) == (1.0, f"static cache, {words}")
        assert tried[-1] == way
        broken.append(way)
    broken.remove("eager")
    uncompiled = Ask("small", compiled=False)
    assert bench._step(None, uncompiled, 1, True)[1] == "static cache, eager (not captured: no captured here)"
    monkeypatch.setattr(bench, "obstacle", lambda model: "sliding windows")
    assert bench._step(None, ask, 1, True)[1] == "static cache, eager (sliding windows)"
    assert bench._step(None, ask, 1, False)[1] == "static cache, eager"


def test_seconds_are_the_median_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 10.0, 100.0, 102.0, 200.0, 204.0])
    monkeypatch.setattr(measure, "now", lambda device: next(times))
    assert measure.median_seconds(lambda: None, CPU, times=2) == 2.0


def test_weights_that_a_cache_may_hold_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench._notes(10**6, CPU) == ()
    gpu = torch.device("cuda")
    monkeypatch.setattr(bench, "cache_bytes", lambda device: 60 * 10**6)
    assert "cache" in bench._notes(200 * 10**6, gpu)[0]
    assert bench._notes(10**9, gpu) == ()


# ---- the whole, and the command


def test_a_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "copy_speed", lambda device: 1e9)
    ask = Ask("small", (1, 3), prompt=20, new_tokens=2, cache=16, made=FourBits(transform="hadamard:16"), layers=2)
    result = bench.bench(ask, CPU)
    assert [m.name for m in result.models] == ["nvfp4", "bf16"]
    assert result.layers == 2
    ours, plain = result.models
    assert "W4A4 nvfp4, input transform 16" in ours.ran
    assert plain.ran == "bf16"
    for model in result.models:
        assert model.peak_bytes is None
        for decode in model.decodes:
            assert decode.share == pytest.approx(model.step_bytes / 1e9 / decode.step)
            assert decode.linear_share == pytest.approx(model.linear_bytes / 1e9 / decode.linear)
            assert decode.linear < decode.step
            assert decode.tokens_per_second == decode.batch / decode.step
    record = json.loads(json.dumps(result.record()))
    assert record["models"][0]["decodes"][1]["tokens_per_second"] > 0
    assert {"date", "processor", "torch"} <= set(record["machine"])


def run(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as left:
        main(["bench", *(str(argument) for argument in arguments)])
    return int(left.value.code or 0)


SHORT = ("--prompt", 8, "--new-tokens", 1, "--cache", 16, "--device", "cpu")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "runs.jsonl"
    assert run("--model-shape", "small", "--batch", "1,2", "--record", record, *SHORT, "--transform", "none") == 0
    shown = capsys.readouterr()
    assert "of bf16" in shown.out
    assert "batch 2: writing, tokens/s" in shown.out
    assert "making the nvfp4 model" in shown.err
    assert run("--model-shape", "small", "--record", record, *SHORT, "--format", "mxfp4", "--transform", "hadamard:32",
               "--no-bf16", "--json") == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [len(line["models"]) for line in lines] == [2, 1]
    assert lines[1] == found
    assert found["models"][0]["name"] == "mxfp4"
    assert found["ask"]["made"]["transform"] == "hadamard:32"


def test_a_record_that_is_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model-shape", "small", "--record", tmp_path, *SHORT) == 1
    shown = capsys.readouterr().err
    assert "the record is a folder" in shown
    assert "making" not in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--model-shape", "small", "--layers", 4, *SHORT), "at most the 3 layers of small; found 4"),
        (("--model-shape", "gpt-7"), "llama-3.1-8b"),
        (("--model-shape", "small", "--batch", "1,x"), "--batch 1,16"),
        (("--model-shape", "small", "--new-tokens", 40), "cache"),
        (("--model-shape", "small", "--prompt", 4096), "at most 128 tokens"),
        (("--model-shape", "small", "--transform", "hadamard:48"), "48"),
        (("--model-shape", "small", "--format", "int4"), "nvfp4"),
        (("--model-shape", "small", "--activations", "int8"), "fp4 or bf16"),
        (("--model-shape", "small", "--backend", "nobody"), "any_torch"),
        (("--model-shape", "small", "--device", "cuda"), "cuda"),
        (("--model-shape", "small", "--record", "nowhere/at/all.jsonl"), "folder"),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: tuple[Any, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SHORT, *arguments) == 1
    shown = capsys.readouterr()
    assert named in shown.err
    assert shown.out == ""
    assert "Traceback" not in shown.err


def test_nothing_is_recorded_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--model-shape", "small", *SHORT, "--no-bf16", "--transform", "none") == 0
    assert not list(tmp_path.iterdir())


def test_a_copy_has_a_speed() -> None:
    speed: float | Tensor = measure.copy_speed(CPU)
    assert 1e8 < speed < 1e13


@pytest.mark.gpu
def test_a_run_on_a_gpu() -> None:
    made = FourBits(transform="hadamard:64", weights="packed")
    ask = Ask("smollm2-135m", (1, 16), prompt=128, new_tokens=4, cache=64, made=made, layers=2)
    result = bench.bench(ask, torch.device("cuda", torch.cuda.current_device()))
    for model in result.models:
        assert model.peak_bytes is not None
        assert model.peak_bytes >= model.model_bytes
        assert {decode.way for decode in model.decodes} == {"static cache, compiled, in a CUDA graph"}
    assert "in fragments" in result.models[0].ran
    assert result.notes
