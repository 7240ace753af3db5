"""Bugs planted in a real kernel, one small edit each: every one is caught, with its kind and its source line.

The kernel is what a forward is made of: a tiled product with double-buffered ``cp.async``, XOR-swizzled shared tiles,
``ldmatrix`` and ``mma``. C = A B^T, A of shape (rows, depth), B of shape (columns, depth), bfloat16.
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

struct Params { u64 a, b, c; int rows, columns, depth, padding; long long a_stride, b_stride, c_stride; };

constexpr int kRows = 64, kColumns = 64, kDepth = 64, kThreads = 128, kTileBytes = 64 * 64 * 2;
extern __shared__ __align__(128) unsigned char smem[];

__device__ u32 swizzle(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
__device__ void copy_async(u32 to, u64 from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
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

__device__ void copy_tile(u32 tile, u64 from, long long stride, int rows) {
  for (int i = threadIdx.x; i < 64 * 8; i += kThreads) {
    int row = i / 8, chunk = i % 8;
    bool inside = row < rows;
    copy_async(tile + swizzle(row, chunk), from + (inside ? row * stride * 2 + chunk * 16 : 0), inside ? 16 : 0);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gemm(const __grid_constant__ Params p) {
  const u32 sA = (u32)__cvta_generic_to_shared(smem), sB = sA + 2 * kTileBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row0 = blockIdx.x * kRows, column0 = blockIdx.y * kColumns;
  const u64 a = p.a + row0 * p.a_stride * 2, b = p.b + column0 * p.b_stride * 2;
  float acc[8][4] = {};

  copy_tile(sA, a, p.a_stride, p.rows - row0);
  copy_tile(sB, b, p.b_stride, p.columns - column0);
  commit();
  for (int k = 0; k < p.depth / kDepth; k++) {
    const u32 now = (k % 2) * kTileBytes, next = kTileBytes - now;
    __syncthreads();  // BARRIER BEFORE REFILL
    if (k + 1 < p.depth / kDepth) {
      copy_tile(sA + next, a + (k + 1) * kDepth * 2, p.a_stride, p.rows - row0);  // REFILL
      copy_tile(sB + next, b + (k + 1) * kDepth * 2, p.b_stride, p.columns - column0);
    }
    commit();
    wait<1>();        // WAIT
    __syncthreads();  // BARRIER AFTER FILL
    for (int j = 0; j < kDepth / 16; j++) {
      u32 fa[4];
      load_matrices(fa, sA + now + swizzle(warp * 16 + lane % 16, j * 2 + lane / 16));  // LOAD A
      for (int n = 0; n < 4; n++) {
        u32 fb[4];
        load_matrices(fb, sB + now + swizzle(n * 16 + lane % 8 + lane / 16 * 8, j * 2 + lane / 8 % 2));  // LOAD B
        mma(acc[2 * n], fa, fb[0], fb[1]);
        mma(acc[2 * n + 1], fa, fb[2], fb[3]);
      }
    }
  }
  for (int n = 0; n < 8; n++)
    for (int half = 0; half < 2; half++) {
      int row = row0 + warp * 16 + lane / 4 + half * 8, column = column0 + n * 8 + lane % 4 * 2;
      if (row < p.rows && column < p.columns)  // INSIDE
        *(float2*)(p.c + (row * p.c_stride + column) * 4) = *(float2*)&acc[n][half * 2];  // STORE
    }
}
"""


@functools.cache
def compiled(source: str) -> ptxsim.Kernel:
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "gemm.cu", [], [])
    options = ["--std=c++20", "--device-as-default-execution-space", "-arch=compute_80", "-lineinfo"]
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        raise AssertionError(nvrtc.getProgramLog(program)) from None
    return ptxsim.parse_kernel(nvrtc.getPTX(program), "gemm", {"gemm.cu": source})


def edited(*edits: tuple[str, str]) -> str:
    source = SOURCE
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def run(
    source: str = SOURCE,
    a: np.ndarray | None = None,
    b: np.ndarray | None = None,
    hazards: str = "raise",
    rows: int = 0,
    observer: ptxsim.Observer | None = None,
) -> tuple[np.ndarray, np.ndarray, ptxsim.Report]:
    """The product, what it should be, and the report."""
    a = operand(128, 192, 0) if a is None else a
    b = operand(64, 192, 1) if b is None else b
    c = aligned(len(a) * len(b) * 4).view(np.float32).reshape(len(a), len(b))
    memory = ptxsim.GlobalMemory()
    addresses = [memory.bind(a, "a"), memory.bind(b, "b"), memory.bind(c, "c", writable=True)]
    strides = [x.strides[0] // x.itemsize for x in (a, b, c)]
    params = struct.pack("<3Q4i3q", *addresses, rows or len(a), len(b), a.shape[1], 0, *strides)
    grid = (-(-max(rows, len(a)) // 64), -(-len(b) // 64), 1)
    report = ptxsim.launch(
        *(compiled(source), grid, (128, 1, 1), 4 * 8192, params, memory),
        hazards=hazards,  # type: ignore[arg-type]
        observer=observer,
    )
    return c, a.astype(np.float64) @ b.astype(np.float64).T, report


def test_the_good_kernel_is_clean() -> None:
    c, expected, report = run()
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)
    assert report.hazards == []
    assert report.bank_conflicts == 0
    assert report.global_load_sectors == report.global_load_sectors_ideal
    assert report.global_store_sectors == report.global_store_sectors_ideal
    warps, steps = 8, 3 * 4
    assert (report.blocks, report.warps) == (2, warps)
    assert report.mma == warps * steps * 8
    assert report.ldmatrix == warps * steps * 5
    assert report.barriers == 2 * 3 * 2
    assert report.bytes_loaded == 2 * 3 * 2 * 8192
    assert report.bytes_stored == c.nbytes
    assert report.wavefronts["ldmatrix"] == report.ldmatrix * 4
    assert "0 bank conflicts" in str(report)


def test_tails_and_strided_views_are_clean() -> None:
    qkv = operand(100, 3 * 64, 2).reshape(100, 3, 64)
    c, expected, _ = run(a=qkv[:, 1], b=operand(70, 64, 3))
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)


def caught(kind: type[ptxsim.SimulationError], source: str, at: str, **options: object) -> ptxsim.SimulationError:
    """Run a kernel with a bug; it must be of this kind and in the line that holds `at`, inlined or not."""
    with pytest.raises(kind) as info:
        run(source, **options)  # type: ignore[arg-type]
    error = info.value
    assert type(error) is kind
    assert line_of(source, at) in error.source_lines, str(error)
    assert error.frames[0].file.endswith("gemm.cu")
    assert error.block is not None
    assert error.threads
    assert error.line > 0
    assert error.text in str(error)
    return error


def test_missing_wait() -> None:
    error = caught(ptxsim.AsyncCopyError, edited(("wait<1>();", "")), "LOAD A")
    assert "ldmatrix" in error.text
    assert "LOAD A" in str(error)


def test_wait_that_leaves_a_needed_group() -> None:
    caught(ptxsim.AsyncCopyError, edited(("wait<1>();", "wait<2>();")), "LOAD A")


def test_missing_commit() -> None:
    source = edited(("    commit();\n    wait", "    wait"))
    caught(ptxsim.AsyncCopyError, source, "LOAD A")


def test_missing_barrier_before_a_refill() -> None:
    error = caught(ptxsim.RaceError, edited(("__syncthreads();  // BARRIER BEFORE REFILL", "")), "REFILL")
    assert "cp.async" in error.text


def test_missing_barrier_after_a_fill() -> None:
    source = edited(("__syncthreads();  // BARRIER AFTER FILL", ""))
    error = caught(ptxsim.RaceError, source, "LOAD A")
    assert "ldmatrix" in error.text


def test_a_barrier_that_part_of_a_block_reaches() -> None:
    source = edited(("__syncthreads();  // BARRIER AFTER FILL", "if (warp) __syncthreads();  // BARRIER AFTER FILL"))
    with pytest.raises((ptxsim.DivergenceError, ptxsim.RaceError)):
        run(source)


def test_swizzle_on_the_writing_side_only() -> None:
    plain = "sA + now + (warp * 16 + lane % 16) * 128 + ((j * 2 + lane / 16) << 4)"
    source = edited(("sA + now + swizzle(warp * 16 + lane % 16, j * 2 + lane / 16)", plain))
    c, expected, report = run(source)
    # All bytes are initialised and ordered; it is the result that is wrong, and the banks collide.
    assert not np.allclose(c, expected, atol=1e-2)
    assert report.bank_conflicts == 7 * 4 * report.ldmatrix // 5


def test_no_swizzle_at_all() -> None:
    source = edited(("((chunk ^ (row & 7)) << 4)", "(chunk << 4)"))
    c, expected, report = run(source)
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)
    assert report.bank_conflicts == 7 * 4 * report.ldmatrix


def test_unwritten_tile() -> None:
    source = edited(("  copy_tile(sB, b, p.b_stride, p.columns - column0);\n", ""))
    caught(ptxsim.UninitializedReadError, source, "LOAD B")


def test_unwritten_rows_of_a_tile() -> None:
    source = edited(("i < 64 * 8;", "i < 64 * 7;"))
    caught(ptxsim.UninitializedReadError, source, "LOAD A")


def test_a_row_past_the_end() -> None:
    caught(ptxsim.OutOfBoundsError, SOURCE, "copy_tile(sA, a", a=operand(100, 192, 0), rows=101)


def test_a_store_past_the_end() -> None:
    source = edited(("row < p.rows && column", "row <= p.rows && column"))
    caught(ptxsim.OutOfBoundsError, source, "// STORE", a=operand(100, 192, 0))


def test_a_read_into_the_next_head() -> None:
    # A head of 40 columns, of which the kernel reads 64: the bytes are there, but they are not its own.
    qkv = operand(64, 3 * 40, 4).reshape(64, 3, 40)
    source = edited(("p.depth / kDepth; k++", "(p.depth + 63) / kDepth; k++"))
    error = caught(ptxsim.OutOfBoundsError, source, "copy_tile(sA, a", a=qkv[:, 0], b=operand(64, 40, 5))
    assert "between the elements" in str(error)


def test_swapped_fragment_registers() -> None:
    c, expected, _ = run(edited(("mma(acc[2 * n], fa, fb[0], fb[1]);", "mma(acc[2 * n], fa, fb[1], fb[0]);")))
    assert not np.allclose(c, expected, atol=1e-2)


def test_a_misaligned_tile() -> None:
    caught(ptxsim.MisalignedAddressError, SOURCE, "copy_tile(sA, a", a=operand(64, 193, 6)[:, 1:])


def test_two_blocks_that_write_the_same_rows() -> None:
    source = edited(("int row = row0 + warp", "int row = warp"))
    caught(ptxsim.RaceError, source, "// STORE")


def test_hazards_can_be_collected() -> None:
    _, _, report = run(edited(("wait<1>();", "")), hazards="collect")
    assert {type(hazard) for hazard in report.hazards} >= {ptxsim.AsyncCopyError}
    places = [(type(hazard), hazard.line) for hazard in report.hazards]
    assert len(places) == len(set(places))
    assert str(report.hazards[0]) in str(report)


def test_batches_of_blocks_start_afresh() -> None:
    """Many blocks, more than run together: what one left in shared memory, the next may not read."""
    a, b = operand(64 * 40, 64, 7), operand(64, 64, 8)
    c, expected, report = run(a=a, b=b)
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)
    assert report.blocks == 40
    source = edited(("i < 64 * 8;", "i < (blockIdx.x < 39 ? 64 : 32) * 8;"))
    error = caught(ptxsim.UninitializedReadError, source, "LOAD A", a=a, b=b)
    assert error.block == (39, 0, 0)
    assert min(error.threads) >= 64
