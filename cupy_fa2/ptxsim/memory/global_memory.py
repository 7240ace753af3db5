"""Global memory: NumPy views bound at device addresses, every access checked against the view's elements.

The span of a strided view holds bytes that do not belong to it: the other heads of a fused qkv, the padding
after a row. A GPU reads them without a word; here they are out of bounds.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import (
    HazardError,
    MisalignedAddressError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
)
from ..ordering.hazards import Reporter
from ..types import UNSIGNED, Array
from .elements import ElementGrid

#: Views lie this far apart at least, so that an offset that lost its upper half still meets no other view.
_GAP = 1 << 34
_FIRST_ADDRESS = 0x10_0000_0000
#: Above this span the bytes of a writable view are not tracked one by one: the tables would not fit.
_TRACKED_SPAN = 1 << 30


class BoundView:
    """One bound array: where it lies, its elements, and who wrote what."""

    def __init__(self, array: npt.NDArray[Any], name: str, writable: bool, readable: bool) -> None:
        self.array = array
        self.name = name
        self.writable, self.readable = writable, readable
        self.itemsize = array.itemsize
        self.grid = ElementGrid(array.shape, array.strides, array.itemsize)
        host = array.__array_interface__["data"][0] + self.grid.first
        # Addresses are equal to the host's modulo 256, so wide accesses stay aligned in the table below; the bytes
        # before the view that the rounding down brings in lie in the same page and are never touched.
        self.lead = host % 256
        size = -(-(self.lead + self.grid.span) // 256) * 256
        self._bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(host - self.lead), np.uint8)
        self._units: dict[tuple[int, int], Array] = {}
        self.low = 0
        self.tracked = writable and self.grid.span <= _TRACKED_SPAN
        #: Per item: written ever; and by which thread (from 1) of the running launch.
        self.written = np.zeros(size // self.itemsize + 1 if self.tracked else 0, np.bool_)
        self.writer = np.zeros(0, np.uint32)

    @property
    def address(self) -> int:
        """Device address of the element with all indices 0."""
        return self.low - self.grid.first

    def units(self, unit: int, count: int) -> Array:
        """View of the memory as rows of `count` words of `unit` bytes each."""
        key = (unit, count)
        if key not in self._units:
            self._units[key] = self._bytes.view(UNSIGNED[8 * unit]).reshape(-1, count)
        return self._units[key]

    def begin_launch(self) -> None:
        """Forget which threads wrote: only writes of one launch can race."""
        self.writer = np.zeros(self.written.size, np.uint32)

    def items(self, offset: Array, width: int) -> Array:
        """Indices into the tracking tables that an access covers, one row per access."""
        start = offset + self.lead
        first = start // self.itemsize
        # An access that starts inside an item covers that item; a misaligned array shifts all items alike.
        return np.asarray(first[:, None] + np.arange(-(-width // self.itemsize)))


def _raise(error: HazardError) -> None:
    raise error


def _chosen(values: Array, chosen: Any) -> Array:
    result: Array = values if chosen is None else values[chosen]
    return result


#: Marks items that atomic operations changed: they may collide with each other, not with plain stores.
ATOMIC = np.uint32(0xFFFFFFFF)


class GlobalMemory:
    """The device's memory: the views bound to it and nothing else.

    Writes are tracked by item: two threads that write one item in one launch race, be it to the same bytes of it or
    not. What orders a write and a read of two threads in one launch is not checked. Views of more than a gigabyte
    are not tracked.
    """

    def __init__(self) -> None:
        self.views: list[BoundView] = []
        self._next = _FIRST_ADDRESS
        self._lows = np.zeros(0, np.int64)
        self._report: Reporter = _raise

    def bind(self, array: npt.NDArray[Any], name: str, writable: bool = False, readable: bool | None = None) -> int:
        """Make an array known to kernels.

        Parameters
        ----------
        array : ndarray
            Any view: strides may be 0, negative or odd, the data misaligned. It is not copied.
        name : str
            The name that errors use.
        writable : bool
            Whether kernels may write. A write-only view starts uninitialised: what nobody wrote cannot be
            read.
        readable : bool, optional
            Whether the contents may be read from the start; by default, what is not writable.

        Returns
        -------
        int
            Address of the element with all indices 0, equal to its host address modulo 256; 0 for an empty
            array.
        """
        if writable and not array.flags.writeable:
            raise ValueError(f"{name} is a read-only array")
        if array.size == 0:
            return 0
        view = BoundView(array, name, writable, not writable if readable is None else readable)
        view.low = self._next + view.lead
        self._next += -(-(view.grid.span + 2 * _GAP) // _GAP) * _GAP
        self.views.append(view)
        self._lows = np.array([v.low for v in self.views], np.int64)
        return view.address

    def fill(self, address: int, byte: int) -> None:
        """Set every byte of the packed array that is bound at `address`, which may be read from then on."""
        view = next(view for view in self.views if view.address == address)
        view.array.view(np.uint8)[...] = byte
        view.written[:] = True

    def begin_launch(self, report: Reporter) -> None:
        """Start the tracking of who wrote what; `report` raises or keeps a hazard."""
        self._report = report
        for view in self.views:
            if view.tracked:
                view.begin_launch()

    def _checked(
        self, address: Array, unit: int, count: int, verb: str, lanes: Array
    ) -> list[tuple[BoundView, Any, Array]]:
        """Split an access by view: the view, which accesses (None for all), their offsets in it."""
        width = unit * count
        misaligned = address % width != 0
        if misaligned.any():
            bad = np.flatnonzero(misaligned)
            where = self.describe(int(address[bad[0]]))
            raise MisalignedAddressError(
                f"{verb} of {width} bytes at {where}, not a multiple of {width}", lanes=lanes[bad]
            )
        which = np.searchsorted(self._lows, address, side="right") - 1
        first = int(which[0])
        groups = [(first, None)] if (which == first).all() else [(int(i), which == i) for i in np.unique(which)]
        result = []
        for index, chosen in groups:
            here = address if chosen is None else address[chosen]
            if index < 0:
                inside = np.zeros(here.shape, np.bool_)
            else:
                view = self.views[index]
                offset = here - view.low
                inside = view.grid.contains(offset, width)
            if not inside.all():
                bad = np.flatnonzero(~inside)
                where = self.describe(int(here[bad[0]]))
                at_fault = (lanes if chosen is None else lanes[chosen])[bad]
                raise OutOfBoundsError(f"{verb} of {width} bytes at {where}", lanes=at_fault)
            result.append((view, chosen, offset))
        return result

    def load(self, address: Array, unit: int, count: int, lanes: Array) -> Array:
        """Read `count` words of `unit` bytes at each address; one row of unsigned integers per address."""
        result: Array = np.empty((address.size, count), UNSIGNED[8 * unit])
        for view, chosen, offset in self._checked(address, unit, count, "read", lanes):
            self._require_written(view, offset, unit * count, _chosen(lanes, chosen))
            rows: Array = view.units(unit, count)[(offset + view.lead) // (unit * count)]
            if chosen is None:
                return rows
            result[chosen] = rows
        return result

    def store(self, address: Array, values: Array, lanes: Array, threads: Array) -> None:
        """Write rows of unsigned integers; `threads` are the writers' numbers in the grid, from 1."""
        unit, count = values.itemsize, values.shape[1]
        for view, chosen, offset in self._writable(address, unit, count, lanes):
            self._track(view, offset, unit * count, _chosen(threads, chosen), _chosen(lanes, chosen))
            view.units(unit, count)[(offset + view.lead) // (unit * count)] = _chosen(values, chosen)

    def atomic_add(self, address: Array, values: Array, lanes: Array) -> Array:
        """Add rows of numbers, thread after thread; returns the old values."""
        old = np.empty_like(values)
        unit, count = values.itemsize, values.shape[1]
        for view, chosen, offset in self._writable(address, unit, count, lanes):
            self._require_written(view, offset, unit * count, _chosen(lanes, chosen))
            self._track(view, offset, unit * count, np.full(offset.shape, ATOMIC), _chosen(lanes, chosen))
            words = view.units(unit, count).view(values.dtype)
            added = _chosen(values, chosen)
            before = np.empty_like(added)
            for i, row in enumerate((offset + view.lead) // (unit * count)):
                before[i] = words[row]
                words[row] += added[i]
            old[slice(None) if chosen is None else chosen] = before
        return old

    def _writable(self, address: Array, unit: int, count: int, lanes: Array) -> list[tuple[BoundView, Any, Array]]:
        parts = self._checked(address, unit, count, "write", lanes)
        for view, chosen, _ in parts:
            if not view.writable:
                raise OutOfBoundsError(f"write to {view.name}, which is read-only", lanes=_chosen(lanes, chosen))
        return parts

    def _require_written(self, view: BoundView, offset: Array, width: int, lanes: Array) -> None:
        if not view.tracked or view.readable:
            return
        fresh = ~np.all(view.written[view.items(offset, width)], axis=1)
        if fresh.any():
            self._hazard(UninitializedReadError, "read of {}, which nothing has written", view, offset, fresh, lanes)

    def _track(self, view: BoundView, offset: Array, width: int, who: Array, lanes: Array) -> None:
        if not view.tracked:
            return
        items = view.items(offset, width)
        before = view.writer[items]
        view.writer[items] = who[:, None]
        view.written[items] = True
        # Where two threads of this very instruction write one item, the table kept one of them: reading it back tells.
        clash = ((before != 0) & (before != who[:, None])) | (view.writer[items] != who[:, None])
        if clash.any():
            message = "two threads of one launch write {}"
            self._hazard(RaceError, message, view, offset, clash.any(axis=1), lanes)

    def _hazard(
        self, kind: type[HazardError], message: str, view: BoundView, offset: Array, bad: Array, lanes: Array
    ) -> None:
        rows = np.flatnonzero(bad)
        self._report(kind(message.format(self.describe(int(view.low + offset[rows[0]]))), lanes=lanes[rows]))

    def describe(self, address: int) -> str:
        """An address in words: relative to the view that it is in or near."""
        index = int(np.searchsorted(self._lows, address, side="right")) - 1
        near = [v for v in self.views[max(index, 0) : index + 2] if -_GAP < address - v.low < v.grid.span + _GAP]
        if not near:
            return f"address {address:#x}, far from every bound array"
        view = min(near, key=lambda v: max(v.low - address, address - v.low - v.grid.span))
        distance = address - view.address
        place = f"{view.name}{list(view.array.shape)} {'+' if distance >= 0 else '-'} {abs(distance)} bytes"
        offset = address - view.low
        if 0 <= offset < view.grid.span:
            element = bool(view.grid.contains(np.array([offset]), 1)[0])
            return place if element else f"{place}, between the elements of the view"
        return f"{place}, {'before its first' if offset < 0 else 'past its last'} byte"
