"""The plain forward, causal or not, beside its peers."""

from __future__ import annotations

import argparse
from typing import Any

import peers
from harness.bench import Bench, Calls, Session
from harness.case import Case
from harness.launch import bare, plan_of
from harness.machine import first_line, log
from harness.picture import speed_picture
from harness.timing import median
from harness.words import markdown
from peers.forward import by_hand, prepare

from cupy_fa2 import flash_attention
from cupy_fa2.cli.ceiling import mma_ceiling
from cupy_fa2.device import Device
from cupy_fa2.plan import Plan

__all__ = ["Forward"]

# Outputs of N(0, 1) inputs are below 5; two kernels that round P and out to bfloat16 differ by less than this.
_LARGEST_DIFFERENCE = 0.07

_QUICK_SEQLENS = (1024, 8192)
_README_SEQLENS = (2048, 16_384)
_README_PEERS = ("flash2", "cudnn", "flash3", "triton")
_WORDS = {"f16": "float16", "bf16": "bfloat16"}


class Forward(Bench):
    """Rows of `Case`.

    Beside the fields of every kind, a row has ``tflops`` of the public call, ``kernel_ms`` of the bare launch,
    ``ceiling_share`` of the `mma.sync` ceiling, and ``difference``, the largest from FlashAttention-2's output.
    """

    kind = "forward"
    title = "The forward beside its peers."
    details = """
  python bench/bench.py                      every row, under three minutes; writes bench/results/<card>-forward.json
  python bench/bench.py --quick              24 rows and fewer peers, under 40 s; writes nothing by default
  python bench/bench.py --output fresh.json  for bench/check.py to compare with what is stored

A ratio is the peer's time over ours in the same round, the median of all rounds: above 1 we are faster."""
    peers = ("flash2", "cudnn", "flash3", "triton", "cupy")
    quick_peers = ("flash2", "cudnn")
    picture_name = "speed"
    # One dtype after the other, since the inputs of only one are kept.
    rows = tuple(
        Case(dtype, head_dim, causal, seqlen)
        for dtype in ("bf16", "f16")
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16_384, 65_536)
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Flags that choose rows by their sizes."""
        parser.add_argument("--dtype", choices=("f16", "bf16"), help="only these rows")
        parser.add_argument("--head-dim", type=int, nargs="+", help="only these rows")
        parser.add_argument("--seqlen", type=int, nargs="+", help="only these rows")
        parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="only these rows")

    def select(self, arguments: argparse.Namespace) -> list[Case]:
        """The rows that are asked for; a third of all with ``--quick``."""
        return [
            case
            for case in super().select(arguments)
            if arguments.dtype in (None, case.dtype)
            and case.head_dim in (arguments.head_dim or [case.head_dim])
            and case.seqlen in (arguments.seqlen or (_QUICK_SEQLENS if arguments.quick else [case.seqlen]))
            and arguments.causal in (None, case.causal)
        ]

    def plan(self, row: Case, device: Device) -> Plan:
        """The plan of the call."""
        return plan_of(row, device)

    def describe(self, row: Case) -> dict[str, Any]:
        """Name and sizes."""
        return {"name": row.name, **row.fields}

    def begin(self, rows: list[Case], session: Session) -> None:
        """Measure the ceiling of each dtype."""
        ceilings = session.result["mma_ceiling_tflops"] = {}
        for dtype in sorted({case.dtype for case in rows}):
            try:
                ceilings[dtype] = round(max(mma_ceiling(dtype).values()), 1)
            except Exception as error:
                log(f"no ceiling: {first_line(error)}")

    def calls(self, row: Case, found: dict[str, Any], session: Session) -> tuple[Calls, Calls]:
        """The public call, the bare launch, and the peers'."""
        q, k, v, out = session.inputs.qkv_out(row)
        _, launch = bare(session.device, {"q": q, "k": k, "v": v, "out": out}, causal=row.causal)
        ours: Calls = {"ours": lambda: flash_attention(q, k, v, causal=row.causal, out=out), "kernel": launch}
        ours["ours"]()

        def accept(peer: str, theirs: Any) -> None:
            difference = peers.largest_difference(theirs, out)
            right = difference < _LARGEST_DIFFERENCE
            if peer == "flash2":
                found["difference"] = round(difference, 5)
                if not right:
                    raise peers.Wrong(f"differs from FlashAttention-2 by {difference:g}")
            if not right:
                raise peers.Unavailable(f"its output differs from ours by {difference:g}")

        timed = [peer for peer in self.peers if peer != "cupy"]  # which takes too long, and is timed by itself
        makers = {peer: lambda peer=peer: prepare(peer, row, q, k, v) for peer in timed}
        return ours, session.offer(found, makers, accept)

    def summarise(self, row: Case, found: dict[str, Any], times: dict[str, list[float]], session: Session) -> None:
        """Ratios and speeds; then the attention that one writes by hand."""
        super().summarise(row, found, times, session)
        found["tflops"] = round(row.flop / found["ms"] / 1e9, 1)
        found["kernel_ms"] = round(median(times["kernel"]), 5)
        if ceiling := session.result["mma_ceiling_tflops"].get(row.dtype):
            found["ceiling_share"] = round(found["tflops"] / ceiling, 4)
        if "cupy" in session.arguments.peers:
            try:
                q, k, v, _ = session.inputs.qkv_out(row)
                found["ratios"]["cupy"] = round(by_hand(row, q, k, v) / found["ms"], 2)
            except peers.Unavailable as error:
                found["messages"]["cupy"] = str(error)
            except Exception as error:
                found["messages"]["cupy"] = first_line(error)

    def cells(self, found: dict[str, Any]) -> dict[str, str]:
        """A row's columns as text."""
        return {
            "row": found["name"],
            "ms": f"{found['ms']:.3f}",
            "kernel ms": f"{found['kernel_ms']:.3f}",
            "TFLOP/s": f"{found['tflops']:.0f}",
            "ceiling": f"{found['ceiling_share']:.3f}" if "ceiling_share" in found else "",
            **{peer: f"{found['ratios'][peer]:.3f}" for peer in self.peers if peer in found["ratios"]},
        }

    def readme(self, result: dict[str, Any], picture: str | None) -> str:
        """The table of speeds."""
        dtype = shown_dtype(result)
        measured = [row for row in result["rows"] if row.get("tflops") is not None]
        rows = [row for row in measured if row["dtype"] == dtype and row["seqlen"] in _README_SEQLENS]
        rows.sort(key=lambda row: (row["head_dim"], row["causal"], row["seqlen"]))
        shown = [peer for peer in _README_PEERS if any(peer in row["ratios"] for row in rows)]
        names = ["head_dim", "mask", "seqlen", "TFLOP/s", "of `mma.sync` ceiling"]
        table = [
            [
                str(row["head_dim"]),
                "causal" if row["causal"] else "none",
                f"{row['seqlen']:,}",
                f"{row['tflops']:.0f}",
                f"{row['ceiling_share']:.0%}" if "ceiling_share" in row else "",
                *(f"{row['ratios'][peer]:.2f}x" if peer in row["ratios"] else "" for peer in shown),
            ]
            for row in rows
        ]
        ceiling = result["mma_ceiling_tflops"].get(dtype)
        versions = ", ".join(f"{name} {value}" for name, value in sorted(result["versions"].items()) if value)
        lines = [
            f"Forward, {_WORDS[dtype]}, 16k tokens, hidden size 2,048, on one {result['card']} "
            f"(driver {result['driver']}, {result['date']}, commit `{result['commit']}`), all in one run:",
            "",
            *markdown([*names, *(f"vs {peers.TITLES[peer]}" for peer in shown)], table),
            "",
            "Above 1x we are faster. "
            + (f"The ceiling is {ceiling:.0f} TFLOP/s. " if ceiling else "")
            + "".join(_by_hand_in_words(row) for row in measured),
            f"Compared with: {versions}. `python bench/bench.py` measures, `python bench/report.py` writes this.",
        ]
        if picture:
            lines += ["", f"![TFLOP/s by sequence length]({picture})"]
        return "\n".join(line.rstrip() for line in lines)

    def picture(self, result: dict[str, Any]) -> bytes:
        """TFLOP/s by sequence length."""
        return speed_picture(result, shown_dtype(result), "Forward", _README_PEERS)


def shown_dtype(result: dict[str, Any]) -> str:
    """The dtype of README's table and picture: bfloat16, where it was measured."""
    dtypes = sorted({row["dtype"] for row in result["rows"]})
    return "bf16" if "bf16" in dtypes else dtypes[0]


def _by_hand_in_words(row: dict[str, Any]) -> str:
    """Of one row, which stands for all."""
    if (row["head_dim"], row["causal"], row["seqlen"]) != (128, False, 8192) or "cupy" not in row["ratios"]:
        return ""
    return (
        f"What one writes in CuPy by hand (matmul, softmax, matmul) takes {row['ratios']['cupy'] * row['ms']:.0f} ms "
        f"where this takes {row['ms']:.1f} ms ({row['batch']} x {row['seqlen']:,} x {row['num_heads']} heads x "
        f"{row['head_dim']}). "
    )
