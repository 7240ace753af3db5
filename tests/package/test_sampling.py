"""What a choice of tests by -m means."""

import pytest
from sampling import by_turns, implies, sampled, sampled_rows


def test_what_an_expression_selects_only():
    for text in ("gpu", "gpu and not peers", "gpu and full", "gpu and (full or not racecheck)", "(gpu)"):
        assert implies(text, "gpu"), text
    for text in ("", "full", "not full", "not gpu", "gpu or full", "sanitize", "full and not gpu", "x(y=1)"):
        assert not implies(text, "gpu"), text
    for text in ("not full", "gpu and not full", "not (full or gpu)"):
        assert implies(text, "full", False), text
    for text in ("", "full", "gpu", "not gpu", "gpu or not full", "sanitize"):
        assert not implies(text, "full", False), text


def test_what_is_not_kept_is_full():
    def full(values):
        return [x.values for x in values if any(mark.name == "full" for mark in x.marks)]

    assert full(sampled("abc", "b")) == [("a",), ("c",)]
    assert full(sampled([1, (2, 3)], 1)) == [((2, 3),)]
    assert full(sampled_rows([(1, 2), (3, 4)], (3, 4))) == [(1, 2)]
    with pytest.raises(AssertionError):
        sampled("abc", "d")
    assert full(by_turns("ab")) == [("A100", "b"), ("H200", "a")]
    assert full(by_turns("ab", "b")) == [("A100", "b"), ("H200", "a"), ("H200", "b")]
    assert len(by_turns("ab")) == 6
