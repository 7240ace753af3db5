"""The host's share: first use of a kernel, a cached one in a fresh process, our Python in a warm call.

    python bench/host.py            three numbers, each against its mark; exit 1 where one is missed

Without a GPU only the first is measured, as the time to compile for sm_90.

1. First use, nothing cached, fresh process: compile, load, launch. Mark: 1.5 s for each kernel.
2. The same with the cache filled. Mark: 50 ms. Imports, the CUDA context and CuPy's own start are not counted.
3. Our own Python in a warm call: `flash_attention(q, k, v, out=out)` without the launch. Mark: 12 us.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from harness.bench import Mark
from harness.launch import without_launches
from harness.machine import environment, has_gpu
from harness.timing import median

from cupy_fa2 import flash_attention
from cupy_fa2.compile import build, nvrtc_version
from cupy_fa2.device import named_device
from cupy_fa2.kernel.base import target
from cupy_fa2.kernel.features import Features
from cupy_fa2.plan import forward_spec
from cupy_fa2.problem import Structure

#: Seconds.
MARKS = {"first use": 1.5, "cached": 50e-3, "warm call": 12e-6}
HEAD_DIMS = (64, 128, 256)
LOADING = "loading the NVRTC library"  # which a cache entry's key needs: counted with whichever kernel comes first
PYTHON = "our Python alone"


def compile_times() -> dict[str, float]:
    """Seconds to build each kernel for sm_90; in a fresh process with an empty cache."""
    device = named_device("H200")
    times = {}
    for head_dim in HEAD_DIMS:
        for band in ("full", "causal"):
            spec, _ = forward_spec(Structure.typical(head_dim, features=Features(band=band)), device)
            begin = time.perf_counter()
            build(spec, target(spec, device))
            times[spec.name] = time.perf_counter() - begin
    return times


def first_call_times() -> dict[str, float]:
    """Seconds of the first call of each kernel, until its result is there; in a fresh process."""
    import cupy

    def synchronize() -> None:
        cupy.cuda.get_current_stream().synchronize()

    begin = time.perf_counter()
    nvrtc_version()
    times = {LOADING: time.perf_counter() - begin}
    for head_dim in HEAD_DIMS:
        x = cupy.asarray(np.ones((1, 256, 2, head_dim), ml_dtypes.bfloat16))
        out = cupy.empty_like(x)
        synchronize()
        for causal in (False, True):
            begin = time.perf_counter()
            flash_attention(x, x, x, causal=causal, out=out)
            synchronize()
            times[f"head_dim {head_dim}{', causal' if causal else ''}"] = time.perf_counter() - begin
    return times


def warm_call_times(calls: int = 2000, batches: int = 25) -> dict[str, float]:
    """Seconds of our Python in a warm call, and of what it is part of; medians of batches."""
    import cupy

    q, k, v = (cupy.asarray(np.ones((2, 256, 4, 128), ml_dtypes.bfloat16)) for _ in range(3))
    out = cupy.empty_like(q)

    def seconds(call: Any) -> float:
        call()
        measured = []
        for _ in range(batches):
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            measured.append((time.perf_counter() - begin) / calls)
            cupy.cuda.get_current_stream().synchronize()
        return median(measured)

    def warm() -> None:
        flash_attention(q, k, v, causal=True, out=out)

    def with_lse() -> None:
        flash_attention(q, k, v, causal=True, return_lse=True)

    times = {"with the launch": seconds(warm), "with the launch, allocating out and lse": seconds(with_lse)}
    with without_launches():
        times[PYTHON] = seconds(warm)
    return times


def in_fresh_process(task: str, cache: Path) -> dict[str, float]:
    """Run a function of this file in a new interpreter."""
    command = [sys.executable, __file__, "--task", task]
    variables = environment(CUPY_FA2_CACHE_DIR=str(cache))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{task} failed:\n{done.stderr.strip()}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--task", choices=("compile", "call", "warm"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.task:
        tasks = {"compile": compile_times, "call": first_call_times, "warm": warm_call_times}
        print(json.dumps(tasks[options.task]()))
        return 0

    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="cupy_fa2_bench_") as folder:
        cache = Path(folder)
        try:
            if has_gpu():
                results["first use"] = in_fresh_process("call", cache)
                results["cached"] = in_fresh_process("call", cache)
                results["warm call"] = in_fresh_process("warm", cache)
            else:
                results["first use"] = in_fresh_process("compile", cache)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    missed = 0
    for name, times in results.items():
        if name == "warm call":
            worst = times[PYTHON]
        else:
            worst = times.get(LOADING, 0.0) + max(value for what, value in times.items() if what != LOADING)
        met = Mark(name, worst, MARKS[name], at_least=False).met
        missed += not met
        if not options.json:
            print(f"{name}: {human(worst)} (mark {human(MARKS[name])}) {'ok' if met else 'MISSED'}")
            for what, value in times.items():
                print(f"  {what}: {human(value)}")
    if options.json:
        print(json.dumps(results, indent=1))
    elif len(results) == 1:
        print("no GPU here: the time of first use is that of compiling for sm_90; the rest needs one")
    return 1 if missed else 0


def human(seconds: float) -> str:
    """Seconds in a readable unit."""
    if seconds >= 0.5:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 0.5e-3 else f"{seconds * 1e6:.1f} us"


if __name__ == "__main__":
    sys.exit(main())
