"""The tolerance rule.

The rule is the one of FlashAttention's own tests: the largest error against exact attention may be at most
twice that of the naive computation (`cupy_fa2.reference.naive`), plus 1e-5 and one unit in the last place of
the output. It compares two maxima, so it means little for an output of a few numbers: give it 64 or more. With
`softcap` comes what a tanh of relative error 2^-11 may change (`cupy_fa2.reference.softcap_error`), element by element.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupy_fa2 import reference
from cupy_fa2.reference import Array, Layout, host
from cupy_fa2.reference.options import takes_options

if TYPE_CHECKING:
    pass


def ulp(values: ArrayLike, dtype: Any) -> NDArray[np.float64]:
    """Distance between neighbouring numbers of a dtype at the magnitude of each value.

    Parameters
    ----------
    values : array_like of float64
    dtype : dtype
        float16, bfloat16 or float32.

    Returns
    -------
    ndarray of float64
    """
    info = ml_dtypes.finfo(dtype)
    magnitude = np.asarray(values, np.float64)
    exponent = np.where(magnitude == 0, info.minexp, np.frexp(magnitude)[1] - 1)
    return np.asarray(np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant))


def tolerance(exact: Array, rough: Array, dtype: Any, *, ratio: float = 2.0) -> NDArray[np.float64]:
    """Largest allowed error of each element of an output.

    Parameters
    ----------
    exact : ndarray of float64
        The output of `cupy_fa2.reference.attention`.
    rough : ndarray
        The output of `cupy_fa2.reference.naive`. Elements that are not finite, where its float16 scores
        overflowed, are left out.
    dtype : dtype
        The dtype of the output in question.
    ratio : float
        Allowed multiple of the naive computation's largest error: 2 for an output, 3 for a gradient.

    Returns
    -------
    ndarray of float64
        ``ratio * max |rough - exact| + 1e-5 + ulp(exact)``, shaped as `exact`.
    """
    with np.errstate(invalid="ignore"):
        error = np.abs(rough.astype(np.float64) - exact)
    naive_error = float(error[np.isfinite(error)].max(initial=0))
    return ratio * naive_error + 1e-5 + ulp(exact, dtype)


def lse_tolerance(magnitude: Array, softcap_error: Array | float = 0.0) -> NDArray[np.float64]:
    """Largest allowed error of each row's `lse`, which is float32 however low the inputs' precision.

    Parameters
    ----------
    magnitude : ndarray of float64
        ``|softmax_scale| * sum_d |q k|`` with ALiBi and bias, the largest of each row:
        `cupy_fa2.reference.score_magnitude`.
    softcap_error : ndarray of float64
        What an approximate tanh may change: `cupy_fa2.reference.softcap_error`.

    Returns
    -------
    ndarray of float64
        ``1e-5 * max(1, magnitude) + softcap_error``.
    """
    return np.asarray(1e-5 * np.maximum(1, magnitude) + softcap_error)


def sample_rows(q: Any, count: int, *, layout: Layout = "bshd", seed: int = 0) -> NDArray[np.int64]:
    """Draw different rows of a call to check: the corners, and the others at random.

    Parameters
    ----------
    q : array
        The call's queries.
    count : int
        How many, at least 0; all rows, where there are no more.
    layout : {"bshd", "bhsd"}
        Order of the axes of `q`.
    seed : int
        Seed of the draw.

    Returns
    -------
    (n, 3) ndarray of int64
        (batch, head, row) of each, in ascending order.

    Raises
    ------
    ValueError
        `count` is negative.
    """
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    batch, num_heads, seqlen_q = (q.shape[axis] for axis in ((0, 1, 2) if layout == "bhsd" else (0, 2, 1)))
    total = batch * num_heads * seqlen_q
    if count >= total:
        picked = np.arange(total)
    else:
        corners = np.unique([0, min(seqlen_q, total) - 1, total - seqlen_q, total - 1][:count]).astype(np.int64)
        drawn = np.random.default_rng(seed).choice(total, count, replace=False)
        others = drawn[~np.isin(drawn, corners)]
        picked = np.sort(np.concatenate([corners, others[: count - corners.size]]))
    return np.stack(np.unravel_index(picked, (batch, num_heads, seqlen_q)), axis=1)


@takes_options
def assert_attention_close(
    out: Any,
    lse: Any | None,
    q: Any,
    k: Any,
    v: Any,
    *,
    rows: ArrayLike | int | None = None,
    ratio: float = 2.0,
    **options: Any,
) -> None:
    """Hold the result of one attention call to the tolerance rule.

    Parameters
    ----------
    out : array
        The output: (batch, seqlen_q, num_heads, head_dim_v), or as `layout` says.
    lse : array or None
        Natural log-sum-exp, (batch, num_heads, seqlen_q), or None not to check it.
    q, k, v : array
        The inputs of the call.
    rows : (n, 3) array_like of int, or int, optional
        Check only these (batch, head, row), or that many drawn by `sample_rows`; all rows unless given.
    ratio : float
        See `tolerance`.
    **options
        The options of the call, those of `cupy_fa2.reference.attention`.

    Raises
    ------
    AssertionError
        A shape or an element is wrong; the message shows the worst element, its error and what was allowed.
    """
    layout = options.get("layout", "bshd")
    seqlen_axis, head_axis = (2, 1) if layout == "bhsd" else (1, 2)
    batch, seqlen_q, num_heads = q.shape[0], q.shape[seqlen_axis], q.shape[head_axis]
    shape = (*q.shape[:3], v.shape[3])
    _assert(tuple(out.shape) == shape, f"out has shape {tuple(out.shape)}, expected {shape}")
    triples = _triples(q, rows, layout)

    exact, exact_lse = reference.attention_rows(q, k, v, triples, **options)
    rough, _ = reference.naive_rows(q, k, v, triples, **options)
    actual = _gather(out, triples, head_axis)
    allowed = tolerance(exact, rough, out.dtype, ratio=ratio)
    naive_error = (float(allowed.flat[0]) - 1e-5 - float(ulp(exact.flat[0], out.dtype))) / ratio if exact.size else 0.0
    softcap_out, softcap_lse = reference.softcap_error(q, k, v, triples, **options)
    _assert_close("out", actual, exact, allowed + softcap_out, triples, f"naive error {naive_error:.3g}, {out.dtype}")
    if lse is not None:
        shape = (batch, num_heads, seqlen_q)
        _assert(tuple(lse.shape) == shape, f"lse has shape {tuple(lse.shape)}, expected {shape}")
        _assert(lse.dtype == np.float32, f"lse is {lse.dtype}, expected float32")
        allowed = lse_tolerance(reference.score_magnitude(q, k, v, triples, **options), softcap_lse)
        actual = host(lse)[tuple(triples.T)].astype(np.float64)
        _assert_close("lse", actual, exact_lse, allowed, triples, "float32")


def _assert(holds: bool, message: str) -> None:
    """As the statement, which ``python -O`` leaves out."""
    if not holds:
        raise AssertionError(message)


def _triples(q: Any, rows: ArrayLike | int | None, layout: Layout) -> NDArray[np.int64]:
    """The rows to check, (n, 3), from what `assert_attention_close` was given."""
    if rows is None:
        rows = sample_rows(q, math.prod(q.shape[:3]), layout=layout)
    elif np.ndim(rows) == 0:
        rows = sample_rows(q, operator.index(cast("int", rows)), layout=layout)
    return np.asarray(rows, np.int64).reshape(-1, 3)


def _gather(out: Any, triples: NDArray[np.int64], head_axis: int) -> NDArray[np.float64]:
    """The rows of `out`, (n, head_dim_v), copying no more than a few rows of a big array from a device."""
    if len(triples) > 4096:
        out = host(out)
    index = triples[:, [0, 1, 2] if head_axis == 1 else [0, 2, 1]]
    if isinstance(out, np.ndarray):
        return np.asarray(out[tuple(index.T)], np.float64)
    picked = [host(out[tuple(i)]).astype(np.float64) for i in index.tolist()]
    return np.array(picked).reshape(len(index), out.shape[3])


def _assert_close(
    name: str, actual: Array, exact: Array, allowed: Array, triples: NDArray[np.int64], note: str
) -> None:
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - exact)
        same = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
        wrong = ~(same | (error <= allowed))
    if not wrong.any():
        return
    excess = np.where(wrong, np.where(np.isfinite(error), error / allowed, np.inf), 0)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    b, h, i = triples[worst[0]]
    column = f", column {worst[1]}" if len(worst) == 2 else ""
    bad_rows = np.unique(np.nonzero(wrong)[0])
    raise AssertionError(
        f"{name}: {int(wrong.sum())} of {wrong.size} elements are wrong, "
        f"in {len(bad_rows)} of {len(triples)} rows\n"
        f"  worst: batch {b}, head {h}, row {i}{column}: {actual[worst]:.9g}, expected {exact[worst]:.9g}\n"
        f"  error {error[worst]:.3g}, allowed {allowed[worst]:.3g} ({note})\n"
        f"  wrong (batch, head, row): {', '.join(str(tuple(map(int, triples[r]))) for r in bad_rows[:8])}"
        f"{', ...' if len(bad_rows) > 8 else ''}"
    )
