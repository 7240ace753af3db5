"""One call, validated and normalised: the only place that does either.

Nothing here touches an array's contents or knows whether it lives on a GPU: shapes, strides, dtypes and addresses are
enough, and CuPy and NumPy spell them alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupy_fa2.options import LAYOUTS, Options, check_align, check_bool, check_layout, check_scale
from cupy_fa2.params import DROPOUT_ONE, MAX_SEQLEN
from cupy_fa2.spec import Features, Operand

__all__ = ["MAX_HEAD_DIM", "OUT_DTYPES", "Problem"]

MAX_HEAD_DIM = 256

#: NumPy dtype -> the kernels' name for it.
IN_DTYPES: dict[np.dtype[Any], str] = {np.dtype(np.float16): "f16", np.dtype(ml_dtypes.bfloat16): "bf16"}
OUT_DTYPES: dict[np.dtype[Any], str] = {**IN_DTYPES, np.dtype(np.float32): "float"}

_OUT_ITEMSIZE = {name: dtype.itemsize for dtype, name in OUT_DTYPES.items()}

_VECTOR = 16  # bytes of a cp.async and of a vector store


@dataclass(frozen=True)
class Problem:
    """What one call asks for.

    Attributes
    ----------
    dtype, out_dtype : str
        The kernels' names: ``"f16"``, ``"bf16"``, ``"float"``.
    batch, seqlen_q, seqlen_k, num_heads, num_heads_k, head_dim, head_dim_v : int
    layout : {"bshd", "bhsd"}
    diagonal : int or None
        Query i's diagonal is key ``i + diagonal``. None: an array holds one number per batch element.
    softmax_scale : float
    strides_q, strides_k, strides_v, strides_out : tuple of int
        In elements, over (batch, seqlen, heads) and for out also head_dim; 0 along axes of length 1.
    copied : tuple of bool
        Whether q, k, v have to be copied first: their rows do not start at 16-byte boundaries, their last axis is not
        contiguous, or head_dim is no multiple of 8. The strides are then those of the copies.
    out_vectors : bool
        Whether out can be stored by 16 bytes.
    window_left, window_right : int or None
        How many keys before and beyond its diagonal a query sees; None: all. `causal` makes the second 0.
    diagonal_from_end : bool
        Whether `diagonal` counts from the end of the batch element's keys minus that of its queries.
    softcap : float or None
    strides_alibi : tuple of int
        Of the slopes in elements, over (batch, heads).
    bias, mask : Operand or None
    strides_bias, strides_mask : tuple of int
        In elements, over (batch, heads, seqlen_q, seqlen_k); 0 along axes of length 1, which are broadcast.
    alibi, sinks, seqlens_q, seqlens_k : bool
        Whether the call has them.
    stride_sinks : int
    dropout_threshold : int
        Out of 65536, probabilities that are kept.
    """

    dtype: str
    out_dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_k: int
    head_dim: int
    head_dim_v: int
    layout: str
    diagonal: int | None
    softmax_scale: float
    strides_q: tuple[int, ...]
    strides_k: tuple[int, ...]
    strides_v: tuple[int, ...]
    strides_out: tuple[int, ...]
    copied: tuple[bool, bool, bool]
    out_vectors: bool
    window_left: int | None = None
    window_right: int | None = None
    diagonal_from_end: bool = False
    softcap: float | None = None
    alibi: bool = False
    strides_alibi: tuple[int, ...] = (0, 0)
    bias: Operand | None = None
    strides_bias: tuple[int, ...] = (0, 0, 0, 0)
    mask: Operand | None = None
    strides_mask: tuple[int, ...] = (0, 0, 0, 0)
    sinks: bool = False
    stride_sinks: int = 0
    seqlens_q: bool = False
    seqlens_k: bool = False
    dropout_threshold: int = DROPOUT_ONE

    @property
    def causal(self) -> bool:
        """Whether keys beyond some diagonal are hidden."""
        return self.window_right is not None

    @property
    def features(self) -> Features:
        """What the kernel has to be able to do."""
        signed = self.softcap is not None or self.alibi or self.bias is not None
        return Features(
            causal=self.causal,
            window=self.window_left is not None,
            negate=self.softmax_scale < 0 and not signed,
            softcap=self.softcap is not None,
            alibi=self.alibi,
            bias=self.bias,
            mask=self.mask,
            sinks=self.sinks,
            padded=self.seqlens_q or self.seqlens_k,
            dropout=self.dropout_threshold < DROPOUT_ONE,
        )

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of out in the caller's layout."""
        shape = (self.batch, self.seqlen_q, self.num_heads, self.head_dim_v)
        a, b, c, d = (shape[axis] for axis in LAYOUTS[self.layout])
        return a, b, c, d

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Shape of lse, in any layout."""
        return self.batch, self.num_heads, self.seqlen_q

    @property
    def tensor_maps(self) -> bool:
        """Whether tensor maps can describe k and v as arrays: at least one key, and strides that step forward.

        The driver takes strides of up to 2**40 bytes in multiples of 16 and sizes of up to 2**32.
        """
        sizes = (self.batch, self.seqlen_k, self.num_heads_k)
        return all(0 < size <= 2**32 for size in sizes) and all(
            size == 1 or 0 < 2 * stride < 2**40
            for strides in (self.strides_k, self.strides_v)
            for size, stride in zip(sizes, strides, strict=True)
        )

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the two matrix products, masked, padded or not."""
        pairs = self.batch * self.num_heads * self.seqlen_q * self.seqlen_k
        return pairs * (self.head_dim + self.head_dim_v)

    @staticmethod
    def from_arrays(
        q: Any,
        k: Any,
        v: Any,
        options: Options = Options(),  # noqa: B008  # immutable
        *,
        addresses: tuple[int, int, int, int],
        **given: Any,
    ) -> Problem:
        """Check every argument and normalise it.

        Parameters
        ----------
        q, k, v : array
            Anything with ``shape``, ``strides`` and ``dtype``; so is out, among the options.
        options : Options
            What the call was given beside them.
        addresses : tuple of int
            Where q, k, v and out start in memory (0 for no out).
        **given
            Fields of `options` that are others.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what it was and what it may be.
        """
        options = options._replace(**given) if given else options
        layout, out = check_layout(options.layout), options.out
        causal = check_bool("causal", options.causal)
        order = LAYOUTS[layout]
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check_input(name, x, layout)
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")

        batch, seqlen_q, seqlen_k, num_heads, num_heads_k, head_dim, head_dim_v = _check_sizes(q, k, v, order)
        scale = check_scale(options.softmax_scale, head_dim)
        diagonal = check_align(options.align, batch, seqlen_q, seqlen_k)
        out_kind = _check_out_dtype(options.out_dtype, q.dtype, out)
        out_shape = tuple((batch, seqlen_q, num_heads, head_dim_v)[axis] for axis in order)
        out_strides = _packed_strides(out_shape)
        if out is not None:
            out_strides = _check_out(out, out_shape, out_kind, addresses[3])

        copied, strides = [], []
        for x, address in zip((q, k, v), addresses[:3], strict=True):
            copy = _needs_copy(x.shape, x.strides, address)
            copied.append(copy)
            strides.append(_padded_strides(x.shape, order) if copy else _element_strides(x, order)[:3])
        item = _OUT_ITEMSIZE[out_kind]
        strides_out = tuple(0 if out_shape[axis] == 1 else out_strides[axis] for axis in order)
        vectors = (
            head_dim_v % 8 == 0
            and strides_out[3] == 1
            and all(stride * item % _VECTOR == 0 for stride in strides_out[:3])
            and addresses[3] % _VECTOR == 0
        )
        return Problem(
            dtype=IN_DTYPES[q.dtype],
            out_dtype=out_kind,
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            num_heads_k=num_heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            layout=layout,
            window_right=0 if causal else None,
            diagonal=diagonal,
            softmax_scale=scale,
            strides_q=strides[0],
            strides_k=strides[1],
            strides_v=strides[2],
            strides_out=strides_out,
            copied=(copied[0], copied[1], copied[2]),
            out_vectors=vectors,
        )


def padded_head_dim(head_dim: int) -> int:
    """The head dimension of a copy: up to the next multiple of 8, so that rows are whole 16-byte chunks."""
    return -(-head_dim // 8) * 8


def _dtype_hint(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "f":
        return "; convert with x.astype(numpy.float16) or x.astype(ml_dtypes.bfloat16)"
    if dtype.itemsize == 2 and dtype.kind in "uV":
        return "; if these are bfloat16 bits, pass x.view(ml_dtypes.bfloat16)"
    return ""


def _check_input(name: str, x: Any, layout: str) -> None:
    dtype = np.dtype(x.dtype)
    if not dtype.isnative:
        raise TypeError(f"{name} is byte-swapped ({dtype.str}); pass {name}.astype({name}.dtype.newbyteorder('='))")
    if dtype not in IN_DTYPES:
        raise TypeError(f"{name} must be float16 or bfloat16 (ml_dtypes.bfloat16), got {dtype}{_dtype_hint(dtype)}")
    if len(x.shape) != 4:
        axes = "(batch, seqlen, heads, head_dim)" if layout == "bshd" else "(batch, heads, seqlen, head_dim)"
        raise ValueError(f"{name} must have 4 axes, {axes}, got shape {tuple(x.shape)}")


def _check_sizes(q: Any, k: Any, v: Any, order: tuple[int, ...]) -> tuple[int, int, int, int, int, int, int]:
    """Batch, lengths, heads and head dimensions, if q, k and v agree on them."""
    batch, seqlen_q, num_heads, head_dim = (int(q.shape[axis]) for axis in order)
    batch_k, seqlen_k, num_heads_k, head_dim_k = (int(k.shape[axis]) for axis in order)
    batch_v, seqlen_v, num_heads_v, head_dim_v = (int(v.shape[axis]) for axis in order)
    if (batch_k, batch_v) != (batch, batch):
        raise ValueError(f"q, k and v must have one batch size, got {batch}, {batch_k} and {batch_v}")
    if seqlen_v != seqlen_k:
        raise ValueError(f"k and v must have one sequence length, got {seqlen_k} and {seqlen_v}")
    if num_heads_v != num_heads_k:
        raise ValueError(f"k and v must have one number of heads, got {num_heads_k} and {num_heads_v}")
    if head_dim_k != head_dim:
        raise ValueError(f"q and k must have one head_dim, got {head_dim} and {head_dim_k}")
    for name, size in (("q and k", head_dim), ("v", head_dim_v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim of {name} must be 1 to {MAX_HEAD_DIM}, got {size}")
    if (num_heads_k == 0 and num_heads != 0) or (num_heads_k != 0 and num_heads % num_heads_k):
        raise ValueError(f"heads of q must be a multiple of those of k and v, got {num_heads} and {num_heads_k}")
    for name, length in (("q", seqlen_q), ("k and v", seqlen_k)):
        if length > MAX_SEQLEN:
            raise ValueError(f"sequence length of {name} must be at most {MAX_SEQLEN}, got {length}")
    return batch, seqlen_q, seqlen_k, num_heads, num_heads_k, head_dim, head_dim_v


def _check_out_dtype(out_dtype: Any, dtype: Any, out: Any) -> str:
    default = dtype if out is None else out.dtype
    try:
        wanted = np.dtype(default if out_dtype is None else out_dtype)
    except TypeError as error:
        raise TypeError(f"out_dtype must be {dtype} (the inputs' own) or float32, got {out_dtype!r}") from error
    if not wanted.isnative or wanted not in (np.dtype(dtype), np.dtype(np.float32)):
        name = "out" if out_dtype is None else "out_dtype"
        raise TypeError(f"{name} must be {dtype} (the inputs' own dtype) or float32, got {wanted}")
    if out is not None and np.dtype(out.dtype) != wanted:
        raise TypeError(f"out has dtype {out.dtype}, but out_dtype asks for {wanted}")
    return OUT_DTYPES[wanted]


def _check_out(out: Any, shape: tuple[int, ...], kind: str, address: int) -> tuple[int, ...]:
    """Strides of `out` in elements, if it can be written to."""
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    item = _OUT_ITEMSIZE[kind]
    if address % item:
        raise ValueError(f"out must begin at a multiple of its item size {item}, got address {address:#x}")
    if any(stride % item for stride, size in zip(out.strides, shape, strict=True) if size > 1):
        raise ValueError(f"out must have strides that are multiples of its item size {item}, got {out.strides}")
    # Every element a place of its own: each axis must step over all that the finer ones span. (Some interleavings that
    # do not overlap are refused with those that do.)
    span = 1
    for stride, size in sorted((abs(s) // item, n) for s, n in zip(out.strides, shape, strict=True) if n > 1):
        if stride < span:
            raise ValueError(
                "out must not overlap itself or interleave its axes, got shape "
                f"{shape} with strides {tuple(out.strides)}"
            )
        span = stride * (size - 1) + span
    return tuple(int(stride) // item for stride in out.strides)


def _needs_copy(shape: tuple[int, ...], strides: tuple[int, ...], address: int) -> bool:
    rows = zip(strides[:3], shape[:3], strict=True)
    in_place = (
        shape[3] % 8 == 0
        and (strides[3] == 2)
        and all(stride % _VECTOR == 0 for stride, size in rows if size > 1)
        and address % _VECTOR == 0
    )
    return not in_place and math.prod(shape) > 0


def _element_strides(x: Any, order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements, 0 where an axis has a single step and its stride means nothing."""
    return tuple(0 if x.shape[axis] <= 1 else int(x.strides[axis]) // 2 for axis in order)


def _packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def _padded_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the packed copy, in the order (batch, seqlen, heads)."""
    packed = _packed_strides((*shape[:3], padded_head_dim(shape[3])))
    return tuple(packed[axis] for axis in order[:3])
