"""Which bytes of a strided view's span are bytes of its elements."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import LaunchError
from ..types import Array

#: The largest span for which a table with a flag per byte is made.
_MASKED_SPAN = 1 << 30


class ElementGrid:
    """Decides which byte offsets of a strided view belong to its elements.

    Offsets count from the view's lowest byte. Where the strides nest (each one at least as long as what the
    smaller ones cover), a few divisions decide and the view may have any size; where they interleave or
    overlap, a mask does.
    """

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.first = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
        self.run = itemsize
        self.levels: list[tuple[int, int]] = []
        self.mask: npt.NDArray[np.bool_] | None = None
        nested = True
        covered = itemsize
        for stride, count in sorted((abs(s), n) for n, s in zip(shape, strides, strict=True) if s and n > 1):
            nested &= stride >= covered
            if not self.levels and stride == self.run:
                self.run *= count
            elif self.levels and stride == self.levels[-1][0] * self.levels[-1][1]:
                self.levels[-1] = (self.levels[-1][0], self.levels[-1][1] * count)
            else:
                self.levels.append((stride, count))
            covered += (count - 1) * stride
        self.span = covered
        if not nested:
            if self.span > _MASKED_SPAN:
                raise LaunchError("a view whose strides interleave is too large to check element by element")
            self.mask = np.zeros(self.span, np.bool_)
            elements = np.lib.stride_tricks.as_strided(self.mask[-self.first :], (*shape, itemsize), (*strides, 1))
            elements[...] = True

    def contains(self, offset: Array, width: int) -> npt.NDArray[np.bool_]:
        """Whether all of the `width` bytes at each offset are elements' bytes."""
        inside = self._in_one_run(offset, width) if self.mask is None else np.zeros(offset.shape, np.bool_)
        if not inside.all():
            # An access that no single run contains may lie in two that touch; and where there is a mask there are no
            # runs. So the rest is asked byte by byte.
            rest = np.flatnonzero(~inside)
            each = offset[rest, None] + np.arange(width)
            inside[rest] = (self._in_one_run(each, 1) if self.mask is None else self._in_mask(each)).all(axis=1)
        return inside

    def _in_one_run(self, offset: Array, width: int) -> npt.NDArray[np.bool_]:
        rest = offset
        for stride, count in reversed(self.levels):
            rest = rest - np.clip(rest // stride, 0, count - 1) * stride
        result: npt.NDArray[np.bool_] = (rest >= 0) & (rest <= self.run - width)
        return result

    def _in_mask(self, offset: Array) -> npt.NDArray[np.bool_]:
        assert self.mask is not None
        inside = (offset >= 0) & (offset < self.span)
        inside[inside] = self.mask[offset[inside]]
        return inside
