"""The class that a file of rows fills in. `rows.forward` and `rows.options` are examples."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from peers import TITLES, Unavailable, Wrong

from cupy_fa2.device import Device
from cupy_fa2.plan import Plan
from harness.arrays import Inputs
from harness.machine import first_line
from harness.timing import interleaved, median, ratio, spread
from harness.words import aligned, grouped

__all__ = ["Bench", "Calls", "Mark", "Row", "Session", "ceilings_in_words", "heading"]

#: Name -> a call without arguments that queues its work.
Calls = dict[str, Callable[[], Any]]


class Row(Protocol):
    """One row: data, whose `name` no other row of its kind has."""

    @property
    def name(self) -> str:
        """Short, unique, and what ``--only`` takes."""


class Mark(NamedTuple):
    """What a measured number is to reach."""

    what: str
    value: float | None  # None: there is no time
    bound: float
    at_least: bool  # else at most

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        value = "-" if self.value is None else f"{self.value:.2f}"
        return f"{self.what} {value}, mark {self.bound:.2f}{'' if self.met else ': MISSED'}"


@dataclass
class Session:
    """What the rows of one run share."""

    device: Device
    inputs: Inputs
    arguments: argparse.Namespace
    result: dict[str, Any]

    def offer(
        self, found: dict[str, Any], makers: dict[str, Callable[[], Callable[[], Any]]], accept: Callable[..., None]
    ) -> Calls:
        """The calls of those wanted peers that run and give the right result; ``messages`` of the row say why not.

        Parameters
        ----------
        found : dict
            The row's fields.
        makers : dict
            Peer -> what makes its call, or raises. Names that are no peer's are always wanted.
        accept : callable
            Takes the peer's name and its result, and raises `Unavailable` if that is wrong, `Wrong` if ours is.
        """
        calls: Calls = {}
        for peer, make in makers.items():
            if peer in TITLES and peer not in self.arguments.peers:
                continue
            try:
                call = make()
                accept(peer, call())  # the first call compiles, chooses an algorithm, or fails
                calls[peer] = call
            except Wrong:
                raise
            except Unavailable as error:
                found["messages"][peer] = str(error)
            except Exception as error:
                found["messages"][peer] = first_line(error)
        return calls

    def time(self, calls: Calls) -> dict[str, list[float]]:
        """Milliseconds of the calls, which take turns."""
        given = self.arguments
        return interleaved(calls, seconds=given.seconds, min_rounds=given.rounds, flush=given.flush, seed=given.seed)


class Bench:
    """One kind of measurement. A subclass has the rows, how to make their calls, and what is special about its tables.

    Attributes
    ----------
    kind : str
        Word on the command line and in the names of results.
    title, details : str
        First line of ``--help``, and what else is to be said there.
    peers, quick_peers : tuple of str
        Who can be compared with, of `peers.TITLES`; the latter with ``--quick``.
    seconds, rounds : float, int
        Time for the rounds of a row, and their least number.
    flush : bool
        Whether L2 is flushed before each call.
    picture_name : str, optional
        ``docs/<picture_name>-<card>.svg``, if there is a picture.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    details: ClassVar[str] = ""
    peers: ClassVar[tuple[str, ...]]
    quick_peers: ClassVar[tuple[str, ...]] = ()
    seconds: ClassVar[float] = 0.4
    rounds: ClassVar[int] = 9
    flush: ClassVar[bool] = False
    picture_name: ClassVar[str | None] = None
    rows: ClassVar[Sequence[Any]]

    # --- which rows -----------------------------------------------------------------------------------------

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Flags of this kind alone."""

    def select(self, arguments: argparse.Namespace) -> list[Any]:
        """The rows that are asked for."""
        return [row for row in self.rows if arguments.only is None or row.name in arguments.only]

    # --- measuring ------------------------------------------------------------------------------------------

    def plan(self, row: Any, device: Device) -> Plan:
        """The plan of a row's call; needs no GPU."""
        raise NotImplementedError

    def describe(self, row: Any) -> dict[str, Any]:
        """The fields of a row that are known before it is measured; ``marks``: peer -> the least ratio, if any."""
        return {"name": row.name}

    def begin(self, rows: list[Any], session: Session) -> None:
        """Whatever comes before all rows."""

    def calls(self, row: Any, found: dict[str, Any], session: Session) -> tuple[Calls, Calls]:
        """Our calls, one of them ``ours``, and the peers' (see `Session.offer`), once results have been checked.

        Raises
        ------
        Exception
            If there can be no time: the row gets the message as its ``error``.
        """
        raise NotImplementedError

    def summarise(self, row: Any, found: dict[str, Any], times: dict[str, list[float]], session: Session) -> None:
        """Add what follows from the times.

        ``ms`` is the median of our call, ``spread`` the middle half of its times over it; ``ratios`` the medians of
        the peers' times over ours in the same round, ``ratio_spreads`` theirs.
        """
        ours = times["ours"]
        found |= {"ms": round(median(ours), 5), "spread": spread(ours), "rounds": len(ours)}
        ratios = {peer: ratio(times[peer], ours) for peer in times if peer in TITLES}
        found["ratios"] = {peer: round(median(values), 4) for peer, values in ratios.items()}
        found["ratio_spreads"] = {peer: spread(values) for peer, values in ratios.items()}

    def finish(self, rows: list[dict[str, Any]]) -> None:
        """Add to the rows measured so far what one takes from another."""

    # --- reading results ------------------------------------------------------------------------------------

    def marks(self, found: dict[str, Any]) -> list[Mark]:
        """The marks of a row, and what it reached."""
        ratios = found.get("ratios", {})
        return [
            Mark(f"vs {TITLES[peer]}", ratios.get(peer), bound, True) for peer, bound in found.get("marks", {}).items()
        ]

    def compared(self, before: dict[str, Any], now: dict[str, Any], peer: str) -> tuple[float | None, float | None]:
        """What `check.py` compares of a stored row and a fresh one: somebody's time over ours, or None."""
        return before.get("ratios", {}).get(peer), now.get("ratios", {}).get(peer)

    def cells(self, found: dict[str, Any]) -> dict[str, str]:
        """A measured row's columns as text."""
        return {
            "row": found["name"],
            "ms": f"{found['ms']:.3f}",
            **{peer: f"{value:.3f}" for peer, value in found["ratios"].items()},
            "marks": "; ".join(map(str, self.marks(found))),
        }

    def line(self, found: dict[str, Any]) -> str:
        """A row in words, with its messages, as it appears while others are measured."""
        if "error" in found:
            return f"{found['name']}: {found['error']}"
        cells = ", ".join(f"{name} {text}" for name, text in list(self.cells(found).items())[1:] if text)
        missing = "".join(f"; no {names}: {text}" for names, text in grouped(found["messages"]))
        return f"{found['name']}: {cells} (spread {found['spread']:.3f}, {found['rounds']} rounds){missing}"

    def table(self, result: dict[str, Any]) -> str:
        """The rows side by side, those that failed with their error, and what was missing in how many."""
        rows = result["rows"]
        texts = aligned([self.cells(row) for row in rows if "error" not in row])
        lines, measured = [heading(result), *texts[:1]], iter(texts[1:])
        lines += [f"{row['name']}: {row['error']}" if "error" in row else next(measured) for row in rows]
        counted: dict[tuple[str, str], int] = {}
        for row in rows:
            for message in row.get("messages", {}).items():
                counted[message] = counted.get(message, 0) + 1
        lines += [f"no {TITLES.get(name, name)} in {n} rows: {text}" for (name, text), n in sorted(counted.items())]
        return "\n".join(lines)

    def readme(self, result: dict[str, Any], picture: str | None) -> str:
        """Markdown for README, below that of the kinds before; `picture` is the link of what `picture` draws."""
        return ""

    def picture(self, result: dict[str, Any]) -> bytes:
        """An SVG; the same bytes for the same result."""
        raise NotImplementedError


def heading(result: dict[str, Any]) -> str:
    """Where and how a result was measured."""
    method = result.get("method", {})
    how = [f"at least {method['rounds']} rounds"] if "rounds" in method else []
    how += ["L2 flushed before each call"] if method.get("flush") else []
    words = [result["card"], f"driver {result['driver']}", f"commit {result['commit']}", *how]
    ceilings = ceilings_in_words(result.get("mma_ceiling_tflops", {}).items())
    return ", ".join(words) + (f"; mma.sync ceiling {ceilings} TFLOP/s" if ceilings else "")


def ceilings_in_words(rates: Iterable[tuple[str, float]]) -> str:
    """Rates by dtype."""
    return ", ".join(f"{rate:.0f} ({dtype})" for dtype, rate in rates)
