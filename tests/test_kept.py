"""What backends keep beside a tensor is neither stale nor part of it."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch

from quarterturn import FP4Linear, hadamard, ops, random_hadamard
from quarterturn.backends.kept import COMPARED, Kept


def test_it_is_kept_for_the_object_and_its_version() -> None:
    kept, a, b = Kept(), torch.ones(2), torch.ones(2)
    kept.of(a)["x"] = 1
    assert kept.of(a) == {"x": 1}
    assert kept.of(b) == {}
    a.add_(1)
    assert kept.of(a) == {}


def test_it_goes_with_the_tensor() -> None:
    class Made:
        pass

    kept, a, made = Kept(), torch.ones(2), Made()
    gone = weakref.ref(made)
    kept.of(a)["x"] = made
    del made, a
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("backend", ["cpu_native", "any_torch"])
def test_a_matrix_that_was_used_is_saved_as_it_is(backend: str) -> None:
    matrix = hadamard(16).matrix.float()
    ops.rotate(torch.ones(1, 16), matrix, 0.25, backend=backend)
    assert not vars(matrix)
    file = io.BytesIO()
    torch.save(matrix, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), matrix)


@pytest.mark.parametrize("backend", ["cpu_native", "any_torch"])
def test_a_matrix_that_is_written_to_is_read_again(backend: str) -> None:
    matrix, x = torch.eye(16), torch.arange(16.0).view(1, 16)
    assert torch.equal(ops.rotate(x, matrix, backend=backend), x)
    matrix.mul_(2)
    assert torch.equal(ops.rotate(x, matrix, backend=backend), 2 * x)
    matrix.data = torch.eye(16) * 3
    assert torch.equal(ops.rotate(x, matrix, backend=backend), 3 * x)
    copied = copy.deepcopy(matrix)
    copied.copy_(torch.eye(16))
    assert torch.equal(ops.rotate(x, copied, backend=backend), x)


@pytest.mark.parametrize("backend", ["cpu_native", "any_torch"])
def test_other_memory_behind_a_large_matrix_is_read(backend: str) -> None:
    """`.data = ...` with other strides, another shape, and memory at an address that was used before."""
    x = torch.randint(-8, 9, (4, 768)).float()  # whose sums fp32 holds

    def assert_read(matrix: torch.Tensor) -> None:
        want = (x.double().view(-1, len(matrix)) @ matrix.double()).view(x.shape)
        assert torch.equal(ops.rotate(x, matrix, backend=backend).double(), want)

    matrix = hadamard(768).matrix.float()
    matrix[0] *= -1
    assert_read(matrix)
    matrix.data = matrix.data.T
    assert_read(matrix)
    matrix.data = hadamard(768).matrix.float()
    assert_read(matrix)
    matrix.data = random_hadamard(256).matrix.float().repeat(3, 3)[:256, :256]
    assert_read(matrix)


def test_no_other_storage_is_taken_for_the_one_that_was() -> None:
    kept, tensor = Kept(), torch.ones(COMPARED)
    kept.of(tensor)["x"] = 1
    for _ in range(50):  # the allocator mostly gives the same memory back
        tensor.data = torch.ones(1)
        tensor.data = torch.ones(COMPARED)
        assert kept.of(tensor) == {}
        kept.of(tensor)["x"] = 1


WRITES = {
    "in place": lambda m: m.mul_(2),
    "data in place": lambda m: m.data.mul_(2),
    "numpy": lambda m: np.multiply(m.numpy(), 2, out=m.numpy()),
    "a view": lambda m: m.view(-1)[3:].mul_(2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("backend", ["cpu_native", "any_torch"])
def test_whoever_writes_to_a_matrix_it_is_read_again(backend: str, size: int, inference: bool, write) -> None:
    """128 is the largest size whose bytes are compared, a Hadamard the form that is kept as signs."""
    for make in (torch.eye, lambda n: hadamard(n).matrix.float()):
        with torch.inference_mode(inference):
            matrix, x = make(size).clone(), torch.randn(2, size)
            ops.rotate(x, matrix, backend=backend)
            write(matrix)
            want = ops.rotate(x, matrix.clone(), backend=backend)
            assert torch.equal(ops.rotate(x, matrix, backend=backend), want)
            strided = torch.stack((matrix, matrix), -1)[..., 0]
            ops.rotate(x, strided, backend=backend)
            strided.data.mul_(3)
            assert torch.equal(ops.rotate(x, strided, backend=backend), ops.rotate(x, strided.clone(), backend=backend))


def test_of_large_tensors_without_a_version_nothing_is_kept() -> None:
    kept = Kept()
    large, small = torch.ones(COMPARED // 4 + 1), torch.ones(COMPARED // 4)
    for tensor in (large, small):
        kept.of(tensor)["x"] = 1
        assert kept.of(tensor) == {"x": 1}
    with torch.inference_mode():
        large, small = large.clone(), small.clone()
    for tensor, want in ((large, {}), (small, {"x": 1})):
        kept.of(tensor)["x"] = 1
        assert kept.of(tensor) == want


def test_layers_made_in_inference_mode_keep_their_form() -> None:
    with torch.inference_mode():
        layer = FP4Linear(256, 64, format="nvfp4", input_transform=random_hadamard(256), device="cpu").refresh()
        assert layer.input_matrix is not None
        assert not layer.input_matrix.is_inference()
