"""The kernel that does ``mma.sync`` and nothing else: ``cuda_src/bench/mma_ceiling.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_fa2.kernel.param_struct import ParamStruct
from cupy_fa2.kernel.params import CEILING_PARAMS

__all__ = ["CHAINS", "FLOP_PER_MMA", "CeilingSpec"]

CHAINS = 8  # MmaCeiling::kA * kB: independent mma of a warp and pass of the loop
FLOP_PER_MMA = 2 * 16 * 8 * 16


@dataclass(frozen=True)
class CeilingSpec:
    """One such kernel.

    Attributes
    ----------
    dtype : {"f16", "bf16"}
        Element type of the operands.
    num_warps : int
        Warps of a block.
    """

    dtype: str
    num_warps: int

    @property
    def name(self) -> str:
        """A readable name."""
        return f"{self.entry}_{self.dtype}_w{self.num_warps}"

    @property
    def entry(self) -> str:
        """Name of the kernel's function."""
        return "mma_ceiling"

    @property
    def params(self) -> ParamStruct:
        """The struct that it takes by value."""
        return CEILING_PARAMS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * 32

    @property
    def shared_bytes(self) -> int:
        """Everything is in registers."""
        return 0

    @property
    def only_arch(self) -> None:
        """Any GPU from sm_80 on runs it."""
        return None

    def render(self) -> str:
        """The translation unit."""
        return f"""#include "bench/mma_ceiling.cuh"
using namespace fa2;
extern "C" __global__ void __launch_bounds__({self.threads})
{self.entry}(const __grid_constant__ CeilingParams params) {{ MmaCeiling<{self.dtype}>::run(params); }}
"""
