"""A call that is ready to be made again and again: all but the addresses is known."""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_fa2.call.place import Place
from cupy_fa2.device import Device
from cupy_fa2.kernel.param_struct import ParamStruct, Source
from cupy_fa2.plan import Fill, Launch, Plan, encode
from cupy_fa2.problem import Problem

__all__ = ["Arrays", "FillStep", "KernelStep", "Prepared", "Values", "prepare"]

_MAX_MAPS = 64  # remembered, of each launch

#: Addresses and the call's own numbers, in the order of `Prepared.names`. Tuples, since warm calls are about speed.
Values = tuple[int, ...]
Arrays = Mapping[str, Any]  # by the argument's or the buffer's name


class KernelStep:
    """A launch whose kernel is loaded, and whose argument struct wants only addresses and the call's own numbers.

    Parameters
    ----------
    place : Place
    launch : Launch
    problem : Problem or None
    device : Device
    given : sequence of str
        The fields that `Values` are for, in their order; those that the struct does not have are not its business.
    """

    def __init__(
        self, place: Place, launch: Launch, problem: Problem | None, device: Device, given: Sequence[str]
    ) -> None:
        params = launch.spec.params
        self._launch = launch
        self._kernel = place.load(launch.spec)
        self._template = encode(launch, problem, device)
        names = [one.name for one in params.of_source(Source.ADDRESS, Source.CALL) if one.name in given]
        self._runs = [
            (params.offset(run[0]), struct.Struct("<" + "".join(map(params.pack_code, run))), _getter(run, given))
            for run in _neighbours(params, names)
        ]
        maps = params.of_source(Source.MAP)
        boxes = launch.boxes(problem)
        self._boxes = [boxes[one.name] for one in maps]
        self._maps_at = params.offset(maps[0].name) if maps else 0
        self._mapped = _getter([one.array for one in maps], given)
        self.maps: dict[Values, bytes] = {}  # by the arrays' addresses

    def __call__(self, place: Place, values: Values, arrays: Arrays) -> None:
        """Launch."""
        args = bytearray(self._template)
        for at, packer, get in self._runs:
            packer.pack_into(args, at, *get(values))
        if self._boxes:
            addresses = self._mapped(values)
            args[self._maps_at :] = self.maps.get(addresses) or self._encode_maps(place, addresses)
        self._kernel(self._launch, args, place)

    def _encode_maps(self, place: Place, addresses: Values) -> bytes:
        """The tensor maps of arrays there; remembered, for callers that use their buffers again."""
        maps = b"".join(map(place.tensor_map, addresses, self._boxes))
        if len(self.maps) >= _MAX_MAPS:
            self.maps.clear()
        self.maps[addresses] = maps
        return maps


class FillStep:
    """A fill of an array or a buffer."""

    def __init__(self, fill: Fill) -> None:
        self._fill = fill

    def __call__(self, place: Place, values: Values, arrays: Arrays) -> None:
        """Fill it."""
        place.fill(arrays[self._fill.writes[0]], self._fill.byte)


def _neighbours(params: ParamStruct, names: Sequence[str]) -> list[list[str]]:
    """Fields in groups that follow each other without a gap: a call of `struct` costs more than the bytes it writes."""
    runs: list[list[str]] = []
    end = -1
    for name in names:
        if params.offset(name) == end:
            runs[-1].append(name)
        else:
            runs.append([name])
        end = params.offset(name) + params.field(name).nbytes
    return runs


def _getter(names: list[str], given: Sequence[str]) -> Callable[[Values], Values]:
    """Takes the values of these names out of those that are given."""
    where = [given.index(name) for name in names]
    if where == list(range(len(given))):
        return lambda values: values
    if len(where) > 1:
        return operator.itemgetter(*where)
    return lambda values: tuple([values[at] for at in where])


@dataclass(frozen=True)
class Prepared:
    """A plan whose kernels are loaded, for calls of one signature.

    Attributes
    ----------
    plan : Plan
    steps : tuple of KernelStep or FillStep
        The plan's launches, in order; each is called with the place, the `Values`, and what it may fill.
    names : tuple of str
        Fields of argument structs, in the order of `Values`: of arrays, of numbers, of the plan's buffers.
    fields : mapping
        Arrays and buffers -> the field that has their address.
    """

    plan: Plan
    steps: tuple[KernelStep | FillStep, ...]
    names: tuple[str, ...]
    fields: Mapping[str, str]

    @functools.cached_property
    def wants_arrays(self) -> bool:
        """Whether addresses are not enough: there is scratch to allocate, or something to fill."""
        return bool(self.plan.workspace) or any(isinstance(step, FillStep) for step in self.steps)

    def bind(self, place: Place, arrays: Arrays, numbers: Mapping[str, int]) -> tuple[Values, Arrays]:
        """What the steps are called with: all values, scratch included, and all arrays, so that they stay alive."""
        written = {name for launch in self.plan.launches for name in launch.writes}
        found = dict(numbers)
        for name, x in arrays.items():
            if x is not None and name in self.fields:
                found[self.fields[name]] = place.bind(name, x, writable=name in written)
        buffers = self._workspace(place)
        for one in self.plan.workspace:
            found[self.fields[one.name]] = place.bind(one.name, buffers[one.name], writable=True, readable=one.zeroed)
        return tuple(found.get(name, 0) for name in self.names), {**arrays, **buffers}

    def _workspace(self, place: Place) -> dict[str, Any]:
        """New scratch, buffer by buffer."""
        offsets, nbytes = self.plan.workspace_offsets
        if not nbytes:
            return {}
        place.refuse_capture("the call needs scratch memory", "what is freed would be used again while the graph lives")
        whole = place.empty((nbytes,), np.uint8)
        parts = {one.name: whole[offsets[one.name] : offsets[one.name] + one.nbytes] for one in self.plan.workspace}
        for one in self.plan.workspace:
            if one.zeroed:
                place.fill(parts[one.name], 0)
        return parts


def prepare(
    place: Place, plan: Plan, problem: Problem | None, arrays: Iterable[str], numbers: Iterable[str] = ()
) -> Prepared:
    """Load the plan's kernels and write down all that is known of their arguments.

    Parameters
    ----------
    place : Place
    plan : Plan
    problem : Problem
    arrays, numbers : iterable of str
        Those that each call gives, beside the plan's buffers: by the argument's name, and by the field's. `Values` are
        in this order.
    """
    kernels = plan.kernels
    known = {one.array: one.name for launch in kernels for one in launch.spec.params.of_source(Source.ADDRESS)}
    buffers = [buffer.name for buffer in plan.workspace]
    fields = {name: known[name] for name in (*arrays, *buffers) if name in known}
    names = (*(known.get(name, name) for name in arrays), *numbers, *(known[name] for name in buffers))
    steps = (
        FillStep(launch) if isinstance(launch, Fill) else KernelStep(place, launch, problem, plan.device, names)
        for launch in plan.launches
    )
    return Prepared(plan, tuple(steps), names, fields)
