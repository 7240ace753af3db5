"""What all kernels have in common, whichever family they are of."""

from __future__ import annotations

from typing import Protocol

from cupy_fa2.device import Device
from cupy_fa2.kernel.param_struct import ParamStruct

__all__ = ["KernelSpec", "target"]


class KernelSpec(Protocol):
    """One kernel instance: all that its machine code depends on, and nothing else.

    Specs are frozen, and equal ones are the same kernel: plans, caches and loaders use them as keys. Whoever builds,
    loads, launches or exports a kernel needs no more of it than this.
    """

    @property
    def name(self) -> str:
        """A readable name, unique among specs."""

    @property
    def entry(self) -> str:
        """Name of the kernel's function in its module."""

    @property
    def params(self) -> ParamStruct:
        """The struct that it takes by value."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""

    @property
    def only_arch(self) -> int | None:
        """The one architecture whose own instructions it uses, such as 90 for ``wgmma``; None for a kernel without.

        Such a kernel is compiled for ``sm_90a`` and runs on that architecture alone.
        """

    def render(self) -> str:
        """The translation unit."""


def target(spec: KernelSpec, device: Device, *, virtual: bool = False) -> str:
    """What `spec` is compiled for to run on `device`: ``"sm_90"``, or ``"sm_90a"`` for what runs on that alone.

    Parameters
    ----------
    spec : KernelSpec
    device : Device
    virtual : bool
        For PTX alone, which the simulator runs: ``"compute_90"``.

    Raises
    ------
    ValueError
        If it cannot run there.
    """
    if spec.only_arch not in (None, device.arch):
        raise ValueError(f"{spec.name} runs on sm_{spec.only_arch} alone, {device.name} is sm_{device.arch}")
    return f"{'compute' if virtual else 'sm'}_{device.arch}{'a' if spec.only_arch else ''}"
