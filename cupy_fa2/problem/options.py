"""What a call may be given beside q, k and v: the values as they came, and their checks.

Nothing here touches an array's contents or knows whether it lives on a GPU.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from cupy_fa2.dropout import threshold
from cupy_fa2.kernel.features import ScoreArray
from cupy_fa2.kernel.params import DROPOUT_ONE, MAX_SEQLEN, MAX_WINDOW

__all__ = [
    "LAYOUTS",
    "Options",
    "check_align",
    "check_bool",
    "check_dropout",
    "check_int_vector",
    "check_layout",
    "check_scale",
    "check_scores_like",
    "check_sinks",
    "check_slopes",
    "check_softcap",
    "check_window",
]

# Unions would be made anew for every test.
_BOOLS = (bool, np.bool_)
_WORDS_AND_INTS = (str, int)  # align that is no array
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)

#: Axes of each layout in the order (batch, seqlen, heads, head_dim).
LAYOUTS = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}


class Options(NamedTuple):
    """The keyword arguments of `cupy_fa2.flash_attention`, unchecked."""

    causal: Any = False
    window: Any = None
    align: Any = "bottom-right"
    softmax_scale: Any = None
    softcap: Any = None
    alibi_slopes: Any = None
    bias: Any = None
    mask: Any = None
    sinks: Any = None
    seqlens_q: Any = None
    seqlens_k: Any = None
    dropout_p: Any = 0.0
    dropout_seed: Any = None
    layout: Any = "bshd"
    out: Any = None
    out_dtype: Any = None
    return_lse: Any = False

    @property
    def plain(self) -> bool:
        """Whether nothing has to be looked at but causal, align (no array), the scale, and what is returned how."""
        # Unpacked at once, since every warm call comes through here.
        _, window, align, _, softcap, slopes, bias, mask, sinks, seqlens_q, seqlens_k, dropout_p, seed, _, _, _, _ = (
            self
        )
        return (
            window is softcap is slopes is bias is mask is sinks is seqlens_q is seqlens_k is seed is None
            and type(dropout_p) is float
            and dropout_p == 0.0
            and isinstance(align, _WORDS_AND_INTS)
        )


def check_bool(name: str, value: Any) -> bool:
    """`value`, if it is a bool."""
    if not isinstance(value, _BOOLS):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return bool(value)


def check_layout(layout: Any) -> str:
    """`layout`, if it is one."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be 'bshd' or 'bhsd', got {layout!r}")
    return layout


def check_real(name: str, value: Any, alternative: str = "") -> float:
    """`value` as a float, infinite where it is too large, if it is a real number on the host."""
    if type(value) is float:  # by far the most frequent, and abstract classes are slow
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, _BOOLS) or not isinstance(value, numbers.Real):
        hint = f"; a device array would have to be waited for: pass float({name})"
        raise TypeError(
            f"{name} must be a real number{alternative}, got {type(value).__name__}"
            + (hint if hasattr(value, "__cuda_array_interface__") else "")
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_scale(softmax_scale: Any, head_dim: int) -> float:
    """The scale as a float: any finite number; None stands for ``1 / sqrt(head_dim)``."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    scale = check_real("softmax_scale", softmax_scale, " or None")
    # The kernel holds the scale times log2(e) in float32.
    if not abs(scale) <= _LARGEST / 2:
        raise ValueError(f"softmax_scale must be finite in float32, got {str(softmax_scale)[:40]}")
    return scale


def check_softcap(softcap: Any) -> float | None:
    """The cap as a float, or None."""
    if softcap is None:
        return None
    cap = check_real("softcap", softcap, " or None")
    # The kernel divides by it, and holds it times log2(e), in float32.
    if not _SMALLEST_NORMAL <= cap <= _LARGEST / 2:
        hint = "; None is for no cap" if cap <= 0 else ""
        raise ValueError(f"softcap must be positive, finite and not subnormal in float32, got {softcap!s:.40}{hint}")
    return cap


def check_window(window: Any) -> tuple[int | None, int | None]:
    """Keys before and beyond the diagonal that are seen; None for all."""
    if window is None:
        return None, None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise TypeError(f"window must be None or a pair (left, right), got {window!r:.60}") from None
    return _check_bound("left", left), _check_bound("right", right)


def _check_bound(side: str, bound: Any) -> int | None:
    if bound is None:
        return None
    if type(bound) is not int and (isinstance(bound, _BOOLS) or not isinstance(bound, numbers.Integral)):
        raise TypeError(f"window's {side} bound must be a non-negative int or None, got {type(bound).__name__}")
    if bound < 0:
        raise ValueError(f"window's {side} bound must not be negative, got {bound}; None means unbounded, not -1")
    return min(int(bound), MAX_WINDOW)


def check_align(align: Any, batch: int, seqlen_q: int, seqlen_k: int, padded: bool = False) -> tuple[int | None, bool]:
    """The diagonal's offset, None where an array has one per batch element, and whether it counts from the ends.

    With lengths per batch element it does, if it is to: only the kernel knows them.
    """
    if isinstance(align, str):
        if align == "bottom-right":
            return (0, True) if padded else (seqlen_k - seqlen_q, False)
        if align == "top-left":
            return 0, False
        raise ValueError(f"align must be 'bottom-right', 'top-left', an int or an int array, got {align!r}")
    if isinstance(align, numbers.Integral) and not isinstance(align, bool):
        # Beyond the lengths nothing changes; the kernel's field is 32-bit.
        return max(-MAX_SEQLEN, min(int(align), MAX_SEQLEN)), False
    if not is_array(align):
        raise TypeError(f"align must be 'bottom-right', 'top-left', an int or an int array, got {type(align).__name__}")
    if tuple(align.shape) == ():
        raise TypeError("align must not be a 0-d array: pass int(align), or an array of shape (batch,)")
    check_int_vector("align", align, batch)
    return None, False


def is_array(x: Any) -> bool:
    """Whether `x` has a shape and a dtype, NumPy's scalars aside."""
    return hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, np.generic)


def check_int_vector(name: str, x: Any, batch: int) -> None:
    """Raise unless `x` is an array of one integer per batch element."""
    if not is_array(x):
        raise TypeError(f"{name} must be an int array of shape (batch,), got {type(x).__name__}")
    if np.dtype(x.dtype).kind not in "iu":
        raise TypeError(f"{name}, as an array, must hold integers, got {x.dtype}")
    if tuple(x.shape) != (batch,):
        raise ValueError(f"{name}, as an array, must have shape (batch,) = ({batch},), got {tuple(x.shape)}")


def check_slopes(x: Any, batch: int, num_heads: int, address: int) -> tuple[int, ...]:
    """Strides of the ALiBi slopes in elements, over (batch, heads)."""
    name = "alibi_slopes"
    if not is_array(x):
        raise TypeError(f"{name} must be a float32 array, got {type(x).__name__}")
    if tuple(x.shape) not in ((num_heads,), (batch, num_heads)):
        expected = f"(heads,) = ({num_heads},) or (batch, heads) = ({batch}, {num_heads})"
        raise ValueError(f"{name} must have shape {expected}, got {tuple(x.shape)}")
    strides = _element_strides(name, x, (np.dtype(np.float32),), address)
    return (0, *strides) if len(strides) == 1 else strides


def check_sinks(x: Any, num_heads: int, address: int) -> int:
    """Stride of the sinks in elements."""
    if not is_array(x):
        raise TypeError(f"sinks must be a float32 array of shape (heads,), got {type(x).__name__}")
    if tuple(x.shape) != (num_heads,):
        raise ValueError(f"sinks must have shape (heads,) = ({num_heads},), got {tuple(x.shape)}")
    return _element_strides("sinks", x, (np.dtype(np.float32),), address)[0]


def check_scores_like(
    name: str, x: Any, dtypes: dict[np.dtype[Any], str], shape: tuple[int, ...], address: int
) -> tuple[ScoreArray, tuple[int, ...]]:
    """How a kernel reads an array that broadcasts to the scores, and its strides over their axes, 0 where it does.

    Parameters
    ----------
    name : str
        The argument.
    x : array
    dtypes : dict
        NumPy dtypes that it may have -> the kernels' names for them.
    shape : tuple of int
        (batch, num_heads, seqlen_q, seqlen_k).
    address : int
        Where `x` starts in memory.
    """
    if not is_array(x):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    strides = _element_strides(name, x, tuple(dtypes), address)
    missing = len(shape) - len(strides)
    sizes = (1,) * missing + tuple(x.shape)
    if missing < 0 or any(size not in (1, full) for size, full in zip(sizes, shape, strict=False)):
        raise ValueError(
            f"{name} must broadcast to (batch, heads, seqlen_q, seqlen_k) = {shape}, got shape {tuple(x.shape)}"
        )
    strides = (0,) * missing + strides
    pairs = (
        strides[3] == 1
        and all(number % 2 == 0 for number in (shape[3], *strides[:3]))
        and address % (2 * x.dtype.itemsize) == 0
    )
    return ScoreArray(dtypes[np.dtype(x.dtype)], strides[2] != 0, pairs), strides


def check_dropout(dropout_p: Any, dropout_seed: Any) -> int:
    """Probabilities that are kept, out of 65536."""
    if dropout_seed is None and type(dropout_p) is float and dropout_p == 0.0:
        return DROPOUT_ONE
    kept = threshold(check_real("dropout_p", dropout_p))
    if dropout_seed is None:
        if dropout_p > 0:
            raise TypeError(
                "dropout_seed must be given with dropout_p > 0: an int, or a 0-d array of int64 or uint64; got None"
            )
        return DROPOUT_ONE
    check_seed(dropout_seed)
    return kept


def check_seed(seed: Any) -> None:
    """Raise unless `seed` is a seed of 64 bits, or a 0-d array that holds one."""
    if is_array(seed):
        if tuple(seed.shape) != ():
            raise TypeError(f"dropout_seed, as an array, must be 0-d, got shape {tuple(seed.shape)}")
        if seed.dtype not in (np.int64, np.uint64):
            raise TypeError(f"dropout_seed, as an array, must be int64 or uint64, got {seed.dtype}")
        return
    if type(seed) is not int and (isinstance(seed, _BOOLS) or not isinstance(seed, numbers.Integral)):
        raise TypeError(f"dropout_seed must be an int or a 0-d array of int64 or uint64, got {type(seed).__name__}")
    if not isinstance(seed, np.int64) and not 0 <= int(seed) < 1 << 64:
        raise ValueError(f"dropout_seed must be at least 0 and less than 2**64, got {seed}")


def _element_strides(name: str, x: Any, dtypes: tuple[np.dtype[Any], ...], address: int) -> tuple[int, ...]:
    """Strides of `x` in elements, 0 along axes of length 1, if it has one of `dtypes` and whole elements' steps."""
    dtype = np.dtype(x.dtype)
    if not dtype.isnative or dtype not in dtypes:
        wanted = " or ".join(str(wanted) for wanted in dtypes)
        hint = f"; pass {name}.view(bool) if it holds 0 and 1" if "bool" in wanted and dtype.itemsize == 1 else ""
        raise TypeError(f"{name} must be {wanted}, got {dtype if dtype.isnative else dtype.str}{hint}")
    item = dtype.itemsize
    steps = tuple(0 if size == 1 else int(step) for size, step in zip(x.shape, x.strides, strict=True))
    if address % item or any(step % item for step in steps):
        raise ValueError(
            f"{name} must lie at, and have strides that are, multiples of its item size {item}, got address "
            f"{address:#x} and strides {tuple(x.strides)}; pass {name}.copy()"
        )
    return tuple(step // item for step in steps)
