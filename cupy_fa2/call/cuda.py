"""CUDA devices as places to run: kernels loaded through CuPy, tensor maps by the driver."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import operator
import os
import tempfile
import threading
from typing import Any

import numpy as np

from cupy_fa2.call.adopt import adopt, import_cupy
from cupy_fa2.compile import Binary, build
from cupy_fa2.device import Device, cuda_device
from cupy_fa2.kernel.base import KernelSpec, target
from cupy_fa2.kernel.param_struct import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES
from cupy_fa2.kernel.params import ABI_SYMBOL, check_abi
from cupy_fa2.kernel.tensor_box import TensorBox
from cupy_fa2.plan import Launch
from cupy_fa2.problem import Problem

__all__ = ["CudaKernel", "CudaPlace", "cuda_place", "encode_tensor_map"]


class CudaKernel:
    """A kernel loaded on one CUDA device, which has to be the current one."""

    def __init__(self, spec: KernelSpec, target: str) -> None:
        import cupy

        self.binary: Binary = build(spec, target)
        self._struct = np.dtype(("V", spec.params.size))
        # RawModule reads a file. The cache's entries carry more than the cubin, and the cache may be read-only.
        # CuPy remembers modules by their path, so the path has to say what is in the file.
        digest = hashlib.sha256(self.binary.cubin).hexdigest()
        with tempfile.TemporaryDirectory(prefix="cupy_fa2_") as folder:
            path = os.path.join(folder, f"{digest}.cubin")
            with open(path, "wb") as file:
                file.write(self.binary.cubin)
            self._module = cupy.RawModule(path=path)
            self._kernel = self._module.get_function(spec.entry)
            # Setting an attribute loads the module on the current device, while the file is there.
            self._kernel.max_dynamic_shared_size_bytes = spec.shared_bytes
        version = ctypes.c_uint32()
        self._module.get_global(ABI_SYMBOL).copy_to_host(ctypes.addressof(version), ctypes.sizeof(version))
        check_abi(spec.name, version.value)

    def __call__(self, launch: Launch, args: bytes | bytearray, place: CudaPlace) -> None:
        """Launch on the current stream of the current device."""
        struct = np.frombuffer(args, dtype=self._struct)  # one element: CuPy passes it by value
        self._kernel(launch.grid, launch.block, (struct,), shared_mem=launch.shared_bytes)


class CudaPlace:
    """One CUDA device, which has to be the current one when something is loaded or launched."""

    def __init__(self, device_id: int) -> None:
        self.xp = import_cupy()
        self.key = device_id
        self.empty = self.xp.empty
        self._kernels: dict[KernelSpec, CudaKernel] = {}
        self._lock = threading.Lock()

    simulated = False
    address = staticmethod(operator.attrgetter("data.ptr"))

    @functools.cached_property
    def device(self) -> Device:
        """What plans depend on; raises on a card that is too old."""
        return cuda_device(self.key)

    def current(self) -> Any:
        """Make it the current device."""
        return self.xp.cuda.Device(self.key)

    def adopt(self, name: str, x: Any, *, from_host: bool = False) -> Any:
        """`x` as a CuPy array on this device, or as the NumPy array that it is, where `from_host`."""
        if from_host and isinstance(x, np.ndarray):
            return x
        x = adopt(self.xp, name, x)
        if x.data.device_id != self.key:
            raise ValueError(f"{name} must be on q's CUDA device {self.key}, got {x.data.device_id}")
        return x

    def check_out(self, out: Any) -> None:
        """Raise unless `out` is a CuPy array on this device."""
        if not isinstance(out, self.xp.ndarray):
            raise TypeError(
                f"out must be a cupy.ndarray, got {type(out).__name__}; wrap other arrays with cupy.from_dlpack(out)"
            )

    def check_call(self, problem: Problem, out: Any) -> None:
        """Any size runs: memory is the limit."""

    def bind(self, name: str, x: Any, *, writable: bool = False, readable: bool | None = None) -> int:
        """The array's address."""
        return int(x.data.ptr)

    def tensor_map(self, address: int, box: TensorBox) -> bytes:
        """A tensor map, from the CUDA driver."""
        return encode_tensor_map(address, box)

    def load(self, spec: KernelSpec) -> CudaKernel:
        """The kernel; compiled and loaded on first use.

        Raises
        ------
        RuntimeError
            If the current stream is being captured and the kernel is not loaded yet: loading synchronises, which would
            spoil the capture.
        """
        kernel = self._kernels.get(spec)
        if kernel is None:
            self.refuse_capture(
                f"the kernel {spec.name} has to be compiled and loaded", "call it once before the capture"
            )
            with self._lock:
                kernel = self._kernels.get(spec)
                if kernel is None:
                    kernel = self._kernels[spec] = CudaKernel(spec, target(spec, self.device))
        return kernel

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set bytes, on the current stream."""
        cuda = self.xp.cuda
        cuda.runtime.memsetAsync(address, byte, nbytes, cuda.get_current_stream().ptr)

    def refuse_capture(self, what: str, remedy: str) -> None:
        """Raise if the current stream is being captured into a graph."""
        if self.xp.cuda.get_current_stream().is_capturing():
            raise RuntimeError(f"the current stream is being captured into a CUDA graph, but {what}; {remedy}")


_places: dict[int, CudaPlace] = {}
_places_lock = threading.Lock()


def cuda_place(device_id: int) -> CudaPlace:
    """The CUDA device with this number."""
    place = _places.get(device_id)
    if place is None:
        with _places_lock:  # two places would each load every kernel
            place = _places.setdefault(device_id, CudaPlace(device_id))
    return place


# Enumerators of the driver API, cuda.h.
_DATA_TYPES = {"f16": 6, "bf16": 9}  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, _BFLOAT16
_INTERLEAVE_NONE = 0
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3
_OUT_OF_BOUNDS_ZEROS = 0


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


def encode_tensor_map(address: int, tensor: TensorBox) -> bytes:
    """The map of the array at `address`, by the CUDA driver.

    CuPy does not wrap ``cuTensorMapEncodeTiled``, so it is called through ctypes.

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
