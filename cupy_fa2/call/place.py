"""Where calls run: on a CUDA device, or in the simulator. The flow from arrays to launches is one and the same."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from cupy_fa2.device import Device
from cupy_fa2.kernel.base import KernelSpec
from cupy_fa2.kernel.tensor_box import TensorBox
from cupy_fa2.plan import Launch
from cupy_fa2.problem import Problem

__all__ = ["Kernel", "Place"]


class Kernel(Protocol):
    """A kernel that is loaded."""

    def __call__(self, launch: Launch, args: bytes | bytearray, place: Any) -> None:
        """Launch it where it was loaded, on the current stream if there are streams.

        Parameters
        ----------
        launch : Launch
            Whose kernel this is.
        args : bytes-like
            Its argument struct.
        place : Place
            With the key of the one where it was loaded; in the simulator, the call's own memory.
        """


class Place(Protocol):
    """A device that arrays are on, and what can be done there."""

    @property
    def xp(self) -> Any:
        """The module `numpy` or `cupy`: how arrays are copied and converted here."""

    @property
    def key(self) -> Hashable:
        """Equal for places where the same prepared call can run."""

    @property
    def device(self) -> Device:
        """What plans depend on."""

    @property
    def simulated(self) -> bool:
        """Whether this is the simulator: arrays are NumPy's, and kernels see them at addresses that `bind` gives."""

    def current(self) -> AbstractContextManager[Any]:
        """Within, what is loaded and launched is so here."""

    def adopt(self, name: str, x: Any, *, from_host: bool = False) -> Any:
        """`x` as an array that is here, without a copy; or, where `from_host`, as it is on the host.

        Raises
        ------
        TypeError, ValueError
            If it is elsewhere, naming the argument.
        """

    def check_call(self, problem: Problem, out: Any) -> None:
        """Raise if a simulated call is too large, or `out` may not be written to. Devices find out by themselves."""

    def check_out(self, out: Any) -> None:
        """Raise unless `out` is an array of the kind that is here."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array, contents undefined."""

    def address(self, x: Any) -> int:
        """Where an array starts."""

    def bind(self, name: str, x: Any, *, writable: bool = False, readable: bool | None = None) -> int:
        """The address under which kernels reach `x`.

        Parameters
        ----------
        name : str
        x : array
        writable : bool
            Whether they may write.
        readable : bool, optional
            Whether the contents mean anything before they do; by default, of what is not writable.
        """

    def tensor_map(self, address: int, box: TensorBox) -> bytes:
        """The tensor map of an array that is bound at `address`."""

    def load(self, spec: KernelSpec) -> Kernel:
        """The kernel, compiled and loaded on first use."""

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set every byte of what is bound at `address`."""

    def refuse_capture(self, what: str, remedy: str) -> None:
        """Raise if launches are being recorded into a graph, which `what` would spoil."""
