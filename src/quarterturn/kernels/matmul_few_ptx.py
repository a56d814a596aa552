"""PTX texts of the product for a few tokens, each what one lane does; matmul_few.py says what for.

They count bytes from the start of a program's shared memory, `global_smem`, which is where the kernel's only allocation
lies: Triton's own loads and stores of shared memory would make all warps wait for each other at every one. A text that
has nothing to give gives a word of 0.
"""

from __future__ import annotations

from ..formats import FP4Format
from . import fp4_decode


def copy_asm(whole: bool, threads: int) -> tuple[str, ...]:
    """(codes, scales, byte, scale byte, blocks, there) starts copying what a lane needs of a step, if it is `there`.

    byte, scale byte: where in shared memory. blocks: how many of the step's four there are; without the first, scales
    are zero. whole: all four.
    """
    lines = [
        ".reg .pred p;", ".reg .b32 at, size;", "mov.u32 at, global_smem;", "add.u32 at, at, $3;",
        "setp.ne.s32 p, $6, 0;",
    ]  # fmt: skip
    for block in range(4):
        if not whole:
            lines += [f"setp.gt.s32 p, $5, {block};", "selp.b32 size, 16, 0, p;", "setp.ne.s32 p, $6, 0;"]
        size = "16" if whole else "16, size"
        lines.append(f"@p cp.async.cg.shared.global.L2::128B [at+{16 * threads * block}], [$1+{512 * block}], {size};")
    lines += ["mov.u32 at, global_smem;", "add.u32 at, at, $4;"]
    if not whole:
        lines += ["setp.gt.s32 p, $5, 0;", "selp.b32 size, 8, 0, p;", "setp.ne.s32 p, $6, 0;"]
    lines += [
        f"@p cp.async.ca.shared.global [at], [$2], {'8' if whole else '8, size'};",
        "cp.async.commit_group;",
        "mov.b32 $0, 0;",
    ]
    return _text(lines), "=r,l,l,r,r,r,r"


def scales_asm(stages: int) -> tuple[str, ...]:
    """(scale byte) -> the two words of scales of a step, once its copies have arrived."""
    lines = [
        ".reg .b32 at;", f"cp.async.wait_group {stages - 1};", "mov.u32 at, global_smem;", "add.u32 at, at, $2;",
        "ld.shared.v2.b32 {$0, $1}, [at];",
    ]  # fmt: skip
    return _text(lines), "=r,=r,r"


def codes_asm(threads: int) -> tuple[str, ...]:
    """(byte) -> the four words of codes of a block; a text for each of four blocks."""
    first = [".reg .b32 at;", "mov.u32 at, global_smem;", "add.u32 at, at, $4;"]
    load = "ld.shared.v4.b32 {{$0, $1, $2, $3}}, [at+{}];"
    return *(_text([*first, load.format(16 * threads * block)]) for block in range(4)), "=r,=r,=r,=r,r"


def sums_asm() -> tuple[str, ...]:
    """(four sums, byte) stores them. Triton's own stores would make all warps wait at each."""
    lines = [".reg .b32 at;", "mov.u32 at, global_smem;", "add.u32 at, at, $5;"]
    return _text([*lines, "st.shared.v4.b32 [at], {$1, $2, $3, $4};", "mov.b32 $0, 0;"]), "=r,f,f,f,f,r"


def x_asm() -> tuple[str, str]:
    """(address, exists) -> the 16 values of a token and a block that a lane multiplies, or zeros: 8 words."""
    lines = [".reg .pred p;", "setp.ne.s32 p, $9, 0;", *[f"mov.b32 ${i}, 0;" for i in range(8)]]
    for i in (0, 4):
        words = ", ".join(f"${i + j}" for j in range(4))
        lines.append(f"@p ld.global.v4.b32 {{{words}}}, [$8+{4 * i}];")
    return _text(lines), "=&r," * 8 + "l,r"


def totals_asm() -> tuple[str, ...]:
    """(value, byte, rank, there) writes a sum into the shared memory of a program of the cluster; (value, byte, -, -)
    reads one of this program's."""
    at = [".reg .b32 at;", "mov.u32 at, global_smem;", "add.u32 at, at, $2;"]
    write = [
        ".reg .pred p;", "setp.ne.s32 p, $4, 0;", "mapa.shared::cluster.u32 at, at, $3;",
        "@p st.shared::cluster.f32 [at], $1;", "mov.f32 $0, $1;",
    ]  # fmt: skip
    return _text([*at, *write]), _text([*at, "ld.shared.f32 $0, [at];"]), "=f,f,r,r,r"


def step_asm(block: int, tokens8: int, fmt: FP4Format, half: bool) -> tuple[str, str]:
    """(4 words of codes, a word of scales, 8 words of x a tile of tokens, sums) -> sums, after one block of K."""
    sums = 4 * tokens8
    codes = [f"${sums + i}" for i in range(4)]
    scales = f"${sums + 4}"
    x = [f"${sums + 5 + i}" for i in range(8 * tokens8)]
    old = [f"${sums + 5 + 8 * tokens8 + i}" for i in range(sums)]
    kind = "f16" if half else "bf16"
    lines = [".reg .b32 t, u, c0, by, negative_zero, a<16>;", "mov.b32 negative_zero, 0x80008000;"]
    for row in range(2):
        registers = [f"a{8 * row + j}" for j in range(8)]
        lines += fp4_decode.scale(scales, block % 2 * 2 + row, "by", fmt, half)
        lines += fp4_decode.values(codes[2 * row], codes[2 * row + 1], "by", registers, half)
    for step in range(4):
        a = f"{{a{2 * step}, a{8 + 2 * step}, a{2 * step + 1}, a{9 + 2 * step}}}"
        for i in range(tokens8):
            d = ", ".join(f"${4 * i + j}" for j in range(4))
            c = ", ".join(old[4 * i : 4 * i + 4]) if step == 0 else d
            b = f"{{{x[8 * i + 2 * step]}, {x[8 * i + 2 * step + 1]}}}"
            lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{d}}}, {a}, {b}, {{{c}}};")
    return _text(lines), "=&f," * sums + ",".join(["r"] * (5 + 8 * tokens8) + ["f"] * sums)


def _text(lines: list[str]) -> str:
    return "\n".join(["{", *lines, "}"])


def texts(tokens8: int, fmt: FP4Format, half: bool, whole: bool, stages: int, num_warps: int) -> dict[str, object]:
    """The texts as the kernel's constants."""
    steps = [step_asm(block, tokens8, fmt, half) for block in (0, 1)]
    threads = 32 * num_warps
    return {
        "COPY": copy_asm(whole, threads), "SCALES": scales_asm(stages), "CODES": codes_asm(threads), "X": x_asm(),
        "STEP": (steps[0][0], steps[1][0], steps[0][1]), "SUMS": sums_asm(), "TOTALS": totals_asm(),
        "SCALE_LANES": 512 // fmt.group_size,
    }  # fmt: skip
