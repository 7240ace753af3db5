"""What can go wrong in a simulated launch, each kind an exception that says where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt


class Frame(NamedTuple):
    """One source position; an inlined function has a chain of them, innermost first."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.text}" if self.text else "")


class SimulationError(Exception):
    """Base of every error of the simulator.

    Attributes
    ----------
    kind : str
        Short name of the kind of error, the same for all errors of one class.
    message : str
        What happened, for a person.
    line, text : int, str
        The PTX line (from 1) and instruction at fault; 0 and empty when there is none.
    frames : tuple of Frame
        Source positions of the instruction, innermost inlined function first.
    block : tuple of int or None
        The block of the first thread at fault.
    threads : tuple of int
        The threads at fault, by their number inside that block.
    """

    kind = "error"

    def __init__(
        self, message: str, *, lanes: Sequence[int] | npt.NDArray[Any] = (), line: int = 0, text: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        #: Threads numbered across the running batch of blocks; the launch turns them into block and threads.
        self.lanes = tuple(int(lane) for lane in lanes)
        self.line = line
        self.text = text
        self.frames: tuple[Frame, ...] = ()
        self.block: tuple[int, int, int] | None = None
        self.threads: tuple[int, ...] = ()

    @property
    def source(self) -> str | None:
        """Innermost ``file:line`` of the instruction, where line information was compiled in."""
        return f"{self.frames[0].file}:{self.frames[0].line}" if self.frames else None

    @property
    def source_lines(self) -> tuple[int, ...]:
        """Source line numbers, innermost inlined function first."""
        return tuple(frame.line for frame in self.frames)

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.message}"]
        if self.block is not None:
            shown = ", ".join(map(str, self.threads[:8])) + (", ..." if len(self.threads) > 8 else "")
            parts.append(f"  block {self.block}, thread {shown}")
        if self.line:
            parts.append(f"  PTX line {self.line}: {self.text}")
        parts += [f"  {'at' if i == 0 else 'inlined at'} {frame}" for i, frame in enumerate(self.frames)]
        return "\n".join(parts)


class ParseError(SimulationError):
    """The PTX text is not what this parser knows."""

    kind = "parse error"


class UnsupportedInstruction(SimulationError):
    """An opcode, or a modifier of one, that the simulator does not run: never skipped in silence."""

    kind = "unsupported instruction"


class LaunchError(SimulationError):
    """The launch itself is impossible: too much shared memory, wrong arguments."""

    kind = "bad launch"


class OutOfBoundsError(SimulationError):
    """An address that is not an element of any bound view, or not inside shared or parameter memory."""

    kind = "out of bounds"


class MisalignedAddressError(SimulationError):
    """An address that is not a multiple of the access's width."""

    kind = "misaligned address"


class DivergenceError(SimulationError):
    """A warp-wide or block-wide instruction that not all of its threads reach."""

    kind = "divergence"


class DeadlockError(DivergenceError):
    """Threads wait at an mbarrier whose phase nobody can complete any more."""

    kind = "deadlock"


class HazardError(SimulationError):
    """A bug that a GPU may hide: the launch can collect these and go on."""

    kind = "hazard"


class UninitializedReadError(HazardError):
    """A register or memory byte was read that nothing wrote."""

    kind = "uninitialised read"


class RaceError(HazardError):
    """Two threads touch one location, one of them writing, with nothing that orders them."""

    kind = "race"


class AsyncCopyError(HazardError):
    """Shared memory was touched while an asynchronous copy to it was in flight, or a copy was never waited for."""

    kind = "asynchronous copy"


class MbarrierError(HazardError):
    """An mbarrier is not used as one: never initialised, initialised twice, arrived at too often, overwritten."""

    kind = "mbarrier"
