"""Engines: started one after the other in processes that stay, since vLLM's import takes longer than a tiny engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_checks import Run

MINUTES = 60


class Worker:
    """A process of run_engine.py, and what it has said so far."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.log, self.calls = folder, folder / "log", 0
        command = [sys.executable, str(Path(__file__).parent / "run_engine.py")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=os.environ | environment, stdin=subprocess.PIPE, stdout=log,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

    def run(self, jobs: list[dict[str, Any]], timeout: float) -> list[dict[str, Any]]:
        """The jobs' results, each with the log of all of them."""
        start, self.calls = self.log.stat().st_size, self.calls + 1
        out = self.folder / f"out{self.calls}.json"
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jobs": jobs, "out": out.name}) + "\n")
        self.process.stdin.flush()
        end = time.monotonic() + timeout
        while not out.exists():
            assert self.process.poll() is None, self._said(start)[-8000:]
            assert time.monotonic() < end, f"{timeout} s are over: {self._said(start)[-8000:]}"
            time.sleep(0.1)
        results: list[dict[str, Any]] = json.loads(out.read_text())
        return [result | {"log": self._said(start)} for result in results]

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _said(self, start: int) -> str:
        return self.log.read_bytes()[start:].decode(errors="replace")


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Jobs -> results, see run_engine.py; extra environment variables by keyword. Jobs with the same ones share a
    process."""
    workers: dict[tuple[tuple[str, str], ...], Worker] = {}

    def run(jobs: list[dict[str, Any]], timeout: float = 20 * MINUTES, **environment: str) -> list[dict[str, Any]]:
        key = tuple(sorted(environment.items()))
        if key not in workers:
            workers[key] = Worker(tmp_path_factory.mktemp("engine"), environment)
        try:
            return workers[key].run(jobs, timeout)
        except BaseException:
            workers.pop(key).stop()
            raise

    yield run
    for worker in workers.values():
        worker.stop()
