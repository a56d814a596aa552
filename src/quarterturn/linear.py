"""FP4Linear: buffers, and how it runs by what it has decided (plan.py), or by one op call where torch looks on.

y = (x V) W'^T * scales + b', turned by U where there is an output transform. The buffers are what a checkpoint holds
(codes, block scales, encode scales) and what is derived from them (tensor scales, transform matrices in fp32, decoded
values); the derived ones are never saved and are made again whenever the others change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .absent_weight import AbsentWeight
from .backends import Blocks, Layer, Problem, Quantizer, Selection, Weight, compose, get_backend, select
from .eager import seen_by_torch
from .errors import refusal
from .explanation import Explanation, arithmetic, kept
from .formats import E8M0_RULES, RECIPES, FP4Format, get_format
from .fused import Part
from .plan import Decided, LayerPlan, Stamp, in_place_of
from .sharing import Siblings
from .stored_weight import STORED, StoredWeight, input_scale, refuse_misfits
from .tensor import FP4Tensor
from .transforms import Transform

ACTIVATIONS = ("fp4", "bf16")
WEIGHTS = ("auto", "packed", "decoded")
_CHOICES = {"activations": ACTIVATIONS, "recipe": RECIPES, "rule": E8M0_RULES, "weights": WEIGHTS}


class FP4Linear(StoredWeight):
    """A linear layer with 4-bit float weights behind optional block-diagonal transforms. Inference only.

    x (..., in_features) bf16, fp16 or fp32 -> (..., out_features) of x.dtype; contiguous, but of siblings that are one
    product on a GPU (fused.py), whose results are slices of one.
    activations: 'fp4' quantizes x to `format` (W4A4); 'bf16' leaves it as it is (W4A16).
    output_sizes: row counts of the parts of a fused layer, each with a tensor scale of its own; default one part.
    backend: 'auto', or a name of backends.BACKENDS, which is then run or refused.
    weights: 'packed' keeps 4.5 bits a value, 'decoded' keeps bf16 values beside them; 'auto' leaves it to the backend.
    batch_invariant: a row's result has the same bits whatever rows are beside it; by a backend that can, or refused.
    keep_codes: keep codes and block scales beside fragments made of them, where somebody else's memory they are.
    Buffers: codes uint8 (N, K/2), block_scale (N, K/group), encode_scale fp32 (P,), input_encode_scale fp32 (1,); a
    parameter bias (N,). The first two are let go where fragments hold them: stored_weight.py. Raises Refusal for sizes
    that do not fit.
    """

    bias: nn.Parameter | None
    input_encode_scale: Tensor | None
    tensor_scale: Tensor | None
    input_matrix: Tensor | None
    output_matrix: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        format: str | FP4Format,
        activations: str = "fp4",
        bias: bool = False,
        input_transform: Transform | None = None,
        output_transform: Transform | None = None,
        rule: str = "even",
        recipe: str = "checkpoint",
        output_sizes: tuple[int, ...] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
        weights: str = "auto",
        batch_invariant: bool = False,
        keep_codes: bool = False,
        name: str = "",
    ) -> None:
        super().__init__()
        fmt = get_format(format)
        self.name = name
        self.in_features, self.out_features = in_features, out_features
        self.format, self.activations, self.rule, self.recipe = fmt, activations, rule, recipe
        self.input_transform, self.output_transform = input_transform, output_transform
        self.output_sizes = tuple(output_sizes or (out_features,))
        self.requested_backend, self.weights, self.batch_invariant = backend, weights, batch_invariant
        self.keep_codes = keep_codes
        self._check_arguments()
        if backend != "auto":
            get_backend(backend, name or None)
        parts = len(self.output_sizes)
        self.register_buffer(
            "codes", torch.empty(fmt.codes_shape(out_features, in_features), dtype=torch.uint8, device=device)
        )
        self.register_buffer(
            "block_scale", torch.empty(fmt.scale_shape(out_features, in_features), dtype=fmt.scale_dtype, device=device)
        )
        scaled = fmt.has_tensor_scale
        one_scale = scaled and activations == "fp4" and recipe == "checkpoint"
        encode = torch.ones(parts, dtype=torch.float32, device=device) if scaled else None
        input_encode = torch.ones(1, dtype=torch.float32, device=device) if one_scale else None
        self.register_buffer("encode_scale", encode)
        self.register_buffer("input_encode_scale", input_encode)
        empty_bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype), False) if bias else None
        self.register_parameter("bias", empty_bias)
        for derived in ("tensor_scale", "values", "input_matrix", "output_matrix"):
            self.register_buffer(derived, None, persistent=False)
        self._decided: Decided | None = None
        self.siblings: Siblings | None = None
        self.part = None
        self.register_load_state_dict_post_hook(_refresh)

    @classmethod
    def from_tensor(
        cls,
        weight: FP4Tensor,
        *,
        bias: Tensor | None = None,
        input_encode_scale: Tensor | float | None = None,
        **options: Any,
    ) -> FP4Linear:
        """A layer that holds this weight, no copy but where it makes fragments of it, bias (N,) and input encode scale;
        options as in __init__."""
        refuse_misfits(options.get("name", ""), weight.misfits())
        n, k = weight.shape
        ranges = weight.output_sizes
        layer = cls(k, n, format=weight.format, bias=bias is not None, output_sizes=ranges, device="meta", **options)
        layer.codes, layer.block_scale = weight.codes, weight.linear_block_scale()
        if layer.encode_scale is not None:
            stored = weight.encode_scale
            layer.encode_scale = weight.tensor_scale.reciprocal() if stored is None else stored
        if layer.input_encode_scale is not None:
            if input_encode_scale is None:
                raise refusal(
                    "fp4_linear",
                    "W4A4 with the recipe 'checkpoint' needs an input scale.",
                    layer=layer.name,
                    needs=[("input_encode_scale", "none")],
                    do="pass it, or take recipe='token' or activations='bf16'",
                )
            layer.input_encode_scale = input_scale(input_encode_scale, layer.name, weight.device)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach(), False)
        return layer.refresh()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features) of x.dtype. Raises Refusal for other shapes and dtypes."""
        if torch.compiler.is_compiling():
            return ops.FP4_LINEAR(x, *self._operands())
        plan = self.current_plan(x.dtype)
        if plan is None:
            plan = self._decide(x.dtype)
        if plan is None or seen_by_torch(x):
            return ops.FP4_LINEAR(x, *self._operands())
        plan.check(x)
        return plan.run(x) if self.siblings is None else self.siblings.run(x, plan)

    def current_plan(self, dtype: torch.dtype) -> LayerPlan | None:
        """How inputs of a dtype are run; None where that is to be made (again) by `refresh`."""
        found = self._decided
        if found is None or found.dtype is not dtype or not found.holds(self, self._choices()):
            return None
        return found.plan

    def _choices(self) -> tuple[Any, ...]:
        return self.activations, self.requested_backend, self.weights, self.batch_invariant

    def take(self, part: Part) -> LayerPlan:
        """Hold the weight as a part of what siblings hold together -> the plan by which this layer is then run."""
        decided = self._decided
        assert decided is not None
        self.part, self.values = part, part.whole.data
        plan = LayerPlan(decided.selection.backend, self.made_layer(), self.in_features, decided.dtype)
        self._decided = decided._replace(plan=plan)
        return plan

    def made_layer(self) -> Layer:
        """All that the layer is beside its input, as backends take it."""
        assert self.tensor_scale is not None
        packed = self.values is None
        weight = Weight(
            self.codes if self.values is None else self.values,
            self.block_scale.view(torch.uint8) if packed else None,
            self.tensor_scale,
            self.output_sizes,
            self.format,
        )
        if self.part is not None:
            weight = self.part.whole.weight(self.part.rows)
        quantizer = Quantizer(self.format, self.input_encode_scale, self.recipe, self.rule)
        return Layer(
            weight,
            self.bias,
            _blocks(self.input_transform, self.input_matrix),
            _blocks(self.output_transform, self.output_matrix),
            quantizer if self.activations == "fp4" else None,
            self.batch_invariant,
            self.name,
        )

    def _operands(self) -> tuple[Any, ...]:
        """The arguments of the op behind x."""
        first, last, decided = self.input_transform, self.output_transform, self._decided
        if decided is None:
            raise refusal(
                "fp4_linear",
                "the layer has no weights yet.",
                layer=self.name or None,
                needs=[("buffers with weights", f"buffers on {self.device}")],
                do="load a state dict, or call refresh() after filling the buffers",
            )
        part, matrix, encode_scale = self.part, self.input_matrix, self.input_encode_scale
        of_rows: tuple[Any, ...]
        if part is None:
            packed = self.values is None
            weight = self.codes if packed else self.values
            scale = self.block_scale.view(torch.uint8) if packed else None
            of_rows = (weight, scale, self.tensor_scale, self.output_sizes, self.bias)
        else:
            whole = part.whole
            of_rows = (whole.data, None, whole.tensor_scale, whole.sizes, whole.bias)
            if whole.agree:  # so that the calls of siblings differ in their rows alone: see compiled.py
                matrix, encode_scale = whole.matrix, whole.encode_scale
        return (
            *of_rows,
            self.format.name,
            matrix,
            first.factor if first else 1.0,
            first.transpose if first else False,
            self.output_matrix,
            last.factor if last else 1.0,
            last.transpose if last else False,
            self.activations == "fp4",
            encode_scale,
            self.recipe,
            self.rule,
            decided.selection.name,
            None if part is None else part.rows,
            self.batch_invariant,
        )

    def refresh(self, dtype: torch.dtype | None = None) -> FP4Linear:
        """Choose the backend and make the derived buffers again from the stored ones.

        dtype: of the inputs to come, default the bias's or bf16. forward calls it by itself after `load_state_dict`,
        `.to`, an in-place write to a buffer, or an input of another dtype. Call it yourself after writing through
        `.data` or to tensors made in inference mode where weights are decoded or on a GPU, which leaves no trace, and
        after writing to the buffers of a model that is compiled. Does nothing on the meta device.
        """
        self._decide(dtype or (torch.bfloat16 if self.bias is None else self.bias.dtype), anew=True)
        return self

    def _decide(self, dtype: torch.dtype, anew: bool = False) -> LayerPlan | None:
        """The plan for inputs of a dtype, made again; the derived buffers too, but where only the dtype is another."""
        if not self.is_filled:
            return None
        selection, before = self._select(dtype), None if anew else self._decided
        same = before is not None and before.selection.name == selection.name and before.holds(self, self._choices())
        if before is not None and before.plan is not None and same:
            stamp, layer = before.stamp, before.plan.layer
        else:
            stamp, layer = self._derive(selection), self.made_layer()
        plan = None if stamp is None else LayerPlan(selection.backend, layer, self.in_features, dtype)
        self._decided = Decided(selection, dtype, stamp, plan)
        if self.siblings is not None:
            self.siblings.changed()
        return plan

    def _derive(self, selection: Selection) -> Stamp | None:
        """Make the derived buffers; what they were made from, None for tensors that are not looked into."""
        device, choices = self.device, self._choices()
        # Tensors of inference mode could not be written to later.
        with torch.inference_mode(False), torch.no_grad():
            self.input_matrix = self.input_transform.operand(device) if self.input_transform else None
            self.output_matrix = self.output_transform.operand(device) if self.output_transform else None
            # Before anything is read: what changes while this runs must be seen by the next call.
            stamp = Stamp(self, choices) if type(self._buffers["codes"]) in (Tensor, type(None)) else None
            weight = self.weight_tensor()
            self.check_held(weight)
            self.tensor_scale = in_place_of(self.tensor_scale, weight.tensor_scale)
            values = selection.backend.prepare(weight, "packed" if self.batch_invariant else self.weights)
            if self.part is not None and self.part.write(values, weight, self.bias):
                self.values = self.part.whole.data
                self.part.whole.settle()
            else:
                self.part, self.values = None, in_place_of(self.values, values)
        return self._let_go(weight, stamp, choices)

    def explain(self, dtype: torch.dtype | None = None) -> Explanation:
        """What runs this layer, and why; for inputs of a dtype, default those it has met or expects.

        Raises BackendRefusal where nothing runs it.
        """
        known = self._decided if self._decided and dtype in (None, self._decided.dtype) else None
        dtype = dtype or torch.bfloat16
        selection = known.selection if known else self._select(dtype)
        told = compose.remark(selection.backend, self.weight_tensor, self.values) if known else ""
        words, why = arithmetic(self.problem(dtype)), selection.reason + told
        return Explanation(self.name, selection.name, words, why, selection.rejected, kept(self.values))

    def problem(self, dtype: torch.dtype) -> Problem:
        """What this layer asks of a backend."""
        first, last = self.input_transform, self.output_transform
        return Problem(
            self.format,
            self.activations,
            dtype,
            self.out_features,
            self.in_features,
            first.size if first else None,
            last.size if last else None,
            self.bias is not None,
            self.rule,
            self.recipe,
            batch_invariant=self.batch_invariant,
        )

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, format={self.format.name}"
        text += f", activations={self.activations}, bias={self.bias is not None}"
        sides = (("input", self.input_transform), ("output", self.output_transform))
        return text + "".join(f", {side}_transform={transform}" for side, transform in sides if transform)

    def _select(self, dtype: torch.dtype) -> Selection:
        return select(self.problem(dtype), self.device, self.requested_backend, layer=self.name or None)

    def _check_arguments(self) -> None:
        needs = self.wrong_sizes()
        for word, known in _CHOICES.items():
            if (value := getattr(self, word)) not in known:
                needs.append((f"{word} one of {', '.join(known)}", repr(value)))
        if self.batch_invariant and self.weights == "decoded":
            needs.append(("weights 'auto' or 'packed' for batch_invariant", "'decoded'"))
        if needs:
            raise refusal(
                "fp4_linear", "this layer cannot be built.", layer=self.name or None, needs=needs,
                do="change the named argument",
            )  # fmt: skip

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP4Linear:
        """`.to`, `.half` and the like: devices change, the dtypes of codes and scales never do."""
        bias = self.bias
        self.take_back()
        if self.part is not None:  # what siblings hold together does not move with one of them
            self.values = None

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if t is bias or moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(keep_dtype, recurse)
        if not self.wrong_scales():
            return self.refresh()
        self._decided = None  # as to_empty leaves it: the next call refuses what is not filled by then
        return self

    def __getstate__(self) -> dict[str, Any]:
        # What is derived is made again in the copy; and pickle does not know float8 tensors, so their bytes go.
        held = {**self._buffers, **dict(zip(STORED, self._stored(), strict=True))}.items()
        buffers = {name: t if t is None or t.element_size() > 1 else t.view(torch.uint8) for name, t in held}
        if self.part is not None or self._buffers["codes"] is None:
            buffers["values"] = None
        return {**self.__dict__, "_buffers": buffers, "_decided": None, "part": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.block_scale = self.block_scale.view(self.format.scale_dtype)
        if self.siblings is not None:
            self.siblings.join(self)
        self.refresh()

    @property
    def weight(self) -> AbsentWeight:
        """Not the weight, but its dtype, device and shape for models whose code asks; its values are refused."""
        dtype = self._decided.dtype if self._decided is not None else torch.bfloat16
        return AbsentWeight(self.name, dtype, self.device, (self.out_features, self.in_features))


def _blocks(transform: Transform | None, matrix: Tensor | None) -> Blocks | None:
    return None if transform is None or matrix is None else Blocks(matrix, transform.factor, transform.transpose)


def _refresh(layer: nn.Module, _: object) -> None:
    assert isinstance(layer, FP4Linear)
    layer.refresh()
