"""Kernels without the public call around them: planned, compiled side by side, launched by themselves."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from cupy_fa2.call import bind
from cupy_fa2.call.cuda import CudaKernel
from cupy_fa2.compile import Binary, build
from cupy_fa2.device import Device
from cupy_fa2.dropout import seed_bits
from cupy_fa2.kernel.base import KernelSpec, target
from cupy_fa2.kernel.forward import FwdSpec
from cupy_fa2.plan import Plan, forward_plan_with, plan_forward
from cupy_fa2.problem import Problem
from harness.arrays import DTYPES
from harness.case import Case
from harness.machine import first_line

__all__ = ["bare", "compile_all", "plan_of", "without_launches"]


def plan_of(case: Case, device: Device, **options: Any) -> Plan:
    """The plan that a call gets, with its `options`; needs no GPU."""
    stand_in = np.empty(case.shape, DTYPES[case.dtype])  # never touched, so never really there
    problem = Problem.from_arrays(stand_in, stand_in, stand_in, causal=case.causal, addresses=(0, 0, 0, 0), **options)
    return plan_forward(problem.structure, device)


def compile_all(specs: Iterable[KernelSpec], device: Device) -> dict[KernelSpec, Binary | str]:
    """Build kernels side by side (NVRTC releases the interpreter's lock); a message where one cannot be built."""

    def attempt(spec: KernelSpec) -> Binary | str:
        try:
            return build(spec, target(spec, device))
        except Exception as error:
            return first_line(error)

    specs = list(dict.fromkeys(specs))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(specs, pool.map(attempt, specs), strict=True))


def bare(
    device: Device, arrays: Mapping[str, Any], spec: FwdSpec | None = None, **options: Any
) -> tuple[Plan, Callable[[], None]]:
    """The plan of a forward, and what launches it and does nothing else: no checks, no allocation, no result.

    Parameters
    ----------
    device : Device
        That of the arrays.
    arrays : mapping
        All arrays of the call, as kernels read them: ``q``, ``k``, ``v``, ``out``, and those among the options (of
        integers, int32).
    spec : FwdSpec, optional
        The kernel, in place of the plan's choice.
    **options
        Those of the call that are no arrays.
    """
    names = ("q", "k", "v", "out")
    address = {name: x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr for name, x in arrays.items()}
    problem = Problem.from_arrays(
        **{**arrays, **options},
        addresses=tuple(address[name] for name in names),
        option_addresses={name: at for name, at in address.items() if name not in names},
    )
    structure = problem.structure
    plan = plan_forward(structure, device) if spec is None else forward_plan_with(spec, structure, device)
    numbers = {"dropout_seed": seed_bits(options["dropout_seed"])} if "dropout_seed" in options else {}
    return plan, bind(plan, problem, arrays, numbers)


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Calls on a GPU do everything but launch: what is left is the host's work alone."""
    launch = CudaKernel.__call__
    try:
        CudaKernel.__call__ = lambda *_: None  # type: ignore[method-assign]
        yield
    finally:
        CudaKernel.__call__ = launch  # type: ignore[method-assign]
