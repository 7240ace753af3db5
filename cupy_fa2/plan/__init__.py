"""From a problem to launches: which kernels, which grids, which scratch.

Pure, so that the plan of any card can be made anywhere.
"""

from cupy_fa2.plan.encode import encode
from cupy_fa2.plan.forward import FwdLaunch, forward_plan_with, forward_spec, plan_forward
from cupy_fa2.plan.plan import MAX_GRID, Buffer, Fill, Launch, Plan

__all__ = [
    "MAX_GRID",
    "Buffer",
    "Fill",
    "FwdLaunch",
    "Launch",
    "Plan",
    "encode",
    "forward_plan_with",
    "forward_spec",
    "plan_forward",
]
