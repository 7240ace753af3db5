"""Tensor maps: how the copy engine of sm_90 is told what an array looks like.

A map is 128 opaque bytes that ``cuTensorMapEncodeTiled`` of the CUDA driver API writes. CuPy does not wrap that
function, so it is called through ctypes; the simulator has an encoder of its own with the same arguments.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cupy_fa2.kernel.params import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES
from cupy_fa2.plan import Plan, encode_forward
from cupy_fa2.problem import Problem

__all__ = ["TensorBox", "arguments", "encode_cuda", "key_value_boxes"]

PANEL = 64  # columns of a box: one panel of a shared tile, 128 bytes, which is also the span of the swizzle

# Enumerators of the driver API, cuda.h.
_DATA_TYPES = {"f16": 6, "bf16": 9}  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, _BFLOAT16
_INTERLEAVE_NONE = 0
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3
_OUT_OF_BOUNDS_ZEROS = 0


@dataclass(frozen=True)
class TensorBox:
    """What a map says besides the address: sizes and strides, innermost axis first, and the box of one copy."""

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all axes but the innermost
    box: tuple[int, ...]


def key_value_boxes(problem: Problem, plan: Plan) -> tuple[TensorBox, TensorBox]:
    """The maps of k and v, over (head_dim, seqlen, heads, batch)."""

    def one(head_dim: int, strides: tuple[int, ...]) -> TensorBox:
        sizes = (problem.seqlen_k, problem.num_heads_k, problem.batch)
        batch, seq, head = strides
        # An axis of one step is never stepped along, but its stride has to be a legal one.
        steps = tuple(16 if n == 1 else 2 * s for n, s in zip(sizes, (seq, head, batch), strict=True))
        return TensorBox(problem.dtype, (head_dim, *sizes), steps, (PANEL, plan.spec.tile.block_n, 1, 1))

    return one(problem.head_dim, problem.strides_k), one(problem.head_dim_v, problem.strides_v)


def arguments(
    problem: Problem,
    plan: Plan,
    bindings: Mapping[str, Any],
    encode: Callable[[int, TensorBox], bytes],
) -> bytes:
    """All arguments of one launch, as `encode_forward` has them; with the maps of k and v, if the kernel takes them."""
    if plan.spec.kv != "tensor":
        return encode_forward(problem, plan, bindings)
    k_box, v_box = key_value_boxes(problem, plan)
    maps = {"k_map": encode(bindings["k"], k_box), "v_map": encode(bindings["v"], v_box)}
    return encode_forward(problem, plan, {**bindings, **maps})


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


def encode_cuda(address: int, tensor: TensorBox) -> bytes:
    """The map of the array at `address`, by the CUDA driver.

    Raises
    ------
    RuntimeError
        If the driver refuses it.
    """
    room = (ctypes.c_char * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
    begin = ctypes.addressof(room)
    begin += -begin % TENSOR_MAP_ALIGNMENT
    rank = len(tensor.dims)
    status = _driver()(
        ctypes.c_void_p(begin),
        _DATA_TYPES[tensor.dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*tensor.dims),
        (ctypes.c_uint64 * (rank - 1))(*tensor.strides),
        (ctypes.c_uint32 * rank)(*tensor.box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        _OUT_OF_BOUNDS_ZEROS,
    )
    if status != 0:
        raise RuntimeError(f"the CUDA driver refused a tensor map (error {status}) for {tensor}")
    return ctypes.string_at(begin, TENSOR_MAP_BYTES)
