"""The arrays among a call's options: where they come from, and what they have to become for a kernel to read them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupy_fa2.call.arrays import address_of, adopt, check_overlap
from cupy_fa2.call.runtime import refuse_capture
from cupy_fa2.kernel.params import MAX_SEQLEN
from cupy_fa2.problem import Problem
from cupy_fa2.problem.options import Options, check_dropout, check_softcap, check_window, seed_bits

__all__ = ["FIELDS", "Extras", "device_pointer", "host_operands", "readable"]

#: Options that may be arrays -> the field of ``FwdParams`` that takes their address.
FIELDS = {
    "align": "diagonal_offsets",
    "seqlens_q": "seqlens_q",
    "seqlens_k": "seqlens_k",
    "alibi_slopes": "alibi_slopes",
    "bias": "bias",
    "mask": "mask",
    "sinks": "sinks",
    "dropout_seed": "dropout_seed_array",
}

#: Those that are small enough to be taken from the host, as arrays or lists, wherever q, k and v are.
_FROM_ANYWHERE = ("seqlens_q", "seqlens_k", "alibi_slopes", "sinks")
_values = operator.attrgetter(*FIELDS)
_NO_ARRAYS = (str, int, np.generic)
_LISTS = (list, tuple)
_INTEGERS = ("align", "seqlens_q", "seqlens_k")


class Extras(NamedTuple):
    """What one call on a GPU was given beyond the plain options.

    Attributes
    ----------
    operands : dict
        The arrays among the options, by name: CuPy's, or NumPy's where they may come from the host.
    seed : int
        The dropout seed, if it is known here; else 0.
    signature : tuple
        What the call is prepared for. The seed's value is not in it.
    """

    operands: dict[str, Any]
    seed: int
    signature: tuple[Any, ...]

    @classmethod
    def of(cls, cupy: Any, options: Options, device_id: int) -> Extras:
        """Find the arrays, and check the options whose values could not be told apart in a signature."""
        operands = _device_operands(cupy, options, device_id)
        seed = operands.get("dropout_seed", options.dropout_seed)
        if isinstance(seed, np.ndarray):
            del operands["dropout_seed"]
        align = None if "align" in operands else options.align
        signature = (
            *(align, type(align)),
            *(check_window(options.window), check_softcap(options.softcap)),
            check_dropout(options.dropout_p, seed),
            *((name, type(x), x.shape, x.strides, x.dtype, device_pointer(x) & 15) for name, x in operands.items()),
        )
        return cls(operands, 0 if "dropout_seed" in operands else seed_bits(seed), signature)

    def check_overlap(self, out: Any, begin: int, end: int, spans: dict[str, tuple[int, int]]) -> None:
        """Refuse an `out`, from byte `begin` to before `end`, that shares one with an operand; `spans` are theirs."""
        for name, (low, high) in spans.items():
            x = self.operands[name]
            if x.data.ptr + low < end and begin < x.data.ptr + high:
                check_overlap(out, out.data.ptr, [(name, x, x.data.ptr)])


def device_pointer(x: Any) -> int:
    """Where an array is on the device; 0, which has any alignment, for one that will be copied there."""
    return 0 if isinstance(x, np.ndarray) else int(x.data.ptr)


def _device_operands(cupy: Any, options: Options, device_id: int) -> dict[str, Any]:
    """The arrays among the options of a call on a GPU, by name: CuPy's, or NumPy's where those are taken."""

    def on_device(name: str, x: Any) -> Any:
        if isinstance(x, np.ndarray) and name in _FROM_ANYWHERE:
            return x if x.flags.c_contiguous else x.copy()  # strides of what will be on the device
        if isinstance(x, np.ndarray) and name == "dropout_seed":
            return x  # of which only the value will be there
        x = adopt(cupy, name, x)
        if x.data.device_id != device_id:
            raise ValueError(f"{name} must be on q's CUDA device {device_id}, got {x.data.device_id}")
        return x

    return _found(options, on_device)


def host_operands(options: Options) -> dict[str, Any]:
    """The arrays among the options of a call in the simulator, by name."""

    def on_host(name: str, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name} must be a numpy.ndarray where q, k and v are, got {type(x).__name__}")
        return x

    return _found(options, on_host)


def _found(options: Options, placed: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The arrays among the options; what is none is left to `Problem`, which takes it or refuses it by name."""
    found = {}
    for name, x in zip(FIELDS, _values(options), strict=True):
        if x is None or isinstance(x, _NO_ARRAYS):
            continue
        if name in _FROM_ANYWHERE and isinstance(x, _LISTS):
            x = _from_list(name, x)
        if hasattr(x, "shape") or hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__"):
            found[name] = placed(name, x)
    return found


def _from_list(name: str, x: Any) -> Any:
    """The array that a list means."""
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name}, as a list, must have the shape of an array: {error}") from error
    if name in _INTEGERS:
        return array.astype(np.int32) if array.size == 0 else array
    return array.astype(np.float32) if array.dtype.kind in "iuf" else array


def _pointer(x: Any) -> int:
    """Where an array starts, on a device or on the host."""
    return address_of(x) if isinstance(x, np.ndarray) else int(x.data.ptr)


def readable(xp: Any, operands: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """The arrays that a kernel reads instead: on the device, lengths and offsets as int32; most are those given.

    Raises
    ------
    ValueError
        If lengths that are on the host are out of range.
    RuntimeError
        If the current stream is being captured, and something has to be copied or converted.
    """
    return {name: _readable(xp, name, x, problem) for name, x in operands.items()}


def _readable(xp: Any, name: str, x: Any, problem: Problem) -> Any:
    here = isinstance(x, np.ndarray)
    if here and name.startswith("seqlens"):
        _check_lengths(name, x, problem.seqlen_q if name == "seqlens_q" else problem.seqlen_k)
    if here and xp is not np:
        refuse_capture(f"{name} has to be copied to the device first", f"pass a device array: cupy.asarray({name})")
        return xp.asarray(_as_int32(np, x) if name in _INTEGERS else x)
    if name in _INTEGERS and not (x.dtype == np.int32 and x.flags.c_contiguous and _pointer(x) % 4 == 0):
        if xp is not np:
            refuse_capture(f"{name} has to be converted first", "pass a contiguous int32 array")
        return _as_int32(xp, _aligned(x))
    if name == "dropout_seed" and _pointer(x) % 8:
        if xp is not np:
            refuse_capture(f"{name} has to be copied first", "pass an array at a multiple of 8 bytes")
        return _aligned(x)
    return x


def _aligned(x: Any) -> Any:
    """A contiguous array at an odd address as one that is not: copied byte by byte, for CuPy reads whole items."""
    if not x.flags.c_contiguous or _pointer(x) % x.itemsize == 0:
        return x
    return x.reshape(-1).view(np.uint8).copy().view(x.dtype).reshape(x.shape)


def _check_lengths(name: str, x: Any, seqlen: int) -> None:
    if x.size and not 0 <= x.min() <= x.max() <= seqlen:
        worst = x.min() if x.min() < 0 else x.max()
        raise ValueError(f"{name} must be lengths from 0 to {seqlen}, got {worst}")


def _as_int32(xp: Any, x: Any) -> Any:
    """Lengths or offsets as aligned, contiguous int32. Clamping changes nothing: no sequence is longer."""
    info = np.iinfo(x.dtype)
    return xp.ascontiguousarray(xp.clip(x, max(info.min, -MAX_SEQLEN), min(info.max, MAX_SEQLEN)).astype(np.int32))
