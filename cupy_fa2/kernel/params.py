"""The kernels' argument structs.

``AttentionParams`` is what every kernel that looks at queries, keys and scores has to know, and all that the policies
(``cuda_src/policy``) may read; a kernel's own struct adds its results and how its work is dealt out. Other kernels have
small structs of their own.
"""

from __future__ import annotations

from cupy_fa2.kernel.features import Features
from cupy_fa2.kernel.param_struct import Field, ParamStruct, Source

__all__ = [
    "ABI_SYMBOL",
    "ABI_VERSION",
    "ATTENTION_PARAMS",
    "CEILING_PARAMS",
    "DROPOUT_ONE",
    "FWD_PARAMS",
    "FWD_TENSOR_PARAMS",
    "MAX_SEQLEN",
    "MAX_WINDOW",
    "STRUCTS",
    "arrays_read",
    "check_abi",
    "render_header",
]

#: Grows with every change of a struct's layout or meaning; the first field of every attention struct.
ABI_VERSION = 3

#: The variable that says so in every compiled module: an unsigned number of 32 bits.
ABI_SYMBOL = "fa2_abi_version"

#: Longest sequence. Row, key and diagonal arithmetic is 32-bit, and row + offset must not overflow.
MAX_SEQLEN = 1_000_000_000

#: Widest window: from any diagonal, which are clamped to lengths, it reaches every key. It stands for no bound.
MAX_WINDOW = 2**31 - 1

#: What a dropout threshold is out of: probabilities are kept or dropped by 16 bits each.
DROPOUT_ONE = 65536


def _array(name: str, text: str, *, argument: str = "", feature: str = "") -> Field:
    return Field(name, "u8", Source.ADDRESS, text, argument, feature)


def _number(name: str, kind: str, text: str = "") -> Field:
    return Field(name, kind, Source.PROBLEM, text)


def _strides(array: str, *axes: str, **texts: str) -> tuple[Field, ...]:
    return tuple(_number(f"{array}_stride_{axis}", "i8", texts.get(axis, "")) for axis in axes)


#: What policies read. Strides count elements, may be 0 or negative, and are 64-bit.
ATTENTION_PARAMS = ParamStruct(
    "AttentionParams",
    (
        Field("abi_version", "u4", Source.CONSTANT, "ABI_VERSION of params.py"),
        _number("batch", "u4"),
        *_strides("q", "batch", "seq", "head"),
        *_strides("k", "batch", "seq", "head"),
        *_strides("v", "batch", "seq", "head"),
        *_strides("alibi", "batch", "head"),
        *_strides(
            "bias", "batch", "head", "seq", "key", seq="from query to query", key="1 where the kernel reads pairs"
        ),
        *_strides(
            "mask", "batch", "head", "seq", "key", seq="from query to query", key="1 where the kernel reads pairs"
        ),
        _number("sinks_stride", "i8"),
        # Sizes.
        _number("num_heads", "u4"),
        _number("heads_per_kv", "u4", "query heads that share a key head"),
        _number("seqlen_q", "i4"),
        _number("seqlen_k", "i4"),
        _number("head_dim", "i4", "of q and k; where no multiple of 8, their rows are padded to one"),
        _number("head_dim_v", "i4", "of v and out; likewise for v, but not for out"),
        # The visible band around the diagonal, in keys; read by masks that have the bound.
        _number("diagonal_offset", "i4"),
        _number(
            "diagonal_from_end",
            "i4",
            "1: the offset is seqlens_k - seqlens_q of the batch element; padded kernels only",
        ),
        _number("window_left", "i4", "keys before the diagonal; MAX_WINDOW: no bound"),
        _number("window_right", "i4", "keys beyond the diagonal, 0 for causal; MAX_WINDOW: no bound"),
        _number("softmax_scale", "f4", "with its sign; for score modifiers, which want the score itself"),
        _number("softcap", "f4", "s becomes softcap * tanh(s / softcap)"),
        _number("dropout_threshold", "u4", "1 to 65536: a probability is kept if its 16 bits are below"),
        _number("dropout_rescale", "f4", "65536 / dropout_threshold"),
        _number("scale_log2", "f4", "|softmax_scale| * log2(e), at least the smallest normal number"),
        # What changes from launch to launch lies together, here and at the beginning of the derived structs. Arrays
        # that a call does not have are null; each is read only by kernels that want it.
        _array(
            "seqlens_q",
            "(batch,) int32, clamped to [0, seqlen_q], or null: all are seqlen_q",
            feature="padded",
        ),
        _array(
            "seqlens_k",
            "(batch,) int32, clamped to [0, seqlen_k], or null: all are seqlen_k",
            feature="padded",
        ),
        _array(
            "diagonal_offsets",
            "(batch,) int32: query i's diagonal is key i + offset; null: diagonal_offset",
            argument="align",
        ),
        _array("alibi_slopes", "(batch, num_heads) float32", feature="alibi"),
        _array(
            "bias",
            "(batch, num_heads, seqlen_q, seqlen_k) of the kernel's bias dtype",
            feature="bias",
        ),
        _array(
            "mask",
            "(batch, num_heads, seqlen_q, seqlen_k) bytes: 0 hides, 1 does not",
            feature="mask",
        ),
        _array("sinks", "(num_heads,) float32: logits, natural, not scaled", feature="sinks"),
        _array(
            "dropout_seed_array",
            "one uint64, or null: dropout_seed",
            argument="dropout_seed",
            feature="dropout",
        ),
        Field("dropout_seed", "u8", Source.CALL),
        _array("q", "(batch, seqlen_q, num_heads, head_dim)"),
        _array("k", "(batch, seqlen_k, num_heads_k, head_dim)"),
        _array("v", "(batch, seqlen_k, num_heads_k, head_dim_v)"),
    ),
)

#: A forward kernel's: its results, and how tiles of query rows are dealt out (sm80/work.cuh).
FWD_PARAMS = ParamStruct(
    "FwdParams",
    (
        _array("out", "(batch, seqlen_q, num_heads, head_dim_v)"),
        _array("lse", "(batch, num_heads, seqlen_q) float32, or null"),
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

#: The measuring kernel's (bench/mma_ceiling.cuh).
CEILING_PARAMS = ParamStruct(
    "CeilingParams",
    (
        _array("sink", "one float32 per thread"),
        Field("iterations", "i4", Source.PLAN, "passes of the loop"),
    ),
)

#: Every struct that a kernel of ``cuda_src`` may name, bases first.
STRUCTS = (ATTENTION_PARAMS, FWD_PARAMS, FWD_TENSOR_PARAMS, CEILING_PARAMS)


def arrays_read(features: Features) -> tuple[str, ...]:
    """Arrays of a call that an attention kernel with these features may read, by the argument's name."""
    fields = ATTENTION_PARAMS.of_source(Source.ADDRESS)
    return tuple(field.array for field in fields if not field.feature or getattr(features, field.feature))


def check_abi(name: str, version: int) -> None:
    """Raise unless a module takes argument structs of this version.

    Parameters
    ----------
    name : str
        The module, for the message.
    version : int
        What its `ABI_SYMBOL` says.

    Raises
    ------
    RuntimeError
        If it is another one: the kernel would read its arguments from the wrong places.
    """
    if version != ABI_VERSION:
        raise RuntimeError(
            f"{name} takes argument structs of version {version}, this package fills those of version {ABI_VERSION}; "
            "compile or export the kernel anew"
        )


def render_header() -> str:
    """The text of ``params.cuh``, the one include that is not a file of ``cuda_src``."""
    structs = "\n\n".join(one.render() for one in STRUCTS)
    return f"""#pragma once
#include "core/types.cuh"

namespace fa2 {{

// Every module has it, so that whoever loads one can tell that it takes the structs that they fill.
extern "C" __device__ const u32 {ABI_SYMBOL} = {ABI_VERSION};

{structs}

}}  // namespace fa2
"""
