"""FP4Linear against the reference: arithmetic, transforms, bias, ranges; and that it behaves as a module should.

The inputs are small integers behind Hadamards of 16 or 64 (whose factor is a power of two) or signed permutations, so
the codes are the reference's codes and only the sum is left to bound: K + 3 roundings to fp32 per product, and in bf16
the one rounding of the accumulator that the definition allows a CPU library.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import by_hand
from comparing import (
    BF16_UNIT,
    FP32_UNIT,
    HERE,
    assert_refused,
    assert_same_bits,
    assert_within,
    rotation_bound,
    rounded,
)
from quarterturn import NVFP4, FP4Linear, FP4Tensor, Transform, hadamard, matrix, ops, random_hadamard, reference
from test_ops import DTYPES, FORMATS, every_backend, signed_permutation

TRANSFORMS = {
    "none": lambda: None,
    "random hadamard": lambda: random_hadamard(16, seed=1),
    "its transpose": lambda: dataclasses.replace(random_hadamard(16, seed=1), transpose=True),
    "signed permutation": lambda: matrix(signed_permutation(48)),
}


def quantized(name: str, values: torch.Tensor, sizes: tuple[int, ...] = ()) -> FP4Tensor:
    """Round to nearest, one encode scale a range, by hand."""
    sizes = sizes or (values.shape[0],)
    encodes, parts = [], []
    for part in values.split(sizes):
        encodes.append(float(np.float32(2688) / part.abs().max().numpy()) if name == "nvfp4" else 1.0)
        parts.append(by_hand.quantize(part.numpy(), name, encodes[-1]))
    codes = torch.from_numpy(by_hand.pack(np.concatenate([codes for codes, _ in parts])))
    scale = torch.from_numpy(np.concatenate([scale for _, scale in parts])).view(FORMATS[name].scale_dtype)
    encode = torch.tensor(encodes)
    return FP4Tensor(codes, scale, 1 / encode, encode if name == "nvfp4" else None, FORMATS[name], sizes)


def make(
    fmt: str, activations: str = "fp4", n: int = 48, k: int = 96, *, bias: bool = True, sizes=(), std=0.05, **options
):
    """A layer with random weights; fp32 unless dtype says otherwise."""
    dtype = options.pop("dtype", torch.float32)
    weight = quantized(fmt, torch.randn(n, k) * std, sizes)
    encode = torch.tensor([100.0]) if fmt == "nvfp4" and activations == "fp4" and "recipe" not in options else None
    return FP4Linear.from_tensor(
        weight,
        bias=torch.randn(n).to(dtype) if bias else None,
        input_encode_scale=encode,
        activations=activations,
        **options,
    )


def parts(transform: Transform | None):
    return None if transform is None else (transform.matrix, transform.factor, transform.transpose)


def expected(
    layer: FP4Linear, x: torch.Tensor, activations: str, in_t: Transform | None = None, out_t: Transform | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """y by the reference in float64 and how far fp32 sums (and bf16 accumulators, for bf16 x) may be from it."""
    w = layer.weight_tensor()
    bias = None if layer.bias is None else layer.bias.detach()
    rows = x.reshape(-1, x.shape[-1])
    encode = getattr(layer, "input_encode_scale", None)
    turn = parts(in_t) or (None, 1.0, False)

    def run(b: torch.Tensor | None, out: Transform | None) -> np.ndarray:
        y = reference.linear(
            rows, w.codes, w.block_scale.view(torch.uint8), w.tensor_scale, w.output_sizes,
            format=w.format, activations=activations, encode_scale=encode, bias=b,
            input_transform=parts(in_t), output_transform=parts(out),
        )  # fmt: skip
        return y.double().numpy()

    if activations == "fp4":
        a = reference.dequantize(
            *reference.rotate_quantize(rows, *turn, format=w.format, encode_scale=encode), w.format
        )
    else:
        a = rows.double() if in_t is None else reference.rotate(rows, *turn)
    scaled, want = run(None, None), run(bias, None)
    bound = (x.shape[-1] + 3) * FP32_UNIT * (a.abs().numpy() @ w.dequantize().double().abs().numpy().T)
    bound += FP32_UNIT * np.abs(want) + (BF16_UNIT * np.abs(scaled) if x.dtype == torch.bfloat16 else 0)
    if out_t is not None:
        side = out_t.activation_matrix().numpy()
        bound = by_hand.rotate(bound, np.abs(side)) + rotation_bound(want, side)
        want = run(bias, out_t)
    shape = (*x.shape[:-1], want.shape[-1])
    return want.reshape(shape), rounded(want, bound, x.dtype).reshape(shape)


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-8, 9, shape).to(dtype)


@every_backend
def test_a_layer_by_hand(backend: str) -> None:
    """N = 2, K = 16; the weights are 1 and 2 with block scales 1.5 and .25 and tensor scales 1/2 and 1/4."""
    codes = torch.tensor([[0x22] * 8, [0x44] * 8], dtype=torch.uint8)
    scale = torch.tensor([[0x3C], [0x28]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    encode = torch.tensor([2.0, 4.0])
    weight = FP4Tensor(codes, scale, 1 / encode, encode, NVFP4, (1, 1))
    layer = FP4Linear.from_tensor(
        weight, bias=torch.tensor([10.0, -1.0]), input_encode_scale=torch.tensor([1.0]), backend=backend
    )
    x = torch.tensor([[7.0] + [0.0] * 15])  # 7 decodes to 6.75
    assert layer(x).tolist() == [[6.75 * 1.5 / 2 + 10, 6.75 * 2 * 0.25 / 4 - 1]]
    layer = FP4Linear.from_tensor(weight, activations="bf16", backend=backend)
    assert layer(x).tolist() == [[7 * 1.5 / 2, 7 * 2 * 0.25 / 4]]


@every_backend
@pytest.mark.parametrize("out_t", TRANSFORMS, ids=lambda t: f"out {t}")
@pytest.mark.parametrize("in_t", TRANSFORMS, ids=lambda t: f"in {t}")
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
@pytest.mark.parametrize(
    ("name", "dtype"),  # MXFP4 in fp16 may be refused: test_mxfp4_in_fp16
    [(name, dtype) for name in ("nvfp4", "mxfp4") for dtype in DTYPES if (name, dtype) != ("mxfp4", torch.float16)],
)
def test_equals_the_reference(name: str, activations: str, dtype, in_t: str, out_t: str, backend: str) -> None:
    first, second = TRANSFORMS[in_t](), TRANSFORMS[out_t]()
    layer = make(name, activations, input_transform=first, output_transform=second, backend=backend, dtype=dtype)
    x = integers(9, 96, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert_within(y, *expected(layer, x, activations, first, second), "y")


@every_backend
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
@pytest.mark.parametrize("size", [32, 48, 96])
def test_any_matrix_equals_the_ops_it_is_made_of(size: int, activations: str, backend: str) -> None:
    """Behind a matrix that is not exact a code may sit at a tie, so the layer is held to its own rotate_quantize."""
    t = Transform(torch.randn(size, size, dtype=torch.float64) / size**0.5, 1.0, True)
    layer = make("nvfp4", activations, input_transform=t, backend=backend, bias=False)
    x, m = torch.randn(9, 96), t.matrix.float()
    if activations == "fp4":
        codes, scale, tensor_scale = ops.rotate_quantize(
            x, m, 1.0, True, format=NVFP4, encode_scale=torch.tensor([100.0]), backend=backend
        )
        a = by_hand.values(codes.numpy(), by_hand.numpy(scale), "nvfp4") * float(tensor_scale)
    else:
        a = ops.rotate(x, m, 1.0, True, backend=backend).double().numpy()
    w = layer.weight_tensor().dequantize().double().numpy()
    assert_within(layer(x), a @ w.T, (96 + 4) * FP32_UNIT * (np.abs(a) @ np.abs(w).T) + 1e-30)


@every_backend
def test_a_random_matrix_cancels_end_to_end(backend: str) -> None:
    """x V (W V^-T)^T = x W^T up to the rounding of the weight, for a matrix that is not orthogonal."""
    t = matrix(torch.randn(32, 32, dtype=torch.float64) / 6 + torch.eye(32, dtype=torch.float64))
    w, x = torch.randn(48, 96), torch.randn(64, 96)
    folded = t.fold_input_weight(w).float()
    layer = FP4Linear.from_tensor(quantized("nvfp4", folded), activations="bf16", input_transform=t, backend=backend)
    error = (layer(x) - x @ w.T).square().mean() / (x @ w.T).square().mean()
    lost = (layer.weight_tensor().dequantize() - folded).square().mean() / folded.square().mean()
    assert lost < 0.02, "round to nearest of Gaussian-like weights loses about 1%"
    condition = float(torch.linalg.cond(t.matrix))
    assert error < lost * condition**2, "no more than the rounding of the weight, carried through V"


@every_backend
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bias_comes_once_and_is_turned(dtype, activations: str, backend: str) -> None:
    x = torch.zeros(3, 96, dtype=dtype)
    layer = make("nvfp4", activations, backend=backend, dtype=dtype)
    assert_same_bits(layer(x), layer.bias.detach().expand(3, 48).contiguous(), "y of x = 0")
    t = random_hadamard(16, seed=2)
    layer = make("nvfp4", activations, output_transform=t, backend=backend, dtype=dtype)
    bias = by_hand.numpy(layer.bias)[None].repeat(3, 0)
    want = by_hand.rotate(bias, t.activation_matrix().numpy())
    bound = rotation_bound(bias, t.activation_matrix().numpy())
    assert_within(layer(x), want, rounded(want, bound, dtype))


@every_backend
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_every_number_of_dimensions_and_none(activations: str, backend: str) -> None:
    t = random_hadamard(16)
    layer = make("nvfp4", activations, input_transform=t, output_transform=t, backend=backend)
    x = integers(2, 3, 4, 96)
    want = expected(layer, x, activations, t, t)
    for pick in [(), (0,), (0, 0), (0, 0, 0)]:
        assert_within(layer(x[pick]), want[0][pick], want[1][pick], f"{4 - len(pick)} dimensions")
    for shape in [(0, 96), (2, 0, 96)]:
        assert tuple(layer(torch.zeros(shape)).shape) == (*shape[:-1], 48)
    big = integers(12, 200)
    for view in (big[:, :96], big[::2, 100:196], integers(96, 5).t()):
        kept = view.clone()
        assert_same_bits(layer(view), layer(view.contiguous().clone()), "strided input")
        assert_same_bits(view.contiguous(), kept.contiguous(), "x after the call")


@every_backend
@pytest.mark.parametrize("output", [False, True], ids=["", "output transform"])
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_fused_q_k_v_keep_a_scale_each(activations: str, output: bool, backend: str) -> None:
    """std .02, .2 and 2 with bias: each range equals the layer that holds it alone."""
    t, u = random_hadamard(16), random_hadamard(16, seed=9) if output else None
    values = torch.randn(64, 96) * torch.tensor([0.02, 0.2, 2.0]).repeat_interleave(torch.tensor([32, 16, 16]))[:, None]
    fused, bias, encode, x = (
        quantized("nvfp4", values, (32, 16, 16)),
        torch.randn(64),
        torch.tensor([50.0]),
        integers(7, 96),
    )
    options = {
        "input_encode_scale": encode,
        "activations": activations,
        "input_transform": t,
        "output_transform": u,
        "backend": backend,
    }
    layer = FP4Linear.from_tensor(fused, bias=bias, **options)
    want, bound = expected(layer, x, activations, t, u)
    y = layer(x)
    assert_within(y, want, bound)
    assert len(set(fused.encode_scale.tolist())) == 3
    for rows in (slice(0, 32), slice(32, 48), slice(48, 64)):
        alone = FP4Linear.from_tensor(quantized("nvfp4", values[rows]), bias=bias[rows], **options)
        assert_within(alone(x), want[:, rows], bound[:, rows], f"rows {rows}")


@every_backend
@pytest.mark.parametrize("recipe", ["token", "qutlass"])
def test_recipes_without_a_stored_scale(recipe: str, backend: str) -> None:
    layer = make("nvfp4", recipe=recipe, backend=backend, bias=False)
    x = integers(5, 96) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 2.0])[:, None]
    codes, scale, tensor_scale = reference.rotate_quantize(x, None, format=NVFP4, recipe=recipe)
    a = by_hand.values(codes.numpy(), by_hand.numpy(scale), "nvfp4") * tensor_scale.double().numpy().reshape(-1, 1)
    w = layer.weight_tensor().dequantize().double().numpy()
    assert_within(layer(x), a @ w.T, 100 * FP32_UNIT * (np.abs(a) @ np.abs(w).T) + 1e-30)


@every_backend
def test_a_row_with_nan_is_nan_and_alone(backend: str) -> None:
    layer = make("nvfp4", input_transform=hadamard(16), backend=backend)
    x = integers(4, 96)
    clean = layer(x)
    x[2, 5] = float("nan")
    y = layer(x)
    assert torch.isnan(y[2]).all()
    assert_same_bits(y[[0, 1, 3]], clean[[0, 1, 3]], "the other rows")


@every_backend
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_mxfp4_in_fp16(activations: str, backend: str) -> None:
    x = integers(4, 96).half()
    layer = make("mxfp4", activations, backend=backend, dtype=torch.float16)
    assert_within(layer(x), *expected(layer, x, activations))


@every_backend
@pytest.mark.parametrize("weights", ["packed", "decoded"])
def test_packed_and_decoded_weights_are_the_same_layer(weights: str, backend: str) -> None:
    torch.manual_seed(3)
    layer = make("nvfp4", weights=weights, backend=backend, dtype=torch.bfloat16)
    x = integers(9, 96, dtype=torch.bfloat16)
    assert_within(layer(x), *expected(layer, x, "fp4"))


# ---- what it says and refuses


@pytest.mark.parametrize(("activations", "word"), [("fp4", "W4A4"), ("bf16", "W4A16")])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_explain_says_what_runs(name: str, activations: str, word: str) -> None:
    told = make(name, activations, name="model.layers.0.q_proj").explain()
    told = told if isinstance(told, dict) else dataclasses.asdict(told)
    assert told["backend"] in HERE
    assert told["layer"] == "model.layers.0.q_proj"
    assert told["reason"]
    assert word in told["arithmetic"]
    assert name in told["arithmetic"]
    for backend in HERE:
        assert dataclasses.asdict(make(name, activations, backend=backend).explain())["backend"] == backend


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "int4"}, ["int4"]),
        ({"format": "mxfp4", "in_features": 80}, ["80", "32"]),
        ({"activations": "int8"}, ["int8", "fp4", "bf16"]),
        ({"input_transform": hadamard(128)}, ["128", "96"]),
        ({"output_transform": hadamard(32)}, ["32", "48"]),
        ({"output_sizes": (32, 8)}, ["48", "32, 8"]),
        ({"rule": "up", "format": "mxfp4"}, ["up", "rceil"]),
        ({"recipe": "best"}, ["best", "token"]),
        ({"backend": "warp_drive"}, ["warp_drive"]),
        ({"weights": "zipped"}, ["zipped", "packed", "decoded"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_sizes_and_names_that_do_not_fit_are_refused(options: dict, words: list[str]) -> None:
    options = {"in_features": 96, "out_features": 48, "format": "nvfp4"} | options
    text = assert_refused(lambda: FP4Linear(**options, name="blk.7.up").explain(), *words)
    assert "blk.7.up" in text or "format" in text, f"does not name the layer: {text}"


def test_a_missing_input_scale_is_refused_by_name() -> None:
    weight = quantized("nvfp4", torch.randn(48, 96))
    assert_refused(lambda: FP4Linear.from_tensor(weight, name="blk.7.up")(torch.randn(2, 96)), "input", "scale")


def test_an_input_of_another_width_is_refused() -> None:
    layer = make("nvfp4")
    assert_refused(lambda: layer(torch.randn(2, 48)), "48")
