"""Runs vLLM, several checkpoints one after the other: `python run_engine.py` reads lines of {jobs, out} until they end.

jobs: a list of {path, ids, max_tokens, options, dense, reload, reload_from, trace}; out: the file to write, a list of
{logprobs, tokens, dense, reloaded, reloads} or {error}. `trace` is a file for what each FP4 layer took and gave for the
first prompt alone, by vLLM's names; `reload_from` a list of {path} of checkpoints, or {tensors} of files, to load one
after the other. In one process, since starting Python with vLLM takes longer than starting an engine on a tiny model.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

# Before vLLM is imported: the engine in this process (its ranks, if several, in others), no warm-up of compiled shapes,
# a small cache.
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
for name, value in (SETTINGS | {"VLLM_LOGGING_LEVEL": "INFO"}).items():
    os.environ.setdefault(name, value)

OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 16, "seed": 0}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        results = []
        for job in asked["jobs"]:
            try:
                results.append(run(job))
            except Exception as error:
                results.append({"error": f"{type(error).__name__}: {error}"})
            gc.collect()
        # Whoever waits for the file must not see half of it.
        part = Path(asked["out"] + ".part")
        part.write_text(json.dumps(results))
        part.rename(asked["out"])


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One engine: prompt log-probabilities, tokens that follow, and the same after a reload of the weights."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        llm = LLM(job["path"], **OPTIONS | job.get("options", {}))
        found = generate(llm, job)
        if job.get("trace"):
            found["traced"] = traced(llm, job)
        if job.get("scales"):
            found["scales"] = llm.apply_model(cache_scales)[0]
        if job.get("dense"):
            found["dense"] = dense(llm, job)
        if job.get("reload"):
            llm.apply_model(scramble)
            found["scrambled"] = generate(llm, job)
            llm.apply_model(give_back)
            found["given back"] = generate(llm, job)
            llm.apply_model(scramble)
            llm.collective_rpc("reload_weights")
            llm.reset_prefix_cache()
            found["reloaded"] = generate(llm, job)
        if job.get("reload_from"):
            found["reloads"] = [reloaded(llm, job, source) for source in job["reload_from"]]
        return found
    finally:
        llm = None
        cleanup_dist_env_and_memory()


def reloaded(llm: Any, job: dict[str, Any], source: dict[str, str]) -> dict[str, Any]:
    """What is generated after a reload, or why it is refused."""
    from safetensors.torch import load_file

    given: dict[str, Any] = {"weights_path": source.get("path")}
    if "tensors" in source:
        given = {"weights_iterator": list(load_file(source["tensors"]).items())}
    try:
        llm.collective_rpc("reload_weights", kwargs=given)
    except Exception as error:
        return {"error": str(error)}
    llm.reset_prefix_cache()
    return generate(llm, job)


def dense(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What experts give where they are told that a CUDA graph is captured, as none is on a CPU."""
    from quarterturn.integrations.vllm import experts

    before, experts.capturing = experts.capturing, lambda x: True
    try:
        llm.reset_prefix_cache()
        return generate(llm, job)
    finally:
        experts.capturing = before


KEPT: list[tuple[Any, Any]] = []


def scramble(model: Any) -> int:
    """What a sleeping engine loses: the memory of every FP4 layer's tensors, and of what was derived from them."""
    import torch

    KEPT.clear()
    for module in model.modules():
        parts = module.__dict__.get("fp4_parts", ())
        tensors = list(module.parameters(recurse=False)) if parts else []
        tensors += [
            getattr(part, n) for part in parts for n in ("tensor_scale", "values", "input_matrix", "output_matrix")
        ]
        for tensor in tensors:
            if tensor is not None:
                memory = tensor.data.view(torch.uint8)
                KEPT.append((memory, memory.clone()))
    for memory, _ in KEPT:
        memory.fill_(33)
    return len(KEPT)


def give_back(model: Any) -> None:
    """What an engine that slept at level 1 gets back: the same bytes at the same places. Level 2 leaves that out."""
    for memory, before in KEPT:
        memory.copy_(before)


def traced(llm: Any, job: dict[str, Any]) -> list[float]:
    """Write {layer: (x, y)} of the first prompt to the job's file; the log-probabilities of that very run."""
    import torch

    seen: dict[str, Any] = {}

    def watched(name: str, layer: Any) -> Any:
        def look(_: Any, inputs: Any, output: Any) -> None:
            if name not in seen:  # the prompt comes first, the tokens after it later
                seen[name] = inputs[0].clone(), (output[0] if isinstance(output, tuple) else output).clone()

        return layer.register_forward_hook(look)

    def watch(model: Any) -> list[Any]:
        return [watched(name, m) for name, m in model.named_modules() if "fp4_parts" in m.__dict__]

    (hooks,) = llm.apply_model(watch)
    llm.reset_prefix_cache()
    (logprobs,) = generate(llm, job | {"ids": job["ids"][:1], "max_tokens": 1})["logprobs"]
    for hook in hooks:
        hook.remove()
    torch.save(seen, job["trace"])
    return list(logprobs)


def cache_scales(model: Any) -> list[float]:
    """The scales of keys that attention layers quantize their cache with."""
    return [float(m._k_scale) for m in model.modules() if hasattr(m, "_k_scale")]


def generate(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Log-probability of every token of the prompts but the first, and the tokens after them."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=job.get("max_tokens", 4), prompt_logprobs=0, temperature=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["ids"]], wanted, use_tqdm=False)
    logprobs = [
        [o.prompt_logprobs[i][token].logprob for i, token in enumerate(o.prompt_token_ids) if i] for o in outputs
    ]
    return {"logprobs": logprobs, "tokens": [list(o.outputs[0].token_ids) for o in outputs]}


if __name__ == "__main__":
    main()
