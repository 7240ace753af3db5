"""Instruction -> step: a closure over one batch's registers and memory, made once and run many times.

A step takes a selection of threads (see `state.registers`). What an opcode computes is in `arithmetic`; here its
operands are found and its threads checked. Branches, exits and block barriers are the scheduler's (`run`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arithmetic.isa import decode
from ..arithmetic.operation import Modifiers, Operation
from ..errors import UnsupportedInstruction
from ..ptx.kernel import Instruction, Vector
from ..state.batch import Batch, Binder, Step, items
from ..state.registers import Selection
from ..types import UNSIGNED
from .bulk import bind_copy
from .mbarrier import bind_mbarrier
from .memory import MEMORY
from .warp import WARP


def bind(instruction: Instruction, batch: Batch) -> Step:
    """Make the step of an instruction, its guard and the check of its registers included."""
    raw = BINDERS.get(instruction.base, bind_operation)(instruction, batch)
    guard = guard_of(instruction, batch)
    registers = batch.registers
    # A register that all threads have written stays defined until other blocks take the registers over (a new
    # generation). Once that is so for all registers of this instruction, the checks are left out.
    everything = instruction.reads | instruction.writes
    settled = -1

    def check(sel: Selection) -> None:
        nonlocal settled
        for index in instruction.reads:
            batch.require_defined(index, sel)
        for index in instruction.writes:
            registers.define(index, sel)
        if everything <= registers.complete:
            settled = registers.generation

    def step(sel: Selection) -> None:
        if settled != registers.generation:
            check(sel)
        raw(sel)

    if guard is None:
        return step

    def guarded(sel: Selection) -> None:
        holds = guard(sel)
        if holds.all():
            step(sel)
        elif holds.any():
            step(batch.chosen(sel)[holds])

    return guarded


def guard_of(instruction: Instruction, batch: Batch) -> Callable[[Selection], npt.NDArray[np.bool_]] | None:
    """A function that reads the guard predicate; None where there is no guard."""
    predicate = instruction.predicate
    if predicate is None:
        return None
    read = batch.registers.reader(predicate, "pred")

    def guard(sel: Selection) -> npt.NDArray[np.bool_]:
        batch.require_defined(predicate.index, sel)
        return read(sel)

    return guard


def bind_operation(instruction: Instruction, batch: Batch) -> Step:
    """Bind an opcode of the table in `arithmetic.isa`."""
    operation = decode(instruction.base, instruction.modifiers)
    result, *sources = instruction.operands
    if len(sources) != len(operation.sources):
        raise UnsupportedInstruction(f"{instruction.opcode} with {len(sources)} sources is not supported")
    registers, function = batch.registers, operation.function
    readers = [registers.reader(s, t) for s, t in zip(sources, operation.sources, strict=True)]
    if len(operation.results) > 1:
        return _bind_predicates(result, operation, readers, batch)
    write = registers.writer(result, operation.results[0])

    def step(sel: Selection) -> None:
        write(sel, function(*[read(sel) for read in readers]))

    arrays = [registers.array(s, t) for s, t in zip(sources, operation.sources, strict=True)]
    out = registers.array(result, operation.results[0])
    if out is None or any(array is None for array in arrays):
        return step
    if isinstance(function, np.ufunc):

        def in_place(sel: Selection) -> None:
            if sel is None:
                function(*arrays, out=out)
            else:
                step(sel)

        return in_place

    def direct(sel: Selection) -> None:
        if sel is None:
            out[...] = function(*arrays)
        else:
            step(sel)

    return direct


def _bind_predicates(result: Any, operation: Operation, readers: list[Any], batch: Batch) -> Step:
    writers = [batch.registers.writer(r, "pred") for r in items(result)]
    function = operation.function

    def step(sel: Selection) -> None:
        # There are two results, a predicate and its complement; an instruction with one destination takes the first.
        for write, value in zip(writers, function(*[read(sel) for read in readers]), strict=False):
            write(sel, value)

    return step


def bind_mov(instruction: Instruction, batch: Batch) -> Step:
    """Copies, and the packing and unpacking of vectors of smaller registers."""
    result, source = instruction.operands
    if not isinstance(result, Vector) and not isinstance(source, Vector):
        return bind_operation(instruction, batch)
    t = Modifiers(instruction.modifiers).type()
    vector = result if isinstance(result, Vector) else source
    count = len(items(vector))
    bits = 8 * np.dtype(UNSIGNED[int(t[1:])]).itemsize // count
    part = f"b{bits}"
    word, piece = UNSIGNED[bits * count], UNSIGNED[bits]
    if isinstance(source, Vector):
        readers = [batch.registers.reader(item, part) for item in source.items]
        write = batch.registers.writer(result, t)

        def pack(sel: Selection) -> None:
            parts = np.broadcast_arrays(*(read(sel) for read in readers))
            write(sel, np.stack(parts, axis=1).view(word).reshape(-1))

        return pack
    read = batch.registers.reader(source, t)
    writers = [batch.registers.writer(item, part) for item in items(result)]

    def unpack(sel: Selection) -> None:
        parts = read(sel).view(piece).reshape(-1, count)
        for i, write in enumerate(writers):
            write(sel, parts[:, i])

    return unpack


BINDERS: dict[str, Binder] = {**WARP, **MEMORY, "cp": bind_copy, "mbarrier": bind_mbarrier, "mov": bind_mov}
