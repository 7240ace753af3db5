"""Whole calls, and a Hypothesis strategy of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_fa2.reference import Layout, Options

from .arrays import DTYPES, STORAGES, poisoned, random_qkv

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


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
