"""A machine for the PTX that NVRTC makes of our kernels: NumPy arrays in, NumPy arrays out, no GPU.

It is stricter than a GPU: what a GPU lets pass or hides (a race, an uninitialised read, a read between the
elements of a view, a missing wait) is an error here, with the PTX line and the source line.

Where things are, and which folder may import which; each imports only from those to its right, and those in one pair of
braces know nothing of each other:

    run -> observe -> instructions -> state -> memory -> ordering -> {arithmetic, ptx} -> {types, errors}

- `ptx`: the text, parsed into a `Kernel`.
- `arithmetic`: what opcodes compute, pure functions of arrays.
- `ordering`: clocks, mbarriers, and the hazards of what nothing orders.
- `memory`: global arrays, shared memory, tensor maps.
- `state`: the blocks that run together, with their registers and counts.
- `instructions`: each instruction made a step, a closure over that state. A new instruction begins here.
- `observe`: what an `Observer` is told of all this.
- `run`: which step comes next (branches, barriers, waits), and `launch`.

What this package exports is the public part; the folders may change.
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
from .memory.global_memory import GlobalMemory
from .memory.tensor_map import encode_tensor_map
from .observe.observer import BatchView, Observer, StepEvent, WaitEvent
from .ptx.kernel import Kernel
from .ptx.parse import parse_kernel
from .run.launch import Card, launch
from .state.report import Report

__all__ = [
    "AsyncCopyError",
    "BatchView",
    "Card",
    "DeadlockError",
    "DivergenceError",
    "Frame",
    "GlobalMemory",
    "HazardError",
    "Kernel",
    "LaunchError",
    "MbarrierError",
    "MisalignedAddressError",
    "Observer",
    "OutOfBoundsError",
    "ParseError",
    "RaceError",
    "Report",
    "SimulationError",
    "StepEvent",
    "UninitializedReadError",
    "UnsupportedInstruction",
    "WaitEvent",
    "encode_tensor_map",
    "launch",
    "parse_kernel",
]
