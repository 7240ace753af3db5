"""Tensor maps: the 128 bytes that tell a bulk tensor copy what lies where, and which bytes a box of it is."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..types import Array

MAP_BYTES = 128
#: Opaque to kernels, like the driver's: what only `decode` has to understand.
_LAYOUT = struct.Struct("<4sBBBxQ5Q4Q5H5B")
_MAGIC = b"tmap"
_CHUNK = 16


class Box(NamedTuple):
    """The bytes of one box: for each of its rows the part that is inside the tensor.

    Attributes
    ----------
    first : ndarray
        Global address of each row's first byte inside.
    inside : ndarray
        Which rows are inside the tensor at all.
    begin, end : int
        The bytes of a row that are inside.
    """

    first: Array
    inside: Array
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor in global memory and the boxes that it is copied in; dimensions innermost first."""

    address: int
    dtype_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of a box in shared memory, by dimension."""
        # The hardware does not stride along the innermost dimension.
        steps = (1, *self.element_strides[1:])
        return tuple(-(-b // s) for b, s in zip(self.box, steps, strict=True))

    @property
    def row_bytes(self) -> int:
        """Bytes of a box's row."""
        return self.box[0] * self.dtype_bytes

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy brings, those outside the tensor included."""
        return math.prod(self.counts) * self.dtype_bytes

    def encode(self) -> bytes:
        """The map as kernels carry it about."""

        def padded(values: Sequence[int], count: int) -> list[int]:
            return [*values, *[0] * (count - len(values))]

        packed = _LAYOUT.pack(
            *(_MAGIC, self.rank, self.dtype_bytes, self.swizzle, self.address),
            *padded(self.dims, 5),
            *padded(self.strides, 4),
            *padded(self.box, 5),
            *padded(self.element_strides, 5),
        )
        return packed.ljust(MAP_BYTES, b"\0")

    def at(self, coordinates: Sequence[int]) -> Box:
        """The box whose first element has these coordinates, which may lie outside the tensor."""
        address = np.full((1,) * (self.rank - 1), self.address, np.int64)
        inside = np.ones(address.shape, np.bool_)
        for axis in range(1, self.rank):
            index = coordinates[axis] + self.element_strides[axis] * np.arange(self.counts[axis])
            shape = [1] * (self.rank - 1)
            shape[-axis] = index.size  # the outermost dimension varies slowest
            index = index.reshape(shape)
            address = address + index * self.strides[axis - 1]
            inside = inside & (index >= 0) & (index < self.dims[axis])
        begin = min(max(-coordinates[0], 0), self.box[0])
        end = max(min(self.dims[0] - coordinates[0], self.box[0]), begin)
        first = address.reshape(-1) + (coordinates[0] + begin) * self.dtype_bytes
        return Box(first, inside.reshape(-1), begin * self.dtype_bytes, end * self.dtype_bytes)

    def swizzled(self, address: Array) -> Array:
        """Where chunks of 16 bytes go whose place is `address` without the swizzle."""
        mask = {0: 0, 32: 1, 64: 3, 128: 7}[self.swizzle]
        result: Array = address ^ (address >> 7 & mask) << 4
        return result


@functools.lru_cache(maxsize=256)
def decode(encoded: bytes) -> TensorMap | None:
    """The map in 128 bytes; None where there is none."""
    magic, rank, dtype_bytes, swizzle, address, *rest = _LAYOUT.unpack_from(encoded)
    if magic != _MAGIC:
        return None
    dims, strides = tuple(rest[:rank]), tuple(rest[5 : 4 + rank])
    box, steps = tuple(rest[9 : 9 + rank]), tuple(rest[14 : 14 + rank])
    return TensorMap(address, dtype_bytes, dims, strides, box, steps, swizzle)


def encode_tensor_map(
    address: int,
    dtype_bytes: int,
    dims: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    swizzle: int,
) -> bytes:
    """Describe a tensor in global memory to bulk tensor copies, as ``cuTensorMapEncodeTiled`` does.

    Parameters
    ----------
    address : int
        Global address of the element with all indices 0.
    dtype_bytes : int
        Size of an element: 1, 2, 4 or 8.
    dims : sequence of int
        Elements along each dimension, the innermost first; 1 to 5 of them.
    strides_bytes : sequence of int
        Bytes from one index to the next along all dimensions but the innermost.
    box : sequence of int
        Elements that one copy spans along each dimension.
    element_strides : sequence of int
        Every how many elements one is copied; not along the innermost dimension.
    swizzle : {0, 32, 64, 128}
        Bytes in which 16-byte chunks are permuted in shared memory; 0 for none.

    Returns
    -------
    bytes
        128 bytes for a kernel parameter aligned to 64 bytes.

    Raises
    ------
    ValueError
        Where the driver would refuse the map; it names the argument.
    """
    for fault in _faults(address, dtype_bytes, dims, strides_bytes, box, element_strides, swizzle):
        raise ValueError(fault)
    shape, strides = tuple(map(int, dims)), tuple(map(int, strides_bytes))
    steps = tuple(map(int, element_strides))
    return TensorMap(int(address), dtype_bytes, shape, strides, tuple(map(int, box)), steps, swizzle).encode()


def _faults(
    address: int,
    dtype_bytes: int,
    dims: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    swizzle: int,
) -> Iterator[str]:
    if dtype_bytes not in (1, 2, 4, 8):
        yield f"dtype_bytes: 1, 2, 4 or 8, got {dtype_bytes}"
    if not 1 <= len(dims) <= 5:
        yield f"dims: 1 to 5 dimensions, got {len(dims)}"
    for name, values, count in (
        ("strides_bytes", strides_bytes, len(dims) - 1),
        ("box", box, len(dims)),
        ("element_strides", element_strides, len(dims)),
    ):
        if len(values) != count:
            yield f"{name}: {count} for {len(dims)} dimensions, got {len(values)}"
    if address % 16 or address <= 0:
        yield f"address: a multiple of 16, got {address:#x}"
    if not all(1 <= d <= 1 << 32 for d in dims):
        yield f"dims: each from 1 to 2**32, got {tuple(dims)}"
    if not all(s % 16 == 0 and 0 <= s < 1 << 40 for s in strides_bytes):
        yield f"strides_bytes: multiples of 16 below 2**40, got {tuple(strides_bytes)}"
    if not all(1 <= b <= 256 for b in box):
        yield f"box: each from 1 to 256, got {tuple(box)}"
    if not all(1 <= s <= 8 for s in element_strides):
        yield f"element_strides: each from 1 to 8, got {tuple(element_strides)}"
    if swizzle not in (0, 32, 64, 128):
        yield f"swizzle: 0, 32, 64 or 128, got {swizzle}"
    inner = box[0] * dtype_bytes
    if inner % _CHUNK:
        yield f"box: its rows are multiples of 16 bytes, got {inner}"
    if swizzle and inner > swizzle:
        yield f"box: a row of {inner} bytes is longer than the swizzle of {swizzle}"
