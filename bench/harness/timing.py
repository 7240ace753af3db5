"""Time of calls that take turns: the card's clocks, which change as it warms, then favour none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

__all__ = ["Clock", "CudaClock", "interleaved", "median", "ratio", "spread"]

_MIN_MS = 1.0  # a shorter call is made several times in each round
_MOST_FLUSHED = 16  # and so many times at most where L2 is flushed, which takes 0.1 ms each time
_FLUSHED_BYTES = 256 << 20  # at least; twice what L2 holds, where that is more


class Clock(Protocol):
    """Marks in a queue of work, and the time between them."""

    def mark(self) -> Any:
        """A mark behind what has been queued."""

    def wait(self) -> None:
        """Until everything that was queued is done."""

    def ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks that have been passed."""

    def flush(self) -> None:
        """Queue a write over more than L2 holds, so that the next call finds nothing of its inputs there."""


class CudaClock:
    """Events of the current CuPy stream."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._scratch: Any = None

    def mark(self) -> Any:
        """An event that is recorded now."""
        event = self._cuda.Event()
        event.record()
        return event

    def wait(self) -> None:
        """Until the stream is done."""
        self._cuda.get_current_stream().synchronize()

    def ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two events."""
        return float(self._cuda.get_elapsed_time(begin, end))

    def flush(self) -> None:
        """Fill a buffer that is larger than L2. This takes longer than the host needs for the call after it."""
        if self._scratch is None:
            properties = self._cuda.runtime.getDeviceProperties(self._cuda.runtime.getDevice())
            self._bytes = max(_FLUSHED_BYTES, 2 * properties["l2CacheSize"])
            self._scratch = self._cuda.alloc(self._bytes)
        self._scratch.memset_async(0, self._bytes)


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    *,
    seconds: float,
    min_rounds: int = 9,
    max_rounds: int = 30,
    flush: bool = False,
    seed: int = 0,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each call, one number a round.

    Each round makes every call, in an order that is shuffled anew. Nothing waits within a round, and one call that is
    not counted comes first, so that the host's work stays hidden behind the GPU's.

    Parameters
    ----------
    calls : mapping
        Name -> a call that queues its work on the current stream.
    seconds : float
        For all rounds together, if that makes at least `min_rounds` and at most `max_rounds` of them.
    flush : bool
        Empty L2 before each call. A call of less than a millisecond is made several times a round: without flushing
        in a row between two marks, of which the mean counts; else each by itself, of which the median does.
    seed : int
        Of the orders.
    clock : Clock, optional
        By default a `CudaClock`.
    """
    clock = clock or CudaClock()

    def once(name: str) -> tuple[Any, Any, Any]:
        start = clock.mark()
        if flush:
            clock.flush()
        begin = clock.mark() if flush else start
        calls[name]()
        return start, begin, clock.mark()

    def in_a_row(name: str, repeat: int) -> tuple[Any, Any]:
        begin = clock.mark()
        for _ in range(repeat):
            calls[name]()
        return begin, clock.mark()

    repeats, per_round = {}, 0.0
    for name in calls:
        calls[name]()
        start, begin, end = once(name)
        clock.wait()
        repeats[name] = max(1, round(_MIN_MS / max(clock.ms(begin, end), 1e-3)))
        if flush:
            repeats[name] = min(repeats[name], _MOST_FLUSHED)
        per_round += max(clock.ms(start, end), 1e-3) * repeats[name]
    rounds = min(max(int(seconds * 1e3 / per_round), min_rounds), max(min_rounds, max_rounds))

    rng = np.random.default_rng(seed)
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        order = [names[i] for i in rng.permutation(len(names))]
        calls[order[-1]]()
        if flush:
            marks = {name: [once(name)[1:] for _ in range(repeats[name])] for name in order}
        else:
            marks = {name: [in_a_row(name, repeats[name])] for name in order}
        clock.wait()
        for name, pairs in marks.items():
            taken = [clock.ms(*pair) for pair in pairs]
            times[name].append(float(np.median(taken)) if flush else taken[0] / repeats[name])
    return times


def median(values: Any) -> float:
    """The middle of the values."""
    return float(np.median(values))


def ratio(theirs: Any, ours: Any) -> np.ndarray[Any, Any]:
    """Times over times, round by round."""
    return np.asarray(theirs) / np.asarray(ours)


def spread(values: Any) -> float:
    """Width of the middle half of the values, over their median."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return round(float((high - low) / middle), 4)
