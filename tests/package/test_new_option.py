"""Whoever adds an option is led: each mirror that is forgotten fails a test (docs/design.md, "Adding an option").

The table of options in `cupy_fa2.testing` is guarded by tests/reference/test_option_table.py, the signature of prepared
calls by tests/call/test_prepared.py.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import cupy_fa2
from cupy_fa2 import reference
from cupy_fa2.kernel.features import BANDS, PLAIN, Features, ScoreArray, score_modifiers
from cupy_fa2.kernel.forward import FwdSpec, FwdTile
from cupy_fa2.kernel.param_struct import Source
from cupy_fa2.kernel.params import ATTENTION_PARAMS
from cupy_fa2.plan.weight import WEIGHTS, register_weight
from cupy_fa2.problem import Options
from cupy_fa2.testing import OPTION_EXAMPLES, OPTION_SIZES, Example, with_options

ROOT = Path(__file__).resolve().parents[2]

#: Arguments of a call that take the short way through a warm call: its key has them all.
SHORT_WAY = {"causal", "align", "softmax_scale", "layout", "out", "out_dtype", "return_lse"}
#: Those that say how arrays lie and what is returned; the definition and the kernels' features do not know them.
OF_THE_CALL = {"layout", "out", "out_dtype", "return_lse"}


def test_the_public_signature_is_that_of_options():
    """One list of names and defaults; the public function spells it out for whoever reads or completes it."""
    parameters = list(inspect.signature(cupy_fa2.flash_attention).parameters.values())
    assert [p.name for p in parameters[:3]] == ["q", "k", "v"]
    assert {p.name: p.default for p in parameters[3:]} == Options._field_defaults
    assert [p.name for p in parameters[3:]] == list(Options._fields)
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[3:])


@pytest.mark.parametrize("function", [reference.attention, reference.naive], ids=lambda f: f.__name__)
def test_the_definition_has_the_same_signature(function):
    given = {n: p.default for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    expected = {name: x for name, x in Options._field_defaults.items() if name not in OF_THE_CALL - {"layout"}}
    assert given == expected


@pytest.mark.parametrize("name", Options._fields)
def test_an_option_is_documented(name):
    documented = inspect.getdoc(cupy_fa2.flash_attention)
    assert documented is not None
    parameters = documented[documented.index("Parameters\n") : documented.index("Returns\n")]
    heads = [line.split(" : ")[0].split(", ") for line in parameters.splitlines() if " : " in line]
    assert name in itertools.chain.from_iterable(heads)
    readme, design = ((ROOT / path).read_text() for path in ("README.md", "docs/design.md"))
    assert f"`{name}" in readme or name in ("out", "out_dtype")
    if name not in OF_THE_CALL:
        assert f"`{name}`" in design[design.index("## Where each option lives") :]


@pytest.mark.parametrize("name", Options._fields)
def test_what_a_warm_call_looks_at_decides_its_way(name):
    """A call with an option that `plain` forgets would be answered by the kernel without it."""
    given = 0.5 if name == "dropout_p" else "top-left" if name == "align" else np.zeros(1)
    assert Options(**{name: given}).plain == (name in SHORT_WAY)
    assert Options().plain
    assert not Options(align=np.zeros(1, np.int32)).plain


def features_changed():
    """Every other value of every field of `Features`, each alone."""
    samples = {
        "band": [*BANDS],
        "bias": [ScoreArray("bf16", *flags) for flags in itertools.product((False, True), repeat=2)]
        + [ScoreArray("float")],
        "mask": [ScoreArray("bool", *flags) for flags in itertools.product((False, True), repeat=2)],
    }
    for field in fields(Features):
        for value in samples.get(field.name, [True]):
            if value != field.default:
                yield field.name, replace(PLAIN, **{field.name: value})


TILE = FwdTile(128, 64, 128, 128, 4)
SPEC = FwdSpec(TILE, "bf16", "bf16")
OTHER_TILES = {
    "block_m": 64, "block_n": 32, "head_dim": 64, "head_dim_v": 64, "num_warps": 8, "stages": 1, "slack": 0,
    "last_to_first": False, "q_kept": 16, "mask_by_warp": True,
}  # fmt: skip
OTHER_SPECS = {"out_dtype": "float", "out_vectors": False, "transport": "tensor", "min_blocks": 2}


def specs_changed():
    """Every field of a spec changed alone, whatever it is a field of."""
    yield from (replace(SPEC, features=features) for _, features in features_changed())
    yield from (replace(SPEC, tile=replace(TILE, **{name: value})) for name, value in OTHER_TILES.items())
    yield replace(SPEC, tile=replace(TILE, num_warps=8, team=2))
    yield from (replace(SPEC, **{name: value}) for name, value in OTHER_SPECS.items())
    yield replace(SPEC, dtype="f16", out_dtype="f16")


def test_no_field_of_a_spec_is_left_out_above():
    assert {*OTHER_TILES, "team"} == {f.name for f in fields(FwdTile)}
    assert {*OTHER_SPECS, "tile", "dtype", "features"} == {f.name for f in fields(FwdSpec)}
    assert {name for name, _ in features_changed()} == {f.name for f in fields(Features)}


def test_whatever_makes_another_kernel_makes_another_name_and_another_unit():
    """Plans, caches and loaders would take one kernel for another."""
    specs = [SPEC, *specs_changed()]
    assert len({spec.name for spec in specs}) == len(specs)
    assert len({spec.render() for spec in specs}) == len(specs)


def test_what_is_done_to_scores_is_a_modifier():
    """What is no modifier is another policy of the kernel: each feature shows in the unit, as one or the other."""
    modifiers = {name for name, features in features_changed() if score_modifiers(features) != score_modifiers(PLAIN)}
    assert modifiers == {"negate", "softcap", "scaled", "alibi", "bias", "mask"}


def test_every_feature_has_a_weight():
    """Or the row of tiles that has no room for it would be taken, and spill. A band's weight is in the rows' keys."""
    assert set(WEIGHTS) == {f.name for f in fields(Features)} - {"band", "bias", "mask"}
    plain = register_weight(PLAIN, float_out=False, transport="tensor")
    for name, features in features_changed():
        weight = register_weight(features, float_out=False, transport="tensor") - plain
        assert weight >= 1 if name in ("bias", "mask") else weight == WEIGHTS.get(name, 0)


def test_every_array_of_an_option_is_a_field_of_the_struct():
    arrays = {field.array: field for field in ATTENTION_PARAMS.of_source(Source.ADDRESS)}
    assert set(arrays) - {"q", "k", "v"} <= set(Options._fields)
    for field in arrays.values():
        assert not field.feature or field.feature in {f.name for f in fields(Features)}


@pytest.mark.parametrize("name", OPTION_EXAMPLES)
def test_the_definition_knows_an_option(name):
    plain = Example("bfloat16", **OPTION_SIZES, num_heads=2, num_heads_k=1, head_dim=16, head_dim_v=16)
    call = with_options(plain, OPTION_EXAMPLES[name])
    out, _ = reference.attention(*plain.arrays(), **plain.options)
    other, _ = reference.attention(*plain.arrays(), **call.options)
    assert not np.array_equal(out, other)
