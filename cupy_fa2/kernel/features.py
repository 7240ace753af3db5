"""What a problem asks of its kernels beside types and sizes, and how they do it to a score.

Forward and backward kernels take the same features: `score_modifiers` is the one place that says what happens to a
score, in which order and in which unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["BANDS", "PLAIN", "Features", "ScoreArray", "feature_policies", "score_features", "score_modifiers"]

#: Which keys around its diagonal a query sees -> the C++ mask: all; none beyond a right bound; between two bounds.
BANDS = {"full": "NoMask", "causal": "CausalMask", "window": "WindowMask"}


@dataclass(frozen=True)
class ScoreArray:
    """An array over (batch, num_heads, seqlen_q, seqlen_k) that a kernel reads beside its scores: a bias or a mask.

    Attributes
    ----------
    dtype : {"f16", "bf16", "float", "bool"}
        The last for masks alone.
    rows : bool
        Whether values differ from query to query.
    pairs : bool
        Whether two adjacent keys can be read by one aligned load.
    """

    dtype: str
    rows: bool = True
    pairs: bool = True

    def arguments(self) -> str:
        """What a C++ template wants to know beside the dtype."""
        return f"{str(self.rows).lower()}, {str(self.pairs).lower()}"

    def named(self, name: str) -> str:
        """As a part of a kernel's name."""
        dtype = "" if self.dtype == "bool" else f"_{self.dtype}"
        return name + dtype + ("" if self.rows else "_row") + ("" if self.pairs else "_single")


@dataclass(frozen=True)
class Features:
    """What kernels have to be able to do. A feature that is off is not in the machine code.

    Attributes
    ----------
    band : {"full", "causal", "window"}
        Which keys a query sees: all, none more than ``window_right`` beyond its diagonal, or besides none more than
        ``window_left`` before it. One kernel serves all windows; it reads both bounds, causal ones too.
    negate : bool
        Whether scores change sign: for a negative softmax scale, where nothing takes the scale with its sign.
    softcap, alibi : bool
        Whether scores are capped, and whether they fall with the distance from the diagonal.
    scaled : bool
        Whether scores are brought to log2 before slopes and biases are added, which otherwise are divided by the
        scores' unit: for units that allow no division.
    bias, mask : ScoreArray, optional
        What is added to the scores, and what says which are hidden.
    sinks : bool
        Whether each head has a logit more, without a value.
    padded : bool
        Whether batch elements have lengths of their own.
    dropout : bool
        Whether probabilities are dropped.
    """

    band: str = "full"
    negate: bool = False
    softcap: bool = False
    scaled: bool = False
    alibi: bool = False
    bias: ScoreArray | None = None
    mask: ScoreArray | None = None
    sinks: bool = False
    padded: bool = False
    dropout: bool = False

    def __post_init__(self) -> None:
        if self.band not in BANDS:
            raise ValueError(f"band must be one of {', '.join(BANDS)}, got {self.band!r}")
        if self.mask is not None and self.mask.dtype != "bool":
            raise ValueError(f"a mask is bool, got {self.mask.dtype}")
        if self.negate and (self.softcap or self.alibi or self.bias):
            raise ValueError("softcap, alibi and bias take the scale with its sign: nothing is left to negate")

    def name_parts(self) -> list[str]:
        """As parts of a kernel's name: whatever is on, in the order of the fields."""
        parts = [] if self.band == "full" else [self.band]
        for name, value in vars(self).items():
            if isinstance(value, ScoreArray):
                parts.append(value.named(name))
            elif value is True:
                parts.append(name)
        return parts


#: None but what every kernel does.
PLAIN = Features()


def feature_policies(features: Features) -> dict[str, str]:
    """The policies that features ask of a kernel, as C++ types by the name that its ``Config`` has for them.

    Only those that differ from a kernel's defaults, which do nothing. Sinks are the epilogue's business.
    """
    policies = {}
    if features.padded:
        policies["Lengths"] = "PaddedLengths"
    if features.band != "full":
        policies["Mask"] = BANDS[features.band]
    if (modifiers := score_modifiers(features)) != "ScoreMods<>":
        policies["Score"] = modifiers
    if features.dropout:
        policies["Dropout"] = "PhiloxDropout"
    return policies


def score_modifiers(features: Features) -> str:
    """What happens to scores between Q K^T and the softmax, in order, as a C++ type (``policy/score.cuh``)."""
    mods = ["Negate"] if features.negate else []
    mods += ["Softcap"] if features.softcap else []
    mods += ["Scaled"] if features.scaled else []
    mods += [f"Alibi<{str(not (features.softcap or features.scaled)).lower()}>"] if features.alibi else []
    mods += [f"Bias<{features.bias.dtype}, {features.bias.arguments()}>"] if features.bias else []
    mods += [f"BoolMask<{features.mask.arguments()}>"] if features.mask else []
    return f"ScoreMods<{', '.join(mods)}>"


def score_features(
    softmax_scale: float, softcap: float | None, alibi: bool, bias: ScoreArray | None, mask: ScoreArray | None
) -> dict[str, Any]:
    """The fields of `Features` that say what happens to scores of this scale and cap.

    Scores leave the tensor cores as q . k or, capped, as a tanh; the softmax multiplies them by a unit that brings them
    to log2. What is added to them is divided by that unit, once, so the unit has to be positive and not extreme;
    otherwise scores are multiplied by it first (``Scaled``). Beside a bias it is not more than 1, so that the lowest
    finite bias, which some use as a mask, stays finite.
    """
    unit = math.log2(math.e) * (softmax_scale if softcap is None else softcap)
    divides = 2.0**-40 <= unit <= (2.0**40 if bias is None else 1.0)
    return {
        "negate": softmax_scale < 0 and softcap is None and not alibi and bias is None,
        "softcap": softcap is not None,
        "scaled": (alibi or bias is not None) and not divides,
        "alibi": alibi,
        "bias": bias,
        "mask": mask,
    }
