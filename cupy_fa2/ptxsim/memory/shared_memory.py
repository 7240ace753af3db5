"""Shared memory of a batch of blocks: bounds, alignment and contents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import MisalignedAddressError, OutOfBoundsError
from ..ordering.clocks import WARP_STEP, Clocks, Moments
from ..ordering.hazards import Reporter, SharedHazards, after_block_barrier, first_moments, whole_warp
from ..ordering.mbarrier import BYTES, Mbarriers
from ..ptx.kernel import SharedVariable
from ..types import UNSIGNED, Array

#: Shared addresses start here, so that address 0 is nobody's.
_FIRST_ADDRESS = 1024
#: Dynamic shared memory is aligned to this, or to more if it is declared so, and never to twice that: code that relies
#: on a better alignment than it declared fails here. Less than 128 bytes would shift the banks, so conflicts would
#: differ.
_PLACEMENT = 128


class SharedLayout:
    """Where each shared variable of a kernel lies: the static ones, then the dynamic ones."""

    def __init__(self, variables: Iterable[SharedVariable], dynamic_bytes: int) -> None:
        self.dynamic_bytes = dynamic_bytes
        self.addresses: dict[str, int] = {}
        end = _FIRST_ADDRESS
        dynamic = []
        for variable in variables:
            if variable.dynamic:
                dynamic.append(variable)
            else:
                self.addresses[variable.name] = end = -(-end // variable.align) * variable.align
                end += variable.size
        self.static_bytes = end - _FIRST_ADDRESS
        # An odd multiple of the alignment, see `_PLACEMENT`.
        align = max([_PLACEMENT, *(variable.align for variable in dynamic)])
        base = -(-end // align) * align
        base += align * (base // align % 2 == 0)
        self.addresses.update((variable.name, base) for variable in dynamic)
        has_dynamic = bool(dynamic and dynamic_bytes)
        self.end = base + dynamic_bytes if has_dynamic else end
        self.start = base if has_dynamic and not self.static_bytes else _FIRST_ADDRESS
        #: The addresses between the last static and the first dynamic variable, which belong to neither.
        self.hole = (end, base) if has_dynamic and self.static_bytes else (0, 0)


class SharedMemory:
    """Contents and rules of the shared memory of all blocks of a batch.

    Parameters
    ----------
    layout : SharedLayout
        Addresses.
    granule : int
        Bytes of the kernel's narrowest access to shared memory.
    blocks, block_threads : int
        Size of the batch.
    report : callable
        What to do with a hazard.
    has_barriers : bool
        Whether the kernel has mbarriers, or barriers of part of a block, so that who is ordered before whom takes more
        than counting.
    """

    def __init__(
        self,
        layout: SharedLayout,
        granule: int,
        blocks: int,
        block_threads: int,
        report: Reporter,
        has_barriers: bool = False,
    ) -> None:
        self.layout = layout
        self.block_threads = block_threads
        self.granule = granule
        self.stride = -(-layout.end // _PLACEMENT) * _PLACEMENT
        # Poison: read as a float of any width, all ones is NaN.
        self._bytes = np.full(self.stride * blocks, 0xFF, np.uint8)
        self._first_moments: Moments = first_moments(block_threads, blocks)
        self.moments = self._first_moments.copy()
        self.clocks = Clocks(self.moments, block_threads) if has_barriers else None
        self.hazards = SharedHazards(self._bytes.size // granule, blocks * block_threads, report, self.clocks)
        self.barriers: Mbarriers | None = None
        if self.clocks is not None:
            words = self._bytes.size // BYTES
            self.barriers = Mbarriers(words, blocks, block_threads, self.clocks, self.hazards)
        #: Threads of each block that have not exited.
        self._alive = np.full(blocks, block_threads)
        self._block_start = np.repeat(np.arange(blocks, dtype=np.int64) * self.stride, block_threads)
        self._units: dict[tuple[int, int], Array] = {}
        self._steps = {width: np.arange(width // granule) for width in (1, 2, 4, 8, 16) if width >= granule}

    def forget(self) -> None:
        """Poison everything again, for other blocks."""
        self._bytes[:] = 0xFF
        self.moments[:] = self._first_moments
        self.hazards.forget()
        self._alive[:] = self.block_threads
        if self.clocks is not None and self.barriers is not None:
            self.clocks.forget()
            self.barriers.forget()

    def pass_barrier(self, lanes: Any) -> None:
        """All threads of some blocks passed a barrier of the block."""
        self.moments[lanes] = after_block_barrier(self.moments[lanes])
        if self.clocks is not None:
            self.clocks.pass_block_barrier(lanes)

    def pass_warp_barrier(self, lanes: Array) -> None:
        """All lanes of some warps passed a ``bar.warp.sync``."""
        if self.clocks is not None:
            self.clocks.pass_warp_barrier(lanes)
        self.moments[lanes] += WARP_STEP

    def on_exit(self, lanes: Array) -> None:
        """Some threads exit."""
        self.hazards.on_exit(lanes)
        if self.barriers is not None:
            blocks, counts = np.unique(lanes // self.block_threads, return_counts=True)
            self._alive[blocks] -= counts
            for block in blocks[self._alive[blocks] == 0].tolist():
                self.barriers.on_block_end(block)

    def load(self, address: Array, unit: int, count: int, lanes: Array) -> tuple[Array, Array]:
        """Read rows of `count` words of `unit` bytes; returns them and the offsets, to count conflicts."""
        offset = self.offsets(address, unit * count, lanes, "read")
        self.hazards.on_read(self.granules(offset, unit * count), self.moments[lanes], lanes)
        return self._words(unit, count)[offset // (unit * count)], offset

    def load_rows(self, address: Array, lanes: Array) -> tuple[Array, Array]:
        """Read the rows of ``ldmatrix``, 16 bytes each: what one lane names goes to many."""
        offset = self.offsets(address, 16, lanes, "read")
        self.hazards.on_read(self.granules(offset, 16), whole_warp(self.moments[lanes]), lanes)
        return self._words(4, 4)[offset // 16], offset

    def store(self, address: Array, rows: Array, lanes: Array, asynchronous: bool = False) -> Array:
        """Write rows of words, by a store or by the issue of a ``cp.async``; returns the offsets."""
        unit, count = rows.itemsize, rows.shape[1]
        offset = self.offsets(address, unit * count, lanes, "write")
        note = self.hazards.on_copy if asynchronous else self.hazards.on_write
        note(self.granules(offset, unit * count), self.moments[lanes], lanes)
        self._words(unit, count)[offset // (unit * count)] = rows
        return offset

    def land(self, address: Array, rows: Array, lane: int, landing: np.int64) -> Array:
        """Write rows of 16 bytes by a bulk copy of one thread, issued now; returns the offsets."""
        lanes = np.full(len(rows), lane)
        offset = self.offsets(address, 16, lanes, "write")
        self.hazards.on_bulk_copy(self.granules(offset, 16), self.moments[lanes], lanes, landing)
        self._words(4, 4)[offset // 16] = rows
        return offset

    def peek(self, block: int, address: int, nbytes: int) -> Array:
        """Bytes of one block as they lie there, by nobody's access: no rule applies."""
        if not (self.layout.start <= address and 0 <= nbytes <= self.layout.end - address):
            where = f"{self.layout.start:#x} to {self.layout.end:#x}"
            raise ValueError(f"{nbytes} bytes at {address:#x}: shared memory is at {where}")
        return self._bytes[block * self.stride :][address : address + nbytes].copy()

    def _words(self, unit: int, count: int) -> Array:
        key = (unit, count)
        if key not in self._units:
            self._units[key] = self._bytes.view(UNSIGNED[8 * unit]).reshape(-1, count)
        return self._units[key]

    def granules(self, offset: Array, width: int) -> Array:
        """The granules of accesses: one per row, or a row of them."""
        first = offset // self.granule
        return first if width == self.granule else first[:, None] + self._steps[width]

    def offsets(self, address: Array, width: int, lanes: Array, verb: str) -> Array:
        """Where addresses of threads lie in the batch's shared memory; they have to be inside and aligned."""
        low, high = self.layout.start, self.layout.end - width
        hole_start, hole_end = self.layout.hole
        outside = (address < low) | (address > high)
        if hole_end:
            outside |= (address + width > hole_start) & (address < hole_end)
        if outside.any():
            bad = np.flatnonzero(outside)
            byte = int(address[bad[0]]) - low
            message = f"{verb} of {width} bytes at byte {byte} of the block's shared memory, not inside a variable"
            raise OutOfBoundsError(f"{message} (it has {self.layout.end - low} bytes)", lanes=lanes[bad])
        if (misaligned := address & (width - 1)).any():
            bad = np.flatnonzero(misaligned)
            where = f"shared address {int(address[bad[0]]):#x}"
            message = f"{verb} of {width} bytes at {where}, not a multiple of {width}"
            raise MisalignedAddressError(message, lanes=lanes[bad])
        offset: Array = self._block_start[lanes] + address
        return offset
