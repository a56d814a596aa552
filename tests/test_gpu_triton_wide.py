"""Rotation by a wide +-1 matrix in one pass, on a GPU and through Triton's interpreter: integers bit for bit, others
within what fp32 may lose, and rotate + quantize behind it as specified."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from comparing import assert_same_bits
from gpu_cases import DEVICE, INTERPRETED, USUAL, Turn, assert_counted, assert_rotates, grid, here, manner, run
from quarterturn import ops
from quarterturn.backends import gpu_device, gpu_wide
from quarterturn.backends.factors import Factors
from quarterturn.backends.protocol import Blocks
from wide_matrices import by_factors, factors, product, signs

pytestmark = pytest.mark.gpu
ORDERS = [
    (256,), (2, 256), (12, 64), (64, 12), (8, 12, 8), (1024,), (28, 128), (128, 28), (4096,), (8192,), (172, 64),
]  # fmt: skip
"""Of the factors, the outermost first: 256, 512, 768, 1024, 3584, 4096, 8192, 11008."""
WIDEST = [(20, 256), (108, 128), (16384,), (28, 512), (512, 28), (172, 128), (28, 1024), (1024, 28), (32768,)]
"""Of matrices that are not made: 5120, 13824, 14336, 16384, 22016, 28672, 32768."""
BY_HOPPER = [
    (8192,), (20, 256), (12, 512), (28, 512), (108, 128), (16384,), (12, 2048), (28, 1024), (108, 256), (32768,),
]  # fmt: skip
"""Of matrices that the kernel for Hopper takes."""
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is taken on the GPU at hand, whether or not these tests were ever run on one like it."""
    if DEVICE.type == "cuda":
        monkeypatch.setattr(gpu_wide, "RUN_ON", (torch.cuda.get_device_capability(),))


def wide_turn(orders: tuple[int, ...], signed: bool, transpose: bool) -> Turn:
    """A Hadamard matrix of a form that the kernel takes, on the device; signed: random signs at rows and columns."""
    matrix = product(*orders, signed=signed).to(DEVICE)
    return matrix, len(matrix) ** -0.5, transpose


def assert_taken(x: torch.Tensor, turn: Turn) -> None:
    """Or a test of the kernel would be one of any_torch."""
    assert gpu_wide.wide_of(Blocks(*turn), x.to(DEVICE)) is not None


def wanted(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Of integers: sums that fp32 holds, times the fp32 factor, rounded once; a zero is +0."""
    matrix, factor, transpose = turn
    size = matrix.shape[0]
    sums = x.to(DEVICE).float().view(-1, size).double() @ (matrix.T if transpose else matrix).double()
    return ((sums * torch.tensor(factor, dtype=torch.float32).item()).float() + 0.0).view(x.shape)


@grid(
    small=lambda orders, signed, transpose: math.prod(orders) < 5000,
    orders=ORDERS,
    signed=[False, True],
    transpose=[False, True],
)
def test_rotates_as_specified(orders: tuple[int, ...], signed: bool, transpose: bool) -> None:
    turn, k = wide_turn(orders, signed, transpose), math.prod(orders)
    for dtype in SIXTEEN_BITS:
        x = torch.randint(-8, 9, (5, k)).to(dtype)
        x[3] = 0
        assert_taken(x, turn)
        want = wanted(x, turn)
        for out in (torch.float32, dtype):
            (got,) = run(ops.rotate, x, *turn, out_dtype=out)
            assert_same_bits(got.cpu(), want.to(out).cpu(), f"integers, {dtype} to {out}")
        random = torch.randn(5, k).to(dtype)
        for out in (torch.float32, dtype):
            assert_rotates(random, turn, out, f"{dtype} to {out}")


@grid(
    small=lambda orders, signed, transpose, hopper: orders != (172, 128) and signed == transpose,
    keep=lambda orders, signed, transpose, hopper: not hopper or (not INTERPRETED and orders in BY_HOPPER),
    orders=WIDEST,
    signed=[False, True],
    transpose=[False, True],
    hopper=[False, True],
)
def test_the_widest_by_their_factors(orders: tuple[int, ...], signed: bool, transpose: bool, hopper: bool) -> None:
    made, factor = factors(*orders, signed=signed), math.prod(orders) ** -0.5
    hopper = hopper and gpu_device.runs_gluon(DEVICE)  # elsewhere the other kernel once more
    for dtype in SIXTEEN_BITS if signed or not INTERPRETED else SIXTEEN_BITS[:1]:
        wide = gpu_wide.make_wide(made, factor, transpose, dtype, DEVICE, hopper)
        assert wide is not None
        assert wide.hopper == hopper
        x = torch.randint(-8, 9, (3, wide.size)).to(dtype)
        want = by_factors(x, made, transpose) * torch.tensor(factor).double() + 0.0
        for out in (torch.float32, dtype):
            got = gpu_wide.rotate_wide(x.to(DEVICE), wide, out)
            assert_same_bits(got.cpu(), want.float().to(out), f"integers, {dtype} to {out}")
        random = torch.randn(3, wide.size).to(dtype)
        got = gpu_wide.rotate_wide(random.to(DEVICE), wide, torch.float32).cpu().double()
        want = by_factors(random, made, transpose) * torch.tensor(factor).double()
        assert_within_fp32(got, want, random.double().norm(dim=1, keepdim=True) * wide.size**-0.5)


SIDES = {"none": (False, False), "rows": (True, False), "columns": (False, True), "both": (True, True)}
"""Where a matrix has random signs: at its rows, which change x, at its columns, which change the output."""


def signed_at(orders: tuple[int, ...], sides: str) -> Factors:
    made, one = factors(*orders), torch.ones(math.prod(orders), dtype=torch.float64)
    rows, columns = SIDES[sides]
    return replace(made, left=made.left if rows else one, right=made.right if columns else one)


@grid(keep=lambda sides, m: not INTERPRETED, sides=list(SIDES), m=[1, 2, 131, 133, 264, 265, 528, 2200])
def test_rows_of_the_hopper_kernel(sides: str, m: int) -> None:
    """Fewer than there are programs, as many, and so many that each place for a row is used three times; beyond the
    last row nothing is written. On a GPU that is no Hopper the other kernel is compared with itself."""
    hopper = gpu_device.runs_gluon(DEVICE)
    for orders in BY_HOPPER:
        made = signed_at(orders, sides)
        for dtype in SIXTEEN_BITS if m < 1000 else SIXTEEN_BITS[:1]:
            plain, ours = (gpu_wide.make_wide(made, 0.01, False, dtype, DEVICE, which) for which in (False, hopper))
            assert plain is not None
            assert ours is not None
            assert ours.hopper == hopper
            x = torch.randint(-8, 9, (m, ours.size), device=DEVICE).to(dtype)
            for out in (torch.float32, dtype):
                want = gpu_wide.rotate_wide(x, plain, out)
                memory = torch.full((m + 1, ours.size), float("nan"), dtype=out, device=DEVICE)
                gpu_wide._launch(x, ours, memory[:m])
                if not torch.equal(memory[:m].view(torch.uint8), want.view(torch.uint8)):
                    assert_same_bits(memory[:m].cpu(), want.cpu(), f"{orders}, {dtype} to {out}")
                assert memory[m].isnan().all()


@grid(keep=lambda orders: not INTERPRETED, orders=[(8192,), (16384,), (28, 1024)])
def test_a_chain_of_overlapping_rotations(orders: tuple[int, ...]) -> None:
    """Each rotates what the one before wrote, and may begin before that has ended; eagerly and in a graph."""
    wide = gpu_wide.make_wide(factors(*orders), 2.0**-6, False, torch.bfloat16, DEVICE, gpu_device.runs_gluon(DEVICE))
    assert wide is not None
    x = torch.randn(700, wide.size, device=DEVICE).bfloat16()

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for _ in range(12):
            y = gpu_wide.rotate_wide(y, wide, torch.bfloat16)
            if wait:
                torch.cuda.synchronize()
        return y

    want = chain(True)
    for _ in range(5):
        assert torch.equal(chain(False), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(False)
    for _ in range(5):
        graph.replay()
        assert torch.equal(y, want)


@grid(keep=lambda orders: not INTERPRETED, orders=[(8192,), (28, 512)])
def test_memory_that_begins_between_sixteen_bytes(orders: tuple[int, ...]) -> None:
    made, k = factors(*orders), math.prod(orders)
    wide = gpu_wide.make_wide(made, 0.01, False, torch.bfloat16, DEVICE, gpu_device.runs_gluon(DEVICE))
    assert wide is not None
    flat = torch.randint(-8, 9, (5 * k + 1,), device=DEVICE).bfloat16()
    for first in (0, 1):
        x = flat[first : first + 5 * k].view(5, k)
        want = by_factors(x.cpu(), made) * torch.tensor(0.01).double() + 0.0
        assert_same_bits(gpu_wide.rotate_wide(x, wide, torch.float32).cpu(), want.float())


def assert_within_fp32(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> None:
    """A tenth of the bound of any order of sums: a rounding for each of the kernel's steps, of numbers of that size.

    fp32 sums of 256 products, at most ten sums and differences, the factor: 2^-24 of each, and they add up at random.
    """
    assert ((got - want).abs() <= 2.0**-24 * 16 * size).all()


@grid(small=lambda m: m < 70, m=[1, 2, 31, 33, 63, 65, 127, 129, 640, 5000])
def test_every_edge_of_a_tile(m: int) -> None:
    """Tiles of 16 rows of 512, and of one row; several blocks a row; programs that take several tiles."""
    for orders, blocks in (((512,), 1), ((512,), 3), ((28, 128), 2)):
        turn = wide_turn(orders, True, False)
        x = torch.randint(-8, 9, (m, blocks * math.prod(orders))).bfloat16()
        (got,) = run(ops.rotate, x, *turn, out_dtype=torch.float32)
        assert_same_bits(got.cpu(), wanted(x, turn).cpu(), f"{m} rows of {blocks} blocks")
        (alone,) = run(ops.rotate, x[m - 1 :], *turn, out_dtype=torch.float32)
        assert_same_bits(alone.cpu(), got[m - 1 :].cpu(), "the last row by itself")


@grid(small=lambda orders: True, orders=[(512,), (12, 64)])
def test_no_rows_and_other_strides(orders: tuple[int, ...]) -> None:
    turn, k = wide_turn(orders, True, True), math.prod(orders)
    big = torch.randint(-8, 9, (20, k + 100)).bfloat16().to(DEVICE)
    for x in (big[:, 50 : 50 + k], big[::3, :k], big[:, 1 : 1 + k]):
        before = x.clone()
        (got,) = run(ops.rotate, x, *turn, out_dtype=torch.float32)
        assert_same_bits(got.cpu(), wanted(x.contiguous(), turn).cpu())
        assert torch.equal(x, before)
    assert run(ops.rotate, big[:0, :k], *turn)[0].shape == (0, k)


@grid(small=lambda orders: orders != (8192,), orders=[(512,), (12, 64), (64, 12), (8192,)])
def test_no_number_spreads_over_its_block_alone(orders: tuple[int, ...]) -> None:
    """NaN and Inf as a sum of all of a block's values has them, and finite neighbours in the same tile."""
    turn, k = wide_turn(orders, True, False), math.prod(orders)
    x = torch.randint(-8, 9, (6, 2 * k)).bfloat16()
    x[0, 5], x[1, k + 40], x[2, 7] = float("nan"), float("inf"), -float("inf")
    x[3, 8], x[3, 300] = float("inf"), float("inf")
    (got,) = here(run(ops.rotate, x, *turn, out_dtype=torch.float32))
    (want,) = here(run(ops.rotate, x, *turn, out_dtype=torch.float32, backend="any_torch"))
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bits(got.nan_to_num(), want.nan_to_num())


@grid(small=lambda factor, dtype: True, factor=[-0.3, 1.0, 2.0**-60, 3e30, 0.0], dtype=SIXTEEN_BITS)
def test_any_factor(factor: float, dtype: torch.dtype) -> None:
    matrix, _, transpose = wide_turn((512,), True, False)
    turn = (matrix, factor, transpose)
    x = torch.randint(-8, 9, (5, 512)).to(dtype)
    (got,) = run(ops.rotate, x, *turn, out_dtype=torch.float32)
    assert_same_bits(got.cpu(), wanted(x, turn).cpu())


@grid(small=lambda kind: True, kind=["bf16"])
def test_a_sum_that_the_factor_brings_back_does_not_overflow(kind: str) -> None:
    turn = wide_turn((1024,), False, False)
    x = torch.full((2, 1024), 3e35).bfloat16()
    (got,) = here(run(ops.rotate, x, *turn, out_dtype=torch.float32))
    want = float(x[0, 0].double()) * 1024 * 1024**-0.5
    assert got.isfinite().all()
    assert math.isclose(float(got[0, 0]), want, rel_tol=2e-7)
    assert got[:, 1:].abs().max() == 0


@grid(
    small=lambda orders, name, recipe, rule: recipe == "checkpoint",
    keep=lambda orders, name, recipe, rule: (name, recipe, rule) in (*USUAL, ("nvfp4", "token", "even")),
    orders=[(512,), (12, 64)],
    name=["nvfp4", "mxfp4"],
    recipe=["checkpoint", "token"],
    rule=["even"],
)
def test_quantized_behind_it(orders: tuple[int, ...], name: str, recipe: str, rule: str) -> None:
    turn = wide_turn(orders, True, False)
    x = torch.randn(40 if INTERPRETED else 2000, 2 * math.prod(orders)).bfloat16()
    assert_taken(x, turn)
    assert_counted(x, tuple(on_cpu(turn)), **manner(name, recipe, rule))


def on_cpu(turn: Turn) -> Turn:
    assert turn[0] is not None
    return turn[0].cpu(), turn[1], turn[2]


@grid(keep=lambda orders: not INTERPRETED, orders=[(512,), (28, 1024)])
def test_captured_and_repeated(orders: tuple[int, ...]) -> None:
    """A graph gives the bits of a call on new input; a matrix that was not met before is rotated all the same."""
    turn, k = wide_turn(orders, True, False), math.prod(orders)
    x = torch.randn(300, k, device=DEVICE).bfloat16()
    want = ops.rotate(x, *turn, backend="gpu_triton")
    for _ in range(20):
        assert torch.equal(ops.rotate(x, *turn, backend="gpu_triton"), want)
    held, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.rotate(held, *turn, backend="gpu_triton")
    held.copy_(x)
    graph.replay()
    assert torch.equal(out, want)


@grid(keep=lambda k: not INTERPRETED, k=[512, 8192])
def test_offsets_past_two_to_the_31(k: int) -> None:
    turn = wide_turn((k,), False, False)
    x = torch.zeros((2**31 + 16 * k) // k, k, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = torch.randint(-8, 9, (3, k), device=DEVICE).bfloat16()
    got = ops.rotate(x, *turn, backend="gpu_triton")
    assert_same_bits(got[-3:].cpu(), wanted(x[-3:], turn).bfloat16().cpu())
    assert not got[:-3].any()


def test_signs_of_the_matrices_are_not_all_one() -> None:
    """Or no test above would read them."""
    assert set(signs(64).tolist()) == {-1.0, 1.0}
