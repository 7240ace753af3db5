"""The rows of the bench.

16k tokens in all and a hidden size of 2,048, as in FlashAttention-2's paper; the longest sequence takes 64k tokens.
Arrays then have 67 MB each (268 MB with 64k tokens), more than the second-level cache of any card: no row needs its
inputs rotated or the cache flushed to be measured cold.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HIDDEN", "Case", "cases"]

HIDDEN = 2048
TOKENS = 16_384
DTYPES = ("f16", "bf16")
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384, 65_536)


@dataclass(frozen=True)
class Case:
    """One row: what is computed.

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
    def elements(self) -> int:
        """Elements of each array."""
        return self.batch * self.seqlen * HIDDEN

    @property
    def flop(self) -> float:
        """Floating-point operations: two products of ``2 S S D`` per head, half of them where causal."""
        return 4.0 * self.batch * self.num_heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)

    @property
    def label(self) -> str:
        """Short and unique."""
        return f"{self.dtype} d{self.head_dim} {'causal' if self.causal else 'full'} {self.seqlen}"


def cases(quick: bool = False) -> list[Case]:
    """All rows, or those of ``--quick``, which are a subset."""
    return [
        Case(dtype, head_dim, causal, seqlen)
        for head_dim in HEAD_DIMS
        for causal in (False, True)
        for dtype in DTYPES
        for seqlen in ((1024, 8192) if quick else SEQLENS)
    ]
