"""SmolLM2-135M quantized by us, in the engine: log-probabilities of a text, and greedy answers, in float32."""

from __future__ import annotations

from typing import Any

import pytest

import quarterturn
from engine_checks import Run, agree, expected
from quarterturn.demo_model import demo_model, held_out_text

pytestmark = pytest.mark.every
QUESTIONS = ("What is the capital of France?", "What colour is the sky on a clear day?")
ANSWERS = ("Paris", "blue")


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
    (found,) = run_engine([{"path": str(path), "ids": ids, "max_tokens": 16, "options": {"max_model_len": 512}}])
    assert "error" not in found, found
    return found | {"path": path, "ids": ids, "answers": [tokenizer.decode(t) for t in found["tokens"]]}


def test_logprobs_are_those_of_the_library(served: dict[str, Any]) -> None:
    agree(served["logprobs"], expected(served["path"], served["ids"]))


def test_greedy_text_is_sensible(served: dict[str, Any]) -> None:
    said = list(zip(QUESTIONS, served["answers"][2:], strict=True))
    right = [word.lower() in answer.lower() for word, (_, answer) in zip(ANSWERS, said, strict=True)]
    assert any(right), said
    for _, answer in said:
        words = answer.split()
        assert len(set(words)) > len(words) // 2, f"says the same again and again: {answer}"
