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

__all__ = ["bind", "place_of", "run"]


def place_of(x: Any) -> Place:
    """Where an array is: the simulator for NumPy's, its device for CuPy's."""
    return SimulatedPlace(current_simulator()) if isinstance(x, np.ndarray) else cuda_place(x.data.device_id)


def bind(
    plan: Plan, problem: Problem | None, arrays: Mapping[str, Any], numbers: Mapping[str, int] | None = None
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
        CuPy arrays on the current device, or NumPy arrays, by the argument's name: q, k, v, out, and what else the call
        has; lengths and offsets are int32. Results that are not wanted are left out.
    numbers : mapping, optional
        The call's own numbers, by field: ``dropout_seed``.

    Returns
    -------
    callable
        It keeps the arrays alive, and scratch of its own.

    Raises
    ------
    ValueError
        If the plan is for another device.
    """
    numbers = numbers or {}
    given = {name: x for name, x in arrays.items() if x is not None}
    place = place_of(next(iter(given.values())))
    if place.device != plan.device:
        raise ValueError(f"the plan is for {plan.device.name}, the arrays are on {place.device.name}")
    prepared = prepare(place, plan, problem, given, numbers)
    values, everything = prepared.bind(place, given, numbers)

    def launch() -> None:
        for step in prepared.steps:
            step(place, values, everything)

    return launch


def run(
    plan: Plan, problem: Problem | None, arrays: Mapping[str, Any], numbers: Mapping[str, int] | None = None
) -> None:
    """Run a given plan once: see `bind`."""
    bind(plan, problem, arrays, numbers)()
