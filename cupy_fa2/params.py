"""The kernels' argument structs: one definition, from which the C++ side is rendered.

A kernel takes one struct by value. It is written down here as a field table; the C++ header ``params.cuh`` is
rendered from it, with a probe that fails the compilation if the compiler lays a field out elsewhere, and so is
the :class:`struct.Struct` that packs it (one call, ten times faster than writing fields of a NumPy record).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

__all__ = ["ABI_VERSION", "FWD_PARAMS", "MAX_SEQLEN", "ParamStruct"]

#: Grows with every change of a struct's layout or meaning; the first field of every struct.
ABI_VERSION = 1

#: Longest sequence. Row, key and diagonal arithmetic is 32-bit, and row + offset must not overflow.
MAX_SEQLEN = 1_000_000_000

_C_TYPES = {"u8": "unsigned long long", "i8": "long long", "u4": "unsigned int", "i4": "int", "f4": "float"}
_PACK_CODES = {"u8": "Q", "i8": "q", "u4": "I", "i4": "i", "f4": "f"}


@dataclass(frozen=True)
class ParamStruct:
    """An argument struct: its C++ name and its fields as ``(name, type, comment)``, in order.

    Types are NumPy's (``"u8"`` for pointers and other unsigned 64-bit, ``"i8"`` strides, ``"u4"``, ``"i4"``,
    ``"f4"``). Fields must follow each other without padding, which :attr:`dtype` checks.
    """

    name: str
    fields: tuple[tuple[str, str, str], ...]

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The struct as a NumPy dtype, aligned as C aligns it."""
        dtype = np.dtype([(name, "<" + kind) for name, kind, _ in self.fields], align=True)
        packed = sum(np.dtype(kind).itemsize for _, kind, _ in self.fields)
        if dtype.itemsize != packed:
            raise ValueError(f"{self.name} has padding: {dtype.itemsize} bytes for {packed} of fields")
        return dtype

    @property
    def packer(self) -> struct.Struct:
        """Packs the fields, in order, to the struct's bytes."""
        return struct.Struct("<" + "".join(_PACK_CODES[kind] for _, kind, _ in self.fields))

    def render(self) -> str:
        """The C++ definition, followed by an assertion of every field's offset."""
        dtype = self.dtype
        lines = [f"struct {self.name} {{"]
        lines += [f"  {_C_TYPES[kind]} {name};  // {comment}" for name, kind, comment in self.fields]
        lines += ["};", f"static_assert(sizeof({self.name}) == {dtype.itemsize});"]
        # NVRTC's offsetof is no constant expression. A bit_cast of bytes that number themselves is: the field that
        # starts at byte n reads back n in its low byte.
        lines += [
            f"struct {self.name}Bytes {{ unsigned char byte[{dtype.itemsize}]; }};",
            f"constexpr {self.name} probe_{self.name}(int at) {{",
            f"  {self.name}Bytes bytes{{}};",
            "  bytes.byte[at] = 1;",
            f"  return __builtin_bit_cast({self.name}, bytes);",
            "}",
        ]
        for name, kind, _ in self.fields:
            assert dtype.fields is not None
            offset = dtype.fields[name][1]
            one = "__builtin_bit_cast(float, 1)" if kind == "f4" else "1"
            lines.append(f"static_assert(probe_{self.name}({offset}).{name} == {one});")
        return "\n".join(lines)


FWD_PARAMS = ParamStruct(
    "FwdParams",
    (
        ("abi_version", "u4", "ABI_VERSION of params.py"),
        ("batch", "u4", ""),
        # Arrays. Strides count elements, may be 0 or negative, and are 64-bit.
        ("q", "u8", "(batch, seqlen_q, num_heads, head_dim)"),
        ("k", "u8", "(batch, seqlen_k, num_heads_k, head_dim)"),
        ("v", "u8", "(batch, seqlen_k, num_heads_k, head_dim_v)"),
        ("out", "u8", "(batch, seqlen_q, num_heads, head_dim_v)"),
        ("lse", "u8", "(batch, num_heads, seqlen_q) float32, or null"),
        ("q_stride_batch", "i8", ""),
        ("q_stride_seq", "i8", ""),
        ("q_stride_head", "i8", ""),
        ("k_stride_batch", "i8", ""),
        ("k_stride_seq", "i8", ""),
        ("k_stride_head", "i8", ""),
        ("v_stride_batch", "i8", ""),
        ("v_stride_seq", "i8", ""),
        ("v_stride_head", "i8", ""),
        ("out_stride_batch", "i8", ""),
        ("out_stride_seq", "i8", ""),
        ("out_stride_head", "i8", ""),
        ("out_stride_dim", "i8", "used where the kernel stores element by element"),
        ("lse_stride_batch", "i8", ""),
        ("lse_stride_head", "i8", ""),
        ("lse_stride_seq", "i8", ""),
        # Per batch element, or null.
        ("seqlens_q", "u8", "(batch,) int32, or null; reserved for padded batches"),
        ("seqlens_k", "u8", "(batch,) int32, or null; reserved for padded batches"),
        ("diagonal_offsets", "u8", "(batch,) int32: query i's diagonal is key i + offset; null: diagonal_offset"),
        # Sizes.
        ("num_heads", "u4", ""),
        ("heads_per_kv", "u4", "query heads that share a key head"),
        ("num_m_blocks", "u4", "query tiles per head"),
        ("seqlen_q", "i4", ""),
        ("seqlen_k", "i4", ""),
        ("head_dim", "i4", "of q and k; where no multiple of 8, their rows are padded to one"),
        ("head_dim_v", "i4", "of v and out; likewise for v, but not for out"),
        # The visible band around the diagonal, in keys; read by masks that have the bound.
        ("diagonal_offset", "i4", ""),
        ("window_left", "i4", "reserved for windows"),
        ("window_right", "i4", "0 for causal"),
        ("softmax_scale", "f4", "reserved for score modifiers, which want the score itself"),
        ("scale_log2", "f4", "|softmax_scale| * log2(e), at least the smallest normal number"),
    ),
)


#: Bytes of a tensor map (``CUtensorMap`` of the driver), and the alignment it wants.
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64

#: ``FwdTensorParams``: FwdParams, then the tensor maps of K and of V, each aligned.
TENSOR_MAPS_AT = -(-FWD_PARAMS.dtype.itemsize // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT
FWD_TENSOR_PARAMS_BYTES = TENSOR_MAPS_AT + 2 * TENSOR_MAP_BYTES


def render_header() -> str:
    """The text of ``params.cuh``, the one include that is not a file of ``cuda_src``."""
    return f"""#pragma once
namespace fa2 {{
{FWD_PARAMS.render()}
constexpr int kFwdTensorParamsBytes = {FWD_TENSOR_PARAMS_BYTES};
}}  // namespace fa2
"""
