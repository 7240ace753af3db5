"""From a problem to launches: which kernels, which grids, which scratch.

Pure, so that the plan of any card can be made anywhere.
"""

from cupy_fa2.plan.forward import MAX_GRID, Plan, encode_forward, forward_spec, heads_per_group, plan_forward

__all__ = ["MAX_GRID", "Plan", "encode_forward", "forward_spec", "heads_per_group", "plan_forward"]
