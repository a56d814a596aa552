"""What a backend is: the questions it answers and the operations it offers, and the words in which both are put."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..formats import FP4Format
from ..tensor import FP4Tensor


@dataclass(frozen=True)
class Problem:
    """What a layer asks for, as far as it can decide who runs it. Sizes None mean: no transform on that side."""

    format: FP4Format
    activations: str
    dtype: torch.dtype
    n: int
    k: int
    input_size: int | None = None
    output_size: int | None = None
    bias: bool = False
    rule: str = "even"
    recipe: str = "checkpoint"
    batch_invariant: bool = False
    capability: tuple[int, int] | None = None
    """Of the GPU that is to run it, as `select` fills it in; None: no GPU, or not known."""


@dataclass(frozen=True)
class Blocks:
    """A block-diagonal matrix as the ops take it: fp32 (R, R), an fp32 factor, and its direction."""

    matrix: Tensor
    factor: float
    transpose: bool


@dataclass(frozen=True)
class Quantizer:
    """How activations are quantized: the format, the stored encode scale (fp32, one element) and the rules."""

    format: FP4Format
    encode_scale: Tensor | None
    recipe: str = "checkpoint"
    rule: str = "even"

    @property
    def per_row(self) -> bool:
        """Whether each row has a tensor scale of its own."""
        return self.recipe == "token" and self.format.has_tensor_scale

    @property
    def kind(self) -> tuple[str, str, str]:
        """All but the encode scale: what a kernel is compiled for."""
        return self.format.name, self.recipe, self.rule

    @property
    def is_qutlass_mxfp4(self) -> bool:
        """Whether it reproduces QuTLASS's MXFP4, whose scales and codes follow rules of their own."""
        return self.recipe == "qutlass" and not self.format.has_tensor_scale


@dataclass(frozen=True)
class Weight:
    """The weight operand of a product, in one of four forms:

    | form      | data                                            | block_scale          | made by           |
    |---|---|---|---|
    | packed    | uint8 (N, K/2), codes                           | uint8 (N, K / group) | nobody: as stored |
    | decoded   | bf16 (N, K), e2m1 * block_scale                 | None                 | most backends     |
    | fragments | int32 (N, stored_width): weight_layout.py       | None                 | gpu_triton        |
    | E4M3      | float8_e4m3fn (N, stored_width): e4m3_layout.py | None                 | gpu_fp8           |

    A backend tells them by block_scale and the dtype of data. output_sizes: rows that have a tensor scale each.
    """

    data: Tensor
    block_scale: Tensor | None
    tensor_scale: Tensor
    output_sizes: tuple[int, ...]
    format: FP4Format
    rows: tuple[int, int] | None = None
    """Of fragments that hold the weights of several layers: the first and the number of rows meant here."""

    @property
    def n(self) -> int:
        """Outputs."""
        return self.data.shape[0] if self.rows is None else self.rows[1]


@dataclass(frozen=True, eq=False)
class Layer:
    """All that a layer is beside its input. No quantizer means W4A16."""

    weight: Weight
    bias: Tensor | None
    input_blocks: Blocks | None
    output_blocks: Blocks | None
    quantizer: Quantizer | None
    batch_invariant: bool = False
    """Whether a row's result is to have the same bits whatever rows are beside it."""
    name: str = ""
    """The module's, for refusals."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a backend has made of it for calls to come, under the backend's name."""


@dataclass(frozen=True, eq=False)
class Operand:
    """An input as a backend's product takes it: rotated, and quantized where the layer does. `data` is values (M, K),
    packed codes with `block_scale`, or whatever the backend's `form` says; `dtype` is the input's, and the result's.

    form: 'rows', or 'ordered' for an OrderedBackend (compose.py); any other is that of a backend's own `operand`.
    """

    data: Tensor
    block_scale: Tensor | None
    tensor_scale: Tensor | None
    rows: int
    dtype: torch.dtype
    form: str = "rows"


class Backend(Protocol):
    """One way to run the ops; every method takes 2-D contiguous-in-K tensors that `ops` has checked."""

    NAME: str

    def missing(self, device: torch.device, capability: tuple[int, int] | None = None) -> list[str]:
        """Reasons why this machine cannot run it; a GPU's capability may be given to ask about another machine."""

    def refuses(self, problem: Problem) -> list[str]:
        """Reasons why it cannot run this layer."""

    def prepare(self, weight: FP4Tensor, mode: str) -> Tensor | None:
        """What a layer keeps of its weight for `mode` 'auto', 'packed' or 'decoded': the `data` of a Weight without
        block scales, or None where the stored form is what it runs on. The form may depend on the weight's values: see
        Weight."""

    def rotate(self, x: Tensor, blocks: Blocks, out_dtype: torch.dtype) -> Tensor:
        """x (M, K) -> x @ V per block, (M, K) of out_dtype, to fp32 accuracy."""

    def rotate_quantize(
        self, x: Tensor, blocks: Blocks | None, quantizer: Quantizer, scale_layout: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (M, K) -> packed codes, block scale bytes (uint8) in the layout, tensor scale (1,) or (M,)."""

    def rotate_quantize_dequantize(
        self, x: Tensor, blocks: Blocks | None, quantizer: Quantizer, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """x (M, K) -> e2m1 * block_scale of out_dtype (M, K), and the tensor scale beside it."""

    def matmul(
        self,
        x: Tensor,
        x_block_scale: Tensor | None,
        x_tensor_scale: Tensor | None,
        weight: Weight,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """(M, K) x (N, K)^T -> (M, N): fp32 accumulation, alpha and bias in fp32, one rounding."""


class OrderedBackend(Backend, Protocol):
    """A backend whose product may take values in another order along K than that of the definition.

    rotate, rotate_quantize_dequantize and matmul take `ordered`, with which values (M, K) are in that order.
    """

    def in_order(self, x: Tensor, layer: Layer) -> bool:
        """Whether the layer's x (M, K) is to be rotated and quantized into that order."""


class InvariantBackend(Backend, Protocol):
    """A backend that has batch-invariant ways through layers. One that fuses no layers takes `invariant` in matmul."""

    def varies(self, problem: Problem) -> list[str]:
        """Reasons why the bits of a row of this layer could depend on the other rows; none: it runs such a layer."""


class RemarkingBackend(Backend, Protocol):
    """A backend that runs some layers otherwise than its name says, by what their weights are."""

    def remark(self, weight: FP4Tensor, values: Tensor | None) -> str | None:
        """Why a layer of this weight, prepared as `values`, does not run as the name says; None where it does."""


Together = Callable[[Tensor], "list[Tensor] | None"]


class FusedBackend(Backend, Protocol):
    """A backend with a way of its own through a layer; compose.py puts layers together for the others.

    Layers that read the same x, and are equal in input_blocks, quantizer, and kind of weights, take the same operand.
    """

    def operand(self, x: Tensor, layer: Layer) -> Operand:
        """x (M, K) rotated and quantized as the layer asks."""

    def product(self, operand: Operand, layer: Layer) -> Tensor:
        """The rest of the layer: (M, N) of the operand's dtype."""

    def together(self, layers: Sequence[Layer]) -> Together | None:
        """One or more whole layers that take the same operand, for one call of all; None where nothing is gained.

        The function takes contiguous x (..., K) and gives their results (..., N), bit for bit those of operand and
        product, each in memory of its own; or None, for an x with so many rows that a call for each is as good.
        """

    def renewal(self, old: Layer, new: Layer) -> list[tuple[Any, Any]]:
        """What was made of `old`'s weight for calls to come, each with what `new`'s gives in its place: records for
        kept.write_over, since the tensors of `old` are about to be written over by those of `new`. Writes nothing.
        Left out where nothing is kept but the layer's own tensors."""
