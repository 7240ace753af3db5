"""The ONNX operator ``Attention`` in terms of this package's calls: what a case asks for, and how it is run.

A case is translated into the options of the documented contract, whether `flash_attention` has them yet or not;
`missing` says which it has not.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_fa2

#: Inputs and outputs of the operator, by position.
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


@dataclass(frozen=True)
class Case:
    """One node test: the operator's inputs, attributes and expected outputs by name, absent ones left out."""

    name: str
    inputs: dict[str, np.ndarray]
    attributes: dict[str, Any]
    outputs: dict[str, np.ndarray]
    rtol: float


@functools.cache
def load_cases() -> dict[str, Case]:
    """The node tests of the installed ONNX, without their expanded graphs. Collected once per process, as ONNX asks."""
    import onnx
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other operators' test data
        found = collect_testcases("Attention")
    cases = {}
    for test in found:
        if "_expanded" in test.name:
            continue
        (node,) = test.model.graph.node
        ((inputs, outputs),) = test.data_sets
        cases[test.name] = Case(
            test.name,
            _named(INPUTS, node.input, inputs),
            {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
            _named(OUTPUTS, node.output, outputs),
            test.rtol,
        )
    return cases


def _named(names: tuple[str, ...], used: Any, arrays: Any) -> dict[str, np.ndarray]:
    """Arrays by the operator's own names; the node leaves unused positions empty."""
    present = [name for name, use in zip(names, used, strict=False) if use]
    return dict(zip(present, arrays, strict=True))


def options(case: Case) -> dict[str, Any]:
    """Keyword options of the call that the case amounts to, named as in the contract."""
    at, inputs = case.attributes, case.inputs
    wanted: dict[str, Any] = {"layout": "bhsd", "out_dtype": case.outputs["Y"].dtype}
    if "scale" in at:
        wanted["softmax_scale"] = at["scale"]
    if at.get("is_causal"):
        wanted["causal"] = True
    if at.get("softcap"):
        wanted["softcap"] = at["softcap"]
    left, right = at.get("left_window_size", -1), at.get("right_window_size", -1)
    if left >= 0 or right >= 0:
        wanted["window"] = (left if left >= 0 else None, right if right >= 0 else None)
    if "nonpad_kv_seqlen" in inputs:
        wanted["seqlens_k"] = inputs["nonpad_kv_seqlen"]
    if "attn_mask" in inputs:
        wanted["mask" if inputs["attn_mask"].dtype == bool else "bias"] = inputs["attn_mask"]
    # Without a cache the diagonal starts at the first key, with one after the past.
    wanted["align"] = "top-left"
    if "nonpad_kv_seqlen" in inputs:
        wanted["align"] = inputs["nonpad_kv_seqlen"] - rows(case, "Q").shape[2]
    return wanted


def missing(case: Case) -> tuple[str, ...]:
    """What the package lacks for this case: options of `flash_attention`, entry points, outputs."""
    available = inspect.signature(cupy_fa2.flash_attention).parameters
    lacking = [name for name in options(case) if name not in available]
    if "past_key" in case.inputs and not hasattr(cupy_fa2, "flash_attention_kvcache"):
        lacking.append("flash_attention_kvcache")
    if "qk_matmul_output" in case.outputs:  # the scores, which a fused kernel never has in one place
        lacking.append("scores as an output")
    return tuple(sorted(lacking))


def rows(case: Case, name: str) -> np.ndarray:
    """Q, K or V as (batch, heads, seqlen, head_dim); three axes hold (batch, seqlen, heads * head_dim)."""
    x = case.inputs[name]
    if x.ndim == 4:
        return x
    heads = case.attributes["q_num_heads" if name == "Q" else "kv_num_heads"]
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def run(case: Case, xp: Any) -> np.ndarray:
    """The case's Y, computed by `flash_attention` on arrays of `xp`; float32 inputs are rounded to float16."""

    def half(x: np.ndarray) -> Any:
        return xp.asarray(x.astype(np.float16) if x.dtype == np.float32 else x)

    out = cupy_fa2.flash_attention(*(half(rows(case, name)) for name in "QKV"), **options(case))
    out = out if xp is np else out.get()
    if case.inputs["Q"].ndim == 3:
        batch, heads, seqlen, head_dim = out.shape
        out = out.transpose(0, 2, 1, 3).reshape(batch, seqlen, heads * head_dim)
    return out
