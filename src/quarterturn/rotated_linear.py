"""RotatedLinear: a linear layer as it is, behind online transforms."""

from __future__ import annotations

from torch import Tensor, nn

from . import ops
from .transforms import Transform


class RotatedLinear(nn.Linear):
    """An unquantized linear layer behind online transforms: y = rotate(rotate(x) W'^T + b'). Inference only."""

    def __init__(
        self, linear: nn.Linear, input_transform: Transform | None, output_transform: Transform | None
    ) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.input_transform, self.output_transform = input_transform, output_transform

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features) of x.dtype."""
        return _turn(super().forward(_turn(x, self.input_transform)), self.output_transform)


def _turn(x: Tensor, transform: Transform | None) -> Tensor:
    if transform is None:
        return x
    return ops.rotate(x, transform.operand(x.device), transform.factor, transform.transpose)
