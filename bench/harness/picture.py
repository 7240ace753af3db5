"""The picture of speeds by sequence length."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from peers import TITLES

__all__ = ["speed_picture"]

_OURS = "#c1272d"
_COLOURS = {"flash2": "#0000a7", "cudnn": "#4d9221", "flash3": "#7b3294", "triton": "#e08214"}
# Lines are drawn in this order, the later over the earlier, ours last.
_ORDER = ("flash2", "triton", "cudnn", "flash3")


def speed_picture(result: dict[str, Any], dtype: str, title: str, peers: Sequence[str]) -> bytes:
    """TFLOP/s over seqlen, one panel per head_dim and mask, as SVG.

    The same result gives the same bytes with one version of matplotlib, which is what
    ``pip install 'cupy-fa2[bench]'`` brings.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.hashsalt": "cupy_fa2", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    rows = [row for row in result["rows"] if row["dtype"] == dtype and row.get("tflops") is not None]
    head_dims = sorted({row["head_dim"] for row in rows})
    ceiling = result["mma_ceiling_tflops"].get(dtype)
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(
            2, len(head_dims), figsize=(3.4 * len(head_dims), 5.6), sharex=True, sharey=True, squeeze=False
        )
        for line, causal in enumerate((False, True)):
            for column, head_dim in enumerate(head_dims):
                mine = [row for row in rows if (row["head_dim"], row["causal"]) == (head_dim, causal)]
                panel = axes[line][column]
                _draw(panel, sorted(mine, key=lambda row: row["seqlen"]), peers, ceiling)
                panel.set_title(f"head_dim {head_dim}, {'causal' if causal else 'no mask'}", fontsize=9)
        for panel in axes[:, 0]:
            panel.set_ylabel("TFLOP/s")
        for panel in axes[-1]:
            panel.set_xlabel("seqlen")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
        figure.suptitle(f"{title}, {dtype}, {result['card']}, {result['date']}", fontsize=10)
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return buffer.getvalue()


def _draw(panel: Any, rows: list[dict[str, Any]], peers: Sequence[str], ceiling: float | None) -> None:
    """One panel: the peers' TFLOP/s are ours over the ratio of times."""
    for name in (name for name in _ORDER if name in peers):
        points = [(row["seqlen"], row["tflops"] / row["ratios"][name]) for row in rows if name in row["ratios"]]
        if points:
            panel.plot(*zip(*points, strict=True), color=_COLOURS[name], label=TITLES[name], lw=1.2)
    points = [(row["seqlen"], row["tflops"]) for row in rows]
    if points:
        panel.plot(*zip(*points, strict=True), color=_OURS, label="cupy_fa2", lw=2, marker="o", ms=3)
    if ceiling:
        panel.axhline(ceiling, color="#555555", lw=0.8, ls="--", label="mma.sync ceiling")
    panel.set_xscale("log", base=2)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    ticks = [row["seqlen"] for row in rows]
    panel.set_xticks(ticks, [str(x) if x < 1024 else f"{x // 1024}k" for x in ticks])
    panel.minorticks_off()
