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
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARKS = {"first use": 1.5, "cached": 50e-3, "warm call": 12e-6}
HEAD_DIMS = (64, 128, 256)
LOADING = "loading the NVRTC library"  # which a cache entry's key needs: counted with whichever kernel comes first
PYTHON = "our Python alone"


def compile_times() -> dict[str, float]:
    """Seconds to build each kernel for sm_90; in a fresh process with an empty cache."""
    from cupy_fa2.compile import build
    from cupy_fa2.device import named_device
    from cupy_fa2.plan import forward_spec

    times = {}
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            spec, _ = forward_spec(head_dim, head_dim, named_device("H200"), causal=causal)
            begin = time.perf_counter()
            build(spec, "sm_90")
            times[spec.name] = time.perf_counter() - begin
    return times


def first_call_times() -> dict[str, float]:
    """Seconds of the first call of each kernel, until its result is there; in a fresh process."""
    import cupy
    import ml_dtypes
    import numpy as np

    from cupy_fa2 import flash_attention
    from cupy_fa2.compile import nvrtc_version

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
    import ml_dtypes
    import numpy as np

    from cupy_fa2 import flash_attention
    from cupy_fa2.call import runtime

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
        return float(np.median(measured))

    def warm() -> None:
        flash_attention(q, k, v, causal=True, out=out)

    def with_lse() -> None:
        flash_attention(q, k, v, causal=True, return_lse=True)

    times = {"with the launch": seconds(warm), "with the launch, allocating out and lse": seconds(with_lse)}
    launch = runtime.CupyKernel.__call__
    try:
        runtime.CupyKernel.__call__ = lambda self, plan, args: None  # type: ignore[method-assign]
        times[PYTHON] = seconds(warm)
    finally:
        runtime.CupyKernel.__call__ = launch  # type: ignore[method-assign]
    return times


def in_fresh_process(task: str, cache: Path) -> dict[str, float]:
    """Run a function of this file in a new interpreter."""
    environment = {**os.environ, "CUPY_FA2_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, "--task", task]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{task} failed:\n{done.stderr.strip()}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def has_gpu() -> bool:
    """Whether CuPy finds a device."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


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
        missed += worst >= MARKS[name]
        if not options.json:
            verdict = "ok" if worst < MARKS[name] else "MISSED"
            print(f"{name}: {human(worst)} (mark {human(MARKS[name])}) {verdict}")
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
