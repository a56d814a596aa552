"""PTX texts that use shared memory: a ring's barriers (matmul_many.py, hadamard_wide_hopper.py), and pairs that change
lanes (matmul_many.py).

Triton's own make all warps wait for each other at each; with these a warp waits for the copy alone, and says by itself
that it has read. Places are bytes from the start of shared memory, `global_smem`, where the kernel's only allocation
has to lie.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_ARGUMENTS = "=r,r,r"


@gluon.jit
def run(args, TEXT: gl.constexpr):
    """A text and its constraints, in its place."""
    gl.inline_asm_elementwise(TEXT[0], TEXT[1], args, dtype=gl.int32, is_pure=False, pack=1)


def barriers_in(ptx: str) -> int | None:
    """Where a compiled kernel has its first barrier: the texts are right only if it is where they look for it."""
    found = re.search(r"add\.\w+\s+(%r\d+), %r\d+, (\d+);(?:(?!\1\b)[^;]*;)*?[^;]*mbarrier\.init[^;]*\[\1\]", ptx)
    return int(found[2]) if found else None


def wait_asm() -> tuple[str, str]:
    """(barrier, phase) returns when that phase of it has ended. What it gives means nothing."""
    lines = ["mbarrier.try_wait.parity.shared::cta.b64 true, [at], $2;", "@!true bra.uni again;"]
    return _text(["again:", *lines]), _ARGUMENTS


def leave_asm() -> tuple[str, str]:
    """(barrier, whether to) arrives at it, once for the warp. What it gives means nothing."""
    # elect.sync, not a comparison of lanes: after that ptxas keeps uniform values in registers of threads, and spills.
    lines = ["elect.sync _|true, -1;", "setp.ne.and.s32 true, $2, 0, true;"]
    return _text([*lines, "@true mbarrier.arrive.shared::cta.b64 _, [at];"]), _ARGUMENTS


def exchange(pairs: Sequence[str], out: Sequence[str], to: str, back: str) -> list[str]:
    """The pairs of a block that a lane decoded -> those that wgmma takes of it where K is in its natural order.

    A lane 4g+q has pairs j = 0 to 7 of rows r = g and g + 8 of its warp, 2j+r, which are pairs 8q+j of the row. It
    gets pairs 8t+q and 8t+4+q of both rows, for t = 0 to 3, as 4t+r and 4t+2+r. to, back: see matmul_operand.places.
    """
    lines = [".reg .b32 to<2>, back<4>;", "mov.u32 to0, global_smem;", f"add.u32 back0, to0, {back};"]
    # No lane writes before all have read what the last block left.
    lines += [f"add.u32 to0, to0, {to};", "xor.b32 to1, to0, 16;", "bar.warp.sync -1;"]
    for r in range(2):
        for half in range(2):
            four = ", ".join(pairs[2 * (4 * half + j) + r] for j in range(4))
            lines.append(f"st.shared.v4.b32 [to{half}+{1024 * r}], {{{four}}};")
    lines += ["bar.warp.sync -1;", *(f"xor.b32 back{t}, back0, {32 * t};" for t in range(1, 4))]
    for t in range(4):
        four = ", ".join(out[4 * t : 4 * t + 4])
        lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{four}}}, [back{t}];")
    return lines


def _text(lines: list[str]) -> str:
    first = [".reg .pred true;", ".reg .b32 at;", "mov.u32 at, global_smem;", "add.u32 at, at, $1;"]
    return "\n".join(["{", *first, *lines, "mov.b32 $0, 0;", "}"])
