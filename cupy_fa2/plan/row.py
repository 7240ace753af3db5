"""A row of a table of tiles."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_fa2.kernel.forward import FwdTile

__all__ = ["Key", "Row", "Rows"]


@dataclass(frozen=True)
class Row:
    """A tile, and what it has room for.

    Attributes
    ----------
    block_m, block_n, num_warps, stages, q_kept, team, mask_by_warp, last_to_first
        As `FwdTile` has them.
    room : int or None
        The largest `register_weight` with which the kernel builds without spills. None: whatever is asked, for the last
        resort.
    but_not : tuple of str
        Features that it has no registers for, whatever they weigh (`feature_names`).
    min_seqlen : int
        Shorter sequences take a row further down.
    min_blocks : int
        As `FwdSpec` has it.
    origin : str
        Where the row is from: a key of its module's ``ORIGINS``.
    tflops : float, optional
        What was measured, of plain calls at 8,192 in bfloat16.
    """

    block_m: int
    block_n: int
    num_warps: int
    stages: int
    room: int | None = None
    q_kept: int = 0
    team: int = 1
    mask_by_warp: bool = False
    last_to_first: bool = True
    but_not: tuple[str, ...] = ()
    min_seqlen: int = 0
    min_blocks: int = 1
    origin: str = ""
    tflops: float | None = None

    def tile(self, head_dim: int, head_dim_v: int) -> FwdTile:
        """The row's tile for these head dimensions."""
        return FwdTile(
            self.block_m,
            self.block_n,
            head_dim,
            head_dim_v,
            self.num_warps,
            self.stages,
            last_to_first=self.last_to_first,
            q_kept=self.q_kept,
            team=self.team,
            mask_by_warp=self.mask_by_warp,
        )


#: head_dim, head_dim_v, whether a band hides keys, and the transport.
Key = tuple[int, int, bool, str]
#: The fastest row first.
Rows = dict[Key, tuple[Row, ...]]
