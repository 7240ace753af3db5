"""torch's `scaled_dot_product_attention`: our calls in its words, and one of its back ends at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.case import Case

from peers import Unavailable, module, tensor

__all__ = ["BACK_ENDS", "as_sdpa", "sdpa"]

#: Peer -> torch's name of the back end.
BACK_ENDS = {"flash2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


def sdpa(peer: str, q: Any, k: Any, v: Any, **options: Any) -> Callable[[], Any]:
    """A call of one back end, with torch's `options`, on torch tensors.

    Tensors and result are (batch, seqlen, heads, head_dim).
    """
    torch, attention = module("torch"), module("torch.nn.attention")
    backend = getattr(attention.SDPBackend, BACK_ENDS[peer])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Any:
        with attention.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return call


def as_sdpa(
    case: Case, q: Any, k: Any, v: Any, given: dict[str, Any]
) -> tuple[tuple[Any, Any, Any], dict[str, Any], str]:
    """The same call for torch's `scaled_dot_product_attention`: (q, k, v), its options, and in words what it rounds.

    Tensors are (batch, seqlen, heads, head_dim), as here.

    Raises
    ------
    Unavailable
        If it has no such call.
    """
    import torch

    adds = [name for name in ("window", "alibi_slopes", "bias", "mask", "sinks", "seqlens_k") if name in given]
    if "softcap" in given:
        raise Unavailable("no softcap in torch's fused back ends")
    if len(adds) + case.causal > 1:
        raise Unavailable("torch's fused back ends take one mask or bias")
    options: dict[str, Any] = {"is_causal": case.causal}
    if "dropout_p" in given:
        options["dropout_p"] = given["dropout_p"]
    note = ""
    rows, keys = (torch.arange(case.seqlen, device=q.device).reshape(shape) for shape in ((-1, 1), (1, -1)))
    if "window" in given:
        left, right = given["window"]
        options["attn_mask"] = (rows - keys <= left) & (keys - rows <= right)
    elif "alibi_slopes" in given:
        slopes = tensor(given["alibi_slopes"])
        bias = torch.empty((1, case.num_heads, case.seqlen, case.seqlen), dtype=q.dtype, device=q.device)
        for head in range(case.num_heads):  # in float32, which there is room for one head at a time
            bias[0, head] = (rows - keys).abs() * -slopes[head]
        options["attn_mask"], note = bias, f"as a bias that is rounded to {str(q.dtype).removeprefix('torch.')}"
    elif "bias" in given or "mask" in given:
        options["attn_mask"] = tensor(given.get("bias", given.get("mask")))
    elif "seqlens_k" in given:
        lengths = tensor(given["seqlens_k"])
        options["attn_mask"] = (keys < lengths.reshape(-1, 1)).reshape(case.batch, 1, 1, case.seqlen)
    elif "sinks" in given:
        # One key more, whose score is the sink and whose value is 0. Seven others are hidden: the back ends want the
        # number of keys to be a multiple of 8.
        sinks = tensor(given["sinks"])
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 8)) for x in (k, v))
        bias = torch.zeros((1, case.num_heads, 1, case.seqlen + 8), dtype=q.dtype, device=q.device)
        bias[..., case.seqlen :] = -torch.inf
        bias[0, :, 0, case.seqlen] = sinks.to(q.dtype)
        options["attn_mask"] = bias
    return (q, k, v), options, note
