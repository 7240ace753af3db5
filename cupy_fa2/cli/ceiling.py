"""The card's ``mma.sync`` ceiling, measured: what the tensor cores give to a kernel that does nothing else.

Data sheets quote the rate of larger instructions (``wgmma``) at boost clock. The kernels of this package use
``mma.sync``, under the power limit of a long run, so that is what their speed is compared with.
"""

from __future__ import annotations

import numpy as np

from cupy_fa2.call import bind
from cupy_fa2.cli.measure import median_ms
from cupy_fa2.device import cuda_device
from cupy_fa2.plan.ceiling import CeilingLaunch, plan_ceiling

__all__ = ["WARPS", "mma_ceiling"]

#: Warps per multiprocessor that are tried: 1, 2 and 4 for each of its four schedulers.
WARPS = (4, 8, 16)

_ROUNDS = 1 << 19  # mma per chain and multiprocessor, all warps together: some 4 ms on an H200


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
    rates = {}
    for warps in WARPS:
        plan = plan_ceiling(dtype, warps, _ROUNDS // warps, device)
        (launch,) = plan.launches
        assert isinstance(launch, CeilingLaunch)
        sink = cupy.empty(launch.grid[0] * launch.spec.threads, np.float32)
        rates[warps] = launch.flop / median_ms(bind(plan, None, {"sink": sink}), repeat=7) / 1e9
    return rates
