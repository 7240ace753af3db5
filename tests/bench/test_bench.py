"""The tuner, as far as it runs without a GPU."""

import itertools
import json
import runpy

import pytest
import tune
from harness.case import visible_share

from cupy_fa2.compile import Binary
from cupy_fa2.device import named_device
from cupy_fa2.kernel.forward import FwdTile, KernelSpec
from cupy_fa2.plan import forward_spec
from cupy_fa2.plan.feasible import infeasible

H200 = named_device("H200")


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
    share = visible_share(sizes, (1024, 0))
    assert rows[0]["cost"] == pytest.approx(rows[0]["ms"] / share, abs=1e-3)
    tile = FwdTile(head_dim=128, head_dim_v=128, **rows[0]["tile"])
    assert KernelSpec(tile, "bf16", "bf16", window=True, **rows[0]["spec"]).name == rows[0]["name"]
    lines = capsys.readouterr().out.splitlines()
    assert sum(row["name"] in line for row in rows for line in lines) >= len(rows)
    assert any(line.startswith("  today fwd_bf16_d128") for line in lines)
