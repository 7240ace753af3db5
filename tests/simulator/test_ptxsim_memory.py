"""Global memory: exactly the elements of a view, nothing beside or between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ptx_tools import aligned, run_ptx

from cupy_fa2 import ptxsim
from cupy_fa2.ptxsim.memory.elements import ElementGrid
from cupy_fa2.ptxsim.memory.global_memory import GlobalMemory

LANES = np.arange(32)
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def load(memory: GlobalMemory, address: int, unit: int, count: int = 1) -> list[int]:
    rows = memory.load(np.array([address], np.int64), unit, count, LANES[:1])
    return rows.reshape(-1).tolist()


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """Views made as users make them: slices, steps, transposes, broadcasts."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=5))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.uint32]))
    array = np.arange(np.prod(shape), dtype=np.int64).astype(dtype).reshape(shape)
    view = array[draw(hnp.basic_indices(shape, allow_newaxis=False, allow_ellipsis=False, min_dims=1))]
    if draw(st.booleans()):
        view = view.transpose(draw(st.permutations(range(view.ndim))))
    if draw(st.booleans()):
        view = np.broadcast_to(view, (2, *view.shape))
    return view


@given(views(), st.data())
def test_a_byte_is_readable_exactly_if_an_element_has_it(view: np.ndarray, data: st.DataObject) -> None:
    memory = GlobalMemory()
    address = memory.bind(view, "view")
    if not view.size:
        assert address == 0
        return
    owned: dict[int, int] = {}
    for index in np.ndindex(view.shape):
        start = sum(i * s for i, s in zip(index, view.strides, strict=True))
        for i, byte in enumerate(np.ascontiguousarray(view[index]).reshape(1).view(np.uint8).tolist()):
            owned[start + i] = byte
    offset = data.draw(st.integers(min(owned) - 20, max(owned) + 20))
    width = data.draw(st.sampled_from([1, 2, 4, 8]))
    wanted = [owned.get(offset + i) for i in range(width)]
    if (address + offset) % width:
        with pytest.raises(ptxsim.MisalignedAddressError):
            load(memory, address + offset, width)
    elif None in wanted:
        with pytest.raises(ptxsim.OutOfBoundsError):
            load(memory, address + offset, width)
    else:
        value = load(memory, address + offset, width)[0]
        assert list(int(value).to_bytes(width, "little")) == wanted


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-12, 12)), min_size=1, max_size=3), st.integers(1, 4))
def test_any_strides(dimensions: list[tuple[int, int]], itemsize: int) -> None:
    """Interleaved and overlapping strides included, which only `as_strided` makes."""
    shape, strides = (tuple(x) for x in zip(*dimensions, strict=True))
    grid = ElementGrid(shape, strides, itemsize)
    starts = {sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(shape)}
    owned = {start + i - grid.first for start in starts for i in range(itemsize)}
    assert min(owned) == 0
    assert max(owned) + 1 == grid.span
    offsets = np.arange(-8, grid.span + 8)
    for width in (1, 2, 4):
        expected = [all(int(o) + i in owned for i in range(width)) for o in offsets]
        assert grid.contains(offsets, width).tolist() == expected


def test_addresses_keep_the_alignment_of_the_host() -> None:
    memory = GlobalMemory()
    for offset in (0, 2, 16, 130):
        array = aligned(64, offset).view(np.uint16)
        address = memory.bind(array, f"at{offset}")
        assert address % 256 == offset
        assert address % 256 == array.__array_interface__["data"][0] % 256


def test_negative_strides_bind_the_first_element() -> None:
    memory = GlobalMemory()
    array = np.arange(10, dtype=np.uint32)[::-1]
    address = memory.bind(array, "reversed")
    assert load(memory, address, 4) == [9]
    assert load(memory, address - 36, 4) == [0]
    with pytest.raises(ptxsim.OutOfBoundsError, match="past its last"):
        load(memory, address + 4, 4)


def test_a_wide_load_may_not_reach_into_the_next_head() -> None:
    qkv = aligned(4 * 3 * 2 * 40 * 2).view(np.float16).reshape(4, 3, 2, 40)
    memory = GlobalMemory()
    address = memory.bind(qkv[:, 1], "k")
    load(memory, address + 64, 4, 4)
    load(memory, address + 80, 4, 4)  # the other head of k is part of the view
    with pytest.raises(ptxsim.OutOfBoundsError, match=r"between the elements"):
        load(memory, address + 160, 4, 4)
    head = memory.bind(qkv[:, 1, 0], "k0")
    with pytest.raises(ptxsim.OutOfBoundsError, match=r"k0\[4, 40\] \+ 80 bytes, between the elements"):
        load(memory, head + 80, 4, 4)


def test_a_huge_view_costs_nothing() -> None:
    # 2^33 elements of address space, none of them in memory.
    row = np.zeros(64, np.float16)
    view = np.lib.stride_tricks.as_strided(row, (1 << 27, 64), (0, 2))
    memory = GlobalMemory()
    address = memory.bind(view, "broadcast")
    assert load(memory, address + 2, 2) == [0]
    raw = np.empty(1 << 32, np.uint16)  # lazily allocated, never touched but at its end
    raw[-1] = 7
    address = memory.bind(raw, "huge")
    assert load(memory, address + 2 * ((1 << 32) - 1), 2) == [7]
    with pytest.raises(ptxsim.OutOfBoundsError):
        load(memory, address + (1 << 33), 2)


def test_views_are_far_apart() -> None:
    """An offset that wrapped at 32 bits meets nobody's memory."""
    memory = GlobalMemory()
    addresses = [memory.bind(np.zeros(16, np.uint8), f"x{i}") for i in range(3)]
    for address in addresses:
        for stray in (-(1 << 32), 1 << 32, -(1 << 33), 1 << 33):
            with pytest.raises(ptxsim.OutOfBoundsError):
                load(memory, address + stray, 1)


def test_an_access_over_several_views() -> None:
    memory = GlobalMemory()
    a, b = np.arange(16, dtype=np.uint32), np.arange(100, 116, dtype=np.uint32)
    first, second = memory.bind(a, "a"), memory.bind(b, "b")
    addresses = np.where(LANES % 2, first, second) + 4 * (LANES // 2)
    rows = memory.load(addresses, 4, 1, LANES)
    assert rows[:, 0].tolist() == [x // 2 + (0 if x % 2 else 100) for x in range(32)]
    with pytest.raises(ptxsim.OutOfBoundsError) as caught:
        memory.load(addresses + np.where(LANES == 30, 4, 0), 4, 1, LANES)
    assert caught.value.lanes == (30,)


def test_writes() -> None:
    out, fixed = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    body = "{ .reg .b64 %q; ld.param.u64 %q, [p0]; mad.lo.u64 %q, %w64, 4, %q; st.global.u32 [%q], %w; }"
    with pytest.raises(ptxsim.OutOfBoundsError, match="read-only"):
        run_ptx(body, [fixed], [out])
    # r0 is written twice by the same thread, which is no race.
    run_ptx("mov.u32 r0, %w;" + body, [], [out])
    assert out.tolist() == list(range(64))


def test_two_threads_that_write_one_item_race() -> None:
    out = np.zeros(32, np.uint32)
    store = "{ .reg .b64 %q; ld.param.u64 %q, [p0]; st.global.u32 [%q], %w; } mov.u32 r0, 1;"
    with pytest.raises(ptxsim.RaceError, match=r"two threads of one launch write r0\[32\]"):
        run_ptx(store, [], [out])
    late = "{ .reg .b64 %q; .reg .pred p; setp.eq.u32 p, %w, 1; ld.param.u64 %q, [p0]; @p st.global.u32 [%q], %w; }"
    with pytest.raises(ptxsim.RaceError):
        run_ptx(late + "mov.u32 r0, 1;", [], [out])


def test_outputs_start_uninitialised() -> None:
    out = np.zeros(32, np.uint32)
    load_own = "{ .reg .b64 %q; ld.param.u64 %q, [p0]; mad.lo.u64 %q, %w64, 4, %q; @S ld.global.u32 r0, [%q]; }"
    with pytest.raises(ptxsim.UninitializedReadError, match=r"r0\[32\]"):
        run_ptx(load_own.replace("@S ", ""), [], [out])
    run_ptx(load_own.replace("@S", "st.global.u32 [%q], %w;"), [], [out])
    assert out.tolist() == list(range(32))


def test_a_read_only_array_cannot_be_bound_for_writing() -> None:
    array = np.zeros(4)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        GlobalMemory().bind(array, "fixed", writable=True)


def test_an_atomic_reads_what_it_adds_to() -> None:
    memory = GlobalMemory()
    address = memory.bind(np.zeros(4, np.float32), "sum", writable=True)
    with pytest.raises(ptxsim.UninitializedReadError):
        memory.atomic_add(np.array([address]), np.ones((1, 1), np.float32), LANES[:1])


@pytest.mark.parametrize("opcode", ["atom.global.add.f32 r1,", "red.global.add.f32"])
def test_atomic_add(opcode: str) -> None:
    total, old = np.full(1, 0.5, np.float32), np.zeros(64, np.float32)
    memory = GlobalMemory()
    kernel = ptxsim.parse_kernel(
        f"""
        .visible .entry k(.param .u64 p0, .param .u64 p1) {{
            .reg .b32 %t; .reg .f32 x, r1; .reg .b64 a, b;
            mov.u32 %t, %tid.x; cvt.rn.f32.u32 x, %t; mov.f32 r1, 0f00000000;
            ld.param.u64 a, [p0]; ld.param.u64 b, [p1];
            {opcode} [a], x;
            mad.wide.u32 b, %t, 4, b; st.global.f32 [b], r1;
            ret;
        }}""",
        "k",
    )
    addresses = [
        memory.bind(total, "total", writable=True, readable=True), memory.bind(old, "old", writable=True)
    ]  # fmt: skip
    ptxsim.launch(kernel, (1, 1, 1), (64, 1, 1), 0, [a.to_bytes(8, "little") for a in addresses], memory)
    assert total[0] == 0.5 + sum(range(64))
    if opcode.startswith("atom"):
        assert sorted(old)[:3] == [0.5, 0.5, 1.5]


def test_sectors() -> None:
    x = aligned(4 * 1024).view(np.uint32)
    out = aligned(4 * 32).view(np.uint32)
    report = run_ptx("mov.b32 r0, a0;", [x[:32]], [out])
    assert (report.global_load_sectors, report.global_load_sectors_ideal) == (4, 4)
    assert (report.global_store_sectors, report.global_store_sectors_ideal) == (4, 4)
    assert (report.bytes_loaded, report.bytes_stored) == (128, 128)


@pytest.mark.parametrize(
    ("stride", "width", "sectors", "ideal"),
    [(4, 4, 4, 4), (16, 16, 16, 16), (64, 4, 32, 4), (0, 4, 1, 1), (2, 2, 2, 2), (80, 16, 32, 16)],
)
def test_sectors_of_strided_accesses(stride: int, width: int, sectors: int, ideal: int) -> None:
    report = ptxsim.Report()
    report.on_global(False, 4096 + LANES * stride, width, None)
    assert (report.global_load_sectors, report.global_load_sectors_ideal) == (sectors, ideal)
    # Threads that take no part do not count.
    report.on_global(True, 4096 + LANES[:1] * stride, width, LANES[3:4])
    assert (report.global_store_sectors, report.global_store_sectors_ideal) == (1, 1)
