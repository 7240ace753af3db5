"""Batches of finished launches, kept for the next launch of the same kernel and size.

Binding a kernel's instructions takes as long as running a few thousand of them: half the time of a small launch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from ..ptx.kernel import Kernel
from ..state.batch import Batch, Step

#: How many batches are kept, and the largest: a launch that fills larger ones does not feel the binding.
_BATCHES = 16
_REGISTER_BYTES = 8 << 20


class Bound(NamedTuple):
    """A batch and a kernel's steps for it; the key says for how many blocks of which shape and shared memory."""

    key: tuple[int, tuple[int, int, int], int]
    batch: Batch
    steps: list[Step]

    @property
    def size(self) -> int:
        """How many blocks it takes."""
        return self.key[0]


#: An entry holds its kernel: while it lives no other kernel can get its `id`, which is part of the key.
_idle: OrderedDict[tuple[Any, ...], tuple[Kernel, Bound]] = OrderedDict()


def take(kernel: Kernel, key: tuple[int, tuple[int, int, int], int]) -> Bound | None:
    """A batch that was kept; it is the caller's alone."""
    entry = _idle.pop((id(kernel), *key), None)
    return entry and entry[1]


def keep(kernel: Kernel, bound: Bound) -> None:
    """Keep a batch that nobody uses any more."""
    if sum(value.nbytes for value in bound.batch.registers.values) > _REGISTER_BYTES:
        return
    _idle[id(kernel), *bound.key] = kernel, bound
    while len(_idle) > _BATCHES:
        _idle.popitem(last=False)
