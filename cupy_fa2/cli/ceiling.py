"""The card's ``mma.sync`` ceiling, measured: what the tensor cores give to a kernel that does nothing else.

Data sheets quote the rate of larger instructions (``wgmma``) at boost clock. The kernels of this package use
``mma.sync``, under the power limit of a long run, so that is what their speed is compared with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_fa2.cli.measure import median_ms
from cupy_fa2.compile import compile_source, gather_sources
from cupy_fa2.device import cuda_device

__all__ = ["FLOP_PER_MMA", "WARPS", "ceiling_unit", "mma_ceiling"]

#: Warps per multiprocessor that are tried: 1, 2 and 4 for each of its four schedulers.
WARPS = (4, 8, 16)

CHAINS = 8  # MmaCeiling::kA * kB
FLOP_PER_MMA = 2 * 16 * 8 * 16

_ENTRY = "mma_ceiling"
_ROUNDS = 1 << 19  # mma per chain and multiprocessor, all warps together: some 4 ms on an H200


def ceiling_unit(dtype: str) -> str:
    """The translation unit of the measuring kernel.

    Parameters
    ----------
    dtype : {"f16", "bf16"}
    """
    return f"""#include "bench/mma_ceiling.cuh"
extern "C" __global__ void __launch_bounds__({max(WARPS) * 32})
{_ENTRY}(float* sink, int iterations) {{ fa2::MmaCeiling<fa2::{dtype}>::run(sink, iterations); }}
"""


def mma_ceiling(dtype: str, device_id: int = 0) -> dict[int, float]:
    """Measure dense ``mma.sync.m16n8k16`` with float32 accumulation.

    Parameters
    ----------
    dtype : {"f16", "bf16"}
    device_id : int
        CUDA device, which has to be the current one.

    Returns
    -------
    dict
        TFLOP/s by warps per multiprocessor; the ceiling is the largest.
    """
    import cupy

    device = cuda_device(device_id)
    unit = ceiling_unit(dtype)
    options = ("--std=c++20", "--device-as-default-execution-space", f"--gpu-architecture={device.target}")
    _, cubin, _ = compile_source(unit, gather_sources(unit), _ENTRY, options)
    module: Any = cupy.cuda.function.Module()
    module.load(cubin)
    kernel = module.get_function(_ENTRY)
    sink = cupy.empty(device.num_sms * max(WARPS) * 32, np.float32)
    rates = {}
    for warps in WARPS:
        iterations = _ROUNDS // warps

        def launch(warps: int = warps, iterations: int = iterations) -> None:
            kernel((device.num_sms, 1, 1), (warps * 32, 1, 1), (sink, np.int32(iterations)))

        flop = device.num_sms * warps * CHAINS * iterations * FLOP_PER_MMA
        rates[warps] = flop / median_ms(launch, repeat=7) / 1e9
    return rates
