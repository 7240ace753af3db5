"""Every opcode of the simulator against a computation of its own: integers here, in Python's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ptx_tools import TYPES, edge_values, evaluate, run_ptx
from test_isa_float import APPROXIMATE, EXACT

from cupy_fa2 import ptxsim
from cupy_fa2.ptxsim.arithmetic.isa import TABLE
from cupy_fa2.ptxsim.instructions.bind import BINDERS


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


def bfe_signed(a: int, b: int, c: int) -> int:
    # The pseudocode of the PTX ISA, bit by bit.
    position, length = b & 0xFF, c & 0xFF
    sign = 0 if length == 0 else (a >> min(position + length - 1, 31)) & 1
    result = 0
    for i in range(32):
        bit = (a >> (position + i)) & 1 if i < length and position + i <= 31 else sign
        result |= bit << i
    return result


def bfe_unsigned(a: int, b: int, c: int) -> int:
    position, length = b & 0xFF, c & 0xFF
    return sum(((a >> (position + i)) & 1) << i for i in range(32) if i < length and position + i <= 31)


def bfi(a: int, b: int, c: int, d: int) -> int:
    position, length = c & 0xFF, d & 0xFF
    result = b
    for i in range(32):
        if i < length and position + i < 32:
            result = result & ~(1 << (position + i)) | ((a >> i) & 1) << (position + i)
    return result


def prmt(a: int, b: int, selector: int) -> int:
    octets = (b << 32 | a).to_bytes(8, "little")
    result = []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = octets[nibble & 7]
        result.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(result), "little")


# Opcode, types of the operands, type of the result, the same in Python integers (the low bits are kept).
INTEGER: list[tuple[str, str, str, Callable[..., int]]] = [
    *[(f"add.{t}", f"{t} {t}", t, lambda a, b: a + b) for t in ("s32", "u32", "s64", "u64", "u16")],
    *[(f"sub.{t}", f"{t} {t}", t, lambda a, b: a - b) for t in ("s32", "u64", "s16")],
    *[(f"mul.lo.{t}", f"{t} {t}", t, lambda a, b: a * b) for t in ("s32", "u32", "s64", "u16")],
    *[(f"mul.hi.{t}", f"{t} {t}", t, lambda a, b, n=int(t[1:]): a * b >> n) for t in ("s32", "u32", "s64", "u64")],
    ("mul.wide.s32", "s32 s32", "s64", lambda a, b: a * b),
    ("mul.wide.u32", "u32 u32", "u64", lambda a, b: a * b),
    ("mul.wide.s16", "s16 s16", "s32", lambda a, b: a * b),
    ("mad.lo.s32", "s32 s32 s32", "s32", lambda a, b, c: a * b + c),
    ("mad.lo.u64", "u64 u64 u64", "u64", lambda a, b, c: a * b + c),
    ("mad.hi.u32", "u32 u32 u32", "u32", lambda a, b, c: (a * b >> 32) + c),
    ("mad.wide.s32", "s32 s32 s64", "s64", lambda a, b, c: a * b + c),
    ("mad.wide.u32", "u32 u32 u64", "u64", lambda a, b, c: a * b + c),
    *[(f"div.{t}", f"{t} {t}", t, lambda a, b: truncated(a, b) if b else -1) for t in ("s32", "u32", "s64", "u64")],
    *[
        (f"rem.{t}", f"{t} {t}", t, lambda a, b: a - truncated(a, b) * b if b else a + b * 0)
        for t in ("s32", "u32", "s64", "u64")
    ],
    *[(f"min.{t}", f"{t} {t}", t, min) for t in ("s32", "u32", "s64")],
    *[(f"max.{t}", f"{t} {t}", t, max) for t in ("s32", "u32", "u64")],
    ("neg.s32", "s32", "s32", lambda a: -a),
    ("abs.s32", "s32", "s32", abs),
    ("and.b32", "b32 b32", "b32", lambda a, b: a & b),
    ("or.b64", "b64 b64", "b64", lambda a, b: a | b),
    ("xor.b16", "b16 b16", "b16", lambda a, b: a ^ b),
    ("not.b32", "b32", "b32", lambda a: ~a),
    ("and.pred", "pred pred", "pred", lambda a, b: a & b),
    ("xor.pred", "pred pred", "pred", lambda a, b: a ^ b),
    ("not.pred", "pred", "pred", lambda a: 1 - a),
    ("shl.b32", "b32 u32", "b32", lambda a, n: a << n if n < 64 else 0),
    ("shl.b64", "b64 u32", "b64", lambda a, n: a << n if n < 64 else 0),
    ("shr.u32", "u32 u32", "u32", lambda a, n: a >> min(n, 64)),
    ("shr.s32", "s32 u32", "s32", lambda a, n: a >> min(n, 64)),
    ("shr.s64", "s64 u32", "s64", lambda a, n: a >> min(n, 64)),
    ("shf.l.wrap.b32", "b32 b32 u32", "b32", lambda a, b, n: ((b << 32 | a) << (n & 31)) >> 32),
    ("shf.r.wrap.b32", "b32 b32 u32", "b32", lambda a, b, n: (b << 32 | a) >> (n & 31)),
    ("shf.l.clamp.b32", "b32 b32 u32", "b32", lambda a, b, n: ((b << 32 | a) << min(n, 32)) >> 32),
    ("shf.r.clamp.b32", "b32 b32 u32", "b32", lambda a, b, n: (b << 32 | a) >> min(n, 32)),
    ("bfe.u32", "u32 u32 u32", "u32", bfe_unsigned),
    ("bfe.s32", "s32 u32 u32", "s32", bfe_signed),
    ("bfi.b32", "b32 b32 u32 u32", "b32", bfi),
    ("prmt.b32", "b32 b32 b32", "b32", prmt),
    ("popc.b32", "b32", "u32", lambda a: a.bit_count()),
    ("popc.b64", "b64", "u32", lambda a: a.bit_count()),
    ("clz.b32", "b32", "u32", lambda a: 32 - a.bit_length()),
    ("clz.b64", "b64", "u32", lambda a: 64 - a.bit_length()),
    ("bfind.u32", "u32", "u32", lambda a: a.bit_length() - 1),
    ("brev.b32", "b32", "b32", lambda a: int(f"{a:032b}"[::-1], 2)),
    ("selp.b32", "b32 b32 pred", "b32", lambda a, b, p: a if p else b),
    ("mov.b32", "b32", "b32", lambda a: a),
    ("cvt.s64.s32", "s32", "s64", lambda a: a),
    ("cvt.u64.u32", "u32", "u64", lambda a: a),
    ("cvt.u32.u64", "u64", "u32", lambda a: a),
    ("cvt.s32.s16", "s16", "s32", lambda a: a),
    ("cvt.u16.u32", "u32", "u16", lambda a: a),
    ("cvt.s32.s8", "s32", "s32", lambda a: signed(a, 8)),
    ("cvt.sat.u8.s32", "s32", "u32", lambda a: min(max(a, 0), 255)),
    ("cvt.sat.s16.s32", "s32", "s32", lambda a: min(max(a, -(1 << 15)), (1 << 15) - 1)),
    *[
        (f"setp.{name}.{t}", f"{t} {t}", "pred", function)
        for t in ("s32", "u32", "s64", "u64", "u16")
        for name, function in (
            ("eq", lambda a, b: a == b), ("ne", lambda a, b: a != b), ("lt", lambda a, b: a < b),
            ("le", lambda a, b: a <= b), ("gt", lambda a, b: a > b), ("ge", lambda a, b: a >= b),
        )
    ],
    ("setp.lo.u32", "u32 u32", "pred", lambda a, b: a < b),
    ("setp.hs.u32", "u32 u32", "pred", lambda a, b: a >= b),
    ("setp.lt.and.s32", "s32 s32 pred", "pred", lambda a, b, p: a < b and p),
    ("setp.ge.or.u32", "u32 u32 pred", "pred", lambda a, b, p: a >= b or p),
    ("setp.eq.xor.s32", "s32 s32 pred", "pred", lambda a, b, p: (a == b) != p),
]  # fmt: skip


@pytest.mark.parametrize("case", INTEGER, ids=lambda case: case[0])
def test_integer(case: tuple[str, str, str, Callable[..., int]]) -> None:
    opcode, operands, result, function = case
    sources = [edge_values(t, 256, seed) for seed, t in enumerate(operands.split())]
    got = evaluate(opcode, sources, TYPES[result])
    bits = 1 if result == "pred" else int(result[1:])
    for row, value in zip(zip(*sources, strict=True), got, strict=True):
        expected = int(function(*(int(x) for x in row))) & ((1 << bits) - 1)
        assert int(value) & ((1 << bits) - 1) == expected, row


@pytest.mark.parametrize("table", [0x00, 0xC0, 0x96, 0xE8, 0x1B, 0xFF])
def test_lop3(table: int) -> None:
    sources = [edge_values("b32", 64, seed) for seed in range(3)]
    out = np.zeros(64, np.uint32)
    run_ptx(f"lop3.b32 r0, a0, a1, a2, {table};", sources, [out])
    for a, b, c, value in zip(*(x.tolist() for x in sources), out.tolist(), strict=True):
        bits = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(32)]
        assert value == sum((table >> bit & 1) << i for i, bit in enumerate(bits))


def test_pack_and_unpack() -> None:
    rng = np.random.default_rng(7)
    low, high = (rng.integers(0, 1 << 16, 64).astype(np.uint16) for _ in range(2))
    word, wide, first, second = np.zeros(64, np.uint32), np.zeros(64, np.uint64), low * 0, low * 0
    body = "mov.b32 r0, {a0, a1}; mov.b64 r1, {r0, r0}; { .reg .b32 x, y; mov.b64 {x, y}, r1; mov.b32 {r2, r3}, y; }"
    run_ptx(body, [low, high], [word, wide, first, second])
    np.testing.assert_array_equal(word, low | high.astype(np.uint32) << 16)
    np.testing.assert_array_equal(wide, word | word.astype(np.uint64) << 32)
    np.testing.assert_array_equal((first, second), (low, high))


def test_sixty_four_bit_addresses_do_not_wrap_and_narrow_ones_do() -> None:
    a = np.full(32, 70_000, np.int32)
    wide, narrow = np.zeros(32, np.int64), np.zeros(32, np.int32)
    run_ptx("mul.wide.s32 r0, a0, a0; mul.lo.s32 r1, a0, a0;", [a], [wide, narrow])
    assert wide[0] == 4_900_000_000
    assert narrow[0] == 4_900_000_000 - 2**32


def test_immediates() -> None:
    out = [np.zeros(32, t) for t in (np.int32, np.uint32, np.float32, np.uint64, np.float32)]
    run_ptx(
        "mov.b32 r0, -5; mov.u32 r1, 0xFFFFFFFFU; mov.f32 r2, 0f3FC00000; mov.u64 r3, -1; mov.f32 r4, 0.25;", [], out
    )
    assert [x[0] for x in out] == [-5, 0xFFFFFFFF, 1.5, 2**64 - 1, 0.25]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("frobnicate.b32 %w, %w;", "frobnicate"),
        ("add.rz.f32 %t, %t, %t;", "nearest"),
        ("{ .reg .b64 %d; mov.b64 %d, 0; fma.rn.f64 %d, %d, %d, %d; }", "fma.f64"),
        ("add.cc.u32 %w, %w, %w;", "cc"),
        ("mul.f32x2 %w, %w, %w;", "f32x2"),
        ("wgmma.fence.sync.aligned;", "wgmma"),
        ("cp.async.bulk.commit_group;", "bulk"),
        ("call foo, (%w);", "foo"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%w}, {%w}, {%w}, {%w};", "m8n8k4"),
    ],
)
def test_the_unknown_is_refused_by_name(body: str, named: str) -> None:
    with pytest.raises(ptxsim.SimulationError, match=named) as caught:
        run_ptx("\n" + body, [], [])
    assert isinstance(caught.value, (ptxsim.UnsupportedInstruction, ptxsim.ParseError))
    if isinstance(caught.value, ptxsim.UnsupportedInstruction):
        assert caught.value.text in body
        assert caught.value.line > 1


#: Opcodes that other files exercise: what warps do together, and memory.
ELSEWHERE = {
    "mma", "ldmatrix", "shfl", "vote", "activemask", "redux", "bar", "barrier", "membar", "fence", "prefetch",
    "prefetchu", "nanosleep", "ld", "ldu", "st", "atom", "red", "cvta", "cp", "mbarrier",
}  # fmt: skip


def test_every_opcode_of_the_table_is_exercised() -> None:
    here = {case[0] for case in (*INTEGER, *EXACT, *APPROXIMATE)} | {"lop3"}
    bases = {opcode.split(".")[0] for opcode in here} | {"max", "min", "cvt", "copysign", "testp"}
    assert set(TABLE) <= bases
    assert set(BINDERS) - set(TABLE) == ELSEWHERE
