"""A plan: what is launched, in order, and the scratch that it wants, as frozen values.

Whoever runs a problem needs no more than its plan: the simulator, a CUDA graph, the manifest of an exported kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupy_fa2.device import Device
from cupy_fa2.kernel.base import KernelSpec
from cupy_fa2.kernel.param_struct import Source
from cupy_fa2.kernel.tensor_box import TensorBox

__all__ = ["MAX_GRID", "Buffer", "Fill", "Launch", "Plan"]

#: Blocks along x, the one grid dimension that is used; the others end at 65,535.
MAX_GRID = 2**31 - 1


@dataclass(frozen=True)
class Buffer:
    """Scratch on the device that lives for one run of a plan.

    Attributes
    ----------
    name : str
        As launches, and the fields of their argument structs, have it.
    nbytes : int
    alignment : int
        Bytes: a power of two, at most 256, which is what allocations have.
    zeroed : bool
        Whether it must be zero before the first launch. Otherwise its contents do not matter.
    """

    name: str
    nbytes: int
    alignment: int = 256
    zeroed: bool = False

    def __post_init__(self) -> None:
        if self.alignment not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"{self.name}: alignment must be a power of two up to 256, got {self.alignment}")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes
    ----------
    spec : KernelSpec
    grid : tuple of int
        Blocks.
    reads, writes : tuple of str
        Arrays of the call and buffers of the workspace, by name.
    """

    spec: KernelSpec
    grid: tuple[int, int, int]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.grid[0] > MAX_GRID:
            raise ValueError(f"{self.spec.name}: a grid has at most {MAX_GRID} blocks along x, got {self.grid[0]}")
        known = {field.array for field in self.spec.params.of_source(Source.ADDRESS, Source.MAP)}
        unknown = {*self.reads, *self.writes} - known
        if unknown:
            raise ValueError(f"{self.spec.name} has no field for {', '.join(sorted(unknown))}")

    @functools.cached_property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block."""
        return self.spec.threads, 1, 1

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.spec.shared_bytes

    def values(self, problem: Any, device: Device) -> Mapping[str, int | float]:
        """Values of the argument struct's fields that say how the work is dealt out, by name."""
        return {}

    def boxes(self, problem: Any) -> Mapping[str, TensorBox]:
        """What the tensor maps among the argument struct's fields look like, by name."""
        return {}

    def describe(self, device: Device) -> str:
        """The launch in words."""
        return (
            f"{self.spec.name} on {device.name}: {self.grid[0]} blocks of {self.spec.threads} threads, each with "
            f"{self.shared_bytes} bytes of shared memory"
        )


@dataclass(frozen=True)
class Fill:
    """Sets every byte of a buffer.

    Attributes
    ----------
    buffer : str
    byte : int
    """

    buffer: str
    byte: int = 0

    @property
    def reads(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """The buffer."""
        return (self.buffer,)

    def describe(self, device: Device) -> str:
        """The fill in words."""
        return f"every byte of {self.buffer} set to {self.byte}"


@dataclass(frozen=True)
class Plan:
    """How calls of one structure run on one device.

    Attributes
    ----------
    launches : tuple of Launch or Fill
        In order; each sees what those before it have written.
    workspace : tuple of Buffer
    device : Device
    reason : str
        Why these kernels.
    """

    launches: tuple[Launch | Fill, ...]
    workspace: tuple[Buffer, ...]
    device: Device
    reason: str

    def __post_init__(self) -> None:
        names = [buffer.name for buffer in self.workspace]
        if len(set(names)) < len(names):
            raise ValueError(f"two buffers of one name among {', '.join(names)}")
        zeroed = {buffer.name for buffer in self.workspace if buffer.zeroed}
        for name in self.read_first:
            if name in names and name not in zeroed:
                raise ValueError(f"{name} is read before anything has written it")
        for launch in self.launches:
            if isinstance(launch, Fill) and launch.buffer not in names:
                raise ValueError(f"{launch.buffer} is no buffer of the plan, whose fills are of those alone")

    @functools.cached_property
    def read_first(self) -> frozenset[str]:
        """Arrays and buffers whose contents are read before the plan writes to them."""
        written: set[str] = set()
        found: set[str] = set()
        for launch in self.launches:
            found.update(name for name in launch.reads if name not in written)
            written.update(launch.writes)
        return frozenset(found)

    @property
    def kernels(self) -> tuple[Launch, ...]:
        """The launches of kernels."""
        return tuple(launch for launch in self.launches if isinstance(launch, Launch))

    @functools.cached_property
    def workspace_offsets(self) -> dict[str, int]:
        """Where each buffer lies in one allocation."""
        offsets, end = {}, 0
        for buffer in self.workspace:
            offsets[buffer.name] = -(-end // buffer.alignment) * buffer.alignment
            end = offsets[buffer.name] + buffer.nbytes
        return offsets

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """Bytes of scratch, each buffer at its alignment."""
        return max((self.workspace_offsets[buffer.name] + buffer.nbytes for buffer in self.workspace), default=0)

    def explain(self) -> str:
        """The plan in words."""
        steps = "; then ".join(launch.describe(self.device) for launch in self.launches)
        scratch = f" Scratch: {self.workspace_bytes} bytes." if self.workspace else ""
        return f"{steps}. {self.reason}.{scratch}"
