"""Floating-point opcodes of the simulator against exact fractions, and conversions against the bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from ptx_tools import TYPES, edge_values, evaluate, run_ptx


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
