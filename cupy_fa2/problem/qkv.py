"""q, k, v and out: their dtypes, sizes and strides, and which of them have to be copied first."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from cupy_fa2.kernel.params import MAX_SEQLEN

__all__ = [
    "IN_DTYPES",
    "OUT_DTYPES",
    "check_input",
    "check_out",
    "check_out_dtype",
    "check_sizes",
    "element_strides",
    "needs_copy",
    "packed_strides",
    "padded_head_dim",
    "padded_strides",
    "stores_vectors",
]

MAX_HEAD_DIM = 256

#: NumPy dtype -> the kernels' name for it.
IN_DTYPES: dict[np.dtype[Any], str] = {np.dtype(np.float16): "f16", np.dtype(ml_dtypes.bfloat16): "bf16"}
OUT_DTYPES: dict[np.dtype[Any], str] = {**IN_DTYPES, np.dtype(np.float32): "float"}

_OUT_ITEMSIZE = {name: dtype.itemsize for dtype, name in OUT_DTYPES.items()}

_VECTOR = 16  # bytes of a cp.async and of a vector store


def padded_head_dim(head_dim: int) -> int:
    """The head dimension of a copy: up to the next multiple of 8, so that rows are whole 16-byte chunks."""
    return -(-head_dim // 8) * 8


def _dtype_hint(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "f":
        return "; convert with x.astype(numpy.float16) or x.astype(ml_dtypes.bfloat16)"
    if dtype.itemsize == 2 and dtype.kind in "uV":
        return "; if these are bfloat16 bits, pass x.view(ml_dtypes.bfloat16)"
    return ""


def check_input(name: str, x: Any, layout: str) -> None:
    """Raise unless `x` has four axes and a dtype that kernels take."""
    dtype = np.dtype(x.dtype)
    if not dtype.isnative:
        raise TypeError(f"{name} is byte-swapped ({dtype.str}); pass {name}.astype({name}.dtype.newbyteorder('='))")
    if dtype not in IN_DTYPES:
        raise TypeError(f"{name} must be float16 or bfloat16 (ml_dtypes.bfloat16), got {dtype}{_dtype_hint(dtype)}")
    if len(x.shape) != 4:
        axes = "(batch, seqlen, heads, head_dim)" if layout == "bshd" else "(batch, heads, seqlen, head_dim)"
        raise ValueError(f"{name} must have 4 axes, {axes}, got shape {tuple(x.shape)}")


def check_sizes(q: Any, k: Any, v: Any, order: tuple[int, ...]) -> tuple[int, int, int, int, int, int, int]:
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


def check_out_dtype(out_dtype: Any, dtype: Any, out: Any) -> str:
    """The kernels' name for the result's dtype."""
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


def check_out(out: Any, shape: tuple[int, ...], kind: str, address: int) -> tuple[int, ...]:
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


def stores_vectors(head_dim_v: int, strides: tuple[int, ...], kind: str, address: int) -> bool:
    """Whether out can be stored by 16 bytes; strides are in elements, over (batch, seqlen, heads, head_dim)."""
    item = _OUT_ITEMSIZE[kind]
    return (
        head_dim_v % 8 == 0
        and strides[3] == 1
        and all(stride * item % _VECTOR == 0 for stride in strides[:3])
        and address % _VECTOR == 0
    )


def needs_copy(shape: tuple[int, ...], strides: tuple[int, ...], address: int) -> bool:
    """Whether q, k or v cannot be read in place: rows start at 16-byte boundaries and are whole vectors."""
    rows = zip(strides[:3], shape[:3], strict=True)
    in_place = (
        shape[3] % 8 == 0
        and (strides[3] == 2)
        and all(stride % _VECTOR == 0 for stride, size in rows if size > 1)
        and address % _VECTOR == 0
    )
    return not in_place and math.prod(shape) > 0


def element_strides(x: Any, order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements, 0 where an axis has a single step and its stride means nothing."""
    return tuple(0 if x.shape[axis] <= 1 else int(x.strides[axis]) // 2 for axis in order)


def packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a C-contiguous array, in elements."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def padded_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the packed copy, in the order (batch, seqlen, heads)."""
    packed = packed_strides((*shape[:3], padded_head_dim(shape[3])))
    return tuple(packed[axis] for axis in order[:3])
