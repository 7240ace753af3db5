"""The tuner: what it tries, how candidates become rows, and that tables are what it writes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tune
from tuner import candidates, classes, ladder, measure, model, registers, tables, with_features
from tuner.classes import Class, Times
from tuner.ladder import Timed
from tuner.sizes import Sizes, asked
from tuner.tools import visible_share

from cupy_fa2.compile import Binary
from cupy_fa2.device import NAMED_DEVICES, named_device
from cupy_fa2.kernel.features import Features
from cupy_fa2.kernel.forward import FwdSpec, FwdTile
from cupy_fa2.plan import forward_spec
from cupy_fa2.plan.feasible import infeasible
from cupy_fa2.plan.row import Row
from cupy_fa2.plan.weight import feature_names
from cupy_fa2.problem import Structure

H200, A100 = named_device("H200"), named_device("A100")


class Book:
    """A `SpillBook` whose assembler spills where O, S and options take more than so many registers."""

    builds, versions = 0, "NVRTC 0.0"

    def __init__(self, registers=255, also=lambda spec: False):
        self.registers, self.also = registers, also

    def spills(self, specs, devices):
        return {spec: self.spilled(spec) for spec in specs}

    def spilled(self, spec):
        tile = spec.tile
        taken = tile.rows_per_warp * (tile.head_dim_v + tile.block_n) // tile.team // 32
        weight = registers.Ask(spec.features, spec.out_dtype == "float").weight(spec.transport)
        return taken + 40 + 8 * weight > self.registers or self.also(spec)

    def write(self, path=None):
        pass


# --- tables are what the tuner writes ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(tune.TABLES.glob("sm*.py")), ids=lambda path: path.stem)
def test_a_table_is_what_the_tuner_writes(path):
    assert tables.render(tables.read_table(path)) == path.read_text()


def test_a_table_reads_back(tmp_path):
    row = Row(128, 64, 4, 2, room=1, q_kept=16, but_not=("padded", "bias"), origin="one", tflops=1.5)
    other = Row(64, 32, 4, 1, last_to_first=False, but_not=("bias",), min_seqlen=512, min_blocks=2, origin="two")
    rows = {(64, 64, True, "cp_async"): (other,), (64, 64, False, "tensor"): (row, other)}
    table = tables.Table("Tiles.", {"two": "there", "one": "here", "unused": "nowhere"}, rows)
    path = tmp_path / "sm90.py"
    path.write_text(tables.render(table))
    assert tables.read_table(path) == replace(table, origins={"one": "here", "two": "there"})


# --- candidates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_is_tried_fits(head_dim):
    tiles = candidates.tiles(head_dim, head_dim, H200, candidates.SHAPES)
    assert len(set(tiles)) == len(tiles) > 10
    assert all(infeasible(tile, H200) is None for tile in tiles)
    assert forward_spec(Structure.typical(head_dim), H200)[0].tile in tiles
    spec = FwdSpec(tiles[0], "bf16", "bf16")
    specs = candidates.variants(spec, H200, candidates.VARIANTS)
    assert spec in specs
    assert len(set(specs)) == len(specs) > 1


@pytest.mark.parametrize("card", NAMED_DEVICES)
def test_the_list_says_what_would_be_tried(card, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tune.py", "--list", "--quick", "--card", card, "--head-dim", "96", "128"])
    assert tune.main() == 0
    out = capsys.readouterr().out
    assert "fwd_bf16_d96_128x64_w4_s1" in out
    assert ("_tensor" in out) == (named_device(card).arch == 90)


def test_the_model_gives_what_was_measured():
    """Of the notebook's tiles at 8,192: TFLOP/s times clocks is a constant, to some per cent."""
    found = []
    for tile, transport, tflops in (
        (FwdTile(128, 48, 128, 128, 4, 2), "tensor", 441),
        (FwdTile(128, 48, 128, 128, 4, 1), "cp_async", 423),
        (FwdTile(128, 128, 64, 64, 4, 2), "tensor", 394),
        (FwdTile(128, 64, 64, 64, 4, 2), "cp_async", 354),
        (FwdTile(128, 80, 256, 256, 8, 2), "tensor", 380),
        (FwdTile(64, 64, 256, 256, 4, 1), "cp_async", 349),
        (FwdTile(128, 64, 256, 256, 8, 2, q_kept=16, team=2), "tensor", 447),
        (FwdTile(64, 64, 256, 256, 4, 2, team=2), "tensor", 357),
    ):
        clocks = model.clocks(tile, transport, H200)
        found.append(clocks * tflops / (tile.head_dim + tile.head_dim_v))
    assert np.ptp(found) < 0.08 * np.mean(found)
    assert model.clocks(FwdTile(128, 128, 256, 256, 4, 2), "cp_async", A100) == float("inf")


# --- candidates become rows ---------------------------------------------------------------------------------------


def test_ties_are_settled_by_rules():
    tile = FwdTile(128, 64, 128, 128, 4, 2)
    other = replace(tile, block_n=48)
    three, ascending = replace(tile, stages=3), replace(tile, last_to_first=False)

    def order(*found):
        return [one.tile for one in ladder.settled([Timed(*one) for one in found])]

    assert order((tile, 1.02), (other, 1.0)) == [other, tile]
    assert order((three, 1.0), (tile, 1.009)) == [tile, three]
    assert order((ascending, 1.0), (tile, 1.009)) == [tile, ascending]
    assert order((replace(tile, q_kept=16), 1.0), (tile, 1.0))[0] == tile
    assert order((tile, 1.0), (replace(tile, mask_by_warp=True), 1.009))[1] == tile
    assert order((tile, 1.0, 2.0), (other, 1.009, 1.9)) == [other, tile]  # a tie, and faster at 512
    assert order((tile, 1.0, 2.0), (other, 1.02, 1.0)) == [tile, other]  # one row for all lengths


def rows_of(masked, transport, book, plain=None, device=H200, dims=(192, 128)):
    one = Class(*dims, masked)
    return ladder.ladder(classes.expected(one, device)[transport], masked, transport, [device], book, "test", plain)


@pytest.mark.parametrize(("masked", "transport"), list(itertools.product((False, True), ("tensor", "cp_async"))))
def test_rows_serve_what_no_faster_row_does(masked, transport):
    rows = rows_of(masked, transport, Book())
    assert rows[-1].room is None
    taken = []
    for ask in registers.asks(masked, transport):
        able = [row for row in rows if row.room is None or row.room >= ask.weight(transport)]
        row, spec = next((row, spec) for row in able if (spec := ask.spec(row.tile(192, 128), transport)))
        assert row is rows[-1] or not Book().spilled(spec)
        taken.append(row)
    assert set(taken) == set(rows)
    times = [model.clocks(row.tile(192, 128), transport, H200) for row in rows]
    assert all(after > before * 0.99 for before, after in itertools.pairwise(times))


def test_a_feature_that_alone_does_not_fit_is_refused_by_name():
    def book(*names):
        return Book(also=lambda spec: spec.tile.block_n > 32 and any(getattr(spec.features, name) for name in names))

    for name in ("padded", "bias"):
        first, *others = rows_of(True, "cp_async", book(name))
        assert first.but_not == (name,)
        assert others[-1].but_not == ()
    first, *_ = rows_of(False, "cp_async", book("padded", "softcap", "bias", "mask", "dropout"))
    assert (first.room, first.but_not) == (1, ("padded",))


def test_the_last_row_takes_what_spills_everywhere():
    rows = rows_of(True, "cp_async", Book(registers=0))
    assert [(row.room, row.but_not) for row in rows] == [(None, ())]
    assert (rows[0].block_n, rows[0].num_warps * 16) == (32, rows[0].block_m)


@pytest.mark.parametrize("masked", [False, True])
def test_plain_calls_have_one_tile_by_either_transport(masked):
    """Where the fastest with tensor copies has no registers for cp.async, or is slow with it, another is taken."""
    one, tile = Class(192, 128, masked), FwdTile(128, 48, 192, 128, 4, 2)
    small, pair = replace(tile, block_n=32), replace(tile, block_n=96, num_warps=8, team=2)

    def taken(book, *found):
        tensor = [Timed(x, ms) for x, ms, _ in found]
        cp_async = [Timed(replace(x, stages=1), ms) for x, _, ms in found]
        rows = classes.rows_of(one, {"tensor": tensor, "cp_async": cp_async}, [H200], book, "test")
        plain = [rows[192, 128, masked, transport][0].tile(192, 128) for transport in ("tensor", "cp_async")]
        assert ladder.plain_shape(plain[0]) == ladder.plain_shape(plain[1])
        return plain[0]

    assert taken(Book(), (tile, 1.0, 1.0), (small, 1.1, 1.1)) == tile
    crowded = Book(also=lambda spec: spec.transport == "cp_async" and spec.tile.block_n == 48)
    assert taken(crowded, (tile, 1.0, 1.0), (small, 1.1, 1.1)) == small
    assert taken(Book(), (pair, 1.0, 1.2), (small, 1.02, 1.0)) == small
    assert taken(Book(), (pair, 1.0, 1.02), (small, 1.02, 1.0)) == pair


def test_spills_of_any_nvrtc_count(tmp_path, monkeypatch):
    spec = FwdSpec(FwdTile(128, 64, 64, 64, 4, 2), "bf16", "bf16")
    other, third = (replace(spec, tile=replace(spec.tile, block_n=n)) for n in (48, 32))
    path = tmp_path / "spills.json"
    monkeypatch.setattr(registers, "_digest", lambda: "abc")
    path.write_text(
        json.dumps({"sources": "abc", "spills": {"1.0 sm_80": {spec.name: 8}, "1.0 sm_90": {third.name: 8}}})
    )
    spilling = {other.name: 24}

    def build(spec, arch):
        built.append((spec, arch))
        return Binary(spec.name, arch, b"", "", 255, spilling.get(spec.name, 0))

    built = []
    monkeypatch.setattr(registers, "build", build)
    monkeypatch.setattr(registers, "nvrtc_version", lambda: (2, 0))
    book = registers.SpillBook(path, threads=2)
    assert book.spills([spec, other, third], [A100]) == {spec: True, other: True, third: False}
    assert sorted(x.name for x, _ in built) == sorted([other.name, third.name])
    assert book.versions == "NVRTC 1.0, 2.0"
    book.write()
    assert json.loads(path.read_text())["spills"] == {
        "1.0 sm_80": {spec.name: 8},
        "1.0 sm_90": {third.name: 8},
        "2.0 sm_80": {other.name: 24},
    }
    monkeypatch.setattr(registers, "_digest", lambda: "of other sources")
    assert registers.SpillBook(path).spills([spec], [A100]) == {spec: False}


def test_a_row_builds_at_its_room():
    """With the NVRTC that is here: a row of each kind of table, with the heaviest options that it claims to take."""
    for card, head_dim, transport, place in (("A100", 96, "cp_async", 0), ("H200", 192, "tensor", 0)):
        device = named_device(card)
        table = tables.read_table(tune.TABLES / f"sm{device.arch}.py")
        row = table.rows[head_dim, head_dim, True, transport][place]
        fitting = [
            ask
            for ask in registers.asks(True, transport)
            if ask.weight(transport) <= row.room and feature_names(ask.features).isdisjoint(row.but_not)
        ]
        specs = [ask.spec(row.tile(head_dim, head_dim), transport) for ask in fitting[-2:]]
        assert not any(registers.SpillBook(None).spills([spec for spec in specs if spec], [device]).values())


# --- without a GPU, and on one ------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tune, "SpillBook", lambda **_: Book())
    monkeypatch.setattr(tune, "need_gpu", lambda: None)
    monkeypatch.setattr(tune, "cuda_device", lambda number: replace(H200, name="NVIDIA H200"))
    machine = {"card": "NVIDIA H200", "date": "2026-12-01", "commit": "abc"}
    monkeypatch.setattr(tune, "describe_machine", lambda device, commit: machine)
    monkeypatch.setattr(classes, "compiled", lambda specs, device: list(specs))

    def run(*words, output=tmp_path / "out"):
        monkeypatch.setattr("sys.argv", ["tune.py", *words, "--output", str(output)])
        assert tune.main() == 0
        return tables.read_table(output / "sm90.py")

    return run


def test_without_a_gpu(command):
    """Other entries stay as they are."""
    before = tables.read_table(tune.TABLES / "sm90.py")
    table = command("--without-gpu", "--head-dim", "112", "192,128")
    fresh = set(itertools.product((112,), (112,), (False, True), ("cp_async",)))
    fresh |= set(itertools.product((192,), (128,), (False, True), ("cp_async", "tensor")))
    assert table.rows.keys() == before.rows.keys() | fresh
    assert all(table.rows[key] == rows for key, rows in before.rows.items() if key not in fresh)
    assert all("not timed" in table.origins[row.origin] for key in fresh for row in table.rows[key])


class FakeSearch:
    """A card on which more keys are faster, and on which one kernel fails."""

    def __init__(self, device, sizes, features=()):
        self.sizes, self.flop = sizes, sizes.flop()

    def __call__(self, specs, seconds):
        if self.sizes.head_dim == 160:
            raise RuntimeError("no")
        return {spec: self.ms(spec) for spec in specs if spec.tile.block_n != 96}

    @staticmethod
    def ms(spec):
        return 1.0 + (spec.tile.block_m == 64) + 1 / spec.tile.block_n + (spec.transport == "cp_async") / 10


def test_on_a_gpu(command, monkeypatch, tmp_path, capsys):
    """Times decide, failures do not stop it, and what was timed serves again where there is no GPU."""
    monkeypatch.setattr(classes, "Search", FakeSearch)
    before = tables.read_table(tune.TABLES / "sm90.py")
    table = command("--head-dim", "160", "192,128", "--no-causal")
    key = (160, 160, False, "cp_async")
    assert table.rows[key] == before.rows[key]
    for transport in ("tensor", "cp_async"):
        rows = table.rows[192, 128, False, transport]
        assert "timed on NVIDIA H200, 2026-12-01, abc" in table.origins[rows[0].origin]
        tile = rows[0].tile(192, 128)
        assert rows[0].tflops == round(Sizes(192, 128, False, 8192).flop() / FakeSearch.ms(
            SimpleNamespace(tile=tile, transport=transport)) / 1e9, 1)  # fmt: skip
        assert 96 not in [row.block_n for row in rows]
    lines = capsys.readouterr().out.splitlines()
    assert any(line == "d192v128, tensor" for line in lines)
    times = Times.read(tmp_path / "out" / "nvidia-h200-tiles.json")
    assert times.result() == json.loads((tmp_path / "out" / "nvidia-h200-tiles.json").read_text())
    (tmp_path / "out").rename(tmp_path / "results")
    again = command("--without-gpu", "--head-dim", "192,128", "--no-causal", output=tmp_path / "again")
    for transport in ("tensor", "cp_async"):
        key = (192, 128, False, transport)
        assert [replace(row, origin="") for row in again.rows[key]] == [
            replace(row, origin="") for row in table.rows[key]
        ]


def test_a_budget_bounds_it(command, monkeypatch, tmp_path):
    monkeypatch.setattr(classes, "Search", FakeSearch)
    monkeypatch.setattr(tune, "write", lambda *args: pytest.fail("nothing is written"))
    path = tmp_path / "out" / "nvidia-h200-tiles.json"
    with pytest.raises(FileNotFoundError):  # of the table
        command("--head-dim", "192,128", "--budget", "0")
    assert not path.exists()
    clock = itertools.count()  # a second later each time it is asked
    monkeypatch.setattr(tune.time, "perf_counter", lambda: float(next(clock)))
    books = [registers.SpillBook(None, deadline=3.0)]
    monkeypatch.setattr(tune, "SpillBook", lambda **_: books[0])
    with pytest.raises(FileNotFoundError):
        command("--head-dim", "192,128", "--budget", "3")
    assert {one.masked for one, _ in Times.read(path).found} == {False}
    assert books[0].builds == 0


def test_the_fastest_is_found_in_ever_longer_rounds():
    specs = [FwdSpec(tile, "bf16", "bf16") for tile in candidates.tiles(64, 64, H200, candidates.FEW)]
    speed = {spec: 1 + number for number, spec in enumerate(reversed(specs))}
    rounds = []

    def timed(left, seconds):
        rounds.append((len(left), seconds))
        return {spec: speed[spec] for spec in left if speed[spec] % 7}  # some cannot run

    ranked = list(measure.halvings(specs, timed))
    assert ranked[-1] == (specs[-1], 1)
    assert len(ranked) == sum(speed[spec] % 7 > 0 for spec in specs)
    assert all(many > few and short < long for (many, short), (few, long) in itertools.pairwise(rounds))


# --- kernels with features ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [["softcap", "bias"], ["dropout"], ["padded", "mask_keys"], ["window", "sinks"]])
def test_kernels_with_features_are_tried(features):
    sizes = Sizes(128, 128, False, 8192)
    specs = with_features.feature_specs(sizes, features, H200, candidates.SHAPES)
    (option,) = {spec.features for spec in specs}
    names = {name for name, value in vars(option).items() if value} - {"scaled", "band"}
    names |= {option.band} - {"full"}
    assert names == {name.split("_")[0] for name in features}
    assert len(set(specs)) == len(specs) > 20
    assert specs[0] == asked(sizes, features, H200)
    assert {spec.transport for spec in specs} == ({"cp_async"} if "padded" in features else {"cp_async", "tensor"})
    assert any(spec.tile.q_kept for spec in specs)
    assert any(spec.tile.team == 2 for spec in specs)
    if "dropout" in features:
        assert all(spec.tile.block_n // spec.tile.team % 32 == 0 for spec in specs)


def test_it_is_shown_where_todays_choice_stands(tmp_path, monkeypatch, capsys):
    class Search:
        def __init__(self, device, sizes, features):
            self.flop = sizes.flop((1024, 0))

        def __call__(self, specs, seconds):
            return {spec: 1.0 if spec == plain else 0.2 + 0.001 * spec.tile.threads / 32 for spec in specs}

    sizes = Sizes(128, 128, False, 8192)
    plain, today = (asked(sizes, features, H200) for features in ((), ("window",)))
    built = Binary("", "sm_90", b"", "", 200, 0)
    monkeypatch.setattr(with_features, "Search", Search)
    monkeypatch.setattr(with_features, "compiled", lambda specs, device: specs)
    monkeypatch.setattr(with_features, "compile_all", lambda specs, device: dict.fromkeys(specs, built))
    monkeypatch.setattr(tune, "need_gpu", lambda: None)
    monkeypatch.setattr(tune, "cuda_device", lambda number: H200)
    monkeypatch.setattr(tune, "describe_machine", lambda device, commit: {"card": device.name})
    output = tmp_path / "found.json"
    words = ["--feature", "window", "--head-dim", "128", "--no-causal", "--quick", "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["tune.py", *words])
    assert tune.main() == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["ms"] for row in rows] == sorted(row["ms"] for row in rows)
    assert {row["role"]: row["name"] for row in rows if row["role"]} == {"plain": plain.name, "today": today.name}
    assert rows[0]["cost"] == pytest.approx(rows[0]["ms"] / visible_share(sizes, (1024, 0)), abs=1e-3)
    tile = FwdTile(head_dim=128, head_dim_v=128, **rows[0]["tile"])
    assert FwdSpec(tile, "bf16", "bf16", Features("window"), **rows[0]["spec"]).name == rows[0]["name"]
    lines = capsys.readouterr().out.splitlines()
    assert sum(row["name"] in line for row in rows for line in lines) >= len(rows)
    assert any(line.startswith("  today fwd_bf16_d128") for line in lines)
