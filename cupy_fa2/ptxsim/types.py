"""PTX types as NumPy dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: The NumPy dtype of every PTX type; packed pairs stay 32-bit words, an operation splits them itself.
DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    **{f"{kind}{bits}": np.dtype(f"uint{bits}") for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
}

#: The unsigned integer of each width, which is how registers and memory hold their bits.
UNSIGNED = {bits: np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)}
SIGNED = {bits: np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)}


def bits_of(name: str) -> int:
    """Width of a PTX type in bits; 1 for a predicate."""
    return 1 if name == "pred" else DTYPES[name].itemsize * 8


def is_float(name: str) -> bool:
    """Whether a type is a floating-point one, packed pairs included."""
    return name in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")


def is_signed(name: str) -> bool:
    """Whether a type is a signed integer."""
    return name[0] == "s"
