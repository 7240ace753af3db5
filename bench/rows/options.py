"""What each option costs, beside our plain call and torch's best for the same call."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import peers
from harness.arrays import Arrays, on_host
from harness.bench import Bench, Calls, Mark, Session
from harness.case import Case, visible_share
from harness.launch import plan_of
from harness.timing import median, ratio, spread
from harness.words import markdown
from peers.torch_flex import Flex
from peers.torch_sdpa import BACK_ENDS, as_sdpa, sdpa

from cupy_fa2 import flash_attention
from cupy_fa2.device import Device
from cupy_fa2.plan import Plan
from cupy_fa2.testing import assert_attention_close
from rows import pieces

__all__ = ["OPTIONS", "Option", "OptionCosts", "best_of_torch", "check"]

DTYPE, HEAD_DIM = "bf16", 128

_CHECKED = 4  # rows in each of four places
_DIFFERENCE = 0.02  # relative, of torch's results from ours; bfloat16 probabilities give some 0.005
_ROUNDED_DIFFERENCE = 0.1  # where torch's call rounds more


@dataclass(frozen=True)
class Option:
    """One row.

    Attributes
    ----------
    name, title : str
    pieces : tuple of str
        Of `pieces.PIECES`.
    mark : float, optional
        What the cost is to be at most.
    causal : bool
    seqlen : int
    """

    name: str
    title: str
    pieces: tuple[str, ...] = ()
    mark: float | None = None
    causal: bool = False
    seqlen: int = 8192

    @property
    def case(self) -> Case:
        """The sizes."""
        return Case(DTYPE, HEAD_DIM, self.causal, self.seqlen)

    @property
    def plain(self) -> bool:
        """Whether this is the call that others are compared with."""
        return not self.pieces and not self.causal

    def given(self, make: Arrays, case: Case | None = None) -> dict[str, Any]:
        """The options of the call beside `causal`, for the row's own sizes or another case's."""
        return pieces.given(self.pieces, make, case or self.case)


OPTIONS = (
    Option("plain", "plain"),
    Option("causal", "causal", causal=True, mark=1 / 0.9),  # 0.90 of the TFLOP/s
    Option("softcap", "softcap", ("softcap",), 1.25),
    Option("alibi", "ALiBi", ("alibi",), 1.10),
    Option("bias", "bias (1, h, s, s), bfloat16", ("bias",), 1.45),
    Option("bias32", "bias (1, h, s, s), float32", ("bias32",)),
    Option("mask_keys", "mask (b, 1, 1, s)", ("mask_keys",), 1.15),
    Option("mask", "mask (1, h, s, s)", ("mask",)),
    Option("sinks", "sinks", ("sinks",)),
    Option("padded", "seqlens_k, all full", ("padded",)),
    Option("dropout", f"dropout {pieces.DROPOUT}", ("dropout",), 1.30),
    Option(
        "everything",
        "everything together",
        ("window_all", "softcap", "alibi", "bias", "mask", "sinks", "padded", "dropout"),
    ),
    Option("plain16k", "plain", seqlen=16_384),
    Option("window", "window ({:,}, {:,})".format(*pieces.WINDOW), ("window",), 1.25, seqlen=16_384),
)


class OptionCosts(Bench):
    """Rows of `Option`.

    ``ms`` is of our call, ``plain_ms`` of our plain one in the same rounds, ``share`` of the pairs of query and key
    those that the row sees. ``cost`` is the ratio of the times over the share, ``mark`` what it is to be at most, and
    ``spread`` the middle half of the costs over their median. ``yardstick`` is the time of torch's plain flash back end
    over ours, which `check.py` compares. Of each of torch's back ends, ``torch`` has the same call's ``ms``, its
    ``ratio`` to ours, ``over_plain``, to our plain call, and ``own``, the option's cost there: over torch's own plain
    time, and over the share. ``notes`` say what torch's call rounds.
    """

    kind = "options"
    title = "What each option costs, beside our plain call and torch's best for the same call."
    details = """
  python bench/bench.py options              every row, under a minute; writes bench/results/<card>-options.json
  python bench/bench.py options --flex 60    also torch's flex_attention, which may compile for so many seconds in all
  python bench/bench.py options --only bias mask      these rows (and the plain ones); writes nothing by default

bfloat16, head_dim 128, 16 heads, 16k tokens. A cost is our time over that of our plain call (no mask) in the same
round, over the share of pairs of query and key that the row sees, the median of all rounds: 1 is free. Some costs have
a mark. Every result is held to float64 on some rows first, and torch's to ours."""
    peers = (*BACK_ENDS, "flex")
    rows = OPTIONS

    def __init__(self) -> None:
        self._flex: Flex | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Time for a compiler."""
        parser.add_argument("--flex", type=float, default=0.0, metavar="SECONDS", help="for flex_attention to compile")

    def select(self, arguments: argparse.Namespace) -> list[Option]:
        """The rows that are asked for, and the plain ones of their lengths, which costs are measured by."""
        wanted = super().select(arguments)
        lengths = {option.seqlen for option in wanted}
        return [option for option in OPTIONS if option in wanted or (option.plain and option.seqlen in lengths)]

    def plan(self, row: Option, device: Device) -> Plan:
        """The plan of the call."""
        return plan_of(row.case, device, **row.given(Arrays()))

    def describe(self, row: Option) -> dict[str, Any]:
        """Names, sizes, share and mark."""
        window = row.given(Arrays()).get("window")
        return {
            "name": row.name,
            "title": row.title,
            "plain": row.plain,
            **row.case.fields,
            "share": round(visible_share(row.case, window), 6),
            "mark": None if row.mark is None else round(row.mark, 4),
        }

    def begin(self, rows: list[Option], session: Session) -> None:
        """Set flex_attention's time, if it is to be there."""
        self._flex = Flex(session.arguments.flex) if session.arguments.flex else None

    def calls(self, row: Option, found: dict[str, Any], session: Session) -> tuple[Calls, Calls]:
        """Our call and our plain one; torch's, and its plain flash back end."""
        q, k, v, out = session.inputs.qkv_out(row.case)
        given = row.given(Arrays(session.inputs.xp))
        ours: Calls = {
            "ours": lambda: flash_attention(q, k, v, causal=row.causal, out=out, **given),
            "plain": lambda: flash_attention(q, k, v, out=out),
        }
        _, lse = flash_attention(q, k, v, causal=row.causal, out=out, return_lse=True, **given)
        check(out, lse, q, k, v, row.causal, given)
        found["notes"] = notes = {}

        def accept(peer: str, theirs: Any) -> None:
            difference = peers.relative_difference(theirs, out)
            # Other random numbers drop other probabilities.
            allowed = np.inf if "dropout_p" in given else _ROUNDED_DIFFERENCE if peer in notes else _DIFFERENCE
            if not difference < allowed:
                notes.pop(peer, None)
                raise peers.Unavailable(f"its output differs from ours by {difference:.2g} of the norm")

        makers: dict[str, Callable[[], Callable[[], Any]]] = {
            peer: partial(_in_torch, peer, row.case, (q, k, v), given, notes) for peer in BACK_ENDS
        }
        if self._flex is not None:
            makers["flex"] = lambda: self._flex.prepare(row.case, *_tensors(q, k, v), given)
        theirs = session.offer(found, makers, accept)
        plain = {"yardstick": lambda: sdpa("flash2", *_tensors(q, k, v))}
        theirs |= session.offer(found, plain, lambda *_: None)
        return ours, theirs

    def summarise(self, row: Option, found: dict[str, Any], times: dict[str, list[float]], session: Session) -> None:
        """Costs, and torch's times beside ours."""
        ours, plain = times["ours"], times["plain"]
        costs = ratio(ours, plain) / found["share"]
        found["ms"], found["plain_ms"] = round(median(ours), 5), round(median(plain), 5)
        found["cost"], found["spread"], found["rounds"] = round(median(costs), 4), spread(costs), len(ours)
        if "yardstick" in times:
            found["yardstick"] = round(median(ratio(times["yardstick"], ours)), 4)
        found["torch"] = {
            peer: {
                "ms": round(median(times[peer]), 5),
                "ratio": round(median(ratio(times[peer], ours)), 4),
                "over_plain": round(median(ratio(times[peer], plain)), 4),
            }
            for peer in self.peers
            if peer in times
        }

    def finish(self, rows: list[dict[str, Any]]) -> None:
        """Add to torch's times what the option costs there."""
        plain = {row["seqlen"]: row.get("torch", {}) for row in rows if row["plain"]}
        for row in rows:
            for peer, found in row.get("torch", {}).items():
                own = plain.get(row["seqlen"], {}).get(peer)
                if own is not None:
                    found["own"] = round(found["over_plain"] / own["over_plain"] / row["share"], 4)

    def marks(self, found: dict[str, Any]) -> list[Mark]:
        """Of the cost, if there is one."""
        return [] if found["mark"] is None else [Mark("cost", found.get("cost"), found["mark"], False)]

    def compared(self, before: dict[str, Any], now: dict[str, Any], peer: str) -> tuple[float | None, float | None]:
        """By torch's plain flash back end or, where a file lacks that, by our own plain call."""
        if "yardstick" in before and ("yardstick" in now or "cost" not in now):
            return before["yardstick"], now.get("yardstick")
        over_plain = [1 / row["cost"] if "cost" in row else None for row in (before, now)]
        return over_plain[0], over_plain[1]

    def cells(self, found: dict[str, Any]) -> dict[str, str]:
        """A row's columns as text."""
        best = best_of_torch(found)
        theirs = found["torch"][best] if best else {}
        spills = found.get("spill_bytes", 0)
        notes = [f"{spills} bytes of spills"] if spills > 0 else []
        notes += [found["notes"][best]] if best in found["notes"] else []
        return {
            "option": found["title"],
            "seqlen": f"{found['seqlen']:,}",
            "ms": f"{found['ms']:.3f}",
            "cost": f"{found['cost']:.3f}",
            "mark": "" if found["mark"] is None else f"{found['mark']:.2f}",
            "verdict": "".join("met" if mark.met else "MISSED" for mark in self.marks(found)),
            "torch": best or "none",
            "its ms": f"{theirs['ms']:.3f}" if theirs else "",
            "its cost": f"{theirs['own']:.2f}" if "own" in theirs else "",
            "over ours": f"{theirs['ratio']:.2f}" if theirs else "",
            "notes": "; ".join(notes),
        }

    def readme(self, result: dict[str, Any], picture: str | None) -> str:
        """The table of costs; nothing, if no row was measured."""
        rows = [row for row in result["rows"] if "cost" in row and not row["plain"]]
        if not rows:
            return ""
        first = rows[0]
        words = {"f16": "float16", "bf16": "bfloat16"}
        names = ["option", "seqlen", "pairs seen", "ms", "cost", "mark", "torch's best", "its cost", "vs torch"]
        lines = [
            "What options cost: our time over that of our plain call in the same rounds, over the share of pairs of "
            f"query and key that are seen. {words[first['dtype']]}, {first['num_heads']} heads x {first['head_dim']}, "
            f"16k tokens, on one {result['card']} ({result['date']}, commit `{result['commit']}`):",
            "",
            *markdown(names, [self._readme_cells(row) for row in rows]),
            "",
            "Its cost: of torch's fastest fused back end for the same call, over its own plain time. vs torch: above "
            "1x we are faster. `python bench/bench.py options` measures.",
        ]
        return "\n".join(lines)

    def _readme_cells(self, row: dict[str, Any]) -> list[str]:
        best = best_of_torch(row)
        found = row["torch"][best] if best else {}
        missed = any(not mark.met for mark in self.marks(row))
        return [
            row["title"],
            f"{row['seqlen']:,}",
            f"{row['share']:.0%}",
            f"{row['ms']:.2f}",
            f"{row['cost']:.2f}x",
            "" if row["mark"] is None else f"{row['mark']:.2f}x" + (" (missed)" if missed else ""),
            peers.TITLES[best] + (f", {row['notes'][best]}" if best in row["notes"] else "") if best else "none",
            f"{found['own']:.2f}x" if "own" in found else "",
            f"{found['ratio']:.2f}x" if found else "",
        ]


def best_of_torch(row: dict[str, Any]) -> str | None:
    """The fastest of torch's back ends that ran."""
    found = row.get("torch", {})
    return min(found, key=lambda peer: found[peer]["ms"]) if found else None


def check(out: Any, lse: Any, q: Any, k: Any, v: Any, causal: bool, given: dict[str, Any]) -> None:
    """Hold some rows to float64."""
    batch, seqlen, heads = q.shape[:3]
    places = ((0, 0, 0), (0, heads - 1, seqlen // 3), (batch - 1, heads // 2, seqlen // 2))
    places += ((batch - 1, heads - 1, seqlen - _CHECKED),)
    # Neighbours, so that little of a bias has to come to the host.
    rows = [(b, h, i + n) for b, h, i in places for n in range(_CHECKED)]
    assert_attention_close(out, lse, *(on_host(x) for x in (q, k, v)), rows=rows, causal=causal, **given)


def _tensors(*arrays: Any) -> list[Any]:
    peers.torch_module()
    return [peers.tensor(x) for x in arrays]


def _in_torch(
    peer: str, case: Case, arrays: tuple[Any, Any, Any], given: dict[str, Any], notes: dict[str, str]
) -> Callable[[], Any]:
    """The same call for one of torch's back ends; what it rounds is added to `notes`."""
    tensors, options, note = as_sdpa(case, *_tensors(*arrays), given)
    if peer == "flash2" and "attn_mask" in options:
        raise peers.Unavailable("takes no mask and no bias")
    if note:
        notes[peer] = note
    return sdpa(peer, *tensors, **options)
