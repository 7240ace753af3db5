"""The plan of a forward call: which kernel, which grid."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from cupy_fa2.device import Device
from cupy_fa2.kernel.forward import FwdSpec
from cupy_fa2.kernel.params import arrays_read
from cupy_fa2.kernel.tensor_box import TensorBox, key_box
from cupy_fa2.plan.feasible import accumulator_registers, blocks_by_shared_memory, infeasible
from cupy_fa2.plan.pick import pick_forward
from cupy_fa2.plan.plan import MAX_GRID, Launch, Plan
from cupy_fa2.problem import Problem, Structure

__all__ = ["FwdLaunch", "forward_plan_with", "forward_spec", "heads_per_group", "plan_forward"]

#: The first architecture with a copy engine that reads tensor maps.
TENSOR_MAPS_FROM = 90

#: Of short sequences more heads would fit L2, and are slower: docs/notebook.md, 25.
MOST_HEADS_PER_GROUP = 32


@dataclass(frozen=True)
class FwdLaunch(Launch):
    """A launch of the forward kernel: one block for each tile of query rows of each head.

    Attributes
    ----------
    num_m_blocks : int
        Query tiles per head.
    """

    spec: FwdSpec
    num_m_blocks: int = 0

    def values(self, problem: Problem, device: Device) -> Mapping[str, int]:
        """How tiles of query rows are dealt out to blocks: see core/work.cuh."""
        group = heads_per_group(problem, device, self.spec.features.band)
        return {
            "num_m_blocks": self.num_m_blocks,
            "heads_per_group": group,
            "blocks_per_group": group * self.num_m_blocks,
        }

    def boxes(self, problem: Problem) -> Mapping[str, TensorBox]:
        """The maps of k and v, if the kernel takes them."""
        if self.spec.transport != "tensor":
            return {}
        sizes = (problem.batch, problem.seqlen_k, problem.num_heads_k)
        block_n = self.spec.tile.block_n
        return {
            "k_map": key_box(problem.dtype, problem.head_dim, sizes, problem.strides_k, block_n),
            "v_map": key_box(problem.dtype, problem.head_dim_v, sizes, problem.strides_v, block_n),
        }

    def describe(self, device: Device) -> str:
        """The launch in words."""
        tile = self.spec.tile
        return (
            f"{self.spec.name} on {device.name}: {tile.block_m} query rows x {tile.block_n} keys, "
            f"K and V by {'tensor maps' if self.spec.transport == 'tensor' else 'cp.async'}, "
            f"{tile.num_warps} warps, {tile.stages} stage(s), {self.shared_bytes} bytes of shared memory "
            f"(room for {blocks_by_shared_memory(tile, device)} blocks per SM), at least "
            f"{accumulator_registers(tile)} registers per thread; {self.grid[0]} blocks"
        )


def forward_spec(structure: Structure, device: Device) -> tuple[FwdSpec, str]:
    """The kernel that calls of this structure get on `device`, and why."""
    choice = pick_forward(structure, device)
    spec = FwdSpec(
        choice.tile,
        structure.dtype,
        structure.out_dtype,
        structure.features,
        structure.out_vectors,
        choice.transport,
        choice.min_blocks,
    )
    return spec, choice.reason


@functools.lru_cache(maxsize=4096)
def plan_forward(structure: Structure, device: Device) -> Plan:
    """Choose the kernel and the grid for calls of this structure on `device`.

    Pure, and remembered: see `Structure` for what does not matter.

    Raises
    ------
    ValueError
        If it takes more blocks than a grid can have.
    """
    spec, reason = forward_spec(structure, device)
    return forward_plan_with(spec, structure, device, reason)


def forward_plan_with(spec: FwdSpec, structure: Structure, device: Device, reason: str = "As asked for") -> Plan:
    """The plan with a kernel of the caller's own choice, which tests, tuners and explainers make.

    Raises
    ------
    ValueError
        If the kernel cannot do what calls of this structure ask for, cannot run on `device`, or the grid would be too
        large.
    """
    _check_serves(spec, structure, device)
    num_m_blocks = -(-structure.seqlen_q // spec.tile.block_m)
    blocks = num_m_blocks * structure.heads
    if blocks > MAX_GRID:
        raise ValueError(
            f"batch x heads x query tiles must be at most {MAX_GRID}, got {structure.heads} x {num_m_blocks}; "
            "split the batch"
        )
    launch = FwdLaunch(spec, (blocks, 1, 1), arrays_read(structure.features), ("out", "lse"), num_m_blocks)
    return Plan((launch,), (), device, reason)


def _check_serves(spec: FwdSpec, structure: Structure, device: Device) -> None:
    tile = spec.tile
    for name, has, wanted in (
        ("dtypes", (spec.dtype, spec.out_dtype), (structure.dtype, structure.out_dtype)),
        ("head dims", (tile.head_dim, tile.head_dim_v), (structure.head_dim, structure.head_dim_v)),
        ("features", spec.features, structure.features),
    ):
        if has != wanted:
            raise ValueError(f"the call has {name} {wanted}, the kernel {spec.name} {has}")
    if spec.out_vectors and not structure.out_vectors:
        raise ValueError(f"{spec.name} stores out by 16 bytes, which this out does not allow")
    if spec.transport == "tensor" and not structure.tensor_maps:
        raise ValueError(f"{spec.name} wants tensor maps, which cannot describe these k and v")
    if spec.transport == "tensor" and device.arch < TENSOR_MAPS_FROM:
        raise ValueError(f"{spec.name} wants tensor maps, which {device.name} (sm_{device.arch}) does not have")
    if problem := infeasible(tile, device):
        raise ValueError(f"{spec.name} {problem}")


def heads_per_group(problem: Problem, device: Device, band: str) -> int:
    """How many heads take turns in the order of blocks, tile of rows by tile.

    Where tiles of rows are alike, one head after the other, so that the blocks that run at a time share keys and values
    in L2. Under a causal mask the last rows see most keys and start first; there as many heads as L2 can serve, or each
    head would begin with long tiles while the short ones of the one before still run.
    """
    if band != "causal":
        return 1
    kv_bytes = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    shared_by = max(problem.num_heads // max(problem.num_heads_k, 1), 1)
    heads = max(problem.batch * problem.num_heads, 1)
    # Twice what L2 holds: tiles that run together read the same keys at about the same time. Groups of one size, for a
    # small last one would leave multiprocessors idle.
    fit = shared_by * max(1, 2 * device.l2_bytes // max(kv_bytes, 1))
    fit = max(shared_by, min(fit, MOST_HEADS_PER_GROUP))
    groups = -(-heads // fit)
    return -(-heads // groups)
