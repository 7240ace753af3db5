"""A call that is ready to be made again and again: all but the addresses is known."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_fa2.call.place import Place
from cupy_fa2.device import Device
from cupy_fa2.kernel.param_struct import Field, ParamStruct, Source
from cupy_fa2.plan import Fill, Launch, Plan, encode
from cupy_fa2.problem import Problem

__all__ = ["FillStep", "KernelStep", "Prepared", "Values", "prepare"]

_MAX_MAPS = 64  # remembered, of each launch

#: Addresses of arrays, the call's own numbers, addresses of the plan's buffers, and a 0; `Names` knows which is where.
#: Tuples, since warm calls are about speed.
Values = tuple[int, ...]


class KernelStep:
    """A launch whose kernel is loaded, and whose argument struct wants only addresses and the call's own numbers.

    Parameters
    ----------
    place : Place
    launch : Launch
    problem : Problem or None
    device : Device
    names : Names
        What `Values` are of.
    """

    def __init__(self, place: Place, launch: Launch, problem: Problem | None, device: Device, names: Names) -> None:
        params = launch.spec.params
        self._launch = launch
        self._kernel = place.load(launch.spec)
        self._template = encode(launch, problem, device)
        self._runs = [
            (
                params.offset(run[0].name),
                struct.Struct("<" + "".join(params.pack_code(field.name) for field in run)),
                _getter([names.where(field) for field in run]),
            )
            for run in _runs(params, names)
        ]
        maps = params.of_source(Source.MAP)
        boxes = launch.boxes(problem)
        self._boxes = [boxes[field.name] for field in maps]
        self._maps_at = params.offset(maps[0].name) if maps else 0
        self._mapped = _getter([names.where(field) for field in maps])
        self.maps: dict[Values, bytes] = {}  # by the arrays' addresses

    def __call__(self, place: Place, values: Values) -> None:
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
    """A fill of one of the plan's buffers."""

    def __init__(self, fill: Fill, nbytes: int, names: Names) -> None:
        self._byte, self._nbytes, self._where = fill.byte, nbytes, names.arrays[fill.buffer]

    def __call__(self, place: Place, values: Values) -> None:
        """Fill it."""
        place.fill(values[self._where], self._nbytes, self._byte)


class Names:
    """What `Values` are of: arrays and buffers by the argument's or their own name, numbers by the field's.

    The last of `Values` is always 0, for what a call does not give.
    """

    def __init__(self, arrays: Sequence[str], numbers: Sequence[str], buffers: Sequence[str]) -> None:
        addresses = [*arrays, *[None] * len(numbers), *buffers]
        self.arrays = {name: at for at, name in enumerate(addresses) if name is not None}
        self.numbers = {name: len(arrays) + at for at, name in enumerate(numbers)}
        self.zero = len(addresses)

    def where(self, field: Field) -> int:
        """Where the value of a field is."""
        found = self.numbers.get(field.name) if field.source is Source.CALL else self.arrays.get(field.array)
        return self.zero if found is None else found


def _runs(params: ParamStruct, names: Names) -> list[list[Field]]:
    """The fields to write, in groups without a gap: a call of `struct` costs more than the bytes that it writes.

    A group begins and ends with a field that the call gives; those between that it does not give are written as 0.
    """
    runs: list[list[Field]] = []
    end = -1
    for field in params.of_source(Source.ADDRESS, Source.CALL):
        if params.offset(field.name) != end:
            runs.append([])
        runs[-1].append(field)
        end = params.offset(field.name) + field.nbytes
    given = [[at for at, field in enumerate(run) if names.where(field) != names.zero] for run in runs]
    return [run[at[0] : at[-1] + 1] for run, at in zip(runs, given, strict=True) if at]


def _getter(where: list[int]) -> Callable[[Values], Values]:
    """Takes the values at these places."""
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
        What is done, in order: buffers that must be zero are filled first.
    arrays, numbers : tuple of str
        What each call gives, in the order of `Values`; the plan's buffers follow, and a 0.
    """

    plan: Plan
    steps: tuple[KernelStep | FillStep, ...]
    arrays: tuple[str, ...]
    numbers: tuple[str, ...]

    def bind(
        self, place: Place, arrays: Mapping[str, Any], numbers: Mapping[str, int], workspace: Any = None
    ) -> tuple[Values, Any]:
        """The values of a call, and the scratch that has to live until its launches are done.

        Parameters
        ----------
        place : Place
        arrays, numbers : mapping
            By name; those that the call does not have are None, or left out.
        workspace : array, optional
            ``plan.workspace_bytes`` bytes, at an address that is a multiple of 256; by default, new ones.
        """
        plan = self.plan
        written = {name for launch in plan.launches for name in launch.writes}
        addresses = []
        for name in self.arrays:
            x = arrays.get(name)
            readable = name in plan.read_first if name in written else None
            addresses.append(0 if x is None else place.bind(name, x, writable=name in written, readable=readable))
        if plan.workspace and workspace is None:
            place.refuse_capture("the call needs scratch memory", "what is freed is used again while the graph lives")
            workspace = place.empty((plan.workspace_bytes,), np.uint8)
        buffers = []
        for buffer in plan.workspace:
            begin = plan.workspace_offsets[buffer.name]
            part = workspace[begin : begin + buffer.nbytes]
            buffers.append(place.bind(buffer.name, part, writable=True, readable=False))
        return (*addresses, *(numbers[name] for name in self.numbers), *buffers, 0), workspace

    def launch(self, place: Place, values: Values) -> None:
        """Do it all."""
        for step in self.steps:
            step(place, values)


def prepare(
    place: Place, plan: Plan, problem: Problem | None, arrays: Iterable[str], numbers: Iterable[str] = ()
) -> Prepared:
    """Load the plan's kernels and write down all that is known of their arguments.

    Parameters
    ----------
    place : Place
    plan : Plan
    problem : Problem or None
        None for kernels that are not attention's.
    arrays, numbers : iterable of str
        Those that each call gives, by the argument's name and by the field's.
    """
    arrays, numbers = tuple(arrays), tuple(numbers)
    names = Names(arrays, numbers, [buffer.name for buffer in plan.workspace])
    sizes = {buffer.name: buffer.nbytes for buffer in plan.workspace}
    fills = [Fill(buffer.name) for buffer in plan.workspace if buffer.zeroed]
    steps = (
        FillStep(launch, sizes[launch.buffer], names)
        if isinstance(launch, Fill)
        else KernelStep(place, launch, problem, plan.device, names)
        for launch in (*fills, *plan.launches)
    )
    return Prepared(plan, tuple(steps), arrays, numbers)
