"""Calls by a kernel of the test's own choice."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_fa2.call import run
from cupy_fa2.call.simulated import current_simulator
from cupy_fa2.kernel.forward import FwdSpec, FwdTile
from cupy_fa2.plan import forward_plan_with
from cupy_fa2.problem import Problem

_NUMPY = {"f16": np.float16, "float": np.float32}


def problem_of(q: Any, k: Any, v: Any, **options: Any) -> Problem:
    """The problem of a call on NumPy arrays."""
    out = options.get("out")
    addresses = tuple(0 if x is None else x.__array_interface__["data"][0] for x in (q, k, v, out))
    return Problem.from_arrays(q, k, v, addresses=addresses, **options)


def attention_with(tile: FwdTile, transport: str, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """Out and lse by the kernel with this tile, on the current simulator; options have no arrays."""
    problem = problem_of(q, k, v, **options)
    structure = problem.structure
    spec = FwdSpec(
        tile, structure.dtype, structure.out_dtype, structure.features, structure.out_vectors, transport=transport
    )
    plan = forward_plan_with(spec, structure, current_simulator().device)
    out = options.get("out")
    if out is None:
        out = np.empty(problem.out_shape, _NUMPY.get(structure.out_dtype, q.dtype))
    lse = np.empty(problem.lse_shape, np.float32)
    run(plan, problem, {"q": q, "k": k, "v": v, "out": out, "lse": lse})
    return out, lse
