"""Sizes of a self-attention call with as many tokens as the others.

16k tokens in all and a hidden size of 2,048, as in FlashAttention-2's paper; the longest sequence takes 64k tokens.
Arrays then have 67 MB each (268 MB with 64k tokens), more than the second-level cache of any card: what a call finds
there is little, whether or not L2 is flushed before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.results import row_name

__all__ = ["HIDDEN", "TOKENS", "Case", "visible_share"]

HIDDEN = 2048
TOKENS = 16_384


@dataclass(frozen=True)
class Case:
    """What is computed.

    Attributes
    ----------
    dtype : {"f16", "bf16"}
    head_dim : int
    causal : bool
    seqlen : int
    """

    dtype: str
    head_dim: int
    causal: bool
    seqlen: int

    @property
    def batch(self) -> int:
        """Sequences that make up the tokens."""
        return max(TOKENS // self.seqlen, 1)

    @property
    def num_heads(self) -> int:
        """Heads that make up the hidden size."""
        return HIDDEN // self.head_dim

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, seqlen, heads, head_dim) of each array."""
        return self.batch, self.seqlen, self.num_heads, self.head_dim

    @property
    def flop(self) -> float:
        """Floating-point operations: two products of ``2 S S D`` per head, half of them where causal."""
        return 4.0 * self.batch * self.num_heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)

    @property
    def name(self) -> str:
        """Short and unique."""
        return row_name(self.dtype, self.head_dim, self.causal, self.seqlen)

    @property
    def fields(self) -> dict[str, object]:
        """The sizes as a result has them."""
        names = ("dtype", "head_dim", "causal", "seqlen", "batch", "num_heads")
        return {name: getattr(self, name) for name in names}


def visible_share(case: Case, window: tuple[int, int] | None = None) -> float:
    """Pairs of query and key that are seen, of all; a causal mask's count as half, as FLOPs are counted."""
    if window is None:
        return 0.5 if case.causal else 1.0
    row = np.arange(case.seqlen)
    last = np.minimum(row + (0 if case.causal else window[1]), case.seqlen - 1)
    first = np.maximum(row - window[0], 0)
    return float((last - first + 1).sum() / case.seqlen**2)
