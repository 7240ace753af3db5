"""The machine a script runs on: its GPU, its commit, the programs beside it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cupy_fa2.device import Device

__all__ = [
    "ROOT",
    "commit",
    "describe_machine",
    "environment",
    "find_program",
    "first_line",
    "has_gpu",
    "log",
    "need_gpu",
]

#: The checkout.
ROOT = Path(__file__).resolve().parent.parent.parent


def has_gpu() -> bool:
    """Whether CuPy is there and finds a device."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


def need_gpu() -> Any:
    """The module `cupy`, or an end with a message."""
    try:
        import cupy
    except ImportError:
        raise SystemExit("this needs CuPy: pip install 'cupy-fa2[cuda12]' (or [cuda13])") from None
    if not cupy.cuda.is_available():
        raise SystemExit("this measures a GPU, and CuPy finds none here")
    return cupy


def environment(**more: str) -> dict[str, str]:
    """Variables for a Python that we start: it imports this checkout, installed or not."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def find_program(name: str, given: str | None) -> str | None:
    """Path of a program of the CUDA toolkit: the one that was named, or on PATH, or where toolkits are put."""
    return shutil.which(given or name) or (None if given else shutil.which(f"/usr/local/cuda/bin/{name}"))


def first_line(error: BaseException) -> str:
    """An exception as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def log(text: str) -> None:
    """To standard error, at once, so that the table on standard output comes last."""
    print(text, file=sys.stderr, flush=True)


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
