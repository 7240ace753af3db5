"""The definition itself, in NumPy: what every option does to one block of query rows of one head.

`cupy_fa2.reference` has the formulas in words and the functions to call. A new option has one place to go: a field of
`Call`, read in the one step that it changes: `products`, `scores`, `visible`, `softmax` or `attend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cupy_fa2 import dropout
from cupy_fa2.problem import Options

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Layout = Literal["bshd", "bhsd"]

# Scores held at once: 32 MiB of float64, whatever the sequence lengths.
BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class Call:
    """One call with its options resolved; arrays stay as given until a head of them is needed."""

    q: Any  # (batch, seqlen_q, num_heads, head_dim)
    k: Any  # (batch, seqlen_k, num_heads_k, head_dim)
    v: Any  # (batch, seqlen_k, num_heads_k, head_dim_v)
    scale: float
    softcap: float | None
    window_left: int | None  # keys before the diagonal that a row sees; None: all
    window_right: int | None  # keys after it; `causal` is 0
    offset: Ints  # (batch,): the diagonal of query i is key i + offset
    seqlens_q: Ints  # (batch,): rows beyond do not exist
    seqlens_k: Ints  # (batch,): keys beyond do not exist
    alibi_slopes: Array | None  # (batch, num_heads)
    bias: Any | None  # 4 axes, of length 1 where it is broadcast
    mask: Any | None  # likewise
    sinks: Array | None  # (num_heads,)
    dropout_threshold: int  # of 65536
    dropout_seed: int

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, options: Options) -> Call:
        """Resolve the options of `cupy_fa2.reference.attention`."""
        if options.layout == "bhsd":
            q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        batch, seqlen_q, num_heads, head_dim = q.shape
        lengths_q = _lengths(options.seqlens_q, batch, seqlen_q)
        lengths_k = _lengths(options.seqlens_k, batch, k.shape[1])
        left, right = (None, None) if options.window is None else options.window
        if options.causal:
            right = 0 if right is None else min(right, 0)
        if isinstance(options.align, str):
            offset: Any = {"bottom-right": lengths_k - lengths_q, "top-left": 0}[options.align]
        else:
            offset = np.asarray(host(options.align), np.int64)
        scale, slopes, sinks = options.softmax_scale, options.alibi_slopes, options.sinks
        return cls(
            *(q, k, v),
            scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
            softcap=options.softcap,
            window_left=left,
            window_right=right,
            offset=np.broadcast_to(offset, batch),
            seqlens_q=lengths_q,
            seqlens_k=lengths_k,
            alibi_slopes=None if slopes is None else np.broadcast_to(host(slopes), (batch, num_heads)),
            bias=_four_axes(options.bias),
            mask=_four_axes(options.mask),
            sinks=None if sinks is None else np.broadcast_to(host(sinks), num_heads),
            dropout_threshold=dropout.threshold(options.dropout_p),
            dropout_seed=dropout.seed_bits(options.dropout_seed) if options.dropout_p > 0 else 0,
        )

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return int(max(1, self.q.shape[2] // max(1, self.k.shape[2])))

    def all_rows(self) -> Ints:
        """Every (batch, head, row), in that order."""
        batch, seqlen_q, num_heads, _ = self.q.shape
        return np.indices((batch, num_heads, seqlen_q)).reshape(3, -1).T

    def blocks(self, rows: Ints) -> Iterator[tuple[int, int, Ints]]:
        """Split `rows` into (batch, head, positions in `rows`), few enough for their scores to fit."""
        head = rows[:, 0] * max(1, self.q.shape[2]) + rows[:, 1]
        order = np.argsort(head, kind="stable")
        step = max(1, BLOCK_ELEMENTS // max(1, self.k.shape[1]))
        for positions in np.split(order, np.flatnonzero(np.diff(head[order])) + 1):
            for start in range(0, len(positions), step):
                block = positions[start : start + step]
                yield int(rows[block[0], 0]), int(rows[block[0], 1]), block

    def keys(self, x: Any, b: int, h: int, dtype: type) -> Array:
        """The keys, or the values, that head `h` of batch element `b` has: those beyond its length are cut off."""
        return host(x[b, : self.seqlens_k[b], h // self.group]).astype(dtype)

    def queries_and_keys(self, b: int, h: int, i: Ints, dtype: type) -> tuple[Array, Array]:
        """The query rows `i` of one head, and all the keys that it reads."""
        return host(self.q[b, :, h])[i].astype(dtype), self.keys(self.k, b, h, dtype)

    def before_diagonal(self, b: int, i: Ints) -> Ints:
        """How many keys key j lies before the diagonal of row i: (rows, keys), negative after it."""
        return np.asarray(i[:, None] + self.offset[b] - np.arange(self.seqlens_k[b]))

    def exists(self, b: int, i: Ints) -> Bools:
        """Whether each row is within its sequence, (rows, 1)."""
        return np.asarray(i[:, None] < self.seqlens_q[b])

    def score_array(self, x: Any, b: int, h: int, i: Ints) -> Array:
        """The part of `bias` or `mask` that the rows `i` meet, broadcastable to (rows, keys)."""
        plane = x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]
        if plane.shape[1] > 1:
            plane = plane[:, : self.seqlens_k[b]]
        if plane.shape[0] == 1:
            return host(plane)
        return np.asarray(host(plane[i.min() : i.max() + 1])[i - i.min()])

    def products(self, b: int, h: int, i: Ints, dtype: type) -> Array:
        """Scaled products of queries and keys, capped, (rows, keys)."""
        q, k = self.queries_and_keys(b, h, i, dtype)
        s: Array = dtype(self.scale) * (q @ k.T)
        if self.softcap is not None:
            s = dtype(self.softcap) * np.tanh(s / dtype(self.softcap))
        return s

    def scores(self, b: int, h: int, i: Ints, dtype: type) -> Array:
        """Scores, (rows, keys), of the query rows `i`, those of hidden keys among them."""
        s = self.products(b, h, i, dtype)
        if self.alibi_slopes is not None:
            s = s - dtype(self.alibi_slopes[b, h]) * np.abs(self.before_diagonal(b, i)).astype(dtype)
        if self.bias is not None:
            s = s + self.score_array(self.bias, b, h, i).astype(dtype)
        return s

    def visible(self, b: int, h: int, i: Ints) -> Bools:
        """Whether each row may attend to each key, (rows, keys)."""
        before_diagonal = self.before_diagonal(b, i)
        seen = np.broadcast_to(self.exists(b, i), before_diagonal.shape).copy()
        if self.window_left is not None:
            seen &= before_diagonal <= self.window_left
        if self.window_right is not None:
            seen &= -before_diagonal <= self.window_right
        if self.mask is not None:
            seen &= self.score_array(self.mask, b, h, i)
        return seen

    def sink(self, b: int, h: int, i: Ints, dtype: type) -> Array:
        """The logit of each row that is no key's, (rows, 1): -inf where there is none."""
        logit = -np.inf if self.sinks is None else self.sinks[h]
        return np.asarray(np.where(self.exists(b, i), dtype(logit), dtype(-np.inf)))

    def kept(self, b: int, h: int, i: Ints, dtype: type) -> Array:
        """What dropout multiplies each probability by, (rows, keys)."""
        if self.dropout_threshold == dropout.VALUES:
            return np.ones((1, 1), dtype)
        values = dropout.dropout_values(b, h, i, int(self.seqlens_k[b]), self.dropout_seed)
        rescale = dtype(dropout.VALUES / self.dropout_threshold)
        return np.asarray(np.where(values < self.dropout_threshold, rescale, dtype(0)))

    def softmax(
        self, b: int, h: int, i: Ints, dtype: type, stored: Callable[[Array], Array] = lambda x: x
    ) -> tuple[Array, Array, Bools]:
        """Probabilities (rows, keys), lse (rows, 1), and whether a row has no weight on any key (rows, 1).

        `stored` is applied to the scores first.
        """
        scores, sink = self.scores(b, h, i, dtype), self.sink(b, h, i, dtype)
        scores = np.where(self.visible(b, h, i), scores, dtype(-np.inf))
        empty = (scores == -np.inf).all(axis=1, keepdims=True)
        s = stored(scores)
        row_max = np.maximum(s.max(axis=1, keepdims=True, initial=-np.inf), sink)
        row_max = np.where(row_max == -np.inf, dtype(0), row_max)  # so that exp(-inf - row_max) is 0
        p = np.exp(s - row_max)
        row_sum = p.sum(axis=1, keepdims=True) + np.exp(sink - row_max)
        # A sum of 0 in a row that is not empty is scores that `stored` turned into -inf: NaN, as for those of +inf.
        return p / np.where(empty, dtype(1), row_sum), row_max + np.log(row_sum), empty

    def attend(self, b: int, h: int, i: Ints, rounded: Any = None) -> tuple[Array, Array]:
        """Softmax over the visible keys, applied to their values: out (rows, head_dim_v), lse (rows,).

        In float64; or, with a dtype in `rounded`, in float32 with scores, probabilities and result rounded to
        that dtype.
        """
        dtype = np.float64 if rounded is None else np.float32

        def stored(x: Array) -> Array:
            return x if rounded is None else x.astype(rounded).astype(dtype)

        with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
            p, lse, empty = self.softmax(b, h, i, dtype, stored)
            p = stored(p * self.kept(b, h, i, dtype))
            out = np.where(empty, dtype(0), stored(p @ self.keys(self.v, b, h, dtype)))
        return out, lse[:, 0]

    def solve(self, rows: Ints, rounded: Any = None) -> tuple[Array, Array]:
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


def _lengths(lengths: Any, batch: int, seqlen: int) -> Ints:
    """Of each batch element, (batch,); the full length unless given. A kernel clamps what it cannot check."""
    if lengths is None:
        return np.full(batch, seqlen, np.int64)
    return np.broadcast_to(np.clip(host(lengths).astype(np.int64), 0, seqlen), batch)


def _four_axes(x: Any | None) -> Any | None:
    """With axes of length 1 put in front, as broadcasting does; nothing is copied from a device."""
    if x is None:
        return None
    x = x if hasattr(x, "ndim") else np.asarray(x)
    return x[(None,) * (4 - x.ndim)]
