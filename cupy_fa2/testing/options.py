"""Every option of the kernels, as fields of an `Example`: the one list that each "every option" test reads.

A new option is added here once. The tests, the compile gate, the sanitizer and the bench then meet it alone, with each
other option, and among all of them; and a test fails until it is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .examples import Example

__all__ = ["EVERYTHING", "OPTION_EXAMPLES", "OPTION_SIZES", "OPTION_VARIANTS", "with_options"]

#: The sizes that the lengths and alignments below are meant for: two tiles of rows and several of keys.
OPTION_SIZES = {"batch": 2, "seqlen_q": 140, "seqlen_k": 150}

#: Option -> the fields of an `Example` that turn it on, and no other. Any of them combine.
OPTION_EXAMPLES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "softmax_scale": {"softmax_scale": -0.2},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": "bh"},
    "bias": {"bias": "bhqk holes"},
    "mask": {"mask": "bhqk rows"},
    "sinks": {"sinks": True},
    "padded": {"seqlens_q": (129, 70), "seqlens_k": (131, 150)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 0xFEDCBA9876543210},
}

#: Other ways to ask for an option that reach other code, name -> fields; the first word is the option's name.
OPTION_VARIANTS: dict[str, dict[str, Any]] = {
    "causal by element": {"causal": True, "align": (60, -3)},
    "window wider than the keys": {"window": (1000, 1000)},
    "alibi scaled": {"alibi": "h", "softmax_scale": -0.2},
    "bias float32": {"bias": "bhqk f32"},
    "bias of keys": {"bias": "b11k f32 holes"},
    "bias in odd rows": {"bias": "hqk f32 holes", "bias_storage": "odd rows"},
    "mask of keys": {"mask": "b11k"},
    "mask in odd rows": {"mask": "bhqk rows", "mask_storage": "odd rows"},
    "padded to nothing": {"seqlens_q": (140, 6), "seqlens_k": (0, 150), "causal": True},
}

#: All options in one call, but `causal`, which a window's right bound says as well.
EVERYTHING: dict[str, Any] = {
    "window": (90, 20),
    "align": (60, -3),
    "softmax_scale": -0.2,
    "softcap": 7.0,
    "alibi": "bh",
    "bias": "bhqk f32 holes",
    "mask": "1hqk",
    "sinks": True,
    "seqlens_q": (140, 131),
    "seqlens_k": (147, 129),
    "dropout_p": 0.2,
    "dropout_seed": 5,
}


def with_options(example: Example, *fields: Mapping[str, Any]) -> Example:
    """Turn options on.

    Parameters
    ----------
    example : Example
    *fields : mapping
        Values of `OPTION_EXAMPLES` or `OPTION_VARIANTS`, or mappings like them.

    Returns
    -------
    Example
        With lengths scaled from `OPTION_SIZES` to its own, and what is one per batch element repeated for its batch.

    Examples
    --------
    >>> call = Example("float16", 3, 70, 50, 1, 1, 64, 64)
    >>> with_options(call, OPTION_EXAMPLES["padded"], {"causal": True}).seqlens_q
    (64, 35, 64)
    """
    merged = {name: value for each in fields for name, value in each.items()}
    for name, value in merged.items():
        if name in ("align", "seqlens_q", "seqlens_k") and isinstance(value, tuple):
            by_element = [value[b % len(value)] for b in range(example.batch)]
            if name != "align":
                size = "seqlen_q" if name == "seqlens_q" else "seqlen_k"
                by_element = [length * getattr(example, size) // OPTION_SIZES[size] for length in by_element]
            merged[name] = tuple(by_element)
    return replace(example, **merged)
