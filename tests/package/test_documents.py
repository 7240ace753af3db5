"""README, documents and examples say what is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampling import sampled

import cupy_fa2

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

pytestmark = pytest.mark.skipif(not DOCUMENTS[0].is_file(), reason="the tests do not stand in a checkout")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        assert "://" in target or (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_paths_of_one_machine(document: Path) -> None:
    assert not re.search(r"/(work|tmp|root|home)/", document.read_text())


def readme_example() -> str:
    """The first Python block of README."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    return block[1]


def test_readme_example_in_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    code = readme_example()
    assert len(code.splitlines()) == 5
    code = code.replace("import numpy as np, cupy as cp, cupy_fa2", "import numpy as np, numpy as cp, cupy_fa2")
    exec(code.replace("(2, 4096, 16, 128))", "(2, 40, 2, 32))"), {})
    assert capsys.readouterr().out == "(2, 40, 2, 32) float16 (2, 2, 40)\n"


@pytest.mark.gpu
def test_readme_example(capsys: pytest.CaptureFixture[str]) -> None:
    code = readme_example()
    exec(code, {})
    assert capsys.readouterr().out.strip() == code.splitlines()[-1].split("# ")[1]


def test_readme_commands_are_two_lines() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [command.split("python -m ")[1].split()[0] for command in commands] == ["cupy_fa2", "pytest"]


def test_readme_has_room_for_the_bench() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- bench:begin -->") == text.count("<!-- bench:end -->") == 1
    assert text.index("<!-- bench:begin -->") < text.index("<!-- bench:end -->")


def test_version_is_one() -> None:
    assert f'version = "{cupy_fa2.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert cupy_fa2.__version__ in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("example", sampled(EXAMPLES, *EXAMPLES[:1]), ids=lambda path: path.name)
def test_examples_run(example: Path) -> None:
    pytest.importorskip("cupy")
    environment = os.environ | {"PYTHONPATH": str(Path(cupy_fa2.__file__).parents[1])}
    process = subprocess.run([sys.executable, str(example)], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout


def test_numerics_document_states_the_default_slack() -> None:
    from cupy_fa2.kernel.forward import FwdTile

    slack: Any = FwdTile(128, 64, 128, 128, 4).slack
    assert f"more than {slack} in log2" in (ROOT / "docs" / "numerics.md").read_text()
    assert np.log2(256) == slack
