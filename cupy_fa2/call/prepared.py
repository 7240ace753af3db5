"""A call that is ready to be made again and again: all but the addresses is known."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_fa2.call.place import Place
from cupy_fa2.kernel.params import TENSOR_MAP_BYTES, ParamStruct, Source
from cupy_fa2.kernel.tensor_box import TensorBox
from cupy_fa2.plan import Fill, Launch, Plan, encode
from cupy_fa2.problem import Problem

__all__ = ["Arguments", "Prepared", "prepare"]

_MAX_MAPS = 64  # remembered, of each launch

Values = Mapping[str, int]  # addresses and the call's own numbers, by the field of the argument struct


class Arguments:
    """The argument struct of a launch, in which only addresses and the call's own numbers are missing.

    Parameters
    ----------
    params : ParamStruct
    template : bytes
        The struct, with zeros in their places.
    names : iterable of str
        The fields that each launch gives; the others stay zero.
    """

    def __init__(self, params: ParamStruct, template: bytes, names: Iterable[str]) -> None:
        self._template = template
        given = set(names)
        runs: list[list[str]] = []
        end = -1
        for one in params.of_source(Source.ADDRESS, Source.CALL):
            if one.name in given:
                # Neighbours are written together: a call of `struct` costs more than the bytes that it writes.
                runs[-1:] = [[*runs[-1], one.name]] if params.offset(one.name) == end else [*runs[-1:], [one.name]]
                end = params.offset(one.name) + one.nbytes
        self._runs = [
            (params.offset(run[0]), struct.Struct("<" + "".join(map(params.pack_code, run))), _getter(run))
            for run in runs
        ]

    def __call__(self, values: Values) -> bytearray:
        """The struct with these addresses and numbers."""
        args = bytearray(self._template)
        for at, packer, get in self._runs:
            packer.pack_into(args, at, *get(values))
        return args


def _getter(names: list[str]) -> Callable[[Values], tuple[int, ...]]:
    """Takes the values of these names out of a mapping, as a tuple."""
    if len(names) == 1:
        name = names[0]
        return lambda values: (values[name],)
    return operator.itemgetter(*names)


@dataclass(frozen=True)
class Step:
    """One launch, with its kernel loaded."""

    launch: Launch
    kernel: Any
    arguments: Arguments
    boxes: Mapping[str, tuple[str, TensorBox]]  # fields that are tensor maps -> the array's field, and the map's box
    maps: dict[tuple[int, ...], bytes] = field(default_factory=dict)  # by the arrays' addresses

    def run(self, place: Place, values: Values) -> None:
        """Launch."""
        args = self.arguments(values)
        if self.boxes:
            args[-len(self.boxes) * TENSOR_MAP_BYTES :] = self._tensor_maps(place, values)
        place.launch(self.kernel, self.launch, args)

    def _tensor_maps(self, place: Place, values: Values) -> bytes:
        """The maps at the end of the struct; remembered, for callers that use their buffers again."""
        addresses = tuple([values[array] for array, _ in self.boxes.values()])
        maps = self.maps.get(addresses)
        if maps is None:
            maps = b"".join(place.tensor_map(values[array], box) for array, box in self.boxes.values())
            if len(self.maps) >= _MAX_MAPS:
                self.maps.clear()
            self.maps[addresses] = maps
        return maps


@dataclass(frozen=True)
class Prepared:
    """A plan whose kernels are loaded, for calls of one signature.

    Attributes
    ----------
    plan : Plan
    steps : tuple of Step or Fill
        The plan's launches, in order.
    fields : mapping
        Arrays and buffers -> the field of argument structs that has their address.
    """

    plan: Plan
    steps: tuple[Step | Fill, ...]
    fields: Mapping[str, str]

    def launch(self, place: Place, values: Values, arrays: Mapping[str, Any]) -> None:
        """Launch everything; `values` by field, and by name the arrays and buffers that the plan may fill."""
        for step in self.steps:
            if isinstance(step, Step):
                step.run(place, values)
            else:
                place.fill(arrays[step.writes[0]], step.byte)

    def workspace(self, place: Place) -> dict[str, Any]:
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

    def bind_workspace(self, place: Place, buffers: Mapping[str, Any]) -> dict[str, int]:
        """Where kernels find their scratch, by field."""
        zeroed = {one.name: one.zeroed for one in self.plan.workspace}
        return {
            self.fields[name]: place.bind(name, x, writable=True, readable=zeroed[name]) for name, x in buffers.items()
        }


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
        Those of the call that each launch gives, beside the plan's buffers: by the argument's name, and by the field's.
    """
    given = {*arrays, *(buffer.name for buffer in plan.workspace)}
    numbers = set(numbers)
    fields: dict[str, str] = {}
    steps: list[Step | Fill] = []
    for launch in plan.launches:
        if isinstance(launch, Fill):
            steps.append(launch)
            continue
        params = launch.spec.params
        here = {one.array: one.name for one in params.of_source(Source.ADDRESS) if one.array in given}
        boxes = launch.boxes(problem)
        arguments = Arguments(params, encode(launch, problem, plan.device), [*here.values(), *numbers])
        maps = {one.name: (here[one.array], boxes[one.name]) for one in params.of_source(Source.MAP)}
        steps.append(Step(launch, place.load(launch.spec), arguments, maps))
        fields |= here
    return Prepared(plan, tuple(steps), fields)
