"""How many registers a call's options take beside the tiles: what decides which rows of a table have room for it."""

from __future__ import annotations

from cupy_fa2.kernel.features import Features, ScoreArray

__all__ = ["WEIGHTS", "feature_names", "register_weight"]

#: What a feature that is on weighs, in a coarse unit. A row that has no registers left for one that weighs nothing, or
#: for a band, says so (`Row.but_not`).
WEIGHTS = {"negate": 1, "softcap": 1, "scaled": 1, "alibi": 1, "sinks": 0, "padded": 0, "dropout": 2}


def register_weight(features: Features, *, float_out: bool, transport: str) -> int:
    """The weight of a call; a row's `room` is the largest one that it takes without spills."""
    weight = 0
    for name, value in vars(features).items():
        if value is True:
            weight += WEIGHTS[name]
        elif isinstance(value, ScoreArray):
            # A value of its own for each query and not for each key alone; two loads in place of one, with addresses.
            weight += 1 + value.rows + 3 * (not value.pairs)
    # Second sums; and the addresses that cp.async wants of every thread.
    return weight + 3 * float_out + (transport == "cp_async")


def feature_names(features: Features) -> frozenset[str]:
    """Features by the names that `Row.but_not` has: ``"causal"``, ``"padded"``, ``"bias"``, ``"bias_float"``, ..."""
    names = {name for name, value in vars(features).items() if value and name != "band"}
    arrays = {"bias": features.bias, "mask": features.mask}
    return frozenset(names | {features.band} | {f"{name}_{x.dtype}" for name, x in arrays.items() if x is not None})
