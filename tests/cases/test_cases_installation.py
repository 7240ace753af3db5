"""Cases (see test_cases.py): installation, the compiler and its cache."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from case_tools import run_python
from sampling import sampled

import cupy_fa2

FIRST_CALL = """
import sys
import numpy as np, cupy_fa2
q = np.ones((1, 16, 1, 16), np.float16)
out = cupy_fa2.flash_attention(q, q, q)
assert bool((out == 1).all())
"""


def entries(cache):
    return [path for path in Path(cache).rglob("*") if path.is_file()]


def test_sources_include_nothing_but_each_other():
    """B081: no header of a toolkit is needed to compile, hence none to find."""
    from cupy_fa2.compile import source_root

    files = [path for path in source_root().rglob("*") if path.suffix in (".cuh", ".cu", ".h")]
    assert files
    for path in files:
        for line in re.findall(r"^\s*#\s*include\s+(.*)", path.read_text(), re.MULTILINE):
            target = re.fullmatch(r'"([^"]+)"(?:\s*//.*)?', line.strip())
            assert target, f"{path}: #include {line}"
            assert target[1] == "params.cuh" or (source_root() / target[1]).is_file(), f"{path}: {line}"


@pytest.mark.full
def test_first_use_by_many_at_once(tmp_path):
    """B082: processes and threads that start together on an empty cache; no temporary file stays."""
    threads = (
        FIRST_CALL.replace("out = ", "import threading\nout = ")
        + """
results = []
workers = [
    threading.Thread(target=lambda: results.append(cupy_fa2.flash_attention(q, q, q, causal=True)))
    for _ in range(4)
]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert len(results) == 4 and all((r == 1).all() for r in results)
"""
    )
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(run_python, threads, tmp_path) for _ in range(4)]:
            done.result()
    assert entries(tmp_path)
    assert not [path for path in entries(tmp_path) if "tmp" in path.name]


@pytest.mark.full
def test_damaged_cache_entries_are_rebuilt(tmp_path):
    """B082: emptied, cut in half, one byte changed."""
    run_python(FIRST_CALL, tmp_path)
    whole = {path: path.read_bytes() for path in entries(tmp_path)}
    assert whole
    for damage in (
        lambda blob: b"",
        lambda blob: blob[: len(blob) // 2],
        lambda blob: blob[: len(blob) // 2] + bytes([blob[len(blob) // 2] ^ 1]) + blob[len(blob) // 2 + 1 :],
    ):
        for path, blob in whole.items():
            path.write_bytes(damage(blob))
        run_python(FIRST_CALL, tmp_path)
        assert {path: path.read_bytes() for path in entries(tmp_path)} == whole


def test_cache_that_cannot_be_written(tmp_path):
    """B082: a folder that cannot be made; everything works from memory."""
    (tmp_path / "file").write_text("")
    run_python(FIRST_CALL, tmp_path / "file" / "cache")


def test_changed_header_is_seen(tmp_path):
    """B084: another text in an included file is another kernel, although the unit that includes it stays."""
    package = Path(cupy_fa2.__file__).resolve().parent
    from cupy_fa2.compile import source_root

    shutil.copytree(package, tmp_path / "cupy_fa2", ignore=shutil.ignore_patterns("__pycache__", "cuda_src"))
    shutil.copytree(source_root(), tmp_path / "cuda_src")
    cache = tmp_path / "cache"
    here = {"PYTHONPATH": str(tmp_path)}
    run_python(FIRST_CALL, cache, **here)
    header = tmp_path / "cuda_src" / "core" / "softmax.cuh"
    text = header.read_text()
    header.write_text(text + "\n#error this header has changed\n")
    done = run_python(FIRST_CALL, cache, check=False, **here)
    assert done.returncode != 0
    assert "this header has changed" in done.stderr
    header.write_text(text)
    run_python(FIRST_CALL, cache, **here)


@pytest.mark.parametrize("capability", [(6, 0), (7, 0), (7, 5)])
def test_gpus_that_are_too_old(monkeypatch, capability):
    """B085: one error that names the card and the minimum."""
    import cupy

    from cupy_fa2 import device

    properties = {"name": b"Old Card", "major": capability[0], "minor": capability[1]}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda _: properties)
    device.cuda_device.cache_clear()
    with pytest.raises(RuntimeError, match=r"Old Card.*8\.0"):
        device.cuda_device(0)
    device.cuda_device.cache_clear()


@pytest.mark.parametrize("name", sampled(["A100", "RTX 3090", "RTX 4090", "H200", "B200", "RTX 5090"], "RTX 3090"))
def test_known_gpus_get_machine_code_that_fits_them(name):
    """B085: an ELF file for the card's own architecture, within its shared memory."""
    from cupy_fa2.compile import build
    from cupy_fa2.device import named_device
    from cupy_fa2.kernel.base import target
    from cupy_fa2.plan import plan_forward
    from cupy_fa2.problem import Problem

    device = named_device(name)
    for head_dim in (64, 256):
        q = np.zeros((1, 300, 2, head_dim), np.float16)
        problem = Problem.from_arrays(q, q, q, causal=True, addresses=(0, 0, 0, 0))
        (launch,) = plan_forward(problem.structure, device).kernels
        assert build(launch.spec, target(launch.spec, device)).cubin.startswith(b"\x7fELF")
        assert launch.spec.shared_bytes <= device.shared_per_block


NO_CUPY = """
import sys
sys.modules["cupy"] = None
import numpy as np, cupy_fa2, cupy_fa2.testing
q = np.ones((1, 16, 1, 16), np.float16)
try:
    cupy_fa2.flash_attention(q, q, q)
except Exception as error:
    assert "pip install" in str(error) and "cupy" in str(error), error
else:
    raise SystemExit("it compiled without CuPy?")
"""


def test_import_without_cupy(tmp_path):
    """B087: importing needs neither CuPy nor a GPU; a call then says what to install."""
    run_python(NO_CUPY, tmp_path)


def test_import_without_a_gpu(tmp_path):
    """B087: no device is visible, and NumPy arrays run all the same."""
    run_python(FIRST_CALL, tmp_path, CUDA_VISIBLE_DEVICES="")


FORK = """
import os, sys
import cupy_fa2
child = os.fork()
if child == 0:
    import cupy as cp, numpy as np
    q = cp.ones((1, 16, 1, 16), np.float16)
    os._exit(0 if bool((cupy_fa2.flash_attention(q, q, q) == 1).all()) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.gpu
def test_import_then_fork(cp, tmp_path):
    """B087: importing makes no CUDA context, so a forked child may make its own."""
    run_python(FORK, tmp_path)
