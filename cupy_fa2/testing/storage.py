"""Inputs: random ones, and arrays that lie in memory in every odd way with NaN all around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupy_fa2.reference import Layout, host

DTYPES: dict[str, Any] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def random_qkv(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    head_dim: int,
    *,
    num_heads_k: int | None = None,
    head_dim_v: int | None = None,
    dtype: Any = np.float16,
    layout: Layout = "bshd",
    mean: float = 0.0,
    seed: int = 0,
    xp: Any = np,
) -> tuple[Any, Any, Any]:
    """Draw normally distributed queries, keys and values.

    Parameters
    ----------
    batch, seqlen_q, seqlen_k, num_heads, head_dim : int
        The shape of the call.
    num_heads_k, head_dim_v : int, optional
        Heads of the keys and values, and head_dim of the values, where they differ from those of the queries.
    dtype : dtype or str
        float16, or bfloat16 as `ml_dtypes.bfloat16` or by name.
    layout : {"bshd", "bhsd"}
        Order of the axes.
    mean : float
        Mean of all three. Real activations have one; kernels that are careless with the maximum show it.
    seed : int
        Seed of the draw.
    xp : module
        `numpy` or `cupy`: where the arrays are to be.

    Returns
    -------
    q, k, v : array
        C-contiguous.
    """
    dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    rng = np.random.default_rng(seed)
    num_heads_k = num_heads if num_heads_k is None else num_heads_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v

    def draw(seqlen: int, heads: int, dim: int) -> Any:
        shape = (batch, heads, seqlen, dim) if layout == "bhsd" else (batch, seqlen, heads, dim)
        return xp.asarray((rng.standard_normal(shape, np.float32) + np.float32(mean)).astype(dtype))

    return (
        draw(seqlen_q, num_heads, head_dim),
        draw(seqlen_k, num_heads_k, head_dim),
        draw(seqlen_k, num_heads_k, head_dim_v),
    )


@dataclass(frozen=True)
class Storage:
    """How an array lies in its buffer; the default is C order.

    Parameters
    ----------
    order : tuple of int
        Axes from the slowest to the fastest.
    step : tuple of int
        Along each axis, the entries of the buffer from one of ours to the next: negative for a reversed axis,
        0 for one entry seen again and again.
    pad : tuple of int
        Along each axis, entries of the buffer after our last.
    offset : int
        Elements of the buffer before the first.
    """

    order: tuple[int, ...] = (0, 1, 2, 3)
    step: tuple[int, ...] = (1, 1, 1, 1)
    pad: tuple[int, ...] = (0, 0, 0, 0)
    offset: int = 0


# Every way of lying in memory that a (batch, seqlen, heads, head_dim) view of something real has, by name.
STORAGES: dict[str, Callable[[tuple[int, ...]], Storage]] = {
    "contiguous": lambda shape: Storage(),
    "heads first": lambda shape: Storage(order=(0, 2, 1, 3)),
    "seqlen first": lambda shape: Storage(order=(1, 0, 2, 3)),
    "fused qkv": lambda shape: Storage(pad=(0, 0, 2 * shape[2], 0)),
    "cache": lambda shape: Storage(pad=(0, 37, 0, 0)),
    "padded rows": lambda shape: Storage(pad=(0, 0, 0, 8 + -shape[3] % 8)),
    "odd rows": lambda shape: Storage(pad=(0, 0, 0, 1)),
    "odd start": lambda shape: Storage(offset=1),
    "every other row": lambda shape: Storage(step=(1, 2, 1, 1)),
    "reversed": lambda shape: Storage(step=(-1, -1, 1, 1)),
    "strided last axis": lambda shape: Storage(step=(1, 1, 1, 2)),
    "reversed last axis": lambda shape: Storage(step=(1, 1, 1, -1)),
    "Fortran order": lambda shape: Storage(order=(3, 2, 1, 0)),
    "one batch repeated": lambda shape: Storage(step=(0, 1, 1, 1)),
    "one row repeated": lambda shape: Storage(step=(1, 0, 1, 1)),
}

_MARGIN = 64  # poisoned elements before and after; a multiple of 16 bytes, so that `offset` alone decides alignment


def poisoned(
    shape: tuple[int, ...],
    dtype: Any,
    storage: Storage | str = "contiguous",
    *,
    values: Any | None = None,
    poison: float = np.nan,
    xp: Any = np,
) -> Any:
    """Make an array inside a buffer that is NaN all around it.

    Whatever reads past a row, a head, a sequence or the end reads NaN, and `assert_poison_intact` tells
    whether anything wrote there.

    Parameters
    ----------
    shape : tuple of int
        Shape of the array; four axes, or as many as `storage` has.
    dtype : dtype
        A floating dtype.
    storage : Storage or str
        Where the elements lie, or the name of one of `STORAGES`.
    values : array_like, optional
        Contents; poison unless given. Where an axis has step 0, its first entry is taken.
    poison : float
        What surrounds the array.
    xp : module
        `numpy` or `cupy`.

    Returns
    -------
    array
        A view; read-only on NumPy if an axis is repeated.

    Examples
    --------
    >>> a = poisoned((1, 2, 1, 2), np.float16, Storage(pad=(0, 0, 0, 1)), values=np.zeros((1, 2, 1, 2)))
    >>> a.strides, a.base[64:70].tolist()
    ((12, 6, 6, 2), [0.0, 0.0, nan, 0.0, 0.0, nan])
    """
    if isinstance(storage, str):
        storage = STORAGES[storage](shape)
    elif len(shape) != len(storage.order):
        raise ValueError(f"storage has {len(storage.order)} axes, shape {shape} has {len(shape)}")
    extents = [n * max(1, abs(s)) if s else min(n, 1) for n, s in zip(shape, storage.step, strict=True)]
    slots = [n + pad for n, pad in zip(extents, storage.pad, strict=True)]
    start = _MARGIN + storage.offset
    size = int(np.prod(slots))
    # Bits, not numbers: NumPy and CuPy write NaN differently.
    pattern = np.array(poison).astype(dtype)
    bits = np.dtype(f"u{pattern.itemsize}")
    buffer = xp.empty(start + size + _MARGIN, dtype=dtype)
    buffer.view(bits)[...] = pattern.view(bits)[()]
    body = buffer[start : start + size].reshape([slots[axis] for axis in storage.order])
    body = body.transpose(np.argsort(storage.order).tolist())
    view = body[tuple(_every(n, s) for n, s in zip(extents, storage.step, strict=True))]
    if values is not None:
        kept = tuple(slice(0, 1) if s == 0 else slice(None) for s in storage.step)
        view[...] = xp.asarray(values)[kept]
    return xp.broadcast_to(view, shape) if 0 in storage.step else view


def _every(extent: int, step: int) -> slice:
    if step >= 0 or extent == 0:
        return slice(0, extent, max(1, step))
    return slice(extent - 1, None, step)


def assert_poison_intact(array: Any, *, poison: float = np.nan) -> None:
    """Check that nothing was written around an array that `poisoned` made, which must be writable.

    Parameters
    ----------
    array : array
        As `poisoned` returned it.
    poison : float
        As given to `poisoned`.

    Raises
    ------
    AssertionError
        Some element of the buffer that is not the array's has changed.
    """
    pattern = np.array(poison).astype(array.dtype)
    bits = np.dtype(f"u{pattern.itemsize}")
    buffer = array
    while buffer.base is not None:
        buffer = buffer.base
    inside = array.view(bits)
    contents = inside.copy()
    inside[...] = pattern.view(bits)[()]
    around = host(buffer.view(bits)).copy()
    inside[...] = contents
    changed = np.flatnonzero(around != pattern.view(bits))
    if changed.size:
        raise AssertionError(f"{changed.size} elements beside the array were written, the first at {changed[0]}")
