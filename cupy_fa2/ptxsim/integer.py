"""Integer arithmetic and bit manipulation, where PTX and NumPy differ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .operation import Function, Modifiers, Operation
from .types import DTYPES, Array, bits_of, is_signed


def product_high(a: Array, b: Array) -> Array:
    """High half of the product, whatever the width."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{bits // 4}")
        return (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(a.dtype)
    # Schoolbook on 32-bit halves; the high parts keep the sign, the low ones have none.
    low, shift = a.dtype.type(0xFFFFFFFF), a.dtype.type(32)
    a_low, b_low = (a & low).view(np.uint64), (b & low).view(np.uint64)
    carry = (a_low * b_low >> np.uint64(32)).astype(a.dtype)
    middle = (a >> shift) * b_low.view(a.dtype) + carry
    other = a_low.view(a.dtype) * (b >> shift) + (middle & low)
    return (a >> shift) * (b >> shift) + (middle >> shift) + (other >> shift)


def divide(a: Array, b: Array) -> Array:
    """Quotient that truncates; by zero it has all bits set, as on the hardware."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    magnitude_a, magnitude_b = (np.abs(x).view(unsigned) if x.dtype.kind == "i" else x for x in (a, b))
    zero = b == 0
    quotient = (magnitude_a // np.where(zero, unsigned.type(1), magnitude_b)).view(a.dtype)
    if a.dtype.kind == "i":
        quotient = np.where((a < 0) ^ (b < 0), -quotient, quotient)
    return np.where(zero, ~np.zeros((), a.dtype), quotient)


def remainder(a: Array, b: Array) -> Array:
    return a - divide(a, b) * b


def same_type(function: Function, arity: int) -> Callable[[Modifiers], Operation]:
    def build(m: Modifiers) -> Operation:
        t = m.type()
        return Operation((t,), (t,) * arity, function)

    return build


def invert(a: Array) -> Array:
    return ~a


def shift(left: bool) -> Callable[[Modifiers], Operation]:
    def build(m: Modifiers) -> Operation:
        t = m.type()
        dtype = DTYPES[t]
        bits = np.uint32(bits_of(t))

        def shift(a: Array, count: Array) -> Array:
            # A count beyond the width shifts everything out (signs stay); NumPy agrees when it is clamped.
            clamped = np.minimum(count, bits).astype(dtype)
            return a << clamped if left else a >> clamped

        return Operation((t,), (t, "u32"), shift)

    return build


def funnel(m: Modifiers) -> Operation:
    t, left = m.type(), m.choice(("l", "r")) == "l"
    wrap = m.choice(("wrap", "clamp")) == "wrap"

    def shift(low: Array, high: Array, count: Array) -> Array:
        n = (count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low
        return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)

    return Operation((t,), (t, t, "u32"), shift)


def field_extract(m: Modifiers) -> Operation:
    t = m.type()
    bits = bits_of(t)

    def extract(a: Array, position: Array, length: Array) -> Array:
        p, n = (np.minimum(x & np.uint32(0xFF), np.uint32(bits)).astype(np.int64) for x in (position, length))
        if not is_signed(t):
            mask = np.where(n >= bits, ~np.uint64(0), (np.uint64(1) << n.astype(np.uint64)) - np.uint64(1))
            return ((a.astype(np.uint64) >> p.astype(np.uint64)) & mask).astype(a.dtype)
        # Bits past the top are copies of the sign: move the field to the top of 64 bits and shift it back.
        field = (a.astype(np.int64) >> np.minimum(p, 63)) << (64 - np.maximum(n, 1))
        return np.where(n == 0, 0, field >> (64 - np.maximum(n, 1))).astype(a.dtype)

    return Operation((t,), (t, "u32", "u32"), extract)


def field_insert(m: Modifiers) -> Operation:
    t = m.type()
    one, bits = DTYPES[t].type(1), np.uint32(bits_of(t))

    def insert(field: Array, into: Array, position: Array, length: Array) -> Array:
        p, n = (np.minimum(x & np.uint32(0xFF), bits).astype(field.dtype) for x in (position, length))
        mask = ((one << n) - one) << p
        return (field << p) & mask | into & ~mask

    return Operation((t,), (t, t, "u32", "u32"), insert)


def logic3(m: Modifiers) -> Operation:
    t = m.type()

    def lookup(a: Array, b: Array, c: Array, table: Array) -> Array:
        result = np.zeros_like(a)
        for row in range(8):
            chosen = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            result = result | np.where(table >> np.uint32(row) & np.uint32(1), chosen, np.uint32(0))
        return result

    return Operation((t,), (t, t, t, "u32"), lookup)


def permute(m: Modifiers) -> Operation:
    t = m.type()

    def permute(a: Array, b: Array, selector: Array) -> Array:
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint64)
        for position in range(4):
            pick = (selector >> np.uint32(4 * position)).astype(np.uint64)
            byte = both >> ((pick & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            result |= np.where(pick & np.uint64(8), sign, byte) << np.uint64(8 * position)
        return result.astype(np.uint32)

    return Operation((t,), (t, t, "u32"), permute)


def count_leading_zeros(a: Array) -> Array:
    # The exponent of a float64 finds the top bit, as long as rounding cannot carry into it: halves of 32
    # bits.
    words = a.astype(np.uint64)
    high, low = words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)
    top = np.where(high != 0, np.frexp(high.astype(np.float64))[1] + 32, np.frexp(low.astype(np.float64))[1])
    return (a.dtype.itemsize * 8 - top).astype(np.uint32)


def reverse_bits(a: Array) -> Array:
    size = a.dtype.itemsize
    bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, size), axis=1, bitorder="little")
    return np.packbits(bits, axis=1, bitorder="big").view(a.dtype).reshape(-1)


def find_top(a: Array) -> Array:
    return np.uint32(31) - count_leading_zeros(a)


def counting(function: Function) -> Callable[[Modifiers], Operation]:
    def build(m: Modifiers) -> Operation:
        t = m.type()
        return Operation(("u32",), (t,), function)

    return build
