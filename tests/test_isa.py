"""Every opcode of the simulator against a computation of its own, in Python integers and exact fractions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_fa2 import ptxsim
from cupy_fa2.ptxsim.arithmetic.isa import TABLE
from cupy_fa2.ptxsim.instructions.bind import BINDERS

TYPES = {
    "pred": np.bool_, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    **{f"{k}{b}": np.dtype(f"{'int' if k == 's' else 'uint'}{b}").type for k in "bus" for b in (8, 16, 32, 64)},
}  # fmt: skip


def run_ptx(body: str, sources: list[np.ndarray], results: list[np.ndarray], **options: Any) -> ptxsim.Report:
    """Run `body` in one block of a thread per element, with a0, a1, ... loaded and r0, r1, ... stored.

    Registers are as wide as the arrays' items; a bool array becomes a predicate. ``%w`` and ``%w64`` hold the
    thread's number.
    """
    memory = ptxsim.GlobalMemory()
    params, lines = [], [".reg .b32 %w, %t; .reg .b64 %w64, %p;", "mov.u32 %w, %tid.x; cvt.u64.u32 %w64, %w;"]
    names = [(f"a{i}", x) for i, x in enumerate(sources)] + [(f"r{i}", x) for i, x in enumerate(results)]
    stores = []
    for i, (name, array) in enumerate(names):
        stored = array.view(np.uint8) if array.dtype == np.bool_ else array
        params.append(memory.bind(stored, name, writable=name[0] == "r").to_bytes(8, "little"))
        size = array.itemsize
        where = f"ld.param.u64 %p, [p{i}]; mad.lo.u64 %p, %w64, {size}, %p;"
        register = f"{name}w" if array.dtype == np.bool_ else name
        bits = max(16, 8 * size)
        lines.append(f".reg .b{bits} {register};")
        if array.dtype == np.bool_:
            lines.append(f".reg .pred {name};")
        if name[0] == "a":
            lines.append(f"{where} ld.global.b{8 * size} {register}, [%p];")
            if array.dtype == np.bool_:
                lines.append(f"setp.ne.u16 {name}, {register}, 0;")
        else:
            if array.dtype == np.bool_:
                stores.append(f"selp.u16 {register}, 1, 0, {name};")
            stores.append(f"{where} st.global.b{8 * size} [%p], {register};")
    declared = ", ".join(f".param .u64 p{i}" for i in range(len(names)))
    text = f".visible .entry k({declared})\n{{\n" + "\n".join([*lines, body, *stores]) + "\nret;\n}\n"
    threads = max((len(x) for _, x in names), default=32)
    kernel = ptxsim.parse_kernel(text, "k")
    return ptxsim.launch(kernel, (1, 1, 1), (threads, 1, 1), options.pop("shared_bytes", 0), params, memory, **options)


def evaluate(opcode: str, sources: list[np.ndarray], result: Any) -> np.ndarray:
    """The result of one instruction for arrays of operands."""
    out = np.zeros(len(sources[0]), result)
    arguments = ", ".join(f"a{i}" for i in range(len(sources)))
    run_ptx(f"{opcode} r0, {arguments};", sources, [out])
    return out


def edge_values(t: str, count: int, seed: int) -> np.ndarray:
    """`count` values of a type: its edges first, then random bits."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(TYPES[t])
    if t == "pred":
        return rng.integers(0, 2, count).astype(np.bool_)
    bits = rng.integers(0, 256, (count, dtype.itemsize), np.uint8).view(dtype).reshape(-1)
    if t[0] in "bus":
        info = np.iinfo(dtype)
        edges = np.array([0, 1, 2, 7, info.max, info.max - 1, info.min, info.min + 1], dtype)
        small = rng.integers(0, 70, count).astype(dtype)
        bits = np.where(rng.integers(0, 3, count) == 0, small, bits)
    else:
        edges = np.array([0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan, 0.5], dtype)
        sane = (rng.standard_normal(count) * 10).astype(dtype)
        bits = np.where(rng.integers(0, 4, count) == 0, bits, sane)
    chosen = rng.integers(0, 3, count) == 0
    return np.where(chosen, edges[rng.integers(0, len(edges), count)], bits).astype(dtype)


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


def to_float32(x: Fraction) -> float:
    """Round a fraction to float32, ties to even, by integer arithmetic."""
    if x == 0:
        return 0.0
    sign, x = (-1, -x) if x < 0 else (1, x)
    exponent = max(x.numerator.bit_length() - x.denominator.bit_length(), -126)
    while Fraction(2) ** exponent > x and exponent > -126:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(x / unit) * unit
    return sign * (math.inf if rounded >= Fraction(2) ** 128 else float(rounded))


EXACT: list[tuple[str, int, Callable[..., Fraction]]] = [
    ("add.f32", 2, lambda a, b: a + b),
    ("add.rn.f32", 2, lambda a, b: a + b),
    ("sub.f32", 2, lambda a, b: a - b),
    ("mul.f32", 2, lambda a, b: a * b),
    ("fma.rn.f32", 3, lambda a, b, c: a * b + c),
    ("div.rn.f32", 2, lambda a, b: a / b),
    ("div.full.f32", 2, lambda a, b: a / b),
    ("rcp.rn.f32", 1, lambda a: 1 / a),
    ("rcp.approx.ftz.f32", 1, lambda a: 1 / a),
    ("neg.f32", 1, lambda a: -a),
    ("abs.f32", 1, abs),
    ("mov.f32", 1, lambda a: a),
    ("cvt.rni.f32.f32", 1, lambda a: Fraction(round(a))),
    ("cvt.rmi.f32.f32", 1, lambda a: Fraction(math.floor(a))),
    ("cvt.rpi.f32.f32", 1, lambda a: Fraction(math.ceil(a))),
    ("cvt.rzi.f32.f32", 1, lambda a: Fraction(math.trunc(a))),
]


@pytest.mark.parametrize(("opcode", "arity", "function"), EXACT, ids=[case[0] for case in EXACT])
def test_float_rounds_once(opcode: str, arity: int, function: Callable[..., Fraction]) -> None:
    rng = np.random.default_rng(1)
    scale = 2.0 ** rng.integers(-12, 12, (arity, 256))
    sources = [(rng.standard_normal(256) * scale[i]).astype(np.float32) for i in range(arity)]
    got = evaluate(opcode, sources, np.float32)
    for row, value in zip(zip(*sources, strict=True), got, strict=True):
        assert float(value) == to_float32(function(*(Fraction(float(x)) for x in row))), row


APPROXIMATE: list[tuple[str, Callable[[float], float]]] = [
    ("ex2.approx.ftz.f32", lambda x: 2.0**x),
    ("ex2.approx.f32", lambda x: 2.0**x),
    ("lg2.approx.ftz.f32", lambda x: math.log2(abs(x))),
    ("sqrt.rn.f32", lambda x: math.sqrt(abs(x))),
    ("sqrt.approx.f32", lambda x: math.sqrt(abs(x))),
    ("rsqrt.approx.f32", lambda x: 1 / math.sqrt(abs(x))),
    ("sin.approx.f32", math.sin),
    ("cos.approx.f32", math.cos),
    ("tanh.approx.f32", math.tanh),
]


@pytest.mark.parametrize(("opcode", "function"), APPROXIMATE, ids=[case[0] for case in APPROXIMATE])
def test_approximate_functions(opcode: str, function: Callable[[float], float]) -> None:
    x = (np.random.default_rng(2).standard_normal(256) * 5).astype(np.float32)
    if opcode.startswith(("lg2", "sqrt", "rsqrt")):
        x = np.abs(x)
    got = evaluate(opcode, [x], np.float32)
    np.testing.assert_allclose(got, [function(float(v)) for v in x], rtol=2e-7)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        ("max.f32", (NAN, 1.0), 1.0),
        ("max.f32", (1.0, NAN), 1.0),
        ("max.f32", (NAN, NAN), NAN),
        ("max.f32", (-0.0, 0.0), 0.0),
        ("max.f32", (0.0, -0.0), 0.0),
        ("min.f32", (0.0, -0.0), -0.0),
        ("min.f32", (NAN, -INF), -INF),
        ("max.NaN.f32", (NAN, 1.0), NAN),
        ("min.NaN.f32", (1.0, NAN), NAN),
        ("ex2.approx.ftz.f32", (-INF,), 0.0),
        ("ex2.approx.ftz.f32", (-127.5,), 0.0),
        ("ex2.approx.ftz.f32", (1e-40,), 1.0),
        ("ex2.approx.ftz.f32", (128.0,), INF),
        ("ex2.approx.ftz.f32", (NAN,), NAN),
        ("ex2.approx.f32", (-127.0,), 2.0**-127),
        ("lg2.approx.ftz.f32", (0.0,), -INF),
        ("lg2.approx.ftz.f32", (-1.0,), NAN),
        ("lg2.approx.ftz.f32", (1e-40,), -INF),
        ("rcp.approx.ftz.f32", (0.0,), INF),
        ("rcp.approx.ftz.f32", (-INF,), -0.0),
        ("add.f32", (INF, -INF), NAN),
        ("add.ftz.f32", (1e-40, 0.0), 0.0),
        ("add.f32", (1e-40, 0.0), float(np.float32(1e-40))),
        ("mul.ftz.f32", (-1e-30, 1e-10), -0.0),
        ("add.sat.f32", (0.75, 0.75), 1.0),
        ("mul.sat.f32", (NAN, 1.0), 0.0),
        ("fma.rn.f32", (INF, 0.0, 1.0), NAN),
    ],
)
def test_float_specials(opcode: str, operands: tuple[float, ...], expected: float) -> None:
    sources = [np.full(32, x, np.float32) for x in operands]
    got = float(evaluate(opcode, sources, np.float32)[0])
    assert (math.isnan(got) and math.isnan(expected)) or struct.pack("f", got) == struct.pack("f", expected)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("unordered", ["", "u"])
@pytest.mark.parametrize("t", ["f32", "f16"])
def test_float_comparisons(name: str, unordered: str, t: str) -> None:
    a, b = edge_values(t, 256, 1), edge_values(t, 256, 2)
    b[::5] = a[::5]
    got = evaluate(f"setp.{name}{unordered}.{t}", [a, b], np.bool_)
    plain = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[name]
    for x, y, value in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        nan = math.isnan(x) or math.isnan(y)
        assert value == (bool(unordered) if nan else eval(f"x {plain} y")), (x, y)


def test_num_and_nan_comparisons() -> None:
    a, b = edge_values("f32", 256, 3), edge_values("f32", 256, 4)
    nan = np.array([math.isnan(x) or math.isnan(y) for x, y in zip(a, b, strict=True)])
    np.testing.assert_array_equal(evaluate("setp.nan.f32", [a, b], np.bool_), nan)
    np.testing.assert_array_equal(evaluate("setp.num.f32", [a, b], np.bool_), ~nan)


def test_copysign_takes_the_sign_of_the_first() -> None:
    a, b = edge_values("f32", 256, 3), edge_values("f32", 256, 4)
    got = evaluate("copysign.f32", [a, b], np.float32).view(np.uint32)
    expected = a.view(np.uint32) & 0x80000000 | b.view(np.uint32) & 0x7FFFFFFF
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("finite", math.isfinite),
        ("infinite", math.isinf),
        ("notanumber", math.isnan),
        ("number", lambda x: not math.isnan(x)),
    ],
)
def test_testp(name: str, function: Callable[[float], bool]) -> None:
    x = edge_values("f32", 256, 3)
    assert evaluate(f"testp.{name}.f32", [x], np.bool_).tolist() == [function(float(v)) for v in x]


def test_setp_second_result_is_the_complement() -> None:
    a, b = edge_values("s32", 64, 1), edge_values("s32", 64, 2)
    p, q = np.zeros(64, np.bool_), np.zeros(64, np.bool_)
    run_ptx("setp.lt.s32 r0|r1, a0, a1;", [a, b], [p, q])
    np.testing.assert_array_equal(p, a < b)
    np.testing.assert_array_equal(q, ~p)


def bfloat16_bits(x: float) -> int:
    """Round to bfloat16 by hand: nearest, ties to even, on the bits."""
    bits = int.from_bytes(struct.pack("<f", x), "little")
    if math.isnan(x):
        return 0x7FFF
    low, high = bits & 0xFFFF, bits >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high & 1))


def float16_bits(x: float) -> int:
    # struct refuses what overflows, where the hardware gives infinity.
    try:
        return int.from_bytes(struct.pack("<e", x), "little")
    except OverflowError:
        return 0x7C00 if x > 0 else 0xFC00


@pytest.mark.parametrize(("t", "bits"), [("f16", float16_bits), ("bf16", bfloat16_bits)])
def test_pack_puts_the_first_source_high(t: str, bits: Callable[[float], int]) -> None:
    rng = np.random.default_rng(3)
    a, b = ((rng.standard_normal(256) * 1000).astype(np.float32) for _ in range(2))
    a[:4] = [65519.0, 65520.0, 1.00390625, 1.01171875]
    got = evaluate(f"cvt.rn.{t}x2.f32", [a, b], np.uint32)
    assert got.tolist() == [bits(float(x)) << 16 | bits(float(y)) for x, y in zip(a, b, strict=True)]
    single = evaluate(f"cvt.rn.{t}.f32", [a], np.uint16)
    assert single.tolist() == [bits(float(x)) for x in a]
    back = evaluate(f"cvt.f32.{t}", [single], np.float32)
    widened = [x << 16 for x in single.tolist()] if t == "bf16" else None
    expected = [
        struct.unpack("<e", int(x).to_bytes(2, "little"))[0] if widened is None
        else struct.unpack("<f", int(widened[i]).to_bytes(4, "little"))[0]
        for i, x in enumerate(single)
    ]  # fmt: skip
    np.testing.assert_array_equal(back, np.array(expected, np.float32))


@pytest.mark.parametrize(
    ("opcode", "x", "expected"),
    [
        ("cvt.rzi.s32.f32", -2.7, -2),
        ("cvt.rni.s32.f32", 2.5, 2),
        ("cvt.rni.s32.f32", 3.5, 4),
        ("cvt.rmi.s32.f32", -2.1, -3),
        ("cvt.rpi.s32.f32", -2.9, -2),
        ("cvt.rzi.s32.f32", 3e9, 2**31 - 1),
        ("cvt.rzi.s32.f32", -3e9, -(2**31)),
        ("cvt.rzi.s32.f32", NAN, 0),
        ("cvt.rzi.u32.f32", -5.0, 0),
        ("cvt.rzi.u32.f32", 1e10, 2**32 - 1),
    ],
)
def test_float_to_integer(opcode: str, x: float, expected: int) -> None:
    dtype = np.uint32 if ".u32." in opcode else np.int32
    assert int(evaluate(opcode, [np.full(32, x, np.float32)], dtype)[0]) == expected


@pytest.mark.parametrize("opcode", ["cvt.rn.f32.s32", "cvt.rn.f32.u32"])
def test_integer_to_float(opcode: str) -> None:
    x = edge_values(opcode[-3:], 256, 5)
    got = evaluate(opcode, [x], np.float32)
    assert [float(v) for v in got] == [to_float32(Fraction(int(v))) for v in x]


@pytest.mark.parametrize("t", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("name", ["add.rn", "mul.rn", "fma.rn", "max", "min", "sub", "neg", "abs"])
def test_packed_arithmetic(t: str, name: str) -> None:
    half = np.dtype(TYPES[t.removesuffix("x2")])
    rng = np.random.default_rng(6)
    arity = {"fma.rn": 3, "neg": 1, "abs": 1}.get(name, 2)
    halves = [(rng.standard_normal((64, 2)) * 4).astype(half) for _ in range(arity)]
    functions = {
        "add.rn": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul.rn": lambda a, b: a * b,
        "fma.rn": lambda a, b, c: a * b + c, "max": np.maximum, "min": np.minimum, "neg": np.negative, "abs": np.abs,
    }  # fmt: skip
    got = evaluate(f"{name}.{t}", [h.view(np.uint32).reshape(-1) for h in halves], np.uint32)
    expected = functions[name](*(h.astype(np.float64) for h in halves)).astype(half)
    np.testing.assert_array_equal(got.view(half).reshape(-1, 2), expected)


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
