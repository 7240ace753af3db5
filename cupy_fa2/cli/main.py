"""``python -m cupy_fa2``: attention on this machine, checked and measured, in one command.

With a GPU: a real size, checked against float64 on sampled rows, timed, and compared with the card's ``mma.sync``
ceiling and with what a CuPy user writes by hand. Without one: a small example in the simulator, checked whole, and what
its launch did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import cupy_fa2
from cupy_fa2.cli.demo import Check, Sizes, aligned, check_result, draw, run_on_gpu
from cupy_fa2.compile import CompileError, nvrtc_version
from cupy_fa2.device import NAMED_DEVICES, Device, cuda_device
from cupy_fa2.ptxsim import SimulationError

__all__ = ["main"]

INSTALL = "pip install 'cupy-fa2[cuda12]' (or [cuda13]), or in a checkout: pip install -e '.[cuda12]'"

ON_GPU = Sizes(batch=2, seqlen=8192, heads=16, head_dim=128)
IN_SIMULATOR = Sizes(batch=1, seqlen=256, heads=1, head_dim=128)

SIMULATED_PER_SECOND = 2.5e7  # multiply-adds, roughly, on one core


MAX_SIZE = 2**31 - 1
MAX_BYTES = 2**62  # of one array; NumPy has no words for more


class CannotRun(Exception):
    """Something is missing; the message says what to install."""


class CannotWrite(Exception):
    """Standard output takes no more; no message where its reader has left, as ``head`` does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        0: all is well. 1: a result was wrong. 2: nothing could be run, or not all of it be told.
    """
    try:
        with writing():  # --help and --version
            options = parse(sys.argv[1:] if argv is None else list(argv))
        code: int = options.handler(options)
    except CannotWrite as error:
        if str(error):
            print(f"cannot write the output: {error}", file=sys.stderr)
        return 2
    except (CannotRun, CompileError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return 2
    except SimulationError as error:
        print(f"the simulator found a fault:\n{error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"cannot run: {error or 'out of memory'}; smaller sizes may fit, see --help", file=sys.stderr)
        return 2
    return code


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Flush what is printed inside; raise `CannotWrite` where standard output takes no more."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # what is left in the buffer must not fail again when Python exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CannotWrite("" if isinstance(error, BrokenPipeError) else error.strerror) from error


def tell(text: str) -> None:
    """Print at once: simulating and timing take a while."""
    with writing():
        print(text)


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments to options. Each sub-command brings its `handler`; without a sub-command, it is ``run``."""
    if not argv or argv[0].startswith("-"):
        argv = ["run", *argv]
    parser = argparse.ArgumentParser(prog="python -m cupy_fa2")
    commands = parser.add_subparsers(required=True, metavar="command")
    add_run(commands)
    return parser.parse_args(argv)


def add_run(commands: Any) -> None:
    """The sub-command ``run``."""
    run = commands.add_parser(
        "run",
        prog="python -m cupy_fa2 [run]",
        help="compute attention on this machine, check and measure it (the default)",
        description=__doc__.split("\n\n", 1)[1] if __doc__ else None,
        epilog=f"Defaults on a GPU: {ON_GPU}; in the simulator: {IN_SIMULATOR}. "
        "Exit status: 0 all is well, 1 a result was wrong, 2 nothing could be run, or not all of it be told.",
    )
    run.set_defaults(handler=run_command)
    run.add_argument("--version", action="version", version=f"cupy_fa2 {cupy_fa2.__version__}")
    for name, what in (
        ("batch", "batch size"),
        ("seqlen", "tokens per sequence"),
        ("heads", "query heads"),
        ("heads-k", "heads of keys and values (default: as many as query heads)"),
        ("head-dim", "head dimension, 1 to 256"),
    ):
        run.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    run.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    run.add_argument("--causal", action=argparse.BooleanOptionalAction, help="one of the two only (default: both)")
    run.add_argument("--simulate", action="store_true", help="use the simulator even where there is a GPU")
    run.add_argument(
        "--device",
        choices=NAMED_DEVICES,
        metavar="NAME",
        help=f"GPU to simulate, default A100; implies --simulate. One of: {', '.join(NAMED_DEVICES)}",
    )
    run.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def positive(text: str) -> int:
    """A size on the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def run_command(options: argparse.Namespace) -> int:
    """Decide where to run, run, print."""
    device, why = (None, "Simulating, as asked") if options.simulate or options.device else find_gpu()
    sizes = chosen_sizes(IN_SIMULATOR if device is None else ON_GPU, options)
    causals = (False, True) if options.causal is None else (options.causal,)
    result: dict[str, Any] = {
        "where": "simulator" if device is None else "gpu",
        "device": (options.device or "A100") if device is None else device.name,
        "why": why,
        "versions": versions(),
        "sizes": vars(sizes) | {"dtype": options.dtype},
    }
    say = (lambda *_: None) if options.json else tell
    if device is None:
        say(f"{why}. Running in the simulator, which executes the kernel's PTX, as on an {result['device']}.")
        say(", ".join(f"{name} {version}" for name, version in result["versions"].items()))
        result["runs"] = simulate(sizes, options.dtype, causals, result["device"], say)
    else:
        say(f"{device.name}, sm_{device.arch}, {device.num_sms} multiprocessors")
        say(", ".join(f"{name} {version}" for name, version in result["versions"].items()))
        result |= run_on_gpu(sizes, options.dtype, causals, device, say)
    result["passed"] = all(run["check"]["passed"] for run in result["runs"])
    if options.json:
        tell(json.dumps(result, indent=2))
    else:
        tell("\n" + ("All results are right." if result["passed"] else "WRONG RESULTS: see the checks above."))
    return 0 if result["passed"] else 1


def chosen_sizes(default: Sizes, options: argparse.Namespace) -> Sizes:
    """The sizes asked for, the default where none was."""
    names = ("batch", "seqlen", "heads", "heads_k", "head_dim")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    for name, value in given.items():
        if value > MAX_SIZE:
            raise CannotRun(f"--{name.replace('_', '-')} must be at most {MAX_SIZE}, got {value}")
    sizes = replace(default, **given)
    if sizes.head_dim > 256:
        raise CannotRun(f"--head-dim must be at most 256, got {sizes.head_dim}")
    if sizes.heads % sizes.kv_heads:
        raise CannotRun(f"--heads must be a multiple of --heads-k, got {sizes.heads} and {sizes.kv_heads}")
    size = sizes.batch * sizes.seqlen * sizes.heads * sizes.head_dim * np.dtype(np.float32).itemsize
    if size > MAX_BYTES:
        raise CannotRun(f"--batch, --seqlen and --heads are too large together: {sizes}")
    return sizes


def find_gpu() -> tuple[Device | None, str]:
    """The current CUDA device; or None, and why there is none to use."""
    try:
        import cupy
    except ImportError as error:
        raise CannotRun(
            f"CuPy could not be imported ({error}). It brings the GPU, and NVRTC, whose PTX the simulator runs. "
            f"Install it: {INSTALL}"
        ) from error
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if "InsufficientDriver" in str(error):
            return None, "No GPU can be used: the NVIDIA driver is missing, or too old for this CuPy"
        return None, f"No GPU can be used ({error})"
    if count == 0:
        return None, "No GPU was found"
    try:
        return cuda_device(runtime.getDevice()), ""
    except RuntimeError as error:  # older than sm_80
        return None, str(error).split(". ")[0]


def versions() -> dict[str, str]:
    """What is installed; raises `CompileError` where NVRTC is missing, as nothing would run."""
    nvrtc = nvrtc_version()
    import cupy

    return {
        "cupy_fa2": cupy_fa2.__version__,
        "cupy": cupy.__version__,
        "nvrtc": f"{nvrtc[0]}.{nvrtc[1]}",
        "numpy": np.__version__,
    }


def simulate(sizes: Sizes, dtype: str, causals: Sequence[bool], name: str, say: Any) -> list[dict[str, Any]]:
    """Run in the simulator, check every row, tell what the launches did."""
    say(f"{sizes}, {dtype}")
    q, k, v = draw(sizes, dtype)
    out = aligned(np.empty_like(q))
    work = 2 * q.size * sizes.seqlen
    if work > 4 * SIMULATED_PER_SECOND:
        print(f"{work:.2g} multiply-adds: about {work / SIMULATED_PER_SECOND:.0f} s each", file=sys.stderr)
    runs = []
    for causal in causals:
        begin = time.perf_counter()
        with cupy_fa2.simulator(name) as simulator:
            _, lse = cupy_fa2.flash_attention(q, k, v, causal=causal, out=out, return_lse=True)
        seconds = time.perf_counter() - begin
        check = check_result(out, lse, q, k, v, causal=causal)
        launch = simulator.report.to_dict() | {"kernel_seconds": simulator.seconds, "seconds": seconds}
        runs.append({"causal": causal, "check": check.to_dict(), "launch": launch})
        say_simulated(causal, check, launch, say)
    return runs


def say_simulated(causal: bool, check: Check, launch: dict[str, Any], say: Any) -> None:
    """One simulated call as text."""
    instructions = sum(launch["instructions"].values())
    say(f"\n{'causal' if causal else 'not causal'}")
    say(f"  check    {check}")
    say(f"  launch   {launch['blocks']} blocks, {launch['warps']} warps, {launch['barriers']} barriers")
    say(f"  compute  {launch['mma']:,} mma, {launch['ldmatrix']:,} ldmatrix, {instructions:,} instructions in all")
    for name, kind in (("loads", "load"), ("stores", "store")):
        used, ideal = launch[f"global_{kind}_sectors"], launch[f"global_{kind}_sectors_ideal"]
        moved = launch["bytes_loaded" if kind == "load" else "bytes_stored"]
        say(f"  {name:8} {moved:,} bytes of global memory, {used:,} sectors (ideal {ideal:,})")
    say(f"  shared   {launch['shared_wavefronts']:,} wavefronts, {launch['bank_conflicts']:,} bank conflicts")
    say(f"  time     {launch['seconds']:.2f} s, compiling the kernel and reading its PTX included")
