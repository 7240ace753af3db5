"""Bugs planted in a pipeline of bulk tensor copies and mbarriers: each is caught, with its kind and source line.

The kernel is the product of `test_ptxsim_hazards`, C = A B^T, with its tiles brought by bulk tensor copies into two
buffers: a full barrier for each, which the copies complete, and an empty one, at which every warp arrives.
"""

from __future__ import annotations

import functools
import struct

import numpy as np
import pytest
from ptx_tools import aligned, line_of, operand

from cupy_fa2 import ptxsim

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) Map { u64 words[16]; };
struct alignas(64) Params { u64 c; int rows, columns, depth, padding; long long c_stride; u64 more[4]; Map a, b; };

constexpr int kDepth = 64, kThreads = 128, kWarps = kThreads / 32, kTileBytes = 64 * 64 * 2;
extern __shared__ __align__(1024) unsigned char smem[];

__device__ u32 swizzle(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
__device__ void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
               "{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ void initialize(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ void arrive_expecting(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ void wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra AGAIN%=;\n}"
               ::"r"(barrier), "r"(parity) : "memory");
}
__device__ void copy_box(u32 to, const Map& map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0],"
               "[%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

extern "C" __global__ void __launch_bounds__(kThreads) gemm(const __grid_constant__ Params p) {
  const u32 sA = (u32)__cvta_generic_to_shared(smem), sB = sA + 2 * kTileBytes;
  const u32 full = sB + 2 * kTileBytes, empty = full + 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row0 = blockIdx.x * 64, column0 = blockIdx.y * 64, tiles = p.depth / kDepth;
  const bool boss = threadIdx.x == 0;
  float acc[8][4] = {};

  if (boss) {
    for (int i = 0; i < 2; i++) initialize(full + i * 8, 1);        // INIT FULL
    for (int i = 0; i < 2; i++) initialize(empty + i * 8, kWarps);  // INIT EMPTY
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();  // BARRIER AFTER INIT
  auto load = [&](int k) {
    const int into = k % 2;
    arrive_expecting(full + into * 8, 2 * kTileBytes);                                              // EXPECT
    copy_box(sA + into * kTileBytes, p.a, k * kDepth, row0, full + into * 8);                       // COPY A
    copy_box(sB + into * kTileBytes, p.b, k * kDepth, column0, full + into * 8);                    // COPY B
  };
  if (boss) load(0);
  for (int k = 0; k < tiles; k++) {
    const int now = k % 2, next = now ^ 1;
    wait(full + now * 8, k / 2 % 2);  // WAIT FULL
    if (boss && k + 1 < tiles) {
      if (k > 0) wait(empty + next * 8, (k - 1) / 2 % 2);  // WAIT EMPTY
      load(k + 1);
    }
    for (int j = 0; j < kDepth / 16; j++) {
      u32 fa[4];
      load_matrices(fa, sA + now * kTileBytes + swizzle(warp * 16 + lane % 16, j * 2 + lane / 16));  // LOAD A
      for (int n = 0; n < 4; n++) {
        u32 fb[4];
        load_matrices(fb, sB + now * kTileBytes + swizzle(n * 16 + lane % 8 + lane / 16 * 8, j * 2 + lane / 8 % 2));
        mma(acc[2 * n], fa, fb[0], fb[1]);
        mma(acc[2 * n + 1], fa, fb[2], fb[3]);
      }
    }
    __syncwarp();                            // BEFORE ARRIVE
    if (lane == 0) arrive(empty + now * 8);  // ARRIVE
  }
  for (int n = 0; n < 8; n++)
    for (int half = 0; half < 2; half++) {
      int row = row0 + warp * 16 + lane / 4 + half * 8, column = column0 + n * 8 + lane % 4 * 2;
      if (row < p.rows && column < p.columns)
        *(float2*)(p.c + (row * p.c_stride + column) * 4) = *(float2*)&acc[n][half * 2];
    }
}
"""


@functools.cache
def compiled(source: str) -> ptxsim.Kernel:
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "pipeline.cu", [], [])
    options = ["--std=c++20", "--device-as-default-execution-space", "-arch=compute_90", "-lineinfo"]
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        raise AssertionError(nvrtc.getProgramLog(program)) from None
    return ptxsim.parse_kernel(nvrtc.getPTX(program), "gemm", {"pipeline.cu": source})


def edited(*edits: tuple[str, str]) -> str:
    source = SOURCE
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def run(
    source: str = SOURCE,
    rows: int = 100,
    columns: int = 70,
    depth: int = 320,
    box: int = 64,
    swizzle: int = 128,
    more: int = 0,
    observer: ptxsim.Observer | None = None,
) -> tuple[np.ndarray, np.ndarray, ptxsim.Report]:
    """The product, what it should be, and the report."""
    a, b = operand(rows, depth, 0), operand(columns, depth, 1)
    c = aligned(rows * columns * 4).view(np.float32).reshape(rows, columns)
    memory = ptxsim.GlobalMemory()
    maps = [
        ptxsim.encode_tensor_map(memory.bind(x, name), 2, (depth, len(x)), x.strides[:1], (64, box), (1, 1), swizzle)
        for name, x in (("a", a), ("b", b))
    ]
    address = memory.bind(c, "c", writable=True)
    params = struct.pack("<Q4iq", address, rows, columns, depth, 0, columns).ljust(64, b"\0") + b"".join(maps)
    grid = (-(-rows // 64), -(-columns // 64), 1)
    shared = 4 * 8192 + 32 + more
    report = ptxsim.launch(compiled(source), grid, (128, 1, 1), shared, params, memory, observer=observer)
    return c, a.astype(np.float64) @ b.astype(np.float64).T, report


def test_the_good_kernel_is_clean() -> None:
    c, expected, report = run()
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)
    assert report.bank_conflicts == 0
    assert report.wavefronts["cp.async.bulk"] == 4 * 5 * 2 * 64
    assert report.barriers == 4
    for depth in (64, 128, 192):
        c, expected, _ = run(depth=depth)
        np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)


def caught(kind: type[ptxsim.SimulationError], source: str, at: str, **options: int) -> ptxsim.SimulationError:
    """Run a kernel with a bug; it must be of this kind and in the line that holds `at`, inlined or not."""
    with pytest.raises(kind) as info:
        run(source, **options)
    error = info.value
    assert type(error) is kind, str(error)
    assert line_of(source, at) in error.source_lines, str(error)
    assert error.block is not None
    assert error.threads
    return error


EMPTY_WAIT = "if (k > 0) wait(empty + next * 8, (k - 1) / 2 % 2);"


def test_missing_full_wait() -> None:
    source = edited(("    wait(full + now * 8, k / 2 % 2);  // WAIT FULL\n", ""))
    error = caught(ptxsim.AsyncCopyError, source, "LOAD A")
    assert "ldmatrix" in error.text


def test_full_wait_by_one_lane() -> None:
    """The others of its warp know nothing of it, until the warp has synchronised."""
    source = edited(("    wait(full + now * 8", "    if (lane == 0) wait(full + now * 8"))
    assert 0 not in caught(ptxsim.AsyncCopyError, source, "LOAD A").threads
    run(
        edited(("    wait(full + now * 8", "    if (lane == 0) wait(full + now * 8"), ("// WAIT FULL", "__syncwarp();"))
    )


def test_missing_empty_wait() -> None:
    error = caught(ptxsim.RaceError, edited((EMPTY_WAIT, "")), "COPY A")
    assert line_of(edited((EMPTY_WAIT, "")), "load(k + 1)") in error.source_lines


def test_missing_syncwarp_before_the_arrival() -> None:
    caught(ptxsim.RaceError, edited(("    __syncwarp();   ", "")), "COPY A")


@pytest.mark.parametrize("parity", ["k / 2 % 2 ^ 1", "0", "k % 2"])
def test_wrong_parity_of_the_full_wait(parity: str) -> None:
    source = edited(("wait(full + now * 8, k / 2 % 2)", f"wait(full + now * 8, {parity})"))
    error = caught(ptxsim.DeadlockError, source, "WAIT FULL")
    assert f"pipeline.cu:{line_of(source, 'INIT FULL')}" in error.message


def test_wrong_parity_of_the_empty_wait() -> None:
    source = edited(("(k - 1) / 2 % 2)", "((k - 1) / 2 + 1) % 2)"))
    assert "4 of 4 arrivals" in caught(ptxsim.DeadlockError, source, "WAIT EMPTY").message


@pytest.mark.parametrize("less", [16, 8192])
def test_too_few_bytes_expected(less: int) -> None:
    source = edited(("2 * kTileBytes);  ", f"2 * kTileBytes - {less});  "))
    caught(ptxsim.AsyncCopyError, source, "COPY B")


def test_too_many_bytes_expected() -> None:
    error = caught(ptxsim.DeadlockError, edited(("2 * kTileBytes);  ", "2 * kTileBytes + 16);  ")), "WAIT FULL")
    assert "16 of 16400 bytes" in error.message


@pytest.mark.parametrize(("who", "missing"), [("lane == 0 && warp != 2", "1 of 4"), ("lane > 31", "4 of 4")])
def test_missing_arrival(who: str, missing: str) -> None:
    source = edited(("if (lane == 0) arrive", f"if ({who}) arrive"))
    error = caught(ptxsim.DeadlockError, source, "WAIT EMPTY")
    assert missing in error.message
    assert f"pipeline.cu:{line_of(source, 'INIT EMPTY')}" in error.message
    assert error.threads == (0,)


def test_arrivals_beyond_the_count() -> None:
    for old, new in (("if (lane == 0) arrive", "arrive"), ("empty + i * 8, kWarps", "empty + i * 8, kWarps - 1")):
        assert "more arrivals" in caught(ptxsim.MbarrierError, edited((old, new)), "// ARRIVE").message


def test_arrivals_short_of_the_count() -> None:
    source = edited(("empty + i * 8, kWarps", "empty + i * 8, kWarps + 1"))
    assert "1 of 5 arrivals" in caught(ptxsim.DeadlockError, source, "WAIT EMPTY").message


def test_initialisation() -> None:
    no_barrier = edited(("  __syncthreads();  // BARRIER AFTER INIT\n", ""))
    assert "initialised it" in caught(ptxsim.RaceError, no_barrier, "WAIT FULL").message
    caught(ptxsim.MbarrierError, edited(("initialize(empty + i * 8, kWarps)", "")), "// ARRIVE")
    caught(ptxsim.MbarrierError, edited(("initialize(full + i * 8", "initialize(full")), "INIT FULL")


def test_a_box_of_another_size() -> None:
    caught(ptxsim.DeadlockError, SOURCE, "WAIT FULL", box=32)
    caught(ptxsim.AsyncCopyError, SOURCE, "COPY B", box=128)


def test_two_tiles_in_one_place() -> None:
    source = edited(("copy_box(sB + into", "copy_box(sA + into"))
    assert "written" in caught(ptxsim.AsyncCopyError, source, "COPY B").message


def test_swizzle_on_one_side_only() -> None:
    for source, swizzle in ((SOURCE, 0), (edited(("((chunk ^ (row & 7)) << 4)", "(chunk << 4)")), 128)):
        c, expected, report = run(source, swizzle=swizzle)
        assert not np.allclose(c, expected, atol=1e-2)
        # Where the reader forgot it, the banks collide too.
        assert (report.bank_conflicts == 0) == (swizzle == 0)


def test_a_tile_that_is_not_where_the_swizzle_repeats() -> None:
    source = edited(("(u32)__cvta_generic_to_shared(smem), sB", "(u32)__cvta_generic_to_shared(smem) + 128, sB"))
    c, expected, _ = run(source, more=128)
    assert not np.allclose(c, expected, atol=1e-2)


def test_an_ordinary_store_to_a_barrier() -> None:
    store = "if (k == 1 && warp == 1) *(int*)(smem + 4 * kTileBytes) = 0;  // OVERWRITE\n"
    source = edited(("    __syncwarp();   ", store + "__syncwarp();"))
    caught(ptxsim.MbarrierError, source, "OVERWRITE")


def test_a_copy_that_nobody_waits_for() -> None:
    error = caught(ptxsim.AsyncCopyError, edited(("boss && k + 1 < tiles", "boss")), "COPY B")
    assert "nobody waited" in error.message


def test_bytes_that_nobody_brings() -> None:
    source = edited(
        (
            "  for (int n = 0; n < 8; n++)\n    for (int half",
            "  if (boss) arrive_expecting(full + tiles % 2 * 8, 16);\n  for (int n = 0; n < 8; n++)\n    for (int half",
        )
    )
    with pytest.raises(ptxsim.AsyncCopyError, match="16 of 16 bytes missing"):
        run(source)
