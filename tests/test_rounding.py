"""Round-to-nearest of weights: worked by hand, against the reference, and bit for bit against compressed-tensors."""

from __future__ import annotations

import pytest
import torch

from quarterturn import reference
from quarterturn.errors import Refusal
from quarterturn.formats import MXFP4, NVFP4
from quarterturn.quantize.rtn import encode_scale, fold_weight, round_to_nearest, weight_amax
from quarterturn.transforms import Transform, hadamard, matrix, random_hadamard


def lone(value: float, size: int) -> torch.Tensor:
    """One group that holds one value, last."""
    row = torch.zeros(1, size)
    row[0, -1] = value
    return row


@pytest.mark.parametrize(
    ("value", "scale", "decoded"),
    [(7.0, 1.125, 6.75), (0.006, 2.0**-9, 3 * 2.0**-9), (6 * 2.0**-10, 0.0, 0.0), (3000.0, 448.0, 2688.0)],
)
def test_nvfp4_lone_value(value: float, scale: float, decoded: float) -> None:
    got = round_to_nearest(lone(value, 16), NVFP4, torch.ones(1))
    assert got.block_scale.float().item() == scale
    assert got.dequantize()[0, -1].item() == decoded


@pytest.mark.parametrize(
    ("value", "byte", "decoded"), [(4, 127, 4), (5, 127, 4), (6.5, 127, 6), (7, 128, 8), (7.5, 128, 8)]
)
def test_mxfp4_lone_value(value: float, byte: int, decoded: float) -> None:
    got = round_to_nearest(lone(value, 32), MXFP4)
    assert got.block_scale.item() == byte
    assert got.dequantize()[0, -1].item() == decoded


def test_ties_go_to_even() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    to_even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    below = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]
    above = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    t = torch.tensor(ties)
    for row, want in (
        (t, to_even),
        (torch.nextafter(t, torch.zeros(7)), below),
        (torch.nextafter(t, torch.full((7,), 9.0)), above),
    ):
        for sign in (1, -1):
            weight = torch.zeros(1, 16)
            weight[0, :7], weight[0, 15] = sign * row, 6.0
            got = round_to_nearest(weight, NVFP4, torch.ones(1)).dequantize()
            assert got[0, :7].tolist() == [sign * v for v in want]


def test_packing_and_signs() -> None:
    weight = torch.zeros(1, 16)
    weight[0, :4] = torch.tensor([0.5, 1.0, -0.1, 6.0])
    assert round_to_nearest(weight, NVFP4, torch.ones(1)).codes[0, :2].tolist() == [0x21, 0x78]


@pytest.mark.parametrize("format", [NVFP4, MXFP4])
def test_zero_groups_have_scale_and_codes_zero(format) -> None:
    weight = torch.randn(3, 64)
    weight[0], weight[1, :32] = 0, -0.0
    weight[2, :32] = -1e-30 if format is NVFP4 else 0.0
    got = round_to_nearest(weight, format)
    values = got.dequantize()
    assert torch.isfinite(values).all()
    for row, end in ((0, 64), (1, 32), (2, 32)):
        assert not got.codes[row, : end // 2].any()
        assert not got.block_scale.view(torch.uint8)[row, : end // format.group_size].any()


def test_all_zero_weight() -> None:
    got = round_to_nearest(torch.zeros(2, 16), NVFP4)
    assert got.encode_scale.item() == 1
    assert not got.dequantize().any()


@pytest.mark.parametrize("format", [NVFP4, MXFP4])
@pytest.mark.parametrize("std", [1e-3, 0.02, 1.0, 300.0])
def test_against_the_reference(format, std: float) -> None:
    """Same scale bytes and codes as the reference, whose scale rounds in another order: at most a tie apart."""
    weight = torch.randn(64, 128) * std
    got = round_to_nearest(weight, format)
    encode = got.encode_scale.item() if format is NVFP4 else 1.0
    codes, scales = reference.quantize(weight, format, encode)
    differ = scales != got.block_scale.view(torch.uint8)
    assert differ.float().mean() <= 1e-3
    same = ~differ.repeat_interleave(format.group_size // 2, dim=1)
    assert (codes != got.codes)[same].float().mean() <= 1e-4


@pytest.mark.parametrize("std", [1e-3, 1.0, 300.0])
def test_nvfp4_equals_compressed_tensors(std: float) -> None:
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization.quant_scheme import NVFP4 as SCHEME
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = torch.randn(128, 128) * std
    groups = weight.unflatten(-1, (-1, 16))
    encode = generate_gparam(weight.min(), weight.max())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME["weights"], global_scale=encode)
    got = round_to_nearest(weight, NVFP4)
    assert torch.equal(got.encode_scale, encode)
    assert torch.equal(got.block_scale.float(), scale)
    assert torch.equal(got.codes, quantize_and_pack_fp4(weight, scale, global_scale=encode, group_size=16))


@pytest.mark.parametrize("std", [1e-3, 1.0, 300.0])
def test_mxfp4_equals_compressed_tensors(std: float) -> None:
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization.quant_scheme import MXFP4 as SCHEME
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(128, 128) * std
    groups = weight.unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME["weights"])
    got = round_to_nearest(weight, MXFP4)
    assert torch.equal(got.block_scale, compress_mx_scale(scale, torch.uint8))
    assert torch.equal(got.codes, quantize_and_pack_fp4(weight, scale, group_size=32))


def test_codes_come_from_the_rounded_scale() -> None:
    """7 in a group: the scale 7/6 rounds to 1.125; 1.4375 is 1.278 of that (1.5), but 1.232 of 7/6 (1)."""
    weight = lone(7.0, 16)
    weight[0, 0] = 1.4375
    got = round_to_nearest(weight, NVFP4, torch.ones(1)).dequantize()
    assert got[0, 0].item() == 1.5 * 1.125


def test_encode_scale() -> None:
    assert encode_scale(2688.0).item() == 1
    assert encode_scale(0.0).item() == 1
    assert encode_scale(3.0).item() == 896
    assert encode_scale(0.7).item() == (torch.tensor(2688.0) / torch.tensor(0.7)).item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = torch.ones(2, 16)
    weight[1, 3] = bad
    with pytest.raises(Refusal, match=r"layer model\.x"):
        weight_amax(weight, "model.x")


@pytest.mark.parametrize(
    "transform", [None, hadamard(16), random_hadamard(32), Transform(random_hadamard(32).matrix, 32**-0.5, True)]
)
def test_folding_turns_back(transform: Transform | None) -> None:
    """x V (W V^-T)^T = x W^T, with one rounding to fp32."""
    weight, x = torch.randn(8, 64), torch.randn(5, 64).double()
    folded = fold_weight(weight, transform)
    assert folded.dtype == torch.float32
    z = x if transform is None else transform.apply(x)
    assert_folding_loses_one_rounding(z, folded, x @ weight.double().T)


def assert_folding_loses_one_rounding(z: torch.Tensor, folded: torch.Tensor, want: torch.Tensor) -> None:
    """W V^-T was rounded to fp32 once: half an ulp, 2^-24, of each weight; float64 loses nothing that shows here."""
    bound = z.abs() @ folded.double().abs().T * 2.0**-24 * (1 + 1e-6)
    assert bool(((z @ folded.double().T - want).abs() <= bound).all())


def test_folding_of_a_matrix_that_is_not_orthogonal() -> None:
    values = torch.rand(32, 32, dtype=torch.float64) + 2 * torch.eye(32)
    transform = matrix(values)
    weight, x = torch.randn(8, 64), torch.randn(5, 64).double()
    assert_folding_loses_one_rounding(transform.apply(x), fold_weight(weight, transform), x @ weight.double().T)


def test_folding_direction_by_hand() -> None:
    """M = diag(1,-1,1,1) H / 2 is not symmetric: e0 @ M = .5 [1,1,1,1], e0 @ M^T = .5 [1,-1,1,1]."""
    h = hadamard(4).matrix
    signed = torch.diag(torch.tensor([1.0, -1, 1, 1]).double()) @ h
    weight = torch.zeros(1, 16)
    weight[0, 0] = 1
    for transpose, want in ((False, [0.5, 0.5, 0.5, 0.5]), (True, [0.5, -0.5, 0.5, 0.5])):
        folded = fold_weight(weight, Transform(signed, 0.5, transpose))
        assert folded[0].tolist() == want + [0.0] * 12


def test_folding_is_as_good_as_float64() -> None:
    """auto-round 1631: folded in bf16 a 128-wide Hadamard loses bits; here it is within one bf16 unit of float64."""
    weight = torch.randn(16, 256).bfloat16()
    exact = hadamard(128).fold_input_weight(weight)
    folded = fold_weight(weight, hadamard(128))
    assert ((folded - exact).abs() <= 2.0**-24 * exact.abs() + 1e-30).all()


def test_rows_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from quarterturn.quantize import rtn

    weight = torch.randn(37, 64)
    whole, folded = round_to_nearest(weight, NVFP4), fold_weight(weight, hadamard(32))
    monkeypatch.setattr(rtn, "_CHUNK_VALUES", 64 * 5)
    assert torch.equal(round_to_nearest(weight, NVFP4).codes, whole.codes)
    assert torch.equal(fold_weight(weight, hadamard(32)), folded)
