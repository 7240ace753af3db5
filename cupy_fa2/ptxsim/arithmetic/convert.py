"""``cvt``: every conversion between integer and floating-point types, and the packing ones."""

from __future__ import annotations

import numpy as np

from ..errors import UnsupportedInstruction
from ..types import DTYPES, Array, is_float
from .operation import Function, Modifiers, Operation, flush

_TO_INTEGER: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _clamp_to(t: str) -> Function:
    """Float or wider integer -> integer type `t`, clamped to its range; NaN becomes 0."""
    limits = np.iinfo(DTYPES[t])

    def clamp(x: Array) -> Array:
        if x.dtype.kind != "f":
            return np.clip(x, max(limits.min, np.iinfo(x.dtype).min), min(limits.max, np.iinfo(x.dtype).max))
        # The largest 64-bit integers are no float64: clamp there by comparison, after the conversion.
        inside = np.where(np.isnan(x) | (x >= limits.max) | (x <= limits.min), 0, x).astype(DTYPES[t])
        inside = np.where(x >= limits.max, DTYPES[t].type(limits.max), inside)
        return np.where(x <= limits.min, DTYPES[t].type(limits.min), inside)

    return clamp


def _scalar(target: str, source: str, m: Modifiers) -> Function:
    ftz, saturate = m.flag("ftz"), m.flag("sat")
    rounding = m.choice(_TO_INTEGER)
    if m.choice(("rz", "rm", "rp", "rna", "rs")):
        raise UnsupportedInstruction("only rounding to nearest even is supported between these types")
    m.flag("rn")
    relu = m.flag("relu")
    dtype = DTYPES[target]
    if is_float(source) and not is_float(target):
        round_, clamp = _TO_INTEGER[rounding], _clamp_to(target)
        return lambda a: clamp(round_((flush(a) if ftz else a).astype(np.float64)))
    if not is_float(source):
        if saturate and not is_float(target):
            narrow = _clamp_to(target)
            return lambda a: narrow(a).astype(dtype)
        return lambda a: a.astype(dtype)

    def convert(a: Array) -> Array:
        if ftz and source == "f32":
            a = flush(a)
        if rounding:
            a = _TO_INTEGER[rounding](a)
        if saturate:
            a = np.fmin(np.fmax(a, a.dtype.type(0)), a.dtype.type(1))
        if relu:
            a = np.where(np.isnan(a), a, np.maximum(a, a.dtype.type(0)))
        result: Array = a.astype(dtype)
        return flush(result) if ftz and target == "f32" else result

    return convert


def convert_entry(m: Modifiers) -> Operation:
    """The entry of ``cvt`` in the opcode table."""
    source, target = m.type(), m.type()
    if not target.endswith("x2"):
        return Operation((target,), (source,), _scalar(target, source, m))
    half = target.removesuffix("x2")
    one = _scalar(half, source, m)

    def pack(high: Array, low: Array) -> Array:
        # The first operand becomes the HIGH half.
        upper, lower = (one(x).view(np.uint16).astype(np.uint32) for x in (high, low))
        result: Array = upper << np.uint32(16) | lower
        return result

    return Operation((target,), (source, source), pack)
