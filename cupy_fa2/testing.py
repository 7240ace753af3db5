"""Tools to test an attention kernel with, this package's or another's.

- the tolerance rule: `tolerance`, `lse_tolerance`, `assert_attention_close`;
- inputs: `random_qkv`, and arrays that lie in memory in every odd way with NaN all around them: `poisoned`;
- `attention_examples`, a Hypothesis strategy of whole calls.

Arrays are NumPy's, or CuPy's where `xp` is the module `cupy`.

The rule is the one of FlashAttention's own tests: the largest error against exact attention may be at most
twice that of the naive computation (`cupy_fa2.reference.naive`), plus 1e-5 and one unit in the last place of
the output. It compares two maxima, so it means little for an output of a few numbers: give it 64 or more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupy_fa2 import reference
from cupy_fa2.reference import Array, Layout, Options, host

if TYPE_CHECKING:
    from typing import Unpack

    from hypothesis.strategies import SearchStrategy

DTYPES: dict[str, Any] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# --- the tolerance rule -------------------------------------------------------------------------------------


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


def lse_tolerance(magnitude: Array) -> NDArray[np.float64]:
    """Largest allowed error of each row's `lse`, which is float32 however low the inputs' precision.

    Parameters
    ----------
    magnitude : ndarray of float64
        ``|softmax_scale| * sum_d |q k|``, the largest of each row: `cupy_fa2.reference.score_magnitude`.

    Returns
    -------
    ndarray of float64
        ``1e-5 * max(1, magnitude)``.
    """
    return 1e-5 * np.maximum(1, magnitude)


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


def assert_attention_close(
    out: Any,
    lse: Any | None,
    q: Any,
    k: Any,
    v: Any,
    *,
    rows: ArrayLike | int | None = None,
    ratio: float = 2.0,
    **options: Unpack[Options],
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
    _assert_close("out", actual, exact, allowed, triples, f"naive error {naive_error:.3g}, {out.dtype}")
    if lse is not None:
        shape = (batch, num_heads, seqlen_q)
        _assert(tuple(lse.shape) == shape, f"lse has shape {tuple(lse.shape)}, expected {shape}")
        _assert(lse.dtype == np.float32, f"lse is {lse.dtype}, expected float32")
        allowed = lse_tolerance(reference.score_magnitude(q, k, v, triples, **options))
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


# --- inputs -------------------------------------------------------------------------------------------------


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


# --- whole calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """One attention call, small enough to print."""

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    align: str | int | tuple[int, ...] = "bottom-right"
    softmax_scale: float | None = None
    layout: Layout = "bshd"
    storage: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    mean: float = 0.0
    seed: int = 0

    def arrays(self, xp: Any = np) -> tuple[Any, Any, Any]:
        """Make q, k and v, lying as `storage` says among NaN."""
        drawn = random_qkv(
            *(self.batch, self.seqlen_q, self.seqlen_k, self.num_heads, self.head_dim),
            num_heads_k=self.num_heads_k,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            mean=self.mean,
            seed=self.seed,
        )
        placed = (
            poisoned(values.shape, values.dtype, storage, values=values, xp=xp)
            for values, storage in zip(drawn, self.storage, strict=True)
        )
        q, k, v = (x.transpose(0, 2, 1, 3) if self.layout == "bhsd" else x for x in placed)
        return q, k, v

    @property
    def options(self) -> Options:
        """The keyword arguments of the call."""
        align: Any = np.array(self.align, np.int64) if isinstance(self.align, tuple) else self.align
        return {
            "causal": self.causal,
            "align": align,
            "softmax_scale": self.softmax_scale,
            "layout": self.layout,
        }

    @property
    def work(self) -> int:
        """Multiply-adds of the call, masked ones included."""
        pairs = self.batch * self.num_heads * self.seqlen_q * self.seqlen_k
        return pairs * (self.head_dim + self.head_dim_v)

    def contiguous(self) -> Example:
        """Return the same call on C-contiguous arrays in (batch, seqlen, heads, head_dim) order."""
        return replace(self, storage=("contiguous",) * 3, layout="bshd")


def attention_examples(
    *,
    max_seqlen: int = 150,
    max_head_dim: int = 256,
    max_batch: int = 3,
    max_heads: int = 6,
    max_work: int = 1 << 26,
    storages: tuple[str, ...] = tuple(STORAGES),
) -> SearchStrategy[Example]:
    """Build a Hypothesis strategy of attention calls, from plain to perverse.

    Parameters
    ----------
    max_seqlen : int
        Bound of both sequence lengths; 0, 1, primes and the neighbours of tile sizes are drawn often.
    max_head_dim : int
        Bound of both head dims.
    max_batch : int
        Bound of the batch, which may be 0.
    max_heads : int
        Bound of batch times query heads.
    max_work : int
        Bound of `Example.work`, kept by leaving out keys.
    storages : tuple of str
        The names in `STORAGES` to draw from, for each array on its own.

    Returns
    -------
    hypothesis.strategies.SearchStrategy of Example
        Outputs have no fewer than 64 elements, unless they have none: the tolerance rule needs as many. Where
        ``max_seqlen * max_head_dim`` is less than 64, they may have fewer.
    """
    from hypothesis import strategies as st

    edges = [0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 61, 63, 64, 65, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257]
    dims = [1, 2, 7, 8, 16, 24, 32, 40, 48, 63, 64, 65, 72, 80, 96, 104, 112, 128, 136, 160, 192, 224, 248, 255, 256]
    seqlens = st.sampled_from([n for n in edges if n <= max_seqlen]) | st.integers(0, max_seqlen)
    head_dims = st.sampled_from([n for n in dims if n <= max_head_dim]) | st.integers(1, max_head_dim)

    @st.composite
    def examples(draw: Callable[[SearchStrategy[Any]], Any]) -> Example:
        batch = draw(st.integers(1, min(max_batch, max_heads)) | st.sampled_from([1] * 7 + [0]))
        heads = max_heads // max(1, batch)
        group = draw(st.integers(1, max(1, heads)))
        num_heads_k = draw(st.integers(1, max(1, heads // group)))
        seqlen_q, seqlen_k, head_dim = draw(seqlens), draw(seqlens), draw(head_dims)
        head_dim_v = draw(st.just(head_dim) | head_dims)
        num_heads = group * num_heads_k
        if 0 < batch * num_heads * seqlen_q * head_dim_v < 64:
            head_dim_v = min(max_head_dim, -(-64 // (batch * num_heads * seqlen_q)))
            seqlen_q = min(max_seqlen, max(seqlen_q, -(-64 // (batch * num_heads * head_dim_v))))
        per_key = batch * num_heads * seqlen_q * (head_dim + head_dim_v)
        seqlen_k = min(seqlen_k, max_work // max(1, per_key))
        offsets = st.integers(-seqlen_q - 2, seqlen_k + 2)
        align = st.sampled_from(["bottom-right", "top-left"]) | offsets | st.tuples(*[offsets] * batch)
        scale = st.sampled_from([None, None, None, 0.0, 1.0, -1.0]) | st.floats(-2, 2, width=32)
        storage = st.sampled_from(storages)
        return Example(
            dtype=draw(st.sampled_from(list(DTYPES))),
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            num_heads_k=num_heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=draw(st.booleans()),
            align=draw(align),
            softmax_scale=draw(scale),
            layout=draw(st.sampled_from(["bshd", "bhsd"])),
            storage=draw(st.tuples(storage, storage, storage)),
            mean=draw(st.sampled_from([0.0, 0.0, 1.0, -3.0])),
            seed=draw(st.integers(0, 2**32 - 1)),
        )

    return examples()
