"""The kernels' argument structs: one definition, from which the C++ side is rendered.

A kernel takes one struct by value. It is written down here as a table of fields, one row each: its name, its type, what
it means, and where its value comes from. The C++ header ``params.cuh`` is rendered from it, with a probe that fails the
compilation if the compiler lays a field out elsewhere; and so is the packer, which takes values by name.

A struct may begin with another one, as a C++ struct with a base does. ``AttentionParams`` is what every kernel that
looks at queries, keys and scores has to know, and all that the policies (``cuda_src/policy``) may read; a kernel's own
struct adds its results and how its work is dealt out.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "ABI_VERSION",
    "ATTENTION_PARAMS",
    "DROPOUT_ONE",
    "FWD_PARAMS",
    "FWD_TENSOR_PARAMS",
    "MAX_SEQLEN",
    "MAX_WINDOW",
    "Field",
    "ParamStruct",
    "Source",
    "render_header",
]

#: Grows with every change of a struct's layout or meaning; the first field of every attention struct.
ABI_VERSION = 3

#: Longest sequence. Row, key and diagonal arithmetic is 32-bit, and row + offset must not overflow.
MAX_SEQLEN = 1_000_000_000

#: Widest window: from any diagonal, which are clamped to lengths, it reaches every key. It stands for no bound.
MAX_WINDOW = 2**31 - 1

#: What a dropout threshold is out of: probabilities are kept or dropped by 16 bits each.
DROPOUT_ONE = 65536

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
    """

    name: str
    kind: str
    source: Source
    text: str = ""
    argument: str = ""

    @property
    def array(self) -> str:
        """The array or buffer whose address or map this is."""
        return self.argument or self.name


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
        end = self._offsets[last.name] + _KINDS[last.kind].bytes
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

    def of_source(self, *sources: Source) -> tuple[Field, ...]:
        """The fields whose values come from there."""
        return tuple(field for field in self.fields if field.source in sources)

    @functools.cached_property
    def _packer(self) -> struct.Struct:
        codes, end = "<", 0
        for field in self.fields:
            gap = self._offsets[field.name] - end
            codes += (f"{gap}x" if gap else "") + _KINDS[field.kind].pack_code
            end = self._offsets[field.name] + _KINDS[field.kind].bytes
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


def _strides(array: str, *axes: str, **texts: str) -> tuple[Field, ...]:
    return tuple(Field(f"{array}_stride_{axis}", "i8", Source.PROBLEM, texts.get(axis, "")) for axis in axes)


#: What policies read. Strides count elements, may be 0 or negative, and are 64-bit.
ATTENTION_PARAMS = ParamStruct(
    "AttentionParams",
    (
        Field("abi_version", "u4", Source.CONSTANT, "ABI_VERSION of params.py"),
        Field("batch", "u4", Source.PROBLEM),
        Field("q", "u8", Source.ADDRESS, "(batch, seqlen_q, num_heads, head_dim)"),
        Field("k", "u8", Source.ADDRESS, "(batch, seqlen_k, num_heads_k, head_dim)"),
        Field("v", "u8", Source.ADDRESS, "(batch, seqlen_k, num_heads_k, head_dim_v)"),
        *_strides("q", "batch", "seq", "head"),
        *_strides("k", "batch", "seq", "head"),
        *_strides("v", "batch", "seq", "head"),
        # Per batch element, or null.
        Field("seqlens_q", "u8", Source.ADDRESS, "(batch,) int32, clamped to [0, seqlen_q], or null: all are seqlen_q"),
        Field("seqlens_k", "u8", Source.ADDRESS, "(batch,) int32, clamped to [0, seqlen_k], or null: all are seqlen_k"),
        Field(
            "diagonal_offsets",
            "u8",
            Source.ADDRESS,
            "(batch,) int32: query i's diagonal is key i + offset; null: diagonal_offset",
            argument="align",
        ),
        # Score modifiers, masks, sinks and dropout; each is read only by the kernels that have it.
        Field("alibi_slopes", "u8", Source.ADDRESS, "(batch, num_heads) float32"),
        *_strides("alibi", "batch", "head"),
        Field("bias", "u8", Source.ADDRESS, "(batch, num_heads, seqlen_q, seqlen_k) of the kernel's bias dtype"),
        *_strides(
            "bias", "batch", "head", "seq", "key", seq="from query to query", key="1 where the kernel reads pairs"
        ),
        Field("mask", "u8", Source.ADDRESS, "(batch, num_heads, seqlen_q, seqlen_k) bytes: 0 hides, 1 does not"),
        *_strides(
            "mask", "batch", "head", "seq", "key", seq="from query to query", key="1 where the kernel reads pairs"
        ),
        Field("sinks", "u8", Source.ADDRESS, "(num_heads,) float32: logits, natural, not scaled"),
        Field("sinks_stride", "i8", Source.PROBLEM),
        Field("dropout_seed_array", "u8", Source.ADDRESS, "one uint64, or null: dropout_seed", argument="dropout_seed"),
        Field("dropout_seed", "u8", Source.CALL),
        # Sizes.
        Field("num_heads", "u4", Source.PROBLEM),
        Field("heads_per_kv", "u4", Source.PROBLEM, "query heads that share a key head"),
        Field("seqlen_q", "i4", Source.PROBLEM),
        Field("seqlen_k", "i4", Source.PROBLEM),
        Field("head_dim", "i4", Source.PROBLEM, "of q and k; where no multiple of 8, their rows are padded to one"),
        Field("head_dim_v", "i4", Source.PROBLEM, "of v and out; likewise for v, but not for out"),
        # The visible band around the diagonal, in keys; read by masks that have the bound.
        Field("diagonal_offset", "i4", Source.PROBLEM),
        Field(
            "diagonal_from_end",
            "i4",
            Source.PROBLEM,
            "1: the offset is seqlens_k - seqlens_q of the batch element; padded kernels only",
        ),
        Field("window_left", "i4", Source.PROBLEM, "keys before the diagonal; MAX_WINDOW: no bound"),
        Field("window_right", "i4", Source.PROBLEM, "keys beyond the diagonal, 0 for causal; MAX_WINDOW: no bound"),
        Field("softmax_scale", "f4", Source.PROBLEM, "with its sign; for score modifiers, which want the score itself"),
        Field("softcap", "f4", Source.PROBLEM, "s becomes softcap * tanh(s / softcap)"),
        Field("dropout_threshold", "u4", Source.PROBLEM, "1 to 65536: a probability is kept if its 16 bits are below"),
        Field("dropout_rescale", "f4", Source.PROBLEM, "65536 / dropout_threshold"),
        Field("scale_log2", "f4", Source.PROBLEM, "|softmax_scale| * log2(e), at least the smallest normal number"),
    ),
)

#: A forward kernel's: its results, and how tiles of query rows are dealt out (sm80/work.cuh).
FWD_PARAMS = ParamStruct(
    "FwdParams",
    (
        Field("out", "u8", Source.ADDRESS, "(batch, seqlen_q, num_heads, head_dim_v)"),
        Field("lse", "u8", Source.ADDRESS, "(batch, num_heads, seqlen_q) float32, or null"),
        *_strides("out", "batch", "seq", "head", "dim", dim="used where the kernel stores element by element"),
        *_strides("lse", "batch", "head", "seq"),
        Field("num_m_blocks", "u4", Source.PLAN, "query tiles per head"),
        Field("heads_per_group", "u4", Source.PLAN, "heads whose tiles take turns: see sm80/work.cuh"),
        Field("blocks_per_group", "u4", Source.PLAN, "heads_per_group * num_m_blocks"),
    ),
    base=ATTENTION_PARAMS,
)

#: That, for kernels whose keys and values come through tensor maps.
FWD_TENSOR_PARAMS = ParamStruct(
    "FwdTensorParams",
    (
        Field("k_map", "map", Source.MAP, "over (head_dim, seqlen, heads, batch), innermost first", argument="k"),
        Field("v_map", "map", Source.MAP, "likewise", argument="v"),
    ),
    base=FWD_PARAMS,
)

#: Every struct that a kernel of ``cuda_src`` may name, bases first.
STRUCTS = (ATTENTION_PARAMS, FWD_PARAMS, FWD_TENSOR_PARAMS)


def render_header() -> str:
    """The text of ``params.cuh``, the one include that is not a file of ``cuda_src``."""
    structs = "\n\n".join(one.render() for one in STRUCTS)
    return f"""#pragma once
#include "core/types.cuh"

namespace fa2 {{

constexpr u32 kAbiVersion = {ABI_VERSION};

{structs}

}}  // namespace fa2
"""
