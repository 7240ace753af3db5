"""Argument structs: tables of fields, one row each, from which the C++ side and the packer are made.

A kernel takes one struct by value. A field has a name, a type, a meaning, and a place where its value comes from. The
C++ definition is rendered from the table, with a probe that fails the compilation if the compiler lays a field out
elsewhere; and so is the packer, which takes values by name. A struct may begin with another one, as a C++ struct with a
base does.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = ["TENSOR_MAP_ALIGNMENT", "TENSOR_MAP_BYTES", "Field", "ParamStruct", "Source"]

#: Bytes of a tensor map (``CUtensorMap`` of the driver), and the alignment it wants.
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64


class Source(enum.Enum):
    """Where a field's value comes from. The first three are known once a call is planned, the others at each launch."""

    #: A constant of this package.
    CONSTANT = "constant"
    #: The problem: sizes, strides, options. ``Problem.values`` has it under the field's name.
    PROBLEM = "problem"
    #: The plan: how the work is dealt out. ``Launch.values`` has it under the field's name.
    PLAN = "plan"
    #: The address of an array or of a buffer of the workspace, 0 for none.
    ADDRESS = "address"
    #: A number that may change from launch to launch.
    CALL = "call"
    #: The tensor map of an array, which holds its address.
    MAP = "map"


class _Kind(NamedTuple):
    c_type: str
    pack_code: str
    bytes: int
    alignment: int


#: Types of fields. All but the last are NumPy's: unsigned and signed integers, and a float, by their bytes.
_KINDS = {
    "u8": _Kind("unsigned long long", "Q", 8, 8),
    "i8": _Kind("long long", "q", 8, 8),
    "u4": _Kind("unsigned int", "I", 4, 4),
    "i4": _Kind("int", "i", 4, 4),
    "f4": _Kind("float", "f", 4, 4),
    "map": _Kind("TensorMap", f"{TENSOR_MAP_BYTES}s", TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT),
}


@dataclass(frozen=True)
class Field:
    """One field of an argument struct.

    Attributes
    ----------
    name : str
    kind : {"u8", "i8", "u4", "i4", "f4", "map"}
        ``"u8"`` for addresses and other unsigned 64-bit numbers, ``"i8"`` for strides, ``"map"`` for a tensor map.
    source : Source
        Where its value comes from.
    text : str
        What it means, as far as the name does not say it.
    argument : str
        Of `ADDRESS` and `MAP` fields, the array or buffer meant, where the field has another name.
    feature : str
        Of arrays that only some kernels read, the field of `Features` that says which.
    """

    name: str
    kind: str
    source: Source
    text: str = ""
    argument: str = ""
    feature: str = ""

    @property
    def array(self) -> str:
        """The array or buffer whose address or map this is."""
        return self.argument or self.name

    @property
    def nbytes(self) -> int:
        """Bytes of the field."""
        return _KINDS[self.kind].bytes


@dataclass(frozen=True)
class ParamStruct:
    """An argument struct: its C++ name, its own fields in order, and the struct it begins with, if any.

    Fields follow each other as C lays them out: each at the next multiple of its alignment.
    """

    name: str
    own_fields: tuple[Field, ...]
    base: ParamStruct | None = None

    def __post_init__(self) -> None:
        # Whether a field may lie in the padding at a base's end differs from one C++ class to the next.
        if self.base and _KINDS[self.own_fields[0].kind].alignment < self.base.alignment:
            raise ValueError(f"{self.name} must begin with a field of {self.base.name}'s alignment or more")
        if any(field.kind == "map" for field in self.own_fields) and any(f.kind != "map" for f in self.own_fields):
            raise ValueError(f"{self.name} must have its tensor maps to itself: its size is what says where they are")
        names = [field.name for field in self.fields]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.name} has two fields of one name")

    @functools.cached_property
    def fields(self) -> tuple[Field, ...]:
        """All fields, those of the base first."""
        return (*self.base.fields, *self.own_fields) if self.base else self.own_fields

    @functools.cached_property
    def _offsets(self) -> dict[str, int]:
        offsets, end = {}, 0
        for field in self.fields:
            kind = _KINDS[field.kind]
            offsets[field.name] = -(-end // kind.alignment) * kind.alignment
            end = offsets[field.name] + kind.bytes
        return offsets

    @functools.cached_property
    def size(self) -> int:
        """Bytes of the struct: a whole number of its alignment."""
        last = self.fields[-1]
        end = self._offsets[last.name] + last.nbytes
        return -(-end // self.alignment) * self.alignment

    @functools.cached_property
    def alignment(self) -> int:
        """That of its widest field."""
        return max(_KINDS[field.kind].alignment for field in self.fields)

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The struct as a NumPy dtype, for looking at packed bytes."""
        names = [field.name for field in self.fields]
        formats = [f"V{TENSOR_MAP_BYTES}" if field.kind == "map" else f"<{field.kind}" for field in self.fields]
        offsets = [self._offsets[name] for name in names]
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": self.size})

    def __contains__(self, name: str) -> bool:
        return name in self._offsets

    def offset(self, name: str) -> int:
        """Where a field begins, in bytes."""
        return self._offsets[name]

    def field(self, name: str) -> Field:
        """The field of that name."""
        return next(field for field in self.fields if field.name == name)

    def pack_code(self, name: str) -> str:
        """A field's type in the words of `struct`."""
        return _KINDS[self.field(name).kind].pack_code

    def of_source(self, *sources: Source) -> tuple[Field, ...]:
        """The fields whose values come from there."""
        return tuple(field for field in self.fields if field.source in sources)

    @functools.cached_property
    def _packer(self) -> struct.Struct:
        codes, end = "<", 0
        for field in self.fields:
            gap = self._offsets[field.name] - end
            codes += (f"{gap}x" if gap else "") + _KINDS[field.kind].pack_code
            end = self._offsets[field.name] + field.nbytes
        return struct.Struct(codes + (f"{self.size - end}x" if self.size > end else ""))

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The struct's bytes, from one value for each field, by name.

        Raises
        ------
        ValueError
            Naming the fields that have no value, and the values that have no field.
        """
        names = self._offsets
        missing = [f"{field.name} ({field.source.value})" for field in self.fields if field.name not in values]
        unknown = [name for name in values if name not in names]
        if missing or unknown:
            raise ValueError(
                f"{self.name} wants one value for each field; missing: {', '.join(missing) or 'none'}; "
                f"unknown: {', '.join(unknown) or 'none'}"
            )
        return self._packer.pack(*[values[name] for name in names])

    def template(self, values: Mapping[str, Any]) -> bytes:
        """The struct's bytes with zeros for all that only a launch knows: addresses, maps, and the call's numbers."""
        zeros = {
            field.name: bytes(TENSOR_MAP_BYTES) if field.kind == "map" else 0
            for field in self.of_source(Source.ADDRESS, Source.CALL, Source.MAP)
        }
        return self.pack({**zeros, **values})

    def render(self) -> str:
        """The C++ definition, followed by an assertion of every field's offset."""
        lines = [f"struct {self.name}{f' : {self.base.name}' if self.base else ''} {{"]
        lines += [f"  {_KINDS[f.kind].c_type} {f.name};{f'  // {f.text}' if f.text else ''}" for f in self.own_fields]
        lines += ["};", f"static_assert(sizeof({self.name}) == {self.size});"]
        # NVRTC's offsetof is no constant expression. A bit_cast of bytes that number themselves is: the field that
        # starts at byte n reads back n in its low byte.
        lines += [
            f"struct alignas({self.alignment}) {self.name}Bytes {{ unsigned char byte[{self.size}]; }};",
            f"constexpr {self.name} probe_{self.name}(int at) {{",
            f"  {self.name}Bytes bytes{{}};",
            "  bytes.byte[at] = 1;",
            f"  return __builtin_bit_cast({self.name}, bytes);",
            "}",
        ]
        # Maps are not probed, since NVRTC 12.9 gets a bit_cast of twice derived structs wrong; the size places them.
        for field in self.fields:
            if field.kind != "map":
                one = "__builtin_bit_cast(float, 1)" if field.kind == "f4" else "1"
                lines.append(f"static_assert(probe_{self.name}({self.offset(field.name)}).{field.name} == {one});")
        return "\n".join(lines)
