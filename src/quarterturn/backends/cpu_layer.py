"""A layer as the C kernels read it: a struct of addresses and numbers, filled once and kept with the layer.

A struct borrows the tensors' memory and keeps the tensors alive; whoever moves their memory makes a new Layer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..formats import E8M0_THRESHOLDS
from ..kernels import cpu_build
from .factors import WIDE, factors_of
from .kept import Kept
from .protocol import Blocks, Layer, Quantizer, Weight

DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FORMAT = {"nvfp4": 0, "mxfp4": 1}
_ROTATE_ONLY = -1
_ENCODE_QUTLASS = torch.full((1,), 6.0, dtype=torch.float32, device="cpu")


class Native:
    """The struct of one layer. Parts that a call does not use stay empty."""

    __slots__ = ("_struct", "_tensors", "address", "n", "per_row")

    def __init__(self, k: int) -> None:
        self._struct = cpu_build.Layer(k=k, factor=1.0, format=_ROTATE_ONLY)
        self._tensors: list[Tensor] = []
        self.address = ctypes.addressof(self._struct)
        self.per_row, self.n = False, 0

    def rotating(self, blocks: Blocks | None) -> Native:
        """With a rotation of the input."""
        if blocks is not None:
            prepared, s = _prepared(blocks), self._struct
            s.t, s.sign, s.R, s.factor = (
                self._keep(prepared.table), self._keep(prepared.signs), prepared.size, prepared.factor,
            )  # fmt: skip
        return self

    def quantizing(self, quantizer: Quantizer | None) -> Native:
        """With a quantizer of the input."""
        if quantizer is not None:
            s, fmt = self._struct, quantizer.format
            checkpoint = quantizer.recipe == "checkpoint" and fmt.has_tensor_scale
            s.format, s.rule, s.group = _FORMAT[fmt.name], E8M0_THRESHOLDS[quantizer.rule], fmt.group_size
            s.encode = self._keep(quantizer.encode_scale if checkpoint else _ENCODE_QUTLASS)
            self.per_row = quantizer.per_row
            s.token = self.per_row
        return self

    def multiplying(self, weight: Weight, bias: Tensor | None) -> Native:
        """With a weight, packed or decoded to bf16, and a bias."""
        s, self.n = self._struct, weight.data.shape[0]
        s.codes, s.scales = self._keep(weight.data), self._keep(weight.block_scale)
        s.group, s.n = weight.format.group_size, self.n
        s.w_ts, s.ends = self._keep(weight.tensor_scale), self._keep(_ends(weight.output_sizes))
        if bias is not None:
            bias = bias if bias.dtype in DTYPE else bias.float()
            s.bias, s.bias_dtype = self._keep(bias), DTYPE[bias.dtype]
        return self

    def _keep(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        # An alias: where the tensor is moved to other memory, this keeps the old from being freed under the struct.
        tensor = tensor.contiguous().detach()
        self._tensors.append(tensor)
        return tensor.data_ptr()


def native(layer: Layer, k: int) -> Native:
    """The struct of a layer of inputs (M, k), made at its first use. It turns them, but where they are turned apart."""
    kept: Native | None = layer.kept.get("cpu_native")
    if kept is None:
        blocks = None if turned_apart(layer.input_blocks) else layer.input_blocks
        kept = Native(k).rotating(blocks).quantizing(layer.quantizer)
        layer.kept["cpu_native"] = kept.multiplying(layer.weight, layer.bias)
    return kept


def turned_apart(blocks: Blocks | None) -> bool:
    """Whether a rotation is left to any_torch: a wide matrix that has factors, but the one the kernels know, is dense
    for them."""
    if blocks is None or blocks.matrix.shape[0] < WIDE:
        return False
    factors = factors_of(blocks.matrix)
    return factors is not None and not factors.is_sylvester


@dataclass(frozen=True)
class _Prepared:
    """A block matrix as the kernel reads it. Without signs, table is float64 (R, R rounded up to 8); with signs, the
    matrix is diag(signs) H diag(table) for Sylvester's H, and is multiplied in R log R steps."""

    table: Tensor | None
    signs: Tensor | None
    size: int
    factor: float


def _prepared(blocks: Blocks) -> _Prepared:
    """The kernel's form of a block, kept beside the matrix it was made of."""
    made = _KEPT.of(blocks.matrix)
    key = (blocks.factor, blocks.transpose)
    if key not in made:
        made[key] = _prepare_blocks(blocks)
    prepared: _Prepared = made[key]
    return prepared


_KEPT = Kept()


def _prepare_blocks(blocks: Blocks) -> _Prepared:
    size = blocks.matrix.shape[0]
    factor = float(torch.tensor(blocks.factor, dtype=torch.float32, device="cpu"))
    factors = factors_of(blocks.matrix) if size >= 16 and size & (size - 1) == 0 else None
    if factors is not None and factors.is_sylvester:
        factors = factors.transposed() if blocks.transpose else factors
        return _Prepared(factors.right * factor, factors.left.float(), size, factor)
    m = blocks.matrix.detach().float().double()
    table = torch.zeros(size, -(-size // 8) * 8, dtype=torch.float64, device="cpu")
    table[:, :size] = m.T if blocks.transpose else m
    return _Prepared(table, None, size, factor)


@lru_cache(maxsize=256)
def _ends(output_sizes: tuple[int, ...]) -> Tensor:
    """The first row behind each range."""
    return torch.tensor(output_sizes, dtype=torch.int64, device="cpu").cumsum(0)
