"""Kernels that can be launched: on a GPU through CuPy, or in the simulator. One call signature for both."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_fa2 import ptxsim
from cupy_fa2.compile import Binary, build, gather_sources
from cupy_fa2.device import Device, named_device
from cupy_fa2.kernel.forward import ENTRY, KernelSpec
from cupy_fa2.kernel.params import FWD_PARAMS, FWD_TENSOR_PARAMS
from cupy_fa2.plan import Plan

__all__ = ["CupyKernel", "SimKernel", "Simulator", "current_simulator", "load_cuda", "load_simulated", "simulator"]


class CupyKernel:
    """A kernel loaded on one CUDA device.

    Parameters
    ----------
    spec : KernelSpec
    device : Device
        What to assemble for.
    shared_bytes : int
        Dynamic shared memory of its launches.
    """

    def __init__(self, spec: KernelSpec, device: Device, shared_bytes: int) -> None:
        import cupy

        self.spec = spec
        self._struct = np.dtype(("V", (FWD_TENSOR_PARAMS if spec.kv == "tensor" else FWD_PARAMS).size))
        self.binary: Binary = build(spec, device.target)
        # RawModule reads a file. The cache's entries carry more than the cubin, and the cache may be read-only.
        # CuPy remembers modules by their path, so the path has to say what is in the file.
        digest = hashlib.sha256(self.binary.cubin).hexdigest()
        with tempfile.TemporaryDirectory(prefix="cupy_fa2_") as folder:
            path = os.path.join(folder, f"{digest}.cubin")
            with open(path, "wb") as file:
                file.write(self.binary.cubin)
            self._module = cupy.RawModule(path=path)
            self._kernel = self._module.get_function(ENTRY)
            # Setting an attribute loads the module on the current device, while the file is there.
            self._kernel.max_dynamic_shared_size_bytes = shared_bytes

    def __call__(self, plan: Plan, args: bytes | bytearray) -> None:
        """Launch on the current stream of the current device."""
        struct = np.frombuffer(args, dtype=self._struct)  # one element: CuPy passes it by value
        self._kernel(plan.grid, plan.block, (struct,), shared_mem=plan.shared_bytes)


class SimKernel:
    """The PTX of a kernel, ready to be simulated.

    Parameters
    ----------
    spec : KernelSpec
    device : Device
        Whose PTX, and whose plan.
    """

    def __init__(self, spec: KernelSpec, device: Device) -> None:
        self.spec = spec
        self._card = ptxsim.Card(device.name, device.shared_per_block)
        binary = build(spec, device.virtual_target, line_info=True)
        self._kernel = ptxsim.parse_kernel(binary.ptx, entry=ENTRY, sources=gather_sources(spec.render()))

    def __call__(self, plan: Plan, args: bytes | bytearray, memory: ptxsim.GlobalMemory) -> ptxsim.Report:
        """Run every block; raises on the first hazard."""
        return ptxsim.launch(
            self._kernel,
            grid=plan.grid,
            block=plan.block,
            shared_bytes=plan.shared_bytes,
            params=bytes(args),
            memory=memory,
            card=self._card,
        )


_loaded: dict[tuple[KernelSpec, int | str], Any] = {}
_lock = threading.Lock()


def load_cuda(plan: Plan, device_id: int) -> CupyKernel:
    """The plan's kernel on a CUDA device, which has to be the current one; compiled and loaded on first use.

    Raises
    ------
    RuntimeError
        If the current stream is being captured and the kernel is not loaded yet: loading synchronises, which would
        spoil the capture.
    """
    key = (plan.spec, device_id)
    kernel = _loaded.get(key)
    if kernel is None:
        refuse_capture(f"the kernel {plan.spec.name} has to be compiled and loaded", "call it once before the capture")
        with _lock:
            kernel = _loaded.get(key)
            if kernel is None:
                kernel = _loaded[key] = CupyKernel(plan.spec, plan.device, plan.shared_bytes)
    assert isinstance(kernel, CupyKernel)
    return kernel


def load_simulated(plan: Plan) -> SimKernel:
    """The plan's kernel in the simulator."""
    key = (plan.spec, plan.device.name)
    with _lock:
        if key not in _loaded:
            _loaded[key] = SimKernel(plan.spec, plan.device)
        kernel = _loaded[key]
    assert isinstance(kernel, SimKernel)
    return kernel


def refuse_capture(what: str, remedy: str) -> None:
    """Raise if the current CuPy stream is being captured into a graph."""
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(f"the current stream is being captured into a CUDA graph, but {what}; {remedy}")


@dataclass
class Simulator:
    """Where NumPy arrays run, and what their launches did.

    Attributes
    ----------
    device : Device
        The GPU that is simulated: it decides the plan.
    reports : list of ptxsim.Report
        One per launch, in order.
    seconds : float
        Wall-clock time spent in the simulator.
    limited : bool
        Whether calls above a billion multiply-adds are refused.
    """

    device: Device
    reports: list[ptxsim.Report] = field(default_factory=list)
    seconds: float = 0.0
    limited: bool = False

    @property
    def report(self) -> ptxsim.Report:
        """The sum over all launches."""
        if not self.reports:
            raise RuntimeError("nothing has been simulated yet")
        total = self.reports[0]
        for report in self.reports[1:]:
            total = total + report
        return total

    def run(self, plan: Plan, args: bytes, memory: ptxsim.GlobalMemory) -> None:
        """Simulate one launch and keep its report."""
        begin = time.perf_counter()
        report = load_simulated(plan)(plan, args, memory)
        self.seconds += time.perf_counter() - begin
        if not self.limited:
            self.reports.append(report)


# Without a `with`, calls are limited in size and leave no reports behind.
_default = Simulator(named_device("A100"), limited=True)
_current: contextvars.ContextVar[Simulator] = contextvars.ContextVar("cupy_fa2_simulator", default=_default)


def current_simulator() -> Simulator:
    """The simulator that a call with NumPy arrays uses here."""
    return _current.get()


@contextlib.contextmanager
def simulator(device: str = "A100") -> Iterator[Simulator]:
    """Run NumPy arrays of any size on a simulated GPU, and collect what the launches did.

    Parameters
    ----------
    device : str
        Name of the simulated GPU; it decides the plan (tile, shared memory). See `cupy_fa2.device.NAMED_DEVICES`.

    Yields
    ------
    Simulator
        With `reports`, one per launch, and `report`, their sum.

    Raises
    ------
    ValueError
        If the device is unknown.

    Examples
    --------
    >>> with cupy_fa2.simulator("H200") as sim:                    # doctest: +SKIP
    ...     out = cupy_fa2.flash_attention(q, k, v, causal=True)
    >>> sim.report.bank_conflicts                                  # doctest: +SKIP
    0
    """
    chosen = Simulator(named_device(device))
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)
