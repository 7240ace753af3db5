"""Whole calls, and a Hypothesis strategy of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_fa2.reference import Layout

from .score_arrays import SCORE_ARRAY_AXES, SCORE_ARRAY_STORAGES, random_bias, random_mask
from .storage import DTYPES, STORAGES, poisoned, random_qkv

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Example:
    """One attention call, small enough to print.

    `alibi` names the axes of the slopes, "h" or "bh"; True is "h". `bias` and `mask` are a word for their axes and
    more for their contents: "bhqk", "b11k f32 holes"; `random_bias` and `random_mask` say which. Their arrays, and
    those of `sinks` and lengths, are drawn from `seed` by `option_arrays`.
    """

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
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool | str = False
    bias: str | None = None
    bias_storage: str = "contiguous"
    mask: str | None = None
    mask_storage: str = "contiguous"
    sinks: bool = False
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0

    def arrays(self, xp: Any = np) -> tuple[Any, Any, Any]:
        """Make q, k and v, lying as `storage` says among NaN; NaN are the rows beyond a batch element's length too."""
        drawn = random_qkv(
            *(self.batch, self.seqlen_q, self.seqlen_k, self.num_heads, self.head_dim),
            num_heads_k=self.num_heads_k,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            mean=self.mean,
            seed=self.seed,
        )
        lengths = (self.seqlens_q, self.seqlens_k, self.seqlens_k)
        for values, storage, lens in zip(drawn, self.storage, lengths, strict=True):
            _poison_beyond(values, storage, lens)
        placed = (
            poisoned(values.shape, values.dtype, storage, values=values, xp=xp)
            for values, storage in zip(drawn, self.storage, strict=True)
        )
        q, k, v = (x.transpose(0, 2, 1, 3) if self.layout == "bhsd" else x for x in placed)
        return q, k, v

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call, with NumPy arrays: those that the call does not need are left out.

        For a call on a device, ``example.options | example.option_arrays(cupy)``.
        """
        align: Any = np.array(self.align, np.int64) if isinstance(self.align, tuple) else self.align
        options: dict[str, Any] = {
            "causal": self.causal,
            "align": align,
            "softmax_scale": self.softmax_scale,
            "layout": self.layout,
        }
        if self.window is not None:
            options["window"] = self.window
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.dropout_p:
            options |= {"dropout_p": self.dropout_p, "dropout_seed": self.dropout_seed}
        return options | self.option_arrays()

    def option_arrays(self, xp: Any = np) -> dict[str, Any]:
        """Make the arrays among the options, on the device of `xp`: the same ones each time."""
        arrays: dict[str, Any] = {}
        sizes = {"b": self.batch, "h": self.num_heads, "q": self.seqlen_q, "k": self.seqlen_k}
        if self.alibi:
            axes = "h" if self.alibi is True else self.alibi
            slopes = self._rng(1).exponential(0.1, [sizes[axis] for axis in axes])
            arrays["alibi_slopes"] = xp.asarray(slopes.astype(np.float32))
        if self.bias is not None:
            arrays["bias"] = random_bias(
                self.bias, sizes, self.dtype, self.bias_storage, rng=self._rng(2), seqlens_k=self.seqlens_k, xp=xp
            )
        if self.mask is not None:
            arrays["mask"] = random_mask(self.mask, sizes, self.mask_storage, rng=self._rng(3), xp=xp)
        if self.sinks:
            arrays["sinks"] = xp.asarray(self._rng(4).normal(0, 2, self.num_heads).astype(np.float32))
        if self.seqlens_q is not None:
            arrays["seqlens_q"] = xp.asarray(np.array(self.seqlens_q, np.int32))
        if self.seqlens_k is not None:
            arrays["seqlens_k"] = xp.asarray(np.array(self.seqlens_k, np.int32))
        return arrays

    def _rng(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, purpose))

    @property
    def work(self) -> int:
        """Multiply-adds of the call, masked ones included."""
        pairs = self.batch * self.num_heads * self.seqlen_q * self.seqlen_k
        return pairs * (self.head_dim + self.head_dim_v)

    def contiguous(self) -> Example:
        """Return the same call on C-contiguous arrays in (batch, seqlen, heads, head_dim) order."""
        plain = "contiguous"
        return replace(self, storage=(plain,) * 3, layout="bshd", bias_storage=plain, mask_storage=plain)


def _poison_beyond(values: Any, storage: str, lengths: tuple[int, ...] | None) -> None:
    """NaN from each batch element's length on; where one element stands for all, from the longest's."""
    if not lengths:
        return
    if STORAGES[storage](values.shape).step[0] == 0:
        lengths = (max(lengths),) * len(lengths)
    for b, length in enumerate(lengths):
        values[b, length:] = np.nan


def attention_examples(
    *,
    max_seqlen: int = 150,
    max_head_dim: int = 256,
    max_batch: int = 3,
    max_heads: int = 6,
    max_work: int = 1 << 26,
    storages: tuple[str, ...] = tuple(STORAGES),
    options: bool = False,
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
    options : bool
        Draw windows, softcap, ALiBi, bias, mask, sinks, lengths and dropout too, in any combination.

    Returns
    -------
    hypothesis.strategies.SearchStrategy of Example
        Outputs have no fewer than 64 elements in rows that exist, unless they have none: the tolerance rule needs as
        many. Where ``max_seqlen * max_head_dim`` is less than 64, they may have fewer.
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
        plain = Example(
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
        return replace(plain, **draw(_options(plain))) if options else plain

    return examples()


def _options(e: Example) -> SearchStrategy[dict[str, Any]]:
    """The fields of options to replace in a plain example: each is off more often than not."""
    from hypothesis import strategies as st

    def lengths(seqlen: int) -> SearchStrategy[Any]:
        one = st.sampled_from([0, seqlen, max(0, seqlen - 1), seqlen // 2]) | st.integers(0, seqlen)
        return st.tuples(*[one] * e.batch)

    def score_array(*contents: str) -> SearchStrategy[str]:
        return st.tuples(st.sampled_from(SCORE_ARRAY_AXES), st.sampled_from(contents)).map(" ".join).map(str.strip)

    bound = st.sampled_from([None, None, 0, 1, 16, 63, 64, 10**9, 2**40]) | st.integers(0, e.seqlen_k + 2)
    off = st.none()
    storage = st.sampled_from(SCORE_ARRAY_STORAGES)
    drawn = {
        "window": off | off | st.tuples(bound, bound),
        "softcap": off | off | st.sampled_from([0.5, 5.0, 30.0, 50.0]),
        "alibi": st.sampled_from([False, False, False, "h", "bh"]),
        "bias": off | off | score_array("", "", "holes", "f32", "f32 holes", "f32 far"),
        "bias_storage": storage,
        "mask": off | off | score_array("", "", "rows", "sparse"),
        "mask_storage": storage,
        "sinks": st.sampled_from([False, False, True]),
        "seqlens_q": off | off | lengths(e.seqlen_q).map(lambda lens: _enough(e, lens)),
        "seqlens_k": off | off | lengths(e.seqlen_k),
        "dropout_p": st.sampled_from([0.0] * 4 + [0.1, 0.5, 0.9]),
        "dropout_seed": st.integers(0, 2**64 - 1),
    }
    return st.fixed_dictionaries(drawn)


def _enough(e: Example, seqlens_q: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths, or full ones where the rows that exist lack the 64 elements that the tolerance rule needs."""
    elements = sum(seqlens_q) * e.num_heads * e.head_dim_v
    return seqlens_q if elements == 0 or elements >= 64 else (e.seqlen_q,) * e.batch
