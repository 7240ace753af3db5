"""Arrays as kernels can take them: adopted from other libraries, copied where they must be, apart from results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from cupy_fa2.problem.qkv import padded_head_dim

__all__ = [
    "address_of",
    "adopt",
    "check_overlap",
    "empty_aligned",
    "import_cupy",
    "packed",
    "span",
]

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def import_cupy() -> Any:
    """CuPy, which only arrays on a device need."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "arrays that are not NumPy's need CuPy: pip install cupy-cuda12x 'cuda-toolkit[nvrtc,cudart]==12.*'"
        ) from error
    return cupy


def adopt(cupy: Any, name: str, x: Any) -> Any:
    """Any array on a CUDA device as a CuPy array over the same memory."""
    if isinstance(x, cupy.ndarray):
        return x
    if isinstance(x, np.ndarray):
        raise TypeError(f"{name} is a numpy.ndarray beside arrays on a GPU; move it there with cupy.asarray({name})")
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        if x.__dlpack_device__()[0] not in _DLPACK_CUDA:
            raise TypeError(
                f"{name} ({type(x).__name__}) is not on a CUDA device; move it there, or pass "
                f"numpy.asarray({name}) (with q, k and v alike) to run in the simulator"
            )
        return cupy.from_dlpack(x)
    if hasattr(x, "__cuda_array_interface__"):
        return cupy.asarray(x)
    raise TypeError(f"{name} must be an array on a CUDA device, got {type(x).__name__}")


def address_of(x: Any) -> int:
    """Where a NumPy array starts in memory."""
    address: int = x.__array_interface__["data"][0]
    return address


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A new array that begins at a multiple of 256 bytes, as CuPy's do: sectors are counted as on a GPU."""
    buffer = np.empty(math.prod(shape) * dtype.itemsize + 256, np.uint8)
    begin = -address_of(buffer) % 256
    return buffer[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def packed(xp: Any, x: Any) -> Any:
    """A C-contiguous copy whose last axis is padded with zeros to a multiple of 8. Bits are copied, not numbers."""
    padded = padded_head_dim(x.shape[3])
    copy = xp.zeros((*x.shape[:3], padded), np.uint16)
    copy[..., : x.shape[3]] = x.view(np.uint16)
    return copy


class _Footprint:
    """An array's addresses without its memory, for NumPy's exact overlap test, which never looks at contents."""

    def __init__(self, x: Any, address: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": x.shape,
            "strides": x.strides,
            "typestr": f"|V{x.itemsize}",
            "version": 3,
        }


def check_overlap(out: Any, out_address: int, inputs: Iterable[tuple[str, Any, int]]) -> None:
    """Refuse an `out` that shares a byte with an input: a block would read what another has already written."""
    low, high = (out_address + end for end in span(out))
    for name, x, address in inputs:
        x_low, x_high = (address + end for end in span(x))
        if x_low >= high or low >= x_high:
            continue
        a, b = (np.asarray(_Footprint(y, at)) for y, at in ((out, out_address), (x, address)))
        try:
            overlap = np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]  # any int is right
        except np.exceptions.TooHardError:
            overlap = True
        if overlap:
            raise ValueError(f"out must not overlap {name}, got arrays that share memory")


def span(x: Any) -> tuple[int, int]:
    """First byte, and the one after the last, counted from the array's address."""
    if x.size == 0:
        return 0, 0
    spans = [stride * (size - 1) for stride, size in zip(x.strides, x.shape, strict=True)]
    return sum(span for span in spans if span < 0), sum(span for span in spans if span > 0) + x.itemsize
