"""Which layers of a model are quantized, which share a tensor scale, and which transform each gets.

Names match as in compressed-tensors: a class name ('Linear'), a full module name, or 're:' and a pattern. Three kinds
of layers stay out unless they are targeted by their full name: the output embeddings (tied or not), routers, and the
1-row gate of a shared expert. They are few values that decide much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import Refusal, missing_package, refusal
from ..formats import FP4Format
from ..integrations.experts import expert_names, fused_experts
from ..transforms import Transform, hadamard, matrix, random_hadamard

FUSED_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Children of one parent that read the same input and that engines fuse into one product."""

_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass
class Selection:
    """The layers to quantize, in model order, and what was left out although a target matched."""

    layers: dict[str, nn.Linear]
    notes: list[str] = field(default_factory=list)
    replaced: dict[str, nn.Module] = field(default_factory=dict)
    settled: bool = False

    def settle(self) -> None:
        """From here on the model changes for good: what it was before is dropped."""
        self.settled = True
        self.replaced.clear()


def select_layers(
    model: nn.Module, format: FP4Format, targets: Sequence[str] = ("Linear",), ignore: Sequence[str] = ("lm_head",)
) -> Selection:
    """The Linear layers that `targets` match and `ignore` does not.

    Raises Refusal where nothing matches, where one of `targets` or `ignore` matches nothing at all, where a match is no
    plain Linear layer, and where the group size does not divide a layer's input.
    """
    match = layer_matcher()
    _check_entries(model, targets, ignore)
    heads = {id(m) for m in (_embeddings(model, "output"), _embeddings(model, "input")) if m is not None}
    selection = Selection({})
    for name, module in model.named_modules():
        if not name or not match(name, module, targets, ignore):
            continue
        if name not in targets and id(module) in heads:
            selection.notes.append(f"{name}: the output embeddings stay as they are")
        elif name not in targets and name.rsplit(".", 1)[-1] in _ROUTERS:
            selection.notes.append(f"{name}: a router stays as it is")
        else:
            selection.layers[name] = _checked_layer(name, module, format, model)
    if not selection.layers:
        raise refusal(
            "quantize",
            "no layer is left to quantize.",
            needs=[(f"Linear layers that match {list(targets)} and not {list(ignore)}", "none")],
            do="name other targets, or ignore less",
        )
    return selection


def _check_entries(model: nn.Module, targets: Sequence[str], ignore: Sequence[str]) -> None:
    """An entry without effect is a slip of the pen: the layers it was meant for would get the wrong treatment."""
    match, modules = layer_matcher(), [(name, module) for name, module in model.named_modules() if name]
    # Experts that stay fused: each could be meant by the name it has in the files.
    layer, parts = nn.Linear(1, 1, bias=False, device=torch.device("meta")), expert_names(model)
    for name, experts in fused_experts(model):
        count = max((p.shape[0] for p in experts.parameters(recurse=False) if p.dim() == 3), default=1)
        modules += [(f"{name}.{i}.{part}", layer) for i in range(count) for part in parts]
    for kind, entries, usual in (("targets", targets, "Linear"), ("ignore", ignore, "lm_head")):
        for entry in entries:
            if entry == usual or any(match(name, module, [entry], []) for name, module in modules):
                continue
            tail = entry.removeprefix("re:").lstrip(".*^").rstrip("$") or "down_proj"
            raise refusal(
                "quantize",
                f"an entry of {kind} matches nothing in this model.",
                needs=[("a class name, a full module name, or 're:' and a pattern from its start", repr(entry))],
                do=f"write something like 're:.*{tail}$', or leave the entry out",
            )


def layer_matcher() -> Callable[[str, nn.Module, Sequence[str], Sequence[str]], bool]:
    try:
        from compressed_tensors.utils.match import is_match
    except ImportError:
        raise missing_package("quantize", "compressed-tensors", "pip install 'compressed-tensors>=0.17'") from None
    return is_match


def _embeddings(model: nn.Module, side: str) -> nn.Module | None:
    getter = getattr(model, f"get_{side}_embeddings", None)
    try:
        return getter() if getter else None
    except (NotImplementedError, AttributeError):
        return None


def _checked_layer(name: str, module: nn.Module, format: FP4Format, model: nn.Module) -> nn.Linear:
    embedding = _embeddings(model, "input")
    if type(module) is not nn.Linear:
        raise refusal(
            "quantize",
            "this module is not a plain Linear layer.",
            layer=name,
            needs=[("torch.nn.Linear", type(module).__name__)],
            do="put it into ignore",
        )
    if embedding is not None and getattr(embedding, "weight", None) is module.weight:
        raise refusal(
            "quantize",
            "this layer shares its weight with the input embeddings.",
            layer=name,
            needs=[("a weight of its own", "tied embeddings")],
            do="put it into ignore",
        )
    if module.weight.device.type == "meta":
        raise refusal(
            "quantize",
            "the weight is not in memory.",
            layer=name,
            needs=[("a weight on a CPU or GPU", "the meta device (offloaded, or never loaded)")],
            do="load the model without offloading",
        )
    if module.in_features % format.group_size:
        raise refusal(
            "quantize",
            f"{format.name} does not divide the input of this layer into groups.",
            layer=name,
            needs=[(f"an input that is a multiple of {format.group_size}", str(module.in_features))],
            do="put the layer into ignore",
        )
    return module


def shared_groups(names: Iterable[str]) -> list[list[str]]:
    """Split names into the groups that share one tensor scale; most groups hold one name."""
    kinds = {suffix: kind for kind in FUSED_NAMES for suffix in kind}
    groups: dict[tuple[str, object], list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        groups.setdefault((parent, kinds.get(last, last)), []).append(name)
    return list(groups.values())


def expert_siblings(name: str, names: Iterable[str]) -> list[str]:
    """The layers with the same place in other experts of the same block; empty for a layer outside experts."""
    pattern = re.sub(r"(\.experts\.)\d+(\.)", r"\1<n>\2", name)
    if pattern == name:
        return []
    wanted = re.compile(re.escape(pattern).replace("<n>", r"\d+"))
    return [other for other in names if other != name and wanted.fullmatch(other)]


TransformLike = str | Tensor | Transform | None


def plan_transforms(
    spec: TransformLike, layers: Mapping[str, nn.Linear], format: FP4Format, seed: int = 0
) -> dict[str, Transform | None]:
    """The input transform of each layer.

    spec: None, 'hadamard[:R]', 'random-hadamard[:R]' (R a number, or 'full' for the width of each layer; left out, the
    format's group size), an invertible (R, R) matrix, or a Transform. One matrix per size is shared by all layers.
    Raises Refusal where R does not divide a layer's input, naming the sizes that divide every one.
    """
    if spec is None or (isinstance(spec, str) and spec == "none"):
        return dict.fromkeys(layers)
    if isinstance(spec, str):
        maker, size = _parse(spec, format, seed)
    else:
        given = canonical(spec if isinstance(spec, Transform) else matrix(spec))
        maker, size = (lambda _: given), given.size
    made: dict[int, Transform] = {}
    plan: dict[str, Transform | None] = {}
    for name, layer in layers.items():
        width = size or layer.in_features
        if layer.in_features % width:
            raise _bad_size(name, layer.in_features, width, layers)
        if width not in made:
            made[width] = _make(maker, width, name, layers)
        plan[name] = made[width]
    return plan


def canonical(transform: Transform) -> Transform:
    """The same transform in the form that a file holds: +-1 Hadamards as they are, any other as its full matrix V.

    Raises Refusal for a matrix that has no inverse.
    """
    transform.weight_matrix()
    if is_hadamard(transform):
        return transform
    return Transform(transform.activation_matrix().contiguous())


def is_hadamard(transform: Transform) -> bool:
    """Whether the matrix is +-1 with orthogonal rows and the factor is 1/sqrt(R): what files call a hadamard."""
    m, size = transform.matrix, transform.size
    if not transform.is_signed or transform.factor != 1 / size**0.5:
        return False
    return torch.equal(m @ m.T, size * torch.eye(size, dtype=m.dtype, device=m.device))


def full_name(spec: str, format: FP4Format) -> str:
    """A named transform with its size written out: 'hadamard' of NVFP4 is 'hadamard:16'. Raises Refusal as above."""
    if spec == "none":
        return spec
    _, size = _parse(spec, format, 0)
    return f"{spec.partition(':')[0]}:{'full' if size is None else size}"


def _parse(spec: str, format: FP4Format, seed: int) -> tuple[Callable[[int], Transform], int | None]:
    kind, _, text = spec.partition(":")
    makers = {"hadamard": hadamard, "random-hadamard": lambda size: random_hadamard(size, seed)}
    if kind in makers and text in ("", "full"):
        return makers[kind], (None if text == "full" else format.group_size)
    if kind in makers and text.isdecimal() and int(text) > 0:
        return makers[kind], int(text)
    raise refusal(
        "quantize",
        "there is no such transform.",
        needs=[("None, 'hadamard:R' or 'random-hadamard:R' (R a number or 'full'), a matrix, a Transform", repr(spec))],
        do="name one of them",
    )


def _make(maker: Callable[[int], Transform], width: int, name: str, layers: Mapping[str, nn.Linear]) -> Transform:
    try:
        return maker(width)
    except Refusal as error:
        raise refusal(
            "quantize",
            "the transform of this layer cannot be built.",
            layer=name,
            needs=[("an order that has a Hadamard matrix", str(error).splitlines()[0])],
            do=f"take one of the sizes {_fitting(layers)}, or give a matrix of your own",
        ) from error


def _bad_size(name: str, width: int, size: int, layers: Mapping[str, nn.Linear]) -> Refusal:
    fitting = _fitting(layers)
    remedy = f"take one of the sizes {fitting}, which divide every layer" if fitting else "ignore this layer"
    return refusal(
        "quantize",
        f"a transform of size {size} does not fit this layer.",
        layer=name,
        needs=[(f"a transform size that divides the input of {width}", str(size))],
        do=remedy + "; or put layers into ignore",
    )


def _fitting(layers: Mapping[str, nn.Linear]) -> list[int]:
    """The powers of two that divide the input of every layer: all of them have a Hadamard matrix."""
    widths = [layer.in_features for layer in layers.values()]
    return [size for size in (1 << i for i in range(1, 13)) if all(w % size == 0 for w in widths)]
