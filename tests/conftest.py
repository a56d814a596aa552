"""Shared by every test: one thread, one seed, and a `gpu` mark that fails where there is no GPU.

A missing GPU is never a skip. `-m "not gpu"` leaves the GPU tests out by name; whoever selects them on a machine
without one is told so in red, because a suite that is green for want of hardware says nothing.

Those of the GPU tests that are also marked `interpreter` are small enough for Triton's interpreter, which runs the
same kernels on a CPU: `TRITON_INTERPRET=1 pytest -m interpreter`, a process of its own since triton asks when it is
imported. Those also marked `blackwell` need such a GPU (capability 10.0, 10.3 or 12.0), and fail on any other.

`amx` is the same for CPUs: `make test` leaves these out by name on a CPU without AMX, and there they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported: more threads than cores make the small products here slower, not faster.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before the command's consoles are made, which would keep the width: pytest-xdist tells its workers that of a terminal.
os.environ.pop("COLUMNS", None)

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLACKWELL = ((10, 0), (10, 3), (12, 0))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; fails, and does not skip, where there is none")
    config.addinivalue_line("markers", "interpreter: a gpu test that also runs on a CPU where TRITON_INTERPRET=1")
    config.addinivalue_line("markers", "blackwell: a gpu test that needs a capability of 10.0, 10.3 or 12.0")
    config.addinivalue_line("markers", "amx: needs a CPU with AMX; fails, and does not skip, on any other")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("amx") is not None:
        from quarterturn.backends import cpu_native

        if not cpu_native._has_tiles():
            pytest.fail('this test needs a CPU with AMX; leave it out with -m "not (gpu or amx)"', pytrace=False)
    if item.get_closest_marker("gpu") is None:
        return
    if torch.cuda.is_available() and not INTERPRETED:
        if item.get_closest_marker("blackwell") is not None and torch.cuda.get_device_capability() not in BLACKWELL:
            pytest.fail(f"this test needs a Blackwell GPU (capability one of {BLACKWELL})", pytrace=False)
        return
    if torch.cuda.is_available():
        return
    if item.get_closest_marker("interpreter") is None:
        pytest.fail('this test needs an NVIDIA GPU and torch sees none; leave it out with -m "not gpu"', pytrace=False)
    if not INTERPRETED:
        pytest.fail("this test needs an NVIDIA GPU, or TRITON_INTERPRET=1 in the environment", pytrace=False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240607)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN (floats) and the largest integer, so that unwritten padding shows."""
    was_on = torch.are_deterministic_algorithms_enabled()
    was_filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    probe = torch.empty(64)
    assert torch.isnan(probe).all(), "torch no longer poisons fresh memory in this mode"
    yield
    torch.use_deterministic_algorithms(was_on)
    torch.utils.deterministic.fill_uninitialized_memory = was_filled
