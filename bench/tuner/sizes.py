"""What is timed: sizes of a call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cupy_fa2.device import Device
from cupy_fa2.kernel.forward import FwdSpec
from cupy_fa2.plan import plan_forward
from cupy_fa2.problem import Problem
from tuner.candidates import DTYPE
from tuner.tools import DTYPES, HIDDEN, PIECES, TOKENS, Arrays, visible_share

__all__ = ["Sizes", "asked", "title"]


def title(head_dim: int, head_dim_v: int, masked: bool) -> str:
    """A class and a mask, shortly."""
    return f"d{head_dim}" + (f"v{head_dim_v}" if head_dim_v != head_dim else "") + (" causal" if masked else "")


@dataclass(frozen=True)
class Sizes:
    """The tokens and the hidden size of the bench."""

    head_dim: int
    head_dim_v: int
    causal: bool
    seqlen: int
    dtype: str = DTYPE

    @property
    def batch(self) -> int:
        """Sequences that make up the tokens."""
        return max(TOKENS // self.seqlen, 1)

    @property
    def num_heads(self) -> int:
        """Heads that make up the hidden size."""
        return max(HIDDEN // self.head_dim, 1)

    def shape(self, dim: int) -> tuple[int, int, int, int]:
        """Of an array whose last axis is `dim`."""
        return self.batch, self.seqlen, self.num_heads, dim

    def flop(self, window: tuple[int, int] | None = None) -> float:
        """Floating-point operations of the pairs that are seen."""
        pairs = self.batch * self.num_heads * self.seqlen**2 * visible_share(self, window)
        return 2.0 * pairs * (self.head_dim + self.head_dim_v)

    def given(self, arrays: Arrays, features: Iterable[str]) -> dict[str, Any]:
        """The options that ask for `features`, names of `PIECES`."""
        made: dict[str, Any] = {}
        for name in features:
            made |= PIECES[name](arrays, self)
        return made


def asked(sizes: Sizes, features: Iterable[str], device: Device) -> FwdSpec:
    """The spec that a call with these features gets today."""
    arrays = Arrays()
    q, v = (arrays.normal(sizes.shape(dim), DTYPES[sizes.dtype]) for dim in (sizes.head_dim, sizes.head_dim_v))
    given = sizes.given(arrays, features)
    problem = Problem.from_arrays(q, q, v, causal=sizes.causal, addresses=(0, 0, 0, 0), **given)
    (launch,) = plan_forward(problem.structure, device).launches
    return launch.spec
