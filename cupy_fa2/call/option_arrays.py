"""The arrays among a call's options: where they come from, and what they have to become for a kernel to read them."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from cupy_fa2.call.adopt import check_overlap
from cupy_fa2.call.place import Place
from cupy_fa2.kernel.param_struct import Source
from cupy_fa2.kernel.params import ATTENTION_PARAMS, MAX_SEQLEN
from cupy_fa2.problem import Problem
from cupy_fa2.problem.options import Options, check_dropout, check_softcap, check_window

__all__ = ["OptionArrays", "given", "readable"]

#: Options that may be arrays: those whose address an argument struct has.
_NAMES = [field.array for field in ATTENTION_PARAMS.of_source(Source.ADDRESS) if field.array in Options._fields]
#: Those that are small enough to be taken from the host, as arrays or lists, wherever q, k and v are.
_FROM_ANYWHERE = ("seqlens_q", "seqlens_k", "alibi_slopes", "sinks")
_values = operator.attrgetter(*_NAMES)
_NO_ARRAYS = (str, int, np.generic)
_LISTS = (list, tuple)
_INTEGERS = ("align", "seqlens_q", "seqlens_k")


class OptionArrays(NamedTuple):
    """What one call was given beyond the plain options.

    Attributes
    ----------
    arrays : dict
        The arrays among the options, by name; NumPy's where they are to be copied to a device.
    seed : int
        The dropout seed, if it is known here; else 0.
    signature : tuple
        What the call is prepared for. The seed's value is not in it.
    """

    arrays: dict[str, Any]
    seed: int
    signature: tuple[Any, ...]

    @classmethod
    def of(cls, place: Place, options: Options) -> OptionArrays:
        """Find the arrays, and check the options whose values could not be told apart in a signature."""
        arrays = given(place, options)
        seed = arrays.get("dropout_seed", options.dropout_seed)
        if elsewhere(place, seed):
            del arrays["dropout_seed"]  # its value is enough
        align = None if "align" in arrays else options.align
        signature = (
            *(align, type(align)),
            *(check_window(options.window), check_softcap(options.softcap)),
            check_dropout(options.dropout_p, seed),
            *((name, type(x), x.shape, x.strides, x.dtype, address(place, x) & 15) for name, x in arrays.items()),
        )
        known = 0 if "dropout_seed" in arrays or seed is None else int(seed) & 0xFFFFFFFFFFFFFFFF
        return cls(arrays, known, signature)

    def check_overlap(self, place: Place, out: Any, begin: int, end: int, spans: dict[str, tuple[int, int]]) -> None:
        """Refuse an `out`, from byte `begin` to before `end`, that shares one with an array; `spans` are theirs."""
        for name, (low, high) in spans.items():
            x = self.arrays[name]
            at = place.address(x)
            if at + low < end and begin < at + high:
                check_overlap(out, place.address(out), [(name, x, at)])


def address(place: Place, x: Any) -> int:
    """Where an array is; 0, which has any alignment, for one that will be copied to where the call runs."""
    return 0 if elsewhere(place, x) else place.address(x)


def elsewhere(place: Place, x: Any) -> bool:
    """Whether an array is on the host while the call runs on a device."""
    return isinstance(x, np.ndarray) and not place.simulated


def given(place: Place, options: Options) -> dict[str, Any]:
    """The arrays among the options, by name; what is none is left to `Problem`, which takes it or refuses it."""
    found = {}
    for name, x in zip(_NAMES, _values(options), strict=True):
        if x is None or isinstance(x, _NO_ARRAYS):
            continue
        small = name in _FROM_ANYWHERE
        if small and isinstance(x, _LISTS):
            x = _from_list(name, x)
        if hasattr(x, "shape") or hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__"):
            x = place.adopt(name, x, from_host=small or name == "dropout_seed")
            if small and elsewhere(place, x) and not x.flags.c_contiguous:
                x = x.copy()  # strides of what will be on the device
            found[name] = x
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


def readable(place: Place, arrays: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """The arrays that a kernel reads instead: where it runs, lengths and offsets as int32; most are those given.

    Raises
    ------
    ValueError
        If lengths that are on the host are out of range.
    RuntimeError
        If launches are being captured, and something has to be copied or converted.
    """
    return {name: _readable(place, name, x, problem) for name, x in arrays.items()}


def _readable(place: Place, name: str, x: Any, problem: Problem) -> Any:
    xp = place.xp
    if isinstance(x, np.ndarray):
        if name.startswith("seqlens"):
            _check_lengths(name, x, problem.seqlen_q if name == "seqlens_q" else problem.seqlen_k)
        if place.simulated:
            return _converted(place, name, x)
        place.refuse_capture(
            f"{name} has to be copied to the device first", f"pass a device array: cupy.asarray({name})"
        )
        return xp.asarray(_as_int32(np, x) if name in _INTEGERS else x)
    return _converted(place, name, x)


def _converted(place: Place, name: str, x: Any) -> Any:
    """An array that is where the call runs, in a dtype and at an address that kernels read."""
    if name in _INTEGERS and not (x.dtype == np.int32 and x.flags.c_contiguous and place.address(x) % 4 == 0):
        place.refuse_capture(f"{name} has to be converted first", "pass a contiguous int32 array")
        return _as_int32(place.xp, _aligned(place, x))
    if name == "dropout_seed" and place.address(x) % 8:
        place.refuse_capture(f"{name} has to be copied first", "pass an array at a multiple of 8 bytes")
        return _aligned(place, x)
    return x


def _aligned(place: Place, x: Any) -> Any:
    """A contiguous array at an odd address as one that is not: copied byte by byte, for CuPy reads whole items."""
    if not x.flags.c_contiguous or place.address(x) % x.itemsize == 0:
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
