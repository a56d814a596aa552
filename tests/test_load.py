"""Loading as a Transformers model: the producer's own checkpoints where they are at hand, and what is around them."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import quarterturn as qt
from altered import altered, make_checkpoint, shard
from producer_layout import write
from quarterturn.checkpoint import open_checkpoint
from quarterturn.rotated_linear import RotatedLinear
from tiny_models import KINDS, tokens

# The tests compare numbers of one device; tests/test_gpu.py compares devices.
load = functools.partial(qt.load, device="cpu")
# Checkpoints that llm-compressor made, where they are at hand; those of producer_layout.py are made anywhere.
PRODUCED = Path(__file__).resolve().parents[2] / "shared" / "checkpoints"
FOLDERS = sorted(p for p in PRODUCED.glob("*") if (p / "expected.safetensors").exists())
LAID_OUT = [("llama", "nvfp4"), ("llama", "mxfp4"), ("tied", "nvfp4"), ("qwen2", "nvfp4"), ("qwen2", "mxfp4")]
every_produced = pytest.mark.parametrize("produced", [*LAID_OUT, *FOLDERS], indirect=True, ids=lambda p: (
    p.name if isinstance(p, Path) else "-".join(p)
))  # fmt: skip


@pytest.fixture
def produced(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return request.param if isinstance(request.param, Path) else write(tmp_path / "produced", *request.param)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def same_bytes(one: Path, other: Path) -> None:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), b[name].view(torch.uint8)), name


@every_produced
def test_a_produced_checkpoint_layer_by_layer(produced: Path) -> None:
    checkpoint, expected = open_checkpoint(produced), load_file(produced / "expected.safetensors")
    model = load(produced, dtype="float32")
    rows, off = 0, 0
    for name in checkpoint.layers:
        got, want = model.get_submodule(name)(expected[f"layers.{name}.input"]), expected[f"layers.{name}.output"]
        errors = (got - want).norm(dim=1) / want.norm(dim=1)
        rows, off = rows + len(errors), off + int((errors > 1e-5).sum())
    # fp32 sums in another order may move a value across a tie: at most one row in a thousand, so here none.
    assert off <= rows / 1000


@every_produced
def test_a_produced_checkpoint_as_a_whole(produced: Path, tmp_path: Path) -> None:
    expected = load_file(produced / "expected.safetensors")
    logits = load(produced, dtype="float32")(expected["input_ids"]).logits
    if "logits_specified" in expected:
        # A sum in another order that moves a value across a tie changes all the tokens behind it, in so small a model
        # by a tenth; those before it are the same to fp32, and a wrong layer would leave none of them.
        want = expected["logits_specified"]
        errors = (logits - want).norm(dim=-1) / want.norm(dim=-1)
        assert float(errors.flatten().quantile(0.25)) < 1e-5
        assert relative(logits, want) < relative(expected["logits_unquantized"], want)
    elif "logits" in expected:
        assert relative(logits, expected["logits"]) < 2e-2
    else:
        producer = expected["logits_producer"]
        assert relative(logits, producer) < relative(expected["logits_unquantized"], producer)
    model = load(produced)
    model.save_pretrained(tmp_path / "saved")
    same_bytes(produced, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"] == json.loads((produced / "config.json").read_text())["quantization_config"]


@pytest.fixture(scope="module", params=[k for k in KINDS if k != "gpt_oss"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made") / request.param, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made") / "llama")


def test_saving_gives_the_same_bytes_and_logits(made: Path, tmp_path: Path) -> None:
    model = load(made)
    model.save_pretrained(tmp_path / "saved")
    same_bytes(made, tmp_path / "saved")
    with torch.no_grad():
        want = model(tokens()).logits
        assert torch.equal(load(tmp_path / "saved")(tokens()).logits, want)
    sharded = load(shard(made, tmp_path / "sharded"))
    assert torch.equal(sharded(tokens()).logits, want)


def test_names_are_the_models_own_and_generate_works(made: Path) -> None:
    model = load(made)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert isinstance(model.get_submodule("model.layers.0.self_attn.q_proj"), qt.FP4Linear)
    out = model.generate(tokens(1, 8), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape[1] in range(9, 13)


def test_what_ran_can_be_asked(made: Path) -> None:
    told = qt.explain(load(made))
    assert len(told) == len(open_checkpoint(made).layers)
    assert told[0].layer.startswith("model.layers.0.")
    assert told[0].arithmetic == "W4A4 nvfp4, input transform 32"
    assert told[0].backend
    assert told[0].reason


def test_layers_can_be_batch_invariant(llama: Path) -> None:
    model = load(llama, dtype="bfloat16", batch_invariant=True)
    assert all(told.arithmetic.endswith(", batch-invariant") for told in qt.explain(model))
    with pytest.raises(qt.BackendRefusal, match=r"(?s)any_torch.*batch_invariant needs one order"):
        load(llama, batch_invariant=True, backend="any_torch")


def test_activations_can_be_left_alone(llama: Path) -> None:
    exact, loose = load(llama, dtype="float32"), load(llama, dtype="float32", activations="bf16")
    a, b = exact(tokens()).logits, loose(tokens()).logits
    # 14 layers in a row, each with some 10% of its input rounded away or not: about sqrt(14) * .1 = .37.
    assert 0.1 < relative(a, b) < 0.5
    assert all(e.arithmetic.startswith("W4A16") for e in qt.explain(loose))


@pytest.mark.parametrize("weights", ["packed", "decoded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_and_ways_to_keep_weights(llama: Path, dtype: str, weights: str) -> None:
    model = load(llama, dtype=dtype, weights=weights, backend="any_torch")
    logits = model(tokens()).logits
    assert logits.dtype == getattr(torch, dtype)
    assert bool(torch.isfinite(logits).all())
    if dtype == "float32":
        other = load(llama, dtype=dtype, backend="any_torch")
        assert torch.equal(logits, other(tokens()).logits), "decoding is exact, and so the way of keeping no matter"


def test_a_dtype_or_backend_that_is_not_there_is_refused(llama: Path) -> None:
    with pytest.raises(qt.Refusal, match=r"(?s)dtype.*int8"):
        load(llama, dtype="int8")
    with pytest.raises(qt.BackendRefusal, match=r"(?s)no_such.*any_torch"):
        load(llama, backend="no_such")


def test_several_devices(llama: Path, tmp_path: Path) -> None:
    want = load(llama, dtype="float32")(tokens()).logits
    whole = load(llama, dtype="float32", device_map={"": "cpu"})
    assert torch.equal(whole(tokens()).logits, want)
    spread = load(llama, dtype="float32", device_map="auto")
    got = spread(tokens().to(spread.device)).logits.cpu()
    # On a GPU a hidden state that differs in its last bit can move a code next to a tie, about 1e-3 of the logits each.
    assert relative(got, want) < (2e-2 if torch.cuda.is_available() else 1e-9)


def test_reloading_in_place_and_two_models_at_once(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = make_checkpoint(tmp_path_factory.mktemp("other") / "llama", transform="random-hadamard:16", seed=3)
    first, second = load(llama, dtype="float32"), load(other, dtype="float32")
    want, want_other = first(tokens()).logits, second(tokens()).logits
    assert not torch.equal(want, want_other)
    del first
    again = load(llama, dtype="float32")
    assert torch.equal(again(tokens()).logits, want)
    third = make_checkpoint(tmp_path_factory.mktemp("third") / "llama", samples=1)
    fresh = load(third, dtype="float32")
    again.load_state_dict(fresh.state_dict())
    assert torch.equal(again(tokens()).logits, fresh(tokens()).logits)


def test_compile_takes_a_whole_model(llama: Path) -> None:
    model = load(llama, dtype="float32")
    with torch.no_grad():
        want = model(tokens(), use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(tokens(), use_cache=False).logits, want)


def test_permuted_hadamards(llama: Path, tmp_path: Path) -> None:
    """`randomize` stores a permutation beside the matrix: rows and columns are taken in its order."""
    order = torch.randperm(32)

    def change(config: dict, tensors: dict) -> None:
        name, scheme = next(iter(config["quantization_config"]["transform_config"]["config_groups"].items()))
        scheme["randomize"] = True
        matrix = next(n for n in tensors if n.endswith(f"{name}_input.weight"))
        tensors[matrix.removesuffix("weight") + "perm"] = order
        back = order.argsort()
        tensors[matrix] = tensors[matrix][back][:, back]

    folder = altered(llama, tmp_path / "permuted", change)
    want = load(llama, dtype="float32")(tokens()).logits
    model = load(folder, dtype="float32")
    assert torch.equal(model(tokens()).logits, want)
    load(folder).save_pretrained(tmp_path / "saved")
    same_bytes(folder, tmp_path / "saved")


def test_an_unquantized_linear_behind_a_transform_is_run(llama: Path, tmp_path: Path) -> None:
    def change(config: dict, tensors: dict) -> None:
        scheme = next(iter(config["quantization_config"]["transform_config"]["config_groups"].values()))
        for apply in scheme["apply"]:
            apply["ignore"] = []
        tensors["lm_head.weight"] = turn.fold_input_weight(tensors["lm_head.weight"]).to(
            tensors["lm_head.weight"].dtype
        )

    turn = next(iter(open_checkpoint(llama).layers.values())).input_transform
    assert turn is not None
    model = load(altered(llama, tmp_path / "head", change), dtype="float32")
    assert isinstance(model.lm_head, RotatedLinear)
    # The head was rounded to fp32 after folding, and its input after turning; its sums are in fp32 both times.
    assert relative(model(tokens()).logits, load(llama, dtype="float32")(tokens()).logits) < 2.0**-20


def test_an_embedding_behind_a_transform_is_refused(llama: Path, tmp_path: Path) -> None:
    def change(config: dict, _: dict) -> None:
        scheme = next(iter(config["quantization_config"]["transform_config"]["config_groups"].values()))
        scheme["apply"].append({"location": "output", "targets": ["re:.*embed_tokens"], "inverse": False, "ignore": []})

    with pytest.raises(qt.CheckpointRefusal, match=r"(?s)model\.embed_tokens.*Embedding"):
        load(altered(llama, tmp_path / "embedding", change))


def test_the_original_is_not_blown_up(llama: Path) -> None:
    with safe_open(llama / "model.safetensors", "pt") as stored:
        packed = sum(stored.get_tensor(n).nbytes for n in stored.keys() if n.endswith(("_packed", "_scale")))  # noqa: SIM118
    model = load(llama, weights="packed")
    held = sum(m.weight_tensor().nbytes for m in model.modules() if isinstance(m, qt.FP4Linear))
    assert held <= packed * 1.01
    assert all(m.values is None for m in model.modules() if isinstance(m, qt.FP4Linear))


def test_a_loaded_model_can_be_copied_and_pickled(llama: Path) -> None:
    model = load(llama, dtype="float32")
    want = model(tokens()).logits
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, want)
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens()).logits, want)


def test_a_name_goes_before_a_class_where_two_groups_match(llama: Path, tmp_path: Path) -> None:
    def change(config: dict, _: dict) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["group_1"] = groups["group_0"] | {"targets": ["re:.*down_proj$"], "input_activations": None}

    told = qt.explain(load(altered(llama, tmp_path / "two", change)))
    assert {e.arithmetic.split()[0] for e in told if e.layer.endswith("down_proj")} == {"W4A16"}
    assert {e.arithmetic.split()[0] for e in told if not e.layer.endswith("down_proj")} == {"W4A4"}


def test_a_model_whose_modules_transformers_renames(tmp_path: Path) -> None:
    config = GPTNeoXConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=96,
        max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    made = qt.quantize(
        GPTNeoXForCausalLM(config).eval(), transform="hadamard:32", calibration=tokens(), output=tmp_path / "neox",
        progress=False,
    )  # fmt: skip
    want = made(tokens()).logits
    assert torch.equal(load(tmp_path / "neox", dtype="float32")(tokens()).logits, want)


def test_a_device_that_is_not_there_is_refused(llama: Path) -> None:
    with pytest.raises(qt.Refusal, match="no such device"):
        qt.load(llama, device="foo")
