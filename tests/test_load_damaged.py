"""What `load` refuses beside the packed layers: tensors that are not the model's, and configs that no model fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quarterturn as qt
from altered import Change, altered, make_checkpoint, shard
from quarterturn.checkpoint import describe, open_checkpoint
from quarterturn.transforms import Transform


@pytest.fixture(scope="module", params=["llama", "tied", "qwen3_moe"])
def any_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("damaged") / request.param, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("damaged") / "llama")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("damaged") / "moe", "qwen3_moe")


def replaced(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors[name]).clone()

    return change


def refused(source: Path, folder: Path, change: Change) -> str:
    """What `load` says of an altered copy: a refusal with all its parts."""
    altered(source, folder, change)
    with pytest.raises(qt.CheckpointRefusal) as caught:
        qt.load(folder, device="cpu")
    text = str(caught.value)
    for word in ("load: ", "\n  file ", "\n  needs ", "; found ", "\n  do "):
        assert word in text, text
    return text


NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("name", "make", "needed", "found"),
    [
        (NORM, lambda t: t[:1], "(64,)", "(1,)"),
        (NORM, lambda t: t[:-1], "(64,)", "(63,)"),
        (NORM, lambda t: t[None], "(64,)", "(1, 64)"),
        (HEAD, lambda t: t[:-1], "(96, 64)", "(95, 64)"),
        (HEAD, lambda t: t[:, :-1], "(96, 64)", "(96, 63)"),
        (EMBEDDING, lambda t: t[:-1], "(96, 64)", "(95, 64)"),
        (EMBEDDING, lambda t: torch.cat([t, t]), "(96, 64)", "(192, 64)"),
    ],
)
def test_an_unquantized_tensor_has_the_models_shape(
    name: str, make: Callable[[Tensor], Tensor], needed: str, found: str, llama: Path, tmp_path: Path
) -> None:
    text = refused(llama, tmp_path / "bad", replaced(name, make))
    assert f"tensor {name}\n  needs {needed}; found {found}" in text
    sharded = shard(tmp_path / "bad", tmp_path / "sharded")
    with pytest.raises(qt.CheckpointRefusal, match=name):
        qt.load(sharded, device="cpu")


@pytest.mark.parametrize("make", [lambda t: t[:-1], lambda t: torch.cat([t, t])], ids=["short", "doubled"])
def test_a_router_has_a_row_for_every_expert(make: Callable[[Tensor], Tensor], moe: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate.weight"
    assert f"tensor {name}\n  needs (4, 64)" in refused(moe, tmp_path / "bad", replaced(name, make))


def test_tied_embeddings_have_the_vocabularys_rows(tmp_path: Path) -> None:
    tied = make_checkpoint(tmp_path / "tied", "tied")
    assert f"tensor {EMBEDDING}" in refused(tied, tmp_path / "bad", replaced(EMBEDDING, lambda t: t[:-1]))


@pytest.mark.parametrize("size", [95, 97])
def test_the_vocabulary_of_the_config_is_the_files(size: int, llama: Path, tmp_path: Path) -> None:
    text = refused(llama, tmp_path / "bad", lambda config, _: config.update(vocab_size=size))
    assert f"needs ({size}, 64); found (96, 64)" in text


def test_what_transformers_merges_is_compared_afterwards(moe: Path) -> None:
    from quarterturn.integrations.fitting import check_shapes

    model = qt.load(moe, device="cpu")
    wanted = dict(model.hf_quantizer.shapes)
    assert wanted[NORM] == (64,)
    check_shapes(model, open_checkpoint(moe), wanted)
    with pytest.raises(qt.CheckpointRefusal, match=NORM):
        check_shapes(model, open_checkpoint(moe), wanted | {NORM: torch.Size([65])})


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", [NORM, HEAD])
def test_an_unquantized_tensor_is_plain_floating_point(
    name: str, dtype: torch.dtype, llama: Path, tmp_path: Path
) -> None:
    text = refused(llama, tmp_path / "bad", replaced(name, lambda t: t.to(dtype)))
    assert f"tensor {name}\n  needs one of BF16, F16, F32, F64; found " in text
    assert any(note.startswith(f"{name}: ") for note in describe(str(tmp_path / "bad"))["notes"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_plain_dtype_is_read(dtype: torch.dtype, any_kind: Path, tmp_path: Path) -> None:
    folder = altered(any_kind, tmp_path / "other", replaced(NORM, lambda t: t.to(dtype)))
    assert qt.load(folder, device="cpu").get_parameter(NORM).shape == (64,)
    assert not any(NORM in note for note in describe(str(folder))["notes"])


def matrix_of(tensors: dict[str, Tensor]) -> str:
    return next(name for name in tensors if name.endswith("_input.weight"))


def singular(matrix: Tensor) -> Tensor:
    """Full of different numbers, and of rank R - 1."""
    made = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made[-1] = made[:-1].sum(0)
    return made


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: t.double() * 1e300, "finite in fp32"),
        (lambda t: t * 0, "no inverse.*zeros alone"),
        (torch.ones_like, "no inverse.*a singular one"),
        (singular, "no inverse.*a singular one"),
        (lambda t: t.double() * 1e-300, "no inverse"),
    ],
)
def test_a_matrix_that_is_no_transform(
    make: Callable[[Tensor], Tensor], words: str, llama: Path, tmp_path: Path
) -> None:
    name = ""

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        nonlocal name
        name = matrix_of(tensors)
        tensors[name] = make(tensors[name])

    text = refused(llama, tmp_path / "bad", change)
    assert re.search(f"(?s){words}", text), text
    assert f"tensor {name}" in text
    assert describe(str(tmp_path / "bad"))["refused"] == text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_matrices_with_an_inverse_are_known(dtype: torch.dtype) -> None:
    made = torch.randn(96, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for matrix in (made, torch.linalg.qr(made).Q, torch.eye(96) * 1e-20, torch.eye(96).roll(1, 0)):
        assert Transform(matrix.to(dtype)).is_invertible
    assert Transform(torch.linalg.qr(made).Q.to(dtype) * torch.arange(1, 97)).is_invertible
    assert qt.hadamard(1).is_invertible
    assert not Transform(made * torch.cat([torch.zeros(1), torch.ones(95)])).is_invertible


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["quantization_config"]
    return found


def schemes(config: dict[str, Any]) -> list[dict[str, Any]]:
    return list(quantization(config)["transform_config"]["config_groups"].values())


CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a target of a transform": (lambda c: schemes(c)[0]["apply"][0].update(targets=["re:("]), r"no pattern.*'re:\('"),
    "a target of a group": (lambda c: quantization(c)["config_groups"]["group_0"].update(targets=["re:["]), "no patt"),
    "an ignored pattern": (lambda c: quantization(c).update(ignore=["re:*"]), "the ignore: this is no pattern"),
    "sparsity as a word": (lambda c: quantization(c).update(sparsity_config="x"), "sparsity_config.*'x'"),
    "transforms in a list": (lambda c: quantization(c).update(transform_config=[1]), r"transform_config.*\[1\]"),
    "schemes in a list": (lambda c: quantization(c)["transform_config"].update(config_groups=[1]), "transform_config"),
    "groups in a list": (lambda c: quantization(c).update(config_groups=[1]), "quantization_config"),
    "heads that do not fit": (lambda c: c.update(num_attention_heads=3), "num_attention_heads|attention heads"),
    "a width in words": (lambda c: c.update(hidden_size="wide"), "hidden_size"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_damaged_config_is_refused(fault: str, llama: Path, tmp_path: Path) -> None:
    change, words = CONFIGS[fault]
    assert re.search(f"(?s){words}", refused(llama, tmp_path / "bad", lambda config, _: change(config)))
