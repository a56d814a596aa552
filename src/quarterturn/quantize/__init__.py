"""Making checkpoints: walk a model, fold a transform into each layer, round to nearest, write.

    model = quarterturn.quantize("folder", "nvfp4", transform="hadamard:16", output="folder-nvfp4")

walk.py says which layers and which transform, calibration.py where input scales come from, rtn.py how a weight is
rounded, writer.py what a checkpoint holds, atomic.py how a folder appears whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.files import TOKENIZER_FILES
from ..checkpoint.save import check_shard_size
from ..errors import refusal
from ..formats import FP4Format, get_format
from ..integrations.models import context_length, load_original, refuse_encoder_decoder, vocabulary
from ..linear import ACTIVATIONS, FP4Linear
from ..sharing import tie
from ..texts import builtin_text
from ..transforms import Transform
from .atomic import new_folder
from .calibration import (
    Texts,
    check_sizes,
    collect_amax,
    given_amax,
    share_amax,
    token_batches,
)
from .prepare import prepared
from .rtn import encode_scale, fold_weight, round_to_nearest, weight_amax
from .walk import TransformLike, plan_transforms, shared_groups
from .writer import make_saveable, save_checkpoint, write_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["builtin_text", "calibrate", "quantize", "save_checkpoint"]

_log = logging.getLogger("quarterturn")


def quantize(
    model: PreTrainedModel | str | Path,
    format: str | FP4Format = "nvfp4",
    transform: TransformLike = None,
    activations: str = "fp4",
    calibration: Texts | Mapping[str, float] = None,
    *,
    targets: Sequence[str] = ("Linear",),
    ignore: Sequence[str] = ("lm_head",),
    output: str | Path | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    samples: int = 8,
    sequence_length: int = 256,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    progress: bool = True,
) -> PreTrainedModel:
    """Round a model's linear layers to 4-bit floats, and write the checkpoint where `output` is given.

    model: a Transformers model, which is changed in place, or a folder or hub id to load one from.
    format: 'nvfp4' or 'mxfp4'.
    transform: on the input of every layer: None, 'hadamard[:R]', 'random-hadamard[:R]' (made from `seed`), an
        invertible (R, R) matrix, or a Transform. R divides every input; left out it is the format's group size, 'full'
        is each layer's width. The inverse is folded into the weights in float64.
    activations: 'fp4' (W4A4) or 'bf16' (W4A16).
    calibration: what sets the input scales of W4A4 NVFP4: texts, token ids (T,) or (B, T), None for `samples` pieces of
        the built-in text, or what `calibrate` returned. Texts and pieces are cut to `sequence_length` tokens, and
        everything to the model's context.
    targets, ignore: class names, full module names, or 're:' patterns. The output embeddings and routers stay as they
        are unless targeted by their full name.
    output: a folder that must not exist yet (or overwrite=True and nothing but a checkpoint in it), apart from the
        folder of the original model; it appears whole or not at all.

    Returns the model with FP4Linear layers under the same names, in eval mode, without gradients. What was left out or
    borrowed is listed in `model.quantization_notes` and logged. Raises Refusal, before anything is changed, for what
    cannot be done; a disk that fills up is found while writing.
    """
    fmt = _checked(format, activations)
    check_sizes(samples, sequence_length)
    check_shard_size(max_shard_size)
    given = given_amax(calibration) if isinstance(calibration, Mapping) else None
    source = Path(model) if isinstance(model, (str, Path)) else None
    # The folder is made first: a place that cannot be written to is found before anything is loaded or changed.
    with nullcontext() if output is None else new_folder(Path(output), overwrite, source) as folder:
        loaded, tokenizer = _resolve(model, tokenizer)
        with _progress(progress) as track, prepared(loaded, fmt, targets, ignore) as selection:
            plan = plan_transforms(transform, selection.layers, fmt, seed)
            amax: dict[str, float] | None = None
            if fmt.has_tensor_scale and activations == "fp4":
                found = given
                if found is None:
                    batches = _batches(loaded, calibration, tokenizer, samples, sequence_length)
                    advance = track("calibrating", len(batches))
                    (found,) = collect_amax(loaded, selection.layers, [plan], batches, advance)
                amax, notes = share_amax(found, list(selection.layers))
                selection.notes.extend(notes)
            _check_weights(loaded, selection.layers)
            selection.settle()
            _replace_layers(loaded, selection.layers, fmt, activations, plan, amax, track("quantizing", len(plan)))
        loaded.eval().requires_grad_(False)
        tie(loaded, FP4Linear)
        make_saveable(loaded)
        loaded.quantization_notes = selection.notes
        for note in selection.notes:
            _log.info(note)
        if folder is not None:
            write_files(loaded, folder, tokenizer=tokenizer, source=source, max_shard_size=max_shard_size)
    return loaded


def calibrate(
    model: PreTrainedModel,
    transforms: Sequence[TransformLike],
    calibration: Texts = None,
    *,
    format: str | FP4Format = "nvfp4",
    targets: Sequence[str] = ("Linear",),
    ignore: Sequence[str] = ("lm_head",),
    tokenizer: Any = None,
    seed: int = 0,
    samples: int = 8,
    sequence_length: int = 256,
    progress: bool = True,
) -> list[dict[str, float]]:
    """Run the texts once and return, for each transform, what `quantize(calibration=...)` takes: layer -> input amax.

    For trying several transforms on one model without running it once for each. The model is left as it was.
    """
    fmt = get_format(format)
    check_sizes(samples, sequence_length)
    with _progress(progress) as track, prepared(model, fmt, targets, ignore) as selection:
        plans = [plan_transforms(transform, selection.layers, fmt, seed) for transform in transforms]
        batches = _batches(model, calibration, tokenizer, samples, sequence_length)
        return collect_amax(model, selection.layers, plans, batches, track("calibrating", len(batches)))


def _checked(format: str | FP4Format, activations: str) -> FP4Format:
    if activations not in ACTIVATIONS:
        raise refusal(
            "quantize",
            "there is no such width of activations.",
            needs=[(f"one of {', '.join(ACTIVATIONS)}", repr(activations))],
            do="name one of them",
        )
    return get_format(format)


def _resolve(model: PreTrainedModel | str | Path, tokenizer: Any) -> tuple[Any, Any]:
    """The model, loaded where a place was given, and its tokenizer where there is one."""
    if not isinstance(model, (str, Path)):
        return model, tokenizer
    place = str(model)
    loaded = load_original("quantize", place)
    if tokenizer is None and _has_tokenizer(Path(place)):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError):
            # Only texts need one; without it token_batches says so.
            tokenizer = None
    return loaded, tokenizer


def _has_tokenizer(place: Path) -> bool:
    """Asked of folders alone: from one without such files Transformers makes an empty tokenizer."""
    return not place.is_dir() or any(
        fnmatch(file.name, pattern)
        for file in place.iterdir()
        for pattern in (*TOKENIZER_FILES, "*.model", "*.spm")
        if not fnmatch(file.name, "chat_template*") and not fnmatch(file.name, "*processor_config.json")
    )


def _batches(model: Any, calibration: Any, tokenizer: Any, samples: int, length: int) -> list[Tensor]:
    do = "quantize in a way that needs no calibration: activations='bf16', or mxfp4"
    refuse_encoder_decoder("quantize", model, do)
    return token_batches(calibration, tokenizer, vocabulary(model), samples, length, context_length(model))


def _check_weights(model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Raise Refusal where a weight to quantize, or any other tensor that a checkpoint would hold, is not finite."""
    for name, layer in layers.items():
        weight_amax(layer.weight.detach(), name)
    checked, skipped = {f"{name}.weight" for name in layers}, set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name, tensor in model.state_dict().items():
        if name in checked | skipped or not tensor.is_floating_point() or tensor.device.type == "meta":
            continue
        # In pieces: a mask of the embeddings would be as large as they are.
        bad = sum(int((~torch.isfinite(piece.float())).sum()) for piece in tensor.detach().flatten().split(1 << 22))
        if bad:
            raise refusal(
                "quantize",
                "a tensor of the model holds numbers that are not finite.",
                tensor=name,
                needs=[("finite numbers", f"{bad} of {tensor.numel()} that are NaN or infinite")],
                do="check the model",
            )


def _replace_layers(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    format: FP4Format,
    activations: str,
    plan: Mapping[str, Transform | None],
    input_amax: Mapping[str, float] | None,
    advance: Callable[[], None],
) -> None:
    """Group by group, so that no more than one group is held in fp32; `layers` is emptied on the way."""
    for group in shared_groups(list(layers)):
        folded = {name: fold_weight(layers[name].weight, plan[name]) for name in group}
        # Checked for every format: folding can overflow fp32.
        largest = max(weight_amax(weight, name) for name, weight in folded.items())
        encode = encode_scale(largest) if format.has_tensor_scale else None
        for name in group:
            layer, weight = layers.pop(name), folded.pop(name)
            made = FP4Linear.from_tensor(
                round_to_nearest(weight, format, None if encode is None else encode.clone()),
                bias=layer.bias,
                input_encode_scale=None if input_amax is None else encode_scale(input_amax[name]),
                input_transform=plan[name],
                activations=activations,
                name=name,
            )
            model.set_submodule(name, made)
            advance()


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Gives a function that opens a progress bar and returns its step; quiet without rich or when not shown."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        shown = False
    if not shown:
        yield lambda _text, _total: lambda: None
        return
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bars:

        def track(text: str, total: int) -> Callable[[], None]:
            task = bars.add_task(text, total=total)
            return lambda: bars.advance(task)

        yield track
