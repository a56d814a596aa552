"""The peak of loading a real model, packed: never the whole of it in bf16."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import quarterturn as qt
from quarterturn.demo_model import demo_model

SCRIPT = """
import sys
import quarterturn as qt
from quarterturn.evaluate import peak_memory

qt.load(sys.argv[2], weights="packed", device="cpu")  # whatever is imported on the way is imported here
before = peak_memory()["host"]
model = qt.load(sys.argv[1], weights="packed", device="cpu")
print(peak_memory()["host"] - before)
"""


def test_peak_memory_of_loading_packed(tmp_path: Path) -> None:
    """Twice the file: its mapped pages and the tensors made of them. In bf16 the tensors alone would be 2.4 times."""
    from altered import make_checkpoint

    small = make_checkpoint(tmp_path / "small")
    qt.quantize(demo_model(), "mxfp4", activations="bf16", output=tmp_path / "real", progress=False)
    stored = (tmp_path / "real" / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "real"), str(small)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    assert stored < grown < 2.2 * stored, f"{grown / 2**20:.0f} MiB for a file of {stored / 2**20:.0f} MiB"
