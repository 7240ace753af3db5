"""From a problem to a launch: which kernel, which grid, which arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cupy_fa2.device import Device
from cupy_fa2.kernel.forward import Features, KernelSpec
from cupy_fa2.kernel.params import ABI_VERSION, FWD_PARAMS, FWD_TENSOR_PARAMS
from cupy_fa2.plan.feasible import accumulator_registers, blocks_by_shared_memory
from cupy_fa2.plan.pick import pick_forward
from cupy_fa2.problem import Problem

__all__ = ["MAX_GRID", "Plan", "encode_forward", "forward_spec", "heads_per_group", "plan_forward"]

#: Blocks along x, the one grid dimension that is used; the others end at 65,535.
MAX_GRID = 2**31 - 1

#: Of short sequences more heads would fit L2, and are slower: docs/notebook.md, 25.
MOST_HEADS_PER_GROUP = 32


@dataclass(frozen=True)
class Plan:
    """How one problem runs on one device.

    Attributes
    ----------
    spec : KernelSpec
    device : Device
    num_m_blocks : int
        Query tiles per head.
    grid, block : tuple of int
        Blocks, and threads per block.
    shared_bytes : int
        Dynamic shared memory per block.
    reason : str
        Why this tile.
    """

    spec: KernelSpec
    device: Device
    num_m_blocks: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    reason: str

    def explain(self) -> str:
        """The choice in words."""
        tile = self.spec.tile
        return (
            f"{self.spec.name} on {self.device.name}: {tile.block_m} query rows x {tile.block_n} keys, "
            f"K and V by {'tensor maps' if self.spec.kv == 'tensor' else 'cp.async'}, "
            f"{tile.num_warps} warps, {tile.stages} stage(s), {self.shared_bytes} bytes of shared memory "
            f"(room for {blocks_by_shared_memory(tile, self.device)} blocks per SM), at least "
            f"{accumulator_registers(tile)} registers per thread; {self.grid[0]} blocks. {self.reason}."
        )


def forward_spec(
    head_dim: int,
    head_dim_v: int,
    device: Device,
    dtype: str = "bf16",
    out_dtype: str | None = None,
    *,
    out_vectors: bool = True,
    tensor_maps: bool = True,
    seqlen_q: int = 4096,
    **features: Any,
) -> tuple[KernelSpec, str]:
    """The kernel that a call gets, and why; arguments as `KernelSpec`, `pick_forward` and `Features` have them."""
    asked = Features(**features)
    choice = pick_forward(
        head_dim,
        head_dim_v,
        device,
        causal=asked.causal,
        seqlen_q=seqlen_q,
        tensor_maps=tensor_maps and not asked.padded,
        features=asked,
        float_out=out_dtype == "float",
    )
    # One mask has both bounds of a window, so that one kernel serves all windows.
    asked = replace(asked, causal=asked.causal and not asked.window)
    spec = KernelSpec(
        choice.tile,
        dtype,
        out_dtype or dtype,
        out_vectors=out_vectors,
        kv=choice.kv,
        min_blocks=choice.min_blocks,
        **vars(asked),
    )
    return spec, choice.reason


def plan_forward(problem: Problem, device: Device) -> Plan:
    """Choose the kernel and the grid for `problem` on `device`.

    Pure, and cached by structure: lengths of the keys, strides, the scale's size, the diagonal, the widths of a window
    and the like do not matter.

    Raises
    ------
    ValueError
        If the problem takes more blocks than a grid can have.
    """
    return _plan_forward(
        problem.dtype,
        problem.out_dtype,
        -(-problem.head_dim // 16) * 16,
        -(-problem.head_dim_v // 16) * 16,
        problem.features,
        problem.out_vectors,
        problem.tensor_maps,
        problem.batch * problem.num_heads,
        problem.seqlen_q,
        device,
    )


@functools.lru_cache(maxsize=4096)
def _plan_forward(
    dtype: str,
    out_dtype: str,
    head_dim: int,
    head_dim_v: int,
    features: Features,
    out_vectors: bool,
    tensor_maps: bool,
    heads: int,
    seqlen_q: int,
    device: Device,
) -> Plan:
    spec, reason = forward_spec(
        head_dim,
        head_dim_v,
        device,
        dtype,
        out_dtype,
        out_vectors=out_vectors,
        tensor_maps=tensor_maps,
        seqlen_q=seqlen_q,
        **vars(features),
    )
    tile = spec.tile
    num_m_blocks = -(-seqlen_q // tile.block_m)
    blocks = num_m_blocks * heads
    if blocks > MAX_GRID:
        raise ValueError(
            f"batch x heads x query tiles must be at most {MAX_GRID}, got {heads} x {num_m_blocks}; split the batch"
        )
    return Plan(spec, device, num_m_blocks, (blocks, 1, 1), (tile.threads, 1, 1), spec.shared_bytes, reason)


def heads_per_group(problem: Problem, plan: Plan) -> int:
    """How many heads take turns in the order of blocks, tile of rows by tile.

    Where tiles of rows are alike, one head after the other, so that the blocks that run at a time share keys and values
    in L2. Under a causal mask the last rows see most keys and start first; there as many heads as L2 can serve, or each
    head would begin with long tiles while the short ones of the one before still run.
    """
    if not plan.spec.causal or plan.spec.window:
        return 1
    kv_bytes = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    shared_by = max(problem.num_heads // max(problem.num_heads_k, 1), 1)
    heads = max(problem.batch * problem.num_heads, 1)
    # Twice what L2 holds: tiles that run together read the same keys at about the same time. Groups of one size, for a
    # small last one would leave multiprocessors idle.
    fit = shared_by * max(1, 2 * plan.device.l2_bytes // max(kv_bytes, 1))
    fit = max(shared_by, min(fit, MOST_HEADS_PER_GROUP))
    groups = -(-heads // fit)
    return -(-heads // groups)


def encode_forward(problem: Problem, plan: Plan, bindings: Mapping[str, Any]) -> bytes:
    """The argument struct of one launch; `bindings` are addresses, the seed, and tensor maps, 0 where left out."""
    group = heads_per_group(problem, plan)
    params = FWD_TENSOR_PARAMS if plan.spec.kv == "tensor" else FWD_PARAMS
    values = {
        "abi_version": ABI_VERSION,
        **problem.values,
        "num_m_blocks": plan.num_m_blocks,
        "heads_per_group": group,
        "blocks_per_group": group * plan.num_m_blocks,
    }
    return params.template({**values, **bindings})
