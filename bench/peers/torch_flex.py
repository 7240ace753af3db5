"""torch's `flex_attention`: our calls in its words, and a limit for the time that it takes to compile."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from harness.case import Case

from peers import Unavailable, tensor, torch_module

__all__ = ["Flex", "as_flex", "time_limit"]


def as_flex(
    case: Case, q: Any, k: Any, v: Any, given: dict[str, Any], compiled: Callable[..., Any]
) -> Callable[[], Any]:
    """The same call for torch's `flex_attention`, which is `compiled`.

    Raises
    ------
    Unavailable
        If it has an option that is not written down here.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    unknown = given.keys() - {"window", "softcap", "alibi_slopes"}
    if unknown or not (given or case.causal):
        raise Unavailable("not asked of flex_attention")
    slopes = tensor(given["alibi_slopes"]) if "alibi_slopes" in given else None
    softcap = given.get("softcap")
    left, right = given.get("window", (case.seqlen, 0 if case.causal else case.seqlen))

    def score(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes is None else score - slopes[head] * (row - key).abs()

    def seen(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return (row - key <= left) & (key - row <= right)

    options: dict[str, Any] = {}
    if softcap is not None or slopes is not None:
        options["score_mod"] = score
    if "window" in given or case.causal:
        options["block_mask"] = create_block_mask(seen, None, None, case.seqlen, case.seqlen, device=q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: compiled(q, k, v, **options).transpose(1, 2)


class Flex:
    """`flex_attention` through ``torch.compile``, which may take so many seconds in all."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self._compiled: Any = None

    def prepare(self, case: Case, q: Any, k: Any, v: Any, given: dict[str, Any]) -> Callable[[], Any]:
        """A call that has been compiled.

        Raises
        ------
        Unavailable
        """
        if self.left <= 0:
            raise Unavailable("no time is left to compile it (--flex)")
        begin = time.perf_counter()
        try:
            with time_limit(self.left):
                torch = torch_module()
                if self._compiled is None:
                    from torch.nn.attention.flex_attention import flex_attention

                    self._compiled = torch.compile(flex_attention, dynamic=False)
                call = as_flex(case, q, k, v, given, self._compiled)
                call()
                torch.cuda.synchronize()
                return call
        finally:
            self.left -= time.perf_counter() - begin


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer; in the main thread, where there are signals."""

    def expired(*_: Any) -> None:
        raise TimeoutError(f"took more than the {seconds:.0f} s that were left")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)  # and every 5 s after that, if a compiler caught it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
