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
from cupy_fa2.device import cuda_device
from cupy_fa2.params import FWD_PARAMS, FWD_TENSOR_PARAMS_BYTES, MAX_SEQLEN, TENSOR_MAPS_AT
from cupy_fa2.plan import Plan, encode_forward, plan_forward
from cupy_fa2.problem import OUT_DTYPES, Problem, padded_head_dim
from cupy_fa2.runtime import CupyKernel, current_simulator, load_cuda, refuse_capture
from cupy_fa2.tensormap import TensorBox, arguments, encode_cuda, key_value_boxes

__all__ = ["flash_attention"]

SIMULATOR_LIMIT = 1e9  # multiply-adds that just run: half a minute at most

_OUT_NUMPY = {name: dtype for dtype, name in OUT_DTYPES.items()}
assert FWD_PARAMS.dtype.fields is not None
_POINTERS = struct.Struct("<5Q")  # q, k, v, out, lse, adjacent in FwdParams
_POINTERS_AT = FWD_PARAMS.dtype.fields["q"][1]
_DIAGONALS = struct.Struct("<Q")
_DIAGONALS_AT = FWD_PARAMS.dtype.fields["diagonal_offsets"][1]

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
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


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    align: Any,
    softmax_scale: Any,
    layout: Any,
    out: Any,
    out_dtype: Any,
    return_lse: Any,
) -> Any:
    """See `cupy_fa2.flash_attention`: decide where the call runs, and run it."""
    if not isinstance(return_lse, bool | np.bool_):
        raise TypeError(f"return_lse must be a bool, got {type(return_lse).__name__}")
    return_lse = bool(return_lse)
    # Whoever has a CuPy array has imported it; another thread may be half-way through importing it.
    cupy: Any = sys.modules.get("cupy")
    if not type(q) is type(k) is type(v) is getattr(cupy, "ndarray", None):
        if all(isinstance(x, np.ndarray) for x in (q, k, v)):
            return _simulate(q, k, v, causal, align, softmax_scale, layout, out, out_dtype, return_lse)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not any(hasattr(x, protocol) for protocol in ("__dlpack__", "__cuda_array_interface__")):
                raise TypeError(
                    f"{name} must be a cupy.ndarray, an array on a CUDA device that speaks DLPack or "
                    "__cuda_array_interface__, or (with q, k and v alike) a numpy.ndarray; got "
                    f"{type(x).__name__}"
                )
        cupy = _import_cupy()
        q, k, v = (_adopt(cupy, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
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
        return _launch(cupy, q, k, v, causal, align, softmax_scale, layout, out, out_dtype, return_lse)
    with cupy.cuda.Device(device_id):
        return _launch(cupy, q, k, v, causal, align, softmax_scale, layout, out, out_dtype, return_lse)


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "arrays that are not NumPy's need CuPy: pip install cupy-cuda12x 'cuda-toolkit[nvrtc,cudart]==12.*'"
        ) from error
    return cupy


def _adopt(cupy: Any, name: str, x: Any) -> Any:
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


def _launch(
    cupy: Any,
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    align: Any,
    softmax_scale: Any,
    layout: Any,
    out: Any,
    out_dtype: Any,
    return_lse: bool,
) -> Any:
    """The call on the current device and its current stream."""
    q_ptr, k_ptr, v_ptr = q.data.ptr, k.data.ptr, v.data.ptr
    out_ptr = 0 if out is None else out.data.ptr
    diagonals = 0
    if not isinstance(align, str | int):
        align, diagonals = _device_diagonals(cupy, align, q.data.device_id)
    # Equal keys must mean equal calls: True == 1 == 1.0, hence the types.
    key = (
        q.data.device_id,
        *(q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype),
        *(q_ptr & 15, k_ptr & 15, v_ptr & 15, out_ptr & 15),
        *(causal, type(causal), layout, out_dtype, softmax_scale, type(softmax_scale)),
        *((align, type(align)) if diagonals == 0 else (None, align.shape)),
        None if out is None else (out.shape, out.strides, out.dtype),
    )
    try:
        call = _prepared.get(key)
    except TypeError:  # an argument that cannot be hashed is checked every time
        key, call = (), None
    if call is None:
        call = _prepare(key, q, k, v, causal, align, softmax_scale, layout, out, out_dtype)
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
            _check_overlap(out, out_ptr, (("q", q, q_ptr), ("k", k, k_ptr), ("v", v, v_ptr)))
        if diagonals:
            _check_overlap(out, out_ptr, (("align", align, diagonals),))
    lse = cupy.empty(problem.lse_shape, np.float32) if return_lse else None
    if not call.empty:
        if any(problem.copied):
            refuse_capture("q, k or v has to be copied first", "pass aligned arrays with a contiguous last axis")
            q, k, v = (_packed(cupy, x) if copied else x for x, copied in zip((q, k, v), problem.copied, strict=True))
            q_ptr, k_ptr, v_ptr = q.data.ptr, k.data.ptr, v.data.ptr
        args = bytearray(call.args)
        _POINTERS.pack_into(args, _POINTERS_AT, q_ptr, k_ptr, v_ptr, out.data.ptr, 0 if lse is None else lse.data.ptr)
        if diagonals:
            _DIAGONALS.pack_into(args, _DIAGONALS_AT, diagonals)
        if call.boxes is not None:
            args[TENSOR_MAPS_AT:] = call.tensor_maps(k_ptr, v_ptr)
        call.kernel(call.plan, args)
    return out if lse is None else (out, lse)


def _prepare(
    key: tuple[Any, ...],
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    align: Any,
    softmax_scale: Any,
    layout: Any,
    out: Any,
    out_dtype: Any,
) -> Prepared:
    device_id = q.data.device_id
    problem = Problem.from_arrays(
        q,
        k,
        v,
        causal=causal,
        align=align,
        softmax_scale=softmax_scale,
        layout=layout,
        out=out,
        out_dtype=out_dtype,
        addresses=(q.data.ptr, k.data.ptr, v.data.ptr, 0 if out is None else out.data.ptr),
    )
    plan = plan_forward(problem, cuda_device(device_id))
    kernel = load_cuda(plan, device_id)
    args = encode_forward(problem, plan, (0, 0, 0, 0, 0), 0)
    boxes = None
    if plan.spec.kv == "tensor":
        args = args.ljust(FWD_TENSOR_PARAMS_BYTES, b"\0")
        boxes = key_value_boxes(problem, plan)
    spans = tuple(_span(x) for x in (q, k, v, q if out is None else out))
    call = Prepared(problem, plan, kernel, args, math.prod(problem.out_shape) == 0, spans, boxes, {})
    if key:
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[key] = call
    return call


def _simulate(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    align: Any,
    softmax_scale: Any,
    layout: Any,
    out: Any,
    out_dtype: Any,
    return_lse: bool,
) -> Any:
    """The call on NumPy arrays."""
    if out is not None and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy.ndarray like q, k and v, got {type(out).__name__}")
    if hasattr(align, "shape") and not isinstance(align, np.ndarray | np.generic):
        raise TypeError(f"align must be a numpy.ndarray where q, k and v are, got {type(align).__name__}")
    problem = Problem.from_arrays(
        q,
        k,
        v,
        causal=causal,
        align=align,
        softmax_scale=softmax_scale,
        layout=layout,
        out=out,
        out_dtype=out_dtype,
        addresses=(_address(q), _address(k), _address(v), 0 if out is None else _address(out)),
    )
    simulator = current_simulator()
    if simulator.limited and problem.multiply_adds > SIMULATOR_LIMIT:
        raise ValueError(
            f"q, k and v are NumPy arrays, which run in the simulator, and {problem.multiply_adds:.2g} multiply-adds "
            f"take it long (more than {SIMULATOR_LIMIT:.0g}). Move them to a GPU with cupy.asarray(x), or insist with: "
            "with cupy_fa2.simulator(): ..."
        )
    if out is None:
        out = _empty_aligned(problem.out_shape, _OUT_NUMPY[problem.out_dtype])
    else:
        if not out.flags.writeable:
            raise ValueError("out is read-only; pass a writable array")
        others = [("q", q, _address(q)), ("k", k, _address(k)), ("v", v, _address(v))]
        if isinstance(align, np.ndarray):
            others.append(("align", align, _address(align)))
        _check_overlap(out, _address(out), tuple(others))
    lse = _empty_aligned(problem.lse_shape, np.dtype(np.float32)) if return_lse else None
    if out.size:
        plan = plan_forward(problem, simulator.device)
        inputs = [_packed(np, x) if copied else x for x, copied in zip((q, k, v), problem.copied, strict=True)]
        memory = ptxsim.GlobalMemory()
        pointers = [memory.bind(x, name) for x, name in zip(inputs, "qkv", strict=True)]
        pointers.append(memory.bind(out, "out", writable=True))
        pointers.append(0 if lse is None else memory.bind(lse, "lse", writable=True))
        diagonals = 0
        if problem.diagonal is None:
            diagonals = memory.bind(_int32_diagonals(np, align, _address(align)), "align")
        q_at, k_at, v_at, out_at, lse_at = pointers
        args = arguments(problem, plan, (q_at, k_at, v_at, out_at, lse_at), diagonals, _simulated_map)
        simulator.run(plan, args, memory)
    return out if lse is None else (out, lse)


def _simulated_map(address: int, tensor: TensorBox) -> bytes:
    ones = (1,) * len(tensor.dims)
    encoded: bytes = ptxsim.encode_tensor_map(address, 2, tensor.dims, tensor.strides, tensor.box, ones, 128)
    return encoded


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A new array that begins at a multiple of 256 bytes, as CuPy's do: sectors are counted as on a GPU."""
    buffer = np.empty(math.prod(shape) * dtype.itemsize + 256, np.uint8)
    begin = -_address(buffer) % 256
    return buffer[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _address(x: Any) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


def _packed(xp: Any, x: Any) -> Any:
    """A C-contiguous copy whose last axis is padded with zeros to a multiple of 8. Bits are copied, not numbers."""
    padded = padded_head_dim(x.shape[3])
    copy = xp.zeros((*x.shape[:3], padded), np.uint16)
    copy[..., : x.shape[3]] = x.view(np.uint16)
    return copy


def _int32_diagonals(xp: Any, align: Any, address: int) -> Any:
    """The offsets as aligned, contiguous int32. Clamping changes nothing: no sequence is longer."""
    if align.dtype == np.int32 and align.flags.c_contiguous and address % 4 == 0:
        return align
    info = np.iinfo(align.dtype)
    return xp.ascontiguousarray(xp.clip(align, max(info.min, -MAX_SEQLEN), min(info.max, MAX_SEQLEN)).astype(np.int32))


def _device_diagonals(cupy: Any, align: Any, device_id: int) -> tuple[Any, int]:
    """`align` given as something else than a word or an int: a CuPy array, and its address as int32."""
    if isinstance(align, np.integer):
        return int(align), 0
    if not hasattr(align, "shape"):
        return align, 0  # left to Problem, to refuse by name
    align = _adopt(cupy, "align", align)
    if align.data.device_id != device_id:
        raise ValueError(f"align must be on q's CUDA device {device_id}, got {align.data.device_id}")
    if align.dtype.kind not in "iu" or align.ndim != 1 or align.size == 0:
        return align, 0
    if align.dtype != np.int32 or not align.flags.c_contiguous or align.data.ptr % 4:
        refuse_capture("align has to be converted first", "pass a contiguous int32 array")
        align = _int32_diagonals(cupy, align, align.data.ptr)
    return align, align.data.ptr


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


def _check_overlap(out: Any, out_address: int, inputs: tuple[tuple[str, Any, int], ...]) -> None:
    """Refuse an `out` that shares a byte with an input: a block would read what another has already written."""
    low, high = (out_address + end for end in _span(out))
    for name, x, address in inputs:
        x_low, x_high = (address + end for end in _span(x))
        if x_low >= high or low >= x_high:
            continue
        a, b = (np.asarray(_Footprint(y, at)) for y, at in ((out, out_address), (x, address)))
        try:
            overlap = np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]  # any int is right
        except np.exceptions.TooHardError:
            overlap = True
        if overlap:
            raise ValueError(f"out must not overlap {name}, got arrays that share memory")


def _span(x: Any) -> tuple[int, int]:
    """First byte, and the one after the last, counted from the array's address."""
    if x.size == 0:
        return 0, 0
    spans = [stride * (size - 1) for stride, size in zip(x.strides, x.shape, strict=True)]
    return sum(span for span in spans if span < 0), sum(span for span in spans if span > 0) + x.itemsize
