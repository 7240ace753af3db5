"""What the bench scripts share: arrays, interleaved timing, kernels of a given spec, result files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import functools
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from cases import Case

from cupy_fa2.call.operands import FIELDS
from cupy_fa2.call.runtime import CupyKernel
from cupy_fa2.call.tensormap import arguments, encode_cuda
from cupy_fa2.compile import Binary, build
from cupy_fa2.device import Device
from cupy_fa2.kernel.forward import KernelSpec
from cupy_fa2.plan import Plan, plan_forward
from cupy_fa2.problem import Problem

__all__ = [
    "DTYPES",
    "RESULTS",
    "ROOT",
    "Inputs",
    "bare_call",
    "commit",
    "compile_all",
    "describe_machine",
    "first_line",
    "interleaved",
    "need_gpu",
    "plan_of",
    "slug",
    "spread",
    "stored_path",
    "write_result",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DTYPES: dict[str, Any] = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}

_PERIOD = (1 << 20) + 7  # of the random numbers; odd, so that no two rows of a tile are alike
_MIN_MS = 1.0  # a shorter call is repeated between two events


def need_gpu() -> Any:
    """The module `cupy`, or an end with a message."""
    try:
        import cupy
    except ImportError:
        raise SystemExit("this needs CuPy: pip install 'cupy-fa2[cuda12]' (or [cuda13])") from None
    if not cupy.cuda.is_available():
        raise SystemExit("this measures a GPU, and CuPy finds none here")
    return cupy


class Inputs:
    """Normally distributed q, k and v, and room for out, made once per dtype and shared by all rows.

    Made by NumPy, so that no library beyond CuPy itself is needed.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._flat: dict[str, list[Any]] = {}

    def arrays(self, case: Case) -> tuple[Any, Any, Any, Any]:
        """Arrays q, k, v, out of the case's shape; out is full of NaN."""
        import cupy

        if case.dtype not in self._flat:
            self._flat.clear()  # one dtype at a time
            rng = np.random.default_rng(0)
            base = [rng.standard_normal(_PERIOD, np.float32).astype(DTYPES[case.dtype]) for _ in range(3)]
            # Bits travel as integers: some CuPy operations do not know bfloat16.
            flat = [cupy.asarray(np.resize(x.view(np.uint16), self._elements)) for x in base]
            self._flat[case.dtype] = [*flat, cupy.empty(self._elements, np.uint16)]
        q, k, v, out = (x[: case.elements].view(DTYPES[case.dtype]).reshape(case.shape) for x in self._flat[case.dtype])
        out.view(np.uint16).fill(0x7FFF)  # NaN in both dtypes
        return q, k, v, out


def plan_of(case: Case, device: Device, **given: Any) -> Plan:
    """The plan that a call gets, `given` its other options; needs no GPU."""
    stand_in = np.empty(case.shape, DTYPES[case.dtype])  # never touched, so never really there
    problem = Problem.from_arrays(stand_in, stand_in, stand_in, causal=case.causal, addresses=(0, 0, 0, 0), **given)
    return plan_forward(problem, device)


def compile_all(specs: Iterable[KernelSpec], device: Device) -> dict[KernelSpec, Binary | str]:
    """Build kernels side by side (NVRTC releases the interpreter's lock); a message where one cannot be built."""

    def attempt(spec: KernelSpec) -> Binary | str:
        try:
            return build(spec, device.target)
        except Exception as error:
            return first_line(error)

    specs = list(dict.fromkeys(specs))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(specs, pool.map(attempt, specs), strict=True))


def bare_call(
    spec: KernelSpec | None, device: Device, q: Any, k: Any, v: Any, out: Any, causal: bool, **given: Any
) -> tuple[Plan, CupyKernel, Callable[[], None]]:
    """The launch of one kernel and nothing else: its plan, the loaded kernel, and a call without arguments.

    `spec` replaces the plan's own. `given` are other options; those that are arrays are on the device already, int32
    where they are integers, and a seed is an array.
    """
    pointers = (q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr)
    operands = {name: x.data.ptr for name, x in given.items() if hasattr(x, "data")}
    problem = Problem.from_arrays(
        q, k, v, causal=causal, out=out, addresses=pointers, option_addresses=operands, **given
    )
    plan = plan_forward(problem, device)
    if spec is not None:
        tile = spec.tile
        m_blocks = -(-problem.seqlen_q // tile.block_m)
        plan = replace(
            plan,
            spec=spec,
            num_m_blocks=m_blocks,
            grid=(m_blocks * problem.batch * problem.num_heads, 1, 1),
            block=(tile.threads, 1, 1),
            shared_bytes=spec.shared_bytes,
        )
    kernel = CupyKernel(plan.spec, device, plan.shared_bytes)
    bound = {FIELDS[name]: address for name, address in operands.items()}
    args = arguments(problem, plan, {**dict(zip(("q", "k", "v", "out"), pointers, strict=True)), **bound}, encode_cuda)
    return plan, kernel, lambda: kernel(plan, args)


def interleaved(
    calls: dict[str, Callable[[], Any]], *, seconds: float, min_rounds: int = 5, max_rounds: int = 30
) -> dict[str, list[float]]:
    """Milliseconds of each call, round by round, so that the clocks of a warming card favour none.

    Each round queues every call without waiting in between, in an order that rotates, after one call that is not
    counted: the host's work stays hidden behind the GPU's. Short calls are repeated between their two events.
    """
    import cupy

    def timed(call: Callable[[], Any], inner: int) -> tuple[Any, Any]:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        for _ in range(inner):
            call()
        end.record()
        return begin, end

    names = list(calls)
    estimate = {}
    for name in names:
        calls[name]()
        begin, end = timed(calls[name], 1)
        end.synchronize()
        estimate[name] = max(cupy.cuda.get_elapsed_time(begin, end), 1e-3)
    inner = {name: max(1, round(_MIN_MS / estimate[name])) for name in names}
    per_round = sum(estimate[name] * inner[name] for name in names)
    rounds = min(max(int(seconds * 1e3 / per_round), min_rounds), max_rounds)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        calls[order[-1]]()
        events = {name: timed(calls[name], inner[name]) for name in order}
        cupy.cuda.get_current_stream().synchronize()
        for name, (begin, end) in events.items():
            times[name].append(cupy.cuda.get_elapsed_time(begin, end) / inner[name])
    return times


def spread(values: np.ndarray[Any, Any]) -> float:
    """Width of the middle half of the values, over their median."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return round(float((high - low) / middle), 4)


def first_line(error: BaseException) -> str:
    """An exception as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


@functools.cache
def commit() -> str | None:
    """Commit of the checkout, with ``-dirty`` where sources differ from it; None outside of one."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if git("status", "--porcelain", "--", "cupy_fa2", "cuda_src") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def slug(card: str) -> str:
    """Name of a card's files: ``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def stored_path(card: str, kind: str = "") -> Path:
    """Where the result of a card lies: that of the bench, or of another `kind`."""
    return RESULTS / f"{slug(card)}{f'-{kind}' if kind else ''}.json"


def describe_machine(device: Device, at_commit: str | None = None) -> dict[str, Any]:
    """Card, driver, date, versions and commit of a result."""
    import cupy

    from cupy_fa2.compile import nvrtc_version

    described: dict[str, Any] = {
        "card": device.name,
        "driver": None,
        "power_limit_watts": None,
        "date": datetime.date.today().isoformat(),
        "commit": at_commit or commit(),
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "cupy": cupy.__version__,
    }
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits"]
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        driver, watts = done.stdout.splitlines()[0].split(",")
        described["driver"] = driver.strip()
        described["power_limit_watts"] = float(watts)
    return described


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file, one row a line, whole or not at all."""
    head = {key: value for key, value in result.items() if key != "rows"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n'
    text += ",\n".join("  " + json.dumps(row) for row in result["rows"]) + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
