"""What each option costs on this card, beside our plain call and torch's best for the same call, in one run.

    python bench/options.py                  every row, under a minute; writes bench/results/<card>-options.json
    python bench/options.py --flex 60        also torch's flex_attention, which may compile for so many seconds in all
    python bench/options.py --only bias mask prints these rows (and the plain ones), writes nothing by default
    python bench/options.py --list           the rows and their kernels; needs no GPU

bfloat16, head_dim 128, 16 heads, 16k tokens. A cost is our time over that of our plain call (no mask) in the same
round, over the share of pairs of query and key that the row sees, the median of all rounds: 1 is free. Some costs have
a mark that they are to stay below. Every result is held to float64 on some rows first, and torch's to ours.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peers
from cases import Case
from numpy.lib.stride_tricks import as_strided
from timing import (
    DTYPES,
    Inputs,
    compile_all,
    describe_machine,
    first_line,
    interleaved,
    need_gpu,
    plan_of,
    spread,
    stored_path,
    write_result,
)

from cupy_fa2 import flash_attention
from cupy_fa2.device import cuda_device, named_device
from cupy_fa2.testing import assert_attention_close

__all__ = ["KIND", "OPTIONS", "PIECES", "SCHEMA", "Arrays", "Option", "as_flex", "as_sdpa", "main", "table", "verdict"]

#: Version of a result file's layout, and what tells it from one of bench.py. 1: see `measure` for the fields of a row.
SCHEMA = 1
KIND = "options"

DTYPE, HEAD_DIM = "bf16", 128
WINDOW = (1024, 0)
SOFTCAP = 30.0
DROPOUT = 0.1
SEED = 20_261_130

_PERIOD = (1 << 20) + 7  # of random numbers; odd, so that no two rows of a bias are alike
_CHECKED = 4  # rows in each of four places
_DIFFERENCE = 0.02  # relative, of torch's results from ours; bfloat16 probabilities give some 0.005
_ROUNDED_DIFFERENCE = 0.1  # where torch's call rounds more
_BACK_ENDS = ("flash2", "cudnn", "efficient", "flex")


class Arrays:
    """Makes the arrays that options take.

    Parameters
    ----------
    xp : module, optional
        `cupy` or `numpy`; None: arrays with a shape and nothing in it, to plan with.
    """

    def __init__(self, xp: Any = None) -> None:
        self.xp = xp

    def normal(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """N(0, 1)."""
        values = np.random.default_rng(1).standard_normal(_PERIOD, np.float32).astype(dtype)
        return self._repeated(values, shape)

    def visible(self, shape: tuple[int, ...]) -> Any:
        """A mask that hides one key in eight."""
        return self._repeated(np.random.default_rng(2).integers(0, 8, _PERIOD) > 0, shape)

    def small(self, values: Any, dtype: Any) -> Any:
        """These values."""
        values = np.asarray(values, dtype)
        return values if self.xp is None else self.xp.asarray(values)

    def _repeated(self, values: Any, shape: tuple[int, ...]) -> Any:
        if self.xp is None:
            packed = np.cumprod((values.itemsize, *shape[:0:-1]), dtype=np.int64)[::-1]
            return as_strided(values[:1], shape, tuple(map(int, packed)), writeable=False)
        # Bits travel as integers: some CuPy operations do not know bfloat16.
        bits = self.xp.asarray(values.view(f"u{values.itemsize}"))
        size = int(np.prod(shape))
        return self.xp.tile(bits, -(-size // bits.size))[:size].view(values.dtype).reshape(shape)


def _scores(case: Case) -> tuple[int, int, int, int]:
    return case.batch, case.num_heads, case.seqlen, case.seqlen


def _slopes(case: Case) -> Any:
    return 2.0 ** (-8 * np.arange(1, case.num_heads + 1) / case.num_heads)


#: What rows are made of, and kernels that `tune.py` tunes: name -> the options that a call gets, of (arrays, case).
PIECES: dict[str, Callable[[Arrays, Case], dict[str, Any]]] = {
    "window": lambda arrays, case: {"window": WINDOW},
    "window_all": lambda arrays, case: {"window": (case.seqlen, case.seqlen)},
    "softcap": lambda arrays, case: {"softcap": SOFTCAP},
    "alibi": lambda arrays, case: {"alibi_slopes": arrays.small(_slopes(case), np.float32)},
    "bias": lambda arrays, case: {"bias": arrays.normal((1, *_scores(case)[1:]), DTYPES[case.dtype])},
    "bias32": lambda arrays, case: {"bias": arrays.normal((1, *_scores(case)[1:]), np.float32)},
    "mask_keys": lambda arrays, case: {"mask": arrays.visible((case.batch, 1, 1, case.seqlen))},
    "mask": lambda arrays, case: {"mask": arrays.visible((1, *_scores(case)[1:]))},
    "sinks": lambda arrays, case: {"sinks": arrays.small(np.arange(case.num_heads) % 8 / 2, np.float32)},
    "padded": lambda arrays, case: {"seqlens_k": arrays.small([case.seqlen] * case.batch, np.int32)},
    "dropout": lambda arrays, case: {"dropout_p": DROPOUT, "dropout_seed": SEED},
}


@dataclass(frozen=True)
class Option:
    """One row.

    Attributes
    ----------
    name, title : str
    pieces : tuple of str
        Of `PIECES`.
    mark : float, optional
        What the cost is to stay below.
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

    def given(self, arrays: Arrays, case: Case | None = None) -> dict[str, Any]:
        """The options of the call beside `causal`, for the row's own sizes or another case's."""
        made: dict[str, Any] = {}
        for piece in self.pieces:
            made |= PIECES[piece](arrays, case or self.case)
        return made


OPTIONS = [
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
    Option("dropout", f"dropout {DROPOUT}", ("dropout",), 1.30),
    Option(
        "everything",
        "everything together",
        ("window_all", "softcap", "alibi", "bias", "mask", "sinks", "padded", "dropout"),
    ),
    Option("plain16k", "plain", seqlen=16_384),
    Option("window", f"window ({WINDOW[0]:,}, {WINDOW[1]})", ("window",), 1.25, seqlen=16_384),
]


def visible_share(case: Case, window: tuple[int, int] | None = None) -> float:
    """Pairs of query and key that are seen, of all; a causal mask's count as half, as FLOPs are counted."""
    if window is None:
        return 0.5 if case.causal else 1.0
    row = np.arange(case.seqlen)
    last = np.minimum(row + (0 if case.causal else window[1]), case.seqlen - 1)
    first = np.maximum(row - window[0], 0)
    return float((last - first + 1).sum() / case.seqlen**2)


# --- torch ------------------------------------------------------------------------------------------------------


def as_sdpa(
    case: Case, q: Any, k: Any, v: Any, given: dict[str, Any]
) -> tuple[tuple[Any, Any, Any], dict[str, Any], str]:
    """The same call for torch's `scaled_dot_product_attention`: (q, k, v), its options, and in words what it rounds.

    Tensors are (batch, seqlen, heads, head_dim), as here.

    Raises
    ------
    peers.Unavailable
        If it has no such call.
    """
    import torch

    adds = [name for name in ("window", "alibi_slopes", "bias", "mask", "sinks", "seqlens_k") if name in given]
    if "softcap" in given:
        raise peers.Unavailable("no softcap in torch's fused back ends")
    if len(adds) + case.causal > 1:
        raise peers.Unavailable("torch's fused back ends take one mask or bias")
    options: dict[str, Any] = {"is_causal": case.causal}
    if "dropout_p" in given:
        options["dropout_p"] = given["dropout_p"]
    note = ""
    rows, keys = (torch.arange(case.seqlen, device=q.device).reshape(shape) for shape in ((-1, 1), (1, -1)))
    if "window" in given:
        left, right = given["window"]
        options["attn_mask"] = (rows - keys <= left) & (keys - rows <= right)
    elif "alibi_slopes" in given:
        slopes = peers.tensor(given["alibi_slopes"])
        bias = torch.empty((1, case.num_heads, case.seqlen, case.seqlen), dtype=q.dtype, device=q.device)
        for head in range(case.num_heads):  # float32 of one head at a time
            bias[0, head] = (rows - keys).abs() * -slopes[head]
        options["attn_mask"], note = bias, f"as a bias that is rounded to {str(q.dtype).removeprefix('torch.')}"
    elif "bias" in given or "mask" in given:
        options["attn_mask"] = peers.tensor(given.get("bias", given.get("mask")))
    elif "seqlens_k" in given:
        lengths = peers.tensor(given["seqlens_k"])
        options["attn_mask"] = (keys < lengths.reshape(-1, 1)).reshape(case.batch, 1, 1, case.seqlen)
    elif "sinks" in given:
        # A key more, whose value is 0; eight, for the back ends want them so.
        sinks = peers.tensor(given["sinks"])
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 8)) for x in (k, v))
        bias = torch.zeros((1, case.num_heads, 1, case.seqlen + 8), dtype=q.dtype, device=q.device)
        bias[..., case.seqlen :] = -torch.inf
        bias[0, :, 0, case.seqlen] = sinks.to(q.dtype)
        options["attn_mask"] = bias
    return (q, k, v), options, note


def as_flex(
    case: Case, q: Any, k: Any, v: Any, given: dict[str, Any], compiled: Callable[..., Any]
) -> Callable[[], Any]:
    """The same call for torch's `flex_attention`, which is `compiled`.

    Raises
    ------
    peers.Unavailable
        If it has an option that is not written down here.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    unknown = given.keys() - {"window", "softcap", "alibi_slopes"}
    if unknown or not (given or case.causal):
        raise peers.Unavailable("not asked of flex_attention")
    slopes = peers.tensor(given["alibi_slopes"]) if "alibi_slopes" in given else None
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

    def prepare(self, case: Case, q: Any, k: Any, v: Any, given: dict[str, Any]) -> tuple[Callable[[], Any], Any]:
        """A call that has been compiled, and its result.

        Raises
        ------
        peers.Unavailable
        """
        if self.left <= 0:
            raise peers.Unavailable("no time is left to compile it (--flex)")
        begin = time.perf_counter()
        try:
            with time_limit(self.left):
                torch = peers.torch_module()
                if self._compiled is None:
                    from torch.nn.attention.flex_attention import flex_attention

                    self._compiled = torch.compile(flex_attention, dynamic=False)
                call = as_flex(case, q, k, v, given, self._compiled)
                result = call()
                torch.cuda.synchronize()
                return call, result
        finally:
            self.left -= time.perf_counter() - begin


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer; in the main thread, where there are signals."""

    def expired(*_: Any) -> None:
        raise TimeoutError(f"took more than the {seconds:.0f} s that were left")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)  # and again: a compiler may have caught the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def torch_calls(
    option: Option, arrays: tuple[Any, Any, Any], out: Any, given: dict[str, Any], wanted: list[str], flex: Flex | None
) -> tuple[dict[str, Callable[[], Any]], dict[str, str], dict[str, str]]:
    """By back end: calls that run and give our result; what they round; why there is none."""
    calls: dict[str, Callable[[], Any]] = {}
    notes: dict[str, str] = {}
    messages: dict[str, str] = {}
    try:
        peers.torch_module()
    except peers.Unavailable as error:
        return calls, notes, {"torch": str(error)}
    q, k, v = (peers.tensor(x) for x in arrays)
    for peer in wanted:
        try:
            note = ""
            if peer == "flex":
                if flex is None:
                    continue
                call, theirs = flex.prepare(option.case, q, k, v, given)
            else:
                tensors, options, note = as_sdpa(option.case, q, k, v, given)
                if peer == "flash2" and "attn_mask" in options:
                    raise peers.Unavailable("takes no mask and no bias")
                call = peers.sdpa(peer, *tensors, **options)
                theirs = call()  # chooses an algorithm, or fails
            difference = peers.relative_difference(theirs, out)
            del theirs
            # Other random numbers drop other probabilities.
            allowed = np.inf if "dropout_p" in given else _ROUNDED_DIFFERENCE if note else _DIFFERENCE
            if not difference < allowed:
                raise peers.Unavailable(f"its output differs from ours by {difference:.2g} of the norm")
            calls[peer] = call
            if note:
                notes[peer] = note
        except peers.Unavailable as error:
            messages[peer] = str(error)
        except Exception as error:
            messages[peer] = first_line(error)
    return calls, notes, messages


# --- measuring --------------------------------------------------------------------------------------------------


def check(out: Any, lse: Any, q: Any, k: Any, v: Any, causal: bool, given: dict[str, Any]) -> None:
    """Hold some rows to float64."""
    batch, seqlen, heads = q.shape[:3]
    places = ((0, 0, 0), (0, heads - 1, seqlen // 3), (batch - 1, heads // 2, seqlen // 2))
    places += ((batch - 1, heads - 1, seqlen - _CHECKED),)
    # Neighbours, so that little of a bias has to come to the host.
    rows = [(b, h, i + n) for b, h, i in places for n in range(_CHECKED)]
    assert_attention_close(out, lse, *(_on_host(x) for x in (q, k, v)), rows=rows, causal=causal, **given)


def _on_host(x: Any) -> Any:
    return x.view(np.uint16).get().view(x.dtype) if hasattr(x, "get") else x


def measure(
    row: dict[str, Any],
    option: Option,
    arrays: tuple[Any, Any, Any, Any],
    given: dict[str, Any],
    wanted: list[str],
    seconds: float,
    flex: Flex | None = None,
) -> None:
    """Fill in a row.

    ``ms`` of our call, ``plain_ms`` of our plain one in the same rounds, ``spread`` the middle half of the costs over
    their median; ``cost`` is their ratio over ``share``, and to stay below ``mark``. ``yardstick`` is the time of
    torch's plain flash back end over ours. Of each of torch's back ends in ``torch`` the same call's ``ms``, its
    ``ratio`` to ours and ``over_plain``, to our plain call; `finish` adds ``own``, its cost. ``notes`` say what it
    rounds, ``messages`` why there is none.
    """
    q, k, v, out = arrays
    causal = option.causal
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: flash_attention(q, k, v, causal=causal, out=out, **given),
        "plain": lambda: flash_attention(q, k, v, out=out),
    }
    _, lse = flash_attention(q, k, v, causal=causal, out=out, return_lse=True, **given)
    check(out, lse, q, k, v, causal, given)
    theirs, row["notes"], row["messages"] = torch_calls(option, (q, k, v), out, given, wanted, flex)
    calls |= theirs
    if "torch" not in row["messages"]:
        try:
            calls["yardstick"] = peers.sdpa("flash2", *(peers.tensor(x) for x in (q, k, v)))
            calls["yardstick"]()
        except Exception as error:
            calls.pop("yardstick", None)
            row["messages"]["yardstick"] = first_line(error)
    try:
        times = interleaved(calls, seconds=seconds, min_rounds=5)
    except Exception as error:
        if calls.keys() == {"ours", "plain"}:
            raise
        row["messages"]["torch"] = first_line(error)  # it ran once, and not again
        times = interleaved({name: calls[name] for name in ("ours", "plain")}, seconds=seconds, min_rounds=5)
    summarise(row, times)


def summarise(row: dict[str, Any], times: dict[str, list[float]]) -> None:
    """The fields of a row that follow from its times; ``share`` is there already."""
    ours, plain = np.array(times["ours"]), np.array(times["plain"])
    costs = ours / plain / row["share"]
    row["ms"], row["plain_ms"] = (round(float(np.median(x)), 5) for x in (ours, plain))
    row["cost"], row["spread"], row["rounds"] = round(float(np.median(costs)), 4), spread(costs), len(ours)
    if "yardstick" in times:
        row["yardstick"] = round(float(np.median(times["yardstick"] / ours)), 4)
    row["torch"] = {
        peer: {
            "ms": round(float(np.median(times[peer])), 5),
            "ratio": round(float(np.median(times[peer] / ours)), 4),
            "over_plain": round(float(np.median(times[peer] / plain)), 4),
        }
        for peer in _BACK_ENDS
        if peer in times
    }


def finish(rows: list[dict[str, Any]]) -> None:
    """Add to torch's times what the option costs there: over its own plain time, and over the share."""
    plain = {row["seqlen"]: row.get("torch", {}) for row in rows if row["plain"]}
    for row in rows:
        for peer, found in row.get("torch", {}).items():
            own = plain.get(row["seqlen"], {}).get(peer)
            if own is not None:
                found["own"] = round(found["over_plain"] / own["over_plain"] / row["share"], 4)


def verdict(row: dict[str, Any]) -> str:
    """Whether a row stays below its mark, in a word; nothing, where it has none."""
    if row.get("mark") is None:
        return ""
    return "pass" if row.get("cost", np.inf) <= row["mark"] else "MISS"


def best_of_torch(row: dict[str, Any]) -> str | None:
    """The fastest of torch's back ends that ran."""
    found = row.get("torch", {})
    return min(found, key=lambda peer: found[peer]["ms"]) if found else None


def run(rows: list[Option], options: argparse.Namespace, output: Path | None, started: float) -> dict[str, Any]:
    """Measure all rows and store the result after each, so that an interrupted run leaves what it had."""
    import cupy

    device = cuda_device(0)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": KIND,
        **describe_machine(device, options.commit),
        "versions": peers.versions(),
        "rows": [],
    }
    plans: dict[str, Any] = {}
    for option in rows:
        try:
            plans[option.name] = plan_of(option.case, device, **option.given(Arrays()))
        except Exception as error:
            plans[option.name] = first_line(error)
    binaries = compile_all([plan.spec for plan in plans.values() if not isinstance(plan, str)], device)
    log(f"{len(binaries)} kernels compiled, {time.perf_counter() - started:.1f} s since the start")
    inputs = Inputs(max(option.case.elements for option in rows))
    flex = Flex(options.flex) if options.flex else None
    for done, option in enumerate(rows):
        if options.deadline and time.perf_counter() - started > options.deadline:
            log(f"the deadline has passed: {len(rows) - done} rows are left out")
            break
        row = describe(option, plans[option.name])
        result["rows"].append(row)
        plan = plans[option.name]
        problem = plan if isinstance(plan, str) else binaries[plan.spec]
        if isinstance(problem, str):
            row["error"] = problem
        else:
            row["registers"], row["spill_bytes"] = problem.registers, problem.spill_bytes
            try:
                given = option.given(Arrays(cupy))
                measure(row, option, inputs.arrays(option.case), given, options.peers, options.seconds, flex)
            except Exception as error:
                row["error"] = first_line(error)
            finally:
                given = None
                release_memory(cupy)
        finish(result["rows"])
        log(line(row))
        if output:
            write_result(output, result)
    result["seconds"] = round(time.perf_counter() - started, 1)
    if output:
        write_result(output, result)
        print(f"written: {output}")
    return result


def describe(option: Option, plan: Any) -> dict[str, Any]:
    """The fields of a row that are known before it is measured; `plan` may be why there is none."""
    case = option.case
    return {
        "name": option.name,
        "title": option.title,
        "plain": option.plain,
        **{name: getattr(case, name) for name in ("dtype", "head_dim", "causal", "seqlen", "batch", "num_heads")},
        "share": round(visible_share(case, option.given(Arrays()).get("window")), 6),
        "mark": None if option.mark is None else round(option.mark, 4),
        "kernel": None if isinstance(plan, str) else plan.spec.name,
    }


def release_memory(cupy: Any) -> None:
    """Give back what a row took: a float32 bias alone has 4 GB."""
    with contextlib.suppress(Exception):
        cupy.get_default_memory_pool().free_all_blocks()
        peers.torch_module().cuda.empty_cache()


# --- words ------------------------------------------------------------------------------------------------------


def cells(row: dict[str, Any]) -> dict[str, str]:
    """A row's columns as text."""
    best = best_of_torch(row)
    found = row["torch"][best] if best else {}
    spills = row.get("spill_bytes", 0)
    return {
        "option": row["title"],
        "seqlen": f"{row['seqlen']:,}",
        "ms": f"{row['ms']:.3f}",
        "cost": f"{row['cost']:.3f}",
        "mark": "" if row["mark"] is None else f"{row['mark']:.2f}",
        "": verdict(row),
        "torch": best or "none",
        "its ms": f"{found['ms']:.3f}" if found else "",
        "its cost": f"{found['own']:.2f}" if "own" in found else "",
        "over ours": f"{found['ratio']:.2f}" if found else "",
        "notes": "; ".join(
            ([f"{spills} bytes of spills"] if spills > 0 else [])
            + ([row["notes"][best]] if best in row["notes"] else [])
        ),
    }


def line(row: dict[str, Any]) -> str:
    """A row in words, with its messages."""
    head = f"{row['name']:10} {row['seqlen']:>6}"
    if "error" in row:
        return f"{head}  {row['error']}"
    mark = f" of {row['mark']:.2f}, {verdict(row)}" if row["mark"] is not None else ""
    others = ", ".join(f"{name} {found['ms']:.3f} ms ({found['ratio']:.2f})" for name, found in row["torch"].items())
    notes = "".join(f"; no {name}: {text}" for name, text in row["messages"].items())
    return (
        f"{head}  {row['ms']:8.3f} ms, plain {row['plain_ms']:.3f} ms, cost {row['cost']:.3f}{mark} "
        f"(spread {row['spread']:.3f}, {row['rounds']} rounds)  {others}{notes}"
    )


def table(result: dict[str, Any]) -> str:
    """The rows side by side."""
    lines = [
        f"{result['card']}, driver {result['driver']}, commit {result['commit']}; {DTYPE}, head_dim {HEAD_DIM}, "
        "16k tokens, 16 heads; cost: time over our plain time, over the share of pairs that are seen"
    ]
    measured = [cells(row) for row in result["rows"] if "error" not in row]
    names = list(measured[0]) if measured else []
    widths = {name: max(len(name), *(len(found[name]) for found in measured)) for name in names}
    left = ("option", "", "torch", "notes")

    def joined(texts: dict[str, str]) -> str:
        return "  ".join(
            texts[name].ljust(widths[name]) if name in left else texts[name].rjust(widths[name]) for name in names
        ).rstrip()

    if measured:
        lines.append(joined({name: name for name in names}))
    rest = iter(measured)
    for row in result["rows"]:
        lines.append(f"{row['title']}, {row['seqlen']:,}: {row['error']}" if "error" in row else joined(next(rest)))
    return "\n".join(lines)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 2)[2])
    names = [option.name for option in OPTIONS]
    parser.add_argument("--only", nargs="+", choices=names, help="these rows, and the plain ones of their lengths")
    parser.add_argument("--output", type=Path, help="default: bench/results/<card>-options.json, not with --only")
    parser.add_argument("--peers", nargs="*", choices=_BACK_ENDS, default=[*_BACK_ENDS], help="torch's back ends")
    parser.add_argument("--flex", type=float, default=0.0, metavar="SECONDS", help="for flex_attention to compile")
    parser.add_argument("--seconds", type=float, default=0.4, help="time for the rounds of a row")
    parser.add_argument("--deadline", type=float, default=0.0, help="start no row after so many seconds in all")
    parser.add_argument("--commit", help="what to store as the commit, where this is no git checkout")
    parser.add_argument("--list", action="store_true", help="print the rows and their kernels on --card")
    parser.add_argument("--card", default="H200", help="only for --list")
    options = parser.parse_args()

    started = time.perf_counter()
    wanted = options.only or names
    lengths = {option.seqlen for option in OPTIONS if option.name in wanted}
    rows = [option for option in OPTIONS if option.name in wanted or (option.plain and option.seqlen in lengths)]
    if options.list:
        for option in rows:
            plan = plan_of(option.case, named_device(options.card), **option.given(Arrays()))
            mark = "" if option.mark is None else f", mark {option.mark:.2f}"
            print(f"{option.name:10} {option.title}, {option.seqlen:,}: {plan.spec.name}{mark}")
        return 0
    need_gpu()
    output = options.output or (None if options.only else stored_path(cuda_device(0).name, KIND))
    result = run(rows, options, output, started)
    print(table(result))
    marked = [row for row in result["rows"] if row["mark"] is not None]
    passed = sum(verdict(row) == "pass" for row in marked)
    failed = sum("error" in row for row in result["rows"])
    print(
        f"{passed} of {len(marked)} marks met; {len(result['rows'])} rows, {failed} without a time, "
        f"{time.perf_counter() - started:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
