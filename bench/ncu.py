"""Profile one launch under Nsight Compute: what the warps wait for, what the pipes do, how shared memory fares.

    python bench/ncu.py                                       head_dim 64, 128, 256, no mask, bf16, 2 x 8,192
    python bench/ncu.py --head-dim 128 --causal
    python bench/ncu.py --head-dim 128 --tile '{"block_m": 128, "block_n": 64, "num_warps": 4, "stages": 1}'
    python bench/ncu.py --report profile                      keep profile-<kernel>.ncu-rep for the user interface

Needs ``ncu`` (of a CUDA toolkit) and permission to read the GPU's counters. Clocks are left alone, so that the times
are those of the bench.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from pathlib import Path

from harness.arrays import Inputs
from harness.case import Case
from harness.launch import bare, compile_all
from harness.machine import environment, find_program, need_gpu

from cupy_fa2.device import cuda_device
from cupy_fa2.kernel.features import Features
from cupy_fa2.kernel.forward import FwdSpec, FwdTile

_KERNELS = "regex:^flash_"  # ours, not CuPy's fills

SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables"),
    *("SchedulerStats", "WarpStateStats", "InstructionStats", "LaunchStats", "Occupancy"),
)

#: What is shown: title -> pattern of the counter's name. Names differ between cards; what is missing is left out.
SHOWN: dict[str, str] = {
    "duration": r"gpu__time_duration\.sum",
    "SM clock": r"(smsp|sm|gpc)__cycles_elapsed\.avg\.per_second",
    "registers per thread": r"launch__registers_per_thread",
    "blocks per SM, by registers": r"launch__occupancy_limit_registers",
    "blocks per SM, by shared memory": r"launch__occupancy_limit_shared_mem",
    "warps per SM": r"sm__warps_active\.avg\.per_cycle_active",
    "issue slots used, %": r"(smsp|sm)__(issue_active|inst_issued)\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "issued per cycle and scheduler": r"smsp__issue_active\.avg\.per_cycle_active",
    "eligible warps per scheduler": r"smsp__warps_eligible\.avg\.per_cycle_active",
    "tensor pipe, %": r"sm__(inst_executed_pipe_tensor\w*|pipe_tensor\w*_cycles_active)\.avg\.pct_of_peak_\w+",
    "ALU pipe, %": r"sm__(inst_executed_pipe_alu|pipe_alu_cycles_active)\.avg\.pct_of_peak_sustained_active",
    "FMA pipe, %": r"sm__(inst_executed_pipe_fma\w*|pipe_fma\w*_cycles_active)\.avg\.pct_of_peak_sustained_active",
    "XU pipe (exp), %": r"sm__(inst_executed_pipe_xu|pipe_xu_cycles_active)\.avg\.pct_of_peak_sustained_active",
    "LSU pipe, %": r"sm__inst_executed_pipe_lsu\.avg\.pct_of_peak_sustained_active",
    "shared memory pipe, %": r"l1tex__data_pipe_lsu_wavefronts(_mem_shared)?\.avg\.pct_of_peak_\w+",
    "shared wavefronts": r"l1tex__data_pipe_lsu_wavefronts_mem_shared(_op_\w+|_cmd_\w+)?\.sum",
    "shared bank conflicts": r"l1tex__data_bank_conflicts_pipe_lsu(_mem_shared(_op_\w+|_cmd_\w+)?)?\.sum",
    "L2 hit rate, %": r"lts__t_sector_hit_rate\.pct",
    "DRAM, %": r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "local memory (spills)": r"(smsp|sm)__(sass_)?inst_executed_op_local\w*\.sum",
}
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)(?<!_not_issued)_per_issue_active\.ratio")
#: Counters asked for beyond the sections' own; older and newer cards know all of these.
METRICS = (
    "gpu__time_duration.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
)


def parse(text: str) -> list[dict[str, tuple[float | str, str]]]:
    """Launches of ``ncu --csv --page raw``: counter -> (value, unit)."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    if len(rows) < 3:
        return []
    names, units = rows[0], rows[1]
    launches = []
    for row in rows[2:]:
        launch: dict[str, tuple[float | str, str]] = {}
        for name, unit, value in zip(names, units, row, strict=False):
            try:
                launch[name] = (float(value.replace(",", "")), unit)
            except ValueError:
                launch[name] = (value, unit)
        launches.append(launch)
    return launches


def describe(launch: dict[str, tuple[float | str, str]]) -> str:
    """The chosen counters of a launch, and its stalls, largest first."""
    lines = []
    for title, pattern in SHOWN.items():
        for name, (value, unit) in sorted(launch.items()):
            if isinstance(value, float) and re.fullmatch(pattern, name):
                shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
                lines.append(f"  {title:32} {shown:>16} {unit if unit != '%' else '':10} {name}")
    stalls = sorted(
        ((value, match[1]) for name, (value, _) in launch.items() if (match := _STALL.fullmatch(name)) and value),
        reverse=True,
        key=lambda pair: float(pair[0]),
    )
    total = sum(float(value) for value, _ in stalls)
    if total:
        lines.append("  warp states (cycles of a warp between two of its instructions; selected = issuing):")
        lines += [f"    {name:28} {float(value):6.2f}  {float(value) / total:6.1%}" for value, name in stalls if value]
    return "\n".join(lines)


def child(options: argparse.Namespace) -> int:
    """One launch of the kernel; what ncu watches."""
    cupy = need_gpu()
    (head_dim,) = options.head_dim
    case = Case(options.dtype, head_dim, options.causal, options.seqlen)
    arrays = dict(zip(("q", "k", "v", "out"), Inputs(cupy).qkv_out(case), strict=True))
    spec = None
    if options.tile:
        tile = FwdTile(**{"head_dim": head_dim, "head_dim_v": head_dim, **options.tile})
        features = Features(band="causal" if options.causal else "full")
        spec = FwdSpec(tile, options.dtype, options.dtype, features, min_blocks=options.min_blocks)
    device = cuda_device(0)
    plan, launch = bare(device, arrays, spec, causal=options.causal)
    for _ in range(3):
        launch()
    cupy.cuda.get_current_stream().synchronize()
    for spec, binary in compile_all([launch.spec for launch in plan.kernels], device).items():
        print(f"kernel {spec.name}: {binary.registers} registers, {binary.spill_bytes} B spilled")
    return 0


def profile(ncu: str, head_dim: int, options: argparse.Namespace, metrics: tuple[str, ...] = METRICS) -> int:
    """Run the child under ncu and print what it counted."""
    command = [ncu, "--clock-control", "none", "--kernel-name", _KERNELS, "--launch-skip", "1", "--launch-count", "1"]
    for section in SECTIONS:
        command += ["--section", section]
    command += ["--metrics", ",".join(metrics)] if metrics else []
    command += ["--csv", "--page", "raw", "--print-units", "base"]
    if options.report:
        name = f"{options.report}-d{head_dim}{'-causal' if options.causal else ''}"
        command += ["--export", name, "--force-overwrite"]
    command += [sys.executable, __file__, "--child", "--head-dim", str(head_dim), "--dtype", options.dtype]
    command += ["--seqlen", str(options.seqlen), "--min-blocks", str(options.min_blocks)]
    command += ["--causal" if options.causal else "--no-causal"]
    command += ["--tile", json.dumps(options.tile)] if options.tile else []
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    text = done.stdout
    if options.report and done.returncode == 0:  # with --export the page has to be asked for again
        again = [ncu, "--import", f"{name}.ncu-rep", "--csv", "--page", "raw", "--print-units", "base"]
        text += subprocess.run(again, capture_output=True, text=True, check=False).stdout
    title = re.search(r"^kernel .*$", done.stdout, re.MULTILINE)
    print(title[0] if title else f"head_dim {head_dim}")
    launches = parse(text)
    if metrics and not launches and "metric" in (done.stdout + done.stderr).lower():
        return profile(ncu, head_dim, options, ())  # a card that does not know them: the sections alone
    if options.raw:
        options.raw.write_text(text)
    for launch in launches:
        print(describe(launch))
    if done.returncode or not launches:
        print((done.stdout + done.stderr).strip()[-2000:], file=sys.stderr)
        if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
            print("reading the counters needs a privilege: see https://developer.nvidia.com/ERR_NVGPUCTRPERM")
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--dtype", choices=("f16", "bf16"), default="bf16")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--tile", type=json.loads, help="FwdTile's fields as JSON instead of the plan's; no head dims")
    parser.add_argument("--min-blocks", type=int, default=1, help="with --tile")
    parser.add_argument("--report", help="prefix of a report to keep")
    parser.add_argument("--raw", type=Path, help="file for all counters, as CSV (of the last kernel)")
    parser.add_argument("--ncu", help="path of ncu, where it is not found")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options)
    ncu = find_program("ncu", options.ncu)
    if ncu is None:
        print("ncu was not found; it comes with a CUDA toolkit (--ncu PATH)", file=sys.stderr)
        return 2
    return max(profile(ncu, head_dim, options) for head_dim in options.head_dim)


if __name__ == "__main__":
    sys.exit(main())
