"""Barriers of a block, ``bar`` and ``barrier``: who waits for whom, and what that orders.

A phase of a barrier is complete once as many threads as it expects have come, those that wait (``sync``, ``red``) and
those that go on at once (``arrive``). What they all did before is ordered before what those that waited do next, and
nothing else is: a barrier of part of the block orders that part.

Nothing may depend on which of two unordered things comes first: a thread that comes to a barrier again has to know
that its phase before is complete, or it could be counted for that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DivergenceError, RaceError, UnsupportedInstruction
from ..instructions.warp import require_warps
from ..observe.watch import Watch
from ..ordering.clocks import TIME_SHIFT, Clocks, Moments
from ..ptx.kernel import Imm, Instruction
from ..state.batch import Batch
from ..state.registers import Selection, Write
from ..types import Array

Lanes = npt.NDArray[np.int64]
#: Lets threads run from an instruction on.
Go = Callable[[int, Lanes], None]

#: Barriers of a block.
COUNT = 16
_BASES = ("bar", "barrier")
_REDUCTIONS: dict[str, Any] = {"or": np.logical_or, "and": np.logical_and}


def is_barrier(instruction: Instruction) -> bool:
    """Whether an instruction is one of a block's barriers; ``bar.warp.sync`` is not."""
    return instruction.base in _BASES and "warp" not in instruction.modifiers


def may_be_partial(instruction: Instruction, block_threads: int) -> bool:
    """Whether part of a block may meet at a barrier, so that who is ordered before whom takes more than counting."""
    if not is_barrier(instruction):
        return False
    _, number, count, _ = _operands(instruction)
    return "arrive" in instruction.modifiers or not isinstance(number, Imm) or count not in (None, Imm(block_threads))


def _operands(instruction: Instruction) -> tuple[Any, Any, Any, Any]:
    """Result, number, thread count and predicate; None for those that an instruction does not have."""
    given = list(instruction.operands or (Imm(0),))
    result = predicate = None
    if "red" in instruction.modifiers:
        result, predicate = given.pop(0), given.pop()
    return result, given[0], given[1] if len(given) > 1 else None, predicate


@dataclass
class _Phase:
    """The running phase of one barrier of one block."""

    expected: int
    kind: str
    #: Groups of threads, each with the instruction that it came to: those that wait, and all that came, with the
    #: moments at which they did.
    waiting: list[tuple[int, Lanes]] = field(default_factory=list)
    come: list[tuple[int, Lanes, Moments]] = field(default_factory=list)
    #: The clocks of those that arrived and went on, joined: those that wait learn them.
    told: Array | None = None
    votes: list[Array] = field(default_factory=list)
    #: Writers of a reduction's result, and the registers that they write.
    writes: list[tuple[Write, Lanes, frozenset[int]]] = field(default_factory=list)

    @property
    def threads(self) -> Lanes:
        """All that have come."""
        return np.concatenate([lanes for _, lanes, _ in self.come])


class BlockBarriers:
    """The barriers of all blocks of a batch.

    Parameters
    ----------
    batch : Batch
        Registers and memory.
    block_threads : int
        Threads in a block.
    go : callable
        Lets threads run from an instruction on.
    watch : Watch, optional
        Who is told who waits.
    """

    def __init__(self, batch: Batch, block_threads: int, go: Go, watch: Watch | None = None) -> None:
        self.batch, self.block_threads, self.go, self.watch = batch, block_threads, go, watch
        #: By block and number of the barrier.
        self.phases: dict[tuple[int, int], _Phase] = {}
        #: Who came to the latest complete phase of a barrier of part of the block, and when.
        self._last: dict[tuple[int, int], tuple[Lanes, Moments]] = {}

    def action(self, instruction: Instruction) -> Callable[[int, Selection], None]:
        """What an instruction does with the threads that reach it."""
        batch, registers = self.batch, self.batch.registers
        names = [m for m in instruction.modifiers if m not in ("aligned", "cta")]
        operator = next((name for name in names if name in _REDUCTIONS), "")
        kinds = (["sync"], ["arrive"], ["red", operator, "pred"])
        if names not in kinds or (names == ["arrive"] and len(instruction.operands) < 2):
            raise UnsupportedInstruction(f"{instruction.opcode} with these operands is not supported")
        result, number, count, predicate = _operands(instruction)
        read_number = registers.reader(number, "u32")
        read_count = registers.reader(Imm(self.block_threads) if count is None else count, "u32")
        vote = registers.reader(predicate, "pred") if predicate is not None else None
        write = registers.writer(result, "pred") if result is not None else None
        simple = names == ["sync"] and not may_be_partial(instruction, self.block_threads)

        def come(pc: int, sel: Selection) -> None:
            require_warps(instruction, batch, sel)
            for index in instruction.reads:
                batch.require_defined(index, sel)
            if simple and sel is None:
                # All threads of the batch are here at once, so no phase is open and none stays open.
                if self.watch is not None:
                    self.watch.wait(instruction, batch.lanes, number.value)
                    self.watch.release(instruction, batch.lanes, number.value)
                self._order_block(slice(None))
                self.go(pc + 1, batch.lanes)
                return
            lanes = batch.chosen(sel)
            numbers, counts = (np.broadcast_to(read(sel), lanes.shape) for read in (read_number, read_count))
            votes = np.broadcast_to(vote(sel), lanes.shape) if vote is not None else None
            if (numbers >= COUNT).any():
                raise UnsupportedInstruction(f"a barrier beyond the {COUNT} of a block", lanes=lanes[numbers >= COUNT])
            keys = lanes // self.block_threads * COUNT + numbers
            for key in np.unique(keys).tolist():
                mine = keys == key
                phase = self._phase(divmod(key, COUNT), instruction, lanes[mine], counts[mine])
                phase.come.append((pc, lanes[mine], batch.shared.moments[lanes[mine]]))
                if votes is not None and write is not None:
                    phase.votes.append(votes[mine])
                    phase.writes.append((write, lanes[mine], instruction.writes))
                if names == ["arrive"]:
                    known = self._clocks.release(lanes[mine]).max(axis=0)
                    phase.told = known if phase.told is None else np.maximum(phase.told, known)
                    self.go(pc + 1, lanes[mine])
                else:
                    phase.waiting.append((pc, lanes[mine]))
                    if self.watch is not None:
                        self.watch.wait(instruction, lanes[mine], key % COUNT)
                self._complete_if_full(divmod(key, COUNT))

        return come

    def _phase(self, key: tuple[int, int], instruction: Instruction, lanes: Lanes, counts: Array) -> _Phase:
        """The running phase, given that the threads may join it."""
        # A reduction and a plain barrier do not mix; arriving and waiting do.
        kind = next((name for name in instruction.modifiers if name in _REDUCTIONS), "")
        expected = int(counts[0])
        if expected % 32 or not 0 < expected <= self.block_threads or (counts != expected).any():
            message = f"a barrier of {expected} threads: whole warps, at most {self.block_threads} threads, one number"
            raise UnsupportedInstruction(message, lanes=lanes)
        phase = self.phases.setdefault(key, _Phase(expected, kind))
        if (phase.expected, phase.kind) != (expected, kind):
            message = f"a barrier of {expected} threads is one of {phase.expected}, or of another kind, to others"
            raise DivergenceError(message, lanes=lanes)
        if key in self._last:
            before, moments = self._last[key]
            clocks = self._clocks
            knows = clocks.known[lanes[:, None], before // 32 % clocks.warps, before & 31] >= moments >> TIME_SHIFT
            if (early := ~knows.all(axis=1)).any():
                message = "a thread comes to a barrier whose phase before may still run: it does not know that it ended"
                self.batch.hazard(RaceError(message, lanes=lanes[early]))
        return phase

    def _complete_if_full(self, key: tuple[int, int]) -> None:
        phase = self.phases[key]
        threads = phase.threads
        if threads.size < phase.expected:
            return
        if threads.size > phase.expected or np.unique(threads).size < threads.size or not phase.waiting:
            message = (
                f"a barrier of {phase.expected} threads to which {threads.size} come, or one twice, or none that waits"
            )
            raise DivergenceError(message, lanes=threads)
        del self.phases[key]
        waiting = np.concatenate([lanes for _, lanes in phase.waiting])
        if waiting.size == self.block_threads:
            first = key[0] * self.block_threads
            self._order_block(slice(first, first + self.block_threads))
        else:
            known = self._clocks.release(waiting).max(axis=0)
            told = known if phase.told is None else np.maximum(known, phase.told)
            self._clocks.acquire(waiting, np.broadcast_to(told, (waiting.size, *told.shape)))
            self._last[key] = threads, np.concatenate([moments for *_, moments in phase.come])
        for write, lanes, registers in phase.writes:
            write(lanes, _REDUCTIONS[phase.kind].reduce(np.concatenate(phase.votes)))
            for index in registers:
                self.batch.registers.define(index, lanes)
        for pc, lanes in phase.waiting:
            if self.watch is not None:
                self.watch.release(self.watch.view.kernel.instructions[pc], lanes, key[1])
            self.go(pc + 1, lanes)

    @property
    def _clocks(self) -> Clocks:
        clocks = self.batch.shared.clocks
        assert clocks is not None, "the launch makes them for kernels with barriers of part of a block"
        return clocks

    def _order_block(self, lanes: slice) -> None:
        self.batch.shared.pass_barrier(lanes)
        self.batch.report.barriers += self.batch.lanes[lanes].size // self.block_threads

    def unfinished(self) -> tuple[int, DivergenceError] | None:
        """Of a batch that ended, a barrier that some of its threads never reached: an instruction, and the error."""
        for phase in self.phases.values():
            threads, what = phase.threads, "wait" if phase.waiting else "arrived"
            message = f"{threads.size} of {phase.expected} threads {what} at a barrier the others never reach"
            return phase.come[0][0], DivergenceError(message, lanes=threads)
        return None
