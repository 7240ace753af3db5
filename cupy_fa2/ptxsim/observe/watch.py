"""Between a batch that runs and an observer: who is told what, and when. Without an observer none of this exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..instructions.memory import SHARED_WINDOW
from ..ptx.kernel import Instruction
from ..state.batch import Batch, Handler, Step
from ..state.registers import Selection
from .observer import BatchView, Indices, Observer, StepEvent, WaitEvent


class Watch:
    """Tells an observer about one batch.

    Parameters
    ----------
    observer : Observer
        Who is told.
    view : BatchView
        How the observer looks at the batch.
    batch : Batch
        What runs.
    block_threads : int
        Threads in a block.
    """

    def __init__(self, observer: Observer, view: BatchView, batch: Batch, block_threads: int) -> None:
        self.observer, self.view, self.batch, self.block_threads = observer, view, batch, block_threads
        self._alive = np.full(batch.lanes.size // block_threads, block_threads)
        observer.begin(view)

    # Steps

    def steps(self, instructions: Sequence[Instruction], steps: Sequence[Step]) -> list[Step]:
        """The steps, each of which tells that it was executed."""
        return [self._told_after(instruction, step) for instruction, step in zip(instructions, steps, strict=True)]

    def _told_after(self, instruction: Instruction, step: Step) -> Step:
        active = self._active(instruction)

        def told(sel: Selection) -> None:
            # The step may write its own predicate.
            lanes = active(sel)
            step(sel)
            self.observer.step(StepEvent(self.view, instruction, self.batch.chosen(sel), lanes))

        return told

    def handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """A handler of a control instruction that tells before it acts."""
        active, exits = self._active(instruction), instruction.base in ("ret", "exit")

        def told(pc: int, sel: Selection) -> None:
            lanes = active(sel)
            self.observer.step(StepEvent(self.view, instruction, self.batch.chosen(sel), lanes))
            if instruction.base == "mbarrier":
                self._at_mbarriers(self.observer.wait, instruction, lanes)
            handler(pc, sel)
            if exits:
                self._exit(lanes)

        return told

    def _active(self, instruction: Instruction) -> Callable[[Selection], Indices]:
        """The selected threads for which the predicate of an instruction holds."""
        chosen = self.batch.chosen
        if instruction.predicate is None:
            return chosen
        # Its definition is checked when the instruction itself reads it.
        holds = self.batch.registers.reader(instruction.predicate, "pred")
        return lambda sel: chosen(sel)[holds(sel)]

    def _exit(self, lanes: Indices) -> None:
        blocks, counts = np.unique(lanes // self.block_threads, return_counts=True)
        self._alive[blocks] -= counts
        if (ended := blocks[self._alive[blocks] == 0]).size:
            self.observer.end(self.view, ended)

    # Waits

    def wait(self, instruction: Instruction, lanes: Indices, number: int) -> None:
        """Threads come to a barrier of the block."""
        self.observer.wait(WaitEvent(self.view, instruction, lanes, ("bar", number)))

    def release(self, instruction: Instruction, lanes: Indices, number: int) -> None:
        """Threads pass a barrier of the block."""
        self.observer.release(WaitEvent(self.view, instruction, lanes, ("bar", number)))

    def pass_mbarrier(self, instruction: Instruction, lanes: Indices) -> None:
        """Threads find the phase of an mbarrier complete."""
        self._at_mbarriers(self.observer.release, instruction, lanes)

    def _at_mbarriers(self, tell: Callable[[WaitEvent], None], instruction: Instruction, lanes: Indices) -> None:
        if not lanes.size:
            return
        read = self.batch.registers.address_reader(instruction.operands[1])  # type: ignore[arg-type]
        where = read(lanes)
        where = np.where(where >= SHARED_WINDOW, where - SHARED_WINDOW, where)
        for address in np.unique(where).tolist():
            tell(WaitEvent(self.view, instruction, lanes[where == address], ("mbarrier", address)))
