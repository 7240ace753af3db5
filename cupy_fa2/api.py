"""The public functions."""

from __future__ import annotations

from typing import Any

from cupy_fa2 import call
from cupy_fa2.options import Options

__all__ = ["flash_attention"]


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    align: Any = "bottom-right",
    softmax_scale: float | None = None,
    layout: str = "bshd",
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
) -> Any:
    r"""Exact attention, ``softmax(softmax_scale * q k^T) v``, without ever storing the scores.

    The arrays decide where it runs: CuPy arrays, and arrays of other libraries on a CUDA device (DLPack or
    ``__cuda_array_interface__``), on that device and on CuPy's current stream; NumPy arrays in the simulator.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads, head_dim)
        Queries, float16 or bfloat16 (``ml_dtypes.bfloat16``).
    k : array, (batch, seqlen_k, num_heads_k, head_dim)
        Keys, of q's dtype. ``num_heads`` is a multiple of ``num_heads_k``; query head h meets key head
        ``h // (num_heads // num_heads_k)``.
    v : array, (batch, seqlen_k, num_heads_k, head_dim_v)
        Values, of q's dtype. head_dim and head_dim_v are 1 to 256, alike or not.
    causal : bool
        Hide from query i the keys beyond its diagonal.
    align : {"bottom-right", "top-left"}, int, or int array (batch,)
        Where the diagonal lies: for query i at key ``i + offset``, with offset = seqlen_k - seqlen_q
        ("bottom-right": the last query sees the last key), 0 ("top-left"), or the number given (per batch element).
    softmax_scale : float, optional
        Factor of the scores, any finite number; ``1 / sqrt(head_dim)`` by default.
    layout : {"bshd", "bhsd"}
        Order of the axes of q, k, v and out: (batch, seqlen, heads, head_dim) or (batch, heads, seqlen, head_dim).
    out : array, optional
        Where to put the result. Any strides that are whole items, as long as the axes nest without overlapping each
        other or an input.
    out_dtype : dtype, optional
        q's dtype (default) or float32, which partial results to be merged want.
    return_lse : bool
        Return the logarithm of the softmax's denominator too.

    Returns
    -------
    out : array, (batch, seqlen_q, num_heads, head_dim_v)
        In the caller's layout; `cupy.ndarray`, or `numpy.ndarray` from the simulator.
    lse : array, (batch, num_heads, seqlen_q), float32
        Only with `return_lse`. Natural logarithm of ``sum_j exp(score_j)``.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched or written, naming the argument, what it was and what it may be.
    RuntimeError
        On a GPU older than sm_80; or during the capture of a CUDA graph, if the call would have to compile or copy.
    cupy_fa2.CompileError
        If NVRTC is missing.

    Notes
    -----
    A query that may see no key gets out = 0 and lse = -inf. Scores accumulate in float32. NaN and inf beyond the
    sequence's end never matter; the values of hidden keys follow IEEE (0 x NaN is NaN).

    Arrays are read in place where their last axis is contiguous, rows start at 16-byte boundaries and head_dim is a
    multiple of 8; otherwise through one packed copy.

    The algorithm is FlashAttention-2's: T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
    Partitioning", 2023, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np, cupy_fa2
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 64, 2, 32)).astype(np.float16) for _ in range(3))
    >>> cupy_fa2.flash_attention(q, k, v, causal=True).shape
    (1, 64, 2, 32)
    """
    options = Options(
        causal=causal,
        align=align,
        softmax_scale=softmax_scale,
        layout=layout,
        out=out,
        out_dtype=out_dtype,
        return_lse=return_lse,
    )
    return call.flash_attention(q, k, v, options)
