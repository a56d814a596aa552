"""The decoding text, run line by line on the CPU, against weight_layout.decoded."""

from __future__ import annotations

import re

import pytest
import torch

from quarterturn import weight_layout
from quarterturn.formats import FORMATS, NVFP4
from quarterturn.kernels import fp4_decode
from test_weight_layout import random_weight

_MASK = 2**32 - 1


def run(lines, registers):
    """Execute lines on a dict of int64 tensors that hold 32-bit words."""

    def value(name):
        return registers[name] if name in registers else torch.tensor(int(name, 0), dtype=torch.int64)

    for line in lines:
        opcode, rest = re.fullmatch(r"(\S+) (.*);", line).groups()
        out, *args = rest.split(", ")
        a, b, *c = [value(arg) for arg in args]
        match opcode:
            case "lop3.b32":
                table, result = int(c[1]), torch.zeros_like(a)
                for i in range(8):
                    if table >> i & 1:
                        chosen = [x if i >> s & 1 else ~x for x, s in ((a, 2), (b, 1), (c[0], 0))]
                        result = result | (chosen[0] & chosen[1] & chosen[2])
            case "and.b32":
                result = a & b
            case "shl.b32":
                result = a << b
            case "shf.l.wrap.b32":
                by = int(c[0])
                result = b << by | a >> (32 - by)
            case "mad.lo.u32":
                result = a * b + c[0]
            case "prmt.b32":
                both, result = a | b << 32, torch.zeros_like(a)
                for i in range(4):
                    result = result | (both >> 8 * (int(c[0]) >> 4 * i & 7) & 255) << 8 * i
            case "fma.rn.bf16x2" | "fma.rn.f16x2":
                result = halves_product(a, b, torch.bfloat16 if "bf16" in opcode else torch.float16)
        registers[out] = result & _MASK


def halves_product(a, b, dtype):
    result = torch.zeros_like(a)
    for shift in (0, 16):
        x, y = ((v >> shift & 0xFFFF).to(torch.int16).view(dtype).double() for v in (a, b))
        result = result | (x * y).to(dtype).view(torch.int16).to(torch.int64).bitwise_and(0xFFFF) << shift
    return result


@pytest.mark.parametrize(("name", "half"), [("nvfp4", False), ("mxfp4", False), ("nvfp4", True)])
def test_the_text_decodes(name, half):
    fmt = FORMATS[name]
    codes, scale = random_weight(64, 1024, fmt)
    if fmt == NVFP4:
        scale.view(torch.uint8)[:, :] = torch.arange(64 * 64).view(64, 64) % 127
    weight = weight_layout.forward(codes, scale, fmt)
    words = weight.codes.to(torch.int64) & _MASK  # (4, 16, 32, 4)
    scales = weight.scales.contiguous().view(torch.int32).to(torch.int64) & _MASK  # (4, 4, lanes, 2)
    if fmt != NVFP4:
        scales = scales.repeat_interleave(2, dim=2)
    dtype = torch.float16 if half else torch.bfloat16
    wanted = weight_layout.decoded(weight)
    for block in range(16):
        for r in range(2):
            registers = {"a": words[:, block, :, 2 * r], "b": words[:, block, :, 2 * r + 1]}
            registers |= {"s": scales[:, block // 4, :, block % 4 // 2], "negative_zero": torch.tensor(0x80008000)}
            outs = [f"o{j}" for j in range(8)]
            run(fp4_decode.scale("s", block % 2 * 2 + r, "by", fmt, half), registers)
            run(fp4_decode.values("a", "b", "by", outs, half), registers)
            pairs = torch.stack([registers[o] for o in outs], dim=-1)  # (4, 32, 8)
            found = torch.stack((pairs & 0xFFFF, pairs >> 16), dim=-1).to(torch.int16).view(dtype)
            found = found.view(4, 8, 64).float() * 2.0**weight.exponent  # tile, g, 16q + i
            rows = wanted.view(4, 2, 8, 1024)[:, r, :, 64 * block : 64 * block + 64]
            assert torch.equal(found, rows)
