"""Running the rows of a bench: errors stay in their row, peers that fail in their column; bare launches."""

import argparse
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import peers
import pytest
from bench_tools import small_case, small_inputs
from harness import bench as bench_module
from harness import results
from harness import run as run_module
from harness.arrays import Arrays, Inputs
from harness.bench import Bench, Session
from harness.case import Case
from harness.launch import bare, plan_of, without_launches
from harness.results import read_result
from rows import BENCHES
from rows.pieces import PIECES, given

import cupy_fa2
from cupy_fa2.call.cuda import CudaKernel
from cupy_fa2.compile import Binary
from cupy_fa2.device import named_device
from cupy_fa2.kernel.forward import FwdTile

H200 = named_device("H200")
#: What three peers' calls return, and how long they take.
PEERS = {"flash2": (1.0, 3.0), "cudnn": (1.0, 1.0), "triton": (5.0, 1.0)}


class Little(Bench):
    """As much as a new kind of rows has to say."""

    kind = "little"
    title = "A bench for this test."
    peers = ("flash2", "cudnn", "triton", "flash3")
    rows = tuple(Case("bf16", 64, causal, seqlen) for causal in (False, True) for seqlen in (1024, 8192))

    def plan(self, row, device):
        if row.seqlen == 8192 and row.causal:
            raise ValueError("no plan")
        return plan_of(row, device)

    def describe(self, row):
        return {"name": row.name, "marks": {"flash2": 1.6, "cudnn": 0.4}}

    def calls(self, row, found, session):
        q, k, v, out = session.inputs.qkv_out(row)
        assert {x.shape for x in (q, k, v, out)} == {row.shape}

        def accept(peer, theirs):
            if theirs != 1.0:
                raise peers.Wrong("ours") if row.causal else peers.Unavailable("its output differs")

        def missing():
            raise peers.Unavailable("no flash3")

        makers = {name: lambda result=result: lambda: result for name, (result, _) in PEERS.items()}
        return {"ours": lambda: None}, session.offer(found, {**makers, "flash3": missing}, accept)


@pytest.fixture
def session(monkeypatch):
    """A run on a card whose kernels all compile, and whose calls take what `PEERS` say; ours takes 2 ms."""

    def interleaved(calls, *, seconds, min_rounds, flush, seed):
        assert (seconds, min_rounds, flush, seed) == (0.1, 9, True, 7)
        session.rounds.append(list(calls))
        if session.fails & calls.keys():
            raise MemoryError("no room")
        return {name: [2.0 if name == "ours" else PEERS[name][1]] * 9 for name in calls}

    def compile_all(specs, device):
        return {spec: Binary(spec.name, "sm_90", b"", "", 255, 8) for spec in specs}

    monkeypatch.setattr(bench_module, "interleaved", interleaved)
    monkeypatch.setattr(run_module, "compile_all", compile_all)
    given = {"seconds": 0.1, "rounds": 9, "flush": True, "seed": 7, "deadline": 0.0, "peers": [*Little.peers]}
    machine = {"schema": 1, "kind": "little", "card": "NVIDIA H200", "driver": "580", "commit": "c0ffee", "rows": []}
    session = Session(H200, Inputs(np), argparse.Namespace(**given), machine)
    session.rounds, session.fails = [], set()
    return session


def test_a_row_that_fails_does_not_stop_the_others(session, tmp_path):
    output = tmp_path / "card-little.json"
    result = run_module.run(Little(), [*Little.rows], session, output)
    assert json.loads(output.read_text()) == read_result(output) == result
    errors = {row["name"]: row["error"] for row in result["rows"] if "error" in row}
    assert errors == {"bf16-d64-causal-1024": "Wrong: ours", "bf16-d64-causal-8192": "ValueError: no plan"}
    assert session.rounds == [["ours", "flash2", "cudnn"]] * 2
    row = result["rows"][0]
    assert row["messages"] == {"triton": "its output differs", "flash3": "no flash3"}
    assert row["ratios"] == {"flash2": 1.5, "cudnn": 0.5}
    assert (row["ms"], row["spread"], row["rounds"], row["registers"], row["spill_bytes"]) == (2.0, 0, 9, 255, 8)
    assert [mark.met for mark in Little().marks(row)] == [False, True]
    lines = Little().table(result).splitlines()
    assert "bf16-d64-causal-8192: ValueError: no plan" in lines
    assert "no FlashAttention-3 in 2 rows: no flash3" in lines
    assert "no triton: its output differs" in Little().line(row)


def test_a_row_keeps_our_time_where_a_peer_fails_later(session):
    session.fails = {"cudnn"}
    (row,) = run_module.run(Little(), [Little.rows[0]], session, None)["rows"]
    assert session.rounds == [["ours", "flash2", "cudnn"], ["ours"]]
    assert (row["ms"], row["ratios"]) == (2.0, {})
    assert row["messages"]["cudnn"] == row["messages"]["flash2"] == "MemoryError: no room"
    session.fails = {"ours"}
    assert run_module.run(Little(), [Little.rows[0]], session, None)["rows"][-1]["error"] == "MemoryError: no room"


def test_only_the_peers_that_are_wanted_are_asked(session):
    session.arguments.peers = ["cudnn"]
    (row,) = run_module.run(Little(), [Little.rows[0]], session, None)["rows"]
    assert (session.rounds, row["messages"]) == ([["ours", "cudnn"]], {})


def test_no_row_starts_after_the_deadline(session):
    session.arguments.deadline = 1e-9
    assert run_module.run(Little(), [*Little.rows], session, None)["rows"] == []


def test_the_command_measures_prints_and_stores(session, tmp_path, monkeypatch, capsys):
    for name, stand_in in {
        "need_gpu": lambda: np,
        "cuda_device": lambda number: H200,
        "describe_machine": lambda device, commit: {"card": "NVIDIA H200", "driver": "580", "commit": commit},
    }.items():
        monkeypatch.setattr(run_module, name, stand_in)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(peers, "versions", dict)
    words = ["bench.py", "--seconds", "0.1", "--flush", "--seed", "7", "--commit", "c0ffee"]
    monkeypatch.setattr("sys.argv", words)
    assert run_module.main({"little": Little()}) == 1  # two rows have no time
    stored = tmp_path / "h200-little.json"
    result = read_result(stored)
    assert result["method"] == {"rounds": 9, "seconds": 0.1, "flush": True, "seed": 7}
    assert (result["kind"], result["commit"], len(result["rows"])) == ("little", "c0ffee", 4)
    out = capsys.readouterr().out
    assert "at least 9 rounds, L2 flushed before each call" in out
    assert "2 of 8 marks met; 4 rows, 2 without a time" in out
    assert f"written: {stored}" in out
    stored.unlink()
    monkeypatch.setattr("sys.argv", [*words, "--only", Little.rows[0].name, "--peers", "cudnn"])
    assert run_module.main({"little": Little()}) == 0
    assert not stored.exists()  # not all rows


def test_rows_share_their_inputs():
    inputs = Inputs(np)
    small, large = Case("bf16", 64, False, 1024), Case("bf16", 128, True, 65_536)
    q, k, v, out = (x[0, :8, 0].astype(np.float32) for x in inputs.qkv_out(small))
    assert np.isnan(out).all()
    assert all(abs(x.mean()) < 0.2 and abs(x.std() - 1) < 0.2 for x in (q, k, v))
    assert not np.array_equal(q, k)
    again = inputs.normal("q", small.shape, "bf16")
    assert np.shares_memory(again, inputs.normal("q", (1, 8, 1, 64), "bf16"))
    assert inputs.qkv_out(large)[0].shape == large.shape


def test_pieces_turn_on_what_they_are_called():
    case = Case("bf16", 128, False, 8192)
    names = {"window_all": "window", "bias32": "bias", "mask_keys": "mask"}
    for piece in PIECES:
        (launch,) = plan_of(case, H200, **given((piece,), Arrays(), case)).kernels
        features, name = launch.spec.features, names.get(piece, piece)
        assert features.band == "window" if name == "window" else getattr(features, name)


@pytest.mark.parametrize(
    "pieces", [("window",), ("softcap", "alibi", "bias", "mask_keys", "sinks", "padded", "dropout")]
)
def test_a_bare_launch_gives_what_the_call_gives(pieces):
    case = small_case(head_dim=64)
    q, k, v = small_inputs(case)
    options = given(pieces, Arrays(np), case)
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    numbers = {name: x for name, x in options.items() if name not in arrays}
    out = np.empty(case.shape, q.dtype)
    with cupy_fa2.simulator("H200"):
        expected = cupy_fa2.flash_attention(q, k, v, **options)
        plan, launch = bare(H200, {"q": q, "k": k, "v": v, "out": out, **arrays}, **numbers)
        launch()
        assert out.tobytes() == expected.tobytes()
        spec = plan.kernels[0].spec
        other = replace(spec, tile=FwdTile(64, 32, 64, 64, 4), transport="cp_async")
        plan, launch = bare(H200, {"q": q, "k": k, "v": v, "out": out, **arrays}, other, **numbers)
        out[:] = 0
        launch()
    assert plan.kernels[0].spec == other != spec
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), atol=0.03)


def test_the_hosts_work_is_measured_without_launches():
    launches = []
    kernel = object.__new__(CudaKernel)
    kernel._struct, kernel._kernel = np.dtype("V4"), lambda *args, **_: launches.append(args)
    launch = SimpleNamespace(grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=0)
    with without_launches():
        kernel(launch, b"1234", None)
    assert launches == []
    kernel(launch, b"1234", None)
    assert len(launches) == 1


def test_every_bench_says_what_a_row_needs():
    for kind, bench in BENCHES.items():
        assert kind == bench.kind
        assert set(bench.quick_peers) <= set(bench.peers) <= set(peers.TITLES)
        names = [row.name for row in bench.rows]
        assert len(set(names)) == len(names)
        assert [bench.describe(row)["name"] for row in bench.rows] == names
