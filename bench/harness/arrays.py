"""Arrays to measure with. Random numbers come from NumPy, so that no library beyond CuPy itself is needed."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from harness.case import Case

__all__ = ["DTYPES", "Arrays", "Inputs", "on_host", "release_memory"]

#: The kernels' name of a dtype -> NumPy's.
DTYPES: dict[str, Any] = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}

_PERIOD = (1 << 20) + 7  # of random numbers; odd, so that no two rows of a tile or of a bias are alike


class Inputs:
    """Normally distributed arrays, and room for results, that rows share: each is a part of one that stays.

    Parameters
    ----------
    xp : module
        `cupy`, or `numpy`.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self._dtype = ""
        self._flat: dict[str, Any] = {}

    def normal(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """N(0, 1), other numbers for every name."""
        return self._part(name, shape, dtype)

    def room(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """Room for a result, full of NaN."""
        array = self._part(name, shape, dtype)
        array.view(np.uint16).fill(0x7FFF)  # NaN in both dtypes
        return array

    def qkv_out(self, case: Case) -> tuple[Any, Any, Any, Any]:
        """Arrays q, k, v, out of the case's shape; out is full of NaN."""
        q, k, v = (self.normal(name, case.shape, case.dtype) for name in "qkv")
        return q, k, v, self.room("out", case.shape, case.dtype)

    def _part(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        if dtype != self._dtype:
            self._flat.clear()  # one dtype at a time
            self._dtype = dtype
        size = int(np.prod(shape))
        if name not in self._flat or self._flat[name].size < size:
            self._flat.pop(name, None)
            rng = np.random.default_rng([0, *name.encode()])
            base = rng.standard_normal(_PERIOD, np.float32).astype(DTYPES[dtype])
            # Bits travel as integers: some CuPy operations do not know bfloat16.
            self._flat[name] = self.xp.asarray(np.resize(base.view(np.uint16), size))
        return self._flat[name][:size].view(DTYPES[dtype]).reshape(shape)


class Arrays:
    """Makes the arrays that options take.

    Parameters
    ----------
    xp : module, optional
        `cupy` or `numpy`; None: arrays with a shape and nothing in it, to plan with.
    """

    def __init__(self, xp: Any = None) -> None:
        self.xp = xp

    def normal(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """N(0, 1)."""
        values = np.random.default_rng(1).standard_normal(_PERIOD, np.float32).astype(dtype)
        return self._repeated(values, shape)

    def visible(self, shape: tuple[int, ...]) -> Any:
        """A mask that hides one key in eight."""
        return self._repeated(np.random.default_rng(2).integers(0, 8, _PERIOD) > 0, shape)

    def small(self, values: Any, dtype: Any) -> Any:
        """These values."""
        values = np.asarray(values, dtype)
        return values if self.xp is None else self.xp.asarray(values)

    def _repeated(self, values: Any, shape: tuple[int, ...]) -> Any:
        if self.xp is None:
            packed = np.cumprod((values.itemsize, *shape[:0:-1]), dtype=np.int64)[::-1]
            return as_strided(values[:1], shape, tuple(map(int, packed)), writeable=False)
        bits = self.xp.asarray(values.view(f"u{values.itemsize}"))
        size = int(np.prod(shape))
        return self.xp.tile(bits, -(-size // bits.size))[:size].view(values.dtype).reshape(shape)


def on_host(x: Any) -> Any:
    """An array's values as NumPy's, whichever dtype."""
    if not hasattr(x, "get"):
        return x
    return x.view(f"u{x.dtype.itemsize}").get().view(x.dtype)


def release_memory() -> None:
    """Give back what a row took: a float32 bias alone has 4 GB."""
    with contextlib.suppress(Exception):
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
        sys.modules["torch"].cuda.empty_cache()
