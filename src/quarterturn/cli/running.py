"""`generate`, `evaluate` and `verify`: using a checkpoint, and judging it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from ..checkpoint import recognise, resolve
from ..errors import refusal
from .common import err, out, print_json, progress, quiet, read_text, size, token_ids, tokenizer_of, work

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..evaluate import Judgement, Speed

Path_ = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint folder, or a hub id.")]
Against = Annotated[str, typer.Option("--against", metavar="ORIGINAL", help="The unquantized model it was made from.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
DType = Annotated[str, typer.Option(help="auto (the file's), float32, bfloat16 or float16.")]
Activations = Annotated[str, typer.Option(help="checkpoint (as the file says) or bf16 (left unquantized).")]
Backend = Annotated[str, typer.Option(help="auto, or a backend of `quarterturn doctor`.")]
Weights = Annotated[str, typer.Option(help="auto, packed (4.5 bits a value) or decoded (16 bits a value).")]
BatchInvariant = Annotated[bool, typer.Option("--batch-invariant", help="4-bit layers: a row's bits for any batch.")]


def generate(
    path: Path_,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    raw: Annotated[bool, typer.Option(help="Go on from the text itself, without the chat template.")] = False,
    device: Device = "auto",
    dtype: DType = "auto",
    activations: Activations = "checkpoint",
    backend: Backend = "auto",
    weights: Weights = "auto",
    batch_invariant: BatchInvariant = False,
) -> None:
    """Write on from a prompt, token by token."""
    quiet()
    if not prompt.strip():
        raise refusal(
            "generate", "the prompt is empty.", needs=[("some text", repr(prompt))], do="say what to go on from"
        )
    from transformers import TextStreamer

    from ..compare import encode_prompt
    from ..integrations.models import check_tokens

    tokenizer = tokenizer_of(resolve(path))
    with work(f"loading {path}"):
        model = open_model(path, device, dtype, activations, backend, weights, batch_invariant)
    inputs = tokenizer(prompt, return_tensors="pt") if raw else encode_prompt(tokenizer, prompt)
    do = "shorten the prompt, or pass a smaller --max-new-tokens"
    check_tokens("generate", model, inputs["input_ids"], max_new_tokens, do=do)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling["temperature"] = temperature
    streamer = TextStreamer(tokenizer, skip_prompt=not raw, skip_special_tokens=True)
    sampling |= {"streamer": streamer, "max_new_tokens": max_new_tokens}
    inputs = inputs.to(model.device)
    if model.device.type != "cuda":
        model.generate(**inputs, **sampling)
    else:
        _generate_captured(model, inputs, inputs["input_ids"].shape[1] + max_new_tokens, sampling)


def _generate_captured(model: PreTrainedModel, inputs: Any, length: int, options: dict[str, Any]) -> None:
    """With a static cache and steps from a CUDA graph; where that cannot be, as on a CPU, saying why."""
    from ..integrations import decoding

    with work("capturing a step"):
        decoder, reason = decoding.capture(model, 1, length)
    if decoder is None:
        err.print(f"without a CUDA graph: {reason}")
        model.generate(**inputs, **options)
    else:
        decoding.generate(model, decoder, inputs, **options)


def open_model(
    path: str,
    device: str = "auto",
    dtype: str = "auto",
    activations: str = "checkpoint",
    backend: str = "auto",
    weights: str = "auto",
    batch_invariant: bool = False,
) -> PreTrainedModel:
    """A checkpoint through quarterturn.load; an unquantized model through Transformers."""
    from ..integrations.models import load_original
    from ..integrations.transformers import load

    if device != "auto":
        _check_device(device)
    if recognise(path) != "unquantized":
        how = {"activations": activations, "backend": backend, "weights": weights, "batch_invariant": batch_invariant}
        return load(path, device=device, dtype=dtype, **how)  # type: ignore[arg-type]
    if batch_invariant:
        raise refusal("load", "this model has no 4-bit layers, whose sums alone are fixed by --batch-invariant.",
                      file=path, needs=[("a 4-bit checkpoint", "an unquantized model")],
                      do="leave --batch-invariant out")  # fmt: skip
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model = load_original("load", resolve(path), dtype)
    opened: PreTrainedModel = model.to(target).eval().requires_grad_(False)
    return opened


def _check_device(device: str) -> None:
    if device.partition(":")[0] == "meta":
        raise refusal("device", "tensors of the device 'meta' have no values to compute with.",
                      needs=[("a device that computes", device)], do="name cpu or cuda")  # fmt: skip
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise refusal("device", f"there is no device '{device}' here.",
                      needs=[(device, f"cpu and {count} CUDA devices")], do="name one of them") from error  # fmt: skip


def evaluate(
    path: Path_,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text; default: half of Python's own reference.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="ORIGINAL", help="The unquantized model, for KL and agreement.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to take.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are judged together.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode for the speed.")] = 32,
    device: Device = "auto",
    dtype: DType = "auto",
    activations: Activations = "checkpoint",
    backend: Backend = "auto",
    weights: Weights = "auto",
    batch_invariant: BatchInvariant = False,
    as_json: Json = False,
) -> None:
    """Judge a model on a text: perplexity, divergence from the original, tokens per second, memory."""
    quiet()
    from ..evaluate import LiveReference, cut_windows, judge, speed
    from ..integrations.models import check_tokens, context_length
    from ..machine import peak_memory
    from ..texts import held_out_text

    content = read_text(text) if text is not None else held_out_text()
    ids = token_ids(tokenizer_of(resolve(path), against), content, tokens)
    cut_windows(ids, window)
    with work(f"loading {path}"):
        model = open_model(path, device, dtype, activations, backend, weights, batch_invariant)
    check_tokens("evaluate", model, ids[:window], do="pass a smaller --window")
    room = (context_length(model) or 256 + new_tokens) - new_tokens
    fast = speed(model, ids[: max(1, min(window, 256, room))], new_tokens)
    memory = peak_memory()
    reference = None
    if against is not None:
        with work(f"loading {against}"):
            reference = LiveReference(open_model(against, device, dtype))
    with progress() as track:
        step = track("judging", ids.numel() // window * window)
        judgement = judge(model, ids, window=window, reference=reference, advance=step)
    if as_json:
        fields = asdict(judgement) | {"tokens_per_second": judgement.tokens_per_second}
        print_json({"path": path, "text": str(text or "built-in"), "against": against, **fields,
                    "speed": asdict(fast), "peak_memory_bytes": memory, "ran": _ran(model)})  # fmt: skip
    else:
        _show_judgement(judgement, fast, memory, _ran(model))


def _ran(model: PreTrainedModel) -> str:
    from ..compare import summary

    return summary(model) or f"no 4-bit layers, {str(model.dtype).removeprefix('torch.')}"


def _show_judgement(judgement: Judgement, fast: Speed, memory: dict[str, int], ran: str) -> None:
    j = judgement
    out.print(f"  perplexity   {j.perplexity:.3f}   ({j.predictions:,} predictions, {j.windows} windows of {j.window})")
    if j.kl is not None and j.agreement is not None:
        if j.original_perplexity is not None:
            change = j.perplexity / j.original_perplexity - 1
            out.print(f"  original     {j.original_perplexity:.3f}   (so this model's is {change:+.1%})")
        out.print(f"  KL           {j.kl:.4f} nats a token from the original; same top token {j.agreement:.1%}")
    out.print(f"  speed        {j.tokens_per_second:,.0f} tokens/s judging, {fast.prefill:,.0f} reading a prompt of "
              f"{fast.prompt_tokens}, {fast.decode:.1f} writing")  # fmt: skip
    peaks = ", ".join(f"{size(count)} ({where})" for where, count in memory.items())
    out.print(f"  memory       {peaks} at most, before the original was loaded")
    out.print(f"  ran          {ran}")


def verify(path: Path_, against: Against, as_json: Json = False) -> None:
    """Check each layer's weights against the original, behind the transforms that the config declares.

    Exit code 1 where a layer is not as declared, by a wrong factor or single rows too, or where tensors are missing or
    misshapen.
    """
    quiet()
    from ..checkpoint import open_checkpoint
    from ..verify import verify as run

    with progress() as track:
        step = track("comparing layers", len(open_checkpoint(path).layers))
        result = run(path, against, lambda layer: step(1))
    if as_json:
        layers = [asdict(v) for v in result.layers]
        others = {kind: getattr(result, kind) for kind in ("changed", "missing", "added", "misshapen")}
        print_json({"path": path, "against": against, "ok": result.ok, "layers": layers, **others})
    else:
        _show_verdicts(result)
    if not result.ok:
        raise typer.Exit(1)


def _show_verdicts(result: Any) -> None:
    counts = Counter(v.verdict for v in result.layers)
    for verdict, count in counts.most_common():
        of_kind = [v for v in result.layers if v.verdict == verdict]
        colour = "green" if verdict == "ok" else "yellow" if verdict == "cannot tell" else "red"
        out.print(f"  {count:>4} {verdict}", style=colour)
        groups = _by_detail(of_kind)
        for detail, group in list(groups.items())[:8]:
            worst = max((v.error for v in group if math.isfinite(v.error)), default=math.nan)
            rounding = max((v.yardstick for v in group if math.isfinite(v.yardstick)), default=math.nan)
            figures = f" (error up to {worst:.3f}; rounding alone {rounding:.3f})" if math.isfinite(worst) else ""
            out.print(f"       {detail}{figures}")
            if verdict != "ok":
                _show_names([v.layer for v in group])
        if len(groups) > 8:
            out.print(f"       and {len(groups) - 8} other findings of this kind (--json lists all)")
    for names, what in (
        (result.changed, "unquantized tensors are not the original's"),
        (result.misshapen, "unquantized tensors are not of the original's shape"),
        (result.missing, "tensors of the original are missing"),
        (result.added, "tensors are not in the original"),
    ):
        if names:
            out.print(f"  {len(names)} {what}:")
            _show_names(names)


def _by_detail(verdicts: list[Any]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for v in verdicts:
        groups.setdefault(v.detail, []).append(v)
    return groups


def _show_names(names: list[str], most: int = 8) -> None:
    for name in names[:most]:
        out.print(f"         {name}")
    if len(names) > most:
        out.print(f"         and {len(names) - most} more (--json lists all)")


__all__ = ["err", "evaluate", "generate", "open_model", "verify"]
