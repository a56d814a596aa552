"""A folder of safetensors files: which tensor lies where, from the headers alone. Nothing else is read or run."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointRefusal, missing_package, refusal

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PLAIN_FLOATS = ("BF16", "F16", "F32", "F64")
"""What a tensor that no scheme describes may be stored in."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""What is taken from a hub repository: data only, no code and no pickles."""

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
)
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    *TOKENIZER_FILES,
    "*.jinja",
    "recipe.yaml",
    "README.md",
    ".gitattributes",
)
"""What a checkpoint's folder may hold: anything else in it is somebody's own."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is; dtype is safetensors' name for it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        count = 1
        for size in self.shape:
            count *= size
        dtype = DTYPES.get(self.dtype)
        return count * (dtype.itemsize if dtype is not None else 1)


def resolve(path: str | Path, revision: str | None = None) -> Path:
    """A local folder as it is, or the local copy of a hub repository; CheckpointRefusal where there is neither."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    looks_local = folder.exists() or str(path).startswith((".", "/", "~")) or str(path).count("/") != 1
    if looks_local:
        found, remedy = "a file" if folder.is_file() else "nothing there", "check the path"
        if folder.suffix == ".gguf":
            remedy = (
                "load it with Transformers (from_pretrained(folder, gguf_file=name)), save that, and name its folder"
            )
        raise refuse(path, "this is no checkpoint folder.", [("a folder with config.json", found)], remedy)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise missing_package("load", "huggingface_hub", "pip install huggingface_hub") from None
    try:
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=list(WANTED)))
    except (OSError, HFValidationError) as error:  # the hub's errors are OSErrors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        needs = [("a local folder or a hub repository that can be fetched", reason)]
        raise refuse(
            path,
            "the model is not here, and not to be had from the hub.",
            needs,
            "check the name, or give the path of a local folder",
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointRefusal for a missing or broken file."""
    try:
        parsed = json.loads(file.read_text("utf-8-sig"))
    except FileNotFoundError:
        remedy = "check that this is a model's folder, or fetch the file again"
        raise refuse(file, "the file is missing.", [(file.name, "no such file")], remedy) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        needs = [("a JSON file", str(error))]
        remedy = "check who may read it" if isinstance(error, PermissionError) else "fetch it again"
        raise refuse(file, "the file cannot be read.", needs, remedy) from error
    if not isinstance(parsed, dict):
        raise refuse(file, "the file is not an object.", [("a JSON object", type(parsed).__name__)], "fetch it again")
    return parsed


def list_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint folder by name. Raises CheckpointRefusal for what is missing, cut off or astray."""
    index = folder / INDEX
    # As Transformers does: a single file goes before an index, which an earlier save may have left behind.
    if (folder / SINGLE).exists() or not index.exists():
        return read_header(_single_file(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise refuse(
            index,
            "the index names no files.",
            [("weight_map: tensor -> file", repr(type(weight_map)))],
            "fetch it again",
        )
    headers = {shard: read_header(_inside(folder, shard, index)) for shard in sorted(set(weight_map.values()))}
    tensors: dict[str, TensorInfo] = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise refuse(
                folder / shard,
                "the index and the file disagree.",
                [(f"tensor {name}", "no such tensor")],
                "fetch both again",
            )
        tensors[name] = headers[shard][name]
    for shard, header in headers.items():
        for name in header:
            if name not in weight_map:
                raise refuse(
                    folder / shard,
                    "the index and the file disagree.",
                    [(f"{name} in the index", "a tensor that the index does not name")],
                    "fetch both again",
                )
    return tensors


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; its length is checked against its header."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            header = json.loads(stream.read(length)) if 8 + length <= size else None
    except FileNotFoundError:
        raise refuse(file, "a file is missing.", [(file.name, "no such file")], "fetch it again") from None
    except (OSError, ValueError) as error:
        raise refuse(file, "this is no safetensors file.", [("a JSON header", str(error))], "fetch it again") from error
    if header is None or not isinstance(header, dict):
        raise refuse(
            file,
            "this is no safetensors file, or it is cut off.",
            [("a header inside the file", f"{size} bytes")],
            "fetch it again",
        )
    header.pop("__metadata__", None)
    try:
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        infos = {name: TensorInfo(file, e["dtype"], tuple(e["shape"])) for name, e in header.items()}
    except (KeyError, TypeError, IndexError) as error:
        raise refuse(
            file, "the header is broken.", [("dtype, shape, data_offsets", str(error))], "fetch it again"
        ) from error
    if end != size:
        raise refuse(
            file,
            "the file is cut off." if end > size else "the file is longer than its header says.",
            [(f"{end} bytes", f"{size} bytes")],
            "fetch it again",
        )
    return infos


class TensorReader:
    """Reads tensors, each file opened once; on the CPU, in the file's dtype."""

    def __init__(self) -> None:
        self._opened: dict[Path, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_opened": {}}

    def read(self, name: str, info: TensorInfo) -> Tensor:
        """The tensor of that name. Raises CheckpointRefusal where the file cannot give it."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise missing_package("load", "safetensors", "pip install safetensors") from None
        try:
            if info.file not in self._opened:
                self._opened[info.file] = safe_open(info.file, "pt")
            tensor: Tensor = self._opened[info.file].get_tensor(name)
            return tensor
        except (OSError, SafetensorError) as error:
            needs = [(name, str(error))]
            raise refuse(info.file, "a tensor cannot be read.", needs, "fetch the file again") from error


def read_tensor(name: str, info: TensorInfo) -> Tensor:
    """One tensor by itself; a TensorReader keeps the files open for more."""
    return TensorReader().read(name, info)


def refuse(file: object, headline: str, needs: list[tuple[str, str]], do: str, **where: str) -> CheckpointRefusal:
    """A CheckpointRefusal about a file (not raised)."""
    made = refusal("load", headline, file=file, needs=needs, do=do, kind=CheckpointRefusal, **where)
    assert isinstance(made, CheckpointRefusal)
    return made


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE).exists():
        return folder / SINGLE
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern))
    what = f"only {', '.join(others[:3])}" if others else (", ".join(found[:3]) or "no weights")
    raise refuse(
        folder,
        "there are no weights that can be read.",
        [(f"{SINGLE} or {INDEX}", what)],
        "name the file so, or convert the weights to safetensors; other files can run code and are not opened",
    )


def _inside(folder: Path, shard: str, index: Path) -> Path:
    # The name is judged, not where it leads: a hub cache holds links to files elsewhere, and they are its own.
    parts = PurePosixPath(shard).parts
    if "\\" in shard or PurePosixPath(shard).is_absolute() or ".." in parts or not shard.endswith(".safetensors"):
        raise refuse(
            index,
            "the index points outside the folder.",
            [("a .safetensors file inside it", shard)],
            "find out who made this checkpoint before you use it",
        )
    return folder / shard
