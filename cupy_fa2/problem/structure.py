"""What of a call decides its kernels and grids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_fa2.kernel.features import PLAIN, Features

__all__ = ["Structure"]


@dataclass(frozen=True)
class Structure:
    """The part of a problem that plans are made from: equal structures have one plan on each card.

    Lengths of the keys, strides, the scale's size, where the diagonal lies, the widths of a window and the like are
    quantities. They only fill the argument struct, so that a growing cache does not plan anew.

    Attributes
    ----------
    dtype, out_dtype : str
        The kernels' names: ``"f16"``, ``"bf16"``, ``"float"``.
    head_dim, head_dim_v : int
        Rounded up to 16, as tiles have them.
    features : Features
    out_vectors : bool
        Whether out can be stored by 16 bytes.
    tensor_maps : bool
        Whether tensor maps can describe k and v.
    heads : int
        Query heads of all batch elements together.
    seqlen_q : int
    """

    dtype: str
    out_dtype: str
    head_dim: int
    head_dim_v: int
    features: Features
    out_vectors: bool
    tensor_maps: bool
    heads: int
    seqlen_q: int

    @classmethod
    def typical(cls, head_dim: int, head_dim_v: int | None = None, **fields: Any) -> Structure:
        """That of a bfloat16 call on packed arrays, 32 heads of 4,096 queries, but for the `fields` given.

        For questions such as which kernel a head_dim of 96 gets on some card.
        """
        dtype = fields.get("dtype", "bf16")
        typical: dict[str, Any] = {
            "dtype": dtype,
            "out_dtype": dtype,
            "head_dim": head_dim,
            "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
            "features": PLAIN,
            "out_vectors": True,
            "tensor_maps": True,
            "heads": 32,
            "seqlen_q": 4096,
        }
        return cls(**{**typical, **fields})
