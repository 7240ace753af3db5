"""The choice of a forward kernel: a pure function over tables of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_fa2.device import Device
from cupy_fa2.kernel.forward import FwdTile
from cupy_fa2.plan import by_rule
from cupy_fa2.plan.feasible import infeasible, serves
from cupy_fa2.plan.row import Row
from cupy_fa2.plan.tuned import tuned_rows
from cupy_fa2.plan.weight import feature_names, register_weight
from cupy_fa2.problem import Structure

__all__ = ["Choice", "pick_forward"]


@dataclass(frozen=True)
class Choice:
    """What is left open by a problem.

    Attributes
    ----------
    tile : FwdTile
    transport : {"cp_async", "tensor"}
        How K and V come into shared memory.
    min_blocks : int
        Blocks that registers must leave room for.
    reason : str
    """

    tile: FwdTile
    transport: str
    min_blocks: int
    reason: str


def pick_forward(structure: Structure, device: Device) -> Choice:
    """The first row that has room for the call's options and fits on `device`."""
    features = structure.features
    names = feature_names(features)
    refused = []
    for row, transport, reason in _rows(structure, device):
        tile = row.tile(structure.head_dim, structure.head_dim_v)
        weight = register_weight(features, float_out=structure.out_dtype == "float", transport=transport)
        if row.room is not None and weight > row.room:
            continue
        if not names.isdisjoint(row.but_not) or structure.seqlen_q < row.min_seqlen or not serves(tile, features):
            continue
        problem = infeasible(tile, device)
        if problem is None:
            return Choice(tile, transport, row.min_blocks, reason)
        refused.append(f"{tile.block_m}x{tile.block_n}, {tile.stages} stage(s) {problem}")
    head_dims = structure.head_dim, structure.head_dim_v
    raise ValueError(f"no tile for head_dim {head_dims} fits on {device.name}: {'; '.join(refused)}")


def _rows(structure: Structure, device: Device) -> Iterator[tuple[Row, str, str]]:
    """Every row for these head dimensions in order, with its transport and where it is from."""
    head_dims = structure.head_dim, structure.head_dim_v
    masked = structure.features.band != "full"
    # Tensor maps know only an array's end, not that of each batch element.
    transports = ("tensor", "cp_async") if structure.tensor_maps and not structure.features.padded else ("cp_async",)
    for transport in transports:
        for row, origin in tuned_rows(device.arch, (*head_dims, masked, transport)):
            yield row, transport, f"Of the table for sm_{device.arch} ({origin})"
    for row in by_rule.rows_by_rule(*head_dims, masked, device):
        yield row, "cp_async", by_rule.ORIGINS[row.origin]
