"""FP4Linears that outlive a reload of weights, without an engine: which stay, and what is refused before it is done."""

from __future__ import annotations

import pytest
import torch

import fused_cases
from comparing import assert_same_bits
from fused_cases import Gpu, K, layer_of, x_of
from quarterturn import FP4Linear
from quarterturn.errors import CheckpointRefusal
from quarterturn.integrations.vllm.parts import kept

called, gpu = fused_cases.called, fused_cases.gpu
NAME = "model.layers.0.self_attn.qkv_proj"


def parts(seed: int, negative: bool = False) -> list[FP4Linear]:
    """Two parts of a layer; negative: a block scale of the second is, so that its weight has no fragments."""
    made = [layer_of(n, seed + n, keep_codes=True) for n in (64, 128)]
    if negative:
        with torch.no_grad():
            made[1].block_scale.view(torch.uint8)[3, 1] |= 0x80
        made[1].refresh()
    return made


def derived(layers: list[FP4Linear]) -> list[torch.Tensor]:
    return [t.clone() for layer in layers for t in (layer.tensor_scale, layer.values) if t is not None]


def test_the_first_load_and_a_processing_in_place_keep_what_was_made(gpu: Gpu) -> None:
    fresh = parts(1)
    assert kept(None, fresh, fresh[0].codes, NAME) is fresh
    assert kept(fresh, fresh, fresh[0].codes, NAME) is fresh


def test_other_weights_are_written_into_the_known_layers(gpu: Gpu) -> None:
    known, fresh = parts(1), parts(9)
    places = [t.data_ptr() for layer in known for t in layer.buffers()]
    found = kept(known, fresh, fresh[0].codes, NAME)
    assert all(a is b for a, b in zip(found, known, strict=True))
    for got, want in zip(derived(known), derived(fresh), strict=True):
        assert_same_bits(got, want)
    assert [t.data_ptr() for layer in known for t in layer.buffers()] == places


def test_weights_of_another_form_are_refused_before_anything_is_written(gpu: Gpu) -> None:
    """The second part is the one that does not fit, either way; the first would be written before."""
    for first, second in (((1, False), (9, True)), ((1, True), (9, False))):
        known, fresh, x = parts(*first), parts(*second), x_of(3)
        with torch.no_grad():
            want, before = [layer(x) for layer in known], derived(known)
            with pytest.raises(CheckpointRefusal) as refused:
                kept(known, fresh, fresh[0].codes, NAME)
            for got, held in zip(derived(known), before, strict=True):
                assert_same_bits(got, held)
            for layer, y in zip(known, want, strict=True):
                assert_same_bits(layer(x), y)
        forms = [
            f"int32 {tuple(t.shape)}" for t in (*before, *derived(fresh)) if t.dtype == torch.int32 and len(t) > 64
        ]
        needed, found = (forms[0], "none") if second[1] else ("none", forms[0])
        assert str(refused.value) == (
            "vllm: the weights that are reloaded are kept in another form than those before.\n"
            f"  layer {NAME}\n  needs values: {needed}; found {found}\n"
            "  do start the engine anew with this checkpoint"
        )


def test_another_division_is_refused(gpu: Gpu) -> None:
    known, fresh = parts(1), [layer_of(192, keep_codes=True)]
    with pytest.raises(CheckpointRefusal, match=r"layer model[\s\S]*\[\(64,\), \(128,\)\]; found \[\(192,\)\]"):
        kept(known, fresh, fresh[0].codes, NAME)


def test_a_weight_that_was_decoded_is_another_form(gpu: Gpu) -> None:
    known, fresh = parts(1), parts(9)
    fresh[0].weights = "decoded"
    fresh[0].refresh()
    with pytest.raises(CheckpointRefusal, match=rf"values: int32 [^;]*; found bfloat16 \(64, {K}\)"):
        kept(known, fresh, fresh[0].codes, NAME)
