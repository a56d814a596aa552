"""The engine: started once for all tests of a file, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_checks import Run

MINUTES = 60


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Jobs -> results, see run_engine.py; extra environment variables by keyword."""

    def run(jobs: list[dict[str, Any]], timeout: float = 20 * MINUTES, **environment: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("engine")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        command = [sys.executable, str(Path(__file__).parent / "run_engine.py"), "jobs.json", "out.json"]
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | environment,
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        out = folder / "out.json"
        results: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
        assert done.returncode == 0, done.stdout[-8000:]
        assert len(results) == len(jobs), done.stdout[-8000:]
        for result in results:
            result["log"] = done.stdout
        return results

    return run
