"""Bulk copies: tensor copies against NumPy slicing, maps that cannot be, plain copies."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_tools import aligned

from cupy_fa2 import ptxsim

KERNEL = """
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 out, .param .align 4 .b8 at[20], .param .u32 bytes,
                  .param .u64 source)
{{
    .reg .b32 t, mbar, n, size, tile, to, w, c0, c1, c2, c3, c4; .reg .b64 m, g, s; .reg .pred p, q;
    .shared .align 8 .b8 barrier[8];
    mov.u32 t, %tid.x; mov.u32 mbar, barrier; mov.u32 tile, smem; add.u32 tile, tile, {offset};
    ld.param.u32 c0, [at]; ld.param.u32 c1, [at+4]; ld.param.u32 c2, [at+8]; ld.param.u32 c3, [at+12];
    ld.param.u32 c4, [at+16]; ld.param.u32 size, [bytes]; ld.param.u64 s, [source];
    {map}
    setp.ne.u32 p, t, 0;
    @p bra READY;
    mbarrier.init.shared::cta.b64 [mbar], 1;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [mbar], size;
    {copy}
READY:
    bar.sync 0;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 q, [mbar], 0;
    @!q bra WAIT;
    mad.lo.u32 to, t, 4, tile; mov.u32 n, t; ld.param.u64 g, [out]; mad.wide.u32 g, t, 4, g;
STORE:
    mul.lo.u32 w, n, 4;
    setp.ge.u32 p, w, size;
    @p bra DONE;
    ld.shared.u32 w, [to]; st.global.u32 [g], w;
    add.u32 n, n, 32; add.u32 to, to, 128; add.u64 g, g, 128;
    bra STORE;
DONE:
    ret;
}}
"""
IN_PARAMETERS = "mov.b64 m, map; cvta.param.u64 m, m;"
IN_MEMORY = "mov.u64 m, s;"


def tensor_copy(rank: int, hint: bool = False) -> str:
    coordinates = ", ".join(f"c{i}" for i in range(rank))
    name = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    return f"{name}{'.L2::cache_hint' if hint else ''} [tile], [m, {{{coordinates}}}], [mbar]{', s' if hint else ''};"


def run(
    copy: str,
    nbytes: int,
    memory: ptxsim.GlobalMemory,
    encoded: bytes = bytes(128),
    at: tuple[int, ...] = (),
    source: int = 0,
    where: str = IN_PARAMETERS,
    offset: int = 0,
) -> tuple[np.ndarray, ptxsim.Report]:
    """What one copy leaves in shared memory, and the report."""
    out = aligned(nbytes).view(np.uint32)
    params = [
        encoded,
        memory.bind(out, "out", writable=True).to_bytes(8, "little"),
        np.array([*at, *[0] * (5 - len(at))], np.int32).tobytes(),
        nbytes.to_bytes(4, "little"),
        source.to_bytes(8, "little"),
    ]
    kernel = ptxsim.parse_kernel(KERNEL.format(copy=copy, map=where, offset=offset), "k")
    report = ptxsim.launch(kernel, (1, 1, 1), (32, 1, 1), nbytes + offset, params, memory)
    return out.view(np.uint8), report


def tensor(shape: tuple[int, ...], dtype: Any, row_bytes: int = 0) -> np.ndarray:
    """Numbers of some shape whose rows are multiples of 16 bytes apart."""
    itemsize = np.dtype(dtype).itemsize
    pitch = max(row_bytes, -(-shape[-1] * itemsize // 16) * 16)
    whole = aligned(math.prod(shape[:-1]) * pitch).view(dtype).reshape(*shape[:-1], pitch // itemsize)
    view = whole[..., : shape[-1]]
    view[...] = np.random.default_rng(0).integers(-100, 100, shape).astype(dtype)
    return view


def box_of(array: np.ndarray, first: tuple[int, ...], box: tuple[int, ...], steps: tuple[int, ...]) -> np.ndarray:
    """The box in C order, zeros outside; arguments innermost first, as in a tensor map."""
    first, box, steps = first[::-1], box[::-1], (*steps[:0:-1], 1)
    result = np.zeros([len(range(0, b, s)) for b, s in zip(box, steps, strict=True)], array.dtype)
    for index in np.ndindex(result.shape):
        where = tuple(f + i * s for f, i, s in zip(first, index, steps, strict=True))
        if all(0 <= w < n for w, n in zip(where, array.shape, strict=True)):
            result[index] = array[where]
    return result


def swizzled(flat: np.ndarray, swizzle: int, offset: int = 0) -> np.ndarray:
    """Bytes as a swizzle lays them out from an address that is `offset` past a multiple of 1024."""
    result = np.empty_like(flat)
    for i in range(0, flat.size, 16):
        address = offset + i
        row, chunk = address // 128, address // 16 % 8
        chunk ^= {0: 0, 32: row & 1, 64: row & 3, 128: row & 7}[swizzle]
        to = row * 128 + chunk * 16 - offset
        result[to : to + 16] = flat[i : i + 16]
    return result


def check(
    array: np.ndarray,
    first: tuple[int, ...],
    box: tuple[int, ...],
    steps: tuple[int, ...] = (),
    swizzle: int = 0,
    **options: Any,
) -> ptxsim.Report:
    steps = steps or (1,) * len(box)
    memory = ptxsim.GlobalMemory()
    address = memory.bind(array, "tensor")
    encoded = ptxsim.encode_tensor_map(
        address, array.itemsize, array.shape[::-1], array.strides[-2::-1], box, steps, swizzle
    )
    assert len(encoded) == 128
    expected = box_of(array, first, box, steps)
    got, report = run(tensor_copy(array.ndim), expected.nbytes, memory, encoded, first, **options)
    flat = np.ascontiguousarray(expected).view(np.uint8).reshape(-1)
    np.testing.assert_array_equal(got, swizzled(flat, swizzle, options.get("offset", 0)))
    return report


SHAPES = {1: (100,), 2: (9, 40), 3: (3, 9, 40), 4: (2, 3, 9, 40), 5: (2, 2, 3, 5, 24)}


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16, np.float32], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("rank", SHAPES)
def test_boxes_inside(rank: int, dtype: Any) -> None:
    shape = SHAPES[rank]
    inner = 16 // np.dtype(dtype).itemsize
    box = (inner, *(2,) * (rank - 1))
    check(tensor(shape, dtype), (inner // 2, *(1, 0, 0, 0)[: rank - 1]), box)
    check(tensor(shape, dtype), (0,) * rank, (inner, *(1,) * (rank - 1)))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=lambda t: np.dtype(t).name)
def test_boxes_that_leave_the_tensor_on_every_side(dtype: Any) -> None:
    array = tensor((3, 5, 20), dtype)
    for first in itertools.product((-40, -3, 0, 12, 19, 20, 50), (-4, -1, 3, 5), (-2, -1, 2, 3)):
        check(array, first, (16, 4, 2))


def test_head_dim_40_of_a_fused_qkv() -> None:
    """The tail of a row is zero, though the next head's bytes are there."""
    qkv = tensor((2, 30, 3, 40), ml_dtypes.bfloat16)
    check(qkv[:, :, 1].transpose(0, 1, 2), (0, 20, 1), (64, 16, 1), swizzle=128)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=lambda t: np.dtype(t).name)
def test_swizzles(dtype: Any, swizzle: int) -> None:
    inner = swizzle // np.dtype(dtype).itemsize
    array = tensor((4, 3, 40, 100), dtype)
    report = check(array, (8, 3, 1, 2), (inner, 32, 2, 1), swizzle=swizzle)
    assert report.wavefronts["cp.async.bulk"] == report.wavefronts_ideal["cp.async.bulk"] == 64 * swizzle // 128
    # The pattern is one of addresses, not of the box.
    check(array, (8, 3, 1, 2), (inner, 32, 2, 1), swizzle=swizzle, offset=384)


@settings(max_examples=3 * settings().max_examples // 2)
@given(st.data())
def test_any_box(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 4))
    dtype = data.draw(st.sampled_from([np.uint8, ml_dtypes.bfloat16, np.float32]))
    shape = (*(data.draw(st.integers(1, 12)) for _ in range(rank - 1)), data.draw(st.integers(1, 80)))
    unit = 16 // np.dtype(dtype).itemsize
    box = (data.draw(st.integers(1, 4)) * unit, *(data.draw(st.integers(1, 6)) for _ in range(rank - 1)))
    steps = (1, *(data.draw(st.integers(1, 3)) for _ in range(rank - 1)))
    first = tuple(data.draw(st.integers(-b - 1, n + 1)) for b, n in zip(box, shape[::-1], strict=True))
    check(tensor(shape, dtype), first, box, steps)


def test_what_is_counted() -> None:
    array = tensor((64, 64), ml_dtypes.bfloat16, row_bytes=256)
    report = check(array, (0, 0), (64, 64), swizzle=128)
    assert report.bytes_loaded == 64 * 128
    assert report.global_load_sectors == report.global_load_sectors_ideal == 64 * 4
    assert report.wavefronts["cp.async.bulk"] == 64
    # 16 bytes of each sector of 32, and nothing at all outside.
    report = check(array, (8, 40), (8, 64))
    assert report.bytes_loaded == 24 * 16
    assert (report.global_load_sectors, report.global_load_sectors_ideal) == (24, 12)


def test_every_byte_is_an_element_of_a_bound_view() -> None:
    array = tensor((8, 40), ml_dtypes.bfloat16, row_bytes=128)
    memory = ptxsim.GlobalMemory()
    address = memory.bind(array, "tensor")
    for dims in ((48, 8), (40, 9)):
        encoded = ptxsim.encode_tensor_map(address, 2, dims, (128,), (64, 16), (1, 1), 128)
        with pytest.raises(ptxsim.OutOfBoundsError, match="tensor"):
            run(tensor_copy(2), 2048, memory, encoded, (0, 0))


def test_a_map_in_global_memory_and_a_cache_hint() -> None:
    array = tensor((8, 64), ml_dtypes.bfloat16)
    memory = ptxsim.GlobalMemory()
    encoded = ptxsim.encode_tensor_map(memory.bind(array, "tensor"), 2, (64, 8), (128,), (64, 8), (1, 1), 0)
    table = aligned(128)
    table[:] = np.frombuffer(encoded, np.uint8)
    got, _ = run(tensor_copy(2, hint=True), 1024, memory, source=memory.bind(table, "map"), where=IN_MEMORY)
    np.testing.assert_array_equal(got, array.view(np.uint8).reshape(-1))


def test_copies_that_cannot_be() -> None:
    array = tensor((8, 64), ml_dtypes.bfloat16)
    memory = ptxsim.GlobalMemory()
    encoded = ptxsim.encode_tensor_map(memory.bind(array, "tensor"), 2, (64, 8), (128,), (64, 8), (1, 1), 128)
    narrow = ptxsim.encode_tensor_map(memory.bind(array, "tensor"), 2, (64, 8), (128,), (32, 8), (1, 1), 128)
    with pytest.raises(ptxsim.MisalignedAddressError, match="128"):
        run(tensor_copy(2), 1024, memory, encoded, offset=64)
    with pytest.raises(ptxsim.LaunchError, match="no tensor map"):
        run(tensor_copy(2), 1024, memory, bytes(128))
    with pytest.raises(ptxsim.LaunchError, match="3 dimensions"):
        run(tensor_copy(3), 1024, memory, encoded)
    with pytest.raises(ptxsim.UnsupportedInstruction, match="swizzle"):
        run(tensor_copy(2), 512, memory, narrow)
    with pytest.raises(ptxsim.OutOfBoundsError, match="shared memory"):
        run(tensor_copy(2).replace("[tile]", "[tile+128]"), 1024, memory, encoded)
    with pytest.raises(ptxsim.MisalignedAddressError, match="tensor map"):
        run(tensor_copy(2), 1024, memory, encoded, where=IN_PARAMETERS + "add.u64 m, m, 16;")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("address", 0x1008),
        ("address", 0),
        ("dtype_bytes", 3),
        ("dims", ()),
        ("dims", (8,) * 6),
        ("dims", (0, 8)),
        ("dims", (2**32 + 1, 8)),
        ("strides_bytes", ()),
        ("strides_bytes", (40,)),
        ("strides_bytes", (2**40,)),
        ("box", (64,)),
        ("box", (64, 0)),
        ("box", (64, 257)),
        ("box", (4, 8)),
        ("box", (128, 8)),
        ("element_strides", (1,)),
        ("element_strides", (1, 9)),
        ("swizzle", 16),
    ],
)
def test_maps_that_the_driver_refuses(argument: str, value: Any) -> None:
    arguments: dict[str, Any] = {
        "address": 0x1000, "dtype_bytes": 2, "dims": (64, 8), "strides_bytes": (128,), "box": (64, 8),
        "element_strides": (1, 1), "swizzle": 128,
    }  # fmt: skip
    ptxsim.encode_tensor_map(**arguments)
    with pytest.raises(ValueError, match=f"^{argument}: "):
        ptxsim.encode_tensor_map(**{**arguments, argument: value})


PLAIN = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [s], {}, [mbar];"


@pytest.mark.parametrize("nbytes", [16, 48, 4096])
def test_plain_bulk_copies(nbytes: int) -> None:
    source = aligned(nbytes)
    source[:] = np.random.default_rng(1).integers(0, 256, nbytes)
    for size in ("size", str(nbytes)):
        memory = ptxsim.GlobalMemory()
        got, report = run(PLAIN.format(size), nbytes, memory, source=memory.bind(source, "source"))
        np.testing.assert_array_equal(got, source)
        assert report.bytes_loaded == nbytes


def test_plain_bulk_copies_that_cannot_be() -> None:
    memory = ptxsim.GlobalMemory()
    source = memory.bind(aligned(256), "source")
    for copy, at in (
        (PLAIN.format(40), source),
        (PLAIN.format(64), source + 8),
        (PLAIN.replace("[tile]", "[tile+8]").format(64), source),
    ):
        with pytest.raises(ptxsim.MisalignedAddressError, match="16"):
            run(copy, 64, memory, source=at)
    with pytest.raises(ptxsim.OutOfBoundsError, match="source"):
        run(PLAIN.format(64), 64, memory, source=source + 224)
