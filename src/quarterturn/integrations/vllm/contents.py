"""A checkpoint by the names that vLLM gives its modules, and what a tensor-parallel shard of a layer can hold.

vLLM fuses layers (q/k/v, gate/up) and can name modules otherwise than the file does; a layer of its is here a list of
the file's layers. No vLLM in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...checkpoint import Checkpoint, LayerSpec, open_checkpoint
from ...checkpoint.config import Group, chosen_group, matches
from ...checkpoint.files import read_header, refuse
from ...errors import CheckpointRefusal, refusal
from ...transforms import Transform
from .first_load import FirstLoad


class Contents:
    """An opened checkpoint. Opened when first asked, in each process: only its folder is pickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: Checkpoint | None = None
        self._first: FirstLoad | None = None
        self._transforms: list[Transform] = []
        self._rename: Callable[[str], str | None] = str
        self._in_file: dict[str, str] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Path]) -> None:
        Contents.__init__(self, state["folder"])

    @property
    def checkpoint(self) -> Checkpoint:
        """The file. Raises CheckpointRefusal for what is not run."""
        if self._opened is None:
            self._opened = open_checkpoint(self.folder, others=True)
            self._first = FirstLoad(self._opened)
        return self._opened

    @property
    def first_load(self) -> FirstLoad:
        """What weights that are loaded later have to fit. Raises CheckpointRefusal as `checkpoint` does."""
        self.checkpoint  # noqa: B018
        assert self._first is not None
        return self._first

    def rename(self, to_vllm: Callable[[str], str | None]) -> None:
        """Take names from now on as vLLM has them: a function of the file's name, None for what is not loaded."""
        self._rename, self._in_file = to_vllm, None

    def name_in_file(self, name: str) -> str:
        """The file's name of a module that vLLM calls `name`."""
        if self._in_file is None:
            modules = {tensor.rpartition(".")[0] for tensor in self.checkpoint.tensors}
            pairs = [(self._rename(module), module) for module in modules if module]
            self._in_file = {mapped: module for mapped, module in pairs if mapped is not None}
        return self._in_file.get(name, name)

    def parts(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
        """The file's names of the layers that vLLM has as one module; `fused` is its packed_modules_mapping."""
        parent, _, own = prefix.rpartition(".")
        names = [f"{parent}.{part}" if parent else part for part in fused.get(own, (own,))]
        found = [self.name_in_file(name) for name in names]
        whole = self.name_in_file(prefix)
        # Phi-3 and its like are fused in the file too.
        return [whole] if whole in self.checkpoint.layers else found

    def specs(self, prefix: str, names: Sequence[str]) -> list[LayerSpec] | None:
        """What the file says of a module's parts; None where none is FP4. Raises CheckpointRefusal for a mixture."""
        layers = self.checkpoint.layers
        there = [name for name in names if name in layers]
        if not there:
            self._check_unquantized(prefix, names)
            return None
        formats = {layers[name].format.name for name in there}
        if len(there) != len(names) or len(formats) != 1:
            others = [f"{name}: not FP4" for name in names if name not in layers]
            raise refuse(
                self.folder,
                "layers that vLLM fuses are not quantized alike.",
                [("all of them in one format", "; ".join([f"{n}: {layers[n].format.name}" for n in there] + others))],
                "quantize all of them alike, or load the file with quarterturn.load",
                layer=prefix,
            )
        return [self._interned(layers[name]) for name in names]

    def transforms_of(
        self, prefix: str, names: Sequence[str], module: torch.nn.Module, n: int, k: int
    ) -> tuple[Transform | None, Transform | None]:
        """Input and output transform that the config asks of a module that is not FP4."""
        found = [self.checkpoint.online_transforms(name, module, n, k)[:2] for name in names]
        pairs = [tuple(self.intern(t) for t in pair) for pair in found]
        if any(pair != pairs[0] for pair in pairs):
            raise refuse(
                self.folder,
                "layers that vLLM fuses have different online transforms, and are not FP4.",
                [("the same for all", ", ".join(names))],
                "quantize these layers too, or take them out of the transform",
                layer=prefix,
            )
        return pairs[0][0], pairs[0][1]

    def asks(self, names: Iterable[str], module: torch.nn.Module) -> str | None:
        """The online scheme that asks for a module, if any."""
        for scheme in self.checkpoint.quant.schemes:
            for apply in scheme.apply:
                if any(matches(name, module, apply.targets, apply.ignore) for name in names):
                    return scheme.name
        return None

    def stray_tensors(self) -> dict[str, str]:
        """Tensors of safetensors files in the folder that are not the model's, and their file: vLLM reads them all."""
        known = self.checkpoint.tensors
        files = {info.file for info in known.values()}
        beside = [file for file in sorted(self.folder.glob("*.safetensors")) if file not in files]
        return {name: file.name for file in beside for name in read_header(file) if name not in known}

    def _check_unquantized(self, prefix: str, names: Sequence[str]) -> None:
        quant, stand_in = self.checkpoint.quant, torch.nn.Linear(1, 1, bias=False, device="meta")
        for name in names:
            if quant.ignore and matches(name, stand_in, quant.ignore):
                continue
            if isinstance(chosen_group((*quant.groups, *quant.others), name, stand_in), Group):
                raise refuse(
                    self.folder,
                    "config and tensors disagree.",
                    [("packed weights (a group targets this layer)", f"no {name}.weight_packed")],
                    "put the layer into ignore, or quantize it",
                    layer=prefix,
                )

    def _interned(self, spec: LayerSpec) -> LayerSpec:
        first, last = self.intern(spec.input_transform), self.intern(spec.output_transform)
        return replace(spec, input_transform=first, output_transform=last)

    def intern(self, transform: Transform | None) -> Transform | None:
        """One object, and so one matrix on the device, for all layers with equal transforms."""
        if transform is None:
            return None
        for known in self._transforms:
            if same_transform(known, transform):
                return known
        self._transforms.append(transform)
        return transform


def same_transform(a: Transform, b: Transform) -> bool:
    """Whether two transforms do the same, bit for bit."""
    return (a.factor, a.transpose, a.size) == (b.factor, b.transpose, b.size) and torch.equal(a.matrix, b.matrix)


def check_shard(spec: LayerSpec, n: int, k: int, ranks: int, *, row_parallel: bool, label: str | None = None) -> None:
    """Refuse a shard (n, k) of a layer that cuts a group of values or a block of a transform in two.

    ranks: how many shards there are. A block-diagonal transform acts on each shard alone as long as blocks are whole.
    """
    needs = []
    if k % spec.format.group_size:
        needs.append(
            (f"a shard of K that is whole groups of {spec.format.group_size} ({spec.format.name})", f"K = {k}")
        )
    for side, transform, width in (("input", spec.input_transform, k), ("output", spec.output_transform, n)):
        if transform is not None and width % transform.size:
            found = f"{width} of {spec.k if side == 'input' else spec.n}"
            needs.append((f"a shard of the {side} that is whole blocks of its transform, {transform.size}", found))
    if needs:
        kind = "row" if row_parallel else "column"
        raise refusal(
            "vllm",
            f"tensor parallelism over {ranks} cuts this layer where it cannot be cut ({kind}-parallel).",
            layer=label or spec.name,
            needs=needs,
            do=f"use a smaller tensor-parallel size than {ranks} that leaves blocks whole, or pipeline parallelism",
            kind=CheckpointRefusal,
        )
