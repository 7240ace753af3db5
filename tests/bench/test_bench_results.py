"""Stored results: what `check.py` says of a fresh one, and what `report.py` makes of them."""

import copy
import json

import check
import pytest
import report
from bench_tools import make_options, make_result, stored_results
from harness import results
from harness.case import TOKENS
from rows import BENCHES


def test_a_result_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "folder" / "card-forward.json"
    results.write_result(path, make_result())
    assert results.read_result(path) == make_result()
    assert len(path.read_text().splitlines()) > len(make_result()["rows"])  # one a line
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_results_from_before_there_were_kinds_and_names_are_read(tmp_path):
    old = make_result()
    del old["kind"]
    for row in old["rows"]:
        del row["name"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert results.read_result(tmp_path / "old.json") == make_result()
    (tmp_path / "old.json").write_text(json.dumps({**old, "schema": 2}))
    with pytest.raises(ValueError, match="schema 2"):
        results.read_result(tmp_path / "old.json")


@pytest.mark.parametrize("path", sorted(stored_results()), ids=lambda path: path.stem)
def test_what_is_stored_is_read_by_its_bench(path):
    result = results.read_result(path)
    bench = BENCHES[result["kind"]]
    assert path == results.stored_path(result["card"], bench.kind)
    assert {row["name"] for row in result["rows"]} == {row.name for row in bench.rows}
    lines, lost = check.compare(result, copy.deepcopy(result))
    assert (len(lines), lost) == (len(bench.rows), 0)
    assert not [line for line in lines if "->" in line and "+0.0%" not in line]
    assert bench.readme(result, None)
    assert len(bench.table(result).splitlines()) >= len(bench.rows) + 2
    assert all(bench.line(row).startswith(row["name"]) for row in result["rows"])


def test_quick_rows_are_rows():
    rows = BENCHES["forward"].rows
    assert len(set(rows)) == len({row.name for row in rows}) == len(rows) == 84
    assert {row.batch * row.seqlen for row in rows if row.seqlen <= TOKENS} == {TOKENS}


def test_check_tolerates_three_percent():
    stored, fresh = make_result(), make_result()
    fresh["rows"][0]["ratios"]["flash2"] = 1.25 * 0.975
    assert check.compare(fresh, stored)[1] == 0
    fresh["rows"][0]["ratios"]["flash2"] = 1.25 * 0.965
    lines, lost = check.compare(fresh, stored)
    assert (len(lines), lost) == (84, 1)
    assert "LOST 3.5%" in lines[0]


def test_check_counts_a_row_that_fails_as_lost_but_not_one_that_was_not_tried():
    stored, fresh = make_result(), make_result()
    fresh["rows"] = fresh["rows"][:10]
    del fresh["rows"][3]["ratios"]
    fresh["rows"][3]["error"] = "RuntimeError: wrong"
    lines, lost = check.compare(fresh, stored)
    assert lost == 1
    assert "RuntimeError: wrong" in lines[3]
    assert check.compare(make_result(), fresh)[1] == 0


def test_check_shows_the_marks_of_ratios():
    stored, fresh = make_result(), make_result()
    fresh["rows"][0]["marks"] = {"flash2": 1.2, "cupy": 50.0}
    line = check.compare(fresh, stored)[0][0]
    assert "(vs FlashAttention-2 1.25, mark 1.20)  (vs CuPy by hand 40.00, mark 50.00: MISSED)" in line


def test_check_exits_with_its_verdict(tmp_path, monkeypatch, capsys):
    stored, fresh = tmp_path / "stored.json", tmp_path / "fresh.json"
    stored.write_text(json.dumps(make_result()))
    monkeypatch.setattr("sys.argv", ["check.py", str(fresh), str(stored)])
    result = make_result()
    for change, code in (({}, 0), ({"card": "NVIDIA A100"}, 2), ({"schema": 2}, 2), ({"kind": "options"}, 2)):
        fresh.write_text(json.dumps({**result, **change}))
        assert check.main() == code
    result["rows"][5]["ratios"]["flash2"] = 1.0
    fresh.write_text(json.dumps(result))
    assert check.main() == 1
    assert "1 lost more than 3%" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["check.py", str(fresh), str(tmp_path / "nothing.json")])
    assert check.main() == 2


def test_costs_are_checked_like_ratios(tmp_path, monkeypatch):
    stored, fresh = make_options(), make_options()
    rows = {row["name"]: row for row in fresh["rows"]}
    rows["bias"]["yardstick"] *= 0.975
    assert check.compare(fresh, stored)[1] == 0
    rows["bias"]["yardstick"] *= 0.98
    del rows["mask"]["cost"], rows["mask"]["yardstick"]
    rows["mask"]["error"] = "RuntimeError: wrong"
    rows["causal"]["cost"] = 1.2  # plain is faster than it was, and this row is what it was
    lines, lost = check.compare(fresh, stored)
    assert lost == 2
    assert sum("LOST" in line for line in lines) == 2
    assert any("causal" in line and "+0.0%  (cost 1.20, mark 1.11: MISSED)" in line for line in lines)
    # Without torch, by our own plain call.
    for row in fresh["rows"]:
        row.pop("yardstick", None)
    lines, lost = check.compare(fresh, stored)
    assert lost == 2
    assert [line for line in lines if "LOST 8.3%" in line and "causal" in line]
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    (tmp_path / "fresh.json").write_text(json.dumps(stored))
    (tmp_path / "nvidia-h200-options.json").write_text(json.dumps(stored))
    monkeypatch.setattr("sys.argv", ["check.py", str(tmp_path / "fresh.json")])
    assert check.main() == 0
    (tmp_path / "nvidia-h200-options.json").write_text(json.dumps(make_result()))
    assert check.main() == 2


@pytest.fixture
def reported(tmp_path, monkeypatch):
    """A folder of results, and what `report.py` says of it and writes into the README there."""
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")

    def store(kind, result):
        (tmp_path / f"nvidia-h200-{kind}.json").write_text(json.dumps(result))

    def run(*flags):
        command = ["report.py", "--results", str(tmp_path), "--readme", str(readme), "--docs", str(tmp_path)]
        monkeypatch.setattr("sys.argv", [*command, "--no-picture", *flags])
        return report.main(), readme.read_text()

    store("forward", make_result())
    return store, run


def test_report_writes_between_the_markers_and_again_the_same(reported):
    _, run = reported
    assert run("--check")[0] == 1
    code, text = run()
    assert code == 0
    assert text.startswith(f"before\n{report.BEGIN}\nForward, bfloat16")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "| 128 | causal | 16,384 | 400 | 64% | 1.25x |" in text
    assert "takes 80 ms where this takes 2.0 ms" in text
    assert "old" not in text
    assert run("--check") == (0, text)
    with pytest.raises(ValueError, match="bench:begin"):
        report.insert("no markers", "text")


def test_report_puts_one_kind_below_the_other(reported):
    store, run = reported
    _, without = run()
    store("options", make_options())
    code, text = run("NVIDIA H200")
    assert code == 0
    assert text.startswith(without[: -len(f"\n{report.END}\nafter\n")])
    assert (
        "| bias (1, h, s, s), bfloat16 | 8,192 | 100% | 2.42 | 1.10x | 1.45x | cuDNN, rounded | 2.00x | 1.36x |" in text
    )
    assert "| softcap | 8,192 | 100% | 2.42 | 1.10x | 1.25x | none |  |  |" in text
    assert "| window (1,024, 0) | 16,384 | 6% |" in text
    assert "ALiBi" not in text  # it has no time
    assert run("--check") == (0, text)


def test_report_refuses_what_it_cannot_read(reported):
    store, run = reported
    for kind, result in (("options", {**make_options(), "schema": 2}), ("options", make_result())):
        store(kind, result)
        with pytest.raises(SystemExit):
            run()
    store("options", make_options())
    (run_of_another_card := make_result())["card"] = "NVIDIA A100"
    store("forward", run_of_another_card)
    with pytest.raises(SystemExit):
        run()
    with pytest.raises(SystemExit):
        run("NVIDIA A100")


def test_picture_is_the_same_twice():
    pytest.importorskip("matplotlib", reason="the picture needs: pip install 'cupy-fa2[bench]'")
    bench = BENCHES["forward"]
    assert bench.picture(make_result()) == bench.picture(copy.deepcopy(make_result()))
