"""From arrays to a launch: where they live, what has to be copied, what is allocated.

A call is prepared once per signature (shapes, strides, dtypes, options, alignment of the addresses) and remembered: a
warm call looks its signature up, allocates its outputs, writes five addresses into the argument struct and launches.
"""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_fa2 import ptxsim
from cupy_fa2.call.arrays import (
    address_of,
    adopt,
    check_overlap,
    empty_aligned,
    import_cupy,
    packed,
    span,
)
from cupy_fa2.call.operands import FIELDS, Extras, device_pointer, host_operands, readable
from cupy_fa2.call.runtime import CupyKernel, current_simulator, load_cuda, refuse_capture
from cupy_fa2.call.tensormap import TensorBox, arguments, encode_cuda, key_value_boxes
from cupy_fa2.device import cuda_device
from cupy_fa2.kernel.params import FWD_PARAMS, FWD_TENSOR_PARAMS
from cupy_fa2.plan import Plan, encode_forward, plan_forward
from cupy_fa2.problem import Problem
from cupy_fa2.problem.options import Options, check_bool, seed_bits
from cupy_fa2.problem.qkv import OUT_DTYPES

__all__ = ["flash_attention"]

SIMULATOR_LIMIT = 1e9  # multiply-adds that just run: half a minute at most

_OUT_NUMPY = {name: dtype for dtype, name in OUT_DTYPES.items()}
_POINTERS = struct.Struct("<3Q")  # q, k, v, adjacent
_RESULTS = struct.Struct("<2Q")  # out, lse
_POINTERS_AT = FWD_PARAMS.offset("q")
_FIELD = struct.Struct("<Q")  # any other address, or the seed
_OUT_AT = FWD_PARAMS.offset("out")
_FIELDS_AT = {field.name: FWD_PARAMS.offset(field.name) for field in FWD_PARAMS.fields}
_MAPS_AT = FWD_TENSOR_PARAMS.offset("k_map")

_MAX_PREPARED = 4096
_MAX_MAPS = 64  # of each


@dataclass(frozen=True)
class Prepared:
    """A signature's call: everything but the addresses."""

    problem: Problem
    plan: Plan
    kernel: CupyKernel
    args: bytes
    empty: bool  # no output element
    spans: tuple[tuple[int, int], ...]  # of q, k, v and out: first byte and the one after the last, from the address
    operand_spans: dict[str, tuple[int, int]]  # of the options that are arrays on the device
    boxes: tuple[TensorBox, TensorBox] | None  # of k and v, for a kernel that takes tensor maps
    maps: dict[tuple[int, int], bytes]  # by addresses of k and v

    def tensor_maps(self, k: int, v: int) -> bytes:
        """The maps of k and v at these addresses; remembered, for callers that reuse their buffers."""
        maps = self.maps.get((k, v))
        if maps is None:
            assert self.boxes is not None
            maps = encode_cuda(k, self.boxes[0]) + encode_cuda(v, self.boxes[1])
            if len(self.maps) >= _MAX_MAPS:
                self.maps.clear()
            self.maps[k, v] = maps
        return maps


_prepared: dict[tuple[Any, ...], Prepared] = {}


def flash_attention(q: Any, k: Any, v: Any, options: Options) -> Any:
    """See `cupy_fa2.flash_attention`: decide where the call runs, and run it."""
    check_bool("return_lse", options.return_lse)
    out = options.out
    # Whoever has a CuPy array has imported it; another thread may be half-way through importing it.
    cupy: Any = sys.modules.get("cupy")
    if not type(q) is type(k) is type(v) is getattr(cupy, "ndarray", None):
        if all(isinstance(x, np.ndarray) for x in (q, k, v)):
            return _simulate(q, k, v, options)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not any(hasattr(x, protocol) for protocol in ("__dlpack__", "__cuda_array_interface__")):
                raise TypeError(
                    f"{name} must be a cupy.ndarray, an array on a CUDA device that speaks DLPack or "
                    "__cuda_array_interface__, or (with q, k and v alike) a numpy.ndarray; got "
                    f"{type(x).__name__}"
                )
        cupy = import_cupy()
        q, k, v = (adopt(cupy, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    if out is not None and not isinstance(out, cupy.ndarray):
        raise TypeError(
            f"out must be a cupy.ndarray, got {type(out).__name__}; wrap other arrays with cupy.from_dlpack(out)"
        )
    device_id = q.data.device_id
    for name, x in (("k", k), ("v", v), ("out", out)):
        if x is not None and x.data.device_id != device_id:
            raise ValueError(
                f"all arrays must be on one device: q is on CUDA device {device_id}, {name} on {x.data.device_id}"
            )
    if cupy.cuda.runtime.getDevice() == device_id:
        return _launch(cupy, q, k, v, options)
    with cupy.cuda.Device(device_id):
        return _launch(cupy, q, k, v, options)


def _launch(cupy: Any, q: Any, k: Any, v: Any, options: Options) -> Any:
    """The call on the current device and its current stream."""
    causal, align, softmax_scale, out = options.causal, options.align, options.softmax_scale, options.out
    q_ptr, k_ptr, v_ptr = q.data.ptr, k.data.ptr, v.data.ptr
    out_ptr = 0 if out is None else out.data.ptr
    extras = None if options.plain else Extras.of(cupy, options, q.data.device_id)
    # Equal keys must mean equal calls: True == 1 == 1.0, hence the types.
    key: tuple[Any, ...] = (
        q.data.device_id, q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype,
        q_ptr & 15, k_ptr & 15, v_ptr & 15, out_ptr & 15, causal, type(causal), options.layout, options.out_dtype,
        softmax_scale, type(softmax_scale), None if out is None else (out.shape, out.strides, out.dtype),
        (align, type(align)) if extras is None else extras.signature,
    )  # fmt: skip
    try:
        call = _prepared.get(key)
    except TypeError:  # an argument that cannot be hashed is checked every time
        key, call = (), None
    if call is None:
        call = _prepare(key, q, k, v, options, {} if extras is None else extras.operands)
    problem = call.problem
    if out is None:
        out = cupy.empty(problem.out_shape, _OUT_NUMPY[problem.out_dtype])
    else:
        (q_low, q_high), (k_low, k_high), (v_low, v_high), (low, high) = call.spans
        low, high = out_ptr + low, out_ptr + high
        if not (
            (q_ptr + q_low >= high or low >= q_ptr + q_high)
            and (k_ptr + k_low >= high or low >= k_ptr + k_high)
            and (v_ptr + v_low >= high or low >= v_ptr + v_high)
        ):
            check_overlap(out, out_ptr, (("q", q, q_ptr), ("k", k, k_ptr), ("v", v, v_ptr)))
        if extras is not None:
            extras.check_overlap(out, low, high, call.operand_spans)
    # Held until the launch: what is freed before could become lse.
    operands = {} if extras is None else readable(cupy, extras.operands, problem)
    lse = cupy.empty(problem.lse_shape, np.float32) if options.return_lse else None
    if not call.empty:
        if any(problem.copied):
            refuse_capture("q, k or v has to be copied first", "pass aligned arrays with a contiguous last axis")
            q, k, v = (packed(cupy, x) if copied else x for x, copied in zip((q, k, v), problem.copied, strict=True))
            q_ptr, k_ptr, v_ptr = q.data.ptr, k.data.ptr, v.data.ptr
        args = bytearray(call.args)
        _POINTERS.pack_into(args, _POINTERS_AT, q_ptr, k_ptr, v_ptr)
        _RESULTS.pack_into(args, _OUT_AT, out.data.ptr, 0 if lse is None else lse.data.ptr)
        if extras is not None:
            _FIELD.pack_into(args, _FIELDS_AT["dropout_seed"], extras.seed)
            for name, x in operands.items():
                _FIELD.pack_into(args, _FIELDS_AT[FIELDS[name]], x.data.ptr)
        if call.boxes is not None:
            args[_MAPS_AT:] = call.tensor_maps(k_ptr, v_ptr)
        call.kernel(call.plan, args)
    return out if lse is None else (out, lse)


def _prepare(key: tuple[Any, ...], q: Any, k: Any, v: Any, options: Options, operands: dict[str, Any]) -> Prepared:
    device_id, out = q.data.device_id, options.out
    problem = Problem.from_arrays(
        q,
        k,
        v,
        options._replace(**operands),
        addresses=(q.data.ptr, k.data.ptr, v.data.ptr, 0 if out is None else out.data.ptr),
        option_addresses={name: device_pointer(x) for name, x in operands.items()},
    )
    plan = plan_forward(problem, cuda_device(device_id))
    kernel = load_cuda(plan, device_id)
    args = encode_forward(problem, plan, {})
    boxes = None
    if plan.spec.kv == "tensor":
        boxes = key_value_boxes(problem, plan)
    spans = tuple(span(x) for x in (q, k, v, q if out is None else out))
    operand_spans = {name: span(x) for name, x in operands.items() if not isinstance(x, np.ndarray)}
    empty = math.prod(problem.out_shape) == 0
    call = Prepared(problem, plan, kernel, args, empty, spans, operand_spans, boxes, {})
    if key:
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[key] = call
    return call


def _simulate(q: Any, k: Any, v: Any, options: Options) -> Any:
    """The call on NumPy arrays."""
    out = options.out
    if out is not None and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy.ndarray like q, k and v, got {type(out).__name__}")
    operands = host_operands(options)
    options = options._replace(**operands)
    problem = Problem.from_arrays(
        q,
        k,
        v,
        options,
        addresses=(address_of(q), address_of(k), address_of(v), 0 if out is None else address_of(out)),
        option_addresses={name: address_of(x) for name, x in operands.items()},
    )
    operands = readable(np, operands, problem)
    simulator = current_simulator()
    if simulator.limited and problem.multiply_adds > SIMULATOR_LIMIT:
        raise ValueError(
            f"q, k and v are NumPy arrays, which run in the simulator, and {problem.multiply_adds:.2g} multiply-adds "
            f"take it long (more than {SIMULATOR_LIMIT:.0g}). Move them to a GPU with cupy.asarray(x), or insist with: "
            "with cupy_fa2.simulator(): ..."
        )
    if out is None:
        out = empty_aligned(problem.out_shape, _OUT_NUMPY[problem.out_dtype])
    else:
        if not out.flags.writeable:
            raise ValueError("out is read-only; pass a writable array")
        others = {"q": q, "k": k, "v": v, **operands}
        check_overlap(out, address_of(out), [(name, x, address_of(x)) for name, x in others.items()])
    lse = empty_aligned(problem.lse_shape, np.dtype(np.float32)) if options.return_lse else None
    if out.size:
        plan = plan_forward(problem, simulator.device)
        inputs = [packed(np, x) if copied else x for x, copied in zip((q, k, v), problem.copied, strict=True)]
        memory = ptxsim.GlobalMemory()
        bound = {name: memory.bind(x, name) for x, name in zip(inputs, "qkv", strict=True)}
        bound["out"] = memory.bind(out, "out", writable=True)
        bound["lse"] = 0 if lse is None else memory.bind(lse, "lse", writable=True)
        bound |= {FIELDS[name]: memory.bind(x, name) for name, x in operands.items()}
        seed = 0 if "dropout_seed" in operands else seed_bits(options.dropout_seed)
        simulator.run(plan, arguments(problem, plan, {**bound, "dropout_seed": seed}, _simulated_map), memory)
    return out if lse is None else (out, lse)


def _simulated_map(address: int, tensor: TensorBox) -> bytes:
    ones = (1,) * len(tensor.dims)
    encoded: bytes = ptxsim.encode_tensor_map(address, 2, tensor.dims, tensor.strides, tensor.box, ones, 128)
    return encoded
