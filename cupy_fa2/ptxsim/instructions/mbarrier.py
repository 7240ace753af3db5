"""The steps of ``mbarrier``: a wait gives its predicate, and the scheduler lets a thread that failed rest."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import numpy as np

from ..arithmetic.operation import Modifiers
from ..errors import UnsupportedInstruction
from ..ordering.mbarrier import BYTES, Mbarriers
from ..ptx.kernel import Imm, Instruction
from ..state.batch import Batch, Step
from ..state.registers import Selection
from ..types import Array
from .memory import SHARED_WINDOW

_ORDERINGS = ("release", "acquire", "cta", "cluster")


def is_wait(instruction: Instruction) -> bool:
    """Whether an instruction tests an mbarrier, and what runs next depends on others."""
    return instruction.base == "mbarrier" and instruction.modifiers[:1] in (("try_wait",), ("test_wait",))


def barrier_words(batch: Batch, address: Array, lanes: Array) -> Array:
    """The words of shared memory that mbarriers' addresses name."""
    where = np.where(address >= SHARED_WINDOW, address - SHARED_WINDOW, address)
    return batch.shared.offsets(where, BYTES, lanes, "mbarrier operation") // BYTES


def bind_mbarrier(instruction: Instruction, batch: Batch) -> Step:
    """``mbarrier`` and its operations, on barriers of the thread's own block."""
    barriers = batch.barriers
    m = Modifiers(instruction.modifiers)
    kind = m.choice(("init", "inval", "arrive", "try_wait", "test_wait", "expect_tx"))
    if not kind:
        raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
    expects = kind == "arrive" and m.flag("expect_tx")
    by_parity = kind.endswith("wait") and m.flag("parity")
    if m.flag("shared_cluster"):
        raise UnsupportedInstruction("an mbarrier of another block of the cluster is not supported")
    m.choice(("shared", "shared_cta"))
    relaxed = m.flag("relaxed")
    if relaxed and kind.endswith("wait"):
        raise UnsupportedInstruction("a wait that orders nothing is not supported")
    for name in _ORDERINGS:
        m.flag(name)
    if kind != "expect_tx" or "b64" in m.names:
        m.flag("b64")
    m.done()
    if kind == "init":
        return _bind_init(instruction, batch, barriers)
    if kind == "inval":
        return _bind_inval(instruction, batch, barriers)
    if kind == "expect_tx":
        return _bind_expect(instruction, batch, barriers)
    if kind == "arrive":
        return _bind_arrive(instruction, batch, barriers, expects, not relaxed)
    return _bind_wait(instruction, batch, barriers, by_parity)


def _bind_init(instruction: Instruction, batch: Batch, barriers: Mbarriers) -> Step:
    target, number = instruction.operands
    address = batch.registers.address_reader(target)  # type: ignore[arg-type]
    count = batch.registers.reader(number, "u32")
    callers = " in ".join(f"{PurePath(frame.file).name}:{frame.line}" for frame in instruction.frames)
    origin = f"the mbarrier initialised at {callers or f'PTX line {instruction.line}'}"

    def step(sel: Selection) -> None:
        lanes = batch.chosen(sel)
        words, counts = barrier_words(batch, address(sel), lanes), np.broadcast_to(count(sel), lanes.shape)
        for word, number, lane in zip(words.tolist(), counts.tolist(), lanes.tolist(), strict=True):
            barriers.initialize(word, batch.shared.granules(np.array([word * BYTES]), BYTES), number, lane, origin)

    return step


def _bind_inval(instruction: Instruction, batch: Batch, barriers: Mbarriers) -> Step:
    address = batch.registers.address_reader(instruction.operands[0])  # type: ignore[arg-type]

    def step(sel: Selection) -> None:
        lanes = batch.chosen(sel)
        words = barrier_words(batch, address(sel), lanes)
        for word, lane in zip(words.tolist(), lanes.tolist(), strict=True):
            place = int(barriers.find(np.array([word]), np.array([lane]))[0])
            barriers.invalidate(place, batch.shared.granules(np.array([word * BYTES]), BYTES), lane)

    return step


def _bind_expect(instruction: Instruction, batch: Batch, barriers: Mbarriers) -> Step:
    target, number = instruction.operands
    address = batch.registers.address_reader(target)  # type: ignore[arg-type]
    amount = batch.registers.reader(number, "s32")

    def step(sel: Selection) -> None:
        lanes = batch.chosen(sel)
        places = barriers.find(barrier_words(batch, address(sel), lanes), lanes)
        barriers.expect(places, np.broadcast_to(amount(sel), lanes.shape).astype(np.int64), lanes)

    return step


def _bind_arrive(instruction: Instruction, batch: Batch, barriers: Mbarriers, expects: bool, releases: bool) -> Step:
    result, target, *rest = instruction.operands
    address = batch.registers.address_reader(target)  # type: ignore[arg-type]
    write = batch.registers.writer(result, "b64")
    number = batch.registers.reader(rest[0] if rest else Imm(0 if expects else 1), "s32")

    def step(sel: Selection) -> None:
        lanes = batch.chosen(sel)
        places = barriers.find(barrier_words(batch, address(sel), lanes), lanes)
        given = np.broadcast_to(number(sel), lanes.shape).astype(np.int64)
        one, none = np.ones_like(given), np.zeros_like(given)
        phases = barriers.arrive(places, *((one, given) if expects else (given, none)), lanes, releases)
        write(sel, phases.astype(np.uint64))

    return step


def _bind_wait(instruction: Instruction, batch: Batch, barriers: Mbarriers, by_parity: bool) -> Step:
    result, target, token, *_ = instruction.operands
    address = batch.registers.address_reader(target)  # type: ignore[arg-type]
    write = batch.registers.writer(result, "pred")
    wanted: Any = batch.registers.reader(token, "u32" if by_parity else "u64")

    def step(sel: Selection) -> None:
        lanes = batch.chosen(sel)
        places = barriers.find(barrier_words(batch, address(sel), lanes), lanes)
        value = np.broadcast_to(wanted(sel), lanes.shape).astype(np.int64)
        if by_parity:
            ready = barriers.complete_since(places, value & 1)
        else:
            ready = barriers.completed[places] > value
        barriers.test(places, ready, by_parity, lanes)
        write(sel, ready)

    return step
