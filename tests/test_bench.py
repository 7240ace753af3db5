"""The bench, as far as it runs without a GPU: its machine-code counts, its data and its verdicts."""

import copy
import itertools
import json
import runpy

import check
import ncu
import pytest
import report
import sass
import tune
from cases import cases

from cupy_fa2.compile import build
from cupy_fa2.device import named_device
from cupy_fa2.heuristics.feasible import infeasible
from cupy_fa2.plan import forward_spec
from cupy_fa2.spec import FwdTile, KernelSpec

H200 = named_device("H200")

needs_disassembler = pytest.mark.skipif(
    sass.find_tool() is None, reason="no disassembler: pip install nvidia-cuda-nvdisasm"
)


# --- machine code -------------------------------------------------------------------------------------------


@needs_disassembler
@pytest.mark.parametrize("card", ["H200", "A100"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_main_loop_is_what_the_tile_asks_for(head_dim, card):
    device = named_device(card)
    spec, _ = forward_spec(head_dim, head_dim, device)
    tile = spec.tile
    cubin = build(spec, device.target).cubin
    counts = sass.main_loop_counts(cubin, tile)
    always = sass.main_loop_counts(cubin, tile, always=True)
    rows, mma = tile.rows_per_warp, sass.mma_per_tile(tile)
    assert counts["mma"] == always["mma"] == mma
    # A B fragment of 16 x 16 serves the 16-row blocks of a warp, and ldmatrix.x4 brings one; Q is read at most once.
    assert counts["ldmatrix"] <= mma / 2 / (rows // 16) + rows // 16 * tile.head_dim // 16
    assert always["mufu"] >= rows * tile.block_n / 32  # the exps
    assert always["local"] == 0
    assert always["integer"] < 0.4 * mma
    assert counts["total"] == sum(counts[name] for name in (*sass.CLASSES, "other"))


@needs_disassembler
def test_main_loop_counts_divide_by_whole_tiles():
    tile = FwdTile(64, 32, 64, 64, 4)
    cubin = build(KernelSpec(tile, "f16", "f16"), "sm_90").cubin
    with pytest.raises(ValueError, match="multiple"):
        sass.main_loop_counts(cubin, FwdTile(64, 48, 64, 64, 4))
    with pytest.raises(RuntimeError, match="failed"):
        sass.disassemble(b"\x7fELF, but not for long")


LISTING = """
	.section	.text.flash_fwd,"ax",@progbits
flash_fwd:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*0020*/                   FSEL R4, R4, -INF, P0 ;
        /*0030*/                   FSEL R5, R5, -INF, P0 ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0050*/                   LDSM.16.M88.4 R8, [R2] ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0080*/             @!PT  LDS RZ, [RZ] ;
.L_x_2:
        /*0090*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*00a0*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*00b0*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*00c0*/                   IMAD.MOV.U32 R2, RZ, RZ, R3 ;
        /*00d0*/               @P0 BRA `(.L_x_1) ;
.L_x_3:
        /*00e0*/                   BRA `(.L_x_3);
	.section	.text.other,"ax",@progbits
        /*0000*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
"""


def test_main_loop_of_a_listing(monkeypatch):
    """The loop with the fewest instructions per mma is the main one."""
    monkeypatch.setattr(sass, "disassemble", lambda cubin: LISTING)

    def nonzero(**options):
        return {name: count for name, count in sass.main_loop_counts(b"", **options).items() if count}

    common = {"mma": 3, "ldmatrix": 1, "move": 1, "tiles": 1}
    assert nonzero() == {**common, "cp_async": 1, "control": 3, "total": 9}
    assert nonzero(always=True) == {**common, "control": 2, "total": 7}
    assert sass.classify("LDGDEPBAR") == "control"
    assert sass.classify("UIADD3") == "uniform"
    assert sass.classify("STSM.16.M88.4") == "shared"


# --- stored results -----------------------------------------------------------------------------------------


def make_result():
    def row(case):
        return {
            **{name: getattr(case, name) for name in ("dtype", "head_dim", "causal", "seqlen", "batch", "num_heads")},
            "ms": 2.0,
            "tflops": 400.0,
            "ceiling_share": 0.64,
            "ratios": {"flash2": 1.25, "cupy": 40.0},
            "messages": {"triton": "no triton"},
        }

    return {
        "schema": 1,
        "card": "NVIDIA H200",
        "driver": "580",
        "date": "2026-11-30",
        "commit": "0123456789ab",
        "versions": {"torch": "2.11", "triton": None},
        "mma_ceiling_tflops": {"bf16": 629.0},
        "rows": [row(case) for case in cases()],
    }


def test_quick_rows_are_rows():
    assert set(cases(quick=True)) < set(cases())
    assert len(set(cases())) == len(cases()) == 84
    assert {case.elements for case in cases() if case.seqlen <= 16_384} == {16_384 * 2048}


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


def test_check_exits_with_its_verdict(tmp_path, monkeypatch, capsys):
    stored, fresh = tmp_path / "stored.json", tmp_path / "fresh.json"
    stored.write_text(json.dumps(make_result()))
    monkeypatch.setattr("sys.argv", ["check.py", str(fresh), str(stored)])
    result = make_result()
    for change, code in (({}, 0), ({"card": "NVIDIA A100"}, 2), ({"schema": 2}, 2)):
        fresh.write_text(json.dumps({**result, **change}))
        assert check.main() == code
    result["rows"][5]["ratios"]["flash2"] = 1.0
    fresh.write_text(json.dumps(result))
    assert check.main() == 1
    assert "1 lost more than 3%" in capsys.readouterr().out


def test_report_writes_between_the_markers_and_again_the_same(tmp_path, monkeypatch, capsys):
    result, readme = tmp_path / "card.json", tmp_path / "README.md"
    result.write_text(json.dumps(make_result()))
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    command = ["report.py", str(result), "--readme", str(readme), "--docs", str(tmp_path), "--no-picture"]
    monkeypatch.setattr("sys.argv", [*command, "--check"])
    assert report.main() == 1
    monkeypatch.setattr("sys.argv", command)
    assert report.main() == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\nForward, bfloat16")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "| 128 | causal | 16,384 | 400 | 64% | 1.25x |" in text
    assert "old" not in text
    monkeypatch.setattr("sys.argv", [*command, "--check"])
    assert report.main() == 0
    with pytest.raises(ValueError, match="bench:begin"):
        report.insert("no markers", "text")


def test_picture_is_the_same_twice():
    pytest.importorskip("matplotlib", reason="the picture needs: pip install 'cupy-fa2[bench]'")
    assert report.picture(make_result()) == report.picture(copy.deepcopy(make_result()))


# --- the tuner ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tuner_tries_what_fits(head_dim):
    tiles = tune.candidates(head_dim, head_dim, H200, tune.SHAPES)
    assert len(set(tiles)) == len(tiles) > 10
    assert all(infeasible(tile, H200) is None for tile in tiles)
    assert forward_spec(head_dim, head_dim, H200)[0].tile in tiles
    specs = tune.variants(KernelSpec(tiles[0], "bf16", "bf16"), H200, tune.VARIANTS)
    assert KernelSpec(tiles[0], "bf16", "bf16") in specs
    assert len(set(specs)) == len(specs) > 1


def test_tuner_finds_the_fastest_in_ever_longer_rounds():
    tiles = [tile for tile in tune.candidates(64, 64, H200, tune.SHAPES) if tile.stages < 3]
    specs = [KernelSpec(tile, "bf16", "bf16") for tile in tiles]
    speed = {spec: 1 + number for number, spec in enumerate(reversed(specs))}
    rounds = []

    def measure(left, seconds):
        rounds.append((len(left), seconds))
        return {spec: speed[spec] for spec in left if speed[spec] % 7}  # some cannot run

    ranked = list(tune.halvings(specs, measure))
    assert ranked[-1] == (specs[-1], 1)
    assert len(ranked) == sum(speed[spec] % 7 > 0 for spec in specs)
    assert all(many > few and short < long for (many, short), (few, long) in itertools.pairwise(rounds))


def test_tuned_table_is_data_that_reads_back(tmp_path):
    spec = KernelSpec(FwdTile(128, 64, 128, 128, 4, last_to_first=False), "bf16", "bf16", True, min_blocks=2)
    entries = {(128, 128, True, 0): tune.entry(spec, 371.04)}
    path = tmp_path / "sm90.py"
    path.write_text(tune.render(entries, "NVIDIA H200", "2026-11-30", None))
    table = runpy.run_path(str(path))
    assert table["ENTRIES"] == entries
    assert (table["CARD"], table["COMMIT"], table["MEASURED"]) == ("NVIDIA H200", None, True)
    found = table["ENTRIES"][128, 128, True, 0]
    tile = FwdTile(head_dim=128, head_dim_v=128, **found["tile"])
    assert KernelSpec(tile, "bf16", "bf16", True, **found["spec"]) == spec


# --- the profiler's output ----------------------------------------------------------------------------------


def test_profiler_counters_are_read_and_sorted():
    names = ("Kernel Name", "gpu__time_duration.sum", *(f"stalled_{x}" for x in ("barrier", "wait", "wait_not_issued")))
    names = [
        name.replace("stalled", "smsp__average_warps_issue_stalled") + "_per_issue_active.ratio" * ("stalled" in name)
        for name in names
    ]
    text = "==PROF== Connected\nkernel of ours\n"
    for row in (names, ["", "ns", "inst", "inst", "inst"], ["flash_fwd", "2,712,345", "0.5", "1.5", "1.2"]):
        text += ",".join(f'"{cell}"' for cell in row) + "\n"
    (launch,) = ncu.parse(text)
    assert launch["gpu__time_duration.sum"] == (2_712_345.0, "ns")
    lines = ncu.describe(launch).splitlines()
    assert [line.split() for line in lines[-2:]] == [["wait", "1.50", "75.0%"], ["barrier", "0.50", "25.0%"]]
    assert ncu.parse("==ERROR== nothing") == []
