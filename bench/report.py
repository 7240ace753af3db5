"""Draw the stored result and write README's table from it.

    python bench/report.py                 docs/speed-<card>.svg, and README between its bench markers
    python bench/report.py --check         write nothing; exit 1 where README is out of date

What options cost (bench/options.py) comes below, where results/<card>-options.json is stored beside the result.

The same result gives the same bytes (of the picture: with one version of matplotlib, which is what
``pip install 'cupy-fa2[bench]'`` brings).
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

from options import KIND, best_of_torch, verdict
from timing import RESULTS, ROOT, slug

__all__ = ["BEGIN", "END", "insert", "main", "options_table", "picture", "readme_table"]

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SCHEMA = 1
README_SEQLENS = (2048, 16_384)
_BACK_ENDS = {"flash2": "flash", "cudnn": "cuDNN", "efficient": "efficient", "flex": "flex_attention"}
_PEERS = {"flash2": "FlashAttention-2", "cudnn": "cuDNN", "flash3": "FlashAttention-3", "triton": "Triton"}
_COLOURS = {"ours": "#c1272d", "flash2": "#0000a7", "cudnn": "#4d9221", "flash3": "#7b3294", "triton": "#e08214"}


def peer_tflops(row: dict[str, Any], peer: str) -> float | None:
    """A peer's TFLOP/s: ours over the ratio of times."""
    ratio = row.get("ratios", {}).get(peer)
    return None if ratio is None else row["tflops"] / ratio


def readme_table(result: dict[str, Any], picture_path: str | None = None) -> str:
    """What stands between README's markers."""
    dtypes = sorted({row["dtype"] for row in result["rows"]})
    dtype = "bf16" if "bf16" in dtypes else dtypes[0]
    rows = [
        row
        for row in result["rows"]
        if row["dtype"] == dtype and row["seqlen"] in README_SEQLENS and row.get("tflops") is not None
    ]
    rows.sort(key=lambda row: (row["head_dim"], row["causal"], row["seqlen"]))
    shown = [peer for peer in _PEERS if any(peer in row["ratios"] for row in rows)]
    ceiling = result["mma_ceiling_tflops"].get(dtype)
    words = {"f16": "float16", "bf16": "bfloat16"}
    lines = [
        f"Forward, {words[dtype]}, 16k tokens, hidden size 2,048, on one {result['card']} "
        f"(driver {result['driver']}, {result['date']}, commit `{result['commit']}`), all in one run:",
        "",
        "| head_dim | mask | seqlen | TFLOP/s | of `mma.sync` ceiling | "
        + " | ".join(f"vs {_PEERS[peer]}" for peer in shown)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(shown),
    ]
    for row in rows:
        share = f"{row['ceiling_share']:.0%}" if "ceiling_share" in row else ""
        cells = [
            str(row["head_dim"]),
            "causal" if row["causal"] else "none",
            f"{row['seqlen']:,}",
            f"{row['tflops']:.0f}",
            share,
            *(f"{row['ratios'][peer]:.2f}x" if peer in row["ratios"] else "" for peer in shown),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    by_hand = [
        row
        for row in result["rows"]
        if (row["head_dim"], row["causal"], row["seqlen"]) == (128, False, 8192) and "cupy" in row.get("ratios", {})
    ]
    lines.append("")
    lines.append("Above 1x we are faster. " + (f"The ceiling is {ceiling:.0f} TFLOP/s. " if ceiling else ""))
    if by_hand:
        row = by_hand[0]
        by_hand_ms = row["ratios"]["cupy"] * row["ms"]
        lines[-1] += (
            f"What one writes in CuPy by hand (matmul, softmax, matmul) takes {by_hand_ms:.0f} ms "
            f"where this takes {row['ms']:.1f} ms ({row['batch']} x {row['seqlen']:,} x {row['num_heads']} heads x "
            f"{row['head_dim']}). "
        )
    lines[-1] = lines[-1].rstrip()
    versions = ", ".join(f"{name} {value}" for name, value in sorted(result["versions"].items()) if value)
    lines.append(f"Compared with: {versions}. `python bench/bench.py` measures, `python bench/report.py` writes this.")
    if picture_path:
        lines += ["", f"![TFLOP/s by sequence length]({picture_path})"]
    return "\n".join(lines)


def options_table(result: dict[str, Any]) -> str:
    """What options cost, to stand below the other table; nothing, if no row was measured."""
    rows = [row for row in result["rows"] if "cost" in row and not row["plain"]]
    if not rows:
        return ""
    first = rows[0]
    words = {"f16": "float16", "bf16": "bfloat16"}
    lines = [
        "What options cost: our time over that of our plain call in the same rounds, over the share of pairs of query "
        "and key that are seen. "
        f"{words[first['dtype']]}, {first['num_heads']} heads x {first['head_dim']}, 16k tokens, on one "
        f"{result['card']} ({result['date']}, commit `{result['commit']}`):",
        "",
        "| option | seqlen | pairs seen | ms | cost | mark | torch's best | its cost | vs torch |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        best = best_of_torch(row)
        found = row["torch"][best] if best else {}
        cells = [
            row["title"],
            f"{row['seqlen']:,}",
            f"{row['share']:.0%}",
            f"{row['ms']:.2f}",
            f"{row['cost']:.2f}x",
            "" if row["mark"] is None else f"{row['mark']:.2f}x" + ("" if verdict(row) == "pass" else " (missed)"),
            _BACK_ENDS[best] + (f", {row['notes'][best]}" if best in row["notes"] else "") if best else "none",
            f"{found['own']:.2f}x" if "own" in found else "",
            f"{found['ratio']:.2f}x" if found else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Its cost: of torch's fastest fused back end for the same call, over its own plain time. vs torch: above 1x we "
        "are faster. `python bench/options.py` measures.",
    ]
    return "\n".join(lines)


def picture(result: dict[str, Any]) -> bytes:
    """TFLOP/s over seqlen, one panel per head_dim and mask, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.hashsalt": "cupy_fa2", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    dtypes = sorted({row["dtype"] for row in result["rows"]})
    dtype = "bf16" if "bf16" in dtypes else dtypes[0]
    rows = [row for row in result["rows"] if row["dtype"] == dtype and row.get("tflops") is not None]
    head_dims = sorted({row["head_dim"] for row in rows})
    ceiling = result["mma_ceiling_tflops"].get(dtype)
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(
            2, len(head_dims), figsize=(3.4 * len(head_dims), 5.6), sharex=True, sharey=True, squeeze=False
        )
        for line, causal in enumerate((False, True)):
            for column, head_dim in enumerate(head_dims):
                panel = axes[line][column]
                mine = sorted(
                    (row for row in rows if (row["head_dim"], row["causal"]) == (head_dim, causal)),
                    key=lambda row: row["seqlen"],
                )
                for name in ("flash2", "triton", "cudnn", "flash3"):
                    points = [(row["seqlen"], peer_tflops(row, name)) for row in mine if name in row["ratios"]]
                    if points:
                        panel.plot(*zip(*points, strict=True), color=_COLOURS[name], label=_PEERS[name], lw=1.2)
                points = [(row["seqlen"], row["tflops"]) for row in mine]
                if points:
                    panel.plot(
                        *zip(*points, strict=True), color=_COLOURS["ours"], label="cupy_fa2", lw=2, marker="o", ms=3
                    )
                if ceiling:
                    panel.axhline(ceiling, color="#555555", lw=0.8, ls="--", label="mma.sync ceiling")
                panel.set_xscale("log", base=2)
                panel.set_ylim(bottom=0)
                panel.grid(alpha=0.3)
                panel.set_title(f"head_dim {head_dim}, {'causal' if causal else 'no mask'}", fontsize=9)
                ticks = [row["seqlen"] for row in mine]
                panel.set_xticks(ticks, [str(x) if x < 1024 else f"{x // 1024}k" for x in ticks])
                panel.minorticks_off()
        for panel in axes[:, 0]:
            panel.set_ylabel("TFLOP/s")
        for panel in axes[-1]:
            panel.set_xlabel("seqlen")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
        figure.suptitle(f"Forward, {dtype}, {result['card']}, {result['date']}", fontsize=10)
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return buffer.getvalue()


def insert(readme: str, text: str) -> str:
    """README with `text` between its markers.

    Raises
    ------
    ValueError
        If the markers are not there, once each and in order.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README must contain {BEGIN} and, after it, {END}, once each")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("result", type=Path, nargs="?", help="default: the only card's of bench/results/")
    parser.add_argument("--options", type=Path, help="default: <result>-options.json, if there is one")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--no-picture", action="store_true")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where README is out of date")
    options = parser.parse_args()
    path = options.result
    if path is None:
        stored = sorted(path for path in RESULTS.glob("*.json") if not path.stem.endswith(f"-{KIND}"))
        if len(stored) != 1:
            parser.error(f"name one of {', '.join(map(str, stored)) or 'no stored result'}")
        path = stored[0]
    beside = options.options or path.with_name(f"{path.stem}-{KIND}.json")
    read = {file: json.loads(file.read_text()) for file in (path, beside) if file == path or file.exists()}
    for file, kind in ((path, None), (beside, KIND)):
        if file in read and (read[file].get("schema"), read[file].get("kind")) != (SCHEMA, kind):
            parser.error(f"{file} is not a {kind or 'bench'} result of schema {SCHEMA}, which this script reads")
    result = read[path]

    drawing = options.docs / f"speed-{slug(result['card'])}.svg"
    files: dict[Path, bytes] = {}
    if not options.no_picture and not options.check:
        try:
            files[drawing] = picture(result)
        except ImportError:
            print("no picture: pip install 'cupy-fa2[bench]' for matplotlib", file=sys.stderr)
    try:
        link = drawing.resolve().relative_to(options.readme.resolve().parent).as_posix()
    except ValueError:
        link = drawing.as_posix()
    shown = link if drawing in files or drawing.exists() else None
    text = readme_table(result, shown)
    below = options_table(read[beside]) if beside in read else ""
    text += f"\n\n{below}" if below else ""
    try:
        files[options.readme] = insert(options.readme.read_text(), text).encode()
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        print(text)
        return 1
    stale = [file for file, content in files.items() if not file.exists() or file.read_bytes() != content]
    for file in stale:
        print(f"{'out of date' if options.check else 'written'}: {file}")
        if not options.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(files[file])
    if not stale:
        print("everything is up to date")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
