"""The node tests of the ONNX operator ``Attention``, all of them, through `flash_attention`.

The list is exact, for one ONNX release: `test_the_cases_are_all_there` fails where another release has other ones.
"""

import dataclasses

import numpy as np
import onnx_adapter as adapter
import pytest
from sampling import sampled

onnx = pytest.importorskip("onnx", reason="the ONNX node tests need: pip install 'cupy-fa2[test]'")

# By the case's dtype; rtol is the case's own, 1e-3. float32 cases run in float16. Some expected values of bfloat16 are
# off by most of an ulp, as every step before them was rounded.
ATOL = {"float32": 1e-3, "float16": 1e-3, "bfloat16": 5e-3}

CASES = [
    "4d",
    "4d_fp16",
    "4d_gqa",
    "4d_diff_heads_sizes",
    "4d_scaled",
    "4d_gqa_scaled",
    "4d_diff_heads_sizes_scaled",
    "4d_causal",
    "4d_gqa_causal",
    "4d_diff_heads_sizes_causal",
    "4d_attn_mask",
    "4d_attn_mask_3d",
    "4d_attn_mask_3d_causal",
    "4d_attn_mask_4d",
    "4d_attn_mask_4d_causal",
    "4d_attn_mask_bool",
    "4d_attn_mask_bool_4d",
    "4d_gqa_attn_mask",
    "4d_diff_heads_sizes_attn_mask",
    "4d_with_past_and_present",
    "4d_gqa_with_past_and_present",
    "4d_gqa_with_past_and_present_fp16",
    "4d_diff_heads_with_past_and_present",
    "4d_diff_heads_with_past_and_present_mask3d",
    "4d_diff_heads_with_past_and_present_mask4d",
    "4d_softcap",
    "4d_gqa_softcap",
    "4d_diff_heads_sizes_softcap",
    "4d_with_qk_matmul",
    "4d_with_qk_matmul_bias",
    "4d_with_qk_matmul_softcap",
    "4d_with_qk_matmul_softmax",
    "4d_with_past_and_present_qk_matmul_bias",
    "4d_with_past_and_present_qk_matmul_bias_3d_mask",
    "4d_with_past_and_present_qk_matmul_bias_4d_mask",
    "4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
    "4d_with_past_and_present_qk_matmul",
    "3d",
    "3d_gqa",
    "3d_diff_heads_sizes",
    "3d_scaled",
    "3d_gqa_scaled",
    "3d_diff_heads_sizes_scaled",
    "3d_causal",
    "3d_gqa_causal",
    "3d_diff_heads_sizes_causal",
    "3d_attn_mask",
    "3d_gqa_attn_mask",
    "3d_diff_heads_sizes_attn_mask",
    "3d_softcap",
    "3d_gqa_softcap",
    "3d_diff_heads_sizes_softcap",
    "3d_with_past_and_present",
    "3d_gqa_with_past_and_present",
    "3d_diff_heads_with_past_and_present",
    "3d_with_past_and_present_qk_matmul",
    "3d_with_past_and_present_qk_matmul_bias",
    "3d_with_past_and_present_qk_matmul_softcap",
    "3d_with_past_and_present_qk_matmul_softmax",
    "3d_transpose_verification",
    "4d_diff_heads_mask4d_padded_kv",
    "4d_causal_bf16",
    "4d_causal_fp16",
    "4d_padded_kv_bf16",
    "4d_causal_padded_kv_bf16",
    "4d_attn_mask_causal_bf16",
    "3d_causal_bf16",
    "4d_softcap_neginf_mask",
    "4d_softcap_neginf_mask_poison",
    "4d_gqa_causal_nonpad_decode",
    "4d_gqa_causal_nonpad_decode_fp16",
    "4d_causal_nonpad_continued_prefill",
    "4d_causal_with_past_and_present",
    "causal_boolmask_nan_robustness",
    "23_boolmask_fullymasked_row_nan_robustness",
    "4d_causal_nonpad_negative_offset_structural_empty",
    "23_fullymasked_qk_matmul_output_mode3_zero",
    "24_fullymasked_qk_matmul_output_mode3_zero",
    "24_qk_matmul_output_mode3_softmax_precision",
    "4d_causal_nonpad_attn_mask_composition",
    "4d_causal_nonpad_batch_prefill",
    "local_window",
    "bidirectional_window",
    "local_window_default",
    "local_window_rank1_boolean_mask",
    "local_window_with_past",
    "local_window_ext_cache_rank3_head_mask",
    "local_window_ext_cache_rank4_batch_mask",
    "local_window_ext_cache_rank2_mask",
    "local_window_ext_cache_float16_mask",
    "3d_local_window",
    "local_window_gqa_rank4_mask",
]

#: By default: each input, output and attribute of the operator in the fewest kernels.
STRONG = [
    "4d",
    "4d_gqa_scaled",
    "4d_attn_mask_3d_causal",
    "4d_attn_mask_bool_4d",
    "4d_gqa_with_past_and_present_fp16",
    "4d_gqa_softcap",
    "4d_with_qk_matmul_softmax",
    "4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
    "3d_diff_heads_sizes_causal",
    "3d_transpose_verification",
    "4d_causal_padded_kv_bf16",
    "4d_softcap_neginf_mask_poison",
    "4d_gqa_causal_nonpad_decode",
    "23_boolmask_fullymasked_row_nan_robustness",
    "24_fullymasked_qk_matmul_output_mode3_zero",
    "local_window_with_past",
    "local_window_ext_cache_rank2_mask",
]

#: Words in the names of the cases that have a nonpad_kv_seqlen.
PARTLY_FILLED = ("nonpad", "padded_kv", "ext_cache")
PARTLY = [name for name in CASES if any(word in name for word in PARTLY_FILLED)]


@pytest.fixture(scope="module")
def cases():
    return adapter.load_cases()


@pytest.mark.parametrize("name", sampled(CASES, *STRONG))
def test_case(xp, cases, name):
    check(cases[f"test_attention_{name}"], xp)


@pytest.mark.parametrize("name", sampled(PARTLY, "4d_causal_padded_kv_bf16", "local_window_ext_cache_rank2_mask"))
def test_nothing_comes_from_beyond_the_filled_end(xp, cases, name):
    """NaN there: most of these cases hide by causal=True what the lengths hide. "bottom-right" counts from that end."""
    case = cases[f"test_attention_{name}"]
    filled = case.inputs["nonpad_kv_seqlen"][:, None, None, None]
    poisoned = {
        operand: np.where(np.arange(x.shape[2])[:, None] < filled, x, x.dtype.type(np.nan))
        for operand, x in case.inputs.items()
        if operand in ("K", "V")
    }
    check(dataclasses.replace(case, inputs=case.inputs | poisoned), xp, align="bottom-right")


def check(case, xp, **overrides):
    outputs = adapter.run(case, xp, **overrides)
    for name, expected in case.outputs.items():
        out = outputs[name]
        assert out.shape == expected.shape
        assert out.dtype == expected.dtype
        if name.startswith("present"):
            np.testing.assert_array_equal(out, expected)
        else:
            atol = ATOL[expected.dtype.name]
            np.testing.assert_allclose(out.astype(np.float64), expected.astype(np.float64), rtol=case.rtol, atol=atol)


def test_the_cases_are_all_there(cases):
    assert len(CASES) == 93
    assert [f"test_attention_{name}" for name in CASES] == list(cases)
    for name, case in cases.items():
        assert any(word in name for word in PARTLY_FILLED) == ("nonpad_kv_seqlen" in case.inputs)


def test_the_adapter_knows_the_whole_operator():
    """What a version of the operator has beyond the adapter, cases may use and the adapter would pass over."""
    schemas = [s for s in onnx.defs.get_all_schemas_with_history() if (s.domain, s.name) == ("", "Attention")]
    assert [s.since_version for s in schemas] == [23, 24, 25]
    defaults = dataclasses.asdict(adapter.Attributes())
    for schema in schemas:
        inputs, outputs = ([x.name for x in xs] for xs in (schema.inputs, schema.outputs))
        assert inputs == list(adapter.INPUTS[: len(inputs)])
        assert outputs == list(adapter.OUTPUTS)
        for name, attribute in schema.attributes.items():
            value = onnx.helper.get_attribute_value(attribute.default_value) if attribute.default_value.name else None
            assert defaults[name] == value
