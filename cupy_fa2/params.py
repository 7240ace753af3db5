"""The kernels' argument structs: one definition, from which the C++ side is rendered.

A kernel takes one struct by value. It is written down here as a field table; the C++ header ``params.cuh`` is
rendered from it, with a probe that fails the compilation if the compiler lays a field out elsewhere, and so is
the :class:`struct.Struct` that packs it (one call, ten times faster than writing fields of a NumPy record).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["ABI_VERSION", "DROPOUT_ONE", "FWD_PARAMS", "MAX_SEQLEN", "MAX_WINDOW", "FwdBindings", "ParamStruct"]

#: Grows with every change of a struct's layout or meaning; the first field of every struct.
ABI_VERSION = 2

#: Longest sequence. Row, key and diagonal arithmetic is 32-bit, and row + offset must not overflow.
MAX_SEQLEN = 1_000_000_000

#: Widest window: from any diagonal, which are clamped to lengths, it reaches every key. It stands for no bound.
MAX_WINDOW = 2**31 - 1

#: What a dropout threshold is out of: probabilities are kept or dropped by 16 bits each.
DROPOUT_ONE = 65536

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

    def offset(self, name: str) -> int:
        """Where a field begins, in bytes."""
        fields = self.dtype.fields
        assert fields is not None
        return int(fields[name][1])

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
            offset = self.offset(name)
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
        ("seqlens_q", "u8", "(batch,) int32, clamped to [0, seqlen_q], or null: all are seqlen_q"),
        ("seqlens_k", "u8", "(batch,) int32, clamped to [0, seqlen_k], or null: all are seqlen_k"),
        ("diagonal_offsets", "u8", "(batch,) int32: query i's diagonal is key i + offset; null: diagonal_offset"),
        # Score modifiers, masks, sinks and dropout; each is read only by the kernels that have it.
        ("alibi_slopes", "u8", "(batch, num_heads) float32"),
        ("alibi_stride_batch", "i8", ""),
        ("alibi_stride_head", "i8", ""),
        ("bias", "u8", "(batch, num_heads, seqlen_q, seqlen_k) of the kernel's bias dtype"),
        ("bias_stride_batch", "i8", ""),
        ("bias_stride_head", "i8", ""),
        ("bias_stride_seq", "i8", "from query to query"),
        ("bias_stride_key", "i8", "1 where the kernel reads pairs"),
        ("mask", "u8", "(batch, num_heads, seqlen_q, seqlen_k) bytes: 0 hides, 1 does not"),
        ("mask_stride_batch", "i8", ""),
        ("mask_stride_head", "i8", ""),
        ("mask_stride_seq", "i8", "from query to query"),
        ("mask_stride_key", "i8", "1 where the kernel reads pairs"),
        ("sinks", "u8", "(num_heads,) float32: logits, natural, not scaled"),
        ("sinks_stride", "i8", ""),
        ("dropout_seed_array", "u8", "one uint64, or null: dropout_seed"),
        ("dropout_seed", "u8", ""),
        # Sizes.
        ("num_heads", "u4", ""),
        ("heads_per_kv", "u4", "query heads that share a key head"),
        ("num_m_blocks", "u4", "query tiles per head"),
        ("heads_per_group", "u4", "heads whose tiles take turns: see core/work.cuh"),
        ("blocks_per_group", "u4", "heads_per_group * num_m_blocks"),
        ("seqlen_q", "i4", ""),
        ("seqlen_k", "i4", ""),
        ("head_dim", "i4", "of q and k; where no multiple of 8, their rows are padded to one"),
        ("head_dim_v", "i4", "of v and out; likewise for v, but not for out"),
        # The visible band around the diagonal, in keys; read by masks that have the bound.
        ("diagonal_offset", "i4", ""),
        ("diagonal_from_end", "i4", "1: the offset is seqlens_k - seqlens_q of the batch element; padded kernels only"),
        ("window_left", "i4", "keys before the diagonal; MAX_WINDOW: no bound"),
        ("window_right", "i4", "keys beyond the diagonal, 0 for causal; MAX_WINDOW: no bound"),
        ("softmax_scale", "f4", "with its sign; for score modifiers, which want the score itself"),
        ("softcap", "f4", "s becomes softcap * tanh(s / softcap)"),
        ("dropout_threshold", "u4", "1 to 65536: a probability is kept if its 16 bits are below"),
        ("dropout_rescale", "f4", "65536 / dropout_threshold"),
        ("scale_log2", "f4", "|softmax_scale| * log2(e), at least the smallest normal number"),
    ),
)


class FwdBindings(NamedTuple):
    """Fields of ``FwdParams`` that change from launch to launch of a plan: addresses, 0 for none, and the seed."""

    q: int = 0
    k: int = 0
    v: int = 0
    out: int = 0
    lse: int = 0
    seqlens_q: int = 0
    seqlens_k: int = 0
    diagonal_offsets: int = 0
    alibi_slopes: int = 0
    bias: int = 0
    mask: int = 0
    sinks: int = 0
    dropout_seed_array: int = 0
    dropout_seed: int = 0


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
