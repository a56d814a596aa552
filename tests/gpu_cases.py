"""What the tests of the GPU kernels share: the device, the matrices, the grid of cases, and the two comparisons.

The same tests run on a GPU, and on a CPU through Triton's interpreter where TRITON_INTERPRET=1: there the backend
takes CPU tensors, only the cases marked `interpreter` run, and sizes are small.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

import by_hand
from comparing import FP32_UNIT, assert_equal_arrays, assert_same_bits, compare_quantized
from conftest import INTERPRETED
from quarterturn import MXFP4, NVFP4, hadamard, ops, random_hadamard, reference
from quarterturn.formats import FP4Format

BACKEND = "gpu_triton"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RULES = ("even", "floor", "ceil", "rceil")
ENCODE = 150.0
SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
EXACT_KINDS = ("hadamard", "random hadamard", "signs", "integers", "permutation")
"""Matrices of integers (and of integers times a factor): fp32 holds the sums of small integers exactly."""
PIECED_SIZES = (16, 32, 64, 128)
Turn = tuple[torch.Tensor | None, float, bool]
NO_TURN: Turn = (None, 1.0, False)
MANNERS = [("nvfp4", recipe, "even") for recipe in ("checkpoint", "token", "qutlass")]
MANNERS += [("mxfp4", "checkpoint", rule) for rule in RULES]
"""Every way to quantize: format, recipe, rule."""
USUAL = (MANNERS[0], MANNERS[3])
"""The one of each format that files ask for."""


def grid(
    small: Callable[..., bool] = lambda **_: False, keep: Callable[..., bool] = lambda **_: True, **axes: object
) -> pytest.MarkDecorator:
    """Parametrize by what `keep` leaves of the product of the axes; `small` picks those marked `interpreter` too.

    Every manner, size and dtype is a kernel of its own to compile, so not every product is run whole.
    """
    cases = []
    for values in itertools.product(*axes.values()):
        case = dict(zip(axes, values, strict=True))
        if not keep(**case):
            continue
        marks = (pytest.mark.interpreter,) if small(**case) else ()
        cases.append(pytest.param(*values, marks=marks, id="-".join(map(_word, values))))
    return pytest.mark.parametrize(list(axes), cases)


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return "_".join(map(_word, value))
    return {"True": "transposed", "False": "straight"}.get(str(value), str(value).removeprefix("torch."))


def matrix_of(kind: str, size: int) -> tuple[torch.Tensor, float]:
    """An fp32 (size, size) matrix and its factor."""
    if kind == "hadamard":  # Sylvester's for powers of two, else built on Paley's
        return hadamard(size).matrix.float(), size**-0.5
    if kind == "random hadamard":
        return random_hadamard(size, seed=size).matrix.float(), size**-0.5
    if kind == "signs":  # +-1 without any structure, so that nobody leans on one
        return torch.randint(0, 2, (size, size)).float() * 2 - 1, 0.25
    if kind == "integers":  # dense, 10 bits an entry: more than bf16 holds
        return torch.randint(-1000, 1001, (size, size)).float(), 2.0**-9
    if kind == "permutation":
        return torch.eye(size)[torch.randperm(size)] * (torch.randint(0, 2, (size,)) * 2 - 1), 1.0
    assert kind == "dense"
    return torch.randn(size, size) / size**0.5, 1.0


def integers(m: int, k: int, dtype: torch.dtype, largest: int = 8) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, (m, k)).to(dtype)


def manner(name: str, recipe: str = "checkpoint", rule: str = "even", encode: float = ENCODE) -> dict:
    """Keywords of the quantizing ops, with tensors on the CPU."""
    needs_scale = name == "nvfp4" and recipe == "checkpoint"
    scale = torch.tensor([encode], dtype=torch.float32) if needs_scale else None
    return {"format": FORMATS[name], "recipe": recipe, "rule": rule, "encode_scale": scale}


def on_device(value: object) -> object:
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def run(op: Callable, x: torch.Tensor, *turn: object, backend: str = "", **how: object) -> tuple[torch.Tensor, ...]:
    """The op on the device, its results still there; x is moved only if it lies elsewhere, so its strides are kept."""
    x = x if x.device.type == DEVICE.type else x.to(DEVICE)
    moved = {name: on_device(value) for name, value in how.items()}
    made = op(x, *map(on_device, turn), backend=backend or BACKEND, **moved)
    return made if isinstance(made, tuple) else (made,)


def here(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(t.cpu() for t in tensors)


def assert_exact(x: torch.Tensor, turn: Turn = NO_TURN, what: str = "", **how: object) -> None:
    """Codes, scale bytes and tensor scale equal the specification's, bit for bit."""
    got, want = here(run(ops.rotate_quantize, x, *turn, **how)), reference.rotate_quantize(x, *turn, **how)
    assert got[0].dtype == torch.uint8
    assert got[1].dtype == how["format"].scale_dtype
    assert_same_bits(got[2].reshape(-1), want[2].reshape(-1), f"{what} tensor scales")
    assert_equal_arrays(by_hand.numpy(got[1]), by_hand.numpy(want[1]), f"{what} scale bytes")
    codes = (by_hand.unpack(by_hand.numpy(side[0])) for side in (got, want))
    assert_equal_arrays(*codes, f"{what} codes")


def blocked(scale: np.ndarray) -> np.ndarray:
    """by_hand.blocked for large matrices: the address of every scale at once, zeros elsewhere."""
    rows, cols = scale.shape
    out = np.zeros(-(-rows // 128) * 128 * -(-cols // 4) * 4, dtype=np.uint8)
    r, c = np.indices(scale.shape)
    out[by_hand.blocked_offset(r, c, cols)] = scale
    return out


def assert_equal_values(got: torch.Tensor, want: np.ndarray, what: str) -> None:
    """Equal numbers, NaN where NaN is wanted; 0 and -0 are one number."""
    value = got.double().numpy()
    assert_equal_arrays(np.isnan(value), np.isnan(want), f"{what}, where NaN")
    assert_equal_arrays(np.nan_to_num(value), np.nan_to_num(want), what)


def rotated(x: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
    """z in float64, and how far fp32 may be from it: R - 1 additions and 3 roundings a term (of T, product, factor)."""
    matrix, factor, transpose = turn
    assert matrix is not None
    size = matrix.shape[0]
    block = matrix.to(x.device).float().double() * torch.tensor(factor, dtype=torch.float32).double().item()
    block = block.T if transpose else block
    blocks = x.double().view(-1, size)
    slack = (size + 2) * FP32_UNIT * (blocks.abs() @ block.abs())
    return (blocks @ block).view(x.shape), slack.view(x.shape)


def assert_counted(x: torch.Tensor, turn: Turn, oracle: str = "reference", **how: object) -> None:
    """At most 1e-5 of the scale bytes and 1e-4 of the codes differ, each a neighbour next to a tie.

    oracle: 'reference', on the CPU, or a backend on the device for samples that the CPU is too slow for.
    """
    got = run(ops.rotate_quantize, x, *turn, **how)
    if oracle == "reference":
        want = tuple(t.to(DEVICE) for t in reference.rotate_quantize(x.cpu(), *turn, **how))
    else:
        want = run(ops.rotate_quantize, x, *turn, backend=oracle, **how)
    fmt: FP4Format = how["format"]
    groups, size = want[1].numel(), fmt.group_size
    rows, each = x.shape[0], x.shape[1] // size
    scales = [t[1].view(torch.uint8).reshape(groups, 1) for t in (got, want)]
    codes = [t[0].reshape(groups, size // 2) for t in (got, want)]
    differ = ((scales[0] != scales[1]).view(-1) | (codes[0] != codes[1]).any(1)).nonzero().view(-1)
    assert differ.numel() <= 16 + 2e-4 * groups * size, f"{differ.numel()} of {groups} groups differ"
    row = differ // each
    slack = _tensor_scale_slack(x.to(DEVICE), turn, got[2], want[2]) if how["recipe"] == "token" else None
    if slack is None:
        assert_same_bits(got[2], want[2], "tensor scales")
    if not differ.numel():
        return
    z, dz = rotated(x.to(DEVICE)[row], turn)
    if x.dtype == torch.bfloat16 and turn[0] is not None and turn[0].shape[0] in PIECED_SIZES:
        # Codes may be of two bf16 pieces of the matrix, each entry of which is within 2^-16 of it.
        dz = dz * (1 + 2.0**-16 / ((turn[0].shape[0] + 2) * FP32_UNIT))
    if slack is not None:
        dz = dz + z.abs() * slack[row].unsqueeze(1)
    at = torch.arange(differ.numel(), device=DEVICE), differ % each
    z, dz = (t.view(-1, each, size)[at].cpu().numpy() for t in (z, dz))
    encode = 1 / want[2].double().expand(rows)[row].cpu().numpy().reshape(-1, 1)
    pairs = [(c[differ].cpu(), s[differ].cpu()) for c, s in zip(codes, scales, strict=True)]
    compare_quantized(*pairs, z, dz, fmt.name, encode, how["rule"], groups=groups)


def _tensor_scale_slack(x: torch.Tensor, turn: Turn, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """How far, relatively, each row's own tensor scale may be off, since it depends on z; it is checked to be so."""
    z, dz = rotated(x, turn)
    slack = dz.amax(1) / z.abs().amax(1) + 2.0**-22
    assert ((got.double() / want.double() - 1).abs() <= slack).all(), "tensor scales"
    return slack


def rotate_bound(x: torch.Tensor, turn: Turn, out: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """z in float64 and the bound of a result of dtype `out` around it: what fp32 may lose, then one rounding."""
    unit, tiny = {
        torch.float32: (FP32_UNIT, 2.0**-150),
        torch.bfloat16: (2.0**-8, 2.0**-134),
        torch.float16: (2.0**-11, 2.0**-25),
    }[out]
    z, dz = rotated(x, turn)
    return z, dz + unit * (z.abs() + dz) + tiny


def assert_rotates(x: torch.Tensor, turn: Turn, out: torch.dtype, what: str = "rotate") -> None:
    """The op `rotate` is within what fp32 and one rounding may lose; all of it on the device."""
    (got,) = run(ops.rotate, x, *turn, out_dtype=out)
    assert got.dtype == out
    z, bound = rotate_bound(x.to(DEVICE), turn, out)
    wrong = ~((got.double() - z).abs() <= bound)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} beyond the bound, the first at {at}: "
            f"got {got[at].item()!r}, want {z[at].item()!r} +- {bound[at].item():.3g}"
        )
