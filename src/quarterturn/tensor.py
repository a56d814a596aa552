"""FP4Tensor: a matrix of 4-bit floats with its scales, and the one equation that says what it means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from .errors import refusal
from .formats import E2M1_VALUES, E8M0_NAN, FP4Format, get_format
from .layouts import LAYOUTS, get_layout


@dataclass(frozen=True, repr=False)
class FP4Tensor:
    """A (N, K) matrix, value[n, k] = e2m1(code[n, k]) * block_scale[n, k // group_size] * tensor_scale[range of n].

    codes: uint8 (N, K/2), two codes a byte, even element in the low nibble.
    block_scale: `format.scale_dtype` (E4M3, or E8M0 as uint8), shape (N, K/group_size) in layout 'linear'.
    tensor_scale: fp32 (P,), one multiplier per range of output rows; all ones for MXFP4.
    encode_scale: fp32 (P,) or None: the number a file stores (tensor_scale is its reciprocal), kept for writing back.
    output_sizes: P row counts that sum to N; a layer fused from several has one range per part.
    layout: 'linear' or 'blocked', of block_scale.
    """

    codes: Tensor
    block_scale: Tensor
    tensor_scale: Tensor
    encode_scale: Tensor | None
    format: FP4Format
    output_sizes: tuple[int, ...]
    layout: str = "linear"

    @classmethod
    def from_encode(
        cls,
        codes: Tensor,
        block_scale: Tensor,
        encode_scale: Tensor | None,
        format: str | FP4Format,
        output_sizes: tuple[int, ...] | None = None,
    ) -> FP4Tensor:
        """Build from what a file stores; tensor_scale = fp32(1 / encode_scale), or 1 where there is none."""
        fmt = get_format(format)
        sizes = output_sizes or (codes.shape[0],)
        if encode_scale is None:
            tensor_scale = torch.ones(len(sizes), dtype=torch.float32, device=codes.device)
        else:
            encode_scale = encode_scale.reshape(-1).float()
            tensor_scale = encode_scale.reciprocal()
        return cls(codes, block_scale, tensor_scale, encode_scale, fmt, sizes)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.block_scale, self.tensor_scale))

    def __repr__(self) -> str:
        n, k = self.shape
        return f"FP4Tensor({self.format.name}, shape=({n}, {k}), ranges={list(self.output_sizes)}, {self.device})"

    def to(self, device: torch.device | str) -> FP4Tensor:
        """The same matrix on another device."""
        encode = None if self.encode_scale is None else self.encode_scale.to(device)
        return replace(
            self,
            codes=self.codes.to(device),
            block_scale=self.block_scale.to(device),
            tensor_scale=self.tensor_scale.to(device),
            encode_scale=encode,
        )

    def linear_block_scale(self) -> Tensor:
        """Block scales (N, K/group_size), row-major, whatever the layout."""
        if self.layout == "linear":
            return self.block_scale
        n, k = self.shape
        return get_layout(self.layout).inverse(self.block_scale, n, k // self.format.group_size)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """e2m1(code) * block_scale, (N, K), without the tensor scale: exact in fp32 and bf16, NVFP4 also in fp16."""
        scale = decode_block_scale(self.linear_block_scale(), self.format)
        return decode_codes(self.codes, scale, self.format.group_size, dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The value equation in fp32, rounded once to `dtype`; (N, K)."""
        return (self.values() * self.row_scale()).to(dtype)

    def row_scale(self) -> Tensor:
        """The tensor scale of each output row, fp32 (N, 1) (or (1, 1) where all rows share one)."""
        return per_output(self.tensor_scale, self.output_sizes).view(-1, 1)

    def validate(self, name: str = "weight") -> FP4Tensor:
        """Return self if shapes, dtypes and scales agree with the format and are finite; raise Refusal otherwise."""
        problems = self.misfits() or [*self._block_scale_problems(), *self._tensor_scale_problems()]
        if problems:
            raise refusal(
                "fp4 tensor",
                "the parts do not fit.",
                tensor=name,
                needs=problems,
                do="check the file or the code that made it",
            )
        return self

    def misfits(self) -> list[tuple[str, str]]:
        """(needed, found) for every part whose shape or dtype does not fit; no number is looked at."""
        return self._codes_problems() or [*self._block_scale_misfits(), *self._tensor_scale_misfits()]

    def _codes_problems(self) -> list[tuple[str, str]]:
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            return [("codes uint8 (N, K/2)", f"{self.codes.dtype} {tuple(self.codes.shape)}")]
        k, group = self.shape[1], self.format.group_size
        return [(f"K a multiple of the group size {group}", f"K = {k}")] if k % group else []

    def _block_scale_misfits(self) -> list[tuple[str, str]]:
        n, k = self.shape
        fmt = self.format
        if self.layout not in LAYOUTS:
            return [(f"layout {' or '.join(LAYOUTS)}", repr(self.layout))]
        expected = get_layout(self.layout).shape(n, k // fmt.group_size)
        if tuple(self.block_scale.shape) != expected or self.block_scale.dtype != fmt.scale_dtype:
            found = f"{self.block_scale.dtype} {tuple(self.block_scale.shape)}"
            return [(f"block_scale {fmt.scale_dtype} {expected}", found)]
        return []

    def _block_scale_problems(self) -> list[tuple[str, str]]:
        fmt = self.format
        byte = self.block_scale.view(torch.uint8)
        magnitude = byte if fmt.has_e8m0_scale else byte & 0x7F
        if bool((magnitude == fmt.nan_byte).any()):
            return [("block scales that are numbers", f"NaN bytes ({fmt.nan_byte:#x})")]
        if not fmt.has_e8m0_scale and bool((byte >= 0x80).any()):
            return [("block scales that are not negative", "bytes with the sign bit set")]
        return []

    def _tensor_scale_misfits(self) -> list[tuple[str, str]]:
        parts, n = len(self.output_sizes), self.shape[0]
        problems = []
        if sum(self.output_sizes) != n:
            problems.append((f"output_sizes that sum to {n}", str(self.output_sizes)))
        for word, scale in self._tensor_scales():
            if scale.dtype != torch.float32 or scale.numel() != parts:
                found = f"{scale.dtype}, {scale.numel()} elements"
                problems.append((f"{word} float32, one tensor scale per range of {self.output_sizes}", found))
        return problems

    def _tensor_scale_problems(self) -> list[tuple[str, str]]:
        return [
            (f"{word} finite and positive, as its reciprocal", str(scale.tolist()))
            for word, scale in self._tensor_scales()
            if not is_scale(scale)
        ]

    def _tensor_scales(self) -> list[tuple[str, Tensor]]:
        named = (("tensor_scale", self.tensor_scale), ("encode_scale", self.encode_scale))
        return [(word, scale) for word, scale in named if scale is not None]


def is_scale(scale: Tensor) -> bool:
    """Whether numbers can be scales in fp32: they and their reciprocals finite and positive."""
    both = torch.stack((scale.float(), scale.float().reciprocal()))
    return bool((torch.isfinite(both) & (both > 0)).all())


def per_output(scale: Tensor, output_sizes: tuple[int, ...]) -> Tensor:
    """One number per range (P,) -> one per output (N,); (1,) where there is one range. Nothing leaves the device."""
    if len(output_sizes) == 1:
        return scale
    return torch.cat([part.expand(size) for part, size in zip(scale, output_sizes, strict=True)])


def decode_block_scale(block_scale: Tensor, format: FP4Format) -> Tensor:
    """E4M3 or E8M0 (uint8) block scales -> fp32 of the same shape; the NaN byte gives NaN."""
    table = _scale_table(format.name, block_scale.device)
    return table[block_scale.view(torch.uint8).int()]


def decode_codes(codes: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Packed codes (N, K/2) and fp32 scales (N, K/group_size) -> e2m1 * scale of `dtype`, (N, K)."""
    n, half = codes.shape
    pairs = _pair_table(codes.device)
    decoded = pairs[codes.reshape(-1).int()].view(n, half * 2 // group_size, group_size)
    # Where all fits bf16 exactly (it does for both formats) the product of the fp32 numbers rounds to itself.
    return (decoded * scale.unsqueeze(-1)).to(dtype).view(n, half * 2)


@lru_cache(maxsize=32)
def _scale_table(format_name: str, device: torch.device) -> Tensor:
    if format_name == "nvfp4":
        # The decode direction of a cast is exact, so torch's own is the table.
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float().to(device)
    # As bits: the least is 2^-127, which a process that flushes such numbers to zero would not convert.
    exponent = torch.arange(256, dtype=torch.int32, device="cpu") << 23
    exponent[0] = 1 << 22
    exponent[E8M0_NAN] = 0x7FC00000
    return exponent.view(torch.float32).to(device)


@lru_cache(maxsize=32)
def _pair_table(device: torch.device) -> Tensor:
    byte = torch.arange(256, device="cpu")
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device="cpu")
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).to(device)
