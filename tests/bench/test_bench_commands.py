"""Each script of the bench as one runs it, as far as it goes without a GPU."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import sanitize
import sass
from bench_tools import stored_results
from harness.machine import ROOT, environment, find_program, has_gpu
from rows import BENCHES

SCRIPTS = sorted(path.name for path in (ROOT / "bench").glob("*.py"))


def run(monkeypatch, capsys, script, *words):
    """Exit status and output of a script."""
    monkeypatch.setattr("sys.argv", [script, *map(str, words)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "bench" / script), run_name="__main__")
    printed = capsys.readouterr()
    return end.value.code, printed.out + printed.err


@pytest.fixture
def script(monkeypatch, capsys):
    """`run`, for this test."""
    return lambda *words: run(monkeypatch, capsys, *words)


def test_every_script_is_in_the_readme():
    text = (ROOT / "bench" / "README.md").read_text()
    assert [name for name in SCRIPTS if f"`python bench/{name}" in text] == SCRIPTS
    assert all(f"`python bench/bench.py {kind}`" in text or kind == "forward" for kind in BENCHES)
    for folder in ("harness", "peers", "rows", "results"):
        assert f"`{folder}/`" in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_help(script, name):
    code, text = script(name, "--help")
    assert code == 0
    assert text.startswith("usage: ")


@pytest.mark.parametrize("kind", BENCHES)
def test_every_kind_lists_its_rows_and_has_help(script, kind):
    code, text = script("bench.py", kind, "--list", "--card", "A100")
    assert code == 0
    assert [line.split(":")[0] for line in text.splitlines()] == [row.name for row in BENCHES[kind].rows]
    assert "tensor" not in text  # A100's kernels
    code, text = script("bench.py", kind, "--help")
    assert code == 0
    assert "\nkinds (bench.py KIND --help):\n" in text


def test_flags_choose_rows(script):
    def listed(*words):
        return [line.split(":")[0] for line in script("bench.py", *words, "--list")[1].splitlines()]

    assert len(listed("--quick")) == 24
    assert listed("forward", "--dtype", "f16", "--head-dim", "64", "128", "--causal", "--seqlen", "512") == [
        "f16-d64-causal-512",
        "f16-d128-causal-512",
    ]
    assert listed("options", "--only", "bias", "window") == ["plain", "bias", "plain16k", "window"]
    assert script("bench.py", "--seqlen", "7", "--list")[0] == 2
    assert script("bench.py", "backwards")[0] == 2


@pytest.mark.skipif(has_gpu(), reason="it would measure")
def test_what_needs_a_gpu_says_so(script):
    assert "CuPy" in str(script("bench.py")[0])


def test_readme_is_what_is_stored(script):
    assert script("report.py", "--check") == (0, "everything is up to date\n")


def test_stored_results_lose_nothing_to_themselves(script):
    for path in stored_results():
        code, text = script("check.py", path)
        assert code == 0
        assert text.endswith("none lost more than 3%\n")


@pytest.mark.skipif(sass.find_tool() is None, reason="no disassembler: pip install nvidia-cuda-nvdisasm")
def test_counts_are_of_the_card_that_was_named(script):
    code, text = script("sass.py", "--card", "A100", "--head-dim", 64, "--no-causal", "--json")
    assert code == 0
    (label,) = json.loads(text)
    assert " sm_80 (" in label


@pytest.mark.parametrize("name", ["ncu.py", "sanitize.py"])
def test_a_missing_program_is_said_to_be_missing(script, name):
    flag = {"ncu.py": "--ncu", "sanitize.py": "--sanitizer"}[name]
    code, text = script(name, flag, "/nowhere")
    assert code == 2
    assert "CUDA toolkit" in text


def test_scripts_run_from_anywhere(tmp_path):
    command = [sys.executable, str(ROOT / "bench" / "report.py"), "--check"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "everything is up to date\n", "")


# --- the sanitizer ------------------------------------------------------------------------------------------

SUMMARY = "========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("code", "text", "well", "why"),
    [
        (0, "12 passed, 3 skipped, 900 deselected in 61.20s (0:01:01)\n" + SUMMARY, True, "12 passed"),
        (0, "===== 12 passed in 3.20s =====\n" + SUMMARY, True, "12 passed in 3.20s; ERROR SUMMARY: 0 errors"),
        (99, "12 passed in 3.20s\n========= ERROR SUMMARY: 2 errors\n", False, "ERROR SUMMARY: 2 errors"),
        (0, "12 passed in 3.20s\n========= ERROR SUMMARY: 2 errors\n", False, "ERROR SUMMARY: 2 errors"),
        (0, "12 passed in 3.20s\n", False, "12 passed"),  # the tool did not get to its end
        (1, "1 failed, 12 passed in 3.20s\n" + SUMMARY, False, "1 failed, 12 passed"),
        (0, "12 skipped in 3.20s\n" + SUMMARY, False, "no test was run"),
        (5, "no tests ran in 0.02s\n" + SUMMARY, False, "no tests ran"),
        (1, "No module named pytest\n", False, "No module named pytest"),
        (0, "12 passed in 3.20s\n========= RACECHECK SUMMARY: 0 hazards displayed\n", True, "RACECHECK SUMMARY"),
        (-9, "", False, "exit status -9"),
    ],
)
def test_the_sanitizers_verdict(code, text, well, why):
    found, words = sanitize.verdict(code, text)
    assert found == well
    assert why in words


def test_the_sanitizer_runs_marked_tests(tmp_path, script):
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\necho $CUPY_FA2_NO_POOL $@\necho '2 passed in 1.0s'\necho '{SUMMARY.strip()}'\n")
    tool.chmod(0o755)
    output = tmp_path / "kept.txt"
    code, text = script("sanitize.py", "--sanitizer", tool, "--output", output)
    assert code == 0
    assert [line.split(" (")[0] for line in text.splitlines()] == [
        f"{name}: ok, 2 passed in 1.0s; ERROR SUMMARY: 0 errors" for name in ("memcheck", "racecheck", "initcheck")
    ]
    kept = output.read_text()
    assert kept.count("1 --tool ") == 3
    assert kept.count("-m pytest -p no:benchmark -p no:cacheprovider -q -m sanitize tests") == 2
    assert "--racecheck-report all" in kept
    assert "-q -m sanitize and racecheck tests" in kept
    assert find_program("tool", str(tool)) == str(tool)
    assert Path(find_program("python3", None)).exists()
