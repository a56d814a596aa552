"""What backends keep beside a tensor is neither stale nor part of it."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch

from quarterturn import hadamard, ops
from quarterturn.backends.kept import Kept


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
