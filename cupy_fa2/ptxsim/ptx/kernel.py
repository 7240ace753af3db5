"""A kernel as data: parameters, shared variables, registers, and instructions with their operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import Frame

#: Width in bits of each register type; 1 stands for a predicate.
REGISTER_BITS = {
    "pred": 1,
    **{f"{kind}{bits}": bits for kind in "busf" for bits in (16, 32, 64)},
    "f16x2": 32,
}
TYPE_BYTES = {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)}

#: Opcodes whose first operand is not a result.
NO_RESULT = frozenset(
    [
        "st",
        "red",
        "bra",
        "bar",
        "barrier",
        "cp",
        "membar",
        "fence",
        "ret",
        "exit",
        "prefetch",
        "prefetchu",
        "trap",
        "brkpt",
        "nanosleep",
        "pmevent",
        "discard",
    ]
)


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, by its index in `Kernel.registers`; a predicate operand may be negated."""

    index: int
    bits: int
    negated: bool = False


class Imm(NamedTuple):
    """A literal: an integer, or the bit pattern of a float of `float_bits` bits."""

    value: int
    float_bits: int = 0


class Special(NamedTuple):
    """A read-only machine register such as ``%tid.x``."""

    name: str


class Symbol(NamedTuple):
    """The address of a shared variable or of a parameter."""

    name: str


class Address(NamedTuple):
    """``[base + offset]``."""

    base: Reg | Imm | Symbol
    offset: int


class Vector(NamedTuple):
    """``{a, b, ...}``, or the two results of ``d|p``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Ignored:
    """The operand ``_``: a result nobody wants."""


Operand = Reg | Imm | Special | Symbol | Address | Vector | Ignored


class Instruction(NamedTuple):
    """One instruction.

    `target` is the branch destination as an instruction index; `reads` and `writes` are the indices of the
    registers it reads and of those it writes, its guard predicate left out.
    """

    opcode: str
    base: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Reg | None
    line: int
    text: str
    frames: tuple[Frame, ...]
    target: int = -1
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()


class Param(NamedTuple):
    """A kernel parameter in the parameter space."""

    name: str
    offset: int
    size: int


class SharedVariable(NamedTuple):
    """A shared array; the dynamic one has size 0."""

    name: str
    size: int
    align: int
    dynamic: bool


@dataclass(frozen=True)
class Kernel:
    """A parsed kernel, ready to be launched any number of times.

    `variables` are those of the module, outside of its kernels: initial bytes by name. A kernel that touches one is not
    supported.
    """

    name: str
    params: tuple[Param, ...]
    shared: tuple[SharedVariable, ...]
    registers: tuple[tuple[str, int], ...] = field(repr=False)
    instructions: tuple[Instruction, ...] = field(repr=False)
    variables: Mapping[str, bytes] = field(default_factory=dict, repr=False, hash=False)

    @property
    def param_bytes(self) -> int:
        """Size of the parameter space."""
        return max((p.offset + p.size for p in self.params), default=0)


def used_registers(
    base: str, modifiers: Iterable[str], operands: tuple[Operand, ...]
) -> tuple[frozenset[int], frozenset[int]]:
    """The registers that an instruction reads and those that it writes."""
    # The first operand is the result, unless the opcode has none (a barrier has one if it reduces something) or it is
    # an address, as in ``mbarrier.init [a], n``: there memory is written, not a register.
    reduces = base in ("bar", "barrier") and "red" in modifiers
    none = (base in NO_RESULT and not reduces) or isinstance(next(iter(operands), None), Address)
    results = 0 if none else 1
    reads, writes = set[int](), set[int]()
    for position, operand in enumerate(operands):
        _collect(operand, writes if position < results else reads)
    return frozenset(reads), frozenset(writes)


def _collect(operand: Operand, into: set[int]) -> None:
    if isinstance(operand, Reg):
        into.add(operand.index)
    elif isinstance(operand, Address):
        _collect(operand.base, into)
    elif isinstance(operand, Vector):
        for item in operand.items:
            _collect(item, into)
