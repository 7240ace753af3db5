"""The steps of loads, stores, atomics, address conversions and asynchronous copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arithmetic.operation import Modifiers
from ..errors import MisalignedAddressError, OutOfBoundsError, UnsupportedInstruction
from ..ptx.kernel import Instruction, Reg
from ..state.batch import Batch, Binder, Step, items
from ..state.registers import Selection
from ..types import DTYPES, UNSIGNED, Array, bits_of

#: A generic address of shared memory, or of the kernel's parameters, is the address there plus this. All other generic
#: addresses are those of global memory.
SHARED_WINDOW = 0x7F00_0000_0000_0000
PARAM_WINDOW = 0x7E00_0000_0000_0000
_WINDOWS = {"global": 0, "shared": SHARED_WINDOW, "param": PARAM_WINDOW}

#: Cache policies and orderings that change no value here: memory is sequentially consistent.
_HINTS = (
    *("weak", "volatile", "relaxed", "acquire", "release", "cta", "gpu", "sys"),
    *("nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt"),
)


def _take_hints(m: Modifiers) -> None:
    for name in _HINTS:
        m.flag(name)
    m.names = [name for name in m.names if not name.startswith(("L1_", "L2_"))]


def _take_space(m: Modifiers) -> str:
    space = m.choice(("global", "shared", "shared_cta", "param", "const", "local"), "generic")
    if space in ("const", "local"):
        raise UnsupportedInstruction(f".{space} memory is not supported")
    return space.removesuffix("_cta")


def _access(instruction: Instruction, m: Modifiers) -> tuple[str, str, int]:
    """The type, the space and the number of words of a load or store."""
    t = m.type()
    count = int(m.choice(("v2", "v4", "v8"), "v1")[1:])
    space = _take_space(m)
    _take_hints(m)
    m.done()
    if count * bits_of(t) > 128:
        raise UnsupportedInstruction(f"{instruction.opcode}: more than 16 bytes at once")
    return t, space, count


def _by_space(space: str, where: Array, lanes: Array) -> list[tuple[str, Any, Array]]:
    """Split an access by memory: which one, which threads (None for all), their addresses in it."""
    if space != "generic":
        return [(space, None, where)]
    kinds = [
        ("global", where < PARAM_WINDOW),
        ("param", (where >= PARAM_WINDOW) & (where < SHARED_WINDOW)),
        ("shared", where >= SHARED_WINDOW),
    ]
    return [
        (name, None if chosen.all() else chosen, where[chosen] - _WINDOWS[name])
        for name, chosen in kinds
        if chosen.any()
    ]


def bind_load(instruction: Instruction, batch: Batch) -> Step:
    """Loads of 1 to 16 bytes from any memory."""
    t, space, count = _access(instruction, Modifiers(instruction.modifiers))
    result, source = instruction.operands[:2]
    unit, dtype = bits_of(t) // 8, DTYPES[t]
    address = batch.registers.address_reader(source)  # type: ignore[arg-type]
    writers = [batch.registers.writer(r, t) for r in items(result)]

    def load(name: str, where: Array, lanes: Array, everyone: bool) -> Array:
        if name == "shared":
            rows, offset = batch.shared.load(where, unit, count, lanes)
            batch.report.on_shared("ld", offset, unit * count, None if everyone else lanes)
            return rows
        if name == "param":
            return _load_param(batch, where, unit, count, lanes)
        rows = batch.memory.load(where, unit, count, lanes)
        batch.report.on_global(False, where, unit * count, None if everyone else lanes)
        return rows

    def step(sel: Selection) -> None:
        lanes, where = batch.chosen(sel), address(sel)
        parts = _by_space(space, where, lanes)
        if len(parts) == 1:
            rows = load(parts[0][0], parts[0][2], lanes, sel is None)
        else:
            rows = np.empty((lanes.size, count), UNSIGNED[8 * unit])
            for name, chosen, there in parts:
                rows[chosen] = load(name, there, lanes[chosen], False)
        for i, write in enumerate(writers):
            write(sel, rows[:, i].view(dtype))

    return step


def _load_param(batch: Batch, where: Array, unit: int, count: int, lanes: Array) -> Array:
    width = unit * count
    bad = np.flatnonzero((where < 0) | (where > batch.params.size - width))
    if bad.size:
        message = f"read of {width} bytes at byte {int(where[bad[0]])} of the parameters"
        raise OutOfBoundsError(message, lanes=lanes[bad])
    if (odd := np.flatnonzero(where % width)).size:
        message = f"read of {width} bytes at byte {int(where[odd[0]])} of the parameters"
        raise MisalignedAddressError(message, lanes=lanes[odd])
    # A view needs a whole number of words. The tail that this cuts off is shorter than one, so no address that passed
    # the checks lies in it.
    usable = batch.params.size // width * width
    rows: Array = batch.params[:usable].view(UNSIGNED[8 * unit]).reshape(-1, count)[where // width]
    return rows


def bind_store(instruction: Instruction, batch: Batch) -> Step:
    """Stores of 1 to 16 bytes to global or shared memory."""
    t, space, count = _access(instruction, Modifiers(instruction.modifiers))
    target, source = instruction.operands[:2]
    address = batch.registers.address_reader(target)  # type: ignore[arg-type]
    word = UNSIGNED[bits_of(t)]
    readers = [batch.registers.reader(r, f"b{bits_of(t)}") for r in items(source)]
    width = word.itemsize * count

    def step(sel: Selection) -> None:
        lanes, where = batch.chosen(sel), address(sel)
        rows = np.empty((lanes.size, count), word)
        for i, read in enumerate(readers):
            rows[:, i] = read(sel)
        for name, chosen, there in _by_space(space, where, lanes):
            mine = lanes if chosen is None else lanes[chosen]
            values = rows if chosen is None else rows[chosen]
            everyone = None if sel is None and chosen is None else mine
            if name == "shared":
                batch.report.on_shared("st", batch.shared.store(there, values, mine), width, everyone)
            elif name == "global":
                batch.memory.store(there, values, mine, batch.grid_threads[mine])
                batch.report.on_global(True, there, width, everyone)
            else:
                raise OutOfBoundsError("write to the kernel's parameters", lanes=mine)

    return step


def bind_atomic(instruction: Instruction, batch: Batch) -> Step:
    """Atomic additions in global memory."""
    m = Modifiers(instruction.modifiers)
    t = m.type()
    count = int(m.choice(("v2", "v4"), "v1")[1:])
    space = _take_space(m)
    if not m.flag("add") or space not in ("global", "generic") or t.endswith("x2"):
        raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
    m.flag("noftz")
    _take_hints(m)
    m.done()
    *result, target, source = instruction.operands
    address = batch.registers.address_reader(target)  # type: ignore[arg-type]
    readers = [batch.registers.reader(r, t) for r in items(source)]
    writers = [batch.registers.writer(r, t) for r in items(result[0])] if result else []

    def step(sel: Selection) -> None:
        lanes, where = batch.chosen(sel), address(sel)
        rows = np.empty((lanes.size, count), DTYPES[t])
        for i, read in enumerate(readers):
            rows[:, i] = read(sel)
        old = batch.memory.atomic_add(where, rows, lanes)
        batch.report.on_global(True, where, rows.itemsize * count, None if sel is None else lanes)
        for i, write in enumerate(writers):
            write(sel, old[:, i])

    return step


def bind_cvta(instruction: Instruction, batch: Batch) -> Step:
    """Conversions between generic addresses and those of one memory."""
    m = Modifiers(instruction.modifiers)
    t, space = m.type(), _take_space(m)
    window = np.uint64(_WINDOWS[space])
    to = m.flag("to")
    m.done()
    result, source = instruction.operands
    read, write = batch.registers.reader(source, t), batch.registers.writer(result, t)
    return lambda sel: write(sel, read(sel) - window if to else read(sel) + window)


def bind_cp_async(instruction: Instruction, batch: Batch) -> Step:
    """``cp.async`` and its groups."""
    m = Modifiers(instruction.modifiers)
    if not m.flag("async"):
        raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
    hazards = batch.shared.hazards
    if m.flag("commit_group"):
        m.done()
        return lambda sel: hazards.on_commit(slice(None) if sel is None else sel)
    if (kind := m.choice(("wait_group", "wait_all"))) != "":
        m.done()
        pending = instruction.operands[0].value if kind == "wait_group" else -1  # type: ignore[union-attr]
        return lambda sel: hazards.on_wait(pending, batch.chosen(sel), batch.shared.moments)
    return _bind_copy(instruction, batch, m)


def _bind_copy(instruction: Instruction, batch: Batch, m: Modifiers) -> Step:
    policy = m.choice(("ca", "cg"))
    hinted = m.flag("L2_cache_hint")
    _take_hints(m)
    if not (policy and m.choice(("shared", "shared_cta")) and m.flag("global")):
        raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
    m.done()
    target, source, size, *rest = instruction.operands
    width: int = size.value  # type: ignore[union-attr]
    if width not in ((16,) if policy == "cg" else (4, 8, 16)):
        raise UnsupportedInstruction(f"{instruction.opcode} of {width} bytes")
    rest = rest[: len(rest) - hinted]
    to = batch.registers.address_reader(target)  # type: ignore[arg-type]
    from_ = batch.registers.address_reader(source)  # type: ignore[arg-type]
    ignore = bool(rest) and isinstance(rest[0], Reg) and rest[0].bits == 1
    amount = batch.registers.reader(rest[0], "pred" if ignore else "u32") if rest else None

    def step(sel: Selection) -> None:
        lanes, where = batch.chosen(sel), from_(sel)
        if amount is None:
            rows = batch.memory.load(where, 4, width // 4, lanes)
            batch.report.on_global(False, where, width, None if sel is None else lanes)
        else:
            given = amount(sel)
            wanted = np.broadcast_to(np.where(given, 0, width) if ignore else given.astype(np.int64), lanes.shape)
            rows = _load_part(batch, where, wanted, width, lanes, sel is None)
        offset = batch.shared.store(to(sel), rows, lanes, asynchronous=True)
        batch.report.on_shared("cp.async", offset, width, None if sel is None else lanes)

    return step


def _load_part(batch: Batch, where: Array, wanted: Array, width: int, lanes: Array, everyone: bool) -> Array:
    """The first `wanted` bytes at each address, then zeros; no byte more is touched."""
    whole = wanted == width
    if whole.all():
        rows = batch.memory.load(where, 4, width // 4, lanes)
        batch.report.on_global(False, where, width, None if everyone else lanes)
        return rows
    if (wanted > width).any():
        raise OutOfBoundsError(f"cp.async of more source bytes than its {width}", lanes=lanes[wanted > width])
    if (odd := (wanted > 0) & (where % width != 0)).any():
        raise MisalignedAddressError(f"cp.async from an address that is no multiple of {width}", lanes=lanes[odd])
    rows = np.zeros((lanes.size, width // 4), np.uint32)
    if whole.any():
        rows[whole] = batch.memory.load(where[whole], 4, width // 4, lanes[whole])
        batch.report.on_global(False, where[whole], width, lanes[whole])
    octets = rows.view(np.uint8)
    for amount in np.unique(wanted[~whole & (wanted > 0)]):
        part = np.flatnonzero(wanted == amount)
        each = (where[part, None] + np.arange(amount)).reshape(-1)
        octets[part, :amount] = batch.memory.load(each, 1, 1, np.repeat(lanes[part], amount)).reshape(-1, amount)
        batch.report.on_global(False, where[part], width, lanes[part])
    return rows


MEMORY: dict[str, Binder] = {
    "ld": bind_load,
    "ldu": bind_load,
    "st": bind_store,
    "atom": bind_atomic,
    "red": bind_atomic,
    "cvta": bind_cvta,
}
