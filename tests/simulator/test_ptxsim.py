"""The simulator as a machine: parsing, control flow, copies, addresses, limits, errors, reports."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from ptx_tools import TILE, aligned, run_block, run_ptx

from cupy_fa2 import ptxsim

# Control flow


def test_divergent_branches_meet_again() -> None:
    out, steps = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    body = """
        .reg .pred p; .reg .b32 n;
        mov.u32 r0, 0; mov.u32 r1, 0; mov.u32 n, %w;
    LOOP:
        setp.eq.u32 p, n, 0;
        @p bra DONE;
        add.u32 r0, r0, n; sub.u32 n, n, 1;
        bra LOOP;
    DONE:
        activemask.b32 r1;
    """
    report = run_ptx(body, [], [out, steps])
    assert out.tolist() == [n * (n + 1) // 2 for n in range(64)]
    assert (steps == 0xFFFFFFFF).all()
    assert report.instructions["activemask.b32"] == 2
    # The loop runs once per step of the slowest thread of each warp.
    assert report.instructions["add.u32"] == 31 + 63


def test_guards_run_an_instruction_for_some_threads() -> None:
    out = np.zeros(32, np.uint32)
    run_ptx(".reg .pred p; setp.lt.u32 p, %w, 5; mov.u32 r0, 1; @p mov.u32 r0, 2; @!p add.u32 r0, r0, 9;", [], [out])
    assert out.tolist() == [2] * 5 + [10] * 27


def test_a_second_launch_starts_afresh() -> None:
    """A kernel's batch is kept for the next launch: not its data, nor what it knew of them."""
    kernel = ptxsim.parse_kernel(
        """
        .visible .entry k(.param .u64 x, .param .u64 out) {
            .reg .b32 t, v; .reg .b64 a; .reg .pred p; .shared .align 4 .b8 word[4];
            mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
            ld.param.u64 a, [x]; ld.global.u32 v, [a]; setp.eq.and.u32 p, v, 1, p;
            @p st.shared.u32 [word], v;
            bar.sync 0;
            ld.shared.u32 v, [word];
            ld.param.u64 a, [out]; mad.wide.u32 a, t, 4, a; st.global.u32 [a], v;
            ret;
        }""",
        "k",
    )

    def go(value: int) -> tuple[list[int], weakref.ref[np.ndarray]]:
        x, out = np.full(1, value, np.uint32), np.zeros(64, np.uint32)
        memory = ptxsim.GlobalMemory()
        params = [
            memory.bind(x, "x").to_bytes(8, "little"),
            memory.bind(out, "out", writable=True).to_bytes(8, "little"),
        ]
        ptxsim.launch(kernel, (1, 1, 1), (64, 1, 1), 0, params, memory)
        return out.tolist(), weakref.ref(x)

    result, alive = go(1)
    assert result == [1] * 64
    gc.collect()
    assert alive() is None
    with pytest.raises(ptxsim.UninitializedReadError):
        go(2)
    assert go(1)[0] == [1] * 64


def test_early_exit() -> None:
    out = np.zeros(64, np.uint32)
    body = """.reg .pred p; .reg .b64 q; ld.param.u64 q, [p0]; mad.lo.u64 q, %w64, 4, q;
        setp.ge.u32 p, %w, 20; @p st.global.u32 [q], 7; @p exit; mov.u32 r0, %w;"""
    run_ptx(body, [], [out])
    assert out.tolist() == list(range(20)) + [7] * 44


def test_blocks_of_a_grid_know_their_place() -> None:
    out = np.zeros((3, 5, 2, 64), np.uint32)
    kernel = ptxsim.parse_kernel(
        """
        .visible .entry k(.param .u64 out) {
            .reg .b32 %r<9>; .reg .b64 %rd<4>;
            mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z;
            mov.u32 %r4, %nctaid.x; mov.u32 %r5, %nctaid.y; mov.u32 %r6, %tid.x; mov.u32 %r7, %ntid.x;
            mad.lo.u32 %r8, %r3, %r5, %r2; mad.lo.u32 %r8, %r8, %r4, %r1; mad.lo.u32 %r8, %r8, %r7, %r6;
            ld.param.u64 %rd1, [out]; mad.wide.u32 %rd2, %r8, 4, %rd1; st.global.u32 [%rd2], %r8;
            ret;
        }""",
        "k",
    )
    memory = ptxsim.GlobalMemory()
    address = memory.bind(out, "out", writable=True).to_bytes(8, "little")
    report = ptxsim.launch(kernel, (2, 5, 3), (64, 1, 1), 0, address, memory)
    assert out.reshape(-1).tolist() == list(range(out.size))
    assert (report.blocks, report.warps) == (30, 60)
    assert report.instructions["ret"] == 60


# Undefined registers


def test_an_unwritten_register_may_not_be_read() -> None:
    with pytest.raises(ptxsim.UninitializedReadError, match="register x"):
        run_ptx(".reg .b32 x, y; add.u32 y, x, 1;", [], [])


def test_a_register_that_some_threads_wrote() -> None:
    body = ".reg .b32 x; .reg .pred p; setp.ne.u32 p, %w, 3; @p mov.u32 x, 1; {} add.u32 x, x, 1;"
    with pytest.raises(ptxsim.UninitializedReadError) as caught:
        run_ptx(body.format(""), [], [])
    assert caught.value.threads == (3,)
    run_ptx(body.format("@p"), [], [])
    run_ptx(body.format("@!p mov.u32 x, 1;"), [], [])


def test_an_unwritten_guard() -> None:
    with pytest.raises(ptxsim.UninitializedReadError, match="register p"):
        run_ptx(".reg .pred p; @p mov.u32 %t, 0;", [], [])


# Asynchronous copies


def copy_kernel(after: str, size: str = "16", read: str = "ld.shared.u32 r0, [at];") -> np.ndarray:
    """Each thread copies 16 bytes to shared memory and reads their first word."""
    source, out = aligned(16 * 32).view(np.uint32), np.zeros(32, np.uint32)
    source[:] = np.arange(1, 129)
    text = f"""
    .visible .entry k(.param .u64 source, .param .u64 out) {{
        .reg .b32 %w, r0, size; .reg .b64 from, to;
        mov.u32 %w, %tid.x; mov.u32 r0, 0; mov.u32 size, {size};
        {TILE} mad.lo.u32 at, %w, 16, base;
        ld.param.u64 from, [source]; mad.wide.u32 from, %w, 16, from;
        cp.async.cg.shared.global [at], [from], 16, size;
        {after} {read}
        ld.param.u64 to, [out]; mad.wide.u32 to, %w, 4, to; st.global.u32 [to], r0;
        ret;
    }}"""
    memory = ptxsim.GlobalMemory()
    params = [memory.bind(source, "source"), memory.bind(out, "out", writable=True)]
    kernel = ptxsim.parse_kernel(text, "k")
    ptxsim.launch(kernel, (1, 1, 1), (32, 1, 1), 0, [p.to_bytes(8, "little") for p in params], memory)
    return out


def test_a_copy_that_was_waited_for() -> None:
    expected = [4 * t + 1 for t in range(32)]
    assert copy_kernel("cp.async.commit_group; cp.async.wait_group 0;").tolist() == expected
    assert copy_kernel("cp.async.wait_all;").tolist() == expected


@pytest.mark.parametrize(
    "after", ["", "cp.async.commit_group;", "cp.async.commit_group; cp.async.wait_group 1;", "cp.async.wait_group 0;"]
)
def test_a_copy_that_was_not_waited_for(after: str) -> None:
    with pytest.raises(ptxsim.AsyncCopyError, match="in flight"):
        copy_kernel(after)
    with pytest.raises(ptxsim.AsyncCopyError, match="in flight"):
        copy_kernel(after, read="st.shared.u32 [at], 0;")
    with pytest.raises(ptxsim.AsyncCopyError, match="exits"):
        copy_kernel(after, read="")


@pytest.mark.parametrize(("size", "value"), [("0", 0), ("4", 1), ("1", 1), ("16", 1)])
def test_a_short_source_is_followed_by_zeros(size: str, value: int) -> None:
    out = copy_kernel("cp.async.wait_all;", size)
    assert out[0] == value
    tail = copy_kernel("cp.async.wait_all;", size, "ld.shared.u32 r0, [at+12];")
    assert tail[0] == (4 if size == "16" else 0)


# Addresses


def test_generic_addresses() -> None:
    out = np.zeros(32, np.uint32)
    body = f"""{TILE} .reg .b64 g, s, q;
        cvt.u64.u32 s, at; cvta.shared.u64 g, s; st.u32 [g], %w; bar.sync 0;
        cvta.to.shared.u64 s, g; ld.shared.u32 %t, [s];
        ld.param.u64 q, [p0]; cvta.to.global.u64 q, q; mad.lo.u64 q, %w64, 4, q; st.u32 [q], %t; ld.u32 r0, [q];"""
    run_ptx(body, [], [out])
    assert out.tolist() == list(range(32))


def test_parameters_through_addresses() -> None:
    out = np.zeros(32, np.uint64)
    body = """.reg .b64 a, g, x, y; mov.b64 a, p0; ld.param.u64 x, [a]; ld.param.u64 x, [a+0];
        cvta.param.u64 g, a; ld.u64 y, [g]; sub.u64 r0, x, y;"""
    run_ptx(body, [], [out])
    assert not out.any()
    with pytest.raises(ptxsim.OutOfBoundsError, match="parameters"):
        run_ptx("ld.param.u64 r0, [p0+64];", [], [out])


def test_shared_bounds_and_alignment() -> None:
    with pytest.raises(ptxsim.OutOfBoundsError, match="not inside a variable"):
        run_block(f"{TILE} ld.shared.u32 %t, [base+4096];")
    with pytest.raises(ptxsim.OutOfBoundsError):
        run_block(f"{TILE} ld.shared.u32 %t, [base+-4];")
    with pytest.raises(ptxsim.MisalignedAddressError):
        run_block(f"{TILE} add.u32 at, at, 2; st.shared.u32 [at], %w;")
    with pytest.raises(ptxsim.UninitializedReadError):
        run_block(f"{TILE} ld.shared.u32 %t, [base+4092];")


def test_static_and_dynamic_shared_memory_lie_apart() -> None:
    text = """.extern .shared .align 128 .b8 dynamic[];
        .visible .entry k() {{ .shared .align 4 .b8 fixed[12]; .reg .b32 d, f, w;
        mov.u32 d, dynamic; mov.u32 f, fixed; mov.u32 w, %laneid; mad.lo.u32 {0}; st.shared.u32 [{1}], w; ret; }}"""
    memory = ptxsim.GlobalMemory()

    def go(address: str, register: str, nbytes: int) -> None:
        kernel = ptxsim.parse_kernel(text.format(address, register), "k")
        ptxsim.launch(kernel, (1, 1, 1), (32, 1, 1), nbytes, [], memory)

    go("d, w, 4, d", "d", 128)
    for arguments in (("d, w, 4, d", "d", 124), ("f, w, 4, f", "f", 128)):
        with pytest.raises(ptxsim.OutOfBoundsError):
            go(*arguments)


# Limits, parsing, errors, reports


def test_launches_that_cannot_be() -> None:
    kernel = ptxsim.parse_kernel(".visible .entry k(.param .u32 n) { ret; }", "k")
    memory = ptxsim.GlobalMemory()

    def go(grid: int = 1, block: int = 32, shared: int = 0, params: bytes = b"1234", **options: object) -> None:
        ptxsim.launch(kernel, (grid, 1, 1), (block, 1, 1), shared, params, memory, **options)  # type: ignore[arg-type]

    go()
    go(shared=163 * 1024)
    go(shared=200 * 1024, card=ptxsim.Card("H200", 227 * 1024))
    with pytest.raises(ptxsim.LaunchError, match="65535"):
        ptxsim.launch(kernel, (1, 65536, 1), (32, 1, 1), 0, b"1234", memory)
    for bad in ({"grid": 0}, {"block": 33}, {"block": 2048}, {"shared": 164 * 1024}, {"params": b"123"}):
        with pytest.raises(ptxsim.LaunchError):
            go(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".visible .entry other() { ret; }", "has: other"),
        (".visible .entry k() { ret;", "does not end"),
        (".visible .entry k() { bra NOWHERE; }", "NOWHERE"),
        (".visible .entry k() { mov.u32 %r1, 0; }", "%r1"),
        (".visible .entry k() { .reg .b32 %r<2>; mov.u32 %r2, 0; }", "%r2"),
        (".visible .entry k() { .reg .b32 x; mov.u32 x, y; }", "neither .* variable: y"),
        (".visible .entry k() { .local .b8 depot[8]; ret; }", "local memory"),
        (".visible .entry k() { .reg .b128 x; ret; }", "b128"),
        (".visible .entry k() { .surprise; ret; }", "surprise"),
        (".visible .entry k() { .reg .b32 x; mov.u32 x, 1x; }", "1x"),
    ],
)
def test_parse_errors_say_what(text: str, message: str) -> None:
    with pytest.raises((ptxsim.ParseError, ptxsim.UnsupportedInstruction), match=message):
        ptxsim.parse_kernel(text, "k")


def test_parameters_and_lines() -> None:
    text = """
// a comment { with ; braces
.visible .entry k(
    .param .u32 n, /* and
    another */ .param .align 8 .b8 struct[12],
    .param .u64 q
)
{
    .reg .b32 x;
    .loc 1 7 3
    mov.u32 x, 0;
    .loc 1 3 5, function_name $L, inlined_at 1 9 2
    mov.u32 x,
        1;
    ret;
}
    .file 1 "/somewhere/kernel.cu"
"""
    kernel = ptxsim.parse_kernel(text.encode(), "k", {"kernel.cu": "\n".join(f"line {i}" for i in range(1, 20))})
    assert [(p.name, p.offset, p.size) for p in kernel.params] == [("n", 0, 4), ("struct", 8, 12), ("q", 24, 8)]
    assert kernel.param_bytes == 32
    first, second, last = kernel.instructions
    assert (first.line, second.line, last.line) == (11, 13, 15)
    assert [str(frame) for frame in first.frames] == ["/somewhere/kernel.cu:7: line 7"]
    assert [frame.line for frame in second.frames] == [3, 9]
    assert second.text == "mov.u32 x, 1"


def test_scopes_of_inline_assembly() -> None:
    out = np.zeros(32, np.uint32)
    run_ptx(
        ".reg .b32 x; mov.u32 x, 1; { .reg .b32 x; mov.u32 x, 2; } { .reg .b32 x; mov.u32 x, 3; } mov.u32 r0, x;",
        [],
        [out],
    )
    assert (out == 1).all()


def test_errors_read_well() -> None:
    with pytest.raises(ptxsim.SimulationError) as caught:
        run_block(f"{TILE} ld.shared.u32 %t, [base];")
    text = str(caught.value)
    assert text.startswith("uninitialised read: shared memory that nothing has written is read")
    assert "block (0, 0, 0), thread 0, 1, 2" in text
    assert "PTX line 2: ld.shared.u32 %t, [base]" in text
    assert caught.value.source is None


def test_trap() -> None:
    with pytest.raises(ptxsim.SimulationError, match="trap"):
        run_block("trap;")


def test_reports_add_up() -> None:
    one, two = (run_ptx("mov.b32 r0, a0;", [x := np.arange(n, dtype=np.uint32)], [x.copy()]) for n in (32, 96))
    total = one + two
    assert total.warps == 4
    assert total.instructions["ret"] == 4
    assert total.bytes_loaded == 4 * 128
    assert sum([one, two], ptxsim.Report()).to_dict() == total.to_dict()
    plain = total.to_dict()
    assert plain["instructions"]["mov.b32"] == 4
    assert plain["seconds"] == one.seconds + two.seconds
