"""mbarriers: phases, pending arrivals and bytes, and whom a completed phase orders before whom.

The counts are those of the PTX ISA. On top of them nothing may depend on which of two unordered things comes first:

- an arrival, an expectation or a copy counts for the phase that runs, so its thread has to know that all earlier
  phases are complete;
- the copies of a phase bring exactly the bytes that the phase expects, or it could complete with one in flight;
- a wait by parity tells two phases apart, so it has to be ordered before the end of the phase after the one it saw.

A copy lands, in the simulator, as early as its phase lets it. Nobody may notice: who touches the bytes has to know
that the phase is complete, however long ago it was.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import AsyncCopyError, HazardError, MbarrierError, RaceError, UnsupportedInstruction
from ..ptx.kernel import Instruction
from ..types import Array
from .clocks import SLOTS, TIME_SHIFT, Clocks
from .hazards import SharedHazards

BYTES = 8
#: The most arrivals that a barrier can expect, and the most bytes, by the PTX ISA.
MAX_COUNT = (1 << 20) - 1

Lanes = npt.NDArray[np.int64]


class Mbarriers:
    """All mbarriers of a batch of blocks; each block has `SLOTS` places for them.

    Parameters
    ----------
    words : int
        Size of the batch's shared memory, in words of 8 bytes.
    blocks, block_threads : int
        Size of the batch.
    clocks : Clocks
        What threads know of each other.
    hazards : SharedHazards
        The tables of the memory that the barriers lie in.
    """

    def __init__(self, words: int, blocks: int, block_threads: int, clocks: Clocks, hazards: SharedHazards) -> None:
        self.block_threads, self.clocks, self.hazards = block_threads, clocks, hazards
        places = blocks * SLOTS
        #: For each 8-byte word of shared memory the barrier (its index in the tables below) that lies there, or -1.
        self.at = np.full(words, -1, np.int64)
        self.word = np.full(places, -1, np.int64)
        self.origin = [""] * places
        self.initialized = np.zeros(places, np.int64)
        self.expected, self.pending = np.zeros(places, np.int64), np.zeros(places, np.int64)
        #: Of the running phase: the bytes that it was told to expect, and the bytes of the copies issued for it.
        self.wanted, self.issued = np.zeros(places, np.int64), np.zeros(places, np.int64)
        #: How many phases are complete, counted over all barriers that ever had this place, and how many were when the
        #: present one was initialised; the phase of the latest copy, and the latest phase that some thread waited for.
        self.completed, self.base = np.zeros(places, np.int64), np.zeros(places, np.int64)
        self.copied, self.seen = np.zeros(places, np.int64), np.zeros(places, np.int64)
        self.copier: list[tuple[Instruction, int] | None] = [None] * places
        shape = (places, *clocks.known.shape[1:])
        #: Rows of clocks: what the threads that arrived in the running phase know together, and what they knew at the
        #: end of the latest complete phase, which is what those who wait for it learn.
        self.gathered, self.told = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        #: When each thread of the block waited, by parity, for the latest complete phase; 0 if it did not.
        self.parity_seen = np.zeros((places, block_threads), np.int64)
        #: The barrier that each thread waits for, or -1.
        self.waiting_for = np.full(clocks.moments.size, -1, np.int64)
        #: Grows with every completed phase: while it stands, waits that failed need not be tried again.
        self.version = 0

    def forget(self) -> None:
        """Start over, for other blocks."""
        for table in (self.at, self.word, self.waiting_for):
            table[:] = -1
        for table in (self.completed, self.base, self.wanted, self.issued, self.copied, self.seen):
            table[:] = 0
        self.parity_seen[:] = 0
        self.gathered[:] = 0
        self.told[:] = 0

    # Initialisation and its end

    def initialize(self, word: int, granules: Array, count: int, lane: int, origin: str) -> None:
        """Make a barrier of 8 bytes of shared memory."""
        lanes = np.array([lane])
        if self.at[word] >= 0:
            self.refuse(MbarrierError("an mbarrier is initialised again while it is one", lanes=lanes))
        if not 0 < count <= MAX_COUNT:
            self.refuse(MbarrierError(f"an mbarrier of {count} arrivals: 1 to {MAX_COUNT}", lanes=lanes))
        first = lane // self.block_threads * SLOTS
        free = np.flatnonzero(self.word[first : first + SLOTS] < 0)
        if not free.size:
            raise UnsupportedInstruction(f"more than {SLOTS} mbarriers in a block", lanes=lanes)
        place = first + int(free[0])
        moments = self.clocks.moments[lanes]
        self.hazards.on_write(granules, moments, lanes)
        self.hazards.write[granules] = self.clocks.unseen
        self.at[word], self.word[place], self.origin[place] = place, word, origin
        self.initialized[place] = moments[0]
        self.expected[place] = self.pending[place] = count
        self.base[place] = self.completed[place]
        self.gathered[place] = 0
        self.told[place] = 0
        self.parity_seen[place] = 0

    def invalidate(self, place: int, granules: Array, lane: int) -> None:
        """Make ordinary memory of a barrier again."""
        lanes = np.array([lane])
        if self.wanted[place] or self.issued[place]:
            self.refuse(MbarrierError(f"an mbarrier is invalidated {self.missing(place)}", lanes=lanes))
        self.hazards.write[granules] = self.clocks.moments[lane]
        self.hazards.valid[granules] = False
        self.at[self.word[place]] = -1
        self.word[place] = -1

    def find(self, words: Array, lanes: Lanes) -> Lanes:
        """The barriers at some words, in use and known to be initialised."""
        places = np.asarray(self.at[words])
        if (unknown := places < 0).any():
            self.refuse(MbarrierError("no mbarrier was initialised here", lanes=lanes[unknown]))
        early = self.hazards.unordered(self.initialized[places], self.clocks.moments[lanes], lanes)
        if early.any():
            message = "an mbarrier is used with no barrier since another thread initialised it"
            self.hazards.report(RaceError(message, lanes=lanes[early]))
        return places

    def refuse(self, error: HazardError) -> None:
        """Report what cannot go on, even where hazards are collected."""
        self.hazards.report(error)
        raise error

    # Phases

    def arrive(self, places: Lanes, counts: Array, nbytes: Array, lanes: Lanes, releases: bool) -> Array:
        """Arrive, each thread with its count, and expect bytes first; returns the phase each one arrived in.

        Only an arrival that `releases` orders what its thread did before it.
        """
        self._require_phase(places, lanes, "arrives at an mbarrier")
        phases: Array = self.completed[places]
        known = self.clocks.release(lanes)
        for place in np.unique(places):
            mine = places == place
            if releases:
                self.gathered[place] = np.maximum(self.gathered[place], known[mine].max(axis=0))
            self._expect(place, int(nbytes[mine].sum()), lanes[mine])
            self.pending[place] -= int(counts[mine].sum())
            if self.pending[place] < 0:
                message = f"more arrivals in one phase than the {self.expected[place]} that the mbarrier expects"
                self.refuse(MbarrierError(message, lanes=lanes[mine]))
            self._complete(place, lanes[mine])
        return phases

    def expect(self, places: Lanes, nbytes: Array, lanes: Lanes) -> None:
        """Expect more bytes in the running phase."""
        self._require_phase(places, lanes, "expects bytes of an mbarrier")
        for place in np.unique(places):
            mine = places == place
            self._expect(place, int(nbytes[mine].sum()), lanes[mine])
            self._complete(place, lanes[mine])

    def copy(self, place: int, nbytes: int, lane: int, instruction: Instruction) -> np.int64:
        """Note a copy that will complete `nbytes`; returns the moment at which its bytes are there."""
        lanes = np.array([lane])
        slot, phase = place % SLOTS, int(self.completed[place]) + 1
        if self._behind(np.array([place]), lanes).any():
            message = (
                "a bulk copy is issued on an mbarrier whose phase may be complete without it: "
                "it expects fewer bytes than its copies bring, or the thread has not waited for the phase before"
            )
            self.hazards.report(AsyncCopyError(message, lanes=lanes))
        self.issued[place] += nbytes
        self.copied[place], self.copier[place] = phase, (instruction, lane)
        return self.clocks.landing(slot, phase)

    def landed(self, place: int, lane: int) -> None:
        """A copy whose bytes are written may complete the phase."""
        self._complete(place, np.array([lane]))

    def test(self, places: Lanes, ready: npt.NDArray[np.bool_], by_parity: bool, lanes: Lanes) -> None:
        """Note who waited successfully and who did not."""
        self.waiting_for[lanes] = np.where(ready, -1, places)
        places, lanes = places[ready], lanes[ready]
        if not lanes.size:
            return
        fresh = self._behind(places, lanes)
        if fresh.any():
            self.clocks.acquire(lanes[fresh], self.told[places[fresh]])
        self.seen[places] = self.completed[places]
        if by_parity:
            self.parity_seen[places, lanes % self.block_threads] = self.clocks.moments[lanes] >> TIME_SHIFT

    def complete_since(self, places: Lanes, parity: Array) -> npt.NDArray[np.bool_]:
        """Whether the phases of some parity are complete: the running ones are of the other."""
        ready: npt.NDArray[np.bool_] = (self.completed[places] - self.base[places]) & 1 != parity
        return ready

    def _behind(self, places: Lanes, lanes: Lanes) -> npt.NDArray[np.bool_]:
        known = np.maximum(self.clocks.phases(lanes, places % SLOTS), self.base[places])
        behind: npt.NDArray[np.bool_] = known < self.completed[places]
        return behind

    def _require_phase(self, places: Lanes, lanes: Lanes, what: str) -> None:
        if (behind := self._behind(places, lanes)).any():
            message = f"a thread {what} that may still be in the phase before: it has not waited for that one to end"
            self.hazards.report(RaceError(message, lanes=lanes[behind]))

    def _expect(self, place: int, nbytes: int, lanes: Lanes) -> None:
        self.wanted[place] += nbytes
        if nbytes < 0 or self.wanted[place] > MAX_COUNT:
            message = f"{self.wanted[place]} bytes expected in one phase of an mbarrier: at most {MAX_COUNT}"
            self.refuse(MbarrierError(message, lanes=lanes))

    def _complete(self, place: int, lanes: Lanes) -> None:
        """End the phase if nothing is missing."""
        if self.pending[place]:
            return
        if self.issued[place] > self.wanted[place]:
            message = (
                f"bulk copies bring {self.issued[place]} bytes in a phase whose mbarrier expects "
                f"{self.wanted[place]}: it can complete with one in flight"
            )
            self.refuse(AsyncCopyError(message, lanes=lanes))
        if self.issued[place] < self.wanted[place]:
            return
        told = self.gathered[place]
        told[:, 32] = told[:, :32].min(axis=1)
        late = np.flatnonzero(self.parity_seen[place] > told[:-1, :32].reshape(-1))
        if late.size:
            message = (
                "a phase of an mbarrier ends with nothing that orders it after a thread's wait for the phase before: "
                "had the thread waited later, the parity would have told it nothing"
            )
            first = place // SLOTS * self.block_threads
            self.hazards.report(RaceError(message, lanes=late + first))
        self.parity_seen[place] = 0
        self.completed[place] += 1
        self.pending[place] = self.expected[place]
        self.wanted[place] = self.issued[place] = 0
        told[-1, place % SLOTS] = self.completed[place]
        self.told[place] = told
        self.version += 1

    # The end of a block

    def missing(self, place: int) -> str:
        """What a phase waits for, in words."""
        return (
            f"with {self.pending[place]} of {self.expected[place]} arrivals and "
            f"{self.wanted[place] - self.issued[place]} of {self.wanted[place]} bytes missing"
        )

    def on_block_end(self, block: int) -> None:
        """Refuse a block that ends with copies that nobody waited for or bytes that nobody brought."""
        for place in range(block * SLOTS, (block + 1) * SLOTS):
            copier = self.copier[place]
            if copier is not None and self.copied[place] > self.seen[place]:
                instruction, lane = copier
                message = f"a block exits with this bulk copy in flight: nobody waited for {self.origin[place]}"
                error = AsyncCopyError(message, lanes=[lane], line=instruction.line, text=instruction.text)
                error.frames = instruction.frames
            elif self.word[place] >= 0 and (self.wanted[place] or self.issued[place]):
                message = f"a block exits while a phase runs, {self.missing(place)}, of {self.origin[place]}"
                error = AsyncCopyError(message, lanes=[block * self.block_threads])
            else:
                continue
            self.hazards.report(error)
            return
