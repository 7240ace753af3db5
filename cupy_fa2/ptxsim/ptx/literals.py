"""The literals of PTX: integers, and floats by their bits."""

from __future__ import annotations

import re
import struct

from ..errors import ParseError
from .kernel import Imm

_INTEGER = re.compile(r"([+-]?)(0[xX][\da-fA-F]+|\d+)U?$")


def literal(text: str) -> Imm:
    """The value that a literal stands for; a decimal fraction is a float64."""
    if text[:2] in ("0f", "0F") and len(text) == 10:
        return Imm(int(text[2:], 16), 32)
    if text[:2] in ("0d", "0D") and len(text) == 18:
        return Imm(int(text[2:], 16), 64)
    if match := _INTEGER.match(text):
        value = int(match[2], 0) if match[2][:2] in ("0x", "0X") else int(match[2])
        return Imm(-value if match[1] == "-" else value)
    try:
        return Imm(struct.unpack("<q", struct.pack("<d", float(text)))[0], 64)
    except ValueError:
        raise ParseError(f"unknown literal {text}") from None


def literal_bytes(value: Imm, t: str) -> bytes:
    """A literal as memory of PTX type `t` holds it, lowest byte first."""
    bits = int(t[1:])
    if t[0] == "f" and value.float_bits != bits:
        wide = struct.pack("<Q", value.value & (1 << 64) - 1)
        number = struct.unpack("<d", wide)[0] if value.float_bits == 64 else float(value.value)
        return struct.pack({16: "<e", 32: "<f", 64: "<d"}[bits], number)
    return (value.value & (1 << bits) - 1).to_bytes(bits // 8, "little")
