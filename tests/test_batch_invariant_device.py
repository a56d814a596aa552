"""batch_invariant on a GPU: the bits of a row, whatever the number of rows and whoever is multiplied beside it."""

from __future__ import annotations

import pytest
import torch

from comparing import assert_same_bits
from quarterturn import compile_options, random_hadamard
from test_batch_invariant import BF16, CUDA, FP16, assert_rows_alike, layer_of
from test_fused_device import Attention, K, tied
from test_gpu_product_device import assert_near, expected

pytestmark = pytest.mark.gpu

KINDS = [("nvfp4", BF16), ("mxfp4", BF16), ("nvfp4", FP16)]
EDGES = (1, 8, 9, 16, 17, 32, 33, 64, 65, 129, 257)


@pytest.mark.parametrize("recipe", ["checkpoint", "token"])
@pytest.mark.parametrize("activations", ["bf16", "fp4"])
@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=["nvfp4", "mxfp4", "fp16"])
@pytest.mark.parametrize(("n", "k"), [(1000, 4096), (4096, 14336), (464, 192)])
def test_rows(n: int, k: int, name: str, dtype: torch.dtype, activations: str, recipe: str) -> None:
    how = {} if recipe == "checkpoint" else {"recipe": recipe}
    for size in (None, 64, 32):
        with CUDA:
            layer = layer_of(
                name, n, k, activations=activations, backend="gpu_triton", bias=torch.randn(n).to(dtype),
                input_transform=None if size is None else random_hadamard(size), **how,
            )  # fmt: skip
            x = torch.randn(300, k).to(dtype)
        assert layer.explain().weights == "packed, in fragments"
        if recipe == "checkpoint":
            assert_near(layer(x), expected(layer, x))
        assert_rows_alike(layer, x, range(1, 301) if size == 64 else EDGES)


@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (17920, 1536)])
def test_wide_layers(n: int, k: int) -> None:
    """Parts of K that programs add up by themselves, for few rows too."""
    with CUDA:
        layer = layer_of("nvfp4", n, k, backend="gpu_triton", input_transform=random_hadamard(64))
        x = torch.randn(128, k).to(BF16)
    assert_rows_alike(layer, x, (1, 16, 33, 64, 128))


@pytest.mark.parametrize("activations", ["bf16", "fp4"])
def test_many_rows(activations: str) -> None:
    """Tiles of 256 tokens, and more than one wave of them."""
    with CUDA:
        turn = random_hadamard(64)
        layer = layer_of("nvfp4", 6144, 4096, activations=activations, backend="gpu_triton", input_transform=turn)
        x = torch.randn(4500, 4096).to(BF16)
    assert_rows_alike(layer, x, (1, 16, 32, 64, 128, 256, 512, 1000, 2048, 4096))


def rows_of(model: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return [y.contiguous() for y in model(x)]


@pytest.mark.parametrize("activations", ["bf16", "fp4"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_siblings(name: str, activations: str) -> None:
    """Alone, in one product, captured and compiled: the same bits."""
    together, alone = tied(name=name, activations=activations, batch_invariant=True)
    with torch.no_grad():
        x = torch.randn(300, K, device="cuda").to(BF16)
        whole = [y.clone() for y in rows_of(alone, x)]
        for m in (1, 5, 16, 17, 40, 130, 300):
            for model in (together, alone):
                for got, want in zip(rows_of(model, x[:m].clone()), whole, strict=True):
                    assert_same_bits(got, want[:m], f"{m} rows")
        held, graph = x[:5].clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = together(held)
        graph.replay()
        for got, want in zip(out, whole, strict=True):
            assert_same_bits(got.contiguous(), want[:5], "captured")
        compiled = torch.compile(together, fullgraph=True, options=compile_options())
        for got, want in zip(compiled(x[:40].clone()), whole, strict=True):
            assert_same_bits(got.contiguous(), want[:40], "compiled")


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=["nvfp4", "mxfp4", "fp16"])
def test_the_way_of_other_gpus(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows after the other, as on 8.x, on whatever GPU this is."""
    from quarterturn.backends import gpu_product

    few_by_few, taken = gpu_product._few_by_few, set()

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor:
        taken.add(len(x))
        return few_by_few(x, *rest)

    monkeypatch.setattr(gpu_product, "_hopper", lambda x: False)
    monkeypatch.setattr(gpu_product, "_few_by_few", counted)
    for n, k in ((1000, 4096), (464, 14336)):
        with CUDA:
            layer = layer_of(name, n, k, activations="bf16", backend="gpu_triton")
            x = torch.randn(300, k).to(dtype)
        assert_near(layer(x), expected(layer, x))
        assert_rows_alike(layer, x, range(1, 301, 1 if n == 1000 else 13))
    assert taken == set(range(1, 301)), "every number of rows went that way"
