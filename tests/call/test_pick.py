"""The choice of a tile: rows in order, each with its room, by tables and by rule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from cupy_fa2.device import NAMED_DEVICES, named_device
from cupy_fa2.kernel.features import Features, ScoreArray
from cupy_fa2.kernel.forward import FwdSpec
from cupy_fa2.plan import forward_spec, tuned
from cupy_fa2.plan.by_rule import rows_by_rule
from cupy_fa2.plan.feasible import infeasible, serves
from cupy_fa2.plan.pick import pick_forward
from cupy_fa2.plan.row import Row
from cupy_fa2.plan.tuned import sm80, sm86, sm90, sm100, tuned_rows
from cupy_fa2.plan.weight import feature_names, register_weight
from cupy_fa2.problem import Structure

#: Architecture of a table's name -> the table, and cards that it serves.
TABLES = {
    80: (sm80, ("A100",)),
    86: (sm86, ("RTX 3090", "RTX 4090", "L40S", "RTX 5090")),
    90: (sm90, ("H100", "H200")),
    100: (sm100, ("B200",)),
}
DIMS = range(16, 257, 16)
BIAS, FLOAT_BIAS = ScoreArray("bf16"), ScoreArray("float")
MOST = {"softcap": True, "alibi": True, "mask": ScoreArray("bool"), "sinks": True, "dropout": True}
ASKS = [
    {},
    {"softcap": True},
    {"bias": BIAS},
    {"bias": FLOAT_BIAS},
    {"mask": ScoreArray("bool", rows=False)},
    {"dropout": True},
    {"softcap": True, "alibi": True},
    {"padded": True},
    {"bias": BIAS, "alibi": True},
    {"bias": ScoreArray("bf16", pairs=False)},
    {**MOST, "bias": BIAS},
    {**MOST, "bias": replace(BIAS, pairs=False), "mask": ScoreArray("bool", pairs=False), "scaled": True},
]


def structure(head_dim, head_dim_v=None, float_out=False, tensor_maps=True, seqlen_q=4096, **features):
    return Structure.typical(
        head_dim,
        head_dim_v,
        features=Features(**features),
        out_dtype="float" if float_out else "bf16",
        tensor_maps=tensor_maps,
        seqlen_q=seqlen_q,
    )


def name(card, *dims, **asked):
    return forward_spec(structure(*dims, **asked), named_device(card))[0].name


def entries():
    return [(arch, key) for arch, (table, _) in TABLES.items() for key in table.ROWS]


@pytest.mark.parametrize(("arch", "key"), entries(), ids=str)
def test_a_tables_rows_can_be_taken(arch, key):
    table, cards = TABLES[arch]
    head_dim, head_dim_v, _, transport = key
    rows = table.ROWS[key]
    assert len(set(rows)) == len(rows)
    for row in rows:
        tile = row.tile(head_dim, head_dim_v)
        FwdSpec(tile, "bf16", "bf16", transport=transport)
        assert all(infeasible(tile, named_device(card)) is None for card in cards)
        assert row.origin in table.ORIGINS
        assert row is rows[-1] or row.room is not None
    # The last resort takes whatever is asked.
    assert rows[-1].room is None
    assert not rows[-1].but_not
    assert serves(rows[-1].tile(head_dim, head_dim_v), Features(dropout=True))
    # Every row is taken by someone: it has room that none before it has.
    for before, after in itertools.pairwise(rows):
        assert after.room is None or after.room > before.room or before.but_not or not _takes_dropout(before, key)
    assert {origin for entry in table.ROWS.values() for row in entry for origin in [row.origin]} == set(table.ORIGINS)


def _takes_dropout(row, key):
    return serves(row.tile(*key[:2]), Features(dropout=True))


def test_cards_of_one_table_get_the_same():
    for (arch, (_, cards)), head_dim in itertools.product(TABLES.items(), (64, 96, 128, 192, 256)):
        assert arch == named_device(cards[0]).arch
        assert len({name(card, head_dim, softcap=True) for card in cards}) == 1


@pytest.mark.parametrize(
    ("card", "dims", "asked", "expected"),
    [
        ("H200", (64,), {}, "fwd_bf16_d64_128x128_w4_s2_tensor"),
        ("H200", (64,), {"alibi": True}, "fwd_bf16_d64_128x96_w4_s2_bywarp_tensor_alibi"),
        ("H200", (128,), {}, "fwd_bf16_d128_128x48_w4_s2_tensor"),
        ("H200", (128,), {"tensor_maps": False}, "fwd_bf16_d128_128x48_w4_s1"),
        ("H200", (128,), {"band": "causal"}, "fwd_bf16_d128_128x64_w4_s2_bywarp_tensor_causal"),
        ("H200", (128,), {"bias": BIAS}, "fwd_bf16_d128_128x128_w8_s2_bywarp_team2_tensor_bias_bf16"),
        ("H200", (128,), {"bias": FLOAT_BIAS}, "fwd_bf16_d128_128x96_w8_s2_bywarp_team2_tensor_bias_float"),
        (
            "H200",
            (128,),
            {"bias": BIAS, "band": "window"},
            "fwd_bf16_d128_128x64_w8_s2_bywarp_team2_tensor_window_bias_bf16",
        ),
        ("H200", (256,), {"dropout": True}, "fwd_bf16_d256_128x64_w8_s2_bywarp_team2_tensor_dropout"),
        ("H200", (256,), {"float_out": True}, "fwd_bf16_d256_128x48_w8_s2_bywarp_tensor_out32"),
        (
            "H200",
            (256,),
            {"dropout": True, "softcap": True},
            "fwd_bf16_d256_128x32_w8_s2_bywarp_tensor_softcap_dropout",
        ),
        ("A100", (64,), {"bias": BIAS}, "fwd_bf16_d64_128x48_w4_s1_bias_bf16"),
        ("A100", (128,), {"band": "causal"}, "fwd_bf16_d128_128x48_w4_s1_causal"),
        ("A100", (128,), {"band": "causal", "padded": True}, "fwd_bf16_d128_128x32_w4_s1_causal_padded"),
        ("A100", (128,), {"padded": True}, "fwd_bf16_d128_128x64_w4_s1_padded"),
        ("A100", (256,), {}, "fwd_bf16_d256_128x64_w8_s1"),
        ("RTX 4090", (32,), {}, "fwd_bf16_d32_128x64_w4_s2"),
        ("RTX 4090", (256, 64), {"mask": ScoreArray("bool")}, "fwd_bf16_d256v64_64x48_w2_s1_mask"),
        ("B200", (48, 128), {"band": "window", "padded": True}, "fwd_bf16_d48v128_128x32_w4_s2_window_padded"),
    ],
)
def test_who_gets_what(card, dims, asked, expected):
    """These were measured, or have been given out for long: whoever changes one changes results' bits."""
    assert name(card, *dims, **asked) == expected


def test_weights_are_of_what_takes_registers():
    def weight(float_out=False, transport="tensor", **features):
        return register_weight(Features(**features), float_out=float_out, transport=transport)

    assert weight() == weight(band="window", sinks=True) == 0
    assert weight(transport="cp_async", padded=True) == 1
    assert weight(softcap=True, alibi=True) == weight(bias=BIAS) == weight(dropout=True) == 2
    assert weight(mask=ScoreArray("bool", rows=False)) == 1
    assert weight(bias=replace(BIAS, pairs=False)) == 5
    assert weight(float_out=True, softcap=True) == 4


def test_features_have_the_names_that_rows_refuse():
    assert feature_names(Features("causal", padded=True)) == {"causal", "padded"}
    assert feature_names(Features(bias=FLOAT_BIAS, mask=ScoreArray("bool"))) == {
        "full", "bias", "bias_float", "mask", "mask_bool"
    }  # fmt: skip
    refused = {
        one for table, _ in TABLES.values() for rows in table.ROWS.values() for row in rows for one in row.but_not
    }
    assert refused <= feature_names(Features("window", bias=FLOAT_BIAS, padded=True, dropout=True))


class Table:
    ORIGINS = {"test": "the test's"}  # noqa: RUF012


def test_the_first_row_that_can_is_taken(monkeypatch):
    rows = (
        Row(128, 128, 4, 2, room=1, min_seqlen=1024, origin="test"),
        Row(128, 112, 4, 2, room=1, but_not=("padded",), origin="test"),
        Row(128, 96, 4, 2, room=1, origin="test"),
        Row(128, 48, 4, 2, room=3, origin="test"),
        Row(128, 32, 8, 2, origin="test", min_blocks=2),
    )
    Table.ROWS = {(64, 64, False, "cp_async"): rows}
    monkeypatch.setitem(tuned._TABLES, 80, Table)

    def keys(**asked):
        return pick_forward(structure(64, **asked), named_device("A100")).tile.block_n

    assert keys() == 128
    assert keys(seqlen_q=1023) == 112
    assert keys(seqlen_q=1023, padded=True) == 96
    assert keys(softcap=True) == keys(softcap=True, alibi=True) == 48
    assert keys(dropout=True) == 32  # numbers for 32 keys come together
    assert keys(float_out=True) == 32
    last = pick_forward(structure(64, float_out=True), named_device("A100"))
    assert (last.min_blocks, last.reason) == (2, "Of the table for sm_80 (the test's)")
    # A row that does not fit is passed over, and where none does the rules follow.
    small = replace(named_device("A100"), shared_per_block=60 * 1024, shared_per_sm=60 * 1024)
    assert pick_forward(structure(64), small).tile.block_n == 48
    assert keys(band="causal") == 64
    none = replace(small, shared_per_block=1024)
    with pytest.raises(ValueError, match=r"no tile for head_dim \(64, 64\) fits on A100: 128x128, 2 stage\(s\) needs"):
        pick_forward(structure(64), none)


@pytest.mark.parametrize("card", ["A100", "RTX 4090", "H200", "B200", "RTX 5090"])
def test_whatever_is_asked_gets_a_kernel(card):
    device = named_device(card)
    for head_dim, head_dim_v in [*((d, d) for d in DIMS), (192, 128), (64, 256), (256, 64), (256, 80), (16, 128)]:
        for asked, band, float_out in itertools.product(ASKS, ("full", "causal", "window"), (False, True)):
            one = structure(head_dim, head_dim_v, float_out, band=band, **asked)
            spec, reason = forward_spec(one, device)
            assert infeasible(spec.tile, device) is None
            assert serves(spec.tile, one.features)
            assert reason


def test_more_options_never_get_a_tile_that_holds_more():
    """Room grows down a table."""
    for device, head_dim, band in itertools.product(NAMED_DEVICES.values(), DIMS, ("full", "causal")):
        for tensor_maps in (True, False):
            some = [
                pick_forward(structure(head_dim, tensor_maps=tensor_maps, band=band, **asked), device).tile
                for asked in ({}, {**MOST, "bias": BIAS})
            ]
            sums = [tile.rows_per_warp * (tile.head_dim_v + tile.block_n) // tile.team for tile in some]
            assert sums == sorted(sums, reverse=True)


def test_rows_by_rule_fit_and_differ():
    for device, head_dim, head_dim_v, masked in itertools.product(NAMED_DEVICES.values(), DIMS, DIMS, (False, True)):
        rows = rows_by_rule(head_dim, head_dim_v, masked, device)
        assert infeasible(rows[0].tile(head_dim, head_dim_v), device) is None or rows[0].stages == 2
        assert any(row.room is None for row in rows)


def test_tables_say_where_their_rows_are_from():
    assert "measured on NVIDIA H200" in pick_forward(structure(128), named_device("H200")).reason
    assert "not timed" in pick_forward(structure(128), named_device("A100")).reason
    assert "rows per warp" in pick_forward(structure(32), named_device("A100")).reason
    assert not list(tuned_rows(87, (64, 64, False, "cp_async")))
