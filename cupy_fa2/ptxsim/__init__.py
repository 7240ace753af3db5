"""A machine for the PTX that NVRTC makes of our kernels: NumPy arrays in, NumPy arrays out, no GPU.

It is stricter than a GPU: what a GPU lets pass or hides (a race, an uninitialised read, a read between the
elements of a view, a missing wait) is an error here, with the PTX line and the source line.
"""

from .errors import (
    AsyncCopyError,
    DeadlockError,
    DivergenceError,
    Frame,
    HazardError,
    LaunchError,
    MbarrierError,
    MisalignedAddressError,
    OutOfBoundsError,
    ParseError,
    RaceError,
    SimulationError,
    UninitializedReadError,
    UnsupportedInstruction,
)
from .kernel import Kernel
from .machine import Device, launch
from .memory import GlobalMemory
from .parse import parse_kernel
from .report import Report
from .tensor_map import encode_tensor_map

__all__ = [
    "AsyncCopyError",
    "DeadlockError",
    "Device",
    "DivergenceError",
    "Frame",
    "GlobalMemory",
    "HazardError",
    "Kernel",
    "LaunchError",
    "MbarrierError",
    "MisalignedAddressError",
    "OutOfBoundsError",
    "ParseError",
    "RaceError",
    "Report",
    "SimulationError",
    "UninitializedReadError",
    "UnsupportedInstruction",
    "encode_tensor_map",
    "launch",
    "parse_kernel",
]
