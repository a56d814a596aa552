"""Compile a Triton or Gluon kernel for a GPU that is not here, and read what the compiler made of it.

    built = compile_kernel(copy, {"x": "*bf16", "y": "*bf16", "n": "i32"}, {"BLOCK": 1024}, capability=90)
    built.registers, built.spill_stores, built.shared, built.sass_counts["LDG"], built.global_loads  # {128: 2}

Needs triton alone: its wheel ships ptxas and cuobjdump. It must run in a process where TRITON_INTERPRET is not set,
since a kernel defined under the interpreter is no source for the compiler. As a command:

    PYTHONPATH=src:tests python -m ahead_of_time quarterturn.kernels.some:kernel --capability 90 \
        --signature x=*bf16 y=*u8 m=i32 --constexpr BLOCK=128 NAME='"nvfp4"' --warps 8 --sass
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90, 100, 120)
_built: dict[tuple, Compiled] = {}


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction: its address in the kernel, its predicate ('' or '@!P0'), its opcode and operands."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers: LDG of LDG.E.128."""
        return self.opcode.split(".")[0]

    @property
    def bits(self) -> int:
        """How many bits a thread moves, for a load or a store."""
        widths = [int(m[1]) for m in (re.fullmatch(r"[US]?(8|16|32|64|128|256)", p) for p in self._modifiers) if m]
        return widths[-1] if widths else 32

    @property
    def _modifiers(self) -> list[str]:
        return self.opcode.split(".")[1:]


class Compiled:
    """What the compiler made of a kernel: PTX and SASS, and the numbers read off them."""

    def __init__(self, kernel: Any, capability: int, fused: bool) -> None:
        self.kernel, self.capability, self._fused = kernel, capability, fused
        self.name: str = kernel.metadata.name
        self.ptx: str = kernel.asm["ptx"]
        self.cubin: bytes = kernel.asm["cubin"]
        self.shared: int = kernel.metadata.shared
        """Bytes of shared memory, dynamic and static, that a launch asks for."""

    @property
    def registers(self) -> int:
        """32-bit registers a thread."""
        return self._resources["registers"]

    @property
    def stack(self) -> int:
        """Bytes of local memory a thread keeps as its stack frame."""
        return self._resources["stack"]

    @property
    def spill_stores(self) -> int:
        """Bytes a thread that ptxas says are stored because registers ran out."""
        return self._report["spill_stores"]

    @property
    def spill_loads(self) -> int:
        return self._report["spill_loads"]

    @cached_property
    def sass(self) -> list[Instruction]:
        """Every instruction in the order of addresses, the padding behind the end (NOP) left out."""
        code = [Instruction(int(m[1], 16), m[2] or "", m[3], m[4].strip()) for m in _SASS_LINE.finditer(self.sass_text)]
        return [i for i in code if i.name != "NOP"]

    @cached_property
    def sass_text(self) -> str:
        """cuobjdump's listing."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return _run(tool("cuobjdump"), "-sass", file.name).stdout

    @cached_property
    def sass_counts(self) -> Counter[str]:
        """How often each SASS instruction stands in the code, by its name without modifiers."""
        return Counter(i.name for i in self.sass)

    @cached_property
    def opcode_counts(self) -> Counter[str]:
        """The same with modifiers: LDG.E.128."""
        return Counter(i.opcode for i in self.sass)

    @cached_property
    def ptx_counts(self) -> Counter[str]:
        """How often each PTX instruction stands in the code, modifiers included: ld.global.v4.b32."""
        return Counter(m[1] for m in _PTX_LINE.finditer(self.ptx))

    @property
    def global_loads(self) -> Counter[int]:
        """Loads from global memory by bits a thread; cp.async (LDGSTS) counts, TMA does not."""
        return self._widths("LDG", "LDGSTS")

    @property
    def global_stores(self) -> Counter[int]:
        """Stores to global memory by bits a thread; TMA does not count."""
        return self._widths("STG")

    @property
    def local_accesses(self) -> int:
        """Instructions that touch local memory: spills, and arrays that did not stay in registers."""
        return self.sass_counts["LDL"] + self.sass_counts["STL"]

    @cached_property
    def loops(self) -> list[list[Instruction]]:
        """The instructions of every loop, an inner one also inside its outer one: from a branch's target back to it.

        The last two instructions of a kernel are a branch to itself, which is no loop.
        """
        found = []
        for index, branch in enumerate(self.sass):
            target = re.search(r"0x([0-9a-f]+)", branch.operands) if branch.name == "BRA" else None
            if target and int(target[1], 16) < branch.address:
                found.append([i for i in self.sass[: index + 1] if i.address >= int(target[1], 16)])
        return found

    def shortest_pass(self, loop: list[Instruction]) -> list[Instruction]:
        """The instructions of one pass through a loop by the way that executes fewest, in their order.

        A branch with a predicate may be taken or not; one without is taken. A call is one instruction.
        """
        place = [instruction.address for instruction in self.sass]
        start, end = place.index(loop[0].address), place.index(loop[-1].address)
        came_from, reached = {start: start}, [start]
        for index in reached:  # breadth first: `reached` grows while it is walked
            for following in self._following(index, place):
                if following not in came_from:
                    came_from[following] = index
                    reached.append(following)
        way = [end]
        while way[-1] != start:
            way.append(came_from[way[-1]])
        return [self.sass[index] for index in reversed(way)]

    def _following(self, index: int, place: list[int]) -> list[int]:
        instruction, behind = self.sass[index], [index + 1] if index + 1 < len(self.sass) else []
        if instruction.name in ("EXIT", "RET"):
            return behind if instruction.predicate else []
        target = re.match(r"(!?U?P\d, )?0x([0-9a-f]+)", instruction.operands) if instruction.name == "BRA" else None
        if target is None:
            return behind
        # A branch may go to a NOP, which is left out: what follows is the next one.
        return [bisect_left(place, int(target[2], 16)), *(behind if instruction.predicate or target[1] else [])]

    def summary(self, most: int = 24) -> str:
        """A few lines for a person."""
        common = ", ".join(f"{name} {n}" for name, n in self.sass_counts.most_common(most))
        return "\n".join(
            [
                f"{self.name} for sm_{self.capability}: {self.registers} registers, {self.shared} bytes shared, "
                f"spills {self.spill_stores} stored {self.spill_loads} loaded, stack {self.stack}",
                f"  global loads  {_by_width(self.global_loads)}",
                f"  global stores {_by_width(self.global_stores)}",
                f"  {len(self.sass)} instructions: {common}",
                *(f"  loop of {len(loop)} from {loop[0].address:#x}: {_counted(loop, most)}" for loop in self.loops),
            ]
        )

    def _widths(self, *names: str) -> Counter[int]:
        return Counter(i.bits for i in self.sass if i.name in names)

    @cached_property
    def _resources(self) -> dict[str, int]:
        """What the cubin says a launch needs."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            text = _run(tool("cuobjdump"), "--dump-resource-usage", file.name).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert found, f"cuobjdump says nothing of registers:\n{text}"
        return {"registers": int(found[1]), "stack": int(found[2])}

    @cached_property
    def _report(self) -> dict[str, int]:
        """What ptxas says of the PTX, compiled once more: a cubin does not hold the spills."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(self.ptx)
            arch = f"sm_{self.capability}{'a' if self.capability >= 90 else ''}"
            contract = [] if self._fused else ["--fmad=false"]
            out = ["-o", str(source.with_suffix(".cubin"))]
            text = _run(tool("ptxas", self.capability), "-v", *contract, f"--gpu-name={arch}", str(source), *out).stderr
        found = {key: re.search(pattern, text) for key, pattern in _REPORT.items()}
        missing = [key for key, match in found.items() if match is None]
        assert not missing, f"ptxas says nothing of {missing}:\n{text}"
        return {key: int(match[1]) for key, match in found.items() if match}


_SASS_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.MULTILINE)
_PTX_LINE = re.compile(r"^\s*(?:@!?%\w+\s+)?\{?\s*([a-z]\w*(?:\.\w+|::\w+)+)\s", re.MULTILINE)
_REPORT = {
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}


def compile_kernel(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any] | None = None,
    capability: int = 90,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible: Iterable[str] | None = None,
    **options: Any,
) -> Compiled:
    """Compile a kernel as its launch on a GPU of that capability would, once a process for equal arguments.

    fn: what `@triton.jit` or `@gluon.jit` made. signature: type of every run-time argument, '*bf16', '*u8', 'i32',
    'fp32'. constexprs: value of every other one (also of an integer argument that is 1, as a launch would have it).
    divisible: arguments whose value or address is a multiple of 16; the pointers where it is not given.
    options: more of CUDAOptions, such as num_ctas, maxnreg, enable_fp_fusion.
    """
    constants = dict(constexprs or {})
    _check(fn, signature, constants)
    marks = [n for n, t in signature.items() if t.startswith("*")] if divisible is None else list(divisible)
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    key = (fn, capability, *map(_frozen, (signature, constants, options)), tuple(sorted(marks)))
    if key not in _built:
        _built[key] = _compile(fn, dict(signature), constants, marks, capability, options)
    return _built[key]


def tool(name: str, capability: int = 0) -> str:
    """Path of a tool of the triton wheel: ptxas (the newer one from capability 100 on), cuobjdump, nvdisasm."""
    from triton import knobs

    attribute = "ptxas_blackwell" if name == "ptxas" and capability >= 100 else name
    return getattr(knobs.nvidia, attribute).path


def _compile(
    fn: Any, signature: dict[str, str], constants: dict[str, Any], marks: list[str], capability: int, options: dict
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    source = GluonASTSource if isinstance(fn, GluonJITFunction) else ASTSource
    types = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    attrs = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in marks}
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source(fn, types, constants, attrs), target=target, options=options)
    return Compiled(kernel, capability, kernel.metadata.enable_fp_fusion)


def _check(fn: Any, signature: Mapping[str, str], constants: Mapping[str, Any]) -> None:
    from triton.runtime.jit import JITFunction

    if not isinstance(fn, JITFunction):
        raise TypeError(f"{fn!r} is no compilable kernel: was TRITON_INTERPRET set when it was defined?")
    given, wanted = [*signature, *constants], fn.arg_names
    if sorted(given) != sorted(wanted):
        raise ValueError(
            f"{fn.__name__}: missing {[n for n in wanted if n not in given]}, "
            f"unknown {[n for n in given if n not in wanted]}, twice {[n for n in signature if n in constants]}"
        )


def _frozen(pairs: Mapping[str, Any]) -> str:
    return repr(sorted(pairs.items()))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done


def _by_width(widths: Counter[int]) -> str:
    return ", ".join(f"{n} of {bits} bits" for bits, n in sorted(widths.items(), reverse=True)) or "none"


def _counted(code: list[Instruction], most: int) -> str:
    return ", ".join(f"{name} {n}" for name, n in Counter(i.name for i in code).most_common(most))


def _pair(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="module:function")
    parser.add_argument("--signature", nargs="+", default=[], metavar="NAME=TYPE")
    parser.add_argument("--constexpr", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--divisible", nargs="*", metavar="NAME", help="multiples of 16; default: the pointers")
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE", help="maxnreg=128 and the like")
    parser.add_argument("--capability", type=int, nargs="+", default=[90])
    parser.add_argument("--warps", type=int, default=4)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--sass", action="store_true", help="print the listing too")
    parser.add_argument("--ptx", action="store_true")
    given = parser.parse_args()
    module, _, name = given.kernel.partition(":")
    fn = getattr(importlib.import_module(module), name)
    for capability in given.capability:
        built = compile_kernel(
            fn, {n: str(t) for n, t in map(_pair, given.signature)}, dict(map(_pair, given.constexpr)), capability,
            num_warps=given.warps, num_stages=given.stages, divisible=given.divisible,
            **dict(map(_pair, given.option)),
        )  # fmt: skip
        print(built.ptx if given.ptx else "", built.sass_text if given.sass else "", built.summary(), sep="")


if __name__ == "__main__":
    main()
