"""What a user installs: the sources are found however the package came here, and importing it has no side effects."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_fa2.compile import gather_sources, source_root
from cupy_fa2.kernel.forward import FwdSpec, FwdTile

ROOT = Path(__file__).resolve().parents[2]
SPEC = FwdSpec(FwdTile(128, 64, 128, 128, 4), "f16", "f16")
MACHINE_PATHS = re.compile(rb"/(work|tmp|root|home|Users|var)/")

# Run with -S, so that only what the test puts there is on the path; NumPy and the rest come last.
REPORT = """
import json, site, sys
if sys.argv[1]:
    site.addsitedir(sys.argv[1])
sys.path.append(sys.argv[2])
import cupy_fa2
from cupy_fa2.compile import gather_sources, source_root
from cupy_fa2.kernel.forward import FwdSpec, FwdTile
spec = FwdSpec(FwdTile(128, 64, 128, 128, 4), "f16", "f16")
print(json.dumps([cupy_fa2.__file__, str(source_root()), gather_sources(spec.render())]))
"""


def imported(folder: Path, *, site: Path | str = "", **environment: str) -> tuple[Path, Path, dict[str, str]]:
    """The package's file, its source root, and a kernel's sources, as a fresh interpreter in `folder` finds them.

    Parameters
    ----------
    folder : Path
        Where to start it, away from the checkout.
    site : Path
        A folder to treat as site-packages, with its .pth files.
    **environment
        Variables to set.
    """
    packages = str(Path(np.__file__).parents[1])
    process = subprocess.run(
        [sys.executable, "-S", "-c", REPORT, str(site), packages],
        cwd=folder,
        env=without_pythonpath() | environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    file, root, sources = json.loads(process.stdout)
    return Path(file).resolve(), Path(root).resolve(), sources


def without_pythonpath() -> dict[str, str]:
    """The environment, less what would show the package to a child."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def checkout() -> Path:
    """The checkout that these tests stand in."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("the tests do not stand in a checkout: nothing to build")
    return ROOT


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built of the checkout, without the network."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The wheel, unpacked as an installer would."""
    folder = wheel.parent / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_holds_everything(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    for source in source_root().rglob("*.cuh"):
        assert f"cupy_fa2/cuda_src/{source.relative_to(source_root()).as_posix()}" in names
    for module in (ROOT / "cupy_fa2").rglob("*.py"):
        assert module.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "bench/", "docs/"))]
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "cupy-fa2 = cupy_fa2.cli.main:main" in entry_points


def test_wheel_names_no_path_of_the_building_machine(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            assert not MACHINE_PATHS.search(archive.read(name)), name
            assert str(ROOT).encode() not in archive.read(name), name


def test_sources_of_a_wheel(installed: Path, tmp_path: Path) -> None:
    file, root, sources = imported(tmp_path, site=installed)
    assert file == (installed / "cupy_fa2" / "__init__.py").resolve()
    assert root == (installed / "cupy_fa2" / "cuda_src").resolve()
    assert sources == gather_sources(SPEC.render())


def test_sources_of_an_editable_install(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    site = tmp_path / "site-packages"
    code = f"import hatchling.build; print(hatchling.build.build_editable({str(tmp_path)!r}))"
    process = subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(tmp_path / process.stdout.split()[-1]) as archive:
        archive.extractall(site)
    file, root, sources = imported(tmp_path, site=site)
    assert file == checkout / "cupy_fa2" / "__init__.py"
    assert root == checkout / "cuda_src"  # the files that are edited, not copies of them
    assert sources == gather_sources(SPEC.render())


def test_sources_by_pythonpath(checkout: Path, tmp_path: Path) -> None:
    file, root, sources = imported(tmp_path, PYTHONPATH=str(checkout))
    assert file == checkout / "cupy_fa2" / "__init__.py"
    assert root == checkout / "cuda_src"
    assert sources == gather_sources(SPEC.render())


def test_missing_sources_say_so(checkout: Path, tmp_path: Path) -> None:
    """A package copied without its sources."""
    shutil.copytree(checkout / "cupy_fa2", tmp_path / "cupy_fa2", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import cupy_fa2.compile as c; print(c.__file__); c.source_root()"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert process.stdout.startswith(str(tmp_path))
    assert process.returncode != 0
    assert "FileNotFoundError: the CUDA sources are neither in" in process.stderr


def test_wheel_runs_as_a_module(installed: Path, tmp_path: Path) -> None:
    code = "import sys, runpy; sys.path.append(sys.argv.pop(1)); runpy.run_module('cupy_fa2', run_name='__main__')"
    process = subprocess.run(
        [sys.executable, "-S", "-c", code, str(Path(np.__file__).parents[1]), "--version"],
        cwd=tmp_path,
        env=without_pythonpath() | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("cupy_fa2 ")


def run_python(code: str, **environment: str) -> Any:
    """JSON that `code` prints in a fresh interpreter."""
    merged: Mapping[str, str] = os.environ | {"PYTHONPATH": str(Path(source_root()).parent)} | environment
    process = subprocess.run([sys.executable, "-c", code], env=merged, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_import_touches_no_gpu() -> None:
    """B087: importing loads neither CuPy nor a CUDA library, so that it can make no context."""
    code = """
import json, sys
import cupy_fa2, cupy_fa2.testing, cupy_fa2.reference, cupy_fa2.ptxsim, cupy_fa2.cli.main
with open("/proc/self/maps") as maps:
    libraries = sorted({line.split()[-1] for line in maps if "libcuda" in line or "libnvrtc" in line})
modules = sorted(name for name in sys.modules if name.split(".")[0] in ("cupy", "cupy_backends", "torch"))
print(json.dumps([modules, libraries]))
"""
    assert run_python(code) == [[], []]


def test_import_writes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    code = "import json, cupy_fa2; print(json.dumps('ok'))"
    environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "CUPY_FA2_CACHE_DIR": str(home / "cache")}
    assert run_python(code, **environment) == "ok"
    assert list(home.iterdir()) == []
