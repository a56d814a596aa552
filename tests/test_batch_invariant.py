"""batch_invariant: a row's result has the same bits whatever rows are beside it, or the layer is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import fused_cases
from comparing import assert_same_bits
from fused_cases import Gpu, K, every_kind, same, tied, x_of
from quarterturn import MXFP4, NVFP4, hadamard, matrix, random_hadamard
from quarterturn.backends import Problem, any_torch, cpu_native, gpu_device, gpu_product, gpu_triton, select
from quarterturn.backends.gpu_matmul import cut_of
from quarterturn.backends.gpu_matmul_many import invariant_cut
from quarterturn.errors import BackendRefusal, Refusal
from quarterturn.formats import FORMATS
from quarterturn.linear import FP4Linear
from test_fused_compiled import Calls
from test_gpu_product import weight_of
from wide_matrices import product

called, gpu = fused_cases.called, fused_cases.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CUDA = torch.device("cuda")


def layer_of(name: str, n: int, k: int, *, activations: str = "fp4", **how) -> FP4Linear:
    if activations == "fp4" and "recipe" not in how:
        how |= {"input_encode_scale": 200.0}
    return FP4Linear.from_tensor(
        weight_of(FORMATS[name], n, k), activations=activations, **{"batch_invariant": True, "weights": "packed", **how}
    )


def assert_rows_alike(layer: FP4Linear, x: Tensor, counts) -> None:
    whole = layer(x)
    for m in counts:
        assert_same_bits(layer(x[:m]), whole[:m], f"{m} rows")
    assert_same_bits(layer(x[7:8]), whole[7:8], "a row alone")


# ---- on a CPU


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_on_a_cpu(name: str, activations: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and many, also where there are tiles, or the CPU's own bf16 products, for many."""

    def never(*_: object) -> None:
        raise AssertionError("a product that other numbers of rows do not take")

    monkeypatch.setattr(cpu_native, "_has_tiles", lambda: True)
    monkeypatch.setattr(any_torch, "cpu_has_bf16", lambda: True)
    for other in ("_many_rows", "_tile_product", "_tiles"):
        monkeypatch.setattr(cpu_native, other, never)
    layer = layer_of(
        name, 130, 352, activations=activations, input_transform=random_hadamard(32), output_transform=hadamard(2)
    )
    assert layer.explain().backend == "cpu_native"
    assert layer.explain().arithmetic.endswith("batch-invariant")
    assert_rows_alike(layer, torch.randn(150, 352).to(dtype), (*range(1, 18), 32, 63, 64, 65, 100))
    layer.batch_invariant = False
    with pytest.raises(AssertionError, match="other numbers of rows"):
        layer(torch.randn(150, 352).bfloat16())


def test_plain_torch_is_refused() -> None:
    with pytest.raises(BackendRefusal, match="needs 'any_torch' to run here; found that it adds in an order"):
        layer_of("nvfp4", 32, 64, backend="any_torch")
    layer = layer_of("nvfp4", 32, 64)
    arguments = list(layer._operands())
    x = torch.randn(3, 64).to(BF16)
    assert_same_bits(torch.ops.quarterturn.fp4_linear(x, *arguments), layer(x))
    with pytest.raises(BackendRefusal, match="batch_invariant needs one order"):
        torch.ops.quarterturn.fp4_linear(x, *["any_torch" if a == "cpu_native" else a for a in arguments])


def test_decoded_weights_are_refused() -> None:
    with pytest.raises(Refusal, match="weights 'auto' or 'packed' for batch_invariant; found 'decoded'"):
        layer_of("nvfp4", 32, 64, weights="decoded")
    layer = layer_of("nvfp4", 32, 64)
    layer.weights = "decoded"  # too late to be asked about: it is kept packed
    layer(torch.randn(3, 64).to(BF16))
    assert layer.values is None
    values = torch.zeros(32, 64, dtype=BF16)
    arguments = [values, None, *layer._operands()[2:]]
    with pytest.raises(BackendRefusal, match="needs packed weights; found values in torch"):
        torch.ops.quarterturn.fp4_linear(torch.randn(3, 64).to(BF16), *arguments)


def test_what_plain_torch_does_of_a_layer_is_refused() -> None:
    with pytest.raises(BackendRefusal, match="QuTLASS's MXFP4"):
        layer_of("mxfp4", 32, 64, recipe="qutlass")
    turn = matrix(product(12, 32))
    weight, how = weight_of(NVFP4, 32, turn.size), {"activations": "bf16", "batch_invariant": True}
    with pytest.raises(BackendRefusal, match="needs transforms that the kernels turn by") as caught:
        FP4Linear.from_tensor(weight, input_transform=turn, name="some.layer", **how)
    assert "layer some.layer" in str(caught.value)


# ---- on a GPU that there only seems to be

W4A4 = Problem(NVFP4, "fp4", BF16, 4096, 4096, 64, batch_invariant=True)


@pytest.mark.parametrize(("change", "capability", "reason"), [
    ({}, (9, 0), ""),
    ({}, (8, 0), ""),
    ({}, (12, 0), ""),
    ({}, (10, 0), "needs a GPU of capability 8.x, 9.0 or 12.x for batch_invariant, found 10.0"),
    ({"dtype": FP32}, (9, 0), "needs bfloat16, or float16 with NVFP4, for batch_invariant, found float32"),
    ({"dtype": FP16}, (9, 0), ""),
    ({"dtype": FP16, "format": MXFP4}, (9, 0), "needs bfloat16, or float16 with NVFP4"),
    ({"output_size": 64}, (9, 0), "needs no output transform for batch_invariant, found one of 64"),
    ({"input_size": 48}, (9, 0), "needs an input transform of 16, 32, 64, 128 for batch_invariant, found 48"),
    ({"input_size": None, "k": 4128}, (9, 0), ""),
    ({"input_size": 32, "k": 4128}, (9, 0), "needs inputs in a multiple of 64 behind transform 32"),
    ({"input_size": 128, "k": 4160}, (9, 0), "needs inputs in a multiple of 128 behind transform 128"),
    ({"input_size": 32, "k": 4128, "recipe": "token"}, (9, 0), ""),
    ({"input_size": 32, "k": 4128}, (8, 0), ""),
    ({"recipe": "qutlass", "format": MXFP4}, (9, 0), "QuTLASS's MXFP4"),
])  # fmt: skip
def test_what_gpus_can(change: dict, capability: tuple[int, int], reason: str, monkeypatch) -> None:
    monkeypatch.setattr(gpu_device, "triton_version", lambda: (3, 6))
    problem = Problem(**{**W4A4.__dict__, **change, "capability": capability})
    found = gpu_triton.varies(problem)
    assert (found == []) == (reason == "")
    assert reason in "; ".join(found)


def test_another_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_device, "triton_version", lambda: (3, 7))
    (reason,) = gpu_triton.varies(Problem(**{**W4A4.__dict__, "capability": (9, 0)}))
    assert reason.endswith("found 3.7")


def test_only_backends_that_can_are_chosen() -> None:
    with pytest.raises(BackendRefusal) as caught:
        select(W4A4, CUDA, capability=(10, 0))
    assert str(caught.value).count("batch_invariant needs one order") >= 4
    assert "needs a GPU of capability 8.x, 9.0 or 12.x" in str(caught.value)


@pytest.mark.parametrize(("k", "parts"), [(64, 1), (1000, 2), (2048, 4), (4096, 4), (8192, 4), (14336, 8), (28672, 8)])
def test_the_parts_of_k_are_the_same_for_every_number_of_rows_and_outputs(k: int, parts: int) -> None:
    rows, outputs = (*range(1, 400, 7), 1024, 4096, 9999), (16, 1024, 4096, 28672)
    for m, n, count in itertools.product(rows, outputs, (78, 114, 132, 144)):
        found = invariant_cut(m, n, k, count)
        assert found.split * found.inside == parts
        assert min(found.split, found.inside) == 1, "parts of parts would be added in another order"
        assert not found.natural
        programs = -(-n // found.rows) * -(-m // found.tokens) * found.split
        assert found.split == 1 or programs <= count * found.programs


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (12, 0), (12, 1)])
@pytest.mark.parametrize("k", [464, 1536, 4096, 8192, 14336])
def test_elsewhere_k_alone_decides_how_sixteen_rows_are_added(k: int, capability: tuple[int, int]) -> None:
    cuts = [cut_of(n, k, 16, count, capability) for n in (16, 1024, 4096, 6144, 28672) for count in (56, 108, 170)]
    assert len({(cut.num_warps, cut.split, cut.chunks) for cut in cuts}) == 1


@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_one_kernel_with_one_way_to_add(gpu: Gpu, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_triton, "varies", lambda problem: [])
    layer = layer_of("nvfp4", 130, K, activations=activations, backend="gpu_triton", input_transform=hadamard(16))
    assert layer.explain().weights == "packed, in fragments"
    cuts, many = [], gpu_product.many

    def seen(*arguments):
        cuts.append(arguments[-1])
        return many(*arguments)

    monkeypatch.setattr(gpu_product, "many", seen)
    for m in (1, 16, 17, 300):
        x = torch.randn(m, K).to(BF16)
        y = layer(x)
        layer.batch_invariant = False
        assert_same_bits(layer(x), y)  # stand-ins add in float64
        layer.batch_invariant = True
    assert gpu.products == ["many", "few"] * 2 + ["many", "many"] * 2
    assert all(
        one == invariant_cut(m, 130, K, 132) for m, one in zip((1, 16, 17, 300), (*cuts[:3], cuts[4]), strict=True)
    )


@pytest.mark.parametrize("scales", ["one", "rows"])
def test_other_gpus_take_sixteen_by_sixteen(gpu: Gpu, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_device, "capability", lambda device: (8, 0))
    monkeypatch.setattr(gpu_triton, "varies", lambda problem: [])
    how = {"recipe": "token"} if scales == "rows" else {}
    layer = layer_of("nvfp4", 464, K, backend="gpu_triton", bias=torch.randn(464).to(BF16), **how)
    plain = layer_of("nvfp4", 464, K, backend="gpu_triton", bias=layer.bias, batch_invariant=False, **how)
    asked, few = [], gpu_product.few

    def seen(*arguments, **options):
        asked.append((options["cut"], options["tokens8"]))
        few(*arguments, **options)

    x = torch.randn(41, K).to(BF16)
    want = plain(x)
    gpu.products.clear()
    monkeypatch.setattr(gpu_product, "few", seen)
    assert_same_bits(layer(x), want)
    assert gpu.products == ["few"] * 3
    layer(x[:1])
    assert len(set(asked)) == 1
    assert asked[0][1] == 2


def test_a_weight_without_fragments_is_refused(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_triton, "varies", lambda problem: [])
    layer = layer_of("nvfp4", 32, K, backend="gpu_triton")
    layer.block_scale.view(torch.uint8)[3, 1] = 0x98
    layer.refresh()
    with pytest.raises(BackendRefusal, match="needs a weight that can be kept in fragments; found a negative"):
        layer(torch.randn(3, K).to(BF16))


@every_kind
def test_siblings(gpu: Gpu, options, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for all, eagerly and compiled; but not with a layer that may add in another order."""
    monkeypatch.setattr(gpu_triton, "varies", lambda problem: [])
    together, alone = tied(batch_invariant=True, **options)
    with torch.no_grad():
        for m in (2, 40):
            x = x_of(m)
            gpu.products.clear()
            same(together(x), alone(x))
            assert gpu.products == ["many"] * (2 + 4)
        torch._dynamo.reset()
        calls, x = Calls(), x_of(2)
        same(torch.compile(together, fullgraph=True, backend=calls, dynamic=False)(x), alone(x))
        assert (calls.before, calls.after) == (4, 2)


def test_a_sibling_that_may_vary_is_multiplied_apart(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_triton, "varies", lambda problem: [])
    together, alone = tied()
    with torch.no_grad():
        for model in (together, alone):
            model.k.batch_invariant = True
        for _ in range(3):
            x = x_of(4)
            gpu.products.clear()
            same(together(x), alone(x))
            assert gpu.products.count("many") == 2, "k, in either model"
