"""The steps of what a warp does together: ``mma``, ``ldmatrix``, shuffles, votes; and of fences."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arithmetic import warp
from ..arithmetic.operation import Modifiers
from ..errors import DivergenceError, UnsupportedInstruction
from ..ptx.kernel import Instruction
from ..state.batch import Batch, Binder, Step, items
from ..state.registers import Selection, whole_warps
from ..types import Array

FULL_MASK = 0xFFFFFFFF


def require_warps(instruction: Instruction, batch: Batch, sel: Selection) -> None:
    """Refuse an ``.aligned`` instruction that part of a warp reaches."""
    lanes = batch.chosen(sel)
    if sel is None or whole_warps(lanes):
        return
    counts = np.bincount(lanes >> 5)
    partial = (counts != 0) & (counts != 32)
    message = f"only {counts[partial][0]} lanes of a warp reach {instruction.opcode}"
    raise DivergenceError(message, lanes=lanes[partial[lanes >> 5]])


def require_members(instruction: Instruction, batch: Batch, sel: Selection, mask: Array) -> None:
    """Refuse a ``.sync`` instruction whose member mask is not the lanes that reach it."""
    lanes = batch.chosen(sel)
    if (mask == FULL_MASK).all() and (sel is None or whole_warps(lanes)):
        return
    here = np.zeros(batch.lanes.size, np.bool_)
    here[lanes] = True
    present = warp.ballot(here.reshape(-1, 32))[lanes >> 5]
    own = np.uint32(1) << (lanes & 31).astype(np.uint32)
    bad = (present & mask != mask) | (mask & own == 0)
    if bad.any():
        message = f"{instruction.opcode} with a member mask that is not the lanes that reach it"
        raise DivergenceError(message, lanes=lanes[bad])


def bind_mma(instruction: Instruction, batch: Batch) -> Step:
    """``mma.sync`` of 16-bit floats: m16n8k16 and m16n8k8."""
    m = Modifiers(instruction.modifiers)
    accumulator, t, t_b, result = m.type(), m.type(), m.type(), m.type()
    shape = m.choice(("m16n8k16", "m16n8k8"))
    ok = all(m.flag(name) for name in ("sync", "aligned", "row", "col")) and shape and t == t_b in ("f16", "bf16")
    if not ok or result != accumulator or accumulator not in ("f32", "f16"):
        raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
    m.done()
    d, a, b, c = (items(operand) for operand in instruction.operands)
    word = "f32" if accumulator == "f32" else "b32"
    registers = batch.registers
    a_read, b_read = ([registers.reader(r, "b32") for r in part] for part in (a, b))
    c_read = [registers.reader(r, word) for r in c]
    d_write = [registers.writer(r, word) for r in d]
    if (len(a), len(b), len(c)) != (len(b) * 2, 2 if shape == "m16n8k16" else 1, 4 if word == "f32" else 2):
        raise UnsupportedInstruction(f"{instruction.opcode} with fragments of another size")

    def fetch(readers: list[Any], sel: Selection, count: int) -> list[Array]:
        values = [read(sel) for read in readers]
        # A literal is one value, for all lanes.
        return [value if value.size == count else np.broadcast_to(value, count) for value in values]

    def step(sel: Selection) -> None:
        require_warps(instruction, batch, sel)
        count = batch.chosen(sel).size
        added = fetch(c_read, sel, count)
        if word == "b32":
            added = warp.unpack_accumulators([np.ascontiguousarray(x) for x in added])
        values = warp.mma(fetch(a_read, sel, count), fetch(b_read, sel, count), added, t)
        for write, value in zip(d_write, values if word == "f32" else warp.pack_accumulators(values), strict=True):
            write(sel, value)

    return step


def bind_ldmatrix(instruction: Instruction, batch: Batch) -> Step:
    """``ldmatrix`` of one, two or four 8 x 8 matrices."""
    m = Modifiers(instruction.modifiers)
    matrices = int(m.choice(("x1", "x2", "x4"), "x0")[1:])
    if not matrices or not all(m.flag(name) for name in ("sync", "aligned", "m8n8", "b16")):
        raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
    transposed = m.flag("trans")
    take_shared(m)
    m.done()
    result, source = instruction.operands
    address = batch.registers.address_reader(source)  # type: ignore[arg-type]
    writers = [batch.registers.writer(r, "b32") for r in items(result)]

    def step(sel: Selection) -> None:
        require_warps(instruction, batch, sel)
        lanes, where = batch.chosen(sel), address(sel)
        if matrices < 4:
            # Only the first 8 lanes per matrix give a row.
            giving = (lanes & 31) < 8 * matrices
            lanes, where = lanes[giving], where[giving]
        rows, offset = batch.shared.load_rows(where, lanes)
        batch.report.on_shared("ldmatrix", offset, 16, None if sel is None and matrices == 4 else lanes)
        fragments = warp.ldmatrix(rows.reshape(-1, matrices, 8, 4), transposed)
        for write, value in zip(writers, fragments, strict=True):
            write(sel, value)

    return step


def take_shared(m: Modifiers) -> None:
    """Take the space of an instruction that works on shared memory only."""
    if not m.choice(("shared", "shared_cta")):
        raise UnsupportedInstruction("only .shared addresses are supported here")


def bind_shfl(instruction: Instruction, batch: Batch) -> Step:
    """``shfl.sync``: a lane that reads from one that is not here is an error, not an old value."""
    m = Modifiers(instruction.modifiers)
    mode = m.choice(("up", "down", "bfly", "idx"))
    if not m.flag("sync") or m.type() != "b32":
        raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
    m.done()
    registers = batch.registers
    result, *sources = instruction.operands
    value, b, c, mask = (registers.reader(source, "b32") for source in sources)
    writers = [registers.writer(r, t) for r, t in zip(items(result), ("b32", "pred"), strict=False)]

    def step(sel: Selection) -> None:
        members = mask(sel)
        require_members(instruction, batch, sel, members)
        lanes = batch.chosen(sel)
        lane = lanes & 31
        source, inside = warp.shuffle_source(mode, lane, b(sel), c(sel))
        if (stray := (members >> source.astype(np.uint32) & np.uint32(1)) == 0).any():
            raise DivergenceError("shfl reads from a lane outside the member mask", lanes=lanes[stray])
        table = np.zeros(batch.lanes.size, np.uint32)
        table[slice(None) if sel is None else sel] = value(sel)
        for write, out in zip(writers, (table[lanes - lane + source], inside), strict=False):
            write(sel, out)

    return step


def bind_vote(instruction: Instruction, batch: Batch) -> Step:
    """``vote.sync`` and ``activemask``."""
    m = Modifiers(instruction.modifiers)
    t = m.type()
    registers = batch.registers
    result, *sources = instruction.operands
    write = registers.writer(result, t)
    mode = m.choice(("all", "any", "uni", "ballot"))
    if instruction.base == "vote" and not (mode and m.flag("sync")):
        raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
    m.done()
    predicate, mask = (
        (registers.reader(s, u) for s, u in zip(sources, ("pred", "b32"), strict=True)) if sources else (None, None)
    )

    def step(sel: Selection) -> None:
        lanes = batch.chosen(sel)
        table = np.zeros(batch.lanes.size, np.bool_)
        table[lanes] = True if predicate is None else predicate(sel)
        word = warp.ballot(table.reshape(-1, 32))[lanes >> 5]
        if mask is not None:
            members = mask(sel)
            require_members(instruction, batch, sel, members)
            word = word & members
            if mode == "any":
                word = word != 0
            elif mode == "all":
                word = word == members
            elif mode == "uni":
                word = (word == 0) | (word == members)
        write(sel, word)

    return step


def bind_redux(instruction: Instruction, batch: Batch) -> Step:
    """``redux.sync`` over whole warps."""
    m = Modifiers(instruction.modifiers)
    t = m.type()
    operation = m.choice(("add", "min", "max", "and", "or", "xor"))
    if not m.flag("sync") or not operation:
        raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
    m.done()
    result, source, mask = instruction.operands
    read, members = batch.registers.reader(source, t), batch.registers.reader(mask, "b32")
    write = batch.registers.writer(result, t)

    def step(sel: Selection) -> None:
        require_warps(instruction, batch, sel)
        if not (members(sel) == FULL_MASK).all():
            raise UnsupportedInstruction("redux.sync of part of a warp is not supported")
        values = np.broadcast_to(read(sel), batch.chosen(sel).size).reshape(-1, 32)
        write(sel, np.repeat(warp.reduce(operation, t, values), 32))

    return step


def bind_warp_barrier(instruction: Instruction, batch: Batch) -> Step:
    """``bar.warp.sync``: orders memory among the lanes of a whole warp."""
    mask = batch.registers.reader(instruction.operands[0], "b32")

    def step(sel: Selection) -> None:
        members = mask(sel)
        require_members(instruction, batch, sel, members)
        lanes = batch.chosen(sel)
        whole = np.broadcast_to(members == FULL_MASK, lanes.shape)
        batch.shared.pass_warp_barrier(lanes[whole])

    return step


def bind_fence(instruction: Instruction, batch: Batch) -> Step:
    """Fences: the simulator's memory is sequentially consistent, and a fence alone orders no two threads."""
    m = Modifiers(instruction.modifiers)
    if m.choice(("mbarrier_init", "proxy")):
        # The simulator has one proxy, and checks that uses of an mbarrier are ordered after its initialisation.
        for name in ("async", "global", "shared_cta", "release"):
            m.flag(name)
    for name in ("acq_rel", "sc", "cta", "cluster", "gpu", "gl", "sys"):
        m.flag(name)
    m.done()
    return lambda sel: None


def bind_nothing(instruction: Instruction, batch: Batch) -> Step:
    """Hints."""
    return lambda sel: None


WARP: dict[str, Binder] = {
    "mma": bind_mma,
    "ldmatrix": bind_ldmatrix,
    "shfl": bind_shfl,
    "vote": bind_vote,
    "activemask": bind_vote,
    "redux": bind_redux,
    "bar": bind_warp_barrier,
    "barrier": bind_warp_barrier,
    "membar": bind_fence,
    "fence": bind_fence,
    "prefetch": bind_nothing,
    "prefetchu": bind_nothing,
    "nanosleep": bind_nothing,
}
