"""What a tensor map says of an array: how the copy engine of sm_90 is told what it looks like.

The map itself is 128 opaque bytes that the CUDA driver writes, or the simulator's encoder.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PANEL", "TensorBox", "key_box"]

PANEL = 64  # columns of a box: one panel of a shared tile, 128 bytes, which is also the span of the swizzle


@dataclass(frozen=True)
class TensorBox:
    """A tensor map but for the address.

    Attributes
    ----------
    dtype : {"f16", "bf16"}
    dims : tuple of int
        Sizes of the array's axes, innermost first.
    strides : tuple of int
        Bytes, of all axes but the innermost.
    box : tuple of int
        Elements that one copy takes along each axis.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def key_box(
    dtype: str, head_dim: int, sizes: tuple[int, int, int], strides: tuple[int, ...], block_n: int
) -> TensorBox:
    """The map of keys or values over (head_dim, seqlen, heads, batch), for copies of `block_n` rows.

    Parameters
    ----------
    dtype : {"f16", "bf16"}
    head_dim : int
    sizes, strides : tuple of int
        Steps of the other axes and elements between them, both in the order (batch, seqlen, heads).
    block_n : int
        Keys of a tile.
    """
    batch, seqlen, heads = zip(sizes, strides, strict=True)
    axes = (seqlen, heads, batch)
    # An axis of one step is never stepped along, but its stride has to be a legal one.
    steps = tuple(16 if size == 1 else 2 * stride for size, stride in axes)
    return TensorBox(dtype, (head_dim, *(size for size, _ in axes)), steps, (PANEL, block_n, 1, 1))
