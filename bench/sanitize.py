"""Run the tests that are marked for it under compute-sanitizer: memcheck, racecheck, initcheck; one line each.

    python bench/sanitize.py                        all three, some two minutes on an H200; exit 1 on any error
    python bench/sanitize.py --tool racecheck       one of them
    python bench/sanitize.py --output report.txt    keep what the tools printed

A test that is marked ``sanitize`` launches kernels on small arrays of ragged sizes, and checks what they give. Those
that are marked ``racecheck`` too stand for the rest under that tool, which is slow. Needs pytest and hypothesis;
``compute-sanitizer`` comes with a CUDA toolkit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from harness.machine import ROOT, environment, find_program

__all__ = ["TOOLS", "command", "main", "verdict"]

#: Tool -> which tests it runs under, as pytest's ``-m`` has it.
TOOLS = {"memcheck": "sanitize", "racecheck": "sanitize and racecheck", "initcheck": "sanitize"}

_FOUND = 99  # the exit status that is asked for on errors
_SUMMARY = re.compile(r"^=+ ((?:\w+ SUMMARY: |No CUDA).*)$", re.MULTILINE)
_TESTS = re.compile(r"^(?:=+ )?((?:no tests ran|(?:\d+ \w+(?:, )?)+) in [\d.]+s.*?)(?: =+)?$", re.MULTILINE)
_SHOWN = 60  # lines of what a tool that failed has printed


def command(tool: str, sanitizer: str) -> list[str]:
    """What is run for one tool."""
    words = [sanitizer, "--tool", tool, "--error-exitcode", str(_FOUND)]
    words += ["--racecheck-report", "all"] if tool == "racecheck" else []
    words += [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider", "-q"]
    return [*words, "-m", TOOLS[tool], "tests"]


def verdict(code: int, text: str) -> tuple[bool, str]:
    """Whether all is well, and why, from the exit status and what was printed.

    Well is: the tool ended with a summary without errors, pytest with success, and some test was run (where all are
    skipped, pytest succeeds as well).
    """
    summaries = _SUMMARY.findall(text)
    tests = _TESTS.findall(text)[-1:]
    clean = bool(summaries) and all(re.search(r"SUMMARY: 0 ", line) for line in summaries)
    ran = any(re.search(r"\b[1-9]\d* passed", line) for line in tests)
    words = tests + summaries
    if code == 0 and clean and not ran:
        words.append("no test was run")
    if not words:
        words = text.strip().splitlines()[-1:] or [f"exit status {code}, and nothing printed"]
    return code == 0 and clean and ran, "; ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=[*TOOLS])
    parser.add_argument("--sanitizer", help="path of compute-sanitizer, where it is not found")
    parser.add_argument("--output", type=Path, help="file for all that the tools print")
    options = parser.parse_args()
    sanitizer = find_program("compute-sanitizer", options.sanitizer)
    if sanitizer is None:
        print("compute-sanitizer was not found; it comes with a CUDA toolkit (--sanitizer PATH)", file=sys.stderr)
        return 2
    # Without a pool the end of an array is the end of an allocation, and every allocation is uninitialised.
    variables = environment(CUPY_FA2_NO_POOL="1")
    failed, kept = 0, []
    for tool in options.tool:
        begin = time.perf_counter()
        words = command(tool, sanitizer)
        done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        text = done.stdout + done.stderr
        well, why = verdict(done.returncode, text)
        failed += not well
        kept.append(f"== {tool}\n{text}")
        if options.output:
            options.output.write_text("\n".join(kept))
        if not well:
            print("\n".join(text.splitlines()[:_SHOWN]), file=sys.stderr)
        print(f"{tool}: {'ok' if well else 'FAILED'}, {why} ({time.perf_counter() - begin:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
