"""The simulator as a place to run: NumPy arrays, and the PTX of the very kernels that a GPU would get."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_fa2 import ptxsim
from cupy_fa2.call.adopt import address_of, empty_aligned
from cupy_fa2.compile import build, gather_sources
from cupy_fa2.device import Device, named_device
from cupy_fa2.kernel.base import KernelSpec, target
from cupy_fa2.kernel.params import ABI_SYMBOL, check_abi
from cupy_fa2.kernel.tensor_box import TensorBox
from cupy_fa2.plan import Launch
from cupy_fa2.problem import Problem

__all__ = ["SimKernel", "SimulatedPlace", "Simulator", "current_simulator", "simulator"]

SIMULATOR_LIMIT = 1e9  # multiply-adds that just run: half a minute at most


class SimKernel:
    """The PTX of a kernel, ready to be simulated as a device would run it."""

    def __init__(self, spec: KernelSpec, device: Device) -> None:
        self._card = ptxsim.Card(device.name, device.shared_per_block)
        binary = build(spec, target(spec, device, virtual=True), line_info=True)
        self._kernel = ptxsim.parse_kernel(binary.ptx, entry=spec.entry, sources=gather_sources(spec.render()))
        check_abi(spec.name, int.from_bytes(self._kernel.variables[ABI_SYMBOL], "little"))

    def __call__(self, launch: Launch, args: bytes | bytearray, place: SimulatedPlace) -> None:
        """Run every block; raises on the first hazard, and keeps a report of what happened."""
        begin = time.perf_counter()
        report = ptxsim.launch(
            self._kernel,
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared_bytes,
            params=bytes(args),
            memory=place.memory,
            card=self._card,
            observer=place.simulator.observer,
        )
        place.simulator.add(report, time.perf_counter() - begin)


_kernels: dict[tuple[KernelSpec, Device], SimKernel] = {}
_lock = threading.Lock()


class SimulatedPlace:
    """One call's share of a simulator: the memory in which its arrays are bound.

    Parameters
    ----------
    simulator : Simulator
        Which card it is, and where reports go.
    """

    xp = np
    simulated = True

    def __init__(self, simulator: Simulator) -> None:
        self.device = simulator.device
        self.key = simulator.device
        self.simulator = simulator
        self.memory = ptxsim.GlobalMemory()

    address = staticmethod(address_of)

    def adopt(self, name: str, x: Any, *, from_host: bool = False) -> Any:
        """`x`, if it is a NumPy array."""
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name} must be a numpy.ndarray where q, k and v are, got {type(x).__name__}")
        return x

    def current(self) -> Any:
        """It always is."""
        return contextlib.nullcontext()

    def check_out(self, out: Any) -> None:
        """Raise unless `out` is a NumPy array."""
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out must be a numpy.ndarray like q, k and v, got {type(out).__name__}")

    def check_call(self, problem: Problem, out: Any) -> None:
        """Refuse what would take minutes, outside of ``with simulator()``, and an `out` that may not be written to."""
        if self.simulator.limited and problem.multiply_adds > SIMULATOR_LIMIT:
            raise ValueError(
                f"q, k and v are NumPy arrays, which run in the simulator, and {problem.multiply_adds:.2g} "
                f"multiply-adds take it long (more than {SIMULATOR_LIMIT:.0g}). Move them to a GPU with "
                "cupy.asarray(x), or insist with: with cupy_fa2.simulator(): ..."
            )
        if out is not None and not out.flags.writeable:
            raise ValueError("out is read-only; pass a writable array")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array that begins where CuPy's would; the simulator knows that nothing has written it."""
        return empty_aligned(shape, np.dtype(dtype))

    def bind(self, name: str, x: Any, *, writable: bool = False, readable: bool | None = None) -> int:
        """Show an array to the kernels, under its name."""
        address: int = self.memory.bind(x, name, writable=writable, readable=readable)
        return address

    def tensor_map(self, address: int, box: TensorBox) -> bytes:
        """A tensor map as the simulator's copy engine reads it."""
        ones = (1,) * len(box.dims)
        encoded: bytes = ptxsim.encode_tensor_map(address, 2, box.dims, box.strides, box.box, ones, 128)
        return encoded

    def load(self, spec: KernelSpec) -> SimKernel:
        """The kernel, compiled and parsed on first use."""
        key = (spec, self.device)
        begin = time.perf_counter()
        with _lock:
            if key not in _kernels:
                _kernels[key] = SimKernel(spec, self.device)
        self.simulator.seconds += time.perf_counter() - begin
        return _kernels[key]

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set bytes, which may be read from then on."""
        self.memory.fill(address, byte)

    def refuse_capture(self, what: str, remedy: str) -> None:
        """Nothing is captured here."""


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
        Wall-clock time spent in the simulator, compiling and parsing kernels included.
    limited : bool
        Whether calls above a billion multiply-adds are refused, and nothing is kept of the others.
    observer : ptxsim.Observer, optional
        Told of every step of every launch.
    """

    device: Device
    reports: list[ptxsim.Report] = field(default_factory=list)
    seconds: float = 0.0
    limited: bool = False
    observer: ptxsim.Observer | None = None

    @property
    def report(self) -> ptxsim.Report:
        """The sum over all launches."""
        if not self.reports:
            raise RuntimeError("nothing has been simulated yet")
        total = self.reports[0]
        for report in self.reports[1:]:
            total = total + report
        return total

    @contextlib.contextmanager
    def current(self) -> Iterator[Simulator]:
        """Within, calls with NumPy arrays run here."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def add(self, report: ptxsim.Report, seconds: float) -> None:
        """Keep what one launch did."""
        self.seconds += seconds
        if not self.limited:
            self.reports.append(report)


# Without a `with`, calls are limited in size and leave no reports behind.
_default = Simulator(named_device("A100"), limited=True)
_current: contextvars.ContextVar[Simulator] = contextvars.ContextVar("cupy_fa2_simulator", default=_default)


def current_simulator() -> Simulator:
    """The simulator that a call with NumPy arrays uses here."""
    return _current.get()


@contextlib.contextmanager
def simulator(device: str = "A100", *, observer: ptxsim.Observer | None = None) -> Iterator[Simulator]:
    """Run NumPy arrays of any size on a simulated GPU, and collect what the launches did.

    Parameters
    ----------
    device : str
        Name of the simulated GPU; it decides the plan (tile, shared memory). See `cupy_fa2.device.NAMED_DEVICES`.
    observer : ptxsim.Observer, optional
        Told of every step of every launch: see docs/debugging.md. Slows the simulation down by a third.

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
    with Simulator(named_device(device), observer=observer).current() as chosen:
        yield chosen
