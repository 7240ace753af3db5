"""Cases (see test_cases.py): streams, devices and graphs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from case_tools import run_python
from conftest import gpu_count

import cupy_fa2
from cupy_fa2.testing import host, random_qkv

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("external", [False, True])
def test_runs_on_the_current_stream(cp, external):
    """B009: inputs that are written late on a non-blocking stream are awaited, in each of 200 calls."""
    q, k, v = random_qkv(2, 512, 512, 8, 64, xp=cp)
    expected = [host(x).tobytes() for x in cupy_fa2.flash_attention(q, k, v, return_lse=True)]
    spin = cp.RawKernel(SPIN, "spin")
    stream = cp.cuda.Stream(non_blocking=True)
    used = cp.cuda.Stream.from_external(stream) if external else stream
    for repeat in range(200):
        late = [cp.zeros_like(x) for x in (q, k, v)]
        cp.cuda.Device().synchronize()
        with used:
            spin((1,), (1,), (np.int64(50_000_000 if repeat < 2 else 200_000),))
            for there, x in zip(late, (q, k, v), strict=True):
                cp.copyto(there, x)
            result = [x.copy() for x in cupy_fa2.flash_attention(*late, return_lse=True)]
        used.synchronize()
        assert [host(x).tobytes() for x in result] == expected, f"call {repeat}"


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_device_of_the_arrays(cp):
    """B010: ones on device 1, with either device current."""
    with cp.cuda.Device(1):
        x = cp.ones((4, 16, 32, 64), np.float16)
    for current in (0, 1):
        with cp.cuda.Device(current):
            out, lse = cupy_fa2.flash_attention(x, x, x, softmax_scale=1, return_lse=True)
            assert cp.cuda.runtime.getDevice() == current
        assert out.device.id == lse.device.id == 1
        assert float(host(out).astype(float).sum()) == 131072
        np.testing.assert_allclose(host(lse), 64 + math.log(16), rtol=1e-6)


@pytest.mark.gpu
def test_captured_in_a_graph(cp):
    """B025: warm, the replay computes on what the arrays then hold."""
    q, k, v = random_qkv(2, 2048, 2048, 12, 64, xp=cp)
    out = cp.empty_like(q)
    cupy_fa2.flash_attention(q, k, v, causal=True, out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cupy_fa2.flash_attention(q, k, v, causal=True, out=out)
        graph = stream.end_capture()
    for seed in (1, 2):
        for there, x in zip((q, k, v), random_qkv(2, 2048, 2048, 12, 64, seed=seed, xp=cp), strict=True):
            there[...] = x
        eager = host(cupy_fa2.flash_attention(q, k, v, causal=True)).tobytes()
        out[...] = np.nan
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert host(out).tobytes() == eager


@pytest.mark.gpu
@pytest.mark.parametrize("seed_on_device", [False, True])
def test_captured_with_dropout_and_lengths(cp, seed_on_device):
    """B025: a replay reads lengths, and a seed that is an array, as they then are; an int is part of the graph."""
    q, k, v = random_qkv(2, 2048, 2048, 12, 64, xp=cp)
    out, lengths, seed = cp.empty_like(q), cp.asarray([2048, 1000], cp.int32), cp.asarray(1, cp.uint64)
    captured = {"seqlens_k": lengths, "dropout_p": 0.1, "dropout_seed": seed if seed_on_device else 1}
    cupy_fa2.flash_attention(q, k, v, out=out, **captured)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cupy_fa2.flash_attention(q, k, v, out=out, **captured)
        graph = stream.end_capture()
    results = []
    for number, numbers in [(1, [2048, 1000]), (2**64 - 1, [2048, 1000]), (3, [0, 77])]:
        seed.fill(number)
        lengths[...] = cp.asarray(numbers, cp.int32)
        expected = captured | {"dropout_seed": number if seed_on_device else 1}
        eager = host(cupy_fa2.flash_attention(q, k, v, **expected)).tobytes()
        out.fill(np.nan)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        results.append(host(out).tobytes())
        assert results[-1] == eager
    assert (results[0] == results[1]) is not seed_on_device


COLD_CAPTURE = """
import cupy as cp, numpy as np, cupy_fa2
q = cp.ones((1, 64, 1, 64), np.float16)
out = cp.zeros_like(q)
stream = cp.cuda.Stream(non_blocking=True)
cp.cuda.Device().synchronize()
with stream:
    stream.begin_capture()
    try:
        cupy_fa2.flash_attention(q, q, q, out=out)
        error = None
    except Exception as caught:
        error = str(caught)
    graph = stream.end_capture()
if error is None:
    graph.launch(stream)
    stream.synchronize()
    assert bool((out == 1).all()), "the graph did nothing"
else:
    assert "captur" in error.lower(), error
cupy_fa2.flash_attention(q, q, q, out=out)
assert bool((out == 1).all())
"""


@pytest.mark.gpu
def test_captured_cold(cp, tmp_path):
    """B025: the first call of a process inside a capture works, or says what to do; the process survives."""
    run_python(COLD_CAPTURE, tmp_path)
