"""What the simulator's tests share: PTX around a few instructions, operands at the edges, arrays at known addresses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupy_fa2 import ptxsim

TYPES = {
    "pred": np.bool_, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    **{f"{k}{b}": np.dtype(f"{'int' if k == 's' else 'uint'}{b}").type for k in "bus" for b in (8, 16, 32, 64)},
}  # fmt: skip


#: Declares a tile of shared memory, its base, and in `at` the address of the thread's word.
TILE = ".shared .align 16 .b8 tile[4096]; .reg .b32 base, at; mov.u32 base, tile; mad.lo.u32 at, %w, 4, base;"


def run_ptx(body: str, sources: list[np.ndarray], results: list[np.ndarray], **options: Any) -> ptxsim.Report:
    """Run `body` in one block of a thread per element, with a0, a1, ... loaded and r0, r1, ... stored.

    Registers are as wide as the arrays' items; a bool array becomes a predicate. ``%w`` and ``%w64`` hold the
    thread's number.
    """
    memory = ptxsim.GlobalMemory()
    params, lines = [], [".reg .b32 %w, %t; .reg .b64 %w64, %p;", "mov.u32 %w, %tid.x; cvt.u64.u32 %w64, %w;"]
    names = [(f"a{i}", x) for i, x in enumerate(sources)] + [(f"r{i}", x) for i, x in enumerate(results)]
    stores = []
    for i, (name, array) in enumerate(names):
        stored = array.view(np.uint8) if array.dtype == np.bool_ else array
        params.append(memory.bind(stored, name, writable=name[0] == "r").to_bytes(8, "little"))
        size = array.itemsize
        where = f"ld.param.u64 %p, [p{i}]; mad.lo.u64 %p, %w64, {size}, %p;"
        register = f"{name}w" if array.dtype == np.bool_ else name
        bits = max(16, 8 * size)
        lines.append(f".reg .b{bits} {register};")
        if array.dtype == np.bool_:
            lines.append(f".reg .pred {name};")
        if name[0] == "a":
            lines.append(f"{where} ld.global.b{8 * size} {register}, [%p];")
            if array.dtype == np.bool_:
                lines.append(f"setp.ne.u16 {name}, {register}, 0;")
        else:
            if array.dtype == np.bool_:
                stores.append(f"selp.u16 {register}, 1, 0, {name};")
            stores.append(f"{where} st.global.b{8 * size} [%p], {register};")
    declared = ", ".join(f".param .u64 p{i}" for i in range(len(names)))
    text = f".visible .entry k({declared})\n{{\n" + "\n".join([*lines, body, *stores]) + "\nret;\n}\n"
    threads = max((len(x) for _, x in names), default=32)
    kernel = ptxsim.parse_kernel(text, "k")
    return ptxsim.launch(kernel, (1, 1, 1), (threads, 1, 1), options.pop("shared_bytes", 0), params, memory, **options)


def evaluate(opcode: str, sources: list[np.ndarray], result: Any) -> np.ndarray:
    """The result of one instruction for arrays of operands."""
    out = np.zeros(len(sources[0]), result)
    arguments = ", ".join(f"a{i}" for i in range(len(sources)))
    run_ptx(f"{opcode} r0, {arguments};", sources, [out])
    return out


def edge_values(t: str, count: int, seed: int) -> np.ndarray:
    """`count` values of a type: its edges first, then random bits."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(TYPES[t])
    if t == "pred":
        return rng.integers(0, 2, count).astype(np.bool_)
    bits = rng.integers(0, 256, (count, dtype.itemsize), np.uint8).view(dtype).reshape(-1)
    if t[0] in "bus":
        info = np.iinfo(dtype)
        edges = np.array([0, 1, 2, 7, info.max, info.max - 1, info.min, info.min + 1], dtype)
        small = rng.integers(0, 70, count).astype(dtype)
        bits = np.where(rng.integers(0, 3, count) == 0, small, bits)
    else:
        edges = np.array([0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan, 0.5], dtype)
        sane = (rng.standard_normal(count) * 10).astype(dtype)
        bits = np.where(rng.integers(0, 4, count) == 0, bits, sane)
    chosen = rng.integers(0, 3, count) == 0
    return np.where(chosen, edges[rng.integers(0, len(edges), count)], bits).astype(dtype)


def aligned(nbytes: int, offset: int = 0) -> np.ndarray:
    """Bytes whose host address is `offset` modulo 256."""
    raw = np.zeros(nbytes + 512, np.uint8)
    start = -raw.__array_interface__["data"][0] % 256 + offset
    return raw[start : start + nbytes]


def line_of(source: str, text: str) -> int:
    return next(i for i, line in enumerate(source.splitlines(), 1) if text in line)


def operand(rows: int, depth: int, seed: int) -> np.ndarray:
    array = aligned(rows * depth * 2).view(ml_dtypes.bfloat16).reshape(rows, depth)
    array[:] = np.random.default_rng(seed).standard_normal((rows, depth))
    return array


def run_block(body: str) -> ptxsim.Report:
    """Run a body with 64 threads and nothing but shared memory."""
    text = f""".visible .entry k() {{ .reg .b32 %w, %t; mov.u32 %w, %tid.x;
{body}
ret; }}"""
    return ptxsim.launch(ptxsim.parse_kernel(text, "k"), (1, 1, 1), (64, 1, 1), 0, [], ptxsim.GlobalMemory())
