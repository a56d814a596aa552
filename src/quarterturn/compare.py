"""Trying formats and transforms on one model: each variant is quantized, written, loaded back, run and judged.

The order of work for one original:
0. the whole plan is checked before anything is computed: formats, transforms and their sizes, folders, lengths;
1. judge the original and keep its logits; look at the activations of its layers; calibrate for all transforms at once;
2. for each variant: quantize, write the checkpoint, drop it, load the checkpoint, judge, compare layers, let it speak.
So what is judged is always what a reader of the file would run.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import __version__
from .checkpoint import recognise, resolve
from .errors import refusal
from .evaluate import (
    ActivationStatistics,
    Judgement,
    StoredReference,
    activation_statistics,
    activations,
    cut_windows,
    judge,
    layer_errors,
    relative_change,
)
from .formats import get_format
from .integrations.models import check_tokens, load_original, refuse_encoder_decoder
from .integrations.transformers import explain, load
from .linear import ACTIVATIONS
from .machine import gpus, peak_memory, processor, version
from .ops import rotate_quantize_dequantize
from .quantize import calibrate, quantize
from .quantize.atomic import check_target
from .quantize.prepare import prepared
from .quantize.walk import full_name, plan_transforms, select_layers
from .transforms import Transform

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Track = Callable[[str, int], Callable[[int], None]]
"""Opens a piece of work of a length and gives back its step."""

_STUDY_TOKENS = 256


def to_json(data: Any) -> str:
    """A JSON document; numbers that are not finite, which JSON does not know, become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(data), indent=1, default=str, allow_nan=False)


@dataclass
class Variant:
    """One way to quantize the model, and what came out."""

    format: str
    transform: str
    activations: str
    path: str = ""
    judgement: Judgement | None = None
    change: float = float("nan")
    change_error: float = float("nan")
    weight_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    layers: dict[str, float] = field(default_factory=dict)
    sample: str = ""
    ran: str = ""

    @property
    def label(self) -> str:
        return f"{self.format.upper()} · {self.transform}"


@dataclass
class Study:
    """A layer's real input before and after each transform: (M, K) fp32, statistics, and its rounding error.

    Tokens with massive values are left out (how many, and their largest magnitude in units of the others' rms, are
    kept), for nothing else would be seen beside them.
    """

    layer: str
    left_out: int
    left_out_peak: float
    x: dict[str, Tensor]
    statistics: dict[str, ActivationStatistics]
    rounding: dict[str, dict[str, float]]


@dataclass
class Comparison:
    """Everything the report shows."""

    model: str
    original: Judgement
    variants: list[Variant]
    study: Study
    prompt: str
    sample: str
    text: str
    weight_bytes: int
    facts: dict[str, str]
    seconds: dict[str, float]

    def to_json(self) -> str:
        """Everything but the raw activations, for machines."""
        data = asdict(self)
        del data["study"]["x"]
        return to_json(data)


def compare(
    model_path: Path | str,
    ids: Tensor,
    out: Path,
    *,
    formats: Sequence[str] = ("nvfp4", "mxfp4"),
    transforms: Sequence[str] = ("none", "hadamard", "random-hadamard"),
    activations: str = "fp4",
    calibration: list[str] | None = None,
    window: int = 512,
    prompt: str = "",
    new_tokens: int = 40,
    text: str = "the given text",
    overwrite: bool = False,
    track: Track = lambda text, total: lambda steps: None,
) -> Comparison:
    """Quantize `model_path` in every format and transform, and judge each on token ids (T,).

    formats: names of formats. transforms: 'none', 'hadamard[:R]', 'random-hadamard[:R]'; a variant that is named twice
    is tried once. activations: 'fp4' or 'bf16'.
    calibration: texts, or None for the built-in one. Checkpoints are written to out/<format>-<transform>. prompt: what
    each variant goes on from, greedily. Everything runs in float32 on the CPU and in bf16 on a GPU. Raises Refusal,
    before anything is computed or written, for what cannot be done.
    """
    kind = recognise(model_path)
    if kind != "unquantized":
        raise refusal("compare", "the model is quantized already.", file=model_path,
                      needs=[("a model in floating point", kind)], do="start from the original model")  # fmt: skip
    variants = planned(formats, transforms, activations)
    for variant in variants:
        check_target(_folder(out, variant), overwrite, resolve(model_path))
    cut = cut_windows(ids, window)
    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    original, tokenizer = _original(model_path)
    _check_model(original, tokenizer, variants, cut, prompt, new_tokens)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / ".original-logits"
    try:
        reference = StoredReference(kept, cut.shape[0], window, _vocabulary(original))
        clock.lap("load original")
        base = judge(original, ids, window=window, keep=reference, advance=track("judging the original", cut.numel()))
        clock.lap("judge original")
        specs = sorted({v.transform for v in variants})
        study = _study(original, cut, [(v.format, v.transform) for v in variants])
        clock.lap("study activations")
        amax = dict(zip(specs, _calibrated(original, specs, calibration, tokenizer, track), strict=True))
        clock.lap("calibrate")
        sample = _speak(original, tokenizer, prompt, new_tokens)
        for variant in variants:
            _try(variant, model_path, original, tokenizer, out, amax[variant.transform], overwrite, track)
            model = _judge(variant, original, ids, window, reference, base, track)
            variant.sample = _speak(model, tokenizer, prompt, new_tokens)
            del model
            clock.lap(variant.label)
    finally:
        kept.unlink(missing_ok=True)
    size = sum(p.numel() * p.element_size() for p in original.parameters()) // (original.dtype.itemsize // 2 or 1)
    return Comparison(str(Path(model_path).name), base, variants, study, prompt, sample, text, size, _facts(), seconds)


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.last = seconds, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self.last, 1)
        self.last = now


def planned(formats: Sequence[str], transforms: Sequence[str], activations: str = "fp4") -> list[Variant]:
    """Every format with every transform, each once, sizes written out. Raises Refusal for a name that there is not."""
    if activations not in ACTIVATIONS:
        needs = [(f"one of {', '.join(ACTIVATIONS)}", repr(activations))]
        raise refusal("compare", "there is no such width of activations.", needs=needs, do="name one of them")
    pairs = [(get_format(name), transform) for name in formats for transform in transforms]
    if not pairs:
        raise refusal("compare", "there is nothing to compare.", needs=[("formats and transforms", "none")],
                      do="name at least one of each")  # fmt: skip
    named = dict.fromkeys((fmt.name, full_name(transform, fmt)) for fmt, transform in pairs)
    return [Variant(fmt, transform, activations) for fmt, transform in named]


def _check_model(
    original: PreTrainedModel, tokenizer: Any, variants: Sequence[Variant], cut: Tensor, prompt: str, new_tokens: int
) -> None:
    """Raise Refusal where a variant does not fit the model's layers, or the text or the prompt is too long for it."""
    refuse_encoder_decoder("compare", original, "quantize it, and judge it by its own task")
    check_tokens("compare", original, cut, do="pass a smaller window")
    if prompt and new_tokens > 0:
        inputs = encode_prompt(tokenizer, prompt)["input_ids"]
        check_tokens("compare", original, inputs, new_tokens, do="shorten the prompt, or ask for fewer new tokens")
    for name in dict.fromkeys(v.format for v in variants):
        fmt = get_format(name)
        with prepared(original, fmt, ("Linear",), ("lm_head",)) as selection:
            for variant in variants:
                if variant.format == name:
                    plan_transforms(variant.transform, selection.layers, fmt)


def _folder(out: Path, variant: Variant) -> Path:
    return out / f"{variant.format}-{variant.transform.replace(':', '')}"


def _compute_dtype() -> torch.dtype:
    # bf16 products are several times slower than fp32 ones on CPUs without AVX512.
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _original(path: Path | str, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_original("compare", path, dtype or _compute_dtype())
    return model.to(device).eval().requires_grad_(False), AutoTokenizer.from_pretrained(path)


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def _calibrated(
    original: PreTrainedModel, specs: list[str], calibration: list[str] | None, tokenizer: Any, track: Track
) -> list[dict[str, float]]:
    step = track("calibrating", 1)
    amax = calibrate(original, specs, calibration, tokenizer=tokenizer, progress=False)
    step(1)
    return amax


def _try(
    variant: Variant,
    model_path: Path | str,
    original: PreTrainedModel,
    tokenizer: Any,
    out: Path,
    amax: dict[str, float],
    overwrite: bool,
    track: Track,
) -> None:
    """Quantize and write one variant."""
    step = track(f"{variant.label}: quantizing", 2)
    began = time.perf_counter()
    fresh, _ = _original(model_path, torch.bfloat16)
    step(1)
    folder = _folder(out, variant)
    quantize(
        fresh,
        variant.format,
        variant.transform,
        variant.activations,
        amax,
        output=folder,
        tokenizer=tokenizer,
        overwrite=overwrite,
        progress=False,
    )
    step(1)
    variant.path = str(folder)
    variant.weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    variant.seconds["quantize"] = round(time.perf_counter() - began, 1)


def _judge(
    variant: Variant,
    original: PreTrainedModel,
    ids: Tensor,
    window: int,
    reference: StoredReference,
    base: Judgement,
    track: Track,
) -> PreTrainedModel:
    """Load one written variant and judge it; returns the loaded model."""
    began = time.perf_counter()
    model = load(variant.path, dtype=_compute_dtype())
    variant.seconds["load"] = round(time.perf_counter() - began, 1)
    cut = cut_windows(ids, window)
    step = track(f"{variant.label}: judging", cut.numel())
    variant.judgement = judge(model, ids, window=window, reference=reference, advance=step)
    variant.seconds["judge"] = round(variant.judgement.seconds, 1)
    variant.change, variant.change_error = relative_change(variant.judgement, base)
    names = [e.layer for e in explain(model)]
    variant.layers = layer_errors(model, original, cut[:1, :_STUDY_TOKENS], names)
    variant.ran = summary(model)
    return model


def summary(model: PreTrainedModel) -> str:
    """What ran, in a line: '210 layers: cpu_native, W4A4 nvfp4, input transform 16'."""
    counts = Counter((e.backend, e.arithmetic) for e in explain(model))
    return "; ".join(f"{count} layers: {backend}, {arithmetic}" for (backend, arithmetic), count in counts.items())


def _speak(model: PreTrainedModel, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """What the model says to a prompt, greedily; as a chat where the tokenizer has a template."""
    if not prompt or new_tokens < 1:
        return ""
    inputs = encode_prompt(tokenizer, prompt).to(model.device)
    out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    answer: str = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer.strip()


def encode_prompt(tokenizer: Any, prompt: str) -> Any:
    """A prompt as model inputs (1, T): one user turn of the chat template, or the text itself where there is none."""
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return tokenizer(prompt, return_tensors="pt")


def _study(original: PreTrainedModel, cut: Tensor, pairs: Sequence[tuple[str, str]]) -> Study:
    """The layer whose input has the heaviest tails, and what each transform makes of that input."""
    fmt = get_format(pairs[0][0])
    layers = select_layers(original, fmt).layers
    found = activations(original, cut[:1, :_STUDY_TOKENS], list(layers))
    ordinary = {name: x[_ordinary(x)] for name, x in found.items()}
    heaviest = max(ordinary, key=lambda name: activation_statistics(ordinary[name]).kurtosis)
    x, massive = ordinary[heaviest], found[heaviest][~_ordinary(found[heaviest])]
    peak = float(massive.abs().max() / x.square().mean().sqrt()) if len(massive) else 0.0
    turned: dict[str, Tensor] = {"none": x}
    rounding: dict[str, dict[str, float]] = {}
    for format, spec in pairs:
        transform = plan_transforms(spec, {heaviest: layers[heaviest]}, fmt)[heaviest]
        turned.setdefault(spec, x if transform is None else transform.apply(x).float())
        rounding.setdefault(format, {})[spec] = _rounding_error(turned[spec], format)
    statistics = {spec: activation_statistics(t) for spec, t in turned.items()}
    return Study(heaviest, len(massive), peak, turned, statistics, rounding)


def _ordinary(x: Tensor) -> Tensor:
    """Which rows of (M, K) are not massive: their largest magnitude is within 10 times that of the median row."""
    peaks = x.abs().amax(1)
    return peaks <= 10 * peaks.median()


def _rounding_error(z: Tensor, format: str) -> float:
    """|q - z| / |z| of rounding activations as a layer would, with the tensor scale of their own amax."""
    encode = (2688.0 / z.abs().max()).reshape(1)
    values, tensor_scale = rotate_quantize_dequantize(z, format=format, encode_scale=encode)
    return float((values.double() * tensor_scale.double() - z.double()).norm() / z.double().norm())


def _facts() -> dict[str, str]:
    """Versions and machine, as text."""
    facts = {"quarterturn": __version__}
    facts |= {name: version(name) for name in ("torch", "transformers", "compressed-tensors")}
    found = gpus()
    return facts | {
        "python": platform.python_version(),
        "device": found[0][0] if found else f"{processor()} (CPU)",
        "threads": str(torch.get_num_threads()),
        "arithmetic": str(_compute_dtype()).removeprefix("torch."),
        "peak memory": f"{peak_memory()['host'] / 2**30:.1f} GiB",
    }


__all__ = ["Comparison", "Study", "Transform", "Variant", "compare", "encode_prompt", "summary"]
