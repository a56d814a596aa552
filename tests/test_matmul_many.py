"""The product for many tokens: its order of K, how it is cut, the machine code, and, on a GPU, its results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from ahead_of_time import Compiled, Instruction, compile_kernel
from quarterturn import weight_layout
from quarterturn.backends import gpu_matmul_many
from quarterturn.backends.gpu_matmul_many import (
    Config,
    Cut,
    by_library,
    cut,
    decode,
    has_room,
    many,
    order,
    shares,
    ways,
    workspace,
)  # fmt: skip
from quarterturn.formats import MXFP4, NVFP4, FP4Format
from quarterturn.kernels import decode_fragments, matmul_many, matmul_operand, order_tokens, ring_ptx
from quarterturn.weight_layout import Fragments

BF16, FP16 = torch.bfloat16, torch.float16
MULTIPROCESSORS = 132
REGISTERS, SHARED, SHARED_MOST = 65536, 233472, 232448  # of a Hopper multiprocessor, and of one program
SHAPES = (
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (6144, 4096),
    (4096, 4096),
    (11008, 4096),
    (3584, 18944),
    (464, 464),
)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def weight(n: int, k: int, fmt: FP4Format, device: str = "cpu") -> tuple[Fragments, torch.Tensor]:
    """Random fragments and e2m1 * block_scale, float64 (n, k); some groups have the scale 0."""
    generator = torch.Generator().manual_seed(n * 7 + k)
    codes = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    first, last = (0, 0x60) if fmt == NVFP4 else (118, 132)
    scale = torch.randint(first, last, (n, k // fmt.group_size), generator=generator, dtype=torch.uint8)
    scale = scale.view(fmt.scale_dtype)
    values = torch.tensor(E2M1, dtype=torch.float64)[torch.stack((codes & 15, codes >> 4), -1).long()].view(n, k)
    made = weight_layout.forward(codes.to(device), scale.to(device), fmt)
    factor = scale.double() if fmt == NVFP4 else 2.0 ** (scale.view(torch.uint8).double() - 127)
    return made, (values * factor.repeat_interleave(fmt.group_size, 1)).to(device)


def ordered(x: torch.Tensor) -> torch.Tensor:
    """What `order` gives, in PyTorch."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 64))
    return padded.view(x.shape[0], -1, 4, 8, 2).transpose(2, 3).reshape(padded.shape)


# ---- the order of K


@pytest.mark.parametrize(("n", "k", "fmt"), [(48, 192, NVFP4), (40, 464, NVFP4), (33, 352, MXFP4)])
def test_fragments_times_ordered_tokens_are_the_product(n: int, k: int, fmt: FP4Format) -> None:
    """The pairs of a lane in the operand's columns, as the kernel puts them, against x in the order of `ordered`."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    one = torch.full((n, k // fmt.group_size), 0x38 if fmt == NVFP4 else 127, dtype=torch.uint8)
    made = weight_layout.forward(codes, one.view(fmt.scale_dtype), fmt)
    pairs = torch.stack([weight_layout._bf16_of(pair) for pair in weight_layout._pairs(made.codes)], dim=-2)
    tiles, blocks = made.codes.shape[:2]
    # tile, block, g, q, row / 8, t, h, e -> row 16 tile + 8 (row / 8) + g, column 64 block + 16t + 8h + 2q + e
    operand = pairs.double().view(tiles, blocks, 8, 4, 2, 4, 2, 2).permute(0, 4, 2, 1, 5, 6, 3, 7)
    operand = operand.reshape(tiles * 16, blocks * 64)[:n] * 2.0**126
    x = torch.randint(-8, 9, (5, k)).double()
    assert torch.equal(ordered(x) @ operand.T, x @ weight_layout.decoded(made).double().T)


def test_the_order_of_a_block() -> None:
    placed = ordered(torch.arange(64.0).view(1, 64))[0].int().tolist()
    assert placed[:16] == [0, 1, 16, 17, 32, 33, 48, 49, 2, 3, 18, 19, 34, 35, 50, 51]
    assert all(placed[16 * t + 8 * h + 2 * q + e] == 16 * q + 4 * t + 2 * h + e
               for t, h, q, e in itertools.product(range(4), range(2), range(4), range(2)))  # fmt: skip


# ---- how it is cut


def cuts(count: int) -> Iterator[tuple[int, int, int, Cut]]:
    for (n, k), m, use in itertools.product(SHAPES, (1, 17, 33, 64, 65, 128, 256, 300, 1024, 4096), (False, True)):
        yield m, n, k, cut(m, n, k, count, use)


def pieces(program: int, launch: tuple[int, int, int], tiles: int, chunks: int, how: Cut) -> list[tuple[int, int, int]]:
    """What the kernel's _count and _piece say: tile, first chunk, and the one behind the last."""
    programs, each, more = launch
    found = [
        (program + i * programs, part * chunks // how.inside, (part + 1) * chunks // how.inside)
        for i in range(each + (program < more))
        for part in range(how.inside)
    ]
    left, rank = each * programs + more + program // how.split, program % how.split
    if how.split > 1 and left < tiles:
        found.append((left, rank * chunks // how.split, (rank + 1) * chunks // how.split))
    return found


@pytest.mark.parametrize("count", [78, 114, MULTIPROCESSORS, 144])
def test_every_chunk_of_every_tile_is_multiplied_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By programs that run beside each other, whose sums find room in the workspace, none without work."""
    monkeypatch.setattr("quarterturn.backends.gpu_matmul_many.multiprocessors", lambda _: count)
    space = workspace(torch.device("cpu"))
    for m, n, k, how in cuts(count):
        tiles, chunks = -(-n // how.rows) * -(-m // how.tokens), -(-k // 256)
        programs, _, _ = launch = shares(tiles, how, count)
        assert has_room(how, m, n, count)
        assert programs <= how.programs * count, (m, n, k, how)
        if how.split > 1:
            assert how.split <= chunks, (m, n, k, how)
            assert programs * how.rows * how.tokens <= space.parts.numel(), (m, n, k, how)
            assert 2 * programs // how.split <= space.counts.numel(), (m, n, k, how)
        found = [pieces(program, launch, tiles, chunks, how) for program in range(programs)]
        assert all(found), (m, n, k, how)
        done = sorted((tile, chunk) for of in found for tile, begin, stop in of for chunk in range(begin, stop))
        assert done == [(tile, chunk) for tile in range(tiles) for chunk in range(chunks)], (m, n, k, how)


@pytest.mark.parametrize(("count", "programs"), [(78, 78), (132, 132), (132, 264), (144, 288)])
def test_rounds_leave_each_group_a_tile_at_most(count: int, programs: int) -> None:
    for tiles in range(1, 1200):
        for split, rounds in ways(tiles, programs):
            how = Cut(128, 128, split, False, programs // count, rounds=rounds)
            used, each, more = shares(tiles, how, count)
            left = tiles - used * each - more
            assert 0 <= left <= (used // split if split > 1 else 0), (tiles, how)
            assert used <= programs, (tiles, how)
            assert split == 1 or left, "groups without a tile"


def test_what_was_measured_fastest_is_chosen() -> None:
    fastest = {
        (64, 28672, 4096): (64, 1, 0), (64, 4096, 14336): (64, 8, 0), (64, 8192, 8192): (64, 4, 0),
        (64, 6144, 4096): (64, 4, 0), (64, 4096, 4096): (64, 8, 0),
        (128, 4096, 14336): (128, 4, 0), (128, 8192, 8192): (128, 2, 0), (128, 6144, 4096): (128, 2, 0),
        (256, 28672, 4096): (128, 2, 3), (256, 8192, 8192): (128, 1, 0), (256, 6144, 4096): (128, 1, 0),
        (256, 4096, 4096): (128, 2, 0), (512, 6144, 4096): (128, 2, 1), (512, 28672, 4096): (128, 1, 0),
        (512, 8192, 8192): (256, 1, 0), (1024, 6144, 4096): (128, 1, 0), (1024, 4096, 4096): (256, 1, 0),
        (4096, 28672, 4096): (256, 1, 0),
    }  # fmt: skip
    for (m, n, k), want in fastest.items():
        how = cut(m, n, k, MULTIPROCESSORS, True)
        assert (how.tokens, how.split, how.rounds) == want, (m, n, k, how)


# ---- the machine code


def built(
    how: Cut, dtype: torch.dtype = BF16, fmt: FP4Format = NVFP4, plain: bool = True, by_row: bool = False
) -> Compiled:
    """As `launcher` compiles it. plain: K and N are such as models have, no bias; else a scale a row too."""
    one = how.tokens <= 64
    config = Config(torch.device("cpu"), dtype, fmt, how, plain, not plain, by_row or not plain, plain, one)
    kind, layout = "bf16" if dtype == BF16 else "fp16", NVMMASharedLayout(128, 16, 2)
    signature = {
        "x_desc": f"tensordesc<{kind}[{how.tokens}, 64],{layout!r}>",
        "y_desc": f"tensordesc<{kind}[{how.tokens}, {how.rows}],{layout!r}>", "codes_ptr": "*i32", "scales_ptr": "*i32",
        "y_ptr": f"*{kind}", "alpha_ptr": "*fp32", "x_scale_ptr": "*fp32", "bias_ptr": "*fp32", "parts_ptr": "*fp32",
        "counts_ptr": "*i32",
        **dict.fromkeys(("m", "n", "row_tiles", "token_tiles", "each", "more", "chunks", "blocks", "tiles16"), "i32"),
    }  # fmt: skip
    return compile_kernel(
        matmul_many.matmul_many, signature, config.constants(), 90, num_warps=how.num_warps,
        divisible=[name for name in signature if name.endswith("_ptr")], **config.options(),
    )  # fmt: skip


def main_loop(code: Compiled) -> list[Instruction]:
    """The loop over chunks: of those with a chunk's 16 wgmma, the shortest."""
    return min((loop for loop in code.loops if sum(i.name == "HGMMA" for i in loop) == 16), key=len)


def shape(tokens: int, split: int, natural: bool = False) -> Cut:
    return Cut(128, tokens, split, natural, 2 if tokens <= 64 else 1)


COMPILED = {
    "32 tokens": SimpleNamespace(how=shape(32, 8)),
    "32 tokens, parts inside": SimpleNamespace(how=shape(32, 1)._replace(inside=4)),
    "128 tokens, parts inside": SimpleNamespace(how=shape(128, 1)._replace(inside=4)),
    "64 tokens": SimpleNamespace(how=shape(64, 1)),
    "64 tokens, split": SimpleNamespace(how=shape(64, 8)),
    "128 tokens": SimpleNamespace(how=shape(128, 1)),
    "128 tokens, odd sizes": SimpleNamespace(how=shape(128, 4), plain=False),
    "128 tokens, natural order": SimpleNamespace(how=shape(128, 1, True)),
    "256 tokens": SimpleNamespace(how=shape(256, 1)),
    "256 tokens, split": SimpleNamespace(how=shape(256, 4)),
    "256 tokens, natural order": SimpleNamespace(how=shape(256, 1, True)),
    "64 tokens, parts inside": SimpleNamespace(how=shape(64, 1)._replace(inside=4)),
    "64 tokens, a scale a row": SimpleNamespace(how=shape(64, 4), by_row=True),
    "64 tokens, split, odd sizes": SimpleNamespace(how=shape(64, 8), plain=False),
    "256 tokens, natural order, a scale a row": SimpleNamespace(how=shape(256, 1, True), by_row=True),
    "256 tokens, natural order, split": SimpleNamespace(how=shape(256, 4, True)),
    "256 tokens, natural order, split, odd sizes": SimpleNamespace(how=shape(256, 2, True), plain=False),
    "fp16": SimpleNamespace(how=shape(128, 1), dtype=FP16),
    "mxfp4": SimpleNamespace(how=shape(256, 1), fmt=MXFP4),
}


@pytest.fixture(params=COMPILED.values(), ids=COMPILED)
def compiled(request: pytest.FixtureRequest) -> tuple[Cut, Compiled]:
    return request.param.how, built(**vars(request.param))


def test_nothing_spills_in_the_loop(compiled: tuple[Cut, Compiled], request: pytest.FixtureRequest) -> None:
    """One cut excepted, by a store and a load in 364. What is kept from one piece of work for the next may wait in
    memory where two programs share the registers, and where sizes are odd."""
    how, code = compiled
    name = request.node.callspec.id
    most = {"256 tokens, natural order, split": 2}.get(name, 0)
    assert len([i for i in main_loop(code) if i.name in ("LDL", "STL")]) <= most, code.summary()
    assert code.stack <= (200 if how.programs == 2 else 72 if "odd" in name else 8), code.summary()


def test_no_warp_waits_for_all_others_in_the_loop(compiled: tuple[Cut, Compiled]) -> None:
    how, code = compiled
    loop = main_loop(code)
    assert not [i for i in loop if i.name == "BAR"], code.summary()
    assert ring_ptx.barriers_in(code.ptx) == matmul_many.barriers_at(how.rows, how.tokens, how.natural)


def test_where_barriers_are_is_read_from_the_compiled_code() -> None:
    assert ring_ptx.barriers_in("add.s32 %r7, %r1, 32;\nadd.s32 %r8, %r1, 64;\n@%p1 mbarrier.init.b64 [%r8], 1;") == 64
    assert ring_ptx.barriers_in("add.s32 %r8, %r1, 64;\nst.shared.b32 [%r8], 1;") is None


def test_the_programs_fit_beside_each_other(compiled: tuple[Cut, Compiled]) -> None:
    how, code = compiled
    threads = 32 * (how.num_warps + 4)  # the warp that copies x comes with three more
    assert how.programs * threads * code.registers <= REGISTERS, code.summary()
    assert code.shared <= SHARED_MOST, code.summary()
    assert how.programs * (code.shared + 1024) <= SHARED, code.summary()


def test_wgmma_runs_beside_the_decoding(compiled: tuple[Cut, Compiled]) -> None:
    """One fence and one wait for the block before, a block: ptxas serializes none of the 16."""
    how, code = compiled
    loop = main_loop(code)
    assert all(i.opcode.startswith(f"HGMMA.64x{how.tokens}x16.F32") for i in loop if i.name == "HGMMA"), code.summary()
    assert sum(i.opcode == "WARPGROUP.ARRIVE" for i in loop) == 4, code.summary()
    waits = [i.operands for i in loop if i.opcode.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == 4, code.summary()
    assert all(w.endswith("0x1") for w in waits), waits


def test_instructions_and_loads_a_weight(compiled: tuple[Cut, Compiled], request: pytest.FixtureRequest) -> None:
    """A lane decodes 128 weights a pass: 64 multiplications, 64 pairs placed, and what goes with them."""
    how, code = compiled
    loop = main_loop(code)
    name = request.node.callspec.id
    most = 3.8 if name == "fp16" else (2.9 if how.natural else 2.5) + 0.1 * ("odd" in name)
    assert len(loop) / 128 <= most, code.summary()
    assert sorted(i.bits for i in loop if i.name == "LDG") == [64, 128, 128, 128, 128], code.summary()
    assert sum(i.name == "LDSM" for i in loop) == (16 if how.natural else 0), code.summary()


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_decoding_and_ordering_move_16_bytes_at_a_time(capability: int) -> None:
    asm, constraints = matmul_operand.decode_asm(NVFP4, False)
    code = compile_kernel(
        decode_fragments.decode_fragments,
        {**dict.fromkeys(("codes_ptr", "scales_ptr", "out_ptr"), "*i32"),
         **dict.fromkeys(("tiles", "blocks", "chunks"), "i32")},
        {"LANES": 32, "CODES": matmul_operand.fragment_layout(64, 4, 4), "ASM": asm, "CONSTRAINTS": constraints,
         "ROWS": 64, "P": decode_fragments.store_layout(64)}, capability,
    )  # fmt: skip
    assert (code.global_stores, code.global_loads[128], code.stack) == ({128: 4}, 1, 0), code.summary()
    code = compile_kernel(
        order_tokens.order_tokens,
        {"x_ptr": "*bf16", "out_ptr": "*bf16", "m": "i32", "k": "i32", "stride": "i32", "padded": "i32"},
        {"TOKENS": order_tokens.TOKENS, "LOAD": order_tokens.load_layout(), "HOPPER": capability >= 90}, capability,
        divisible=["x_ptr", "out_ptr", "k", "stride", "padded"],
    )  # fmt: skip
    assert (code.global_stores, code.global_loads, code.stack) == ({128: 2}, {128: 2}, 0), code.summary()


# ---- results


CASES = [
    (100, 512, 4160, BF16, NVFP4, shape(128, 1)._replace(inside=4)),
    (20, 333, 4096, BF16, MXFP4, shape(32, 1)._replace(inside=8)),
    (20, 500, 4096, BF16, NVFP4, shape(32, 2)),
    (130, 333, 4160, BF16, NVFP4, shape(128, 4, True)),
    (64, 512, 4096, BF16, MXFP4, shape(64, 2, True)), (70, 512, 1024, FP16, NVFP4, shape(128, 1, True)),
    (20, 512, 4096, BF16, NVFP4, shape(32, 8)), (37, 464, 464, BF16, NVFP4, shape(64, 1)),
    (64, 512, 4096, BF16, NVFP4, shape(64, 8)), (50, 333, 2064, BF16, NVFP4, shape(64, 4)),
    (50, 333, 2064, BF16, NVFP4, shape(64, 8)), (100, 640, 2048, BF16, NVFP4, shape(128, 4)),
    (300, 1000, 1104, BF16, NVFP4, shape(256, 1)),
    (300, 1000, 1104, BF16, NVFP4, shape(256, 1, True)), (256, 384, 1024, BF16, NVFP4, shape(256, 2)),
    (128, 333, 576, FP16, NVFP4, shape(128, 1)), (300, 512, 2048, FP16, NVFP4, shape(256, 1, True)),
    (64, 512, 1024, BF16, MXFP4, shape(64, 2)), (300, 640, 1088, BF16, MXFP4, shape(256, 1, True)),
    # several tiles a program, and tiles that groups make after such
    (700, 9000, 464, BF16, NVFP4, shape(128, 1)), (1500, 8200, 1104, BF16, NVFP4, shape(256, 1, True)),
    (60, 18944, 1104, BF16, NVFP4, shape(64, 1)), (300, 8200, 2048, FP16, NVFP4, shape(128, 1)._replace(inside=4)),
    (300, 8192, 1104, BF16, NVFP4, shape(128, 2)._replace(rounds=1)),
    (700, 9000, 2064, BF16, NVFP4, shape(128, 4)._replace(rounds=3)),
    (64, 28672, 2064, BF16, NVFP4, shape(64, 8)._replace(rounds=1)),
    (700, 6144, 1120, BF16, MXFP4, shape(256, 4, True)._replace(rounds=1)),
    (128, 333, 304, BF16, NVFP4, shape(128, 8)), (1000, 333, 2000, FP16, NVFP4, shape(256, 2)),
    (70, 1000, 1104, BF16, NVFP4, None), (70, 512, 4096, FP16, NVFP4, None), (70, 512, 1088, BF16, MXFP4, None),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True], ids=["one scale", "a scale a row"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("m", "n", "k", "dtype", "fmt", "how"), CASES)
def test_the_product_on_a_gpu(
    m: int, n: int, k: int, dtype: torch.dtype, fmt: FP4Format, how: Cut | None, with_bias: bool, by_row: bool
) -> None:
    """Against float64 on the same operands: half a step of the result's rounding, and 2e-6 of the sum of magnitudes for
    the order of fp32 additions. Twice the same bits; memory that nobody wrote would be NaN."""
    made, exact = weight(n, k, fmt, "cuda")
    x = torch.randn(m, k, device="cuda").to(dtype)
    tensor_scale = (torch.rand(n, device="cuda") + 0.5) * 1e-3
    x_scale = torch.rand(m if by_row else 1, device="cuda") + 0.5
    bias = torch.randn(n, device="cuda") if with_bias else None
    alpha, space, results = tensor_scale * 2.0**made.exponent, workspace(x.device), []
    for _ in range(2):
        y = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
        if how is None:
            by_library(x, made, alpha, x_scale, bias, out=y)
        else:
            many(x, made, alpha, x_scale, bias, space, out=y, chosen=how)
        results.append(y)
    factor = tensor_scale.double() * x_scale.double().view(-1, 1)
    want = x.double() @ exact.T * factor + (0 if bias is None else bias.double())
    size = x.double().abs() @ exact.abs().T * factor
    half_step = 2.0**-9 if dtype == BF16 else 2.0**-12
    error = (results[0].double() - want).abs()
    assert bool((error <= want.abs() * 2 * half_step + size * 2e-6 + 1e-7).all()), float((error / size).max())
    assert torch.equal(results[0], results[1])
    assert int(space.counts.abs().sum()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "dtype"), [(NVFP4, BF16), (NVFP4, FP16), (MXFP4, BF16)])
def test_decoding_on_a_gpu_equals_the_layouts_own(fmt: FP4Format, dtype: torch.dtype) -> None:
    made, exact = weight(333, 608, fmt, "cuda")
    out = torch.full((336, 640), torch.nan, dtype=dtype, device="cuda")
    decode(made, dtype, 0, 21, out)
    assert torch.equal(out[:333, :608].double() * 2.0**made.exponent, exact)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k"), [(1, 64), (33, 464), (100, 4096)])
def test_ordering_on_a_gpu_equals_its_twin(m: int, k: int) -> None:
    x = torch.randn(m, k, device="cuda").bfloat16()
    assert torch.equal(order(x), ordered(x))


@pytest.mark.gpu
@pytest.mark.parametrize("patience", [gpu_matmul_many._PATIENCE, 0])
def test_groups_on_streams_beside_each_other_end(patience: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others there are, and whether a program waits for the others of its group or leaves it all to the
    last of them: always the same bits."""
    made, exact = weight(4096, 4096, NVFP4, "cuda")
    alpha, one = torch.full((4096,), 2.0**made.exponent, device="cuda"), torch.ones(1, device="cuda")
    how, streams = shape(64, 8), [torch.cuda.Stream() for _ in range(4)]
    x = torch.randn(64, 4096, device="cuda").to(BF16)
    want = many(x, made, alpha, one, None, workspace(x.device), chosen=how)
    monkeypatch.setattr(gpu_matmul_many, "_PATIENCE", patience)
    monkeypatch.setattr(gpu_matmul_many, "launcher", lru_cache(gpu_matmul_many.launcher.__wrapped__))
    spaces = [workspace(x.device) for _ in streams]
    torch.cuda.synchronize()
    results = []
    for _ in range(200):
        for stream, space in zip(streams, spaces, strict=True):
            with torch.cuda.stream(stream):
                results.append(many(x, made, alpha, one, None, space, chosen=how))
    torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in results)
    assert all(int(space.counts.abs().sum()) == 0 for space in spaces)
    assert float((want.double() - x.double() @ exact.T).norm() / want.double().norm()) < 2.0**-8
