"""Operands as closures over the registers of a batch.

A *selection* says which threads of the batch an instruction runs for: None for all of them, which needs no
indexing at all and is the common case; a slice, when whole blocks diverged; else an array of thread numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedInstruction
from ..ptx.kernel import Address, Ignored, Imm, Operand, Reg, Special, Symbol
from ..types import DTYPES, SIGNED, UNSIGNED, Array, bits_of, is_float, is_signed

Selection = slice | npt.NDArray[np.int64] | None
Read = Callable[[Selection], Array]
Write = Callable[[Selection, Array], None]


def whole_warps(lanes: npt.NDArray[np.int64]) -> bool:
    """Whether thread numbers, which ascend, are those of whole warps."""
    if lanes.size % 32:
        return False
    first = lanes[::32]
    return bool(((first & 31) == 0).all() and (lanes[31::32] - first == 31).all())


@dataclass
class Registers:
    """The register file of a batch, and which registers were written: a register starts undefined.

    Attributes
    ----------
    names, values : list
        Names of the registers, and one array per register, a word per thread.
    specials : dict of str to ndarray
        The machine's own registers, by name.
    symbols : dict of str to int
        Addresses of parameters and shared variables.
    """

    names: list[str]
    values: list[Array]
    specials: dict[str, Array]
    symbols: dict[str, int]
    threads: int
    #: Registers that every thread of the batch has written.
    complete: set[int] = field(default_factory=set)
    partial: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)
    #: Grows when other blocks take the registers over.
    generation: int = 0

    def forget(self) -> None:
        """Make all registers undefined again."""
        self.complete.clear()
        self.partial.clear()
        self.generation += 1

    def named(self, name: str) -> Reg | Special | Symbol:
        """The operand of a name."""
        if name in self.specials:
            return Special(name)
        if name in self.symbols:
            return Symbol(name)
        if name not in self.names:
            raise ValueError(f"this kernel uses no register, parameter or shared variable named {name}")
        index = self.names.index(name)
        word = self.values[index].dtype
        return Reg(index, 1 if word == np.bool_ else 8 * word.itemsize)

    def undefined(self, index: int, sel: Selection) -> npt.NDArray[np.bool_] | None:
        """Which of the selected threads have not written a register; None when all have."""
        if index in self.complete:
            return None
        count = self.threads
        written = self.partial.get(index, np.zeros(count, np.bool_))
        missing: npt.NDArray[np.bool_] = ~(written if sel is None else written[sel])
        return missing if missing.any() else None

    def define(self, index: int, sel: Selection) -> None:
        """Note that the selected threads write a register."""
        if index in self.complete:
            return
        if sel is None:
            self.complete.add(index)
            return
        written = self.partial.setdefault(index, np.zeros(self.threads, np.bool_))
        written[sel] = True
        if written.all():
            self.complete.add(index)

    def array(self, operand: Operand, t: str) -> Array | None:
        """The array behind an operand when no conversion is needed, to be read in place; None otherwise."""
        if isinstance(operand, Reg) and not operand.negated and operand.bits == bits_of(t):
            return self.values[operand.index].view(DTYPES[t])
        if isinstance(operand, Imm):
            return constant(operand, t)
        if isinstance(operand, Symbol):
            return np.array([self.symbols[operand.name]], np.int64).astype(DTYPES[t])
        return None

    def reader(self, operand: Operand, t: str) -> Read:
        """A function that reads an operand as type `t`."""
        if (array := self.array(operand, t)) is not None:
            if not isinstance(operand, Reg):
                return lambda sel: array
            return lambda sel: array if sel is None else array[sel]
        if isinstance(operand, Special):
            if operand.name not in self.specials:
                raise UnsupportedInstruction(f"special register {operand.name} is not supported")
            special, wide = self.specials[operand.name], DTYPES[t]
            return lambda sel: (special if sel is None else special[sel]).astype(wide)
        if isinstance(operand, Reg):
            raw = self.values[operand.index]
            if operand.negated:
                return lambda sel: ~(raw if sel is None else raw[sel])
            if t != "pred" and operand.bits > 1:
                # A register wider than the type gives its low bits.
                word, dtype = UNSIGNED[bits_of(t)], DTYPES[t]
                return lambda sel: (raw if sel is None else raw[sel]).astype(word).view(dtype)
        raise UnsupportedInstruction(f"operand {operand} as type .{t}")

    def writer(self, operand: Operand, t: str) -> Write:
        """A function that writes a result of type `t`, extended to the register's width."""
        if isinstance(operand, Ignored):
            return lambda sel, value: None
        if not isinstance(operand, Reg) or (t == "pred") != (operand.bits == 1):
            raise UnsupportedInstruction(f"result {operand} of type .{t}")
        if operand.bits == bits_of(t):
            array = self.values[operand.index].view(DTYPES[t])
        elif operand.bits < bits_of(t):
            raise UnsupportedInstruction(f"a register of {operand.bits} bits for a result of type .{t}")
        elif is_float(t):
            word, wide = UNSIGNED[bits_of(t)], self.values[operand.index]

            def write_bits(sel: Selection, value: Array) -> None:
                wide[slice(None) if sel is None else sel] = np.ascontiguousarray(value).view(word)

            return write_bits
        else:
            array = self.values[operand.index].view((SIGNED if is_signed(t) else UNSIGNED)[operand.bits])

        def write(sel: Selection, value: Array) -> None:
            array[slice(None) if sel is None else sel] = value

        return write

    def address_reader(self, address: Address) -> Read:
        """A function that reads an address as int64, one per selected thread."""
        offset = np.int64(address.offset)
        if isinstance(address.base, Reg):
            register = self.values[address.base.index]
            if address.base.bits == 64:
                signed = register.view(np.int64)
                return lambda sel: (signed if sel is None else signed[sel]) + offset
            return lambda sel: (register if sel is None else register[sel]).astype(np.int64) + offset
        base = self.symbols[address.base.name] if isinstance(address.base, Symbol) else address.base.value
        fixed = np.full(self.threads, base + address.offset, np.int64)
        return lambda sel: fixed if sel is None else fixed[sel]


def constant(literal: Imm, t: str) -> Array:
    """A literal as an array of one element of type `t`."""
    if t == "pred":
        return np.array([bool(literal.value)])
    if literal.float_bits == 64 and t != "f64":
        number = np.array([literal.value], np.int64).view(np.float64)
        return number.astype(DTYPES[t])
    bits = bits_of(t)
    return np.array([literal.value & ((1 << bits) - 1)], np.uint64).astype(UNSIGNED[bits]).view(DTYPES[t])
