"""The forward kernel: the mirror of its C++ template's parameters, and the translation unit they render to.

A :class:`FwdSpec` names one instance. Everything that changes the machine code is in it, nothing else is; equal specs
are the same kernel, and its :attr:`~FwdSpec.name` says which.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from cupy_fa2.kernel.features import PLAIN, Features, feature_policies
from cupy_fa2.kernel.param_struct import ParamStruct
from cupy_fa2.kernel.params import FWD_PARAMS, FWD_TENSOR_PARAMS

__all__ = ["DTYPES", "TRANSPORTS", "FwdSpec", "FwdTile"]

#: The element types of q, k and v, as the kernels call them.
DTYPES = ("f16", "bf16")

#: How tiles of K and V come into shared memory -> the policy's C++ name and the argument struct: by cp.async from any
#: strides, or through tensor maps (sm_90 and later).
TRANSPORTS = {"cp_async": ("ThreadCopies", FWD_PARAMS), "tensor": ("TensorCopies", FWD_TENSOR_PARAMS)}


@dataclass(frozen=True)
class FwdTile:
    """Quantities that shape a forward kernel; ``FwdTile`` in ``sm80/fwd.cuh``.

    Attributes
    ----------
    block_m, block_n : int
        Query rows and keys of a tile; multiples of ``16 * num_warps`` and of 16.
    head_dim, head_dim_v : int
        Head dimensions rounded up to 16.
    num_warps : int
        Warps of a block, stacked along the query rows.
    stages : int
        Buffers of K and of V: 1 or 2, with tensor maps 2 or 3.
    slack : int
        Growth of a row maximum, in log2, that is tolerated before the output is rescaled. At most 15: probabilities
        then stay below 2**15, inside float16.
    last_to_first : bool
        Order of the key tiles.
    q_kept : int
        Columns of Q, a multiple of 16, whose fragments are read from shared memory once and kept in registers; the
        others are read again for every key tile.
    team : int
        Warps that share rows: 1, or 2, each with half of a tile's keys and half of O's columns.
    mask_by_warp : bool
        Whether a key tile is masked by what the warp's rows see of it, or by what the block's do. The same result, in
        other registers.
    """

    block_m: int
    block_n: int
    head_dim: int
    head_dim_v: int
    num_warps: int
    stages: int = 2
    slack: int = 8
    last_to_first: bool = True
    q_kept: int = 0
    team: int = 1
    mask_by_warp: bool = False

    def __post_init__(self) -> None:
        if self.block_m * self.team % (16 * self.num_warps) or self.block_n % (16 * self.team):
            raise ValueError(f"{self}: warps own whole 16-row blocks, and key tiles are made of 16 columns")
        if self.team not in (1, 2) or (
            self.team == 2 and (self.rows_per_warp != 32 or self.num_warps % 2 or self.head_dim_v % 128)
        ):
            raise ValueError(
                f"{self}: a team is one warp, or two that share 32 rows and halve a multiple of 128 columns"
            )
        for name in ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            if value % 16 or not 16 <= value <= 256:
                raise ValueError(f"{name} of a tile must be a multiple of 16 up to 256, got {value}")
        if self.stages not in (1, 2, 3) or not 0 <= self.slack <= 15:
            raise ValueError(f"{self}: stages is 1, 2 or 3, slack 0 to 15")
        if self.q_kept % 16 or not 0 <= self.q_kept <= self.head_dim:
            raise ValueError(f"{self}: whole 16-column pieces of Q are kept")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * 32

    @property
    def rows_per_warp(self) -> int:
        """Query rows that a warp works on, alone or in a team."""
        return self.block_m * self.team // self.num_warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles of a block: Q, the probabilities that teams share, ``stages`` of K and of V."""
        q = self.block_m * self.head_dim
        p = self.block_m * self.block_n if self.team > 1 else 0
        kv = self.block_n * (self.head_dim + self.head_dim_v)
        return 2 * (q + p + self.stages * kv)

    def render(self) -> str:
        """As a C++ template argument."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return "FwdTile{" + ", ".join(f".{name} = {str(value).lower()}" for name, value in values) + "}"


@dataclass(frozen=True)
class FwdSpec:
    """One forward kernel.

    Attributes
    ----------
    tile : FwdTile
    dtype : {"f16", "bf16"}
        Element type of q, k and v.
    out_dtype : {"f16", "bf16", "float"}
        Element type of out.
    features : Features
    out_vectors : bool
        Whether out is stored by 16 bytes: aligned rows of adjacent elements, head_dim_v a multiple of 8.
    transport : {"cp_async", "tensor"}
        How K and V come: by cp.async from any strides, or through tensor maps (sm_90 and later). Padded sequences want
        the first: tensor maps know only the array's end, not that of each batch element.
    min_blocks : int
        Blocks that must fit on a multiprocessor together; bounds the registers.
    """

    tile: FwdTile
    dtype: str
    out_dtype: str
    features: Features = PLAIN
    out_vectors: bool = True
    transport: str = "cp_async"
    min_blocks: int = 1

    def __post_init__(self) -> None:
        bias = self.features.bias
        if self.dtype not in DTYPES or self.out_dtype not in (self.dtype, "float"):
            raise ValueError(f"no kernel takes {self.dtype} and gives {self.out_dtype}")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}")
        if self.transport == "tensor":
            if self.tile.stages < 2 or self.tile.head_dim % 64 or self.tile.head_dim_v % 64:
                raise ValueError(f"tensor maps want two stages and head dims that are multiples of 64, got {self.tile}")
            if self.features.padded:
                raise ValueError("tensor maps know only the array's end, not that of each batch element")
        elif self.tile.stages > 2:
            raise ValueError(f"cp.async has one stage or two, got {self.tile}")
        if bias is not None and bias.dtype not in (self.dtype, "float"):
            raise ValueError(f"a kernel for {self.dtype} adds a bias of {self.dtype} or float, got {bias.dtype}")

    @property
    def entry(self) -> str:
        """Name of the kernel's function."""
        return "flash_fwd"

    @property
    def params(self) -> ParamStruct:
        """The struct that it takes by value."""
        return TRANSPORTS[self.transport][1]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tile.threads

    @property
    def only_arch(self) -> None:
        """Any GPU from sm_80 on runs it, with tensor maps from sm_90 on."""
        return None

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: its tiles, and with tensor maps three barriers a stage."""
        return self.tile.shared_bytes + (self.tile.stages * 3 * 8 if self.transport == "tensor" else 0)

    @property
    def name(self) -> str:
        """A readable name, unique among specs."""
        t = self.tile
        parts = [
            "fwd",
            self.dtype,
            f"d{t.head_dim}" if t.head_dim == t.head_dim_v else f"d{t.head_dim}v{t.head_dim_v}",
            f"{t.block_m}x{t.block_n}",
            f"w{t.num_warps}",
            f"s{t.stages}",
        ]
        parts += [f"slack{t.slack}"] if t.slack != 8 else []
        parts += [] if t.last_to_first else ["ascending"]
        parts += [f"q{t.q_kept}"] if t.q_kept else []
        parts += ["bywarp"] if t.mask_by_warp else []
        parts += [f"team{t.team}"] if t.team > 1 else []
        parts += ["tensor"] if self.transport == "tensor" else []
        parts += ["out32"] if self.out_dtype == "float" else []
        parts += [] if self.out_vectors else ["elements"]
        parts += [f"min{self.min_blocks}"] if self.min_blocks != 1 else []
        return "_".join(parts + self.features.name_parts())

    def render(self) -> str:
        """The translation unit. It names the policies that are not `FwdDefaults`' (``sm80/fwd.cuh``)."""
        out = [self.out_dtype]
        if self.features.sinks or not self.out_vectors:
            out += [str(self.out_vectors).lower(), str(self.features.sinks).lower()]
        policies = {"T": self.dtype, "Epilogue": f"WriteOut<{', '.join(out)}>"}
        if self.transport != "cp_async":
            policies |= {"Params": self.params.name, "Transport": TRANSPORTS[self.transport][0]}
        policies |= feature_policies(self.features)
        named = "\n".join(f"  using {name} = {policy};" for name, policy in policies.items())
        return f"""#include "sm80/fwd.cuh"
using namespace fa2;
struct Config : FwdDefaults {{
  static constexpr auto kTile = {self.tile.render()};
{named}
}};
using Kernel = FwdKernel<Config>;
static_assert(Kernel::kThreads == {self.tile.threads} && Kernel::kSharedBytes == {self.shared_bytes});
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, {self.min_blocks})
{self.entry}(const __grid_constant__ Config::Params params) {{ Kernel::run(params); }}
"""
