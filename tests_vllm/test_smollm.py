"""SmolLM2-135M quantized by us, in the engine: log-probabilities of a text, and greedy answers, in float32.

W4A16 agrees with `quarterturn.load` within the tolerance of test_engine.py. W4A4 does so until the first activation
that lies within fp32 rounding of a tie of FP4: its code then falls the other way, and thirty layers of quantizers
make a different text of it, in the library alone just as well. So W4A4 is judged by layers, on what each layer took
and gave in the engine: from the same inputs the library gives the same bits, and what lies between two layers is the
same up to fp32 rounding. The whole is then held to what rounding noise does in the library itself, measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import quarterturn
from engine_checks import Run, agree, differences, expected, logprobs, parts_of
from quarterturn.demo_model import demo_model, held_out_text
from quarterturn.linear import FP4Linear

pytestmark = pytest.mark.every
QUESTIONS = ("What is the capital of France?", "What colour is the sky on a clear day?")
ANSWERS = ("Paris", "blue")
NOISE = 1e-7
"""Relative, about one unit in the last place of fp32: what another order of sums does to an activation."""
SEEDS = 5
BETWEEN = 1e-5
"""Relative to the largest value: what fp32 may differ by between one FP4 layer and the next (1e-6 was measured)."""


@pytest.fixture(
    scope="module", params=[("nvfp4", "hadamard:16", "fp4"), ("mxfp4", "random-hadamard:32", "bf16")], ids=str
)
def served(request: Any, run_engine: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from transformers import AutoTokenizer

    format, transform, activations = request.param
    path = tmp_path_factory.mktemp("smollm2") / "model"
    quarterturn.quantize(
        demo_model(), format, transform=transform, activations=activations, samples=4, output=path, progress=False
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer(held_out_text()).input_ids
    ids = [text[:200], text[400:500]]
    for question in QUESTIONS:
        said = [{"role": "user", "content": question}]
        ids.append(tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"])
    trace, options = path.parent / "trace.pt", {"max_model_len": 512}
    job = {"path": str(path), "ids": ids, "max_tokens": 16, "options": options, "trace": str(trace)}
    (found,) = run_engine([job])
    assert "error" not in found, found
    answers = [tokenizer.decode(t) for t in found["tokens"]]
    return found | {
        "path": path, "ids": ids, "answers": answers, "layers": torch.load(trace), "quantizes": activations == "fp4"
    }  # fmt: skip


@pytest.fixture(scope="module")
def library(served: dict[str, Any]) -> Any:
    return quarterturn.load(served["path"], dtype="float32", device="cpu")


def test_every_layer_gives_the_bits_of_the_librarys(served: dict[str, Any], library: Any) -> None:
    """Each FP4 layer, by what the engine gave it. W4A16 products of many rows are a library's, whose sums depend on the
    width of the layer, and the engine's are fused."""
    named = dict(library.named_modules())
    assert len(served["layers"]) == 4 * library.config.num_hidden_layers
    with torch.no_grad():
        for name, (x, y) in served["layers"].items():
            ours = torch.cat([named[part](x) for part in parts_of(name)], dim=-1)
            if served["quantizes"]:
                assert torch.equal(ours, y), f"{name}: {(ours != y).sum()} of {y.numel()} differ"
            else:
                assert (ours - y).abs().max() <= BETWEEN * y.abs().max(), name


def test_between_the_layers_fp32_rounding_is_all_that_differs(served: dict[str, Any], library: Any) -> None:
    """The library with what the engine's FP4 layers gave in place of what its own give: attention, norms, activation,
    embedding and head, each from the engine's values."""
    took: dict[str, Tensor] = {}
    with torch.no_grad(), put_in(library, served["layers"], took):
        got = logprobs(library, served["ids"][:1])
    agree([served["traced"]], got)
    for name, (x, _) in served["layers"].items():
        for part in parts_of(name):
            assert (took[part] - x).abs().max() <= BETWEEN * x.abs().max(), part


def test_logprobs_are_those_of_the_library(served: dict[str, Any], library: Any) -> None:
    """W4A4: no further from the library than the library is from itself when its activations are off by NOISE."""
    want = expected(served["path"], served["ids"])
    if not served["quantizes"]:
        agree(served["logprobs"], want)
        return
    controls = []
    for seed in range(SEEDS):
        with noise(library, seed):
            controls.append(differences(logprobs(library, served["ids"]), want))
    assert max(off.mean() for off in controls) > 1e-3, "noise changes nothing here: compare as W4A16 is compared"
    off = differences(served["logprobs"], want)
    assert off.isfinite().all()
    assert off.mean() <= max(control.mean() for control in controls)
    assert off.max() <= 2 * max(control.max() for control in controls)


def test_greedy_text_is_sensible(served: dict[str, Any]) -> None:
    said = list(zip(QUESTIONS, served["answers"][2:], strict=True))
    right = [word.lower() in answer.lower() for word, (_, answer) in zip(ANSWERS, said, strict=True)]
    assert any(right), said
    for _, answer in said:
        words = answer.split()
        assert len(set(words)) > len(words) // 2, f"says the same again and again: {answer}"


@contextmanager
def put_in(model: Any, layers: dict[str, tuple[Tensor, Tensor]], took: dict[str, Tensor]) -> Iterator[None]:
    """The outputs of `layers` in place of the FP4Linears' own; what those would have taken goes to `took`."""
    named, hooks = dict(model.named_modules()), []
    for name, (_, y) in layers.items():
        parts = parts_of(name)
        for part, given in zip(parts, y.split([named[p].out_features for p in parts], dim=-1), strict=True):

            def instead(_: Any, x: Any, __: Any, part: str = part, given: Tensor = given) -> Tensor:
                took[part] = x[0][0]
                return given[None]

            hooks.append(named[part].register_forward_hook(instead))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def noise(model: Any, seed: int) -> Iterator[None]:
    """Every FP4Linear takes an input whose values are off by NOISE: siblings by the same."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    generator = torch.Generator().manual_seed(seed)

    def disturb(_: Any, x: Any) -> tuple[Tensor]:
        known = seen.get(id(x[0]))
        if known is None or known[0] is not x[0]:
            seen.clear()
            known = seen[id(x[0])] = x[0], x[0] * (1 + NOISE * torch.randn(x[0].shape, generator=generator))
        return (known[1],)

    layers = [m for m in model.modules() if isinstance(m, FP4Linear)]
    hooks = [layer.register_forward_pre_hook(disturb) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
