"""An FP4 checkpoint as an ordinary Transformers model: module names unchanged, `.generate()` working.

Transformers builds the model on the meta device; our quantizer class, registered under a name of our own, replaces the
quantized linears by FP4Linear before the weights come, and Transformers streams the files into them. On the way the
tensors take the library's names (and the file's again when the model is saved), and keep their bytes.

Extension points used: register_quantizer, register_quantization_config, update_weight_conversions.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..backends import reasons_against, select
from ..checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.files import refuse
from ..errors import missing_package, refusal
from ..explanation import Explanation
from ..linear import WEIGHTS, FP4Linear
from ..sharing import tie
from .fitting import check_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load(
    path: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    activations: str = "checkpoint",
    backend: str = "auto",
    weights: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    batch_invariant: bool = False,
) -> PreTrainedModel:
    """Load a compressed-tensors FP4 checkpoint with its online transforms and exact arithmetic.

    path: a folder, or a hub id. device: 'auto' (the GPU where there is one) or a device; device_map: as Transformers
    takes it, for several devices. dtype: of everything that is not FP4; 'auto' is the checkpoint's own.
    activations: 'checkpoint' runs what the file says, 'bf16' leaves activations unquantized (W4A16).
    backend: 'auto', or a name that is then run or refused. weights: 'packed', 'decoded', or 'auto'.
    batch_invariant: FP4 layers give a row the same bits whatever rows are beside it, or are refused; what lies between
    them is Transformers' and torch's.
    Returns the model in evaluation mode, without gradients. Raises CheckpointRefusal or BackendRefusal: nothing that
    the file asks for is left out silently.
    """
    _check_choices(activations=(activations, ("checkpoint", "bf16")), weights=(weights, WEIGHTS))
    transformers = _transformers()
    from . import hf_quantizer

    target = _device(device)
    checkpoint = open_checkpoint(path)
    config = _config(transformers, checkpoint)
    config.quantization_config = hf_quantizer.QuarterturnConfig(
        checkpoint, activations, backend, weights, batch_invariant
    )
    where: dict[str, Any] = {"device_map": device_map} if device_map is not None else {}
    named = getattr(transformers, (config.architectures or [""])[0], None)
    known = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    model_class: Any = named if known else transformers.AutoModelForCausalLM
    model, info = model_class.from_pretrained(
        str(checkpoint.path),
        config=config,
        dtype=_dtype(dtype, checkpoint),
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **where,
    )
    _check_loaded(checkpoint, model, info)
    if device_map is None:
        model.to(target)
    model.requires_grad_(False)
    tie(model, FP4Linear)
    result: PreTrainedModel = model.eval()
    return result


def explain(
    model: nn.Module, dtype: torch.dtype | None = None, capability: tuple[int, int] | None = None
) -> list[Explanation]:
    """What runs each FP4 layer of a model, and why, in the model's order.

    dtype: of the inputs, default the model's. capability: asks what would run on an NVIDIA GPU of that capability, with
    the packages installed here, whatever device the model is on. `rejected` has every backend that something speaks
    against, behind the chosen one too. Raises BackendRefusal where nothing would run.
    """
    own: torch.dtype = dtype or getattr(model, "dtype", torch.bfloat16)  # type: ignore[assignment]
    return [
        replace(_explanation(module, own, capability), layer=module.name or name)
        for name, module in model.named_modules()
        if isinstance(module, FP4Linear)
    ]


def _explanation(layer: FP4Linear, dtype: torch.dtype, capability: tuple[int, int] | None) -> Explanation:
    found, problem = layer.explain(dtype), layer.problem(dtype)
    device = layer.device if capability is None else torch.device("cuda")
    against = {name: why for name, why in reasons_against(problem, device, capability).items() if why}
    if capability is None:
        return replace(found, rejected=against)
    there = select(problem, device, layer.requested_backend, layer=layer.name or None, capability=capability)
    return replace(found, backend=there.name, reason=there.reason, rejected=against, weights="not prepared")


def _check_choices(**choices: tuple[str, tuple[str, ...]]) -> None:
    for word, (value, known) in choices.items():
        if value not in known:
            raise refusal(
                "load",
                f"there is no such choice of {word}.",
                needs=[(f"one of {', '.join(known)}", repr(value))],
                do="name one of them",
            )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise missing_package("load", "transformers", "pip install 'transformers>=5.17'") from None
    return transformers


def _device(device: str | torch.device) -> torch.device:
    try:
        wanted = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if str(device) == "auto" else device)
    except RuntimeError:
        wanted = None
    if wanted is None or (wanted.type == "cuda" and not torch.cuda.is_available()):
        raise refusal(
            "load",
            "there is no such device here.",
            needs=[("auto, or a device that torch has", str(device))],
            do="pass device='cpu'",
        )
    return wanted


def _config(transformers: Any, checkpoint: Checkpoint) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return transformers.AutoConfig.from_pretrained(str(checkpoint.path), trust_remote_code=False)
    except StrictDataclassError as error:
        raise refuse(
            checkpoint.path / "config.json",
            "Transformers does not accept this config.",
            [("numbers that fit each other", " ".join(str(error).split()))],
            "fetch the file again, or correct it",
        ) from error
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refuse(
            checkpoint.path / "config.json",
            "Transformers does not know this model.",
            [("a model type of the installed Transformers; code in a checkpoint is not run", reason)],
            "update Transformers, or use a model that it has",
        ) from error


def _dtype(dtype: str | torch.dtype, checkpoint: Checkpoint) -> torch.dtype:
    text = checkpoint.config.get("text_config")
    text = text if isinstance(text, dict) else {}
    own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or text.get("dtype") or "bfloat16"
    wanted = str(own if dtype == "auto" else dtype).removeprefix("torch.")
    if wanted not in DTYPES:
        raise refusal(
            "load",
            "the dtype is not run.",
            needs=[(f"auto or one of {', '.join(DTYPES)}", wanted)],
            do="pass dtype='bfloat16'",
        )
    return DTYPES[wanted]


def _check_loaded(checkpoint: Checkpoint, model: Any, info: dict[str, Any]) -> None:
    missing, mismatched = sorted(info["missing_keys"]), sorted(map(str, info["mismatched_keys"]))
    layers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, FP4Linear))
    unexpected = sorted(info["unexpected_keys"])
    ours = [key for key in unexpected if key.startswith(layers)]
    for headline, keys in (
        ("tensors are missing.", missing),
        ("tensors are misshapen.", mismatched),
        ("tensors of FP4 layers were not used.", ours),
    ):
        if keys:
            shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            raise refuse(
                checkpoint.path,
                headline,
                [("every tensor of the model, of its shape", shown)],
                "make or fetch the checkpoint again",
            )
    if unexpected:
        warnings.warn(
            f"{checkpoint.path}: {len(unexpected)} tensors have no place in the model and were not loaded: "
            f"{', '.join(unexpected[:5])}",
            stacklevel=3,
        )
    check_shapes(model, checkpoint, model.hf_quantizer.shapes)
    for name, module in model.named_modules():
        if isinstance(module, FP4Linear):
            if module.device.type != "meta":
                module.weight_tensor().validate(name)
            module.refresh(model.dtype)
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            continue
        # One cheap pass finds what the second, dear one makes sure of.
        if not torch.isfinite(parameter.sum(dtype=torch.float32)) and not torch.isfinite(parameter).all():
            raise refuse(
                checkpoint.path,
                "a tensor is not finite.",
                [("finite numbers", "NaN or Inf")],
                "make or fetch the checkpoint again",
                tensor=name,
            )
