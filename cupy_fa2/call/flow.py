"""From arrays to a launch: where they live, what has to be copied, what is allocated.

A call is prepared once per signature (shapes, strides, dtypes, options, alignment of the addresses) and remembered: a
warm call looks its signature up, allocates its results, writes addresses into the argument struct and launches. On a
device and in the simulator alike: `Place` is all that differs.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_fa2.call.adopt import adopt, check_overlap, import_cupy, packed, span
from cupy_fa2.call.cuda import cuda_place
from cupy_fa2.call.option_arrays import OptionArrays, address, elsewhere, readable
from cupy_fa2.call.place import Place
from cupy_fa2.call.prepared import Prepared, prepare
from cupy_fa2.call.simulated import SimulatedPlace, current_simulator
from cupy_fa2.plan import plan_forward
from cupy_fa2.problem import Options, Problem
from cupy_fa2.problem.options import check_bool
from cupy_fa2.problem.qkv import OUT_DTYPES

__all__ = ["flash_attention"]

_OUT_NUMPY = {name: dtype for dtype, name in OUT_DTYPES.items()}

_MAX_PREPARED = 4096


@dataclass
class Call:
    """A signature's call: everything but the addresses."""

    problem: Problem
    arrays: tuple[str, ...]  # that the call gives, by the argument's name
    prepared: Prepared | None  # once the call has been made, if there is anything to launch
    empty: bool  # whether there is no output element
    copies: bool  # whether q, k or v has to be copied first
    spans: tuple[tuple[int, int], ...]  # of q, k, v and out: first byte and the one after the last, from the address
    array_spans: dict[str, tuple[int, int]]  # of the options that are arrays where the call runs


_calls: dict[tuple[Any, ...], Call] = {}


def flash_attention(q: Any, k: Any, v: Any, options: Options) -> Any:
    """See `cupy_fa2.flash_attention`: decide where the call runs, and run it."""
    check_bool("return_lse", options.return_lse)
    # Whoever has a CuPy array has imported it; another thread may be half-way through importing it.
    cupy: Any = sys.modules.get("cupy")
    if not type(q) is type(k) is type(v) is getattr(cupy, "ndarray", None):
        if all(isinstance(x, np.ndarray) for x in (q, k, v)):
            simulated = SimulatedPlace(current_simulator())
            if options.out is not None:
                simulated.check_out(options.out)
            return _attention(simulated, q, k, v, options)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not any(hasattr(x, protocol) for protocol in ("__dlpack__", "__cuda_array_interface__")):
                raise TypeError(
                    f"{name} must be a cupy.ndarray, an array on a CUDA device that speaks DLPack or "
                    f"__cuda_array_interface__, or (with q, k and v alike) a numpy.ndarray; got {type(x).__name__}"
                )
        cupy = import_cupy()
        q, k, v = (adopt(cupy, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    device_id = q.data.device_id
    place = cuda_place(device_id)
    out = options.out
    if out is not None:
        place.check_out(out)
    for name, x in (("k", k), ("v", v), ("out", out)):
        if x is not None and x.data.device_id != device_id:
            raise ValueError(
                f"all arrays must be on one device: q is on CUDA device {device_id}, {name} on {x.data.device_id}"
            )
    if cupy.cuda.runtime.getDevice() == device_id:
        return _attention(place, q, k, v, options)
    with cupy.cuda.Device(device_id):
        return _attention(place, q, k, v, options)


def _attention(place: Place, q: Any, k: Any, v: Any, options: Options) -> Any:
    """The call on a place, and on its current stream."""
    causal, align, softmax_scale, out = options.causal, options.align, options.softmax_scale, options.out
    at = place.address
    q_at, k_at, v_at = at(q), at(k), at(v)
    out_at = 0 if out is None else at(out)
    extras = None if options.plain else OptionArrays.of(place, options)
    # Equal keys must mean equal calls: True == 1 == 1.0, hence the types.
    key: tuple[Any, ...] = (
        place.key, q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype,
        q_at & 15, k_at & 15, v_at & 15, out_at & 15, causal, type(causal), options.layout, options.out_dtype,
        softmax_scale, type(softmax_scale), None if out is None else (out.shape, out.strides, out.dtype),
        (align, type(align)) if extras is None else extras.signature,
    )  # fmt: skip
    try:
        call = _calls.get(key)
    except TypeError:  # an argument that cannot be hashed is checked every time
        key, call = (), None
    if call is None:
        call = _validate(place, key, q, k, v, options, extras)
    problem = call.problem
    if place.simulated:
        place.check_call(problem, out)
    if out is None:
        out = place.empty(problem.out_shape, _OUT_NUMPY[problem.out_dtype])
        out_at = at(out)
    else:
        (q_low, q_high), (k_low, k_high), (v_low, v_high), (low, high) = call.spans
        low, high = out_at + low, out_at + high
        if not (
            (q_at + q_low >= high or low >= q_at + q_high)
            and (k_at + k_low >= high or low >= k_at + k_high)
            and (v_at + v_low >= high or low >= v_at + v_high)
        ):
            check_overlap(out, out_at, (("q", q, q_at), ("k", k, k_at), ("v", v, v_at)))
        if extras is not None:
            extras.check_overlap(place, out, low, high, call.array_spans)
    # Held until the launch: what is freed before could become lse.
    arrays = {} if extras is None else readable(place, extras.arrays, problem)
    lse = place.empty(problem.lse_shape, np.float32) if options.return_lse else None
    if not call.empty:
        prepared = call.prepared or _load(place, call, () if extras is None else ("dropout_seed",))
        if call.copies:
            place.refuse_capture("q, k or v has to be copied first", "pass aligned arrays with a contiguous last axis")
            inputs = zip((q, k, v), problem.copied, strict=True)
            q, k, v = (packed(place.xp, x) if copied else x for x, copied in inputs)
            q_at, k_at, v_at = at(q), at(k), at(v)
        scratch = None  # held until the launches
        if place.simulated or prepared.plan.workspace:
            numbers = {} if extras is None else {"dropout_seed": extras.seed}
            given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **arrays}
            values, scratch = prepared.bind(place, given, numbers)
        elif extras is None:
            values = (q_at, k_at, v_at, out_at, 0 if lse is None else at(lse), 0)
        else:
            values = (
                *(q_at, k_at, v_at, out_at, 0 if lse is None else at(lse)),
                *map(at, arrays.values()),
                *(extras.seed, 0),
            )
        prepared.launch(place, values)
        del scratch
    return out if lse is None else (out, lse)


def _validate(
    place: Place, key: tuple[Any, ...], q: Any, k: Any, v: Any, options: Options, extras: OptionArrays | None
) -> Call:
    """Validate; remember it under `key`, if there is one."""
    out = options.out
    arrays = {} if extras is None else extras.arrays
    q_at, k_at, v_at = map(place.address, (q, k, v))
    problem = Problem.from_arrays(
        q,
        k,
        v,
        options._replace(**arrays),
        addresses=(q_at, k_at, v_at, 0 if out is None else place.address(out)),
        option_addresses={name: address(place, x) for name, x in arrays.items()},
    )
    spans = tuple(span(x) for x in (q, k, v, q if out is None else out))
    call = Call(
        problem,
        ("q", "k", "v", "out", "lse", *arrays),
        None,
        math.prod(problem.out_shape) == 0,
        any(problem.copied),
        spans,
        {name: span(x) for name, x in arrays.items() if not elsewhere(place, x)},
    )
    if key:
        if len(_calls) >= _MAX_PREPARED:
            _calls.clear()
        _calls[key] = call
    return call


def _load(place: Place, call: Call, numbers: tuple[str, ...]) -> Prepared:
    """Plan and load what a call launches, the first time that it is made."""
    plan = plan_forward(call.problem.structure, place.device)
    call.prepared = prepare(place, plan, call.problem, call.arrays, numbers)
    return call.prepared
