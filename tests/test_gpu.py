"""On an NVIDIA GPU: the same bits as the specification, `torch.compile`, CUDA graphs, and whole models."""

from __future__ import annotations

import pytest
import torch

import quarterturn as qt
from quarterturn import ops, reference
from tiny_models import tiny_model, tokens

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def hard_rows(dtype: torch.dtype, k: int = 192) -> torch.Tensor:
    """Ordinary rows and the ones that go wrong: zeros, NaN, Inf, tiny, huge."""
    x = torch.randn(37, k) * 3
    x[3], x[4, 5], x[5, 3], x[6], x[7] = 0, float("nan"), float("inf"), x[6] * 1e4, x[7] * 1e-6
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize(
    ("format", "recipe", "rule"),
    [("nvfp4", r, "even") for r in ("checkpoint", "token", "qutlass")]
    + [("mxfp4", "checkpoint", r) for r in ("even", "floor", "ceil", "rceil")],
)
def test_any_torch_gives_the_bits_of_the_specification(dtype, size, format, recipe, rule):
    x, turn = hard_rows(dtype), qt.random_hadamard(size)
    options = {"format": format, "encode_scale": 77.0, "recipe": recipe, "rule": rule}
    codes, scale, tensor_scale = ops.rotate_quantize(
        x.cuda(), turn.operand(torch.device("cuda")), turn.factor, True, backend="any_torch", **options
    )
    expected = reference.rotate_quantize(x, turn.matrix, turn.factor, True, **options)
    assert torch.equal(scale.view(torch.uint8).cpu(), expected[1])
    assert torch.equal(codes.cpu(), expected[0])
    assert torch.equal(tensor_scale.cpu(), expected[2])


def layer(format: str, activations: str = "fp4", ranges: tuple[int, ...] = (48, 16)) -> qt.FP4Linear:
    n, k = sum(ranges), 192
    fmt = qt.NVFP4 if format == "nvfp4" else qt.MXFP4
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    if format == "nvfp4":
        scale, encode = (
            torch.rand(n, k // 16).add(0.1).to(torch.float8_e4m3fn),
            torch.tensor([300.0, 7.0])[: len(ranges)],
        )
    else:
        scale, encode = torch.randint(120, 130, (n, k // 32), dtype=torch.uint8), None
    weight = qt.FP4Tensor.from_encode(codes, scale, encode, fmt, ranges)
    return qt.FP4Linear.from_tensor(
        weight, bias=torch.randn(n), input_encode_scale=77.0, activations=activations, input_transform=qt.hadamard(64)
    )


def expected(linear: qt.FP4Linear, x: torch.Tensor) -> torch.Tensor:
    w, turn = linear.weight_tensor(), linear.input_transform
    return reference.linear(
        x, w.codes, w.block_scale.view(torch.uint8), w.tensor_scale, linear.output_sizes, format=linear.format,
        activations=linear.activations, encode_scale=77.0, bias=linear.bias,
        input_transform=(turn.matrix, turn.factor, turn.transpose),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ["fp4", "bf16"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_layer_is_exact_but_for_the_order_of_the_sum_and_one_rounding(format, activations, dtype):
    linear, x = layer(format, activations), torch.randn(21, 192).to(dtype)
    want = expected(linear, x)
    got = linear.cuda()(x.cuda()).cpu().double()
    # fp32 sums of 192 terms, then one rounding to dtype: half an ulp of the value, and 192 * 2^-24 of the terms' size.
    allowed = want.abs() * torch.finfo(dtype).eps / 2 + 192 * 2**-24 * want.abs().max()
    assert (got - want).abs().le(allowed).all()


def test_tf32_that_the_process_allows_changes_nothing():
    linear, x = layer("nvfp4", "bf16").cuda(), torch.randn(64, 192, device="cuda")
    before = linear(x)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert torch.equal(linear(x), before)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_compile_and_cuda_graph_give_the_same_bits():
    model = torch.nn.Sequential(layer("nvfp4"), torch.nn.ReLU()).cuda()
    x, other = (torch.randn(5, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    want, want_other = model(x), model(other)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True)(x), want)
        graph, static = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            out = model(static)
        static.copy_(other)
        graph.replay()
    assert torch.equal(out, want_other)


def test_moving_a_layer_there_and_back_keeps_every_bit():
    linear = layer("nvfp4")
    before = {name: t.clone() for name, t in linear.state_dict().items()}
    x = torch.randn(3, 192)
    want = linear(x)
    linear.cuda().half().cpu().float()
    for name, tensor in linear.state_dict().items():
        if name != "bias":
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    linear.bias.data.copy_(before["bias"])
    assert torch.equal(linear(x), want)


def test_a_checkpoint_gives_the_same_logits_on_both_devices(tmp_path):
    model = tiny_model()
    folder = tmp_path / "out"
    qt.quantize(model, "nvfp4", transform="hadamard:16", calibration=tokens(), output=folder,
                progress=False)  # fmt: skip
    ids = tokens(length=16)
    on_cpu = qt.load(folder, device="cpu", dtype="float32")(ids).logits
    loaded = qt.load(folder, device="cuda", dtype="float32")
    on_gpu = loaded(ids.cuda()).logits.cpu()
    # A hidden state that differs in its last bit can move a code next to a tie: about 1e-3 of the logits each.
    assert (on_gpu - on_cpu).norm() / on_cpu.norm() < 2e-2
    assert loaded.generate(ids[:1].cuda(), max_new_tokens=3, do_sample=False).shape == (1, 19)
