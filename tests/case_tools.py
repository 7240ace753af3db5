"""What the tests of cases share."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import cupy_fa2


def run_python(code, cache, *, check=True, **environment):
    """Run code in a fresh interpreter with a cache of its own."""
    root = str(Path(cupy_fa2.__file__).resolve().parents[1])
    env = {**os.environ, "CUPY_FA2_CACHE_DIR": str(cache), "PYTHONPATH": root, **environment}
    # Not here: the current folder comes first in the path of `python -c`.
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tempfile.gettempdir(), capture_output=True, text=True, timeout=300
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done
