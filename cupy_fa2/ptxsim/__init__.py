"""A machine for the PTX that NVRTC makes of our kernels: NumPy arrays in, NumPy arrays out, no GPU.

It is stricter than a GPU: what a GPU lets pass or hides (a race, an uninitialised read, a read between the
elements of a view, a missing wait) is an error here, with the PTX line and the source line.
"""

from .errors import (
    AsyncCopyError,
    DivergenceError,
    Frame,
    HazardError,
    LaunchError,
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

__all__ = [
    "AsyncCopyError",
    "Device",
    "DivergenceError",
    "Frame",
    "GlobalMemory",
    "HazardError",
    "Kernel",
    "LaunchError",
    "MisalignedAddressError",
    "OutOfBoundsError",
    "ParseError",
    "RaceError",
    "Report",
    "SimulationError",
    "UninitializedReadError",
    "UnsupportedInstruction",
    "launch",
    "parse_kernel",
]
