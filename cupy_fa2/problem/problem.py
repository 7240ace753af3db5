"""One call, validated and normalised: the only place that does either.

Nothing here touches an array's contents or knows whether it lives on a GPU: shapes, strides, dtypes and addresses are
enough, and CuPy and NumPy spell them alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from cupy_fa2.kernel.features import Features, ScoreArray, score_features
from cupy_fa2.kernel.params import DROPOUT_ONE, MAX_WINDOW
from cupy_fa2.problem.options import (
    LAYOUTS,
    Options,
    check_align,
    check_bool,
    check_dropout,
    check_int_vector,
    check_layout,
    check_scale,
    check_scores_like,
    check_sinks,
    check_slopes,
    check_softcap,
    check_window,
)
from cupy_fa2.problem.qkv import (
    IN_DTYPES,
    check_input,
    check_out,
    check_out_dtype,
    check_sizes,
    element_strides,
    needs_copy,
    packed_strides,
    padded_strides,
    stores_vectors,
)
from cupy_fa2.problem.structure import Structure

__all__ = ["Problem"]

_FLOAT32, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def _named(array: str, axes: tuple[str, ...], strides: tuple[int, ...]) -> dict[str, int | float]:
    return {f"{array}_stride_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


@dataclass(frozen=True)
class Problem:
    """What one call asks for.

    Attributes
    ----------
    dtype, out_dtype : str
        The kernels' names: ``"f16"``, ``"bf16"``, ``"float"``.
    batch, seqlen_q, seqlen_k, num_heads, num_heads_k, head_dim, head_dim_v : int
    layout : {"bshd", "bhsd"}
    diagonal : int or None
        Query i's diagonal is key ``i + diagonal``. None: an array holds one number per batch element.
    softmax_scale : float
    strides_q, strides_k, strides_v, strides_out : tuple of int
        In elements, over (batch, seqlen, heads) and for out also head_dim; 0 along axes of length 1.
    copied : tuple of bool
        Whether q, k, v have to be copied first: their rows do not start at 16-byte boundaries, their last axis is not
        contiguous, or head_dim is no multiple of 8. The strides are then those of the copies.
    out_vectors : bool
        Whether out can be stored by 16 bytes.
    window_left, window_right : int or None
        How many keys before and beyond its diagonal a query sees; None: all. `causal` makes the second 0.
    diagonal_from_end : bool
        Whether `diagonal` counts from the end of the batch element's keys minus that of its queries.
    softcap : float or None
    strides_alibi : tuple of int
        Of the slopes in elements, over (batch, heads).
    bias, mask : ScoreArray or None
    strides_bias, strides_mask : tuple of int
        In elements, over (batch, heads, seqlen_q, seqlen_k); 0 along axes of length 1, which are broadcast.
    alibi, sinks, seqlens_q, seqlens_k : bool
        Whether the call has them.
    stride_sinks : int
    dropout_threshold : int
        Out of 65536, probabilities that are kept.
    """

    dtype: str
    out_dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_k: int
    head_dim: int
    head_dim_v: int
    layout: str
    diagonal: int | None
    softmax_scale: float
    strides_q: tuple[int, ...]
    strides_k: tuple[int, ...]
    strides_v: tuple[int, ...]
    strides_out: tuple[int, ...]
    copied: tuple[bool, bool, bool]
    out_vectors: bool
    window_left: int | None = None
    window_right: int | None = None
    diagonal_from_end: bool = False
    softcap: float | None = None
    alibi: bool = False
    strides_alibi: tuple[int, ...] = (0, 0)
    bias: ScoreArray | None = None
    strides_bias: tuple[int, ...] = (0, 0, 0, 0)
    mask: ScoreArray | None = None
    strides_mask: tuple[int, ...] = (0, 0, 0, 0)
    sinks: bool = False
    stride_sinks: int = 0
    seqlens_q: bool = False
    seqlens_k: bool = False
    dropout_threshold: int = DROPOUT_ONE

    @property
    def band(self) -> str:
        """Which keys around its diagonal a query sees, as `Features.band` has it."""
        if self.window_left is not None:
            return "window"
        return "full" if self.window_right is None else "causal"

    @functools.cached_property
    def features(self) -> Features:
        """What the kernels have to be able to do."""
        return Features(
            band=self.band,
            sinks=self.sinks,
            padded=self.seqlens_q or self.seqlens_k,
            dropout=self.dropout_threshold < DROPOUT_ONE,
            **score_features(self.softmax_scale, self.softcap, self.alibi, self.bias, self.mask),
        )

    @functools.cached_property
    def structure(self) -> Structure:
        """What decides kernels and grids."""
        return Structure(
            dtype=self.dtype,
            out_dtype=self.out_dtype,
            head_dim=-(-self.head_dim // 16) * 16,
            head_dim_v=-(-self.head_dim_v // 16) * 16,
            features=self.features,
            out_vectors=self.out_vectors,
            tensor_maps=self.tensor_maps,
            heads=self.batch * self.num_heads,
            seqlen_q=self.seqlen_q,
        )

    @functools.cached_property
    def values(self) -> dict[str, int | float]:
        """Fields of ``AttentionParams`` and the results' strides that the problem alone decides."""
        # Zero keeps the scores' order of magnitude out of the exponent just as the smallest normal number does, and
        # times -inf it would be NaN. The sign is the kernel's (`negate`).
        scale_log2 = max(abs(self.softmax_scale) * math.log2(math.e), _SMALLEST_NORMAL)
        return {
            "batch": self.batch,
            **_named("q", ("batch", "seq", "head"), self.strides_q),
            **_named("k", ("batch", "seq", "head"), self.strides_k),
            **_named("v", ("batch", "seq", "head"), self.strides_v),
            **_named("out", ("batch", "seq", "head", "dim"), self.strides_out),
            **_named("lse", ("batch", "head", "seq"), (self.num_heads * self.seqlen_q, self.seqlen_q, 1)),
            **_named("alibi", ("batch", "head"), self.strides_alibi),
            **_named("bias", ("batch", "head", "seq", "key"), self.strides_bias),
            **_named("mask", ("batch", "head", "seq", "key"), self.strides_mask),
            "sinks_stride": self.stride_sinks,
            "num_heads": self.num_heads,
            "heads_per_kv": self.num_heads // max(self.num_heads_k, 1),
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "diagonal_offset": self.diagonal or 0,
            "diagonal_from_end": int(self.diagonal_from_end),
            "window_left": MAX_WINDOW if self.window_left is None else self.window_left,
            "window_right": MAX_WINDOW if self.window_right is None else self.window_right,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap or 0.0,
            "dropout_threshold": self.dropout_threshold,
            "dropout_rescale": DROPOUT_ONE / self.dropout_threshold,
            "scale_log2": scale_log2,
        }

    @functools.cached_property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of out in the caller's layout."""
        shape = (self.batch, self.seqlen_q, self.num_heads, self.head_dim_v)
        a, b, c, d = (shape[axis] for axis in LAYOUTS[self.layout])
        return a, b, c, d

    @functools.cached_property
    def lse_shape(self) -> tuple[int, int, int]:
        """Shape of lse, in any layout."""
        return self.batch, self.num_heads, self.seqlen_q

    @property
    def tensor_maps(self) -> bool:
        """Whether tensor maps can describe k and v as arrays: at least one key, and strides that step forward.

        The driver takes strides of up to 2**40 bytes in multiples of 16 and sizes of up to 2**32.
        """
        sizes = (self.batch, self.seqlen_k, self.num_heads_k)
        return all(0 < size <= 2**32 for size in sizes) and all(
            size == 1 or 0 < 2 * stride < 2**40
            for strides in (self.strides_k, self.strides_v)
            for size, stride in zip(sizes, strides, strict=True)
        )

    @functools.cached_property
    def multiply_adds(self) -> int:
        """Multiply-adds of the two matrix products, masked, padded or not."""
        pairs = self.batch * self.num_heads * self.seqlen_q * self.seqlen_k
        return pairs * (self.head_dim + self.head_dim_v)

    @staticmethod
    def from_arrays(
        q: Any,
        k: Any,
        v: Any,
        options: Options = Options(),  # noqa: B008  # immutable
        *,
        addresses: tuple[int, int, int, int],
        option_addresses: Mapping[str, int] = MappingProxyType({}),
        **given: Any,
    ) -> Problem:
        """Check every argument and normalise it.

        Parameters
        ----------
        q, k, v : array
            Anything with ``shape``, ``strides`` and ``dtype``; so is out, among the options.
        options : Options
            What the call was given beside them.
        addresses : tuple of int
            Where q, k, v and out start in memory (0 for no out).
        option_addresses : mapping
            Where bias, mask, alibi_slopes and sinks do; aligned, if it does not say.
        **given
            Fields of `options` that are others.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what it was and what it may be.
        """
        options = options._replace(**given) if given else options
        layout, out = check_layout(options.layout), options.out
        order = LAYOUTS[layout]
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_input(name, x, layout)
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")

        batch, seqlen_q, seqlen_k, num_heads, num_heads_k, head_dim, head_dim_v = check_sizes(q, k, v, order)
        scale = check_scale(options.softmax_scale, head_dim)
        padded = options.seqlens_q is not None or options.seqlens_k is not None
        diagonal, from_end = check_align(options.align, batch, seqlen_q, seqlen_k, padded)
        shape = (batch, num_heads, seqlen_q, seqlen_k)
        out_kind = check_out_dtype(options.out_dtype, q.dtype, out)
        out_shape = tuple((batch, seqlen_q, num_heads, head_dim_v)[axis] for axis in order)
        out_strides = packed_strides(out_shape)
        if out is not None:
            out_strides = check_out(out, out_shape, out_kind, addresses[3])

        copied, strides = [], []
        for x, address in zip((q, k, v), addresses[:3], strict=True):
            copy = needs_copy(x.shape, x.strides, address)
            copied.append(copy)
            strides.append(padded_strides(x.shape, order) if copy else element_strides(x, order)[:3])
        strides_out = tuple(0 if out_shape[axis] == 1 else out_strides[axis] for axis in order)
        return Problem(
            dtype=IN_DTYPES[q.dtype],
            out_dtype=out_kind,
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            num_heads_k=num_heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            layout=layout,
            diagonal=diagonal,
            softmax_scale=scale,
            strides_q=strides[0],
            strides_k=strides[1],
            strides_v=strides[2],
            strides_out=strides_out,
            copied=(copied[0], copied[1], copied[2]),
            out_vectors=stores_vectors(head_dim_v, strides_out, out_kind, addresses[3]),
            diagonal_from_end=from_end,
            **_check_band(options),
            **_check_score_options(options, np.dtype(q.dtype), shape, option_addresses),
            **_check_lengths_and_dropout(options, batch),
        )


def _check_band(options: Options) -> dict[str, Any]:
    """Fields of `Problem` that say which keys around the diagonal are seen."""
    left, right = check_window(options.window)
    return {"window_left": left, "window_right": 0 if check_bool("causal", options.causal) else right}


def _check_score_options(
    options: Options, dtype: np.dtype[Any], shape: tuple[int, int, int, int], addresses: Mapping[str, int]
) -> dict[str, Any]:
    """Fields of `Problem` that change scores, or add one; only those of options that are given."""
    batch, num_heads, _, _ = shape
    found: dict[str, Any] = {"softcap": check_softcap(options.softcap)}
    if options.alibi_slopes is not None:
        strides = check_slopes(options.alibi_slopes, batch, num_heads, addresses.get("alibi_slopes", 0))
        found |= {"alibi": True, "strides_alibi": strides}
    for name, dtypes in (("bias", {dtype: IN_DTYPES[dtype], _FLOAT32: "float"}), ("mask", {_BOOL: "bool"})):
        x = getattr(options, name)
        if x is not None:
            found[name], found[f"strides_{name}"] = check_scores_like(name, x, dtypes, shape, addresses.get(name, 0))
    if options.sinks is not None:
        found |= {"sinks": True, "stride_sinks": check_sinks(options.sinks, num_heads, addresses.get("sinks", 0))}
    return found


def _check_lengths_and_dropout(options: Options, batch: int) -> dict[str, Any]:
    """The fields of `Problem` for both."""
    found: dict[str, Any] = {"dropout_threshold": check_dropout(options.dropout_p, options.dropout_seed)}
    for name in ("seqlens_q", "seqlens_k"):
        x = getattr(options, name)
        if x is not None:
            check_int_vector(name, x, batch)
            found[name] = True
    return found
