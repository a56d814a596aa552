"""FP4 layers in vLLM, and vLLM's own layers behind online transforms.

A layer of vLLM's holds one or several layers of the file (q/k/v, gate/up), each cut to this rank's share. It runs as
FP4Linears, usually one: neighbours with the same transforms and the same input scale are one FP4Linear with a weight
scale of its own for each (`output_sizes`), others follow one another and their outputs are put side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from ... import ops
from ...checkpoint import LayerSpec
from ...checkpoint.read import INPUT_ENCODE, PACKED, SCALE, WEIGHT_ENCODE
from ...errors import CheckpointRefusal, refusal
from ...linear import FP4Linear
from ...tensor import FP4Tensor
from ...transforms import Transform
from .contents import check_shard
from .parts import fp4_part, kept

logger = init_logger("vllm.quarterturn")


@register_weight_loader_v2_supported_method
class FP4LinearMethod(LinearMethodBase):
    """Runs FP4 layers by FP4Linear. specs: the file's layers in this one; backend: 'auto' or a name of ours."""

    def __init__(self, specs: Sequence[LayerSpec], prefix: str, backend: str, has_input_scale: bool) -> None:
        self.specs, self.prefix, self.backend = list(specs), prefix, backend
        self.has_input_scale = has_input_scale

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """The parameters of the file's names, of this rank's shapes. Raises Refusal for a shard that cannot be."""
        specs, sizes, k = self._shards(output_partition_sizes), output_partition_sizes, input_size_per_partition
        self._check(layer, specs, sizes, k, input_size)
        fmt, n, loader = specs[0].format, sum(sizes), extra_weight_attrs["weight_loader"]
        sharded: dict[str, Any] = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        codes = torch.empty(fmt.codes_shape(n, k), dtype=torch.uint8)
        layer.register_parameter(PACKED, ModelWeightParameter(data=codes, **sharded))
        scale = torch.empty(fmt.scale_shape(n, k), dtype=fmt.scale_dtype)
        layer.register_parameter(SCALE, GroupQuantScaleParameter(data=scale, **sharded))
        names = ((WEIGHT_ENCODE,) if fmt.has_tensor_scale else ()) + ((INPUT_ENCODE,) if self.has_input_scale else ())
        for name in names:
            ones = torch.ones(len(sizes), dtype=torch.float32)
            layer.register_parameter(name, PerTensorScaleParameter(data=ones, weight_loader=loader))
        layer.output_partition_sizes = sizes
        self._dtype, self._k = params_dtype, k

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the FP4Linears of loaded weights, or, when vLLM reloads, what they derive from the new ones."""
        codes = getattr(layer, PACKED)
        layer.fp4_parts = kept(layer.__dict__.get("fp4_parts"), self._parts(layer), codes, self.prefix)
        say_what_runs(layer.fp4_parts)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) -> (..., N) of x.dtype."""
        parts = layer.fp4_parts
        if (bias is None) != (parts[0].bias is None):
            raise refusal(
                "vllm",
                "the bias is not the one that this layer was prepared with.",
                layer=self.prefix,
                needs=[("the layer's bias" if bias is None else "no bias", "none" if bias is None else "one")],
                do="report this model: its code adds the bias in a way that is not known here",
            )
        outputs = [part(x) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _shards(self, sizes: Sequence[int]) -> list[LayerSpec]:
        """One spec a shard: a layer that is fused in the file too stands for all of them."""
        return self.specs if len(self.specs) == len(sizes) else self.specs[:1] * len(sizes)

    def _check(self, layer: Any, specs: Sequence[LayerSpec], sizes: Sequence[int], k: int, whole_k: int) -> None:
        spec, needs = specs[0], []
        in_file = sum(s.n for s in self.specs) if len(self.specs) > 1 else spec.n
        if len(self.specs) not in (1, len(sizes)) or spec.k != whole_k:
            shape = f"{len(self.specs)} layers of K = {spec.k}, {in_file} outputs"
            needs.append((f"{len(sizes)} layers of K = {whole_k}", shape))
        biases = {s.has_bias for s in specs}
        if biases != {layer.has_bias}:
            needs.append((f"bias {layer.has_bias}, as the model has it", f"bias {sorted(biases)} in the file"))
        if layer.has_bias and layer.skip_bias_add and any(s.output_transform for s in specs):
            needs.append(("a bias that is added before the output transform", "one that vLLM adds behind it"))
        if needs:
            raise refusal(
                "vllm",
                "this layer does not fit the model.",
                layer=self.prefix,
                needs=needs,
                do="check that config.json is of this model",
                kind=CheckpointRefusal,
            )
        for shard, n in zip(specs, sizes, strict=True):
            check_shard(
                shard, n, k, layer.tp_size, row_parallel=isinstance(layer, RowParallelLinear), label=self.prefix
            )

    def _parts(self, layer: Any) -> list[FP4Linear]:
        sizes = layer.output_partition_sizes
        specs, bias = self._shards(sizes), _added_bias(layer)
        scale = getattr(layer, INPUT_ENCODE, None)
        scales = [None if scale is None else float(s) for s in (sizes if scale is None else scale)]
        keys = [
            (id(s.input_transform), id(s.output_transform), s.activations, s.activations == "fp4" and e)
            for s, e in zip(specs, scales, strict=True)
        ]
        starts = [i for i in range(len(keys)) if i == 0 or keys[i] != keys[i - 1]]
        parts = []
        for first, end in zip(starts, [*starts[1:], len(keys)], strict=True):
            top, rows = sum(sizes[:first]), sum(sizes[first:end])
            whole = rows == sum(sizes)
            parts.append(
                self._part(layer, specs[first], slice(first, end), None if whole else slice(top, top + rows), bias)
            )
        return parts

    def _part(self, layer: Any, spec: LayerSpec, shards: slice, rows: slice | None, bias: Tensor | None) -> FP4Linear:
        """An FP4Linear of neighbouring shards, on the memory of the layer's parameters; rows: None for all."""
        codes, block_scale = getattr(layer, PACKED).data, getattr(layer, SCALE).data
        if rows is not None:
            codes, block_scale, bias = codes[rows], block_scale[rows], None if bias is None else bias[rows]
        encode = getattr(layer, WEIGHT_ENCODE).data[shards] if spec.format.has_tensor_scale else None
        sizes = tuple(layer.output_partition_sizes[shards])
        weight = FP4Tensor.from_encode(codes, block_scale, encode, spec.format, sizes)
        scale = getattr(layer, INPUT_ENCODE).data[shards][:1] if self.has_input_scale else None
        return fp4_part(spec, weight, scale, bias, backend=self.backend, dtype=self._dtype, name=self.prefix)


@register_weight_loader_v2_supported_method
class RotatedMethod(LinearMethodBase):
    """A layer of vLLM's own behind online transforms: those go before and behind what `inner` does."""

    def __init__(self, inner: Any, prefix: str, first: Transform | None, last: Transform | None) -> None:
        self.inner, self.prefix, self.first, self.last = inner, prefix, first, last

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """The inner method's parameters. Raises Refusal for a shard that cuts a block."""
        needs = []
        for side, transform, widths in (
            ("input", self.first, [input_size_per_partition]),
            ("output", self.last, output_partition_sizes),
        ):
            if transform is not None and any(width % transform.size for width in widths):
                needs.append((f"shards of the {side} that are whole blocks of {transform.size}", str(widths)))
        if self.last is not None and getattr(layer, "has_bias", False) and getattr(layer, "skip_bias_add", False):
            needs.append(("a bias that is added before the output transform", "one that vLLM adds behind it"))
        if needs:
            raise refusal(
                "vllm",
                "this layer and its online transform do not go together.",
                layer=self.prefix,
                needs=needs,
                do="use a smaller tensor-parallel size",
                kind=CheckpointRefusal,
            )
        self.inner.create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """The inner method's, and the matrices on its device."""
        device = next(layer.parameters()).device
        self.inner.process_weights_after_loading(layer)
        for name, transform in (("input_matrix", self.first), ("output_matrix", self.last)):
            if transform is not None:
                layer.register_buffer(f"fp4_{name}", transform.operand(device))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) -> (..., N) of x.dtype."""
        if self.first is not None:
            x = ops.rotate(x, layer.fp4_input_matrix, self.first.factor, self.first.transpose)
        y: Tensor = self.inner.apply(layer, x, bias)
        if self.last is not None:
            y = ops.rotate(y, layer.fp4_output_matrix, self.last.factor, self.last.transpose)
        return y


def say_what_runs(parts: Sequence[FP4Linear]) -> None:
    """One line in vLLM's log for each kind of layer: its arithmetic, the backend, and why that one."""
    for part in parts:
        found = part.explain()
        logger.info_once(
            "quarterturn: %s by %s, weights %s: %s", found.arithmetic, found.backend, found.weights, found.reason
        )


def _added_bias(layer: Any) -> Tensor | None:
    """The bias that vLLM will have this rank add: of row-parallel layers, the first rank's alone."""
    bias: Tensor | None = getattr(layer, "bias", None)
    later = isinstance(layer, RowParallelLinear) and layer.tp_rank > 0
    return None if bias is None or layer.skip_bias_add or later else bias
