"""The compiler and its cache: what a key covers, what damage does, and many at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sampling import sampled

import cupy_fa2.compile as compile_module
from cupy_fa2.compile import CompileError, build, cache_dir, known_target, nvrtc_version
from cupy_fa2.kernel.features import Features
from cupy_fa2.kernel.forward import FwdSpec, FwdTile

SMALL = FwdSpec(FwdTile(32, 16, 16, 16, 1, 1), "f16", "f16")  # the cheapest kernel there is


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and nothing built yet in this process."""
    monkeypatch.setenv("CUPY_FA2_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_module, "_built", {})
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """The names of what NVRTC was asked to compile, in order."""
    names = []
    original = compile_module.compile_source

    def counting(unit, headers, name, options):
        names.append(name)
        return original(unit, headers, name, options)

    monkeypatch.setattr(compile_module, "compile_source", counting)
    return names


def forget(monkeypatch):
    """Forget what this process has built, as a new one would."""
    monkeypatch.setattr(compile_module, "_built", {})


def test_a_binary_is_whole(cache):
    binary = build(SMALL, "sm_80")
    assert binary.cubin[:4] == b"\x7fELF"
    section_table = int.from_bytes(binary.cubin[0x28:0x30], "little")
    entry, count = (int.from_bytes(binary.cubin[at : at + 2], "little") for at in (0x3A, 0x3C))
    assert len(binary.cubin) >= section_table + entry * count
    assert ".target sm_80" in binary.ptx
    assert 0 < binary.registers <= 255
    assert binary.spill_bytes == 0


def test_a_virtual_target_gives_ptx_alone(cache):
    binary = build(SMALL, "compute_80", line_info=True)
    assert binary.cubin == b""
    assert ".loc" in binary.ptx


def test_the_same_kernel_is_compiled_once(cache, compilations, monkeypatch):
    first = build(SMALL, "sm_80")
    assert build(SMALL, "sm_80") is first
    forget(monkeypatch)
    second = build(SMALL, "sm_80")
    assert compilations == [SMALL.name]
    assert (second.cubin, second.ptx, second.registers) == (first.cubin, first.ptx, first.registers)


def test_the_key_covers_included_texts(cache, compilations, tmp_path, monkeypatch):
    """An upgrade that changes a header alone must not find the old binary (case B084)."""
    root = tmp_path / "cuda_src"
    shutil.copytree(compile_module.source_root(), root)
    monkeypatch.setattr(compile_module, "source_root", lambda: root)
    first = build(SMALL, "sm_80")
    header = root / "core" / "softmax.cuh"
    header.write_text(header.read_text().replace("value * inverse", "value").replace("row_sum[r] += value;", ""))
    second = build(SMALL, "sm_80")
    assert len(compilations) == 2
    assert second.cubin != first.cubin


def test_the_key_covers_target_options_and_compiler(cache, compilations, monkeypatch):
    build(SMALL, "sm_80")
    build(SMALL, "sm_90")
    build(SMALL, "sm_80", line_info=True)
    monkeypatch.setattr(compile_module, "nvrtc_version", lambda: (99, 9))
    build(SMALL, "sm_80")
    assert len(compilations) == 4
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", sampled(["empty", "half", "one bit", "no newline", "another format"], "one bit"))
def test_a_damaged_entry_is_rebuilt(cache, compilations, monkeypatch, damage):
    """Case B082: truncated to nothing, to half, or with a byte flipped."""
    good = build(SMALL, "sm_80")
    (entry,) = cache.iterdir()
    blob = entry.read_bytes()
    flipped = bytearray(blob)
    flipped[len(blob) // 2] ^= 1
    entry.write_bytes(
        {
            "empty": b"",
            "half": blob[: len(blob) // 2],
            "one bit": bytes(flipped),
            "no newline": blob.replace(b"\n", b""),
            "another format": b"cupy_fa2 binary 0\n" + blob[18:],
        }[damage]
    )
    forget(monkeypatch)
    again = build(SMALL, "sm_80")
    assert len(compilations) == 2
    assert again.cubin == good.cubin
    assert entry.read_bytes() == blob


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path, compilations, monkeypatch):
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("")
    monkeypatch.setenv("CUPY_FA2_CACHE_DIR", str(blocked))
    forget(monkeypatch)
    first = build(SMALL, "sm_80")
    assert build(SMALL, "sm_80") is first  # kept in memory
    assert len(compilations) == 1
    assert blocked.read_text() == ""


def test_many_threads_agree(cache):
    with ThreadPoolExecutor(8) as pool:
        binaries = list(pool.map(lambda _: build(SMALL, "sm_80"), range(16)))
    assert all(binary is binaries[0] for binary in binaries)
    assert [path.suffix for path in cache.iterdir()] == [".bin"]


@pytest.mark.full
def test_many_processes_agree(cache):
    """Case B082: processes started together with an empty shared cache, one of them finding a torn entry."""
    code = (
        "from cupy_fa2.compile import build; from cupy_fa2.kernel.forward import *\n"
        "import hashlib; print(hashlib.sha256("
        "build(FwdSpec(FwdTile(32, 16, 16, 16, 1, 1), 'f16', 'f16'), 'sm_80').cubin).hexdigest())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(outputs) == 1
    assert [path.suffix for path in cache.iterdir()] == [".bin"]


@pytest.mark.full
def test_threads_that_import_together(tmp_path):
    """One thread's first compilation imports CuPy while another asks whether its arrays are CuPy's."""
    code = (
        "import threading, numpy as np, cupy_fa2\n"
        "q = np.ones((1, 16, 1, 16), np.float16); wrong = []\n"
        "def call():\n"
        "    try: cupy_fa2.flash_attention(q, q, q)\n"
        "    except BaseException as error: wrong.append(error)\n"
        "threads = [threading.Thread(target=call) for _ in range(6)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert not wrong, wrong\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "CUPY_FA2_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def test_no_home_and_no_working_directory(tmp_path):
    code = (
        "import os, pathlib, sys\n"
        "from cupy_fa2.compile import build; from cupy_fa2.kernel.forward import *\n"
        "def homeless(*_): raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = homeless\n"
        "os.rmdir(os.getcwd())\n"
        "spec = FwdSpec(FwdTile(32, 16, 16, 16, 1, 1), 'f16', 'f16')\n"
        "assert build(spec, 'compute_80', line_info=True).path is None\n"
        "assert build(spec, 'sm_80').cubin\n"
    )
    gone = tmp_path / "gone"
    gone.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for name in ("CUPY_FA2_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=gone, check=True, timeout=120)


def test_entries_are_as_readable_as_other_files(cache):
    build(SMALL, "sm_80")
    (entry,) = cache.iterdir()
    plain = cache / "plain"
    plain.write_text("")
    assert entry.stat().st_mode == plain.stat().st_mode


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_FA2_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("CUPY_FA2_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "cupy_fa2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "cupy_fa2"


def test_a_refused_source_shows_the_compilers_log(cache):
    with pytest.raises(CompileError, match=r"could not compile broken[\s\S]*identifier"):
        compile_module.compile_source("__global__ void f() { nonsense(); }", {}, "broken", ("--std=c++20",))


def test_targets_that_nvrtc_does_not_know(monkeypatch):
    """Case B085: machine code for the nearest older member of the generation, else one clear error."""

    class OldNvrtc:
        @staticmethod
        def getSupportedArchs():
            return (75, 80, 86, 90)

    nvrtc_version()
    monkeypatch.setattr(compile_module, "_nvrtc", lambda: OldNvrtc)
    assert known_target("sm_90") == "sm_90"
    assert known_target("sm_89") == "sm_86"
    assert known_target("compute_89") == "compute_86"
    with pytest.raises(CompileError, match=r"does not know sm_100, it knows sm_75, .*; install a newer one"):
        known_target("sm_100")


def test_a_missing_nvrtc_says_what_to_install(monkeypatch):
    class NoNvrtc:
        @staticmethod
        def getVersion():
            raise OSError("libnvrtc.so.12: cannot open shared object file")

    nvrtc_version.cache_clear()
    monkeypatch.setattr(compile_module, "_nvrtc", lambda: NoNvrtc)
    with pytest.raises(CompileError, match=r"libnvrtc.*pip install 'cuda-toolkit\[nvrtc\]"):
        nvrtc_version()
    nvrtc_version.cache_clear()


def test_specs_have_names_of_their_own():
    tile = FwdTile(64, 64, 64, 64, 4)
    specs = [
        FwdSpec(tile, "f16", "f16"),
        FwdSpec(tile, "bf16", "bf16"),
        FwdSpec(tile, "f16", "float"),
        FwdSpec(tile, "f16", "f16", Features("causal")),
        FwdSpec(tile, "f16", "f16", Features(negate=True)),
        FwdSpec(tile, "f16", "f16", out_vectors=False),
        FwdSpec(tile, "f16", "f16", min_blocks=2),
        FwdSpec(FwdTile(64, 64, 64, 32, 4), "f16", "f16"),
        FwdSpec(FwdTile(64, 64, 64, 64, 4, stages=1), "f16", "f16"),
        FwdSpec(FwdTile(64, 64, 64, 64, 4, slack=0), "f16", "f16"),
        FwdSpec(FwdTile(64, 64, 64, 64, 4, last_to_first=False), "f16", "f16"),
    ]
    assert len({spec.name for spec in specs}) == len(specs)
