"""The public functions."""

from __future__ import annotations

from typing import Any

from cupy_fa2.call import flow
from cupy_fa2.problem.options import Options

__all__ = ["flash_attention"]


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: Any = "bottom-right",
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
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
    window : (left, right), optional
        Show to query i only the keys from its diagonal - left to its diagonal + right, both included. Each is an int of
        at least 0, or None for no bound; with `causal`, right is 0.
    align : {"bottom-right", "top-left"}, int, or int array (batch,)
        Where the diagonal lies: for query i at key ``i + offset``, with offset = seqlen_k - seqlen_q
        ("bottom-right": the last query sees the last key), 0 ("top-left"), or the number given (per batch element).
        "bottom-right" goes by `seqlens_q` and `seqlens_k` where they are given.
    softmax_scale : float, optional
        Factor of the scores, any finite number; ``1 / sqrt(head_dim)`` by default.
    softcap : float, optional
        Bend the scores s into ``softcap * tanh(s / softcap)``, before anything else is done to them.
    alibi_slopes : float32 array, (heads,) or (batch, heads), optional
        Subtract ``slope * |i + offset - j|`` from the score of query i and key j.
    bias : array, optional
        Added to the scores: of q's dtype or float32, and of any shape that broadcasts to (batch, num_heads, seqlen_q,
        seqlen_k) by NumPy's rules, whatever the layout. It is read in place, and never expanded. May be -inf.
    mask : bool array, optional
        True where a query may attend to a key; shapes as for `bias`.
    sinks : float32 array, (num_heads,), optional
        A logit per head that takes part in the softmax without a value: neither scaled nor capped nor hidden.
    seqlens_q, seqlens_k : int array, (batch,), optional
        Lengths of padded sequences, 0 to seqlen. Keys at or beyond theirs do not exist, whatever they hold; queries at
        or beyond theirs get out = 0 and lse = -inf. Best int32: others are converted first. Lengths on a device are
        not checked, but clamped.
    dropout_p : float
        Probability, at least 0 and less than 1, with which each of the softmax's probabilities is dropped; the others
        are divided by the probability of being kept. A multiple of 2^-16 is realised.
    dropout_seed : int or 0-d array of int64 or uint64, optional
        At least 0 and less than 2^64, or an array with 64 bits; wanted with ``dropout_p > 0``. An array on the device
        is read there, so that a captured graph drops others once the array has changed.
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
        Only with `return_lse`. Natural logarithm of ``sum_j exp(score_j)``, sinks included, dropout not.

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
    All options combine. Scores ``softmax_scale * q k^T`` are capped, then `alibi_slopes` and `bias` take effect, then
    lengths, `causal`, `window` and `mask` hide keys. Sinks take part in the softmax, and dropout comes after it.

    A query that may see no key gets out = 0, and lse = -inf or its sink. Scores accumulate in float32. NaN and inf
    beyond the sequence's end never matter; the values of hidden keys follow IEEE (0 x NaN is NaN).

    Arrays are read in place where their last axis is contiguous, rows start at 16-byte boundaries and head_dim is a
    multiple of 8; otherwise through one packed copy. `alibi_slopes`, `sinks`, `seqlens_q` and `seqlens_k` may be NumPy
    arrays or lists while q, k and v are on a device; they are then copied there, except during a CUDA graph's capture.

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
    # In the order of the fields: names would take longer than all that a warm call does with them.
    options = Options._make((
        causal, window, align, softmax_scale, softcap, alibi_slopes, bias, mask, sinks, seqlens_q, seqlens_k, dropout_p,
        dropout_seed, layout, out, out_dtype, return_lse,
    ))  # fmt: skip
    return flow.flash_attention(q, k, v, options)
