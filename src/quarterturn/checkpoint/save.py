"""Writing a checkpoint's files into a folder that is there: tensors, JSON, tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import missing_package, refusal
from .files import INDEX, SINGLE, TOKENIZER_FILES


def check_shard_size(size: int | str) -> None:
    """Raise Refusal for what is no size of a file."""
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*[KMGT]B\s*", size, re.IGNORECASE)
        positive = found is not None and float(found[1]) > 0
    else:
        positive = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not positive:
        raise refusal(
            "save",
            "this is no size of a file.",
            needs=[("max_shard_size in bytes, or text with KB, MB, GB or TB", repr(size))],
            do="write something like '5GB'",
        )


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, max_shard_size: int | str) -> None:
    """Safetensors files of at most that size, with an index where there are several. Nothing is copied but views.

    Raises Refusal where a file cannot be written.
    """
    try:
        from huggingface_hub import split_torch_state_dict_into_shards
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise missing_package("save", error.name or "safetensors", "pip install safetensors huggingface_hub") from None
    plan = split_torch_state_dict_into_shards(
        dict(tensors), filename_pattern=SINGLE.replace(".", "{suffix}.", 1), max_shard_size=max_shard_size
    )
    for file, names in plan.filename_to_tensors.items():
        shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
        try:
            save_file(_unshared(shard), folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise refusal(
                "save",
                "a file of the checkpoint could not be written.",
                file=file,
                needs=[("room on the disk, and the right to write", str(error))],
                do="free some room, or name a folder elsewhere",
            ) from error
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / INDEX, index)


def _unshared(shard: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of one storage (a scale shared by two layers) become tensors of their own, as the file format wants."""
    seen: set[int] = set()
    for name, tensor in shard.items():
        address = tensor.untyped_storage().data_ptr()
        if tensor.numel() and (address in seen or tensor.untyped_storage().nbytes() != tensor.nbytes):
            shard[name] = tensor.clone()
        seen.add(address)
    return shard


def write_tokenizer(folder: Path, tokenizer: Any, source: Path | None) -> None:
    """The tokenizer's files: those of the folder `source` as they are, or saved from the tokenizer."""
    if source is not None and source.is_dir():
        for file in {f for pattern in TOKENIZER_FILES for f in source.glob(pattern) if f.is_file()}:
            shutil.copyfile(file, folder / file.name)
    elif tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_json(file: Path, content: Any) -> None:
    """A JSON file, its keys in order."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
