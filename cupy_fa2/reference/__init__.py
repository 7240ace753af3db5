"""Attention in float64 NumPy: the definition that every kernel of this package is held to.

Exact attention [1]_ for query row ``i`` of head ``h``, which reads kv head ``h // group``, with every option::

    c[i, j]  = softmax_scale * sum_d q[i, d] * k[j, d]
    c[i, j]  = softcap * tanh(c[i, j] / softcap)                                     with `softcap`
    s[i, j]  = c[i, j] - alibi_slope * abs(i + offset - j) + bias[i, j]              where j is visible to i,
    s[i, j]  = -inf                                                                  elsewhere
    lse[i]   = log(exp(sink) + sum_j exp(s[i, j]))
    p[i, j]  = exp(s[i, j] - lse[i]) * (65536 / threshold if kept[i, j] else 0)      with dropout
    out[i]   = sum_j p[i, j] * v[j]

Key j is visible to row i if it exists (``j < seqlens_k``), lies in the window (``i + offset - left <= j <= i + offset +
right``; ``causal`` makes the right bound 0), and `mask` says so. A row at or beyond ``seqlens_q`` does not exist, and
sees nothing, not even the sink.

A row with no weight at all (it sees no key, or every score that it sees is -inf) has ``out = 0`` and ``lse = -inf``, or
the sink. NaN in a score that a row sees makes the row NaN. A key that is only hidden loses its score, NaN or not, but
its value still meets a weight of zero, and 0 x NaN is NaN: what `out` is then depends on the blocks of keys that a
kernel skips, so this module defines `out` for hidden values that are finite. A key that does not exist is never looked
at.

The formulas in code are `cupy_fa2.reference.definition`; which probabilities dropout keeps is `cupy_fa2.dropout`.

References
----------
.. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023,
   arXiv:2307.08691, section 2.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupy_fa2.reference.definition import Array, Call, Ints, Layout, host
from cupy_fa2.reference.options import filled, takes_options

__all__ = [
    "Array",
    "Layout",
    "attention",
    "attention_rows",
    "host",
    "naive",
    "naive_rows",
    "score_magnitude",
    "softcap_error",
]


@takes_options
def attention(q: Any, k: Any, v: Any, **options: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact attention in float64.

    Parameters
    ----------
    q : array
        Queries, (batch, seqlen_q, num_heads, head_dim); any real dtype, NumPy or CuPy.
    k : array
        Keys, (batch, seqlen_k, num_heads_k, head_dim), where num_heads is a multiple of num_heads_k.
    v : array
        Values, (batch, seqlen_k, num_heads_k, head_dim_v).
    **options
        As `cupy_fa2.flash_attention` has them and documents them, but for `out`, `out_dtype` and `return_lse`. Their
        arrays may have any real dtype and be NumPy's or CuPy's; nothing is checked, and lengths are clamped to those
        of the arrays. The formulas above say what each means.

    Returns
    -------
    out : ndarray of float64
        (batch, seqlen_q, num_heads, head_dim_v), or as `layout` says; 0 in rows that have no weight.
    lse : ndarray of float64
        (batch, num_heads, seqlen_q), the natural logarithm of each row's sum of exponentials; -inf (or
        the sink) in rows that have no weight.

    Raises
    ------
    TypeError
        Naming an option that there is not.

    Notes
    -----
    `out` is defined for finite values of hidden keys; see the module's text.

    Examples
    --------
    Scores log 1 and log 3 weigh two values as 1 to 3:

    >>> q, k, v = np.ones((1, 1, 1, 1)), np.log([1.0, 3.0]).reshape(1, 2, 1, 1), np.array([0.0, 4.0])
    >>> out, lse = attention(q, k, v.reshape(1, 2, 1, 1))
    >>> float(out.item().__round__(12)), float(np.exp(lse).item().__round__(12))
    (3.0, 4.0)
    """
    asked = filled(options)
    return Call.of(q, k, v, asked).solve_all(asked.layout)


@takes_options
def attention_rows(
    q: Any, k: Any, v: Any, rows: ArrayLike, **options: Any
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
    return Call.of(q, k, v, filled(options)).solve(_triples(rows))


@takes_options
def naive(q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Array]:
    """Attention as written down without care, the measure of what its dtype can give.

    The formulas of `attention` in float32, with the scores (``s``: capped, with ALiBi and bias), the probabilities
    (``p``: after dropout) and the result each rounded to the dtype of `q`. Rows whose scores all overflow downwards
    in that dtype are NaN.

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
    asked = filled(options)
    return Call.of(q, k, v, asked).solve_all(asked.layout, q.dtype)


@takes_options
def naive_rows(q: Any, k: Any, v: Any, rows: ArrayLike, **options: Any) -> tuple[Array, Array]:
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
    return Call.of(q, k, v, filled(options)).solve(_triples(rows), q.dtype)


@takes_options
def score_magnitude(q: Any, k: Any, v: Any, rows: ArrayLike | None = None, **options: Any) -> NDArray[np.float64]:
    """Largest sum of absolute values that a score of each row adds up.

    The rounding error of a score computed in float32 grows with it, and so does what may be asked of `lse`. Of one
    score it is ``|softmax_scale| * sum_d |q[i, d] * k[j, d]|``, with `softcap` at most that, plus ``|alibi_slope| *
    |i + offset - j|`` and ``|bias|``. The sink counts by its absolute value.

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
        0 for a row that sees nothing.

    Notes
    -----
    Only scores that matter count: finite ones within 30 of `lse`, give or take 1e-5 of their own magnitude. The others
    have weights below e^-30, and a key that a bias of -10^9 hides says nothing about the error of the rest.
    """
    call = Call.of(q, k, v, filled(options))
    triples = call.all_rows() if rows is None else _triples(rows)
    largest = np.empty(len(triples))
    for b, h, block in call.blocks(triples):
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            largest[block] = _magnitude(call, b, h, triples[block, 2])
    return largest


def _magnitude(call: Call, b: int, h: int, i: Ints) -> NDArray[np.float64]:
    queries, keys = call.queries_and_keys(b, h, i, np.float64)
    magnitude = abs(call.scale) * (np.abs(queries) @ np.abs(keys).T)
    if call.softcap is not None:
        magnitude = np.minimum(magnitude, call.softcap)
    if call.alibi_slopes is not None:
        magnitude += abs(float(call.alibi_slopes[b, h])) * np.abs(call.before_diagonal(b, i))
    if call.bias is not None:
        magnitude += np.abs(call.score_array(call.bias, b, h, i).astype(np.float64))
    scores, sink = call.scores(b, h, i, np.float64), call.sink(b, h, i, np.float64)
    _, lse, _ = call.softmax(b, h, i, np.float64)
    matters = call.visible(b, h, i) & np.isfinite(scores) & (scores + 1e-5 * magnitude >= lse - 30)
    largest = np.where(matters, magnitude, 0).max(axis=1, initial=0)
    from_sink = np.where(np.isfinite(sink) & (sink >= lse - 30), np.abs(sink), 0)[:, 0]
    return np.asarray(np.maximum(largest, from_sink))


@takes_options
def softcap_error(
    q: Any,
    k: Any,
    v: Any,
    rows: ArrayLike | None = None,
    *,
    tanh_error: float = 2.0**-11,
    **options: Any,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bound of the errors that an approximate tanh in `softcap` causes by itself.

    Parameters
    ----------
    q, k, v : array
        As for `attention`.
    rows : (n, 3) array_like of int, optional
        The (batch, head, row) of each row wanted; all rows, in that order, unless given.
    tanh_error : float
        Largest relative error of the tanh; 2^-11 is what PTX promises of ``tanh.approx.f32``.
    **options
        As for `attention`.

    Returns
    -------
    out : (n, head_dim_v) ndarray of float64
        0 without `softcap`.
    lse : (n,) ndarray of float64
        Likewise.

    Notes
    -----
    Each capped score c_j is off by some e_j, ``|e_j| <= E_j = tanh_error * |c_j|``. With w_j what dropout multiplies
    by, the new output less the exact one is ``sum_j p_j (exp(e_j) - 1) (w_j v_j - out) / Z``, where ``Z = p_sink +
    sum_j p_j exp(e_j)``, because ``sum_j p_j w_j v_j = out``. With E the largest E_j, ``|exp(e_j) - 1| <= E_j exp(E)``
    and ``Z >= exp(-E)``; the inequality of Cauchy and Schwarz makes matrix products of the rest::

        |out' - out| <= exp(2 E) sqrt(sum_j p_j E_j) sqrt(sum_j p_j E_j (w_j v_j - out)^2)
        |lse' - lse| <= E
    """
    call = Call.of(q, k, v, filled(options))
    triples = call.all_rows() if rows is None else _triples(rows)
    out, lse = np.zeros((len(triples), call.v.shape[3])), np.zeros(len(triples))
    if call.softcap is None:
        return out, lse
    for b, h, block in call.blocks(triples):
        with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
            out[block], lse[block] = _softcap_error(call, b, h, triples[block, 2], tanh_error)
    return np.nan_to_num(out, posinf=0), np.nan_to_num(lse)


def _softcap_error(call: Call, b: int, h: int, i: Ints, tanh_error: float) -> tuple[Array, Array]:
    e = tanh_error * np.where(call.visible(b, h, i), np.abs(call.products(b, h, i, np.float64)), 0)
    largest = e.max(axis=1, keepdims=True, initial=0)
    p, _, _ = call.softmax(b, h, i, np.float64)
    pe, kept, v = p * e, call.kept(b, h, i, np.float64), call.keys(call.v, b, h, np.float64)
    total = pe.sum(axis=1, keepdims=True)
    exact, _ = call.attend(b, h, i)
    squares = (pe * kept**2) @ v**2 - 2 * exact * ((pe * kept) @ v) + total * exact**2
    return np.exp(2 * largest) * np.sqrt(total * np.maximum(squares, 0)), largest[:, 0]


def _triples(rows: ArrayLike) -> Ints:
    return np.asarray(rows, np.int64).reshape(-1, 3)
