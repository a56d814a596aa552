"""Whole layers by every vendor adapter, its package replaced by the recorded stand-in, against the reference.

The stand-ins check what they are handed and compute from its bytes, so a layer that comes out right was handed over
right. None of it says that the real kernels do the same: no Blackwell has run them.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from comparing import assert_refused, assert_same_bits, assert_within
from quarterturn import FP4Linear, Transform, hadamard, matrix, ops, random_hadamard, reference
from quarterturn.backends import blackwell_qutlass, vendor
from quarterturn.errors import BackendRefusal
from quarterturn.sharing import tie
from test_ops import signed_permutation
from vendor_door import ADAPTERS, every_case, layer_of, opened, wanted

TRANSFORMS = {
    "none": lambda: None,
    "random hadamard 16": lambda: random_hadamard(16, seed=1),
    "its transpose": lambda: dataclasses.replace(random_hadamard(16, seed=1), transpose=True),
    "hadamard 32": lambda: hadamard(32),
    "signed permutation 48": lambda: matrix(signed_permutation(48)),
    "dense 32": lambda: matrix(torch.randn(32, 32, generator=torch.Generator().manual_seed(3))),
}


def check(layer: FP4Linear, x: torch.Tensor, roundings: int, in_parts: tuple | None = None) -> None:
    y = layer(x)
    want, bound = wanted(layer, x, roundings, in_parts)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    assert_within(y, want, bound)


def roundings(name: str, fmt: str, layer: FP4Linear) -> int:
    """One, where nothing follows the product or the product is in fp32."""
    follows = layer.bias is not None or layer.output_transform is not None
    return 2 if follows and (ADAPTERS[name].roundings == 2 or fmt == "mxfp4") else 1


def normal(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m * 1000 + k)).to(dtype)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 96), (3, 40, 160), (7, 200, 64), (129, 136, 192)])
@pytest.mark.parametrize("transform", TRANSFORMS)
@every_case
def test_equals_the_reference(name: str, fmt: str, transform: str, m: int, n: int, k: int) -> None:
    made = TRANSFORMS[transform]()
    if made is not None and k % made.size:
        k = 96
    with opened(name):
        layer = layer_of(name, fmt, n, k, input_transform=made)
        check(layer, normal(m, k), 1)


@pytest.mark.usefixtures("poisoned_memory")
@every_case
def test_half_a_tile_of_scales(name: str, fmt: str) -> None:
    """K = 80 is 5 groups of NVFP4, 96 three of MXFP4: the scales' rows are padded, and the codes of both operands."""
    with opened(name):
        k = 80 if fmt == "nvfp4" else 96
        check(layer_of(name, fmt, 24, k, input_transform=hadamard(k // 5 if fmt == "nvfp4" else 32)), normal(3, k), 1)


@every_case
def test_bias_and_output_transform(name: str, fmt: str) -> None:
    with opened(name):
        for out in (None, random_hadamard(16, seed=2)):
            layer = layer_of(name, fmt, 48, 96, bias=True, input_transform=hadamard(16), output_transform=out)
            check(layer, normal(5, 96), roundings(name, fmt, layer))


@every_case
def test_fused_q_k_v_keep_a_scale_each(name: str, fmt: str) -> None:
    with opened(name):
        for bias in (False, True):
            layer = layer_of(name, fmt, 104, 96, bias=bias, sizes=(48, 24, 32))
            assert len(layer.output_sizes) == 3
            check(layer, normal(5, 96), roundings(name, fmt, layer))


@pytest.mark.parametrize("name", [name for name, adapter in ADAPTERS.items() if adapter.fp16] + ["cublas"])
def test_fp16(name: str) -> None:
    with opened(name):
        check(layer_of(name, "nvfp4", 48, 96, input_transform=hadamard(16)), normal(5, 96, torch.float16), 1)


@pytest.mark.parametrize("recipe", ["checkpoint", "token", "qutlass"])
def test_cublas_takes_fp32_and_every_recipe(recipe: str) -> None:
    with opened("cublas"):
        for bias in (False, True):
            layer = layer_of("cublas", "nvfp4", 48, 96, bias=bias, recipe=recipe, input_transform=hadamard(16))
            check(layer, normal(5, 96, torch.float32), 1)


@every_case
def test_an_empty_batch_launches_nothing(name: str, fmt: str) -> None:
    with opened(name) as stand_in:
        y = layer_of(name, fmt, 40, 96, bias=True, input_transform=hadamard(32))(normal(0, 96).view(2, 0, 96))
        assert y.shape == (2, 0, 40)
        assert not getattr(stand_in, "calls", [])


@every_case
def test_strided_and_unaligned_inputs_equal_others(name: str, fmt: str) -> None:
    with opened(name):
        layer, big = layer_of(name, fmt, 48, 96, input_transform=hadamard(32)), normal(10, 192)
        odd = torch.empty(481, dtype=torch.bfloat16)[1:].view(5, 96).copy_(big[:5, :96])  # at an odd address
        for x in (big[:, :96], big[::2, 96:], normal(96, 10).T, odd):
            assert_same_bits(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


@every_case
def test_a_rows_bits_do_not_depend_on_the_batch(name: str, fmt: str) -> None:
    with opened(name):
        layer, x = layer_of(name, fmt, 48, 96, input_transform=hadamard(32)), normal(130, 96)
        assert_same_bits(layer(x)[129:], layer(x[129:]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@every_case
def test_a_row_that_is_not_finite_is_nan(name: str, fmt: str, bad: float) -> None:
    with opened(name):
        layer, x = layer_of(name, fmt, 48, 96, input_transform=hadamard(32)), normal(4, 96)
        clean = layer(x)
        x[2, 70] = bad
        y = layer(x)
        assert y[2].isnan().all()
        assert_same_bits(y[[0, 1, 3]], clean[[0, 1, 3]])


@every_case
def test_weights_are_prepared_once_and_left_alone(name: str, fmt: str) -> None:
    with opened(name):
        layer, x = layer_of(name, fmt, 40, 96), normal(3, 96)
        before = [t.clone() for t in (layer.codes, layer.block_scale.view(torch.uint8), x)]
        layer(x)
        plan = layer.current_plan(torch.bfloat16)
        assert plan is not None
        made = plan.layer.kept[ADAPTERS[name].name]
        layer(x)
        assert plan.layer.kept[ADAPTERS[name].name] is made
        for kept, now in zip(before, (layer.codes, layer.block_scale.view(torch.uint8), x), strict=True):
            assert_same_bits(now, kept)


@pytest.mark.parametrize("name", ["cublas", "qutlass dense", "flashinfer trtllm"])
def test_the_operator_prepares_weights_once_and_again_when_they_change(name: str) -> None:
    """A compiled model calls the operator, which knows nothing but tensors."""
    with opened(name), pytest.MonkeyPatch.context() as patch:
        calls, original = [], vendor.parts_of

        def counted(*args, **options):
            calls.append(args)
            return original(*args, **options)

        patch.setattr(vendor, "parts_of", counted)
        layer, x = layer_of(name, "nvfp4", 200, 192, input_transform=hadamard(16)).refresh(), normal(3, 192)
        run = torch.ops.quarterturn.fp4_linear
        first = run(x, *layer._operands())
        assert_same_bits(run(x, *layer._operands()), first)
        assert len(calls) == 1
        layer.block_scale.view(torch.uint8).sub_(8)  # a power of two less
        assert_same_bits(run(x, *layer._operands()), first / 2)
        assert len(calls) == 2
        layer.codes.bitwise_xor_(0x88)  # every sign
        assert_same_bits(run(x, *layer._operands()), first / -2)
        layer.block_scale = (layer.block_scale.view(torch.uint8) + 8).view(layer.block_scale.dtype)
        assert_same_bits(run(x, *layer._operands()), -first)
        layer.block_scale = (layer.block_scale.view(torch.uint8) - 8).view(layer.block_scale.dtype)  # as new as it was
        assert_same_bits(run(x, *layer._operands()), first / -2)


@pytest.mark.parametrize("name", ["cublas", "qutlass 128x4", "flashinfer", "flashinfer trtllm"])
def test_siblings_quantize_their_input_once(name: str) -> None:
    """q, k and v of one x: the operand is made once, each multiplies its own weights."""
    with opened(name) as stand_in:
        turn, x = random_hadamard(32, seed=6), normal(70, 96)
        model = nn.ModuleDict({part: layer_of(name, "nvfp4", n, 96, input_transform=turn)
                               for part, n in (("q", 48), ("k", 24), ("v", 40))})  # fmt: skip
        alone = [layer(x) for layer in model.values()]
        tie(model, FP4Linear)
        if stand_in is not None:
            stand_in.calls.clear()
        with torch.no_grad():
            for layer, want in zip(model.values(), alone, strict=True):
                assert_same_bits(layer(x), want)
        if name.startswith("qutlass"):
            assert stand_in.calls == ["fusedQuantizeNv", *["matmul nvfp4"] * 3]


@every_case
def test_explain_names_it(name: str, fmt: str) -> None:
    with opened(name):
        assert layer_of(name, fmt, 40, 96).explain().backend == ADAPTERS[name].name


@pytest.mark.parametrize("name", ["qutlass dense", "qutlass 128x4"])
@pytest.mark.parametrize("recipe", ["checkpoint", "qutlass"])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_qutlass_fuses_nvfp4(name: str, recipe: str, size: int) -> None:
    """Both the calibrated scale of the file and QuTLASS's constant, +-1 matrices in either direction, one kernel."""
    for transpose in (False, True):
        turn = dataclasses.replace(random_hadamard(size, seed=4), transpose=transpose)
        with opened(name) as stand_in:
            layer = layer_of(name, "nvfp4", 48, 3 * size, recipe=recipe, bias=True, input_transform=turn)
            check(layer, normal(5, 3 * size), 2)
            assert stand_in.calls == ["fusedQuantizeNv", "matmul nvfp4"]


@pytest.mark.parametrize("name", ["qutlass dense", "qutlass 128x4"])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_qutlass_fuses_mxfp4_with_its_recipe(name: str, size: int) -> None:
    """Codes of 3z/s, undone in alpha. Its matrix, factor and all, is in bf16."""
    turn = random_hadamard(size, seed=4)
    held = turn.activation_matrix().float().bfloat16().float()
    with opened(name) as stand_in:
        layer = layer_of(name, "mxfp4", 48, 3 * size, recipe="qutlass", input_transform=turn)
        check(layer, normal(5, 3 * size), 1, (held, 1.0, False))
        assert stand_in.calls == ["fusedQuantizeMx", "matmul mxfp4"]


@pytest.mark.parametrize("name", ["qutlass dense", "qutlass 128x4"])
def test_qutlass_leaves_to_us_what_its_quantizers_would_round(name: str) -> None:
    cases: list[tuple[str, Transform | None, str]] = [
        ("nvfp4", None, "checkpoint"),
        ("nvfp4", TRANSFORMS["signed permutation 48"](), "checkpoint"),
        ("nvfp4", TRANSFORMS["dense 32"](), "checkpoint"),
        ("mxfp4", hadamard(32), "checkpoint"),
    ]
    for fmt, turn, recipe in cases:
        with opened(name) as stand_in:
            check(layer_of(name, fmt, 48, 96, recipe=recipe, input_transform=turn), normal(5, 96), 1)
            assert stand_in.calls == [f"matmul {fmt}"]


@every_case
def test_groups_of_zeros(name: str, fmt: str) -> None:
    for recipe in ("checkpoint", "qutlass"):
        if recipe == "qutlass" and (name, fmt) == ("cublas", "mxfp4"):
            continue  # refused
        with opened(name):
            layer, x = layer_of(name, fmt, 48, 192, recipe=recipe, input_transform=hadamard(64)), normal(3, 192)
            x[1], x[2, 64:128] = 0, 0
            y = layer(x)
            assert not y[1].any()
            check(layer, x, 1)


@pytest.mark.parametrize("layout", ["linear", "blocked"])
@pytest.mark.parametrize(("fmt", "recipe"), [("nvfp4", "checkpoint"), ("nvfp4", "qutlass"), ("mxfp4", "qutlass")])
@pytest.mark.parametrize("name", ["qutlass dense", "qutlass 128x4"])
def test_the_op_gives_what_the_reference_gives(name: str, fmt: str, recipe: str, layout: str) -> None:
    with opened(name):
        x, turn, encode = normal(5, 192), hadamard(64), 40.0 if recipe == "checkpoint" else None
        codes, scale, tensor_scale = ops.rotate_quantize(
            x, turn.matrix.float(), turn.factor, format=fmt, encode_scale=encode, recipe=recipe, scale_layout=layout,
            backend=ADAPTERS[name].name,
        )  # fmt: skip
        want = reference.rotate_quantize(
            x, turn.matrix, turn.factor, format=fmt, encode_scale=encode, recipe=recipe
        )  # fmt: skip
        assert_same_bits(codes, want[0])
        stored = want[1] if layout == "linear" else reference.swizzle(want[1])
        assert_same_bits(scale.view(torch.uint8).reshape(stored.shape), stored)
        assert_same_bits(tensor_scale, want[2])


@pytest.mark.parametrize("name", ["cublas", "qutlass dense", "flashinfer"])
def test_nothing_is_kept_while_a_graph_is_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lie in the graph's memory; nor can a matrix be looked at then, which QuTLASS's quantizer asks for."""
    with opened(name) as stand_in:
        layer, x = layer_of(name, "nvfp4", 48, 96, input_transform=hadamard(32)).refresh(), normal(3, 96)
        plan = layer.current_plan(torch.bfloat16)
        assert plan is not None
        for module in (vendor, blackwell_qutlass):
            monkeypatch.setattr(module, "is_capturing", lambda tensor: True)
        check(layer, x, 1)
        assert ADAPTERS[name].name not in plan.layer.kept
        assert not vendor._KEPT.of(plan.layer.weight.data)
        assert "fusedQuantizeNv" not in getattr(stand_in, "calls", [])


@pytest.mark.parametrize("options", [{"recipe": "token"}, {"encode_scale": 40.0, "dtype": torch.float16}])
def test_what_the_fused_quantizer_does_not_take_is_quantized_by_us(options: dict) -> None:
    """The op by itself, which no layer was asked for: a tensor scale for each row, and fp16."""
    options = {**options}
    dtype = options.pop("dtype", torch.bfloat16)
    x, turn = normal(5, 192, dtype), hadamard(64)
    with opened("qutlass dense") as stand_in:
        codes, scale, tensor_scale = ops.rotate_quantize(
            x, turn.matrix.float(), turn.factor, format="nvfp4", backend=ADAPTERS["qutlass dense"].name, **options
        )
        assert not stand_in.calls
    want = reference.rotate_quantize(x, turn.matrix, turn.factor, format="nvfp4", **options)
    for got, wants in zip((codes, scale.view(torch.uint8), tensor_scale), want, strict=True):
        assert_same_bits(got, wants)


def test_one_matrix_in_both_directions_with_two_factors_and_formats() -> None:
    """What is kept beside a matrix is kept for each of them."""
    x, held = normal(5, 192), random_hadamard(32, seed=4).matrix.float()
    cases = [{"format": "nvfp4", "encode_scale": 40.0}, {"format": "mxfp4", "recipe": "qutlass"}]
    for options, transpose, factor in itertools.product(cases, (False, True), (0.25, 0.5)):
        with opened("qutlass dense") as stand_in:
            codes, scale, _ = ops.rotate_quantize(
                x, held, factor, transpose, backend=ADAPTERS["qutlass dense"].name, **options
            )
            assert len(stand_in.calls) == 1
        want = reference.rotate_quantize(x, held, factor, transpose, **options)
        assert_same_bits(codes, want[0])
        assert_same_bits(scale.view(torch.uint8), want[1])


@pytest.mark.parametrize(("fmt", "recipe"), [("nvfp4", "checkpoint"), ("mxfp4", "qutlass")])
def test_a_negative_factor_turns_the_signs(fmt: str, recipe: str) -> None:
    """The global scale cannot hold its sign: it goes into the matrix."""
    x, turn, encode = normal(5, 192), hadamard(64), 40.0 if recipe == "checkpoint" else None
    options = {"format": fmt, "encode_scale": encode, "recipe": recipe}
    with opened("qutlass dense") as stand_in:
        codes, scale, _ = ops.rotate_quantize(
            x, turn.matrix.float(), -turn.factor, backend=ADAPTERS["qutlass dense"].name, **options
        )
        assert len(stand_in.calls) == 1
    want = reference.rotate_quantize(x, turn.matrix, -turn.factor, **options)
    assert_same_bits(codes, want[0])
    assert_same_bits(scale.view(torch.uint8), want[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("fmt", "recipe"), [("nvfp4", "checkpoint"), ("nvfp4", "qutlass"), ("mxfp4", "qutlass")])
@pytest.mark.parametrize("name", ["qutlass dense", "qutlass 128x4"])
def test_the_fused_quantizer_marks_what_is_not_finite(name: str, fmt: str, recipe: str, bad: float) -> None:
    """The NaN scale and codes 0 in every group of the block, and in no other."""
    with opened(name):
        x, turn, encode = normal(3, 192), hadamard(64), 40.0 if recipe == "checkpoint" else None
        x[1, 70] = bad
        codes, scale, _ = ops.rotate_quantize(
            x, turn.matrix.float(), turn.factor, format=fmt, encode_scale=encode, recipe=recipe,
            backend=ADAPTERS[name].name,
        )  # fmt: skip
        want = reference.rotate_quantize(
            x, turn.matrix, turn.factor, format=fmt, encode_scale=encode, recipe=recipe
        )  # fmt: skip
        assert not want[0][1, 32:64].any()
        assert_same_bits(codes, want[0])
        assert_same_bits(scale.view(torch.uint8), want[1])


@every_case
def test_the_bare_product(name: str, fmt: str) -> None:
    with opened(name):
        layer = layer_of(name, fmt, 40, 96)
        w, x = layer.weight_tensor(), normal(5, 96)
        encode = torch.tensor([150.0]) if fmt == "nvfp4" else None
        codes, scale, tensor_scale = ops.rotate_quantize(x, format=fmt, encode_scale=encode, backend="any_torch")
        y = ops.fp4_matmul(
            codes, tensor_scale, weight=w, x_block_scale=scale, out_dtype=torch.bfloat16,
            backend=ADAPTERS[name].name,
        )  # fmt: skip
        want, bound = wanted(layer, x, 1)
        assert_within(y, want, bound)
        assert_refused(
            lambda: ops.fp4_matmul(x, weight=w, backend=ADAPTERS[name].name),
            "packed codes", "'auto'", kind=BackendRefusal,
        )  # fmt: skip


@every_case
def test_compiled_equals_eager(name: str, fmt: str) -> None:
    with opened(name):
        layer = layer_of(name, fmt, 48, 96, bias=True, input_transform=hadamard(32))
        layer.refresh()
        torch._dynamo.reset()  # each adapter is another program, of which torch makes so many and no more
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for m in (3, 5):
            assert_same_bits(compiled(normal(m, 96)), layer(normal(m, 96)))


def test_the_operators_pass_opcheck() -> None:
    """Schemas, aliasing and fakes, the mutation of FlashInfer's `out` among them."""
    vendor = torch.ops.quarterturn_vendor
    a, b = torch.randint(0, 256, (3, 64), dtype=torch.uint8), torch.randint(0, 256, (32, 64), dtype=torch.uint8)
    scale = torch.zeros(128, 8, dtype=torch.uint8)
    scale[:3] = 0
    for name in ("qutlass dense", "qutlass 128x4"):
        with opened(name):
            matrix = hadamard(32).matrix.bfloat16()
            torch.library.opcheck(vendor.qutlass_quantize, (normal(3, 96), matrix, torch.tensor([6.0])))
            torch.library.opcheck(vendor.qutlass_quantize, (normal(3, 96), matrix, None))
            torch.library.opcheck(vendor.qutlass_matmul, (a, b, scale, scale, torch.ones(1), "nvfp4"))
    with opened("flashinfer"):
        out = torch.empty(3, 32, dtype=torch.bfloat16)
        torch.library.opcheck(vendor.flashinfer_matmul, (a, b, scale, scale, torch.ones(1), out, "nvfp4", "auto"))


def test_what_is_expected_is_not_zero() -> None:
    """Or a product of nothing would pass."""
    want, bound = wanted(_plain(), normal(5, 96), 1)
    assert np.abs(want).mean() > 20 * bound.mean()


def _plain() -> FP4Linear:
    with opened("cublas"):
        return layer_of("cublas", "nvfp4", 48, 96)
