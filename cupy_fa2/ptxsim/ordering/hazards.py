"""Shared memory's rules: nothing uninitialised is read, nothing races, nothing touches a copy in flight.

Every access is stamped with a *moment*, and a table keeps, for each granule of shared memory, the moments of
its last write and last reads. Two accesses of different threads are ordered when a block barrier lies between
them, or, within one warp, a ``bar.warp.sync`` of the whole warp. No other ``.sync`` instruction orders
memory, as the CUDA memory model says; a ``bar.warp.sync`` of part of a warp is taken as no ordering. The
verdict does not depend on the order in which the simulator runs warps: both orders of a racing pair are
caught.

A ``cp.async`` may land at any time between its issue and its wait. So it is a write at its issue (which must
be ordered after what used the buffer before), a write again when the issuing thread's wait retires it (which
must be ordered before what uses it next), and in between nobody may touch the bytes at all.

A moment is one integer, ``barriers << 40 | warp barriers << 20 | warp << 6 | lane``: comparing, with one
exclusive-or, answers all of the above.

Where a kernel has mbarriers, pairs of warps are ordered too, and pairs that the comparison leaves open are decided by
vector clocks (`clocks`). The last reads are then kept by warp, and a bulk copy is a write that is ordered before an
access only once the accessing thread knows that the phase of the copy's mbarrier is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import AsyncCopyError, HazardError, MbarrierError, RaceError, UninitializedReadError
from ..types import Array
from .clocks import (
    BLOCK_STEP,
    LANE_MASK,
    MANY_LANES,
    MANY_WARPS,
    THREAD_MASK,
    WARP_SHIFT,
    WARP_STEP,
    Clocks,
    Moments,
)

#: Called with a hazard; raises it or keeps it.
Reporter = Callable[[HazardError], None]


def first_moments(block_threads: int, blocks: int) -> Moments:
    """Moments of all threads of a batch before the first barrier; 0 is reserved for "never"."""
    thread = np.tile(np.arange(block_threads, dtype=np.int64), blocks)
    return BLOCK_STEP | (thread >> 5) << WARP_SHIFT | thread & 31


def after_block_barrier(moments: Moments) -> Moments:
    """The moments just after a barrier of the block."""
    return (moments & ~(BLOCK_STEP - 1)) + BLOCK_STEP | moments & THREAD_MASK


def whole_warp(moments: Moments) -> Moments:
    """The same moments, of the warp instead of one of its lanes: for what a warp does together."""
    return moments & ~LANE_MASK | MANY_LANES


def unordered(before: Moments, now: Moments) -> npt.NDArray[np.bool_]:
    """Whether two accesses are of different threads with nothing between them."""
    differ = before ^ now
    clash: npt.NDArray[np.bool_] = (differ < BLOCK_STEP) & (differ & THREAD_MASK != 0)
    if clash.any():
        same_warp = (differ & THREAD_MASK) >> WARP_SHIFT == 0
        clash &= ~(same_warp & (differ >= WARP_STEP))
    return clash


@dataclass(slots=True)
class _Copies:
    """The copies of one ``cp.async`` instruction: who issued, in which group, to which granules."""

    threads: Array
    groups: Array
    granules: Array


class SharedHazards:
    """The tables for the shared memory of one batch of blocks.

    Parameters
    ----------
    granules : int
        How many granules the batch's shared memory has. A granule is as wide as the narrowest access of the
        kernel; with natural alignment, checked elsewhere, accesses then overlap in whole granules.
    threads : int
        Threads in the batch.
    report : callable
        What to do with a hazard.
    clocks : Clocks, optional
        What threads know of each other, where mbarriers order them.
    """

    def __init__(self, granules: int, threads: int, report: Reporter, clocks: Clocks | None = None) -> None:
        self.report = report
        self.clocks = clocks
        #: Reads that are remembered for each granule: with clocks, where any two warps may be ordered without the
        #: others, the last one by each warp of the block; else one that stands for all.
        self.columns = clocks.warps if clocks else 1
        self.valid = np.zeros(granules, np.bool_)
        self.write: Moments = np.zeros(granules, np.int64)
        self.read: Moments = np.zeros(granules * self.columns, np.int64)
        self.flying = np.zeros(granules, np.bool_)
        self.in_flight: list[_Copies] = []
        #: Groups committed so far, by thread. A copy that is issued now belongs to the group of that number.
        self.committed = np.zeros(threads, np.int64)

    def forget(self) -> None:
        """Start over, for other blocks."""
        for table in (self.valid, self.write, self.read, self.flying, self.committed):
            table[:] = 0
        self.in_flight = []

    def on_read(self, granules: Array, moments: Moments, lanes: Array) -> None:
        """Check and note reads; row i of `granules` is read at ``moments[i]`` by thread ``lanes[i]``."""
        granules, moments, who = self._flat(granules, moments, lanes)
        if self.in_flight:
            self._refuse_flying(granules, lanes, "read")
        if not (valid := self.valid[granules]).all():
            self._raise(UninitializedReadError, "shared memory that nothing has written is read", ~valid, lanes)
        if (race := self.unordered(before := self.write[granules], moments, who)).any():
            self._refuse(race, before, "read", lanes)
        if self.clocks is not None:
            granules = granules * self.columns + (who // 32 % self.columns)
        self.read[granules] = noted = self._merged(self.read[granules], moments, who)
        differ = self.read[granules] != noted
        if differ.any():
            # Threads of this one instruction read the same granule, and the table kept one of them. Write down instead
            # that more than one did: first where they are lanes of one warp, last where they are of several warps,
            # since that note covers the other one too.
            where, mine = granules[differ], noted[differ]
            other = self.read[where]
            across = ((other ^ mine) & THREAD_MASK) >> WARP_SHIFT != 0
            self.read[where[~across]] = whole_warp(mine[~across])
            self.read[where[across]] = mine[across] | MANY_WARPS

    def on_write(self, granules: Array, moments: Moments, lanes: Array) -> None:
        """Check and note writes."""
        granules, moments, who = self._flat(granules, moments, lanes)
        if self.in_flight:
            self._refuse_flying(granules, lanes, "written")
        if (race := self._read_unordered(granules, moments, who)).any():
            self._raise(
                RaceError,
                "shared memory is written with no barrier since another thread read it",
                race,
                lanes,
            )
        if (race := self.unordered(before := self.write[granules], moments, who)).any():
            self._refuse(race, before, "written", lanes)
        self.write[granules] = moments
        if (race := self.write[granules] != moments).any():
            self._raise(RaceError, "two threads write the same shared memory in one instruction", race, lanes)
        self.valid[granules] = True

    def on_bulk_copy(self, granules: Array, moments: Moments, lanes: Array, landing: np.int64) -> None:
        """Note the issue of a bulk copy: a write now, and one that lands when its mbarrier's phase is complete."""
        self.on_write(granules, moments, lanes)
        self.write[granules] = landing

    def on_copy(self, granules: Array, moments: Moments, lanes: Array) -> None:
        """Note the issue of a ``cp.async``: a write now, and in flight from now on."""
        self.on_write(granules, moments, lanes)
        self.flying[granules] = True
        self.in_flight.append(_Copies(lanes, self.committed[lanes], granules.reshape(lanes.size, -1)))

    def on_commit(self, sel: Any) -> None:
        """Close the open group of the selected threads."""
        self.committed[sel] += 1

    def on_wait(self, pending: int, lanes: Array, moments: Moments) -> None:
        """Retire all but the latest `pending` groups of `lanes`; `moments` are of the whole batch."""
        limit = np.full(self.committed.size, -1, np.int64)
        limit[lanes] = self.committed[lanes] - pending
        kept = []
        for copies in self.in_flight:
            done = copies.groups < limit[copies.threads]
            if done.all():
                landed, threads = copies.granules, copies.threads
            else:
                kept.append(copies)
                if not done.any():
                    continue
                landed, threads = copies.granules[done], copies.threads[done]
                left = ~done
                copies.granules, copies.groups = copies.granules[left], copies.groups[left]
                copies.threads = copies.threads[left]
            self.flying[landed] = False
            self.write[landed] = moments[threads, None]
        self.in_flight = kept

    def on_exit(self, lanes: Array) -> None:
        """Refuse threads that exit with copies in flight."""
        for copies in self.in_flight:
            left = np.isin(copies.threads, lanes)
            if left.any():
                open_group = copies.groups[left] >= self.committed[copies.threads[left]]
                why = "never committed to a group" if open_group.all() else "never waited for"
                error = AsyncCopyError(
                    f"a thread exits with a cp.async in flight: it was {why}", lanes=copies.threads[left]
                )
                self.in_flight = []
                self.report(error)
                return

    def unordered(self, before: Moments, now: Moments, who: Array) -> npt.NDArray[np.bool_]:
        """Whether accesses now, by the threads `who`, follow others with nothing between."""
        if self.clocks is None:
            return unordered(before, now)
        differ = before ^ now
        clash: npt.NDArray[np.bool_] = (differ < BLOCK_STEP) & (differ & THREAD_MASK != 0)
        if clash.any():
            clash[clash] = ~self.clocks.knows(np.broadcast_to(who, clash.shape)[clash], before[clash])
        return clash

    def _read_unordered(self, granules: Array, moments: Moments, who: Array) -> npt.NDArray[np.bool_]:
        if self.clocks is None:
            return unordered(self.read[granules], moments)
        by_warp = self.read.reshape(-1, self.columns)[granules]
        race = self.unordered(by_warp, moments[:, None], who[:, None])
        return np.asarray(race.any(axis=1))

    def _merged(self, before: Moments, now: Moments, who: Array) -> Moments:
        """The reads to remember: the latest, widened to stand for unordered earlier ones too."""
        if self.clocks is None:
            return _merged(before, now)
        return np.where(self.unordered(before, now, who), whole_warp(now), now)

    def _flat(self, granules: Array, moments: Moments, lanes: Array) -> tuple[Array, Moments, Array]:
        """One granule per row: it, the moment and the thread of its access."""
        if granules.ndim == 1:
            return granules, moments, lanes
        count = granules.shape[1]
        # Without clocks the moment says all, and nobody reads who it was.
        who = np.repeat(lanes, count) if self.clocks else lanes
        return granules.reshape(-1), np.repeat(moments, count), who

    def _refuse(self, race: Array, before: Moments, verb: str, lanes: Array) -> None:
        """Report accesses that are not ordered after the last write, by what that was."""
        pending = race & (before < 0)
        if pending.any():
            barrier = pending & (before == (self.clocks.unseen if self.clocks else 0))
            if barrier.any():
                self._raise(MbarrierError, f"an mbarrier is {verb} as ordinary memory", barrier, lanes)
            if (pending ^ barrier).any():
                message = (
                    f"shared memory is {verb} while a bulk copy to it is in flight: "
                    "this thread has not waited for the phase of its mbarrier"
                )
                self._raise(AsyncCopyError, message, pending ^ barrier, lanes)
        if (race & (before >= 0)).any():
            message = f"shared memory is {verb} with no barrier since another thread wrote it"
            self._raise(RaceError, message, race & (before >= 0), lanes)

    def _refuse_flying(self, granules: Array, lanes: Array, verb: str) -> None:
        if (flying := self.flying[granules]).any():
            message = f"shared memory is {verb} while a cp.async to it is in flight: no wait has retired its group"
            self._raise(AsyncCopyError, message, flying, lanes)

    def _raise(self, kind: type[HazardError], message: str, bad: Array, lanes: Array) -> None:
        rows = bad.reshape(lanes.size, -1).any(axis=1)
        self.report(kind(message, lanes=lanes[rows]))


def _merged(before: Moments, now: Moments) -> Moments:
    """The reads to remember: the latest, widened to stand for unordered earlier ones too."""
    differ = before ^ now
    recent = differ < BLOCK_STEP
    if not recent.any():
        return now
    thread = differ & THREAD_MASK
    other_warp = recent & (thread >> WARP_SHIFT != 0)
    # An earlier read by another lane needs remembering only if no barrier of the warp lies between: what comes after
    # the one is after the other too.
    other_lane = recent & ~other_warp & (thread != 0) & (differ < WARP_STEP)
    return np.where(other_warp, now | MANY_WARPS, np.where(other_lane, whole_warp(now), now))
