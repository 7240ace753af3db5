"""`python -m cupy_fa2`: what it prints, what it returns, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampling import sampled

import cupy_fa2
from cupy_fa2 import ptxsim, reference
from cupy_fa2.call import run
from cupy_fa2.call.simulated import Simulator
from cupy_fa2.cli import demo, measure
from cupy_fa2.cli import main as command
from cupy_fa2.compile import CompileError
from cupy_fa2.device import named_device
from cupy_fa2.kernel.ceiling import CHAINS, FLOP_PER_MMA
from cupy_fa2.plan.ceiling import plan_ceiling

SMALL = ["--seqlen", "40", "--head-dim", "32"]


def run_json(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document of a run with ``--json``."""
    code = command.main([*options, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_simulated_run_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", "--simulate", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Simulating, as asked. Running in the simulator")
    assert "seqlen 40, 1 head, head_dim 32, float16" in lines[2]
    text = "\n".join(lines)
    assert "\nnot causal\n" in text
    assert "\ncausal\n" in text
    assert text.count("right: 40 rows against float64") == 2
    assert lines[-1] == "All results are right."


def test_simulated_run_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "RTX 4090", "--dtype", "bfloat16", "--heads", "4", "--heads-k", "2", "--batch", "2"]
    code, document = run_json(capsys, *options, *SMALL, "--causal")
    assert code == 0
    assert document["passed"] is True
    assert (document["where"], document["device"]) == ("simulator", "RTX 4090")
    assert document["sizes"] == {
        "batch": 2, "seqlen": 40, "heads": 4, "heads_k": 2, "head_dim": 32, "dtype": "bfloat16"
    }  # fmt: skip
    (run,) = document["runs"]
    assert run["causal"] is True
    assert run["check"]["rows"] == 2 * 4 * 40
    assert run["check"]["out_error"] <= run["check"]["out_allowed"]
    assert run["launch"]["blocks"] == 8
    assert run["launch"]["mma"] > 0
    assert run["launch"]["bank_conflicts"] == 0
    assert run["launch"]["global_load_sectors"] == run["launch"]["global_load_sectors_ideal"]


def test_default_example_is_the_advertised_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, "--simulate")
    assert code == 0
    assert [run["causal"] for run in document["runs"]] == [False, True]
    assert document["sizes"]["seqlen"] == 256
    assert document["sizes"]["head_dim"] == 128


@pytest.mark.parametrize("damage", [0.1, np.nan])
def test_wrong_result_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damage: float) -> None:
    right = cupy_fa2.flash_attention

    def wrong(*args: Any, **options: Any) -> Any:
        out, lse = right(*args, **options)
        out[0, 7, 0, 3] += out.dtype.type(damage)
        return out, lse

    monkeypatch.setattr(cupy_fa2, "flash_attention", wrong)
    assert command.main(["--simulate", "--no-causal", *SMALL]) == 1
    text = capsys.readouterr().out
    assert "WRONG: 40 rows" in text
    assert "WRONG RESULTS" in text


def test_fault_in_the_simulator_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: Any, **__: Any) -> Any:
        raise ptxsim.RaceError("shared memory is read too early", line=12, text="ldmatrix")

    monkeypatch.setattr(cupy_fa2, "flash_attention", faulty)
    assert command.main(["--simulate", *SMALL]) == 1
    assert "race: shared memory is read too early" in capsys.readouterr().err


def test_without_cupy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.main(SMALL) == 2
    assert "pip install 'cupy-fa2[cuda12]'" in capsys.readouterr().err


def test_without_driver(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")

    def missing() -> int:
        raise cupy.cuda.runtime.CUDARuntimeError(35)

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", missing)
    assert command.main([*SMALL, "--causal"]) == 0
    assert capsys.readouterr().out.startswith("No GPU can be used: the NVIDIA driver is missing")


def test_without_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    assert command.main([*SMALL, "--causal"]) == 0
    assert capsys.readouterr().out.startswith("No GPU was found. Running in the simulator")


def test_old_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    properties = {
        "name": b"Tesla V100", "major": 7, "minor": 0, "multiProcessorCount": 80,
        "sharedMemPerBlockOptin": 98304, "sharedMemPerMultiprocessor": 98304,
    }  # fmt: skip
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 78)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 77)  # no test has cached this number
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda _: properties)
    assert command.main([*SMALL, "--causal"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "Tesla V100" in first
    assert "8.0 or later" in first
    assert "Running in the simulator" in first


def test_without_nvrtc(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[int, int]:
        raise CompileError("NVRTC was not found. Install it with: pip install ...")

    monkeypatch.setattr(command, "nvrtc_version", missing)
    assert command.main(["--simulate", *SMALL]) == 2
    assert "cannot run: NVRTC was not found. Install it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--head-dim", "257"], "--head-dim must be at most 256, got 257"),
        (["--heads", "3", "--heads-k", "2"], "--heads must be a multiple of --heads-k, got 3 and 2"),
        (["--seqlen", str(10**19)], f"--seqlen must be at most 2147483647, got {10**19}"),
        (["--seqlen", str(4 * 10**18)], f"--seqlen must be at most 2147483647, got {4 * 10**18}"),
        (["--batch", str(10**32)], f"--batch must be at most 2147483647, got {10**32}"),
        (["--heads-k", str(10**32)], f"--heads-k must be at most 2147483647, got {10**32}"),
        (["--batch", "2147483647", "--seqlen", "2147483647"], "--batch, --seqlen and --heads are too large together"),
    ],
)
def test_impossible_sizes(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert command.main(["--simulate", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "options", [["--seqlen", "0"], ["--seqlen", "x"], ["--dtype", "float32"], ["--device", "V100"], ["fly"], ["-x"]]
)
def test_bad_options(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main(options)
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for option in ("--batch", "--seqlen", "--heads-k", "--head-dim", "--dtype", "--no-causal", "--device", "--json"):
        assert option in text


def test_as_a_process(tmp_path: Path) -> None:
    environment = os.environ | {"CUPY_FA2_CACHE_DIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-m", "cupy_fa2", "--simulate", "--causal", *SMALL],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("All results are right.\n")
    assert list(tmp_path.glob("fwd_f16_d32*.bin"))


@pytest.mark.parametrize("options", sampled([["--causal"], ["--causal", "--json"], ["--help"]], ["--causal"]))
@pytest.mark.parametrize("buffered", [True, False])
def test_reader_that_leaves(options: list[str], buffered: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    process = as_process(["--simulate", *SMALL, *options], write, buffered)
    os.close(write)
    assert process.stderr == ""
    assert process.returncode == 2 or (options == ["--help"] and not buffered)  # argparse ignores its own


@pytest.mark.parametrize("options", sampled([["--causal"], ["--causal", "--json"], ["--version"]], ["--version"]))
def test_full_disk(options: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        process = as_process(["--simulate", *SMALL, *options], full.fileno())
    assert process.stderr == "cannot write the output: No space left on device\n"
    assert process.returncode == 2


def as_process(options: list[str], stdout: int, buffered: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line with that standard output."""
    return subprocess.run(
        [sys.executable, "-m", "cupy_fa2", *options], stdout=stdout, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_ceiling_kernel_does_the_work_it_is_timed_for(dtype: str) -> None:
    device = replace(named_device("A100"), num_sms=2)
    warps, iterations = 4, 6
    plan = plan_ceiling(dtype, warps, iterations, device)
    sink = np.full(2 * warps * 32, np.nan, np.float32)
    simulated = Simulator(device)
    with simulated.current():
        run(plan, None, {"sink": sink})
    report = simulated.report
    assert report.mma == 2 * warps * CHAINS * iterations
    assert plan.launches[0].flop == report.mma * FLOP_PER_MMA
    assert np.isfinite(sink).all()
    assert len(np.unique(sink)) > 16  # operands that differ from lane to lane: zeros would draw less power


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_attention_by_hand_is_attention(causal: bool, heads_k: int) -> None:
    """What we compare with computes the same, in the same dtype."""
    pytest.importorskip("cupy")
    q, k, v = demo.draw(demo.Sizes(batch=2, seqlen=50, heads=4, head_dim=32, heads_k=heads_k), "float16")
    out = measure.attention_by_hand(q, k, v, causal)
    assert out.dtype == np.float16
    exact, _ = reference.attention(q, k, v, causal=causal)
    assert np.abs(out - exact).max() < 5e-3


def test_description_of_a_measured_run() -> None:
    run: dict[str, Any] = {
        "causal": True, "check": demo.Check(True, 512, 1e-4, 2e-4, 1e-6, 1e-5).to_dict(), "plan": "fwd on a card",
        "registers": 255, "spill_bytes": 0, "first_call_ms": 650.3, "ms": 2.5, "tflops": 411.2, "peak_bytes": 67108864,
        "share_of_ceiling": 0.643, "by_hand": {"ms": 100.0, "peak_bytes": 21_740_000_000, "note": ""},
    }  # fmt: skip
    text = demo.describe(run)
    assert "2.500 ms,   0.07 GB, 411 TFLOP/s, 64% of the ceiling" in text
    assert "100.000 ms,  21.74 GB, 40.0 times as long" in text
    run["by_hand"] = {"message": "not run: cupy.matmul needs cuBLAS", "note": ""}
    assert "CuPy by hand     not run: cupy.matmul needs cuBLAS" in demo.describe(run)


@pytest.mark.gpu
def test_gpu_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, "--seqlen", "2048", "--heads", "4")
    assert code == 0
    assert document["where"] == "gpu"
    assert max(document["ceiling_tflops"].values()) > 10
    for one in document["runs"]:
        assert one["check"]["passed"]
        assert one["share_of_ceiling"] > 0  # below 1 too, if nothing else runs on the card
        assert one["peak_bytes"] == 2 * 2048 * 4 * 128 * 2
        assert "ms" in one["by_hand"] or "not run" in run["by_hand"]["message"]


@pytest.mark.gpu
def test_gpu_run_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seqlen", "1000", "--heads", "4", "--heads-k", "2", "--dtype", "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert "mma.sync ceiling" in text
    assert "of the ceiling" in text
    assert text.endswith("All results are right.\n")


@pytest.mark.gpu
def test_gpu_run_where_the_comparison_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_big(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("cupy_fa2.cli.demo.attention_by_hand", too_big)
    assert command.main(["--seqlen", "512", "--heads", "2", "--causal"]) == 0
    assert "not run: needs more than the" in capsys.readouterr().out
