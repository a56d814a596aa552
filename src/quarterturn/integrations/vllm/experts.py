"""Mixtures of FP4 experts in vLLM: a loop over the experts, each by two FP4Linears (gate and up fused, down).

Every expert quantizes its own input with its own scale, behind the online transforms of the file. The loop visits the
experts that have tokens; while a CUDA graph is captured, when nothing may depend on data, it gives every token to every
expert and takes what was routed. Tensor and expert parallel as vLLM cuts the tensors; a shard must hold whole blocks.
Nor can a graph that is compiled depend on data: there the loop is one operator. On a GPU vLLM's own stands around it,
on a CPU vLLM traces the method, and ours does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation, apply_moe_activation_supported
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

from ...checkpoint import LayerSpec
from ...checkpoint.files import refuse
from ...checkpoint.read import INPUT_ENCODE, PACKED, SCALE, WEIGHT_ENCODE
from ...linear import FP4Linear
from ...tensor import FP4Tensor
from .contents import Contents, check_shard
from .linear import say_what_runs
from .parts import fp4_part, kept
from .routing import weighted_sum

Expert = tuple[LayerSpec, LayerSpec, LayerSpec]
"""Gate, up and down as the file has them."""


def expert_method(
    layer: Any, prefix: str, contents: Contents, backend: Callable[[str, str], str]
) -> FP4ExpertsMethod | None:
    """The method for a block of experts; None where none of them is FP4. Raises Refusal for what is not run."""
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    known = contents.checkpoint.layers
    # Some runners put a module between the block and its experts.
    base = prefix.removesuffix(".routed_experts")
    in_file = [contents.name_in_file(f"{base}.{i}.{n}") for i in range(layer.global_num_experts) for n in names if n]
    there = [name for name in in_file if name in known]
    if not there:
        scheme = contents.asks(in_file, torch.nn.Linear(1, 1, bias=False, device="meta"))
        if scheme is not None:
            needs = [("FP4 experts", f"unquantized ones, for which transform '{scheme}' asks")]
            raise refuse(contents.folder, "these experts are not run.", needs, "quantize them too", layer=prefix)
        return None
    problems = _problems(layer, names)
    if len(there) != len(in_file):
        missing = [name for name in in_file if name not in known]
        problems.append(("every expert in FP4", f"{len(missing)} that are not: {', '.join(missing[:3])}"))
    kinds = {(known[n].format.name, known[n].activations) for n in there}
    if len(kinds) != 1:
        problems.append(("one format for all experts", str(sorted(kinds))))
    if problems:
        raise refuse(
            contents.folder,
            "these experts are not run.",
            problems,
            "load the file with quarterturn.load, or ask for this architecture",
            layer=prefix,
        )
    specs = [contents.specs(name, [name]) for name in in_file]
    flat = [spec[0] for spec in specs if spec]
    experts = [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
    scaled = f"{in_file[0]}.{INPUT_ENCODE}" in contents.checkpoint.tensors
    return FP4ExpertsMethod(layer.moe_config, experts, prefix, backend(*kinds.pop()), scaled)


def _problems(layer: Any, names: Sequence[str | None]) -> list[tuple[str, str]]:
    """Why a block is not run, as (needed, found) pairs."""
    problems = []
    if None in names or not layer.moe_config.is_act_and_mul:
        problems.append(("experts with a gate", "experts without"))
    if not apply_moe_activation_supported(layer.activation):
        problems.append(("an activation that vLLM has a function for", str(layer.activation)))
    for word in ("swiglu_limit", "swiglu_alpha", "swiglu_beta"):
        if getattr(layer, word, None) is not None:
            problems.append((f"no {word}", str(getattr(layer, word))))
    if getattr(layer.moe_config, "has_bias", False):
        problems.append(("experts without bias", "a bias"))
    if layer.apply_router_weight_on_input:
        problems.append(("router weights on the outputs", "on the inputs"))
    return problems


class FP4ExpertsMethod(FusedMoEMethodBase):
    """Runs a block of experts; `experts` has one entry for each of the whole model's."""

    def __init__(self, moe: Any, experts: Sequence[Expert], prefix: str, backend: str, has_input_scale: bool) -> None:
        super().__init__(moe)
        self.experts, self.prefix, self.backend = list(experts), prefix, backend
        self.has_input_scale = has_input_scale

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """vLLM's own kernels are not used, so there is nothing for them."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Sizes as they are: padding would cut blocks."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Stacked parameters of vLLM's names (w13, w2), of this rank's shapes. Raises Refusal for a shard."""
        width, ranks = intermediate_size_per_partition, self.moe.moe_parallel_config.tp_size
        for gate, up, down in self.experts:
            for spec, n, k in ((gate, width, hidden_size), (up, width, hidden_size), (down, hidden_size, width)):
                check_shard(spec, n, k, ranks, row_parallel=spec is down)
        fmt, kind = self.experts[0][0].format, FusedMoeWeightScaleSupported
        for stem, n, k, shards in (("w13", 2 * width, hidden_size, (2,)), ("w2", hidden_size, width, ())):
            codes = torch.zeros((num_experts, *fmt.codes_shape(n, k)), dtype=torch.uint8)
            self._register(layer, f"{stem}_{PACKED}", codes, None, extra_weight_attrs)
            scale = torch.zeros((num_experts, *fmt.scale_shape(n, k)), dtype=torch.uint8).view(fmt.scale_dtype)
            self._register(layer, f"{stem}_{SCALE}", scale, kind.GROUP.value, extra_weight_attrs)
            names = (WEIGHT_ENCODE,) if fmt.has_tensor_scale else ()
            for name in names + ((INPUT_ENCODE,) if self.has_input_scale else ()):
                ones = torch.ones((num_experts, *shards), dtype=torch.float32)
                self._register(layer, f"{stem}_{name}", ones, kind.TENSOR.value, extra_weight_attrs)
        self._width, self._dtype = width, params_dtype

    def _register(self, layer: Any, name: str, data: Tensor, kind: str | None, attributes: dict[str, Any]) -> None:
        parameter = torch.nn.Parameter(data, requires_grad=False)
        layer.register_parameter(name, parameter)
        set_weight_attrs(parameter, attributes | ({} if kind is None else {"quant_method": kind}))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the FP4Linears of loaded weights, or, when vLLM reloads, what they derive from the new ones."""
        local = self._local_experts(layer)
        fresh = [part for i, expert in enumerate(local) for part in self._parts(layer, i, expert)]
        codes = getattr(layer, f"w13_{PACKED}")
        layer.fp4_parts = kept(layer.__dict__.get("fp4_parts"), fresh, codes, self.prefix)
        say_what_runs(layer.fp4_parts)
        gate_up = [2 if self._split(expert, layer, i) else 1 for i, expert in enumerate(local)]
        ends = [sum(gate_up[: i + 1]) + i + 1 for i in range(len(local))]
        layer.fp4_experts = [
            (layer.fp4_parts[end - 1 - count : end - 1], layer.fp4_parts[end - 1])
            for end, count in zip(ends, gate_up, strict=True)
        ]

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x (T, H), weights and ids (T, top_k) -> (T, H) of x.dtype: the weighted sum of the local experts."""
        if torch.compiler.is_compiling():
            return OPERATOR(x, topk_weights, topk_ids, layer.layer_name)
        return self.loop(layer, x, topk_weights, topk_ids)

    def loop(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """What `apply` gives, without being traced."""
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        experts = [partial(_expert, gate_up, down, layer.activation) for gate_up, down in layer.fp4_experts]
        return weighted_sum(experts, x, topk_weights, ids, dense=capturing(x))

    def _local_experts(self, layer: Any) -> list[Expert]:
        """The experts of this rank, in the order of its tensors."""
        if layer.expert_map is None:
            return self.experts
        slots = layer.expert_map.tolist()
        return [self.experts[slots.index(i)] for i in range(layer.local_num_experts)]

    def _split(self, expert: Expert, layer: Any, i: int) -> bool:
        """Whether gate and up quantize their input differently, so that they run one after the other."""
        gate, up, _ = expert
        scales = getattr(layer, f"w13_{INPUT_ENCODE}")[i].tolist() if self.has_input_scale else [0, 0]
        same_scale = scales[0] == scales[1] or gate.activations != "fp4"
        return not (
            same_scale and gate.input_transform is up.input_transform and gate.output_transform is up.output_transform
        )

    def _parts(self, layer: Any, i: int, expert: Expert) -> list[FP4Linear]:
        gate, up, down = expert
        width, half = self._width, slice(0, self._width)
        if not self._split(expert, layer, i):
            first = [self._part(layer, "w13", i, gate, slice(0, 2 * width), slice(0, 2))]
        else:
            rows = slice(width, 2 * width)
            first = [
                self._part(layer, "w13", i, gate, half, slice(0, 1)),
                self._part(layer, "w13", i, up, rows, slice(1, 2)),
            ]
        return [*first, self._part(layer, "w2", i, down, slice(None), None)]

    def _part(self, layer: Any, stem: str, i: int, spec: LayerSpec, rows: slice, shards: slice | None) -> FP4Linear:
        def scale(name: str, present: bool) -> Tensor | None:
            stored = getattr(layer, f"{stem}_{name}").data[i].reshape(-1) if present else None
            return stored if stored is None or shards is None else stored[shards]

        codes, block_scale = getattr(layer, f"{stem}_{PACKED}").data[i], getattr(layer, f"{stem}_{SCALE}").data[i]
        encode = scale(WEIGHT_ENCODE, spec.format.has_tensor_scale)
        sizes = (self._width,) * 2 if shards == slice(0, 2) else None
        weight = FP4Tensor.from_encode(codes[rows], block_scale[rows], encode, spec.format, sizes)
        given = scale(INPUT_ENCODE, self.has_input_scale)
        given = None if given is None else given[:1]
        return fp4_part(spec, weight, given, None, backend=self.backend, dtype=self._dtype, name=spec.name)


def capturing(x: Tensor) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _expert(gate_up: Sequence[FP4Linear], down: FP4Linear, activation: Any, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x)), x (T, H) -> (T, H); the activation is vLLM's."""
    both = gate_up[0](x) if len(gate_up) == 1 else torch.cat([part(x) for part in gate_up], dim=-1)
    hidden = both.new_empty(both.shape[0], both.shape[1] // 2)
    apply_moe_activation(activation, hidden, both)
    return down(hidden)


def _run(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, name: str) -> Tensor:
    """The operator: layers are known by vLLM's names, since graphs are kept in files that outlive a process."""
    layer = get_forward_context().no_compile_layers[name].routed_experts
    method = layer.quant_method
    assert isinstance(method, FP4ExpertsMethod), f"{name} is run by {type(method).__name__}"
    return method.loop(layer, x, topk_weights, topk_ids)


def _like(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


_library = torch.library.Library("quarterturn", "FRAGMENT")
_library.define("vllm_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, str name) -> Tensor")
_library.impl("vllm_experts", _run, "CompositeExplicitAutograd")
torch.library.register_fake("quarterturn::vllm_experts", _like, lib=_library)
OPERATOR = torch.ops.quarterturn.vllm_experts
