"""The plan of a measurement of the ``mma.sync`` ceiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupy_fa2.device import Device
from cupy_fa2.kernel.ceiling import CHAINS, FLOP_PER_MMA, CeilingSpec
from cupy_fa2.plan.plan import Launch, Plan

__all__ = ["CeilingLaunch", "plan_ceiling"]


@dataclass(frozen=True)
class CeilingLaunch(Launch):
    """One block on each multiprocessor.

    Attributes
    ----------
    iterations : int
        Passes of each warp's loop, of `CHAINS` mma each.
    """

    spec: CeilingSpec
    iterations: int = 0

    def values(self, problem: Any, device: Device) -> Mapping[str, int]:
        """How long the loop is."""
        return {"iterations": self.iterations}

    @property
    def flop(self) -> int:
        """Floating-point operations of the launch."""
        return self.grid[0] * self.spec.num_warps * self.iterations * CHAINS * FLOP_PER_MMA


def plan_ceiling(dtype: str, num_warps: int, iterations: int, device: Device) -> Plan:
    """Keep the tensor cores of all multiprocessors busy.

    The launch writes ``sink``, one float32 for each thread of the grid.

    Parameters
    ----------
    dtype : {"f16", "bf16"}
    num_warps : int
        Warps per multiprocessor.
    iterations : int
    device : Device
    """
    spec = CeilingSpec(dtype, num_warps)
    launch = CeilingLaunch(spec, (device.num_sms, 1, 1), (), ("sink",), iterations)
    return Plan((launch,), (), device, "One block on each multiprocessor")
