"""What a prepared call is remembered by, and what a launch is given: stand-ins for CuPy, so that no GPU is needed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cupy_fa2.call import flow
from cupy_fa2.call.cuda import CudaPlace
from cupy_fa2.device import named_device
from cupy_fa2.kernel.params import FWD_PARAMS
from cupy_fa2.problem.options import Options

ADDRESSES = itertools.count(1 << 20, 1 << 20)


class Array:
    """As much of a CuPy array as a call looks at before it launches; contents are on the host."""

    def __init__(self, host, address=None, device_id=0):
        self.host = host
        self.shape, self.strides, self.dtype = host.shape, host.strides, host.dtype
        self.ndim, self.size, self.itemsize, self.flags = host.ndim, host.size, host.itemsize, host.flags
        self.data = SimpleNamespace(ptr=next(ADDRESSES) if address is None else address, device_id=device_id)

    def __repr__(self):
        return f"{self.dtype}{self.shape}"

    def astype(self, dtype):
        return Array(self.host.astype(dtype))

    def copy(self):
        return Array(self.host.copy())

    def reshape(self, shape):
        return Array(self.host.reshape(shape), self.data.ptr)

    def view(self, dtype):
        return Array(self.host.view(dtype), self.data.ptr)


def zeros(*shape, dtype=np.float16, **where):
    return Array(np.zeros(shape, dtype), **where)


CUPY = SimpleNamespace(
    ndarray=Array,
    empty=lambda shape, dtype: Array(np.empty(shape, dtype)),
    asarray=Array,
    clip=lambda x, low, high: Array(np.clip(x.host, low, high)),
    ascontiguousarray=lambda x: x,
)


class Place(CudaPlace):
    """An H200 that is not there: what is launched on it is kept."""

    def __init__(self, capturing=False):
        self.xp, self.key = CUPY, 0
        self.empty = CUPY.empty
        self.launches = []
        self.capturing = capturing

    device = named_device("H200")

    def load(self, spec):
        def kernel(launch, args, place):
            self.launches.append(np.frombuffer(args[: FWD_PARAMS.size], FWD_PARAMS.dtype)[0])

        return kernel

    def tensor_map(self, address, box):
        return bytes(128)

    def refuse_capture(self, what, remedy):
        if self.capturing:
            raise RuntimeError(f"{what}; {remedy}")


PLACE = Place()


@pytest.fixture
def preparations(monkeypatch):
    """How many calls had to be validated and planned; the launch itself is left out."""
    seen = []

    def validate(place, key, *arguments):
        seen.append(arguments)
        problem = SimpleNamespace(
            out_shape=(2, 8, 1, 64), lse_shape=(2, 1, 8), out_dtype="f16", seqlen_q=8, seqlen_k=8, num_heads=1, batch=2
        )
        flow._calls[key] = SimpleNamespace(problem=problem, empty=True, spans=((0, 1),) * 4)
        return flow._calls[key]

    monkeypatch.setattr(flow, "_validate", validate)
    monkeypatch.setattr(flow, "_calls", {})
    return seen


def launch(seqlen_k=8, address=4096, **options):
    q, k = zeros(2, 8, 1, 64, address=address), zeros(2, seqlen_k, 1, 64, address=4096)
    return flow._attention(PLACE, q, k, k, Options(**{"causal": True} | options))


def test_the_same_signature_is_prepared_once(preparations):
    for address in (4096, 8192, 1 << 40):
        launch(address=address)
    assert len(preparations) == 1


@pytest.mark.parametrize("change", [
    {"seqlen_k": 9}, {"causal": False}, {"causal": 1}, {"softmax_scale": 1.0}, {"softmax_scale": True}, {"align": 0},
    {"align": False}, {"align": "top-left"}, {"address": 4098}, {"window": (1, 0)}, {"softcap": 3}, {"sinks": [1.0]},
    {"alibi_slopes": [[1.0], [2.0]]}, {"seqlens_q": [3, 4]}, {"seqlens_k": np.array([3, 4])}, {"dropout_seed": 3},
    {"bias": zeros(8, 8)}, {"mask": zeros(8, dtype=np.bool_)},
], ids=str)  # fmt: skip
def test_another_signature_is_prepared_anew(preparations, change):
    launch()
    launch(**change)
    assert len(preparations) == 2
    launch(**change)
    assert len(preparations) == 2


def test_the_shape_of_align_belongs_to_the_signature(preparations):
    """An array of the wrong length must reach the validation, also after a call with one of the right length."""
    for batch in (2, 2, 3, 1):
        launch(align=zeros(batch, dtype=np.int32))
    assert len(preparations) == 3


def test_what_belongs_to_the_signature_of_an_operand(preparations):
    for bias in (
        zeros(8, 8, address=4096), zeros(8, 8, address=8192), zeros(8, 8, address=4100), zeros(1, 8, address=4096),
        zeros(8, 8, dtype=np.float32, address=4096), Array(np.zeros((8, 16), np.float16)[:, :8], address=4096),
    ):  # fmt: skip
        launch(bias=bias)
    assert len(preparations) == 5
    launch(mask=zeros(8, 8, address=4096))
    assert len(preparations) == 6


def test_what_is_equal_is_prepared_once(preparations):
    for window in ((2, 0), [2, 0], (np.int64(2), np.uint8(0))):
        launch(window=window)
    for softcap in (3, 3.0, np.float32(3)):
        launch(softcap=softcap)
    assert len(preparations) == 2


def test_seeds_do_not_prepare_anew(preparations):
    for seed in (0, 7, 2**64 - 1, np.uint64(3), np.array(-1), np.array(8, np.uint64)):
        launch(dropout_p=0.5, dropout_seed=seed)
    for p in (0.5, 1 - 0.5):
        launch(dropout_p=p, dropout_seed=1)
    assert len(preparations) == 1
    for seed in (3, 4):
        launch(dropout_p=0.5, dropout_seed=Array(np.array(seed)))
    assert len(preparations) == 2
    launch(dropout_p=0.25, dropout_seed=1)
    assert len(preparations) == 3


@pytest.mark.parametrize("change", [
    {"window": (True, 0)}, {"window": (-1, 0)}, {"softcap": True}, {"softcap": 0}, {"dropout_p": True},
    {"dropout_p": 0.1}, {"dropout_p": 0.1, "dropout_seed": 1.0}, {"dropout_p": 1, "dropout_seed": 1},
    {"dropout_seed": True},
], ids=str)  # fmt: skip
def test_what_equals_a_right_value_is_refused_all_the_same(preparations, change):
    """True == 1, and a warm call is not validated."""
    launch(window=(1, 0))
    launch(softcap=1)
    launch(dropout_p=0, dropout_seed=1)
    with pytest.raises((TypeError, ValueError), match=next(iter(change))[:7]):
        launch(**change)


@pytest.fixture
def launched(monkeypatch):
    """The arguments of what is launched, by a plan of an H200."""
    monkeypatch.setattr(flow, "_calls", {})
    PLACE.launches.clear()
    return PLACE.launches


def test_a_launch_is_given_the_addresses_of_its_operands(launched):
    operands = {
        "align": zeros(2, dtype=np.int32), "seqlens_q": zeros(2, dtype=np.int32), "bias": zeros(1, 8, 8),
        "seqlens_k": zeros(2, dtype=np.int32), "alibi_slopes": zeros(1, dtype=np.float32),
        "mask": zeros(2, 1, 1, 8, dtype=np.bool_), "sinks": zeros(1, dtype=np.float32),
        "dropout_seed": zeros(dtype=np.uint64),
    }  # fmt: skip
    fields = {"align": "diagonal_offsets", "dropout_seed": "dropout_seed_array"}
    for _ in range(2):
        launch(**operands, dropout_p=0.5, window=(3, 1), softcap=2.0)
        args = launched[-1]
        for name, x in operands.items():
            assert args[fields.get(name, name)] == x.data.ptr
        assert args["dropout_seed"] == 0
        assert (args["window_left"], args["window_right"], args["softcap"]) == (3, 0, 2)
        operands["bias"] = zeros(1, 8, 8)
    assert len(flow._calls) == 1
    launch()
    assert not any(launched[-1][fields.get(name, name)] for name in operands)


def test_a_launch_is_given_the_value_of_a_seed_that_is_known(launched):
    for seed, bits in ((5, 5), (2**64 - 1, 2**64 - 1), (np.array(-2), 2**64 - 2), (np.uint64(9), 9)):
        launch(dropout_p=0.5, dropout_seed=seed)
        assert (launched[-1]["dropout_seed"], launched[-1]["dropout_seed_array"]) == (bits, 0)


@pytest.mark.parametrize("lengths", [[3, 8], (0, 1), np.array([3, 4]), np.array([3, 4], np.int32)[::-1],
                                     np.array([3, 4], np.uint8)], ids=str)  # fmt: skip
def test_lengths_from_the_host_are_copied_to_the_device(launched, monkeypatch, lengths):
    copies = []
    monkeypatch.setattr(CUPY, "asarray", lambda x: copies.append(Array(x)) or copies[-1])
    launch(seqlens_k=lengths)
    assert copies[0].host.dtype == np.int32
    assert copies[0].host.tolist() == list(lengths)
    assert launched[-1]["seqlens_k"] == copies[0].data.ptr


def test_strides_are_those_of_the_copy(launched):
    launch(alibi_slopes=np.zeros((2, 3), np.float32)[:, 1:2], sinks=[1])
    assert (launched[-1]["alibi_stride_batch"], launched[-1]["alibi_stride_head"]) == (1, 0)
    assert launched[-1]["alibi_slopes"]
    assert launched[-1]["sinks"]


def test_lengths_of_other_dtypes_are_converted_on_the_device(launched, monkeypatch):
    given = Array(np.array([3, 2**40]))
    launch(seqlens_k=given)
    assert launched[-1]["seqlens_k"] not in (0, given.data.ptr)
    for misaligned in (zeros(2, dtype=np.int32, address=4098), Array(np.zeros(4, np.int32)[::2])):
        launch(seqlens_k=misaligned)
        assert launched[-1]["seqlens_k"] not in (0, misaligned.data.ptr)


@pytest.mark.parametrize("lengths", [[3, 9], np.array([-1, 3])], ids=str)
def test_lengths_from_the_host_are_checked_in_warm_calls_too(launched, lengths):
    for name in ("seqlens_q", "seqlens_k"):
        launch(**{name: [3, 8]})
        count = len(launched)
        with pytest.raises(ValueError, match=f"{name} must be lengths from 0 to 8, got"):
            launch(**{name: lengths})
        assert len(launched) == count


CONVERTED = {
    "seqlens_k": [[3, 4], np.array([3, 4]), Array(np.array([3, 4]))],
    "align": [Array(np.array([3, 4]))],
    "alibi_slopes": [[1.0], np.ones(1, np.float32)],
    "sinks": [[1.0], np.ones(1, np.float32)],
    "dropout_seed": [zeros(dtype=np.int64, address=4100)],
}


@pytest.mark.parametrize(("name", "value"), [(name, x) for name, xs in CONVERTED.items() for x in xs])
def test_nothing_is_copied_under_capture(launched, monkeypatch, name, value):
    monkeypatch.setattr(PLACE, "capturing", True)
    launch(seqlens_k=zeros(2, dtype=np.int32), dropout_p=0.5, dropout_seed=3)
    with pytest.raises(RuntimeError, match=f"^{name} has to be"):
        launch(**{name: value})
    assert len(launched) == 1


@pytest.mark.parametrize(("name", "array"), [
    ("align", zeros(2, dtype=np.int32, address=1 << 30)), ("bias", zeros(2, 1, 8, 8, address=1 << 30)),
    ("mask", zeros(8, dtype=np.bool_, address=1 << 30)), ("sinks", zeros(1, dtype=np.float32, address=1 << 30)),
    ("alibi_slopes", zeros(1, dtype=np.float32, address=1 << 30)),
    ("seqlens_q", zeros(2, dtype=np.int32, address=1 << 30)), ("seqlens_k", zeros(2, dtype=np.int64, address=1 << 30)),
    ("dropout_seed", zeros(dtype=np.int64, address=1 << 30)),
])  # fmt: skip
def test_out_must_not_overlap_an_operand(launched, name, array):
    size = 2 * 8 * 64 * 2
    end = array.data.ptr + array.size * array.itemsize
    for begin in (array.data.ptr - size, end):  # beside it
        launch(**{name: array}, address=1 << 40, out=zeros(2, 8, 1, 64, address=-(-begin // 16) * 16))
    for begin in (array.data.ptr, array.data.ptr - size + 2, end - 2):
        with pytest.raises(ValueError, match=f"out must not overlap {name}"):
            launch(**{name: array}, address=1 << 40, out=zeros(2, 8, 1, 64, address=begin // 2 * 2))


@pytest.mark.parametrize(("name", "value"), [
    ("bias", np.zeros((8, 8), np.float16)), ("mask", np.zeros((8, 8), np.bool_)), ("align", np.zeros(2, np.int32)),
    ("bias", zeros(8, 8, device_id=1)), ("sinks", zeros(1, dtype=np.float32, device_id=1)),
    ("dropout_seed", zeros(dtype=np.int64, device_id=1)),
])  # fmt: skip
def test_arrays_elsewhere_are_refused(launched, name, value):
    with pytest.raises((TypeError, ValueError), match=rf"{name} (is a numpy|must be on q's CUDA device 0, got 1)"):
        launch(**{name: value})
    assert not launched


def test_lengths_may_come_from_anywhere_in_any_order(launched):
    """Those that are on the device may overlap out; those that are not have no place there."""
    out = zeros(2, 8, 1, 64)
    overlapping = zeros(2, dtype=np.int32, address=out.data.ptr)
    for lengths in (np.array([3, 4], np.int32), zeros(2, dtype=np.int32), np.array([3, 4], np.int32)):
        launch(seqlens_k=lengths, out=out)
        with pytest.raises(ValueError, match="out must not overlap seqlens_k"):
            launch(seqlens_k=overlapping, out=out)


def test_bfloat16_bias(launched):
    q = zeros(2, 8, 1, 64, dtype=ml_dtypes.bfloat16)
    for dtype in (ml_dtypes.bfloat16, np.float32):
        flow._attention(PLACE, q, q, q, Options(bias=zeros(8, dtype=dtype)))
    with pytest.raises(TypeError, match="bias must be bfloat16 or float32, got float16"):
        flow._attention(PLACE, q, q, q, Options(bias=zeros(8)))
