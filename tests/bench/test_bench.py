"""The bench, as far as it runs without a GPU: its machine-code counts, its data and its verdicts."""

import contextlib
import copy
import itertools
import json
import runpy
import time
from types import SimpleNamespace

import check
import ncu
import numpy as np
import options
import peers
import pytest
import report
import sass
import timing
import tune
from cases import cases

import cupy_fa2
from cupy_fa2 import reference
from cupy_fa2.compile import Binary, build
from cupy_fa2.device import named_device
from cupy_fa2.kernel.forward import FwdTile, KernelSpec
from cupy_fa2.kernel.params import FWD_PARAMS
from cupy_fa2.plan import forward_spec
from cupy_fa2.plan.feasible import infeasible

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
    assert always["mufu"] >= rows * tile.block_n / tile.team / 32  # the exps
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


# --- what options cost --------------------------------------------------------------------------------------


def small_case(dtype="bf16", causal=False, batch=2, seqlen=64, num_heads=2, head_dim=32):
    shape = (batch, seqlen, num_heads, head_dim)
    return SimpleNamespace(
        **{"dtype": dtype, "causal": causal, "batch": batch, "seqlen": seqlen, "num_heads": num_heads, "shape": shape}
    )


def small_inputs(case, dtype=None):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(case.shape, np.float32).astype(dtype or timing.DTYPES[case.dtype]) for _ in range(3)]


@pytest.mark.parametrize("option", options.OPTIONS, ids=lambda option: option.name)
def test_an_option_has_a_plan_and_stand_ins_are_shaped_like_its_arrays(option):
    plan = timing.plan_of(option.case, H200, **option.given(options.Arrays()))
    features = set(option.pieces) | ({"causal"} if option.causal else set())
    assert all(getattr(plan.spec, name) for name in features & {"softcap", "alibi", "sinks", "padded", "dropout"})
    assert (plan.spec.name == forward_spec(128, 128, H200)[0].name) == option.plain
    case = small_case()
    real, empty = option.given(options.Arrays(np), case), option.given(options.Arrays(), case)
    assert real.keys() == empty.keys()
    for name, x in real.items():
        if isinstance(x, np.ndarray):
            y = empty[name]
            assert (x.shape, x.strides, x.dtype) == (y.shape, y.strides, y.dtype)


def test_everything_together_is_right_and_wrong_results_are_found():
    case = small_case()
    q, k, v = small_inputs(case)
    (option,) = (option for option in options.OPTIONS if option.name == "everything")
    given = option.given(options.Arrays(np), case)
    out, lse = cupy_fa2.flash_attention(q, k, v, return_lse=True, **given)
    options.check(out, lse, q, k, v, False, given)
    with pytest.raises(AssertionError):
        options.check(out, lse, q, k, v, False, {**given, "softcap": 1.0})


def test_pairs_are_counted():
    row, key = np.ogrid[:50, :50]
    for causal, window in ((False, (7, 0)), (False, (3, 4)), (True, (9, 9)), (False, (50, 50))):
        seen = (row - key <= window[0]) & (key - row <= (0 if causal else window[1]))
        share = options.visible_share(small_case(causal=causal, seqlen=50), window)
        assert share == pytest.approx(seen.mean())
    assert options.visible_share(small_case(causal=True)) == 0.5  # as FLOPs are counted
    assert options.visible_share(small_case()) == 1


def make_options():
    """Every row as if options cost a tenth and torch's cuDNN twice as much; ALiBi fails."""
    result = {**make_result(), "kind": options.KIND, "rows": []}
    for option in options.OPTIONS:
        row = options.describe(option, SimpleNamespace(spec=SimpleNamespace(name="kernel")))
        result["rows"].append(row)
        if option.name == "alibi":
            row["error"] = "RuntimeError: no kernel"
            continue
        clocks = np.array([1.0, 1.1, 1.3])  # of a card that slows down
        ours = 2.0 * row["share"] * (1.0 if option.plain else 1.1) * clocks
        times = {"plain": 2.0 * clocks, "ours": ours, "yardstick": 2.5 * clocks}
        if "softcap" not in option.pieces:
            times["cudnn"] = 1.5 * clocks * (1.0 if option.plain else 2.0 * row["share"])
            times["efficient"] = 9.0 * clocks
        row["notes"], row["messages"] = {"cudnn": "rounded"} if option.name == "bias" else {}, {"flash2": "no mask"}
        options.summarise(row, times)
    options.finish(result["rows"])
    return result


def test_costs_are_over_the_plain_time_of_the_round_and_the_share():
    rows = {row["name"]: row for row in make_options()["rows"]}
    assert rows["plain"]["cost"] == 1
    for name in ("causal", "bias", "window"):
        row = rows[name]
        assert row["cost"] == pytest.approx(1.1, abs=1e-3)
        assert row["spread"] == 0  # the clocks cancel
        assert row["torch"]["cudnn"]["own"] == pytest.approx(2, abs=1e-3)
        assert row["torch"]["cudnn"]["ratio"] == pytest.approx(3 / 2.2, abs=1e-3)
        assert options.best_of_torch(row) == "cudnn"
        assert options.verdict(row) == "pass"
    assert rows["bias"]["yardstick"] == pytest.approx(2.5 / 2.2, abs=1e-4)
    assert options.best_of_torch(rows["softcap"]) is options.best_of_torch(rows["alibi"]) is None
    assert options.verdict(rows["alibi"]) == "MISS"
    assert options.verdict(rows["sinks"]) == ""
    assert options.verdict({**rows["bias"], "cost": 1.46}) == "MISS"


def test_a_table_has_every_row_and_says_why_one_failed():
    result = make_options()
    lines = options.table(result).splitlines()
    assert len(lines) == len(options.OPTIONS) + 2
    assert "ALiBi, 8,192: RuntimeError: no kernel" in lines
    (bias,) = (line for line in lines if line.startswith("bias (1, h, s, s), bfloat16"))
    assert bias.split()[6:] == ["8,192", "2.420", "1.100", "1.45", "pass", "cudnn", "3.300", "2.00", "1.36", "rounded"]
    assert len({line.index("8,192") for line in lines if "8,192" in line and "ALiBi" not in line}) == 1
    assert "no kernel" in options.line(result["rows"][3])
    assert "no flash2: no mask" in options.line(result["rows"][4])


def test_a_row_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def measure(row, option, arrays, given, wanted, seconds, flex):
        if option.name == "mask":
            raise RuntimeError("wrong")
        assert given.keys() == option.given(arrays_of()).keys()
        row["notes"], row["messages"] = {}, {"torch": "no torch"}
        options.summarise(row, {"plain": [2.0] * 5, "ours": [3.0] * 5})

    def compile_all(specs, device):
        return {spec: "no kernel" if spec.sinks else Binary(spec.name, "sm_90", b"", "", 255, 8) for spec in specs}

    pytest.importorskip("cupy")
    arrays_of = options.Arrays
    monkeypatch.setattr(options, "Arrays", lambda xp=None: arrays_of())
    monkeypatch.setattr(options, "cuda_device", lambda number: H200)
    monkeypatch.setattr(options, "describe_machine", lambda device, commit: {"card": device.name, "commit": commit})
    monkeypatch.setattr(options, "Inputs", lambda elements: SimpleNamespace(arrays=lambda case: [None] * 4))
    monkeypatch.setattr(options, "compile_all", compile_all)
    monkeypatch.setattr(options, "measure", measure)
    wanted = SimpleNamespace(commit="c0ffee", flex=0.0, deadline=0.0, peers=[], seconds=0.1)
    output = tmp_path / "card-options.json"
    result = options.run(options.OPTIONS, wanted, output, time.perf_counter())
    errors = {row["name"]: row["error"] for row in result["rows"] if "error" in row}
    assert errors == {"mask": "RuntimeError: wrong", "sinks": "no kernel", "everything": "no kernel"}
    assert json.loads(output.read_text()) == result
    assert [row["cost"] for row in result["rows"] if row["name"] in ("plain", "causal")] == [1.5, 3.0]


def test_a_row_keeps_our_time_where_torch_fails_later(monkeypatch):
    def interleaved(calls, *, seconds, min_rounds):
        rounds.append(list(calls))
        if "cudnn" in calls:
            raise MemoryError("no room")
        return {"plain": [2.0] * 5, "ours": [3.0] * 5}

    rounds = []
    case = small_case()
    arrays = [*small_inputs(case), np.empty(case.shape, timing.DTYPES["bf16"])]
    monkeypatch.setattr(options, "interleaved", interleaved)
    monkeypatch.setattr(options, "torch_calls", lambda *_: ({"cudnn": lambda: None}, {}, {"torch": "a fake"}))
    row = {"share": 1.0}
    options.measure(row, options.OPTIONS[1], arrays, {}, ["cudnn"], 0.1)
    assert rounds == [["ours", "plain", "cudnn"], ["ours", "plain"]]
    assert row["cost"] == 1.5
    assert row["messages"] == {"torch": "MemoryError: no room"}


def test_costs_are_checked_like_ratios(tmp_path, monkeypatch, capsys):
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
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    (tmp_path / "fresh.json").write_text(json.dumps(stored))
    (tmp_path / "nvidia-h200-options.json").write_text(json.dumps(stored))
    monkeypatch.setattr("sys.argv", ["check.py", str(tmp_path / "fresh.json")])
    assert check.main() == 0
    (tmp_path / "nvidia-h200-options.json").write_text(json.dumps(make_result()))
    assert check.main() == 2
    capsys.readouterr()


def test_report_puts_costs_below_where_they_are_stored(tmp_path, monkeypatch):
    result, readme = tmp_path / "card.json", tmp_path / "README.md"
    result.write_text(json.dumps(make_result()))
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    command = ["report.py", str(result), "--readme", str(readme), "--docs", str(tmp_path), "--no-picture"]
    monkeypatch.setattr("sys.argv", command)
    assert report.main() == 0
    without = readme.read_text()
    (tmp_path / "card-options.json").write_text(json.dumps(make_options()))
    assert report.main() == 0
    text = readme.read_text()
    assert text.startswith(without[: -len(f"\n{report.END}\n")])
    assert (
        "| bias (1, h, s, s), bfloat16 | 8,192 | 100% | 2.42 | 1.10x | 1.45x | cuDNN, rounded | 2.00x | 1.36x |" in text
    )
    assert "| softcap | 8,192 | 100% | 2.42 | 1.10x | 1.25x | none |  |  |" in text
    assert "| window (1,024, 0) | 16,384 | 6% |" in text
    assert "ALiBi" not in text  # it has no time
    monkeypatch.setattr("sys.argv", [*command, "--check"])
    assert report.main() == 0
    (tmp_path / "card-options.json").write_text(json.dumps({**make_options(), "schema": 2}))
    with pytest.raises(SystemExit):
        report.main()
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", [command[0], *command[2:]])
    (tmp_path / "card-options.json").write_text(json.dumps(make_options()))
    assert report.main() == 0  # the only card's


def test_time_limits_end_and_leave_nothing_behind():
    with pytest.raises(TimeoutError, match="were left"), options.time_limit(0.05):
        time.sleep(5)
    with options.time_limit(0.05):
        pass
    time.sleep(0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", options.OPTIONS, ids=lambda option: option.name)
def test_torch_is_asked_the_same(option):
    torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    attention = pytest.importorskip("torch.nn.attention.flex_attention")
    case = small_case("f16", option.causal)
    q, k, v = small_inputs(case, np.float32)
    given = option.given(options.Arrays(np), case)
    if "bias" in given:
        given["bias"] = given["bias"].astype(np.float32)
    if "window" in given:
        given["window"] = (20, 0)
    asked = {name: x for name, x in given.items() if not name.startswith("dropout")}
    expected, _ = reference.attention(q, k, v, causal=option.causal, **asked)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    answered = 0
    try:
        wanted, settings, note = options.as_sdpa(case, *tensors, given)
    except peers.Unavailable:
        assert "softcap" in given
    else:
        settings.pop("dropout_p", None)
        theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in wanted), **settings)
        np.testing.assert_allclose(theirs.transpose(1, 2).numpy(), expected, atol=1e-5)
        assert bool(note) == (option.name == "alibi")
        answered += 1
    with contextlib.suppress(peers.Unavailable):
        theirs = options.as_flex(case, *tensors, given, attention.flex_attention)()
        np.testing.assert_allclose(theirs.numpy(), expected, atol=1e-5)
        answered += 1
    assert (answered == 0) == (option.name == "everything")


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


@pytest.mark.parametrize("features", [["softcap", "bias"], ["dropout"], ["padded", "mask_keys"], ["window", "sinks"]])
def test_tuner_tries_kernels_with_features(features):
    sizes = tune.Sizes(128, 128, False, 8192)
    specs = tune.feature_specs(sizes, features, H200, tune.QUICK_SHAPES)
    (option,) = {tuple(sorted(tune.features_of(spec).items(), key=str)) for spec in specs}
    assert {name for name, value in option if value} - {"scaled"} == {name.split("_")[0] for name in features}
    assert len(set(specs)) == len(specs) > 20
    assert specs[0] == tune.asked(sizes, features, H200)
    assert {spec.kv for spec in specs} == ({"dense"} if "padded" in features else {"dense", "tensor"})
    assert any(spec.tile.q_kept for spec in specs)
    assert any(spec.tile.team == 2 for spec in specs)
    if "dropout" in features:
        assert all(spec.tile.block_n // spec.tile.team % 32 == 0 for spec in specs)
    assert not tune.entry(specs[1], 1.0)["spec"].keys() & {"softcap", "bias", "dropout", "window"}


def test_tuner_shows_where_todays_choice_stands(tmp_path, monkeypatch, capsys):
    class Search:
        def __init__(self, device, sizes, features):
            self.flop = sizes.flop((1024, 0))

        def __call__(self, specs, seconds):
            return {spec: 1.0 if spec == plain else 0.2 + 0.001 * spec.tile.threads / 32 for spec in specs}

    sizes = tune.Sizes(128, 128, False, 8192)
    plain, today = (tune.asked(sizes, features, H200) for features in ((), ("window",)))
    binary = Binary("", "sm_90", b"", "", 200, 0)
    monkeypatch.setattr(tune, "Search", Search)
    monkeypatch.setattr(tune, "compile_all", lambda specs, device: dict.fromkeys(specs, binary))
    monkeypatch.setattr(tune, "need_gpu", lambda: None)
    monkeypatch.setattr(tune, "cuda_device", lambda number: H200)
    monkeypatch.setattr(tune, "describe_machine", lambda device, commit: {"card": device.name})
    output = tmp_path / "found.json"
    command = ["tune.py", "--feature", "window", "--head-dim", "128", "--no-causal", "--quick", "--output", str(output)]
    monkeypatch.setattr("sys.argv", command)
    assert tune.main() == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["ms"] for row in rows] == sorted(row["ms"] for row in rows)
    assert {row["role"]: row["name"] for row in rows if row["role"]} == {"plain": plain.name, "today": today.name}
    share = options.visible_share(sizes, (1024, 0))
    assert rows[0]["cost"] == pytest.approx(rows[0]["ms"] / share, abs=1e-3)
    tile = FwdTile(head_dim=128, head_dim_v=128, **rows[0]["tile"])
    assert KernelSpec(tile, "bf16", "bf16", window=True, **rows[0]["spec"]).name == rows[0]["name"]
    lines = capsys.readouterr().out.splitlines()
    assert sum(row["name"] in line for row in rows for line in lines) >= len(rows)
    assert any(line.startswith("  today fwd_bf16_d128") for line in lines)


def test_a_bare_call_binds_the_arrays_of_options(monkeypatch):
    class OnDevice(np.ndarray):
        @property
        def data(self):
            return SimpleNamespace(ptr=addresses.setdefault(id(self), 4096 * (len(addresses) + 1)))

    class Kernel:
        def __init__(self, spec, device, shared_bytes):
            self.spec = spec

        def __call__(self, plan, args):
            launches.append((plan, np.frombuffer(args[: FWD_PARAMS.dtype.itemsize], FWD_PARAMS.dtype)[0]))

    addresses, launches = {}, []
    monkeypatch.setattr(timing, "CupyKernel", Kernel)
    monkeypatch.setattr(timing, "encode_cuda", lambda address, box: bytes(128))
    case = small_case(head_dim=64)
    q, k, v, out = (x.view(OnDevice) for x in [*small_inputs(case), np.empty(case.shape, timing.DTYPES["bf16"])])
    given = {}
    for name in ("window", "softcap", "alibi", "bias", "mask_keys", "sinks", "padded", "dropout"):
        given |= options.PIECES[name](options.Arrays(np), case)
    given["dropout_seed"] = np.asarray(7, np.uint64)
    given = {name: x.view(OnDevice) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    _, _, call = timing.bare_call(None, H200, q, k, v, out, False, **given)
    call()
    ((plan, params),) = launches
    assert plan.spec.window and plan.spec.padded and plan.spec.dropout  # noqa: PT018
    arrays = {"q": q, "out": out, **{name: x for name, x in given.items() if isinstance(x, np.ndarray)}}
    names = {"dropout_seed": "dropout_seed_array"}
    assert {names.get(name, name): x.data.ptr for name, x in arrays.items()} == {
        names.get(name, name): int(params[names.get(name, name)]) for name in arrays
    }
    assert params["window_left"] == 1024
    assert params["softcap"] == options.SOFTCAP


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
