"""Weights as tensor cores read them: codes in fragment order, scales re-encoded so that decoding is a few bit moves.

The products of kernels/matmul_*.py have the weight (N, K) as their left operand, in 16-bit floats made in registers.
`forward` permutes its codes once, so that what a lane of a warp needs lies together:

    codes   int32 (N/16, K/64, 32, 4)   lane 4g+q (g < 8, q < 4) of tile n, block b holds the values 64b+16q .. +15 of
                                        row 16n+g in two words, then those of row 16n+8+g in two more
    scales  uint8 (N/16, K/256, L, 8)   NVFP4: L = 32, lane 4g+q; MXFP4: L = 16, lane 2g + q//2. Byte 2j+r is the scale
                                        of those values in block 4c+j, of row 16n+8r+g

Step t (0..3) of a block multiplies the values 4t..4t+3 of every lane: 4t and 4t+1 stand where the fragment of
mma.m16n8k16 has columns 2q, 2q+1, and 4t+2, 4t+3 where it has 2q+8, 2q+9. The order along K is thereby permuted inside
a block; the other operand follows it when a lane reads its 16 values x[token, 64b+16q .. +15] in the same way. One
scale serves all that a lane has of a row in a block.

N is padded to 64, K to 64 (scales: to 256), with zeros.

**Words.** Sixteen codes of a row make two words. A pair of neighbours is wanted as two bf16 (the even value in the low
half) with the sign at bit 15 and the magnitude at bits 8..6: that is e2m1 * 2^-126, subnormal included. Pairs 0-2 lie
in the first word, 3-5 in the second, each rotated right by its own amount so that all 12 bits of a half are distinct;
the four bits a half that remain in both words hold pairs 6 and 7, found after the words are merged under `MERGE`.

**Scales.** NVFP4: E4M3 as unsigned E5M3 of the same number, `byte << 4 | 0x7000` being s * 2^118 in bf16 and
`byte << 7` s * 2^6 in fp16; 0 for a zero scale, whose codes are set to 0; 0xFF for NaN. MXFP4: the byte plus a number
that is the same for the whole weight (118 unless a scale exceeds 2^9), so that `byte << 7` in bf16 keeps products
normal; 0xFF for NaN, whose codes are set to 0 (0 * inf is NaN). A decoded value times 2^exponent is e2m1 * block_scale.
It is exact, except that an MXFP4 scale 2^118 times smaller than the largest (or than 2^9) loses bits.

`inverse` gives back codes and scales bit for bit, except codes under a zero scale or MXFP4's NaN, which come back as 0.

**Stored.** `stored` puts fragments and an fp32 number a row into one int32 tensor of N rows, which a layer keeps in
place of its codes (stored_weight.py; beside them where those are somebody else's, as in vLLM) and hands to the ops;
`from_stored` gives views of it. `joined` puts several weights behind each other, of which it gives views too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import refusal
from .formats import E4M3_NAN, E8M0_NAN, MXFP4, NVFP4, FP4Format

ROTATIONS = (0, 12, 6, 14, 10, 4, 8, 2)
"""By how much a word is rotated left to bring pair j to its place: pairs 0-2 of the first, 3-5 of the second, 6 and 7
of the merged word."""

MERGE = 0x60306030
"""Bits of the merged word that come from the first word; the others come from the second."""

PAIR = 0x81C081C0
"""Where the two codes of a pair are wanted: sign and magnitude in each half."""

ROWS, BLOCK, SCALE_BLOCKS = 16, 64, 4
"""Rows of a tile, values of a block along K, blocks whose scales lie together."""

PADDED_ROWS = 64
"""Rows that a weight is filled up to a multiple of, and at multiples of which those that are joined begin."""

_CHUNK = 1 << 24
"""Bytes of codes that are permuted at a time: temporary tensors take some ten times as much."""

_WORD = 2**32


@dataclass(frozen=True)
class Fragments:
    """A weight (n, k) in the layout of this module. decoded value * 2^exponent = e2m1 * block_scale."""

    codes: Tensor
    scales: Tensor
    n: int
    k: int
    format: FP4Format
    exponent: int


def forward(codes: Tensor, block_scale: Tensor, fmt: FP4Format) -> Fragments:
    """Packed codes uint8 (N, K/2) and linear block scales (N, K/group) of the format -> fragments on their device.

    Raises Refusal for a negative block scale, which no format's quantizer makes.
    """
    n, k = codes.shape[0], 2 * codes.shape[1]
    stored, exponent, empty = _encode_scale(block_scale.view(torch.uint8), fmt)
    fragments = codes.new_zeros(-(-n // PADDED_ROWS) * PADDED_ROWS // ROWS, -(-k // BLOCK), 32, 4, dtype=torch.int32)
    step = max(_CHUNK // (codes.shape[1] or 1) // ROWS, 1) * ROWS
    for start in range(0, n, step):
        part, dropped = codes[start : start + step], empty[start : start + step]
        kept = torch.where(dropped.unsqueeze(-1), 0, part.reshape(*dropped.shape, fmt.group_size // 2)).flatten(1)
        made = _words(_padded(kept, ROWS, BLOCK // 2))
        fragments[start // ROWS : start // ROWS + made.shape[0]] = made
    return Fragments(fragments, _scale_order(stored, fmt, fragments.shape[0]), n, k, fmt, exponent)


def inverse(weight: Fragments) -> tuple[Tensor, Tensor]:
    """Fragments -> packed codes uint8 (N, K/2) and linear block scales (N, K/group) of the format's dtype."""
    n, k, fmt = weight.n, weight.k, weight.format
    codes = weight.codes.new_empty(n, k // 2, dtype=torch.uint8)
    step = max(_CHUNK // (codes.shape[1] or 1) // ROWS, 1)
    for start in range(0, -(-n // ROWS), step):
        made = _bytes(weight.codes[start : start + step])
        codes[start * ROWS : start * ROWS + made.shape[0]] = made[: n - start * ROWS, : k // 2]
    tiles, chunks = weight.scales.shape[:2]
    lanes = weight.scales.shape[2] // 8
    ordered = weight.scales.view(tiles, chunks, 8, lanes, SCALE_BLOCKS, 2).permute(0, 5, 2, 1, 4, 3)
    rows = ordered.reshape(tiles * ROWS, chunks * SCALE_BLOCKS * lanes)[:n, : k // fmt.group_size]
    table = _e4m3_table(rows.device)[1] if fmt == NVFP4 else _e8m0_tables(126 - weight.exponent, rows.device)[1]
    return codes, table[rows.long()].view(fmt.scale_dtype)


STORED_EXPONENT = 8
"""Of stored fragments, so that it need not be asked of the device."""


def stored(weight: Fragments, alpha: Tensor) -> Tensor | None:
    """Fragments and alpha fp32 (N) -> int32 (N, `stored_width`); None for an exponent that is not STORED_EXPONENT."""
    if weight.exponent != STORED_EXPONENT:
        return None
    return joined([(weight, alpha)])


def joined(weights: Sequence[tuple[Fragments, Tensor]]) -> Tensor:
    """Fragments of STORED_EXPONENT and equal K and format, with their alpha, behind each other: stored as one weight.

    All N but the last are multiples of PADDED_ROWS.
    """
    head, n = weights[0][0], sum(weight.n for weight, _ in weights)
    data, first = head.codes.new_zeros(n, stored_width(n, head.k, head.format)), 0
    for weight, alpha in weights:
        assert first % PADDED_ROWS == 0, first
        put(data, weight, alpha, (first, weight.n))
        first += weight.n
    return data


def put(data: Tensor, weight: Fragments, alpha: Tensor, rows: tuple[int, int]) -> None:
    """Write a weight and its alpha over the rows (first, count) of what is stored."""
    there, factor = from_stored(data, weight.k, weight.format, rows)
    for part, source in ((there.codes, weight.codes), (there.scales, weight.scales), (factor, alpha)):
        part.copy_(source)


def from_stored(data: Tensor, k: int, fmt: FP4Format, rows: tuple[int, int] | None = None) -> tuple[Fragments, Tensor]:
    """int32 (N, `stored_width`) -> fragments and alpha fp32 (N), views of it; of the rows (first, count), or all."""
    codes, scales, alpha = _parts(data, k, fmt)
    first, count = rows or (0, data.shape[0])
    tiles = slice(first // ROWS, -(-(first + count) // PADDED_ROWS) * PADDED_ROWS // ROWS)
    part = Fragments(codes[tiles], scales[tiles], count, k, fmt, STORED_EXPONENT)
    return part, alpha[first : first + count]


def stored_width(n: int, k: int, fmt: FP4Format) -> int:
    """Columns of int32 that hold a weight (n, k)."""
    codes, scales = _counts(n, k, fmt)
    return -(-(codes + scales // 4 + n) // max(n, 1))


def _counts(n: int, k: int, fmt: FP4Format) -> tuple[int, int]:
    """Words of codes and bytes of scales."""
    tiles, blocks = -(-n // PADDED_ROWS) * PADDED_ROWS // ROWS, -(-k // BLOCK)
    return tiles * blocks * 128, tiles * -(-blocks // SCALE_BLOCKS) * (8 * BLOCK // fmt.group_size) * 2 * SCALE_BLOCKS


def _parts(data: Tensor, k: int, fmt: FP4Format) -> tuple[Tensor, Tensor, Tensor]:
    n, flat = data.shape[0], data.view(-1)
    codes, scales = _counts(n, k, fmt)
    tiles, blocks = -(-n // PADDED_ROWS) * PADDED_ROWS // ROWS, -(-k // BLOCK)
    return (
        flat[:codes].view(tiles, blocks, 32, 4),
        flat[codes : codes + scales // 4].view(torch.uint8).view(tiles, -(-blocks // SCALE_BLOCKS), -1, 8),
        flat[codes + scales // 4 :][:n].view(torch.float32),
    )


def decoded(weight: Fragments) -> Tensor:
    """e2m1 * block_scale (n, k) fp32 by the steps that kernels take, on bf16: the reference of their decoding."""
    words = weight.codes.view(torch.int32)
    values = torch.stack([_bf16_of(pair) for pair in _pairs(words)], dim=-2)  # (tiles, blocks, 32, 2, 8, 2)
    scale = weight.scales.to(torch.int32)
    bits = (scale << 4 | 0x7000) if weight.format == NVFP4 else scale << 7
    scale = bits.to(torch.int16).view(torch.bfloat16)
    if weight.format == MXFP4:
        scale = scale.repeat_interleave(2, dim=2)
    tiles, blocks = words.shape[:2]
    scale = scale.view(tiles, -1, 32, SCALE_BLOCKS, 2).transpose(2, 3).reshape(tiles, -1, 32, 2)[:, :blocks]
    product = (values.double() * scale.double()[..., None, None]).to(torch.bfloat16)
    ordered = product.view(tiles, blocks, 8, 4, 2, 16).permute(0, 4, 2, 1, 3, 5)
    rows = ordered.reshape(tiles * ROWS, blocks * BLOCK)[: weight.n, : weight.k]
    return rows.float() * 2.0**weight.exponent


def _padded(x: Tensor, rows: int, cols: int) -> Tensor:
    """Zeros behind, up to multiples."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))


def _words(codes: Tensor) -> Tensor:
    """Packed codes (16 a, 32 b) -> int32 (a, b, 32, 4)."""
    a, b = codes.shape[0] // ROWS, codes.shape[1] // (BLOCK // 2)
    pairs = codes.view(a, 2, 8, b, 4, 8).permute(0, 3, 2, 4, 1, 5).reshape(a, b, 32, 2, 8)
    tables = _pair_tables(codes.device)
    placed = [tables[j][pairs[..., j].long()] for j in range(8)]
    merged, mask = placed[6] | placed[7], _signed(MERGE)
    first = placed[0] | placed[1] | placed[2] | (merged & mask)
    second = placed[3] | placed[4] | placed[5] | (merged & ~mask)
    return torch.stack((first, second), dim=-1).view(a, b, 32, 4)


def _bytes(words: Tensor) -> Tensor:
    """int32 (a, b, 32, 4) -> packed codes (16 a, 32 b)."""
    a, b = words.shape[:2]
    found = []
    for pair in _pairs(words):
        low = (pair >> 6 & 7) | (pair >> 15 & 1) << 3
        high = (pair >> 22 & 7) | (pair >> 31 & 1) << 3
        found.append((low | high << 4).to(torch.uint8))
    ordered = torch.stack(found, dim=-1).view(a, b, 8, 4, 2, 8).permute(0, 4, 2, 1, 3, 5)
    return ordered.reshape(a * ROWS, b * (BLOCK // 2))


def _pairs(words: Tensor) -> list[Tensor]:
    """int32 (a, b, 32, 4) -> the eight pairs of each row, int32 (a, b, 32, 2), in place under PAIR."""
    first, second = words[..., 0::2], words[..., 1::2]
    mask = _signed(MERGE)
    sources = [first] * 3 + [second] * 3 + [(first & mask) | (second & ~mask)] * 2
    return [_rotated(word, by) & _signed(PAIR) for word, by in zip(sources, ROTATIONS, strict=True)]


def _rotated(word: Tensor, left: int) -> Tensor:
    wide = word.to(torch.int64) & (_WORD - 1)
    return ((wide << left | wide >> (32 - left)) & (_WORD - 1)).to(torch.int32) if left else word


def _bf16_of(pair: Tensor) -> Tensor:
    """int32 (...) -> the two bf16 that it holds, (..., 2)."""
    return torch.stack((pair << 16 >> 16, pair >> 16), dim=-1).to(torch.int16).view(torch.bfloat16)


def _signed(word: int) -> int:
    """32 bits as the int32 that has them."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _pair_tables(device: torch.device) -> list[Tensor]:
    """For each pair: its byte of packed codes -> its bits in their place in a word, int32 (256,)."""
    byte = range(256)
    wanted = [(c & 7) << 6 | (c >> 3 & 1) << 15 | (c >> 4 & 7) << 22 | c >> 7 << 31 for c in byte]
    rows = [[_signed(bits >> by | bits << (32 - by)) for bits in wanted] for by in ROTATIONS]
    return list(torch.tensor(rows, dtype=torch.int32).to(device))


def _encode_scale(scale: Tensor, fmt: FP4Format) -> tuple[Tensor, int, Tensor]:
    """Scale bytes as the format has them -> as they are stored, the exponent, and where codes are dropped."""
    if fmt == MXFP4:
        is_nan = scale == E8M0_NAN
        largest = int(scale.masked_fill(is_nan, 0).max()) if scale.numel() else 0
        shift = min(118, 254 - largest)
        return _e8m0_tables(shift, scale.device)[0][scale.long()], 126 - shift, is_nan
    if bool((scale > E4M3_NAN).any()):
        raise refusal(
            "weight layout", "a block scale is negative.", needs=[("block scales of 0 or more", "a sign bit")],
            do="quantize the weight again, with its signs in the codes",
        )  # fmt: skip
    return _e4m3_table(scale.device)[0][scale.long()], 8, scale == 0


def _e4m3_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """E4M3 bytes -> unsigned E5M3, and back; uint8 (256,)."""
    there = [0] * 256
    for byte in range(1, E4M3_NAN):
        exponent, mantissa = byte >> 3, byte & 7
        if exponent == 0:  # subnormal: mantissa * 2^-9
            top = mantissa.bit_length() - 1
            exponent, mantissa = top - 2, (mantissa << (3 - top)) & 7
        there[byte] = (exponent + 14) << 3 | mantissa
    there[E4M3_NAN] = 0xFF
    back = [0] * 256
    for byte in range(1, E4M3_NAN + 1):
        back[there[byte]] = byte
    return torch.tensor(there, dtype=torch.uint8).to(device), torch.tensor(back, dtype=torch.uint8).to(device)


def _e8m0_tables(shift: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """E8M0 bytes -> shifted, and back; uint8 (256,). NaN stays what it is."""
    there = [min(byte + shift, 254) for byte in range(255)] + [E8M0_NAN]
    back = [max(byte - shift, 0) for byte in range(255)] + [E8M0_NAN]
    return torch.tensor(there, dtype=torch.uint8).to(device), torch.tensor(back, dtype=torch.uint8).to(device)


def _scale_order(stored: Tensor, fmt: FP4Format, tiles: int) -> Tensor:
    """Stored scale bytes (N, K/group) -> (tiles, K/256, lanes, 8)."""
    across = BLOCK // fmt.group_size
    padded = torch.nn.functional.pad(
        stored, (0, -stored.shape[1] % (SCALE_BLOCKS * across), 0, tiles * ROWS - stored.shape[0])
    )
    chunks = padded.shape[1] // (SCALE_BLOCKS * across)
    ordered = padded.view(tiles, 2, 8, chunks, SCALE_BLOCKS, across).permute(0, 3, 2, 5, 4, 1)
    return ordered.reshape(tiles, chunks, 8 * across, 2 * SCALE_BLOCKS)
