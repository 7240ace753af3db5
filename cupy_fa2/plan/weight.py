"""How many registers a call's options take beside the tiles: what decides which rows of a table have room for it."""

from __future__ import annotations

from cupy_fa2.kernel.features import Features

__all__ = ["feature_names", "register_weight"]


def register_weight(features: Features, *, float_out: bool, transport: str) -> int:
    """The weight of a call, in a coarse unit; a row's `room` is the largest one that it takes without spills.

    Masks, sinks and lengths weigh nothing: rows that have no registers left for one of them say so (`Row.but_not`).
    """
    modifiers = (features.negate, features.softcap, features.scaled, features.alibi)
    # A value of its own for each query and not for each key alone; two loads in place of one, with their addresses.
    arrays = (1 + x.rows + 3 * (not x.pairs) for x in (features.bias, features.mask) if x is not None)
    weight = sum(modifiers) + sum(arrays) + 2 * features.dropout
    # Second sums; and the addresses that cp.async wants of every thread.
    return weight + 3 * float_out + (transport == "cp_async")


def feature_names(features: Features) -> frozenset[str]:
    """Features by the names that `Row.but_not` has: ``"causal"``, ``"padded"``, ``"bias"``, ``"bias_float"``, ..."""
    names = {name for name, value in vars(features).items() if value and name != "band"}
    arrays = {"bias": features.bias, "mask": features.mask}
    return frozenset(names | {features.band} | {f"{name}_{x.dtype}" for name, x in arrays.items() if x is not None})
