"""The node tests of the ONNX operator ``Attention``: those that this package can express pass, the others are listed.

The lists are exact, for one ONNX release: a case that becomes expressible fails `test_every_case_has_its_place` until
it moves to `EXPRESSIBLE`, and so does a case that a new ONNX brings.
"""

import numpy as np
import onnx_adapter as adapter
import pytest

pytest.importorskip("onnx", reason="the ONNX node tests need: pip install 'cupy-fa2[test]'")

ATOL = 5e-3  # float32 cases run in float16

EXPRESSIBLE = [
    "test_attention_4d",
    "test_attention_4d_fp16",
    "test_attention_4d_gqa",
    "test_attention_4d_diff_heads_sizes",
    "test_attention_4d_scaled",
    "test_attention_4d_gqa_scaled",
    "test_attention_4d_diff_heads_sizes_scaled",
    "test_attention_4d_causal",
    "test_attention_4d_gqa_causal",
    "test_attention_4d_diff_heads_sizes_causal",
    "test_attention_3d",
    "test_attention_3d_gqa",
    "test_attention_3d_diff_heads_sizes",
    "test_attention_3d_scaled",
    "test_attention_3d_gqa_scaled",
    "test_attention_3d_diff_heads_sizes_scaled",
    "test_attention_3d_causal",
    "test_attention_3d_gqa_causal",
    "test_attention_3d_diff_heads_sizes_causal",
    "test_attention_3d_transpose_verification",
    "test_attention_4d_causal_bf16",
    "test_attention_4d_causal_fp16",
    "test_attention_3d_causal_bf16",
    "test_attention_local_window_default",
]

#: What is missing -> the cases that wait for it.
PENDING = {
    ("bias",): [
        "test_attention_4d_attn_mask",
        "test_attention_4d_attn_mask_3d",
        "test_attention_4d_attn_mask_3d_causal",
        "test_attention_4d_attn_mask_4d",
        "test_attention_4d_attn_mask_4d_causal",
        "test_attention_4d_gqa_attn_mask",
        "test_attention_4d_diff_heads_sizes_attn_mask",
        "test_attention_3d_attn_mask",
        "test_attention_3d_gqa_attn_mask",
        "test_attention_3d_diff_heads_sizes_attn_mask",
        "test_attention_4d_attn_mask_causal_bf16",
    ],
    ("bias", "flash_attention_kvcache"): [
        "test_attention_4d_with_past_and_present",
        "test_attention_4d_gqa_with_past_and_present",
        "test_attention_4d_gqa_with_past_and_present_fp16",
        "test_attention_4d_diff_heads_with_past_and_present",
        "test_attention_4d_diff_heads_with_past_and_present_mask3d",
        "test_attention_4d_diff_heads_with_past_and_present_mask4d",
        "test_attention_3d_with_past_and_present",
        "test_attention_3d_gqa_with_past_and_present",
        "test_attention_3d_diff_heads_with_past_and_present",
    ],
    ("bias", "flash_attention_kvcache", "scores as an output"): [
        "test_attention_4d_with_past_and_present_qk_matmul_bias",
        "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask",
        "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask",
        "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
        "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
        "test_attention_4d_with_past_and_present_qk_matmul",
        "test_attention_3d_with_past_and_present_qk_matmul",
        "test_attention_3d_with_past_and_present_qk_matmul_bias",
        "test_attention_3d_with_past_and_present_qk_matmul_softmax",
    ],
    ("bias", "flash_attention_kvcache", "scores as an output", "softcap"): [
        "test_attention_3d_with_past_and_present_qk_matmul_softcap",
    ],
    ("bias", "scores as an output"): [
        "test_attention_4d_with_qk_matmul_bias",
        "test_attention_4d_with_qk_matmul_softmax",
    ],
    ("bias", "scores as an output", "softcap"): [
        "test_attention_4d_with_qk_matmul_softcap",
    ],
    ("bias", "seqlens_k"): [
        "test_attention_4d_diff_heads_mask4d_padded_kv",
        "test_attention_4d_padded_kv_bf16",
        "test_attention_4d_causal_padded_kv_bf16",
    ],
    ("bias", "seqlens_k", "window"): [
        "test_attention_local_window_ext_cache_rank3_head_mask",
        "test_attention_local_window_ext_cache_rank4_batch_mask",
        "test_attention_local_window_ext_cache_rank2_mask",
        "test_attention_local_window_ext_cache_float16_mask",
    ],
    ("bias", "softcap"): [
        "test_attention_4d_softcap_neginf_mask",
        "test_attention_4d_softcap_neginf_mask_poison",
    ],
    ("flash_attention_kvcache",): [
        "test_attention_4d_causal_with_past_and_present",
    ],
    ("flash_attention_kvcache", "window"): [
        "test_attention_local_window_with_past",
    ],
    ("mask",): [
        "test_attention_4d_attn_mask_bool",
        "test_attention_4d_attn_mask_bool_4d",
        "test_attention_causal_boolmask_nan_robustness",
        "test_attention_23_boolmask_fullymasked_row_nan_robustness",
    ],
    ("mask", "scores as an output"): [
        "test_attention_23_fullymasked_qk_matmul_output_mode3_zero",
        "test_attention_24_fullymasked_qk_matmul_output_mode3_zero",
        "test_attention_24_qk_matmul_output_mode3_softmax_precision",
    ],
    ("mask", "scores as an output", "softcap", "window"): [
        "test_attention_local_window_gqa_rank4_mask",
    ],
    ("mask", "seqlens_k"): [
        "test_attention_4d_causal_nonpad_attn_mask_composition",
    ],
    ("mask", "window"): [
        "test_attention_local_window_rank1_boolean_mask",
    ],
    ("scores as an output",): [
        "test_attention_4d_with_qk_matmul",
    ],
    ("seqlens_k",): [
        "test_attention_4d_gqa_causal_nonpad_decode",
        "test_attention_4d_gqa_causal_nonpad_decode_fp16",
        "test_attention_4d_causal_nonpad_continued_prefill",
        "test_attention_4d_causal_nonpad_negative_offset_structural_empty",
        "test_attention_4d_causal_nonpad_batch_prefill",
    ],
    ("softcap",): [
        "test_attention_4d_softcap",
        "test_attention_4d_gqa_softcap",
        "test_attention_4d_diff_heads_sizes_softcap",
        "test_attention_3d_softcap",
        "test_attention_3d_gqa_softcap",
        "test_attention_3d_diff_heads_sizes_softcap",
    ],
    ("window",): [
        "test_attention_local_window",
        "test_attention_bidirectional_window",
        "test_attention_3d_local_window",
    ],
}


@pytest.fixture(scope="module")
def cases():
    return adapter.load_cases()


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_case(xp, cases, name):
    case = cases[name]
    expected = case.outputs["Y"]
    out = adapter.run(case, xp)
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    np.testing.assert_allclose(out.astype(np.float64), expected.astype(np.float64), atol=ATOL, rtol=case.rtol)


def test_every_case_has_its_place(cases):
    found = {name: adapter.missing(case) for name, case in cases.items()}
    listed = dict.fromkeys(EXPRESSIBLE, ())
    listed.update({name: lacking for lacking, names in PENDING.items() for name in names})
    assert found == listed
