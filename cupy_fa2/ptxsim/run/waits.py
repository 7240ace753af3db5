"""The threads that failed a wait at an mbarrier: who runs instead of them, when they try again, and deadlocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import DeadlockError
from ..ptx.kernel import Instruction
from ..state.batch import Batch

#: How often threads may test mbarriers in vain while nobody else can run.
_MAX_POLLS = 1000
Lanes = npt.NDArray[np.int64]
#: Does something with threads at an instruction.
At = Callable[[int, Lanes], None]


class Waits:
    """Threads of a batch that rest until some phase is complete, and the rest of their warps with them.

    A GPU brings a warp together again before it goes on, so the others of a warp are kept back where they are. Only
    when nobody else can run do they go ahead without those that rest.

    Parameters
    ----------
    instructions : sequence of Instruction
        The kernel.
    batch : Batch
        What it runs on.
    again : callable
        Tries a wait again.
    go : callable
        Lets threads run from an instruction on.
    """

    def __init__(self, instructions: Sequence[Instruction], batch: Batch, again: At, go: At) -> None:
        self.instructions, self.batch, self.again, self.go = instructions, batch, again, go
        self.resting: list[tuple[int, Lanes]] = []
        self.kept: list[tuple[int, Lanes]] = []
        #: Whether warps run in parts.
        self.apart = False
        self._polls = 0
        self._version = 0

    def rest(self, pc: int, lanes: Lanes) -> None:
        """Note threads whose wait at `pc` failed."""
        self.resting.append((pc, lanes))

    def wake(self) -> None:
        """Let threads try again if a phase was completed since they last did."""
        version = self.batch.barriers.version
        if self._version == version:
            return
        self._version, self._polls, self.apart = version, 0, False
        resting, self.resting = self.resting, []
        for pc, lanes in resting:
            self.again(pc, lanes)
        self._return_kept()

    def keep_back(self, pc: int, lanes: Lanes) -> Lanes:
        """Those of some threads that may run: not those whose warps have others that rest."""
        if self.apart:
            return lanes
        rests = np.zeros(self.batch.lanes.size // 32, np.bool_)
        for _, waiting in self.resting:
            rests[waiting >> 5] = True
        kept = rests[lanes >> 5]
        if kept.any():
            self.kept.append((pc, lanes[kept]))
        going: Lanes = lanes[~kept]
        return going

    def break_tie(self) -> None:
        """Nobody can run: let failed tests return, or warps run in parts; else it is a deadlock."""
        polls = [pc for pc, _ in self.resting if "test_wait" in self.instructions[pc].modifiers]
        if polls and self._polls < _MAX_POLLS:
            self._polls += 1
            for pc, lanes in self.resting:
                if pc in polls:
                    self.go(pc + 1, lanes)
            self.resting = [(pc, lanes) for pc, lanes in self.resting if pc not in polls]
        elif self.kept:
            self.apart = True
        else:
            raise self.deadlock()
        self._return_kept()

    def deadlock(self) -> DeadlockError:
        """The error that says for what some threads wait."""
        barriers = self.batch.barriers
        pc, lanes = self.resting[0]
        place = int(barriers.waiting_for[lanes[0]])
        lanes = lanes[barriers.waiting_for[lanes] == place]
        instruction = self.instructions[pc]
        message = f"threads wait for {barriers.origin[place]}, {barriers.missing(place)}"
        error = DeadlockError(message, lanes=lanes, line=instruction.line, text=instruction.text)
        error.frames = instruction.frames
        return error

    def _return_kept(self) -> None:
        kept, self.kept = self.kept, []
        for pc, lanes in kept:
            self.go(pc, lanes)
