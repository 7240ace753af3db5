"""Time and memory of calls on a GPU, and the attention that a CuPy user writes by hand, to compare with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["attention_by_hand", "attention_flop", "median_ms", "peak_bytes"]


def attention_flop(batch: int, num_heads: int, seqlen: int, head_dim: int, causal: bool) -> float:
    """Floating-point operations of a forward: two products of ``2 S S D`` each, half of them where causal."""
    return 4.0 * batch * num_heads * seqlen * seqlen * head_dim / (2 if causal else 1)


def median_ms(call: Callable[[], Any], *, repeat: int = 20, warm_up: int = 2) -> float:
    """Milliseconds of `call` on the current stream: CUDA events around each of `repeat` calls, and their median.

    The calls are queued without waiting in between, so that the time of the host's work is hidden wherever it is
    shorter than the GPU's.
    """
    import cupy

    for _ in range(warm_up):
        call()
    events = [cupy.cuda.Event() for _ in range(repeat + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return float(np.median([cupy.cuda.get_elapsed_time(begin, end) for begin, end in itertools.pairwise(events)]))


def peak_bytes(call: Callable[[], Any]) -> int:
    """Bytes that `call` makes CuPy take from the device, its inputs aside: the size that a fresh pool grows to."""
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        result = call()
        cupy.cuda.get_current_stream().synchronize()
        peak = int(pool.total_bytes())
        del result
    pool.free_all_blocks()
    return peak


def attention_by_hand(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Attention as a CuPy user writes it without this package: matmul, softmax, matmul.

    Parameters
    ----------
    q, k, v : cupy.ndarray
        (batch, seqlen, heads, head_dim), float16; `k` and `v` may have fewer heads.
    causal : bool
    """
    import cupy

    xp = cupy.get_array_module(q)  # NumPy for the tests
    if k.shape[2] != q.shape[2]:
        k, v = (xp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    s = xp.matmul(q, k.transpose(0, 1, 3, 2)) * (1 / math.sqrt(q.shape[3]))
    if causal:
        rows, columns = s.shape[2:]
        s = xp.where(xp.tri(rows, columns, columns - rows, dtype=bool), s, -math.inf)
    p = xp.exp(s - s.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    return xp.matmul(p, v).transpose(0, 2, 1, 3)
