"""The weight of a layer as a checkpoint stores it: kept as buffers, or let go where fragments hold all of it.

Fragments (weight_layout.py) have every bit that codes and block scales have, but codes under a zero scale or MXFP4's
NaN, which come back as 0. So a layer that has made them lets go of the two, and holds a weight once:

| asks for them                               | gets                                                              |
|---|---|
| state_dict, weight_tensor, copy, pickle     | tensors made for this one call                                    |
| `.codes`, `.block_scale`, `.to`,            | the buffers, made again: they may be written to, and stay until   |
| load_state_dict                             | the next call or refresh, which makes fragments of them again     |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import weight_layout
from .errors import refusal
from .formats import FP4Format
from .fused import Part
from .plan import Stamp
from .tensor import FP4Tensor, is_scale
from .transforms import Transform

STORED = ("codes", "block_scale")
SCALES = ("encode_scale", "input_encode_scale")
_BYTES: dict[Any, tuple[torch.dtype, ...]] = {
    "codes": (torch.uint8, torch.int8),
    torch.float8_e4m3fn: (torch.float8_e4m3fn, torch.uint8),
    torch.uint8: (torch.uint8, torch.float8_e8m0fnu),
}
"""The dtypes in which codes, and block scales of a dtype, are the same bytes."""


def _given_back(name: str) -> property:
    """A buffer that is made again where it was let go. Assignments are nn.Module's, as to any buffer."""

    def get(layer: StoredWeight) -> Tensor:
        buffers = layer.__dict__.get("_buffers", {})
        if name not in buffers:
            raise AttributeError(name)
        if buffers[name] is None:
            layer.take_back()
        found: Tensor = buffers[name]
        return found

    return property(get)


class StoredWeight(nn.Module):
    """What an FP4Linear knows of its weight. keep_codes: never let go of the stored form."""

    if TYPE_CHECKING:
        codes: Tensor
        block_scale: Tensor
    else:
        codes, block_scale = map(_given_back, STORED)
    name: str
    encode_scale: Tensor | None
    input_encode_scale: Tensor | None
    bias: nn.Parameter | None
    values: Tensor | None
    part: Part | None
    format: FP4Format
    in_features: int
    out_features: int
    output_sizes: tuple[int, ...]
    keep_codes: bool
    activations: str
    recipe: str
    input_transform: Transform | None
    output_transform: Transform | None

    @property
    def device(self) -> torch.device:
        """Where the weight is."""
        held = self._buffers["codes"]
        held = self.values if held is None else held
        assert held is not None
        return held.device

    def weight_tensor(self) -> FP4Tensor:
        """The weight as an FP4Tensor: on this layer's memory, or made of its fragments where they are all it holds."""
        return FP4Tensor.from_encode(*self._stored(), self.encode_scale, self.format, self.output_sizes)

    @property
    def is_filled(self) -> bool:
        """Whether no tensor of it is on the meta device any more."""
        held = (*(self._buffers[name] for name in (*STORED, *SCALES)), self.bias)
        return self.device.type != "meta" and not any(t.is_meta for t in held if t is not None)

    def check_held(self, weight: FP4Tensor) -> None:
        """Raise Refusal where weight_tensor(), scales and bias do not fit this layer: kernels read them unasked."""
        needs, where = weight.misfits() + self.wrong_sizes(), weight.device
        if not needs and weight.shape != (self.out_features, self.in_features):
            needs.append((f"codes of ({self.out_features}, {self.in_features})", f"codes of {weight.shape}"))
        if (self.encode_scale is None) == self.format.has_tensor_scale:
            needs.append((f"{self.format.name}'s encode_scale", "none" if self.encode_scale is None else "one"))
        one, bias = self.input_encode_scale, self.bias
        if one is not None and (one.dtype != torch.float32 or one.numel() != 1):
            needs.append(("input_encode_scale float32, one element", f"{one.dtype} {tuple(one.shape)}"))
        if bias is not None and (tuple(bias.shape) != (self.out_features,) or not bias.is_floating_point()):
            needs.append((f"a floating-point bias ({self.out_features},)", f"{bias.dtype} {tuple(bias.shape)}"))
        if one is None and self.activations == "fp4" and self.recipe == "checkpoint" and self.format.has_tensor_scale:
            needs.append(("input_encode_scale, for the recipe 'checkpoint'", "none"))
        for t in (weight.block_scale, self.encode_scale, one, bias):
            if t is not None and t.device != where:
                needs.append((f"all on {where}, as the codes", str(t.device)))
        refuse_misfits(self.name, needs or self.wrong_scales())

    def wrong_sizes(self) -> list[tuple[str, str]]:
        """(needed, found) for sizes that go with no weight."""
        group, k, n = self.format.group_size, self.in_features, self.out_features
        needs = [(f"in_features a multiple of the group size {group}", str(k))] if k % group else []
        for side, transform, size in (("input", self.input_transform, k), ("output", self.output_transform, n)):
            if transform is not None and size % transform.size:
                needs.append((f"{side} size a multiple of its transform's {transform.size}", str(size)))
        if sum(self.output_sizes) != n:
            needs.append((f"output_sizes that sum to {n}", str(self.output_sizes)))
        return needs

    def wrong_scales(self) -> list[tuple[str, str]]:
        """(needed, found) for encode scales that are none."""
        return _no_scales({name: self._buffers[name] for name in SCALES})

    def take_back(self) -> None:
        """Hold the stored form as buffers again."""
        self._buffers.update(zip(STORED, self._stored(), strict=True))

    def _stored(self) -> tuple[Tensor, Tensor]:
        """Codes and block scales: what of them is held, and what is not of the fragments."""
        codes, block_scale = (self._buffers[name] for name in STORED)
        if codes is not None and block_scale is not None:
            return codes, block_scale
        data, rows = (self.values, None) if self.part is None else (self.part.whole.data, self.part.rows)
        assert data is not None
        # Tensors of inference mode could not be written to later.
        with torch.inference_mode(False), torch.no_grad():
            fragments, _ = weight_layout.from_stored(data, self.in_features, self.format, rows)
            made = weight_layout.inverse(fragments)
        return made[0] if codes is None else codes, made[1] if block_scale is None else block_scale

    def _let_go(self, weight: FP4Tensor, stamp: Stamp | None, choices: tuple[Any, ...]) -> Stamp | None:
        """Hold the weight, of which the values were made, in one form -> the stamp of the buffers as they then are.

        stamp: made before the values were. Where it does not hold any more the weight has been written to meanwhile:
        nothing is let go of, and the next call makes the values again.
        """
        gone = not self.keep_codes and self.values is not None and self.values.dtype == torch.int32
        held = [name for name in STORED if self._buffers[name] is not None]
        if stamp is None or len(held) == (0 if gone else len(STORED)):
            return stamp
        wanted = (None, None) if gone else (weight.codes, weight.linear_block_scale())
        later = Stamp(self, choices, wanted)
        if not stamp.holds(self, choices):
            return stamp
        self._buffers.update(zip(STORED, wanted, strict=True))
        return later

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in zip(STORED, self._stored(), strict=True):
            destination[prefix + name] = tensor if keep_vars else tensor.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # Torch would convert bytes as numbers, or hold tensors of a dtype that is not the layer's.
        found = {name: state_dict.get(prefix + name) for name in (*STORED, *SCALES, "bias")}
        given = {name: t for name, t in found.items() if isinstance(t, Tensor)}
        of_bytes = {"codes": torch.uint8, "block_scale": self.format.scale_dtype}
        needs = []
        for name, t in given.items():
            allowed = _BYTES["codes" if name == "codes" else of_bytes[name]] if name in STORED else None
            if t.dtype not in allowed if allowed else not t.is_floating_point():
                wanted = " or ".join(map(str, allowed or ["a floating-point dtype"]))
                needs.append((f"{prefix}{name} in {wanted}", str(t.dtype)))
            elif name in STORED:
                given[name] = t.view(of_bytes[name])
            elif name in SCALES:
                given[name] = t.float()
        scales = {name: t for name, t in given.items() if name in SCALES}
        refuse_misfits(self.name or prefix[:-1], needs or _no_scales(scales, prefix))
        self.take_back()
        loaded = {**state_dict, **{prefix + name: t for name, t in given.items()}}
        super()._load_from_state_dict(loaded, prefix, *rest)


def _no_scales(scales: Mapping[str, Tensor | None], prefix: str = "") -> list[tuple[str, str]]:
    """What is wrong with the numbers of scales; those of a GPU would be waited for, and are not looked at."""
    return [
        (f"{prefix}{name} finite and positive, as its reciprocal", str(t.tolist()))
        for name, t in scales.items()
        if type(t) is Tensor and t.device.type == "cpu" and not is_scale(t)
    ]


def input_scale(given: Tensor | float, layer: str, device: torch.device) -> Tensor:
    """An input encode scale as a layer on the device holds it. Raises Refusal for a number that is none."""
    there = given.device if isinstance(given, Tensor) else "cpu"
    scale = torch.as_tensor(given, dtype=torch.float32, device=there).reshape(-1)
    refuse_misfits(layer, _no_scales({"input_encode_scale": scale}))
    return scale.to(device)


def refuse_misfits(layer: str, needs: list[tuple[str, str]]) -> None:
    """Raise Refusal where there are (needed, found) pairs."""
    if needs:
        raise refusal(
            "fp4_linear", "the tensors are not those of this layer.", layer=layer or None, needs=needs,
            do="check the file, or the code that made them",
        )  # fmt: skip
