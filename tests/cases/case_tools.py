"""What the tests of cases share."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import cupy_fa2
from cupy_fa2.testing import DTYPES, host


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


def weights(fa, seqlen_q, seqlen_k, *, batch=1, num_heads=1, num_heads_k=None, head_dim=64, dtype="float16", **options):
    """What each query makes of each key, and lse: all products are 0 and the values one-hot, so that out shows them.

    (batch, num_heads, seqlen_q, seqlen_k) in float64.
    """
    num_heads_k = num_heads_k or num_heads
    q = fa.xp.zeros((batch, seqlen_q, num_heads, head_dim), DTYPES[dtype])
    k = fa.xp.zeros((batch, seqlen_k, num_heads_k, head_dim), DTYPES[dtype])
    shown: list[Any] = []
    lse = None
    for start in range(0, seqlen_k, head_dim):
        v = np.eye(seqlen_k, head_dim, -start, dtype=np.float32).astype(DTYPES[dtype])
        v = np.broadcast_to(v[None, :, None], k.shape)
        out, lse = fa.call(q, k, fa.xp.asarray(np.ascontiguousarray(v)), **options)
        shown.append(host(out).astype(float))
    return np.concatenate(shown, axis=-1)[..., :seqlen_k].transpose(0, 2, 1, 3), host(lse)
