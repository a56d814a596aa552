"""Which checkpoints the plugin claims, and which backend `--linear-backend` means: plain data in and out, no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...backends import BACKENDS
from ...checkpoint.config import FORMAT_NAMES, ONLINE, declared_transforms
from ...errors import BackendRefusal, refusal

METHOD = "compressed-tensors"
LINEAR_BACKENDS = {
    "auto": "auto",
    "torch": "any_torch",
    "emulation": "any_torch",
    "triton": "gpu_triton",
    "flashinfer_cutlass": "blackwell_flashinfer",
    "flashinfer_cudnn": "blackwell_flashinfer",
    "flashinfer_trtllm": "blackwell_flashinfer",
}
"""vLLM's --linear-backend -> the backend of ours that is meant. A value that is not here, or whose backend is not
there, is refused."""


@dataclass(frozen=True)
class Machine:
    """Where vLLM runs: 'cpu', 'cuda' or another platform, and a GPU's compute capability."""

    platform: str
    capability: tuple[int, int] | None = None


def claims(entry: Any, user: str | None, machine: Machine) -> bool:
    """Whether a quantization entry of any kind of config is ours to run.

    user: what --quantization says. A method of another name is never overruled; our own is always obeyed, where the
    file has FP4 groups at all. Without either, a file is claimed where vLLM would not run its arithmetic.
    """
    groups = fp4_groups(entry)
    if not groups or user not in (None, "quarterturn"):
        return False
    if user is not None:
        return True
    if machine.platform not in ("cpu", "cuda"):
        return False
    return has_online_transforms(entry) or not all(_vllm_runs(group, machine) for group in groups)


def fp4_groups(entry: Any) -> list[tuple[str, bool]]:
    """(format, whether activations are quantized) of each FP4 group in a compressed-tensors entry; [] for any other."""
    if not isinstance(entry, dict) or entry.get("quant_method") != METHOD:
        return []
    groups = entry.get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            written = str(group.get("format") or entry.get("format"))
            if written in FORMAT_NAMES:
                found.append((written, group.get("input_activations") is not None))
    return found


def has_online_transforms(entry: dict[str, Any]) -> bool:
    """Whether a config asks for transforms that are applied while the model runs. What is malformed asks for none:
    whoever runs the file parses it, and refuses it then."""
    schemes = declared_transforms(entry)
    bodies = [body for body in schemes.values() if isinstance(body, dict)]
    applies = [body["apply"] for body in bodies if isinstance(body.get("apply"), list)]
    return any(str(a.get("location")) in ONLINE for apply in applies for a in apply if isinstance(a, dict))


def _vllm_runs(group: tuple[str, bool], machine: Machine) -> bool:
    """Whether vLLM has a kernel of a group's own arithmetic, without transforms: read in vLLM 0.32 and 0.33."""
    written, quantizes = group
    if machine.platform != "cuda" or machine.capability is None:
        return False
    blackwell = machine.capability[0] >= 10
    if written.startswith("mxfp4"):
        # Its one MXFP4 class quantizes activations on Blackwell and leaves them elsewhere, whatever the file says.
        return blackwell == quantizes
    return blackwell or not quantizes


def our_backend(linear_backend: str) -> str:
    """The backend that --linear-backend means: 'auto', or a name that is then run or refused. Raises BackendRefusal."""
    meant = LINEAR_BACKENDS.get(linear_backend) if isinstance(linear_backend, str) else None
    there = ("auto", *(backend.NAME for backend in BACKENDS))
    if meant in there:
        return str(meant)
    usable = sorted(name for name, ours in LINEAR_BACKENDS.items() if ours in there)
    found = f"{linear_backend}, which is a kernel of vLLM's own" if meant is None else f"{linear_backend} ({meant})"
    raise refusal(
        "vllm",
        "this --linear-backend is not one of ours.",
        needs=[(f"one of {', '.join(usable)} for the FP4 layers", found)],
        do="name one of them, or pass --quantization compressed-tensors for vLLM's own kernels",
        kind=BackendRefusal,
    )
