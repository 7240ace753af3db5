"""What a call may be given beside q, k and v: the values as they came, and their checks.

Nothing here touches an array's contents or knows whether it lives on a GPU.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from cupy_fa2.params import MAX_SEQLEN

__all__ = ["LAYOUTS", "Options", "check_align", "check_bool", "check_layout", "check_scale"]

#: Axes of each layout in the order (batch, seqlen, heads, head_dim).
LAYOUTS = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}


class Options(NamedTuple):
    """The keyword arguments of `cupy_fa2.flash_attention`, unchecked."""

    causal: Any = False
    align: Any = "bottom-right"
    softmax_scale: Any = None
    layout: Any = "bshd"
    out: Any = None
    out_dtype: Any = None
    return_lse: Any = False


def check_bool(name: str, value: Any) -> bool:
    """`value`, if it is a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return bool(value)


def check_layout(layout: Any) -> str:
    """`layout`, if it is one."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be 'bshd' or 'bhsd', got {layout!r}")
    return layout


def check_scale(softmax_scale: Any, head_dim: int) -> float:
    """The scale as a float: any finite number; None stands for ``1 / sqrt(head_dim)``."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(softmax_scale, np.ndarray) and softmax_scale.ndim == 0:
        softmax_scale = softmax_scale[()]
    if isinstance(softmax_scale, bool | np.bool_) or not isinstance(softmax_scale, numbers.Real):
        hint = "; a device array would have to be waited for: pass float(softmax_scale)"
        raise TypeError(
            f"softmax_scale must be a real number or None, got {type(softmax_scale).__name__}"
            + (hint if hasattr(softmax_scale, "__cuda_array_interface__") else "")
        )
    try:
        scale = float(softmax_scale)
    except OverflowError:
        scale = math.inf
    # The kernel holds the scale times log2(e) in float32.
    if not math.isfinite(scale) or abs(scale) > float(np.finfo(np.float32).max) / 2:
        raise ValueError(f"softmax_scale must be finite in float32, got {str(softmax_scale)[:40]}")
    return scale


def check_align(align: Any, batch: int, seqlen_q: int, seqlen_k: int) -> int | None:
    """The diagonal's offset, or None where an array gives one per batch element."""
    if isinstance(align, str):
        if align == "bottom-right":
            return seqlen_k - seqlen_q
        if align == "top-left":
            return 0
        raise ValueError(f"align must be 'bottom-right', 'top-left', an int or an int array, got {align!r}")
    if isinstance(align, numbers.Integral) and not isinstance(align, bool):
        # Beyond the lengths nothing changes; the kernel's field is 32-bit.
        return max(-MAX_SEQLEN, min(int(align), MAX_SEQLEN))
    if not hasattr(align, "dtype") or not hasattr(align, "shape"):
        raise TypeError(f"align must be 'bottom-right', 'top-left', an int or an int array, got {type(align).__name__}")
    if np.dtype(align.dtype).kind not in "iu":
        raise TypeError(f"align, as an array, must hold integers, got {align.dtype}")
    if tuple(align.shape) == ():
        raise TypeError("align must not be a 0-d array: pass int(align), or an array of shape (batch,)")
    if tuple(align.shape) != (batch,):
        raise ValueError(f"align, as an array, must have shape (batch,) = ({batch},), got {tuple(align.shape)}")
    return None
