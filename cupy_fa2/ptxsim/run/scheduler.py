"""Threads that diverge and meet again, exits.

All threads of a batch run together, one instruction at a time. Threads that diverge form groups; the group at
the lowest instruction runs next, and groups that reach the same instruction merge, so that branches
reconverge where they can. No result depends on this order: what two threads do unordered is a hazard, however
it falls out. A thread that fails a wait at an mbarrier rests (see `waits`); `barriers` has those of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from ..errors import DeadlockError, DivergenceError, SimulationError, UnsupportedInstruction
from ..instructions.bind import guard_of
from ..instructions.mbarrier import is_wait
from ..observe.watch import Watch
from ..ptx.kernel import Instruction
from ..state.batch import Batch, Handler, Step
from ..state.registers import Selection
from .barriers import BlockBarriers, is_barrier
from .waits import Lanes, Waits

CONTROL = frozenset(("bra", "ret", "exit", "trap"))


def is_control(instruction: Instruction) -> bool:
    """Whether an instruction decides what runs next."""
    return instruction.base in CONTROL or is_barrier(instruction) or is_wait(instruction)


class Scheduler:
    """Runs one batch of blocks.

    Parameters
    ----------
    instructions : sequence of Instruction
        The kernel.
    steps : sequence of Step
        What each instruction does; those of control instructions are not used.
    batch : Batch
        Registers and memory.
    block_threads : int
        Threads in a block.
    watch : Watch, optional
        Who is told what runs.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        steps: Sequence[Step],
        batch: Batch,
        block_threads: int,
        watch: Watch | None = None,
    ) -> None:
        self.instructions, self.steps, self.batch = instructions, steps, batch
        self.threads = batch.lanes.size
        #: The instruction that runs now, for errors.
        self.pc = 0
        self.counts = np.zeros(len(instructions), np.int64)
        self._groups: list[tuple[int, int, Selection]] = []
        self._pushed = 0
        self._barriers = BlockBarriers(batch, block_threads, self._go, watch)
        self._waits = Waits(instructions, batch, self._try_again, self._go)
        self._watch = watch
        self._handlers: dict[int, Handler] = {}
        self._next_control = np.full(len(instructions) + 1, len(instructions), np.int64)
        for pc in range(len(instructions) - 1, -1, -1):
            self._next_control[pc] = self._next_control[pc + 1]
            if is_control(instructions[pc]):
                self.pc = pc
                self._next_control[pc] = pc
                self._handlers[pc] = self._handler(instructions[pc])
        self._stops = self._next_control.tolist()
        #: What a wait does when it is tried again.
        self._retries = self._handlers
        if watch is not None:
            self.steps = watch.steps(instructions, steps)
            self._handlers = {pc: watch.handler(instructions[pc], handler) for pc, handler in self._handlers.items()}

    def run(self) -> None:
        """Run all threads to their exit."""
        self._push(0, None)
        try:
            while self._groups or self._waits.resting:
                self._run_next()
        except DivergenceError as error:
            if self._waits.apart and not isinstance(error, DeadlockError):
                # A warp runs in parts only when all else had stopped (see `Waits.break_tie`). That such a part cannot
                # meet the rest of its warp is a consequence: the fault is the wait that the rest never gets out of.
                raise self._waits.deadlock() from error
            raise
        self._refuse_waiting()

    def _run_next(self) -> None:
        if self._waits.resting:
            self._waits.wake()
            if not self._groups:
                self._waits.break_tie()
        pc, sel, limit = self._pop()
        if self._waits.apart:
            # One instruction at a time: any of them may let the rest of the warp go on, and then the parts have to come
            # together again before an instruction that needs the whole warp.
            limit = min(limit, pc + 1)
        if self._waits.resting:
            present = self._waits.keep_back(pc, self.batch.chosen(sel))
            if not present.size:
                return
            sel = self._selection(present)
        stop = min(self._stops[pc], limit)
        warps = self._warps(sel)
        for index in range(pc, stop):
            self.pc = index
            self.steps[index](sel)
        self.counts[pc:stop] += warps
        if stop == limit < len(self.instructions):
            self._push(stop, sel)
            return
        self.pc = stop
        if stop == len(self.instructions):
            raise SimulationError("the kernel ends without a ret")
        self.counts[stop] += warps
        self._handlers[stop](stop, sel)

    # Groups

    def _push(self, pc: int, sel: Selection) -> None:
        self._pushed += 1
        heappush(self._groups, (pc, self._pushed, sel))

    def _pop(self) -> tuple[int, Selection, int]:
        """The lowest group, merged with all others at its instruction, and where the next one waits."""
        pc, _, sel = heappop(self._groups)
        if self._groups and self._groups[0][0] == pc:
            together = [self.batch.chosen(sel)]
            while self._groups and self._groups[0][0] == pc:
                together.append(self.batch.chosen(heappop(self._groups)[2]))
            sel = self._selection(np.sort(np.concatenate(together)))
        return pc, sel, self._groups[0][0] if self._groups else len(self.instructions)

    def _selection(self, lanes: Lanes) -> Selection:
        """The cheapest form of a selection: slices need no copies."""
        if lanes.size == self.threads:
            return None
        first, last = int(lanes[0]), int(lanes[-1])
        return slice(first, last + 1) if last - first + 1 == lanes.size else lanes

    def _warps(self, sel: Selection) -> int:
        if sel is None:
            return self.threads // 32
        return int(np.unique(self.batch.chosen(sel) >> 5).size)

    def _go(self, pc: int, lanes: Lanes) -> None:
        self._push(pc, self._selection(lanes))

    # Control instructions

    def _handler(self, instruction: Instruction) -> Handler:
        guard = guard_of(instruction, self.batch)

        def split(sel: Selection) -> tuple[Lanes, Lanes]:
            """The selected threads for which the guard holds, and the others."""
            lanes = self.batch.chosen(sel)
            if guard is None:
                return lanes, lanes[:0]
            holds = guard(sel)
            return lanes[holds], lanes[~holds]

        def control(pc: int, sel: Selection) -> None:
            taken, rest = split(sel)
            if rest.size:
                self._push(pc + 1, self._selection(rest))
            if taken.size:
                act(pc, self._selection(taken))

        act = self._action(instruction)
        return control

    def _action(self, instruction: Instruction) -> Handler:
        if instruction.base == "bra":
            if instruction.modifiers not in ((), ("uni",)):
                raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
            return lambda pc, sel: self._push(instruction.target, sel)
        if instruction.base in ("ret", "exit"):
            return lambda pc, sel: self.batch.shared.on_exit(self.batch.chosen(sel))
        if instruction.base == "trap":
            return self._trap
        if instruction.base == "mbarrier":
            return self._wait_action(instruction, self.steps[self.pc])
        return self._barriers.action(instruction)

    def _wait_action(self, instruction: Instruction, step: Step) -> Handler:
        result = self.batch.registers.reader(instruction.operands[0], "pred")

        def wait(pc: int, sel: Selection) -> None:
            step(sel)
            lanes, ready = self.batch.chosen(sel), result(sel)
            if ready.any():
                if self._watch is not None:
                    self._watch.pass_mbarrier(instruction, lanes[ready])
                self._go(pc + 1, lanes[ready])
            if not ready.all():
                self._waits.rest(pc, lanes[~ready])

        return wait

    def _try_again(self, pc: int, lanes: Lanes) -> None:
        self.pc = pc
        self._retries[pc](pc, lanes)

    def _trap(self, pc: int, sel: Selection) -> None:
        raise SimulationError("trap: the kernel stopped itself", lanes=self.batch.chosen(sel))

    def _refuse_waiting(self) -> None:
        if (left := self._barriers.unfinished()) is not None:
            self.pc, error = left
            raise error
