"""From candidates to the rows of a table: the fastest first, and further down those with room for more options.

The rules, which nobody settles by hand afterwards:

- A row is taken if it serves an option set that no faster row has room for; `room` is the largest weight at which the
  assembler, with every NVRTC that there are records of, spills none of the sets sampled (`registers.asks`).
- Times within 1 % are a tie. Then, in this order: what is faster at seqlen 512 by more than that; two stages rather
  than three, and than one; keys last to first; masks decided per warp; fewer columns of Q kept; fewer threads; more
  keys.
- One row for all lengths.
- Where a card has tensor copies, plain calls have one tile with and without, so that how keys lie in memory does not
  show in a result's bits: that of the least sum of both times, each over the fastest of its kind, those with tensor
  copies counted twice.
- The last row serves whatever is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import ge

from cupy_fa2.device import Device
from cupy_fa2.kernel.features import Features
from cupy_fa2.kernel.forward import FwdTile
from cupy_fa2.plan.feasible import accumulator_registers, serves
from cupy_fa2.plan.row import Row
from tuner.candidates import row_of
from tuner.registers import Ask, Fit, SpillBook, asks, fit

__all__ = ["TIE", "Timed", "ladder", "plain_shape", "plain_tile", "settled"]

TIE = 0.01
_TENSOR_COUNTS = 2  # times as much as cp.async, in the choice of one tile for both
_TEAM = 16  # registers, about, of what pairs exchange


@dataclass(frozen=True)
class Timed:
    """A candidate.

    Attributes
    ----------
    tile : FwdTile
    time : float
        Measured at 8,192, or expected, in any unit.
    short : float, optional
        Measured at 512.
    tflops : float, optional
        What was measured at 8,192.
    """

    tile: FwdTile
    time: float
    short: float | None = None
    tflops: float | None = None


def settled(found: Sequence[Timed]) -> list[Timed]:
    """The candidates fastest first, ties by the rules."""
    left, order = list(found), []
    while left:
        fastest = min(one.time for one in left)
        tied = [one for one in left if one.time <= fastest * (1 + TIE)]
        if all(one.short is not None for one in tied):
            quickest = min(one.short or 0.0 for one in tied)
            tied = [one for one in tied if (one.short or 0.0) <= quickest * (1 + TIE)]
        first = min(tied, key=lambda one: _preference(one.tile))
        order.append(first)
        left.remove(first)
    return order


def _preference(tile: FwdTile) -> tuple[object, ...]:
    return (
        tile.stages != 2,
        not tile.last_to_first,
        not tile.mask_by_warp,
        tile.q_kept,
        tile.threads,
        -tile.block_n,
        tile.block_m,
        tile.team,
    )


def plain_shape(tile: FwdTile) -> FwdTile:
    """What of a tile shows in a result's bits."""
    return replace(tile, stages=1, q_kept=0, mask_by_warp=False)


def plain_tile(
    tensor: Sequence[Timed], cp_async: Sequence[Timed], masked: bool, devices: Sequence[Device], book: SpillBook
) -> FwdTile:
    """The tile of plain calls where a card has tensor copies: one for both, of the least cost in time."""
    fastest = [min(one.time for one in found) for found in (tensor, cp_async)]
    pairs = []
    for one in settled(tensor):
        twins = [other for other in settled(cp_async) if plain_shape(other.tile) == plain_shape(one.tile)]
        if twins:
            pairs.append((_TENSOR_COUNTS * one.time / fastest[0] + twins[0].time / fastest[1], one, twins))
    for _, one, twins in sorted(pairs, key=lambda pair: pair[0]):
        if _plain(one.tile, "tensor", masked, devices, book) and any(
            _plain(twin.tile, "cp_async", masked, devices, book) for twin in twins
        ):
            return one.tile
    raise ValueError("no tile serves plain calls with tensor maps and without")


def _plain(tile: FwdTile, transport: str, masked: bool, devices: Sequence[Device], book: SpillBook) -> bool:
    plain = [Ask(Features(band)) for band in (("causal", "window") if masked else ("full",))]
    return fit(tile, transport, plain, devices, book).served == plain


def ladder(
    found: Sequence[Timed],
    masked: bool,
    transport: str,
    devices: Sequence[Device],
    book: SpillBook,
    origin: str,
    plain: FwdTile | None = None,
) -> tuple[Row, ...]:
    """Rows of one class, mask and transport.

    Parameters
    ----------
    found : sequence of Timed
    masked : bool
    transport : str
    devices : sequence of Device
        One for each architecture that the table serves.
    book : SpillBook
    origin : str
        Of the rows.
    plain : FwdTile, optional
        The tile, but for its stages and the like, that plain calls have to get: the first row, whatever is faster.
    """
    wanted = asks(masked, transport)
    rows: list[Row] = []
    order = settled(found)
    if plain is not None:
        order.sort(key=lambda one: plain_shape(one.tile) != plain_shape(plain))
    last = min((one for one in order if _takes_anything(one.tile)), key=lambda one: (_least(one.tile), one.time))
    poor: list[tuple[Ask, tuple[int, int]]] = []  # what there were no registers for, and with how many taken already
    for one in order:
        taken = _least(one.tile)
        if one is not last and any(ask == wanted[0] and all(map(ge, taken, least)) for ask, least in poor):
            continue
        got = fit(one.tile, transport, wanted, devices, book)
        if not got.served:
            poor.append((wanted[0], taken))
            continue
        rows.append(_row(one, got, origin))
        wanted = [ask for ask in wanted if ask not in got.served]
        if not wanted:
            break
    if wanted and (not rows or row_of(last.tile) != replace(rows[-1], room=None, but_not=(), origin="", tflops=None)):
        rows.append(_row(last, Fit(), origin))  # whatever spills, spills least here
    return (*rows[:-1], replace(rows[-1], room=None, but_not=()))


def _least(tile: FwdTile) -> tuple[int, int]:
    """What a tile takes in registers at least, in an order that holds from one tile to the next."""
    return accumulator_registers(tile) + (_TEAM if tile.team > 1 else 0), tile.stages


def _takes_anything(tile: FwdTile) -> bool:
    return serves(tile, Features(dropout=True))


def _row(one: Timed, got: Fit, origin: str) -> Row:
    tflops = None if one.tflops is None else round(one.tflops, 1)
    return row_of(one.tile, room=got.room, but_not=got.but_not, origin=origin, tflops=tflops)
