"""x in the order of K in which fragments of weights are multiplied (weight_layout.py), so that wgmma can read it.

In each block of 64 the value 16q + 4t + 2h + e (q, t < 4; h, e < 2) goes to place 16t + 8h + 2q + e: four neighbours of
a tile of 16 come from four groups of 16, two from each half.

| x     | (M, K) bf16 or fp16, rows contiguous, 16-byte aligned, K and its stride multiples of 8 |
| out   | (M, blocks * 64) of x's dtype, contiguous, zeros behind K                              |
| moves | 2 (K + 64 blocks) M bytes; no arithmetic                                               |
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TOKENS = 32
"""Of a program."""


def load_layout() -> gl.DistributedLinearLayout:
    """(TOKENS, 4, 16): a thread has 16 neighbours, four lanes a block of 64."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[8, 0, 0], [16, 0, 0]], [], [TOKENS, 4, 16],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["m"])
def order_tokens(x_ptr, out_ptr, m, k, stride, padded, TOKENS: gl.constexpr, LOAD: gl.constexpr, HOPPER: gl.constexpr):
    """Programs (blocks, M / TOKENS) of four warps, each TOKENS tokens of a block. padded: blocks * 64."""
    if HOPPER:
        # The kernel behind this one may start; it waits where it reads x (programmatic dependent launch).
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    token = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))[:, None, None]
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LOAD)))[None, :, None]
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, LOAD)))[None, None, :]
    col = gl.program_id(0) * 64 + q * 16 + i
    x = gl.load(x_ptr + token.to(gl.int64) * stride + col, mask=(token < m) & (col < k), other=0.0)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ordered = gl.convert_layout(x.reshape([TOKENS, 4, 8, 2]).permute((0, 2, 1, 3)).reshape([TOKENS, 64]), STORE)
    token = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, STORE))[:, None]
    col = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(0, STORE))[None, :]
    gl.store(out_ptr + token.to(gl.int64) * padded + col, ordered, mask=token < m)
