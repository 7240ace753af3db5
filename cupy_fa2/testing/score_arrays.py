"""Biases and masks: drawn, broadcast, and lying in memory in every odd way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .storage import DTYPES, Storage, poisoned

# The axes of a bias or mask, "1" where it is broadcast; axes left out in front are broadcast too.
SCORE_ARRAY_AXES = ("bhqk", "b1qk", "1hqk", "11qk", "b11k", "1h1k", "bhq1", "qk", "hq1", "k", "q1", "b111", "")

# How a (batch, heads, seqlen_q, seqlen_k) array may lie.
_STORAGES: dict[str, Callable[[], Storage]] = {
    "contiguous": lambda: Storage(),
    "transposed": lambda: Storage(order=(0, 1, 3, 2)),
    "heads last": lambda: Storage(order=(0, 2, 3, 1)),
    "odd rows": lambda: Storage(pad=(0, 0, 0, 1)),
    "padded rows": lambda: Storage(pad=(0, 0, 3, 8)),
    "odd start": lambda: Storage(offset=1),
    "odd rows, odd start": lambda: Storage(pad=(0, 1, 0, 3), offset=5),
    "reversed": lambda: Storage(step=(-1, -1, -1, 1)),
    "every other key": lambda: Storage(step=(1, 1, 1, 2)),
    "keys reversed": lambda: Storage(step=(1, 1, 1, -1)),
    "one head repeated": lambda: Storage(step=(1, 0, 1, 1)),
    "one row repeated": lambda: Storage(step=(1, 1, 0, 1)),
}
SCORE_ARRAY_STORAGES = tuple(_STORAGES)


def random_bias(
    words: str,
    sizes: Mapping[str, int],
    dtype: str,
    storage: str = "contiguous",
    *,
    rng: np.random.Generator,
    seqlens_k: tuple[int, ...] | None = None,
    xp: Any = np,
) -> Any:
    """Draw an additive bias.

    Parameters
    ----------
    words : str
        Its axes, one of `SCORE_ARRAY_AXES` or like them ("1" is an axis of length 1; none at all is a number), then any
        of: "f32" for float32
        instead of `dtype`; "holes" for -inf here and there; "far" for -10^4 in some places, as masks are written by
        those who fear infinity.
    sizes : mapping
        Lengths of the axes "b", "h", "q" and "k".
    dtype : str
        "float16" or "bfloat16".
    storage : str
        One of `SCORE_ARRAY_STORAGES`.
    rng : numpy.random.Generator
        Source of the numbers.
    seqlens_k : tuple of int, optional
        Keys of each batch element that exist: NaN is put beyond, where an entry is one batch element's alone.
    xp : module
        `numpy` or `cupy`.

    Returns
    -------
    array
        With NaN all around it.
    """
    axes, contents = _parse(words, {"f32", "holes", "far"})
    values = rng.standard_normal(_shape(axes, sizes), np.float32)
    if "holes" in contents:
        values[rng.random(values.shape) < 0.2] = -np.inf
    if "far" in contents:
        values[rng.random(values.shape) < 0.2] = -1e4
    if seqlens_k and axes.startswith("b") and axes.endswith("k"):
        for b, length in enumerate(seqlens_k):
            values[b, ..., length:] = np.nan
    return _placed(values, np.float32 if "f32" in contents else DTYPES[dtype], storage, axes, xp)


def random_mask(
    words: str, sizes: Mapping[str, int], storage: str = "contiguous", *, rng: np.random.Generator, xp: Any = np
) -> Any:
    """Draw a boolean mask.

    Parameters
    ----------
    words : str
        Its axes, one of `SCORE_ARRAY_AXES` or like them, then any of: "rows" to hide everything from about a quarter of
        the rows (of what stands for rows, where the queries are broadcast); "sparse" to hide most instead of a third.
    sizes, storage, rng, xp
        As for `random_bias`.

    Returns
    -------
    array of bool
        With True all around it: whatever is read from there by mistake shows keys that are hidden.
    """
    axes, contents = _parse(words, {"rows", "sparse"})
    values = rng.random(_shape(axes, sizes)) < (0.1 if "sparse" in contents else 0.67)
    if "rows" in contents:
        by_row = (*values.shape[:-1], 1) if axes.endswith("k") else values.shape
        values &= rng.random(by_row) >= 0.25
    return _placed(values, np.bool_, storage, axes, xp)


def _parse(words: str, known: set[str]) -> tuple[str, set[str]]:
    """Axes, and words for the contents; a first word of contents leaves no axes, a single number."""
    found = words.split()
    axes = found.pop(0) if found and found[0] not in known else ""
    legal = len(axes) <= 4 and all(axis in "1" + full for axis, full in zip(axes[::-1], "kqhb", strict=False))
    if not legal or not set(found) <= known:
        raise ValueError(f"{words!r} is not some of the last axes of bhqk, then some of {sorted(known)}")
    return axes, set(found)


def _shape(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(1 if axis == "1" else sizes[axis] for axis in axes)


def _placed(values: Any, dtype: Any, storage: str, axes: str, xp: Any) -> Any:
    """Put the values where `storage` says; axes that `values` does not have are taken away again."""
    shape = (1,) * (4 - values.ndim) + values.shape
    poison = 1 if dtype is np.bool_ else np.nan
    values = values.astype(dtype).reshape(shape)
    array = poisoned(shape, dtype, _STORAGES[storage](), values=values, poison=poison, xp=xp)
    return array[(*[0] * (4 - len(axes)), ...)]  # with the dots, an array of no axes stays an array
