"""The ONNX operator ``Attention`` in terms of this package's calls: what a case asks for, and how it is run.

The operator's version 25 is its widest; the earlier ones lack inputs and attributes, and mean the same by the others.
"""

from __future__ import annotations

import functools
import importlib
import math
import unittest.mock
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_fa2
from cupy_fa2.testing import host

#: Inputs and outputs of the operator, by position.
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


@dataclass(frozen=True)
class Attributes:
    """Attributes of the operator, with its defaults. One that is not here cannot be passed over in silence."""

    is_causal: int = 0
    kv_num_heads: int | None = None
    left_window_size: int = -1
    q_num_heads: int | None = None
    qk_matmul_output_mode: int = 0
    right_window_size: int = -1
    scale: float | None = None
    softcap: float = 0.0
    #: Not looked at: the softmax is float32's, and what another precision changes is less than float16 inputs do.
    softmax_precision: int | None = None


@dataclass(frozen=True)
class Case:
    """One node test: the operator's inputs, attributes and expected outputs by name, absent ones left out."""

    inputs: dict[str, np.ndarray]
    attributes: Attributes
    outputs: dict[str, np.ndarray]
    rtol: float


@functools.cache
def load_cases() -> dict[str, Case]:
    """The node tests of the installed ONNX, without their expanded graphs. Collected once per process, as ONNX asks."""
    import onnx
    from onnx.backend.test.case import node as operators

    def attention_alone(package: Any) -> None:
        importlib.import_module(f"{package.__name__}.attention")

    # It would compute the test data of every operator, for seconds, and throw all but this one's away.
    with warnings.catch_warnings(), unittest.mock.patch.object(operators, "import_recursive", attention_alone):
        warnings.simplefilter("ignore")
        found = operators.collect_testcases("Attention")
    cases = {}
    for test in found:
        if "_expanded" in test.name:
            continue
        (node,) = test.model.graph.node
        ((inputs, outputs),) = test.data_sets
        cases[test.name] = Case(
            _named(INPUTS, node.input, inputs),
            Attributes(**{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}),
            _named(OUTPUTS, node.output, outputs),
            test.rtol,
        )
    return cases


def _named(names: tuple[str, ...], used: Any, arrays: Any) -> dict[str, np.ndarray]:
    """Arrays by the operator's own names; the node leaves unused positions empty."""
    present = [names[position] for position, use in enumerate(used) if use]
    return dict(zip(present, arrays, strict=True))


def run(case: Case, xp: Any, **overrides: Any) -> dict[str, np.ndarray]:
    """The outputs that the case has, from `flash_attention` on arrays of `xp`.

    float32 inputs are rounded to float16. `overrides` replace options of the call.
    """
    q, k, v = queries_keys_values(case)
    wanted = options(case)
    out, lse = cupy_fa2.flash_attention(
        *(xp.asarray(x.astype(np.float16) if x.dtype == np.float32 else x) for x in (q, k, v)),
        return_lse=True,
        **{name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in (wanted | overrides).items()},
    )
    outputs = {"Y": host(out), "present_key": k, "present_value": v}
    if case.inputs["Q"].ndim == 3:
        batch, _, seqlen, _ = out.shape
        outputs["Y"] = outputs["Y"].transpose(0, 2, 1, 3).reshape(batch, seqlen, -1)
    if "qk_matmul_output" in case.outputs:
        mode = case.attributes.qk_matmul_output_mode
        outputs["qk_matmul_output"] = stages(q, k, wanted, host(lse))[mode].astype(q.dtype)
    return {name: outputs[name] for name in case.outputs}


def queries_keys_values(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q, K and V as (batch, heads, seqlen, head_dim); the past goes before K and V."""
    inputs, attributes = case.inputs, case.attributes
    q = _heads_first(inputs["Q"], attributes.q_num_heads)
    k, v = (_heads_first(inputs[name], attributes.kv_num_heads) for name in "KV")
    if "past_key" in inputs:
        k = np.concatenate((inputs["past_key"], k), axis=2)
        v = np.concatenate((inputs["past_value"], v), axis=2)
    return q, k, v


def _heads_first(x: np.ndarray, num_heads: int | None) -> np.ndarray:
    """Four axes are as wanted, three are (batch, seqlen, heads * head_dim)."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], num_heads, -1).transpose(0, 2, 1, 3)


def options(case: Case) -> dict[str, Any]:
    """Keyword options of the call that the case amounts to, arrays still NumPy's."""
    inputs, attributes = case.inputs, case.attributes
    q, k, _ = queries_keys_values(case)
    wanted: dict[str, Any] = {
        "layout": "bhsd",
        "out_dtype": q.dtype,
        "causal": bool(attributes.is_causal),
        "align": _align(inputs, q.shape[2]),
        "softmax_scale": attributes.scale,
        "softcap": attributes.softcap or None,
        "window": _window(attributes),
    }
    if "nonpad_kv_seqlen" in inputs:
        wanted["seqlens_k"] = inputs["nonpad_kv_seqlen"]
    if "attn_mask" in inputs:
        values = _padded(inputs["attn_mask"], k.shape[2])
        wanted["mask" if values.dtype == bool else "bias"] = values
    return wanted


def _align(inputs: dict[str, np.ndarray], seqlen_q: int) -> int | np.ndarray:
    """The queries come after the past or, where K and V are a cache filled so far, last in it; else they start it."""
    if "nonpad_kv_seqlen" in inputs:
        return inputs["nonpad_kv_seqlen"] - seqlen_q
    return inputs["past_key"].shape[2] if "past_key" in inputs else 0


def _window(attributes: Attributes) -> tuple[int | None, int | None]:
    left, right = (None if n == -1 else n for n in (attributes.left_window_size, attributes.right_window_size))
    return left, right


def _padded(mask: np.ndarray, seqlen_k: int) -> np.ndarray:
    """Keys beyond a mask are hidden by it."""
    hide = False if mask.dtype == bool else -np.inf
    beyond = [(0, 0)] * (mask.ndim - 1) + [(0, seqlen_k - mask.shape[-1])]
    return np.pad(mask, beyond, constant_values=hide)


def stages(q: np.ndarray, k: np.ndarray, wanted: dict[str, Any], lse: np.ndarray) -> tuple[np.ndarray, ...]:
    """What lies between Q K^T and the product with V, in float64, in the order of ``qk_matmul_output_mode``.

    Scores, the same capped, biased and with hidden keys at -inf, and softmax. A fused kernel has these nowhere in one
    place, but the softmax follows from its `lse`.
    """
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scale = 1 / math.sqrt(q.shape[3]) if wanted["softmax_scale"] is None else wanted["softmax_scale"]
    raw = scale * (q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3))
    cap = wanted["softcap"]
    capped = raw if cap is None else cap * np.tanh(raw / cap)
    biased = capped + np.asarray(wanted.get("bias", 0), np.float64)
    masked = np.where(_visible(wanted, *raw.shape[2:]), biased, -np.inf)
    lse = np.where(lse == -np.inf, np.inf, lse)[..., None]  # nothing seen: exp(-inf - inf) is 0
    return raw, capped, masked, np.exp(masked - lse)


def _visible(wanted: dict[str, Any], seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Which key each query sees, broadcastable to (batch, heads, seqlen_q, seqlen_k)."""
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    ahead = j - i - np.reshape(wanted["align"], (-1, 1, 1, 1))
    left, right = wanted["window"]
    visible = np.asarray(wanted.get("mask", True)) & (j < np.reshape(wanted.get("seqlens_k", seqlen_k), (-1, 1, 1, 1)))
    if wanted["causal"]:
        visible = visible & (ahead <= 0)
    if left is not None:
        visible = visible & (ahead >= -left)
    if right is not None:
        visible = visible & (ahead <= right)
    return visible
