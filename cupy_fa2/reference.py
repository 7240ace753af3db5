"""Attention in float64 NumPy: the definition that every kernel of this package is held to.

Exact attention [1]_ for query row ``i`` of head ``h``, which reads kv head ``h // group``::

    s[i, j]  = softmax_scale * sum_d q[i, d] * k[j, d]     where key j is visible to row i, else -inf
    lse[i]   = log sum_j exp(s[i, j])
    out[i]   = sum_j exp(s[i, j] - lse[i]) * v[j]

A row with no weight at all (it sees no key, or every score that it sees is -inf) has ``out = 0`` and
``lse = -inf``. NaN in a score that a row sees makes the row NaN. A key that is masked loses its score, NaN or
not, but its value still meets a weight of zero, and 0 x NaN is NaN: what `out` is then depends on the blocks
of keys that a kernel skips, so this module defines `out` for masked values that are finite.

A new option has one place to go: a field of `_Call`, read in `_Call.scores`.

References
----------
.. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023,
   arXiv:2307.08691, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]
Layout = Literal["bshd", "bhsd"]

# Scores held at once: 32 MiB of float64, whatever the sequence lengths.
_BLOCK_ELEMENTS = 1 << 22


class Options(TypedDict, total=False):
    """Keyword options of every function here; `attention` says what they mean."""

    causal: bool
    align: str | int | ArrayLike
    softmax_scale: float | None
    layout: Layout


@dataclass(frozen=True, eq=False)
class _Call:
    """One call with its options resolved; arrays stay as given until a head of them is needed."""

    q: Any  # (batch, seqlen_q, num_heads, head_dim)
    k: Any  # (batch, seqlen_k, num_heads_k, head_dim)
    v: Any  # (batch, seqlen_k, num_heads_k, head_dim_v)
    scale: float
    causal: bool
    offset: NDArray[np.int64]  # (batch,): the diagonal of query i is key i + offset

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        align: str | int | ArrayLike = "bottom-right",
        softmax_scale: float | None = None,
        layout: Layout = "bshd",
    ) -> _Call:
        if layout == "bhsd":
            q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        batch, seqlen_q, _, head_dim = q.shape
        if isinstance(align, str):
            align = {"bottom-right": k.shape[1] - seqlen_q, "top-left": 0}[align]
        offset = np.broadcast_to(np.asarray(host(align), np.int64), batch)
        scale = 1 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale)
        return cls(q, k, v, scale, causal, offset)

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return int(max(1, self.q.shape[2] // max(1, self.k.shape[2])))

    def all_rows(self) -> NDArray[np.int64]:
        """Every (batch, head, row), in that order."""
        batch, seqlen_q, num_heads, _ = self.q.shape
        return np.indices((batch, num_heads, seqlen_q)).reshape(3, -1).T

    def blocks(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """Split `rows` into (batch, head, positions in `rows`), few enough for their scores to fit."""
        head = rows[:, 0] * max(1, self.q.shape[2]) + rows[:, 1]
        order = np.argsort(head, kind="stable")
        step = max(1, _BLOCK_ELEMENTS // max(1, self.k.shape[1]))
        for positions in np.split(order, np.flatnonzero(np.diff(head[order])) + 1):
            for start in range(0, len(positions), step):
                block = positions[start : start + step]
                yield int(rows[block[0], 0]), int(rows[block[0], 1]), block

    def queries_and_keys(self, b: int, h: int, i: NDArray[np.int64], dtype: type) -> tuple[Array, Array]:
        """The query rows `i` of one head, and all the keys that it reads."""
        return host(self.q[b, :, h])[i].astype(dtype), host(self.k[b, :, h // self.group]).astype(dtype)

    def scores(self, b: int, h: int, i: NDArray[np.int64], dtype: type) -> tuple[Array, NDArray[np.bool_]]:
        """Scores and visibility, both (rows, seqlen_k), of the query rows `i`: all that options decide."""
        q, k = self.queries_and_keys(b, h, i, dtype)
        scores = dtype(self.scale) * (q @ k.T)
        before_diagonal = i[:, None] + self.offset[b] - np.arange(len(k))
        visible = np.ones(scores.shape, np.bool_)
        if self.causal:
            visible &= before_diagonal >= 0
        return scores, visible

    def attend(self, b: int, h: int, i: NDArray[np.int64], rounded: Any = None) -> tuple[Array, Array]:
        """Softmax over the visible keys, applied to their values: out (rows, head_dim_v), lse (rows,).

        In float64; or, with a dtype in `rounded`, in float32 with scores, probabilities and result rounded to
        that dtype.
        """
        dtype = np.float64 if rounded is None else np.float32

        def stored(x: Array) -> Array:
            return x if rounded is None else x.astype(rounded).astype(dtype)

        with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
            scores, visible = self.scores(b, h, i, dtype)
            s = np.where(visible, stored(scores), dtype(-np.inf))
            row_max = s.max(axis=1, keepdims=True, initial=-np.inf)
            row_max = np.where(row_max == -np.inf, dtype(0), row_max)  # so that exp(-inf - row_max) is 0
            p = np.exp(s - row_max)
            row_sum = p.sum(axis=1, keepdims=True)
            lse = row_max + np.log(row_sum)
            empty = row_sum == 0
            p = stored(p / np.where(empty, dtype(1), row_sum))
            v = host(self.v[b, :, h // self.group]).astype(dtype)
            out = np.where(empty, dtype(0), stored(p @ v))
        return out, lse[:, 0]

    def solve(self, rows: NDArray[np.int64], rounded: Any = None) -> tuple[Array, Array]:
        """`attend` for every (batch, head, row) of `rows`: out (n, head_dim_v), lse (n,)."""
        out = np.empty((len(rows), self.v.shape[3]), np.float64 if rounded is None else rounded)
        lse = np.empty(len(rows), np.float64 if rounded is None else np.float32)
        for b, h, block in self.blocks(rows):
            out[block], lse[block] = self.attend(b, h, rows[block, 2], rounded)
        return out, lse

    def solve_all(self, layout: Layout, rounded: Any = None) -> tuple[Array, Array]:
        """`solve` for all rows, shaped: out in `layout`, lse (batch, num_heads, seqlen_q)."""
        batch, seqlen_q, num_heads, _ = self.q.shape
        flat_out, flat_lse = self.solve(self.all_rows(), rounded)
        out = flat_out.reshape(batch, num_heads, seqlen_q, self.v.shape[3])
        lse = flat_lse.reshape(batch, num_heads, seqlen_q)
        return (out if layout == "bhsd" else out.transpose(0, 2, 1, 3)), lse


def host(array: Any) -> Array:
    """Bring an array to the host, where it is not there already.

    Parameters
    ----------
    array : array_like
        NumPy or CuPy array, or anything `numpy.asarray` takes.

    Returns
    -------
    numpy.ndarray
    """
    return np.asarray(array.get() if hasattr(array, "get") else array)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    align: str | int | ArrayLike = "bottom-right",
    softmax_scale: float | None = None,
    layout: Layout = "bshd",
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact attention in float64.

    Parameters
    ----------
    q : array
        Queries, (batch, seqlen_q, num_heads, head_dim); any real dtype, NumPy or CuPy.
    k : array
        Keys, (batch, seqlen_k, num_heads_k, head_dim), where num_heads is a multiple of num_heads_k.
    v : array
        Values, (batch, seqlen_k, num_heads_k, head_dim_v).
    causal : bool
        Row i sees the keys up to its diagonal, key ``i + offset``, and no later ones.
    align : {"bottom-right", "top-left"} or int or (batch,) array of int
        The offset of the diagonal: ``seqlen_k - seqlen_q`` (the last row sees the last key), 0, or as given.
    softmax_scale : float, optional
        Factor of every score, of any sign; 1 / sqrt(head_dim) unless given.
    layout : {"bshd", "bhsd"}
        Order of the axes of `q`, `k`, `v` and `out`: batch, seqlen, heads, head_dim, or heads before seqlen.

    Returns
    -------
    out : ndarray of float64
        (batch, seqlen_q, num_heads, head_dim_v), or as `layout` says; 0 in rows that have no weight.
    lse : ndarray of float64
        (batch, num_heads, seqlen_q), the natural logarithm of each row's sum of exponentials; -inf in rows
        that have no weight.

    Notes
    -----
    `out` is defined for finite values of masked keys; see the module's text.

    Examples
    --------
    Scores log 1 and log 3 weigh two values as 1 to 3:

    >>> q, k, v = np.ones((1, 1, 1, 1)), np.log([1.0, 3.0]).reshape(1, 2, 1, 1), np.array([0.0, 4.0])
    >>> out, lse = attention(q, k, v.reshape(1, 2, 1, 1))
    >>> float(out.item().__round__(12)), float(np.exp(lse).item().__round__(12))
    (3.0, 4.0)
    """
    call = _Call.of(q, k, v, causal=causal, align=align, softmax_scale=softmax_scale, layout=layout)
    return call.solve_all(layout)


def attention_rows(
    q: Any, k: Any, v: Any, rows: ArrayLike, **options: Unpack[Options]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact attention in float64 for some rows only, to check a run that is too big to compute whole.

    Parameters
    ----------
    q, k, v : array
        As for `attention`; only the heads that `rows` names are read and converted.
    rows : (n, 3) array_like of int
        The (batch, head, row) of each row wanted.
    **options
        As for `attention`.

    Returns
    -------
    out : (n, head_dim_v) ndarray of float64
    lse : (n,) ndarray of float64
    """
    return _Call.of(q, k, v, **options).solve(_triples(rows))


def naive(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> tuple[Array, Array]:
    """Attention as written down without care, the measure of what its dtype can give.

    The formulas of `attention` in float32, with the scores, the probabilities and the result each rounded to
    the dtype of `q`.

    Parameters
    ----------
    q, k, v : array
        As for `attention`.
    **options
        As for `attention`.

    Returns
    -------
    out : ndarray of the dtype of `q`
        As for `attention`.
    lse : ndarray of float32
        As for `attention`.
    """
    return _Call.of(q, k, v, **options).solve_all(options.get("layout", "bshd"), q.dtype)


def naive_rows(q: Any, k: Any, v: Any, rows: ArrayLike, **options: Unpack[Options]) -> tuple[Array, Array]:
    """`naive` for some rows only: see `attention_rows`.

    Parameters
    ----------
    q, k, v : array
        As for `attention`.
    rows : (n, 3) array_like of int
        The (batch, head, row) of each row wanted.
    **options
        As for `attention`.

    Returns
    -------
    out : (n, head_dim_v) ndarray of the dtype of `q`
    lse : (n,) ndarray of float32
    """
    return _Call.of(q, k, v, **options).solve(_triples(rows), q.dtype)


def score_magnitude(
    q: Any, k: Any, v: Any, rows: ArrayLike | None = None, **options: Unpack[Options]
) -> NDArray[np.float64]:
    """Largest ``|softmax_scale| * sum_d |q[i, d] * k[j, d]|`` over the keys that each row sees.

    The rounding error of a score computed in float32 grows with it, and so does what may be asked of `lse`.

    Parameters
    ----------
    q, k, v : array
        As for `attention`.
    rows : (n, 3) array_like of int, optional
        The (batch, head, row) of each row wanted; all rows, in that order, unless given.
    **options
        As for `attention`.

    Returns
    -------
    (n,) ndarray of float64
        0 for a row that sees no key.
    """
    call = _Call.of(q, k, v, **options)
    triples = call.all_rows() if rows is None else _triples(rows)
    largest = np.empty(len(triples))
    for b, h, block in call.blocks(triples):
        i = triples[block, 2]
        with np.errstate(invalid="ignore", over="ignore"):
            _, visible = call.scores(b, h, i, np.float64)
            queries, keys = call.queries_and_keys(b, h, i, np.float64)
            magnitude = abs(call.scale) * (np.abs(queries) @ np.abs(keys).T)
        largest[block] = np.where(visible, magnitude, 0).max(axis=1, initial=0)
    return largest


def _triples(rows: ArrayLike) -> NDArray[np.int64]:
    return np.asarray(rows, np.int64).reshape(-1, 3)
