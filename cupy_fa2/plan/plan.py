"""A plan: what is launched, in order, and the scratch that it wants. Frozen values that say all there is to know.

Whoever runs a plan needs nothing else: the simulator, a CUDA graph, the manifest of an exported kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupy_fa2.device import Device
from cupy_fa2.kernel.base import KernelSpec
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
        Bytes.
    zeroed : bool
        Whether it must be zero before the first launch. Otherwise its contents do not matter.
    """

    name: str
    nbytes: int
    alignment: int = 256
    zeroed: bool = False


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
    """Sets every byte of an array or a buffer.

    Attributes
    ----------
    writes : tuple of str
        The one that is filled.
    byte : int
    """

    writes: tuple[str]
    byte: int = 0
    reads: tuple[str, ...] = ()

    def describe(self, device: Device) -> str:
        """The fill in words."""
        return f"every byte of {self.writes[0]} set to {self.byte}"


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
        written = {name for name in names if self.buffer(name).zeroed}
        for launch in self.launches:
            for name in launch.reads:
                if name in names and name not in written:
                    raise ValueError(f"{name} is read before anything has written it")
            written.update(launch.writes)

    @property
    def kernels(self) -> tuple[Launch, ...]:
        """The launches of kernels."""
        return tuple(launch for launch in self.launches if isinstance(launch, Launch))

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name."""
        return next(buffer for buffer in self.workspace if buffer.name == name)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch, each buffer at its alignment."""
        return self.workspace_offsets[1]

    @property
    def workspace_offsets(self) -> tuple[dict[str, int], int]:
        """Where each buffer lies in one allocation, aligned as the widest of them, and how long that is."""
        offsets, end = {}, 0
        for buffer in self.workspace:
            offsets[buffer.name] = -(-end // buffer.alignment) * buffer.alignment
            end = offsets[buffer.name] + buffer.nbytes
        return offsets, end

    def explain(self) -> str:
        """The plan in words."""
        steps = "; then ".join(launch.describe(self.device) for launch in self.launches)
        scratch = f" Scratch: {self.workspace_bytes} bytes." if self.workspace else ""
        return f"{steps}. {self.reason}.{scratch}"
