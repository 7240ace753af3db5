"""What an opcode with its modifiers means: operand types and a pure function of NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedInstruction
from ..types import DTYPES, Array

#: One array in, one array out per operand; two results come as a tuple.
Function = Callable[..., Any]


class Operation(NamedTuple):
    """An opcode made concrete: result types, operand types, function."""

    results: tuple[str, ...]
    sources: tuple[str, ...]
    function: Function


class Modifiers:
    """The modifiers of one opcode, which an entry takes one by one; what is left over is unsupported."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def type(self) -> str:
        """Take the last modifier, which names the type."""
        name = self.names.pop() if self.names else ""
        if name not in DTYPES:
            raise UnsupportedInstruction(f"type .{name} is not supported")
        return name

    def flag(self, name: str) -> bool:
        """Take a modifier if it is there."""
        present = name in self.names
        if present:
            self.names.remove(name)
        return present

    def choice(self, options: Iterable[str], default: str = "") -> str:
        """Take the first of `options` that is there."""
        return next((name for name in options if self.flag(name)), default)

    def done(self) -> None:
        """Refuse what nobody took."""
        if self.names:
            raise UnsupportedInstruction(f"modifier .{' .'.join(self.names)} is not supported here")


def flush(x: Array) -> Array:
    """Subnormals to zero of the same sign: what ``.ftz`` does to inputs and results."""
    # A product, not a selection: times 0 a subnormal keeps its sign, and NaN (whose comparison is false) stays NaN.
    result: Array = x * (np.abs(x) >= np.float32(2.0**-126))
    return result
