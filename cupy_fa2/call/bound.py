"""The way to run a given plan on arrays, which tests, tuners, the bench and explainers take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupy_fa2.call.cuda import cuda_place
from cupy_fa2.call.place import Place
from cupy_fa2.call.prepared import prepare
from cupy_fa2.call.simulated import SimulatedPlace, current_simulator
from cupy_fa2.plan import Plan
from cupy_fa2.problem import Problem

__all__ = ["bind", "run"]


def _place_of(x: Any) -> Place:
    """Where an array is: the simulator for NumPy's, its device for CuPy's."""
    return SimulatedPlace(current_simulator()) if isinstance(x, np.ndarray) else cuda_place(x.data.device_id)


def bind(
    plan: Plan,
    problem: Problem | None,
    arrays: Mapping[str, Any],
    numbers: Mapping[str, int] | None = None,
    workspace: Any = None,
) -> Callable[[], None]:
    """Tie a plan to arrays: what is returned launches everything and allocates nothing.

    Nothing is checked but that the plan is for the device that the arrays are on, and nothing is converted: arrays are
    as kernels read them.

    Parameters
    ----------
    plan : Plan
        As a call gets it, or made with another kernel (`cupy_fa2.plan.forward_plan_with`).
    problem : Problem or None
        What the arrays look like; None for kernels that are not attention's.
    arrays : mapping
        CuPy arrays of one device, or NumPy arrays, by the argument's name: q, k, v, out, and what else the call
        has; lengths and offsets are int32. Results that are not wanted are left out.
    numbers : mapping, optional
        The call's own numbers, by field: ``dropout_seed``.
    workspace : array of uint8, optional
        ``plan.workspace_bytes`` bytes, at an address that is a multiple of 256; allocated unless given.

    Returns
    -------
    callable
        It keeps the arrays and the scratch alive.

    Raises
    ------
    ValueError
        If the plan is for another device, or its kernels know no array of that name.
    """
    numbers = numbers or {}
    given = {name: x for name, x in arrays.items() if x is not None}
    known = {name for launch in plan.launches for name in (*launch.reads, *launch.writes)}
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        raise ValueError(f"arrays must be among {', '.join(sorted(known))}; got {', '.join(unknown) or 'none'}")
    place = _place_of(next(iter(given.values())))
    if place.device != plan.device:
        raise ValueError(f"the plan is for {plan.device.name}, the arrays are on {place.device.name}")
    with place.current():
        prepared = prepare(place, plan, problem, given, numbers)
        values, scratch = prepared.bind(place, given, numbers, workspace)

    def launch(alive: Any = (given, scratch)) -> None:
        with place.current():
            prepared.launch(place, values)

    return launch


def run(
    plan: Plan, problem: Problem | None, arrays: Mapping[str, Any], numbers: Mapping[str, int] | None = None
) -> None:
    """Run a given plan once: see `bind`."""
    bind(plan, problem, arrays, numbers)()
