"""The asm texts of the Hopper kernel, put together from ptx.py: what each thread does with the values it holds.

A text's operands are the values, then eight more: the amax (or in pairs, whether the lane is odd), amax_factor, encode,
divisor, usual (ptx.nvfp4_scale), and for ptx.repair the offset of the values, the tile's address and the matrix's.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import CODES, ROTATED, VALUES, ptx

RUN = {CODES: 16, VALUES: 8, ROTATED: 8}
"""Neighbouring values that a thread holds: 16 make 8 bytes of codes, 8 make 16 bytes of bf16, both whole sectors."""

_OPERANDS = 8


def amax_asm(output: int, repair: int, half: bool) -> tuple[str, str]:
    """Text and constraints: values -> their amax, and the values; repair: R where a unit has several blocks, or 0."""
    run = RUN[output]
    z, operands = _operands(run, 1 + run)
    names = _names(run)
    lines = ptx.amax(names, "a")
    if repair:
        lines += ptx.repair(repair, half, names, "a", *operands[-3:])
    lines += ["mov.f32 $0, a;", *[f"mov.f32 ${1 + i}, {name};" for i, name in enumerate(names)]]
    return ptx.block(lines, z), "=f," * (1 + run) + _inputs(run)


def quantize_asm(group: int, output: int, rule: str, repair: int, half: bool, near: int = 0) -> tuple[str, str]:
    """Text and constraints: 16 values -> (codes, scale byte), or 8 values -> four words of e2m1 * block_scale.

    Where a thread holds a whole group (codes of NVFP4) the amax is found here, else it is an operand. near: R where
    the matrix is not quite what was multiplied, so that scales next to a tie are made again (ptx.exact_amax), or 0.
    """
    run = RUN[output]
    outputs = 2 if output == CODES else run // 2
    z, operands = _operands(run, outputs)
    names = _names(run)
    repaired: list[str] = []
    exact: list[str] = []
    if run == group:
        lines = ptx.amax(names, "a")
        repaired += ptx.repair(repair, half, names, "a", *operands[-3:]) if repair else []
        exact += ptx.exact_amax(near, half, names, *operands[-3:]) if near else []
    else:
        lines = [f"mov.f32 a, {operands[0]};"]
    lines += _scale(group, rule, ptx.clamp(names), operands, repaired, exact)
    saturate = group == 32 and rule == "floor"
    if output == CODES:
        lines += [*ptx.codes(names[:8], "w0", saturate), *ptx.codes(names[8:], "w1", saturate)]
        lines += ["mov.b64 $0, {w0, w1};", "mov.b32 $1, byte;"]
        return ptx.block(lines, z), "=l,=r," + _inputs(run)
    lines += ptx.values([f"w{i}" for i in range(outputs)], half, saturate)
    lines += [f"mov.b32 ${i}, w{i};" for i in range(outputs)]
    return ptx.block(lines, z), "=r," * outputs + _inputs(run)


def quantize_pairs_asm(group: int, rule: str, repair: int, half: bool, width: int) -> tuple[str, str]:
    """Text and constraints: 8 values of a row and 8 of the row 8 below -> (codes of 16 of one of them, scale byte).

    Units of 32 values lie in four lanes, 8 of each row. Neighbouring lanes have a group of 16 of both rows together:
    the even lane makes the scale and stores the codes of the first row, the odd one of the second. The steps of
    lanes 8 values wide, amax and codes, go into one another by three shuffles.
    """
    z, operands = _operands(16, 2)
    names = _names(16)
    odd, *_, offset, tile, matrix = operands
    halves = (names[:8], names[8:])
    lines = [f"setp.ne.u32 odd, {odd}, 0;"]
    for i, (values, at) in enumerate(zip(halves, (offset, "u"), strict=True)):
        lines += ptx.amax(values, f"a{i}")
        if repair:
            lines += [f"add.u32 u, {offset}, {width};"] if i else []
            lines += ptx.repair(repair, half, values, f"a{i}", at, tile, matrix, str(i))
    lines += [*ptx.exchange("a0", "a1", "h"), "selp.f32 a, a1, a0, odd;", "max.NaN.f32 a, a, h;"]
    if group == 32:
        lines += [ptx.shuffle("h", "a", 2), "max.NaN.f32 a, a, h;"]
    lines += _scale(group, rule, ptx.FLAG, operands)
    lines += [ptx.shuffle("h", "r", 1), "selp.f32 r0, h, r, odd;", "selp.f32 r1, r, h, odd;"]
    lines += ["mov.b32 u, r0;", "mov.b32 v, r1;", "or.b32 u, u, v;", "setp.ge.s32 usual, u, 0;", "@usual bra BOTH;"]
    for i, values in enumerate(halves):
        lines += [f"abs.f32 r{i}, r{i};", f"setp.gt.f32 pos, r{i}, {ptx.constant(0.0)};", *ptx.clamp(values, f"r{i}")]
    lines.append("BOTH:")
    for i, values in enumerate(halves):
        lines += ptx.codes(values, f"w{i}", group == 32 and rule == "floor", f"r{i}")
    lines += [*ptx.exchange("w0", "w1", "v"), "selp.b32 w0, v, w0, odd;", "selp.b32 w1, w1, v, odd;"]
    lines += ["mov.b64 $0, {w0, w1};", "mov.b32 $1, byte;"]
    return ptx.block(lines, z), "=l,=r," + "f," * 16 + "r,f,f,f,r,r,l,l"


def _scale(
    group: int, rule: str, unusual: Sequence[str], operands: list[str], repaired: Sequence[str] = (),
    exact: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    _, amax_factor, encode, divisor, usual, *_ = operands
    if group == 16:
        return ptx.nvfp4_scale(unusual, amax_factor, encode, divisor, usual, repaired, exact)
    return ptx.mxfp4_scale(unusual, rule, amax_factor)


def _operands(run: int, outputs: int) -> tuple[list[str], list[str]]:
    names = [f"${outputs + i}" for i in range(run + _OPERANDS)]
    return names[:run], names[run:]


def _names(run: int) -> list[str]:
    return [f"z{i}" for i in range(run)]


def _inputs(run: int) -> str:
    return "f," * (run + 4) + "r,r,l,l"


def order_asm(half: bool) -> tuple[str, str]:
    """Eight fp32 numbers -> four words of two, the first in the lower half; and what brings words into the order of the
    product.

    The second: lane q of four has words 0 to 3 of run q and of run q + 4 in a block of 64 values, pairs t = 2 (q % 2)
    and the next, h = 0 and 1, of groups q / 2 and q / 2 + 2. It keeps those of h = q / 2 and gives the others to lane
    q ^ 2, which has the other groups: four words of groups 0 to 3 for each t.
    """
    kind = "f16x2" if half else "bf16x2"
    pairs = " ".join(f"cvt.rn.{kind}.f32 ${i}, ${5 + 2 * i}, ${4 + 2 * i};" for i in range(4))
    lines = [".reg .pred p;", ".reg .b32 q, keep, give, take;", "mov.u32 q, %laneid;", "and.b32 q, q, 2;",
             "setp.ne.u32 p, q, 0;"]  # fmt: skip
    for t in range(2):
        for run in range(2):
            first = 8 + 4 * run + 2 * t  # of the inputs: h = 0, then h = 1
            out = 4 * t + 2 * run
            lines += [
                f"selp.b32 keep, ${first + 1}, ${first}, p;", f"selp.b32 give, ${first}, ${first + 1}, p;",
                "shfl.sync.bfly.b32 take, give, 2, 31, -1;", f"selp.b32 ${out}, take, keep, p;",
                f"selp.b32 ${out + 1}, keep, take, p;",
            ]  # fmt: skip
    return pairs, "\n".join(["{", *lines, "}"])
