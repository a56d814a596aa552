"""What a reload of weights is held to: the transforms and the quantization entry that the engine was started with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quarterturn
from quarterturn import CheckpointRefusal
from quarterturn.checkpoint import open_checkpoint
from quarterturn.integrations.vllm.first_load import FirstLoad
from tiny_models import tiny_model, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm") / "model"
    quarterturn.quantize(
        tiny_model("llama"), "nvfp4", transform="random-hadamard:16", calibration=tokens(), output=path, progress=False
    )
    return path


@pytest.fixture(scope="module")
def first(folder: Path) -> FirstLoad:
    return FirstLoad(open_checkpoint(folder, others=True))


def copied(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy with other tensors."""
    shutil.copytree(folder, to)
    stored = load_file(to / "model.safetensors")
    change(stored)
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    return to


def matrices(stored: dict[str, Tensor]) -> list[str]:
    return [name for name in stored if "_input." in name]


def test_the_matrices_are_known_by_the_end_of_their_names(folder: Path, first: FirstLoad) -> None:
    stored = load_file(folder / "model.safetensors")
    assert matrices(stored)
    assert all(name.endswith(tuple(first.suffixes)) for name in matrices(stored))
    assert sorted(first.matrices) == sorted(matrices(stored))


def test_other_weights_behind_the_same_transforms_fit(folder: Path, first: FirstLoad, tmp_path: Path) -> None:
    def other(stored: dict[str, Tensor]) -> None:
        for name in stored:
            if name.endswith("weight_packed"):
                stored[name] = stored[name] ^ 0x88

    first.check_folder(copied(folder, tmp_path / "other", other))
    for name, data in load_file(folder / "model.safetensors").items():
        first.check_tensor(name, data)


def test_another_matrix_is_refused_in_a_folder_and_in_a_stream(folder: Path, first: FirstLoad, tmp_path: Path) -> None:
    def other(stored: dict[str, Tensor]) -> None:
        for name in matrices(stored):
            stored[name][:, 3] *= -1

    path = copied(folder, tmp_path / "other", other)
    with pytest.raises(CheckpointRefusal, match=r"only for the transforms and formats[\s\S]*start the engine"):
        first.check_folder(path)
    stored = load_file(path / "model.safetensors")
    name = matrices(stored)[0]
    with pytest.raises(CheckpointRefusal, match=name):
        first.check_tensor(name, stored[name])
    with pytest.raises(CheckpointRefusal, match=r"layers\.1"):
        first.check_tensor(name.replace("layers.0", "layers.1"), stored[name])
    own = load_file(folder / "model.safetensors")[name]
    first.check_tensor(name.replace("layers.0", "layers.1"), own.float())
    with pytest.raises(CheckpointRefusal, match="matrix"):
        first.check_tensor(name, own.flatten())


def test_transforms_left_out_or_others_by_config_are_refused(folder: Path, first: FirstLoad, tmp_path: Path) -> None:
    def bare(stored: dict[str, Tensor]) -> None:
        for name in matrices(stored):
            del stored[name]

    path = copied(folder, tmp_path / "bare", bare)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointRefusal, match=r"config.json[\s\S]*the quantization_config of the first load"):
        first.check_folder(path)


def test_a_folder_that_is_written_to_is_looked_at_again(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path / "same", lambda stored: None)
    held = FirstLoad(open_checkpoint(path, others=True))
    held.check_folder(path)
    stored = load_file(path / "model.safetensors")
    stored[matrices(stored)[0]][0] *= -1
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointRefusal, match="matrix"):
        held.check_folder(path)


def test_what_is_no_folder_of_a_checkpoint_is_left_to_the_stream(first: FirstLoad, tmp_path: Path) -> None:
    first.check_folder(tmp_path)
    first.check_folder(tmp_path / "org" / "model")
    first.check_tensor("model.layers.0.mlp.down_proj.weight_packed", torch.zeros(1))
