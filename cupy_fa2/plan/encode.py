"""The argument struct of a launch: everything but what only the moment of the launch knows."""

from __future__ import annotations

from typing import Any

from cupy_fa2.device import Device
from cupy_fa2.kernel.param_struct import Source
from cupy_fa2.kernel.params import ABI_VERSION
from cupy_fa2.plan.plan import Launch

__all__ = ["encode"]

_CONSTANTS = {"abi_version": ABI_VERSION}


def encode(launch: Launch, problem: Any, device: Device, **given: Any) -> bytes:
    """The bytes of the launch's argument struct, with zeros for addresses, tensor maps and the call's own numbers.

    Parameters
    ----------
    launch : Launch
    problem : Problem or None
        Its ``values`` has what the fields from `Source.PROBLEM` want; None where there are none.
    device : Device
    **given
        Addresses, maps and numbers of the call that are known already, by the field's name.
    """
    fields = launch.spec.params.of_source(Source.CONSTANT, Source.PROBLEM, Source.PLAN)
    known = {**_CONSTANTS, **({} if problem is None else problem.values), **launch.values(problem, device)}
    return launch.spec.params.template({**{field.name: known[field.name] for field in fields}, **given})
