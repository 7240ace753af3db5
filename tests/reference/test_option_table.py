"""The table of options: a new one cannot be forgotten in it, and whoever reads it gets what it says."""

from __future__ import annotations

import doctest
from dataclasses import fields

import pytest

from cupy_fa2.kernel.features import PLAIN as NOTHING
from cupy_fa2.kernel.features import Features
from cupy_fa2.problem import Options, Problem
from cupy_fa2.testing import EVERYTHING, OPTION_EXAMPLES, OPTION_SIZES, OPTION_VARIANTS, Example, options, with_options

ALL = OPTION_EXAMPLES | OPTION_VARIANTS
PLAIN = Example("bfloat16", **OPTION_SIZES, num_heads=2, num_heads_k=1, head_dim=64, head_dim_v=64)

#: Arguments that say how arrays lie and what is returned, which no kernel does otherwise for.
OF_THE_CALL = {"layout", "out", "out_dtype", "return_lse"}


def given(*mappings):
    """The arguments that a call with these options gets beside what any call gets."""
    defaults = Options._field_defaults
    found = with_options(PLAIN, *mappings).options
    return {name for name, x in found.items() if hasattr(x, "shape") or x != defaults[name]}


def features(*mappings):
    """The fields of `Features` that these options turn on."""
    e = with_options(PLAIN, *mappings)
    asked = vars(Problem.from_arrays(*e.arrays(), Options(**e.options), addresses=(0, 0, 0, 0)).features)
    return {name for name, x in asked.items() if x != getattr(NOTHING, name)}


def test_every_argument_of_a_call_is_in_the_table():
    wanted = set(Options._fields) - OF_THE_CALL
    assert set().union(*(given(mapping) for mapping in ALL.values())) == wanted
    assert given(*OPTION_EXAMPLES.values(), EVERYTHING) == wanted
    assert given(EVERYTHING) == wanted - {"causal"}


def test_every_feature_of_a_kernel_is_in_the_table():
    assert set().union(*(features(mapping) for mapping in ALL.values())) == {f.name for f in fields(Features)}
    lacking = {"negate"}  # a scale's sign is for the others to take
    assert features(EVERYTHING) == {f.name for f in fields(Features)} - lacking


@pytest.mark.parametrize("name", OPTION_EXAMPLES)
def test_an_option_comes_alone(name):
    """And its name is that of the kernel's feature, or of the keys around the diagonal that it leaves."""
    assert given(OPTION_EXAMPLES[name])
    for other in OPTION_EXAMPLES.keys() - {name}:
        assert given(OPTION_EXAMPLES[name]).isdisjoint(given(OPTION_EXAMPLES[other]))
    others = {"softmax_scale": {"negate"}, "window": {"band"}, "causal": {"band"}}
    assert features(OPTION_EXAMPLES[name]) == others.get(name, {name})


def test_a_variant_is_one_of_an_option():
    for name, mapping in OPTION_VARIANTS.items():
        assert given(OPTION_EXAMPLES[name.split()[0]]) <= given(mapping)


def test_lengths_fit_and_what_is_by_element_is_repeated():
    small = Example("float16", 5, 14, 30, 1, 1, 16, 16)
    assert with_options(small, EVERYTHING).align == (60, -3, 60, -3, 60)
    assert with_options(small, OPTION_EXAMPLES["padded"]).seqlens_q == (12, 7, 12, 7, 12)
    assert with_options(small, {"seqlens_k": (0, 150)}).seqlens_k == (0, 30, 0, 30, 0)
    assert with_options(PLAIN, {"seqlens_k": None}).seqlens_k is None


def test_the_examples_of_the_documentation():
    assert doctest.testmod(options).failed == 0
