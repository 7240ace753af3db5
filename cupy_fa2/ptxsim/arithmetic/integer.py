"""Integer arithmetic and bit manipulation, where PTX and NumPy differ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import UnsupportedInstruction
from ..types import DTYPES, Array, bits_of, is_signed
from .operation import Function, Modifiers, Operation

_LOW_WORD = np.uint64(0xFFFFFFFF)


def product_high(a: Array, b: Array) -> Array:
    """High half of the product, whatever the width."""
    result: Array
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{bits // 4}")
        result = (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(a.dtype)
        return result
    # Schoolbook on 32-bit halves: the high parts keep the sign, the low ones have none.
    low, shift = a.dtype.type(0xFFFFFFFF), a.dtype.type(32)
    a_low, b_low = (x.view(np.uint64) & _LOW_WORD for x in (a, b))
    carry = (a_low * b_low >> np.uint64(32)).view(a.dtype)
    middle = (a >> shift) * b_low.view(a.dtype) + carry
    other = a_low.view(a.dtype) * (b >> shift) + (middle & low)
    result = (a >> shift) * (b >> shift) + (middle >> shift) + (other >> shift)
    return result


def divide(a: Array, b: Array) -> Array:
    """Quotient that truncates; by zero it has all bits set, as on the hardware."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    top, bottom = (np.abs(x).view(unsigned) if x.dtype.kind == "i" else x for x in (a, b))
    zero = b == 0
    quotient = (top // np.where(zero, unsigned.type(1), bottom)).view(a.dtype)
    if a.dtype.kind == "i":
        quotient = np.where((a < 0) ^ (b < 0), -quotient, quotient)
    return np.where(zero, ~np.zeros((), a.dtype), quotient)


def remainder(a: Array, b: Array) -> Array:
    """What `divide` leaves; it has the sign of the dividend."""
    result: Array = a - divide(a, b) * b
    return result


def same_type(function: Function, arity: int) -> Callable[[Modifiers], Operation]:
    """An entry whose operands and result are all of the one type it names."""

    def build(m: Modifiers) -> Operation:
        t = m.type()
        return Operation((t,), (t,) * arity, function)

    return build


def invert(a: Array) -> Array:
    """``not``, of predicates too."""
    result: Array = ~a
    return result


def shift(left: bool) -> Callable[[Modifiers], Operation]:
    """``shl`` and ``shr``; the latter keeps the sign of a signed type."""

    def build(m: Modifiers) -> Operation:
        t = m.type()
        dtype = DTYPES[t]
        bits = np.uint32(bits_of(t))

        def shifted(a: Array, count: Array) -> Array:
            # A count beyond the width shifts everything out (signs stay); NumPy agrees when it is clamped.
            clamped = np.minimum(count, bits).astype(dtype)
            result: Array = a << clamped if left else a >> clamped
            return result

        return Operation((t,), (t, "u32"), shifted)

    return build


def funnel(m: Modifiers) -> Operation:
    """``shf``: a shift of two words as one."""
    t, left = m.type(), m.choice(("l", "r")) == "l"
    wrap = m.choice(("wrap", "clamp")) == "wrap"

    def shifted(low: Array, high: Array, count: Array) -> Array:
        n = (count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low
        result: Array = ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)
        return result

    return Operation((t,), (t, t, "u32"), shifted)


def field_extract(m: Modifiers) -> Operation:
    """``bfe``; the sign of a signed field is its top bit, or the word's where it reaches beyond."""
    t = m.type()
    bits = bits_of(t)

    def extract(a: Array, position: Array, length: Array) -> Array:
        p, n = ((x & np.uint32(0xFF)).astype(np.int64) for x in (position, length))
        p, n = np.minimum(p, bits), np.minimum(n, bits)
        if is_signed(t):
            # Move the field to the top of 64 bits, the word's sign above it, and shift it back.
            up = 64 - np.maximum(n, 1)
            field = (a.astype(np.int64) >> np.minimum(p, 63)) << up >> up
            return np.where(n == 0, 0, field).astype(a.dtype)
        word = a.astype(np.uint64) >> p.astype(np.uint64)
        mask = np.where(n == 64, ~np.uint64(0), (np.uint64(1) << n.astype(np.uint64)) - np.uint64(1))
        result: Array = (word & mask).astype(a.dtype)
        return result

    return Operation((t,), (t, "u32", "u32"), extract)


def field_insert(m: Modifiers) -> Operation:
    """``bfi``."""
    t = m.type()
    one, bits = DTYPES[t].type(1), np.uint32(bits_of(t))

    def insert(field: Array, into: Array, position: Array, length: Array) -> Array:
        p, n = (np.minimum(x & np.uint32(0xFF), bits).astype(field.dtype) for x in (position, length))
        mask = ((one << n) - one) << p
        result: Array = (field << p) & mask | into & ~mask
        return result

    return Operation((t,), (t, t, "u32", "u32"), insert)


def logic3(m: Modifiers) -> Operation:
    """``lop3``: any function of three bits, by its truth table."""
    t = m.type()

    def lookup(a: Array, b: Array, c: Array, table: Array) -> Array:
        result: Array = np.zeros(1, np.uint32)
        for row in range(8):
            chosen = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            result = result | np.where(table >> np.uint32(row) & np.uint32(1), chosen, np.uint32(0))
        return result

    return Operation((t,), (t, t, t, "u32"), lookup)


def permute(m: Modifiers) -> Operation:
    """``prmt``: any four of the eight bytes of two words."""
    t = m.type()

    def permuted(a: Array, b: Array, selector: Array) -> Array:
        both = b.astype(np.uint64) << np.uint64(32) | a
        result: Array = np.zeros(1, np.uint64)
        for position in range(4):
            pick = (selector >> np.uint32(4 * position)).astype(np.uint64)
            byte = both >> ((pick & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            result = result | np.where(pick & np.uint64(8), sign, byte) << np.uint64(8 * position)
        return result.astype(np.uint32)

    return Operation((t,), (t, t, "u32"), permuted)


def count_ones(a: Array) -> Array:
    """``popc``."""
    result: Array = np.bitwise_count(a).astype(np.uint32)
    return result


def count_leading_zeros(a: Array) -> Array:
    """``clz``."""
    # The exponent of a float64 finds the top bit of a 32-bit half, which it holds exactly.
    words = a.astype(np.uint64)
    high, low = ((half).astype(np.float64) for half in (words >> np.uint64(32), words & _LOW_WORD))
    top = np.where(high != 0, np.frexp(high)[1] + 32, np.frexp(low)[1])
    result: Array = (a.dtype.itemsize * 8 - top).astype(np.uint32)
    return result


def reverse_bits(a: Array) -> Array:
    """``brev``."""
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(-1, a.dtype.itemsize)
    bits = np.unpackbits(octets, axis=1, bitorder="little")[:, ::-1]
    return np.packbits(bits, axis=1, bitorder="little").view(a.dtype).reshape(-1)


def find_top(a: Array) -> Array:
    """``bfind`` of an unsigned word: the position of its top bit, all ones if there is none."""
    result: Array = np.uint32(a.dtype.itemsize * 8 - 1) - count_leading_zeros(a)
    return result


def counting(function: Function) -> Callable[[Modifiers], Operation]:
    """An entry whose result is a 32-bit count."""

    def build(m: Modifiers) -> Operation:
        t = m.type()
        if is_signed(t):
            raise UnsupportedInstruction("the bits of a signed type are not supported here")
        return Operation(("u32",), (t,), function)

    return build
