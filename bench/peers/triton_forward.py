"""A plain forward attention in Triton, to compare with: what one gets from that compiler in sixty lines.

Each (batch, head, block of rows) is a program: whole key blocks first, then those that the diagonal crosses. Sequence
lengths are multiples of the blocks, as all rows of the bench are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["forward"]

# (block_m, block_n, num_warps, num_stages) that are tried, by head_dim.
CONFIGS: dict[int, list[tuple[int, int, int, int]]] = {
    64: [(128, 64, 4, 3), (128, 128, 8, 2)],
    128: [(128, 64, 8, 3), (128, 128, 8, 2)],
    256: [(128, 64, 8, 2), (128, 32, 8, 3)],
}
_best: dict[tuple[int, bool], tuple[int, int, int, int]] = {}


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k, v, begin, end, stride, rows, scale,
    MASKED: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BN)
    dims = tl.arange(0, D)
    for first in range(begin, end, BN):
        keys = first + columns
        k_tile = tl.load(k + keys[None, :] * stride + dims[:, None])
        s = tl.dot(q, k_tile) * scale
        if MASKED:
            s = tl.where(rows[:, None] >= keys[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.math.exp2(s - new_max[:, None])
        shrink = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v_tile = tl.load(v + keys[:, None] * stride + dims[None, :])
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _forward(
    q, k, v, out, scale, batch_stride, stride, heads, seqlen,
    CAUSAL: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if CAUSAL:  # the longest rows first
        block = tl.num_programs(0) - 1 - block
    head = tl.program_id(1)
    base = (head // heads).to(tl.int64) * batch_stride + (head % heads) * D
    rows = block * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    at = rows[:, None] * stride + dims[None, :]
    q_tile = tl.load(q + base + at)
    acc = tl.zeros((BM, D), tl.float32)
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    whole = block * BM if CAUSAL else seqlen
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q_tile, k + base, v + base, 0, whole, stride, rows, scale, False, D, BN
    )
    if CAUSAL:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q_tile, k + base, v + base, whole, whole + BM, stride, rows, scale, True, D, BN
        )
    tl.store(out + base + at, (acc / row_sum[:, None]).to(out.dtype.element_ty))


def _launch(q: Any, k: Any, v: Any, out: Any, causal: bool, config: tuple[int, int, int, int]) -> None:
    batch, seqlen, heads, head_dim = q.shape
    block_m, block_n, num_warps, num_stages = config
    _forward[(seqlen // block_m, batch * heads)](
        q, k, v, out, math.log2(math.e) / math.sqrt(head_dim), q.stride(0), q.stride(1), heads, seqlen,
        CAUSAL=causal, D=head_dim, BM=block_m, BN=block_n, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Attention of contiguous (batch, seqlen, heads, head_dim) torch tensors; seqlen a multiple of 128."""
    out = torch.empty_like(q)
    key = (q.shape[3], causal)
    if key not in _best:
        _best[key] = _choose(q, k, v, out, causal)
    _launch(q, k, v, out, causal, _best[key])
    return out


def _choose(q: Any, k: Any, v: Any, out: Any, causal: bool) -> tuple[int, int, int, int]:
    """The fastest of the few configurations; those that do not fit the card drop out."""
    times = []
    failure: Exception | None = None
    for config in CONFIGS[q.shape[3]]:
        try:
            _launch(q, k, v, out, causal, config)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                _launch(q, k, v, out, causal, config)
            end.record()
            end.synchronize()
            times.append((begin.elapsed_time(end), config))
        except Exception as error:
            failure = error
    if not times:
        raise RuntimeError(f"no configuration runs: {failure}")
    return min(times)[1]
