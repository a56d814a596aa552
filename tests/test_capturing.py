"""Counters of products on a GPU: as many as a device's products use, however many multiprocessors it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from quarterturn import NVFP4, weight_layout
from quarterturn.backends import capturing, gpu_device, gpu_matmul, gpu_matmul_many
from test_gpu_product import weight_of

CPU = torch.device("cpu")
LARGE = 300
SPLIT = gpu_matmul.Cut(4, 2, 1, 1, 1, 4, False)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One of more multiprocessors than any that there is, for which the main memory is taken."""
    of = SimpleNamespace(multi_processor_count=LARGE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: of)
    for module in (gpu_device, gpu_matmul_many):
        monkeypatch.setattr(module, "multiprocessors", lambda _: LARGE)
    monkeypatch.setattr(gpu_device, "capability", lambda _: (9, 0))
    monkeypatch.setattr(gpu_device, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(capturing, "_SETS_OF", {})
    capturing.counters_of.cache_clear()
    yield
    capturing.counters_of.cache_clear()


def test_a_capture_gets_as_many_as_products_of_the_device_use() -> None:
    capturing.provide(CPU)
    counts = capturing._SETS_OF[CPU].left[-1]
    gpu_matmul_many.workspace(CPU, counts)
    programs, _, _ = gpu_matmul.shares(10**6, SPLIT, LARGE)
    assert programs == 2 * LARGE <= counts.numel()


def test_too_few_are_found_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=f"{2 * LARGE}, {2 * LARGE - 1}"):
        gpu_matmul_many.workspace(CPU, torch.zeros(2 * LARGE - 1, dtype=torch.int32))
    launched: list[int] = []
    for module in (gpu_matmul, gpu_matmul_many):
        monkeypatch.setattr(module, "launcher", lambda config: lambda programs, *_: launched.append(programs))
    weight = weight_of(NVFP4, 464, 512)
    made = weight_layout.forward(weight.codes, weight.block_scale, weight.format)
    x, out, one = torch.zeros(16, 512).bfloat16(), torch.empty(16, 464).bfloat16(), torch.ones(1)

    def few(counters: int) -> None:
        work = torch.empty(2 * 29 * 256), torch.zeros(counters, dtype=torch.int32)
        gpu_matmul.few(x, made, None, None, None, out, cut=SPLIT, work=work)

    def many(counters: int) -> None:
        how = gpu_matmul_many.Cut(128, 32, 2, True, 2)
        space = gpu_matmul_many.Workspace(torch.empty(8 * 128 * 32), torch.zeros(counters, dtype=torch.int32))
        gpu_matmul_many.many(x, made, one.expand(464), one, None, space, chosen=how)

    few(29), many(8)
    assert launched == [29, 8]
    for product, counters in ((few, 28), (many, 7)):
        with pytest.raises(AssertionError):
            product(counters)
    assert len(launched) == 2
