"""Races in shared memory of the GPU's kernels, as NVIDIA's racecheck reports them: `make sanitize`.

Left out are hazards of which every access is

- in cuBLAS's own kernels;
- between the state that Triton hands to the warps of a warp-specialized kernel and their reading it. Barriers of all
  warps order these: the state is written before the first and between the third and the fourth, and read after the
  first and after the fourth, as the PTX shows. Racecheck does not see it in a kernel that uses TMA besides. Known by
  the two source lines that the compiler gives it, so what else it would give these is hidden too.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "nvjet"
ACCESS = re.compile(r"(?:Read|Write) access at (?P<kernel>\w+)\+0x\w+(?: in (?P<file>\S+):(?P<line>\d+))?")


@dataclass(frozen=True)
class Hazard:
    """The lines of a report, and its accesses: kernel, file and line, the last two '' where nothing says them."""

    text: str
    accesses: tuple[tuple[str, str, str], ...]


def hazards(report: str) -> list[Hazard]:
    found = []
    for block in re.split(r"=========[ ]*\n", report):
        if "Race reported" in block:
            accesses = [(m["kernel"], m["file"] or "", m["line"] or "") for m in ACCESS.finditer(block)]
            found.append(Hazard(block.strip(), tuple(accesses)))
    return found


def handed_over() -> set[tuple[str, str, str]]:
    """Where Triton's own reading and writing of the state is said to be: a kernel's first line, and its calls, or the
    condition that one stands behind."""
    from quarterturn.kernels.hadamard_wide_hopper import hadamard_wide_hopper
    from quarterturn.kernels.matmul_many import matmul_many

    found = set()
    for kernel in (matmul_many, hadamard_wide_hopper):
        name = kernel.fn.__name__
        lines, first = inspect.getsourcelines(kernel.fn)
        file = Path(inspect.getsourcefile(kernel.fn) or "").name
        for i, line in enumerate(lines):
            if re.match(rf"def {name}\(|\s+gl\.warp_specialize\(", line):
                found.add((name, file, str(first + i)))
                if re.match(r"\s+(if|else)\b", lines[i - 1]):
                    found.add((name, file, str(first + i - 1)))
    return found


def unexplained(report: str) -> list[Hazard]:
    known = handed_over()
    return [
        hazard
        for hazard in hazards(report)
        if not hazard.accesses or not all(a[0].startswith(LIBRARY) or a in known for a in hazard.accesses)
    ]


def main() -> None:
    command = ["compute-sanitizer", "--tool", "racecheck", sys.executable, "tests/sanitized.py", *sys.argv[1:]]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    left = unexplained(done.stdout)
    print("\n\n".join(hazard.text for hazard in left) or done.stdout[-2000:])
    print(f"{len(hazards(done.stdout))} hazards reported, {len(left)} of them not explained")
    raise SystemExit(1 if left or done.returncode or "RACECHECK SUMMARY" not in done.stdout else 0)


if __name__ == "__main__":
    main()
