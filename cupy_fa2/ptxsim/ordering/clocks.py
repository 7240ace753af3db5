"""What each thread knows of the others: vector clocks, for kernels whose warps meet at mbarriers.

Barriers of the block order everything, so the count of them in a moment (see `hazards`) is enough for them. An
mbarrier orders only who arrived before who waited, and that needs, for each thread, how far it has seen every other.
A thread sees another up to a *time*: its moment without the thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import Array

Moments = npt.NDArray[np.int64]

#: A moment is ``barriers << 40 | steps << 20 | warp << 6 | lane``; its time is what is above the thread.
BLOCK_STEP = np.int64(1 << 40)
WARP_STEP = np.int64(1 << 20)
TIME_SHIFT = 20
WARP_SHIFT = 6
LANE_MASK = np.int64((1 << WARP_SHIFT) - 1)
THREAD_MASK = np.int64(WARP_STEP - 1)
#: In place of a lane: more than one lane of the warp did it. In place of a thread: more than one warp did.
MANY_LANES = np.int64(32)
MANY_WARPS = THREAD_MASK

#: The sign marks the landing of a bulk copy. No barrier of the block orders it before an access, as it orders what
#: threads do: only a wait at the copy's mbarrier does.
LANDING = np.int64(-(1 << 63))
_NO_SIGN = np.int64((1 << 63) - 1)
#: How many mbarriers a block may have. In the clocks each is one lane of an additional warp, after the block's own, and
#: its time is the number of its completed phases.
SLOTS = 32


class Clocks:
    """The clocks of all threads of a batch.

    Parameters
    ----------
    moments : ndarray
        The threads' moments, which the clocks advance.
    block_threads : int
        Threads in a block.

    Attributes
    ----------
    known : ndarray
        ``[thread, warp, lane]``: the time up to which a thread has seen another of its block. Lane 32 stands for the
        whole warp. The warp after the last is that of the mbarriers.
    """

    def __init__(self, moments: Moments, block_threads: int) -> None:
        self.moments = moments
        self.block_threads = block_threads
        self.warps = block_threads // 32
        self.known = np.zeros((moments.size, self.warps + 1, 33), np.int64)
        #: The moment that stands for the last write to bytes that are an mbarrier now. It is later than anything a
        #: thread can know, so that every ordinary access to those bytes is found unordered, and reported.
        self.unseen = np.int64(LANDING | (_NO_SIGN & ~THREAD_MASK) | self.warps << WARP_SHIFT | 32)

    def forget(self) -> None:
        """Start over, for other blocks."""
        self.known[:] = 0

    def landing(self, slot: int, phase: int) -> np.int64:
        """The moment of what lands before an mbarrier of the block has completed so many phases."""
        return np.int64(LANDING | phase << TIME_SHIFT | self.warps << WARP_SHIFT | slot)

    def knows(self, lanes: Array, before: Moments) -> npt.NDArray[np.bool_]:
        """Whether threads have seen moments of threads of their block."""
        before = before & _NO_SIGN
        thread = before & THREAD_MASK
        seen: npt.NDArray[np.bool_] = (
            self.known[lanes, thread >> WARP_SHIFT, thread & LANE_MASK] >= before >> TIME_SHIFT
        )
        return seen

    def phases(self, lanes: Array, slots: Array) -> Array:
        """How many phases of mbarriers the threads know to be complete."""
        result: Array = self.known[lanes, self.warps, slots]
        return result

    def release(self, lanes: Array) -> Array:
        """What the threads know, themselves included; what they do from now on is later than that."""
        own = lanes // 32 % self.warps
        self.known[lanes, own, lanes & 31] = self.moments[lanes] >> TIME_SHIFT
        self.known[lanes, own, 32] = self.known[lanes, own, :32].min(axis=1)
        # All lanes of the warp step on, not only those that release: lane 32 of `known`, the whole warp, is the least
        # time of its lanes, which means something only while their times count alike.
        self.moments.reshape(-1, 32)[np.unique(lanes >> 5)] += WARP_STEP
        rows: Array = self.known[lanes]
        return rows

    def acquire(self, lanes: Array, rows: Array) -> None:
        """Let threads know what others released."""
        joined = np.maximum(self.known[lanes], rows)
        joined[:, :, 32] = joined[:, :, :32].min(axis=2)
        self.known[lanes] = joined

    def pass_warp_barrier(self, lanes: Array) -> None:
        """The lanes of whole warps tell each other everything; the caller advances their moments."""
        joined = self.known[lanes].reshape(-1, 32, self.warps + 1, 33).max(axis=1)
        first = lanes[::32]
        joined[np.arange(first.size), first // 32 % self.warps] = (self.moments[first] >> TIME_SHIFT)[:, None]
        joined[:, :, 32] = joined[:, :, :32].min(axis=2)
        self.known[lanes] = np.repeat(joined, 32, axis=0)

    def pass_block_barrier(self, lanes: Any) -> None:
        """All threads of some blocks passed a barrier, and their moments have advanced."""
        known = self.known[lanes].reshape(-1, self.block_threads, self.warps + 1, 33)
        known[:, :, self.warps] = known[:, :, self.warps].max(axis=1, keepdims=True)
        before = (self.moments[lanes] >> TIME_SHIFT) - 1
        known[:, :, : self.warps] = before.reshape(-1, self.block_threads, 1, 1)
        self.known[lanes] = known.reshape(-1, self.warps + 1, 33)
