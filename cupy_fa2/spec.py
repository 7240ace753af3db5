"""What a kernel is: the mirror of the C++ template's parameters, and the translation unit it renders to.

A :class:`KernelSpec` names one instance. Everything that changes the machine code is in it, nothing else is; equal
specs are the same kernel, and its :attr:`~KernelSpec.name` says which.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["DTYPES", "ENTRY", "FwdTile", "KernelSpec"]

#: The element types of q, k and v, as the kernels call them.
DTYPES = ("f16", "bf16")

#: How K and V come -> the policy's C++ name, the header it is in, and the argument struct.
KV_POLICIES = {
    "dense": ("DenseKV", "policy/kv.cuh", "FwdParams"),
    "tensor": ("TensorKV", "policy/tensor_kv.cuh", "FwdTensorParams"),
}

#: Name of the kernel in every module.
ENTRY = "flash_fwd"


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
    q_in_registers : bool
        Whether Q's fragments are read from shared memory once, or again for every key tile.
    """

    block_m: int
    block_n: int
    head_dim: int
    head_dim_v: int
    num_warps: int
    stages: int = 2
    slack: int = 8
    last_to_first: bool = True
    q_in_registers: bool = False

    def __post_init__(self) -> None:
        if self.block_m % (16 * self.num_warps) or self.block_n % 16:
            raise ValueError(f"{self}: warps own whole 16-row blocks, and key tiles are made of 16 columns")
        for name in ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            if value % 16 or not 16 <= value <= 256:
                raise ValueError(f"{name} of a tile must be a multiple of 16 up to 256, got {value}")
        if self.stages not in (1, 2, 3) or not 0 <= self.slack <= 15:
            raise ValueError(f"{self}: stages is 1, 2 or 3, slack 0 to 15")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles of a block: Q, then ``stages`` of K and of V."""
        q = self.block_m * self.head_dim
        kv = self.block_n * (self.head_dim + self.head_dim_v)
        return 2 * (q + self.stages * kv)

    def render(self) -> str:
        """As a C++ template argument."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return "FwdTile{" + ", ".join(f".{name} = {str(value).lower()}" for name, value in values) + "}"


@dataclass(frozen=True)
class KernelSpec:
    """One kernel instance.

    Attributes
    ----------
    tile : FwdTile
    dtype : {"f16", "bf16"}
        Element type of q, k and v.
    out_dtype : {"f16", "bf16", "float"}
        Element type of out.
    causal : bool
        Whether keys beyond the diagonal are hidden.
    negate : bool
        Whether scores change sign (for a negative softmax scale).
    kv : {"dense", "tensor"}
        How K and V come: by cp.async from any strides, or through tensor maps (sm_90 and later).
    out_vectors : bool
        Whether out is stored by 16 bytes: aligned rows of adjacent elements, head_dim_v a multiple of 8.
    min_blocks : int
        Blocks that must fit on a multiprocessor together; bounds the registers.
    """

    tile: FwdTile
    dtype: str
    out_dtype: str
    causal: bool = False
    negate: bool = False
    out_vectors: bool = True
    kv: str = "dense"
    min_blocks: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.out_dtype not in (self.dtype, "float"):
            raise ValueError(f"no kernel takes {self.dtype} and gives {self.out_dtype}")
        if self.kv not in KV_POLICIES:
            raise ValueError(f"kv must be one of {', '.join(KV_POLICIES)}, got {self.kv!r}")
        if self.kv == "tensor" and (self.tile.stages < 2 or self.tile.head_dim % 64 or self.tile.head_dim_v % 64):
            raise ValueError(f"tensor maps want two stages and head dims that are multiples of 64, got {self.tile}")
        if self.kv == "dense" and self.tile.stages > 2:
            raise ValueError(f"cp.async has one stage or two, got {self.tile}")

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: its tiles, and with tensor maps three barriers a stage."""
        return self.tile.shared_bytes + (self.tile.stages * 3 * 8 if self.kv == "tensor" else 0)

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
        parts += ["qreg"] if t.q_in_registers else []
        parts += ["tensor"] if self.kv == "tensor" else []
        parts += ["causal"] if self.causal else []
        parts += ["negate"] if self.negate else []
        parts += ["out32"] if self.out_dtype == "float" else []
        parts += [] if self.out_vectors else ["elements"]
        parts += [f"min{self.min_blocks}"] if self.min_blocks != 1 else []
        return "_".join(parts)

    def render(self) -> str:
        """The translation unit."""
        mask = "CausalMask" if self.causal else "NoMask"
        score = "ScoreMods<Negate>" if self.negate else "ScoreMods<>"
        epilogue = f"WriteOut<{self.out_dtype}, {str(self.out_vectors).lower()}>"
        kv, header, argument = KV_POLICIES[self.kv]
        return f"""#include "sm80/fwd.cuh"
#include "{header}"
using namespace fa2;
using Kernel = FwdKernel<{self.tile.render()},
                         {self.dtype}, {mask}, {score}, {kv}, {epilogue}>;
static_assert(Kernel::kThreads == {self.tile.threads} && Kernel::kSharedBytes == {self.shared_bytes});
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, {self.min_blocks})
{ENTRY}(const __grid_constant__ {argument} params) {{ Kernel::run(params); }}
"""
