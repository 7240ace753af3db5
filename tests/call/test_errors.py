"""Every wrong argument is refused before anything is launched or written, by an error that names it."""

import ml_dtypes
import numpy as np
import pytest
from conftest import gpu_count
from error_tools import arguments, refused

import cupy_fa2

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def all_as(dtype):
    return lambda xp, a: {name: x.astype(dtype) for name, x in a.items()}


def one_as(name, dtype):
    return lambda xp, a: {name: a[name].astype(dtype)}


def one_shaped(name, shape):
    return lambda xp, a: {name: xp.ones(shape, np.float16)}


def option(**options):
    return lambda xp, a: options


def array_as(name, shape, dtype=np.float32):
    return lambda xp, a: {name: xp.ones(shape, dtype)}


def lists(xp, a):
    return {"q": [[[[1.0]]]]}


def transposed_heads(xp, a):
    return {"layout": "bhsd"}


# id: (changed arguments, exception, what its message must mention: patterns joined by " & ")
WRONG = {
    # rank and kind
    "q of rank 3": (one_shaped("q", (5, 4, 16)), ValueError, r"\bq\b & (\b4\b|four)"),
    "k of rank 5": (one_shaped("k", (1, 2, 7, 2, 16)), ValueError, r"\bk\b"),
    "v of rank 0": (one_shaped("v", ()), ValueError, r"\bv\b"),
    "q a list": (lists, TypeError, r"\bq\b & list"),
    "k None": (option(k=None), TypeError, r"\bk\b & None"),
    "v a number": (option(v=3.0), TypeError, r"\bv\b & float"),
    # dtype
    "float32": (all_as(np.float32), TypeError, r"\bq\b & float32 & float16 & bfloat16 & astype"),
    "float64": (all_as(np.float64), TypeError, r"\bq\b & float64"),
    "int8": (all_as(np.int8), TypeError, r"\bq\b & int8"),
    "bool": (all_as(np.bool_), TypeError, r"\bq\b & bool"),
    "complex64": (all_as(np.complex64), TypeError, r"\bq\b & complex64"),
    "uint16": (all_as(np.uint16), TypeError, r"\bq\b & uint16 & view & bfloat16"),
    "k of another dtype": (one_as("k", BFLOAT16), TypeError, r"\bk\b & bfloat16 & float16"),
    "v of another dtype": (one_as("v", BFLOAT16), TypeError, r"\bv\b & bfloat16 & float16"),
    "v float32": (one_as("v", np.float32), TypeError, r"\bv\b & float32"),
    # shapes
    "batch of k": (one_shaped("k", (3, 7, 2, 16)), ValueError, r"\bk\b & \b[23]\b"),
    "batch of k 1": (one_shaped("k", (1, 7, 2, 16)), ValueError, r"\bk\b & \b[12]\b"),
    "batch of v": (one_shaped("v", (1, 7, 2, 24)), ValueError, r"\bv\b & \b[12]\b"),
    "seqlen of v longer": (one_shaped("v", (2, 8, 2, 24)), ValueError, r"\bv\b & \b[78]\b"),
    "seqlen of v shorter": (one_shaped("v", (2, 6, 2, 24)), ValueError, r"\bv\b & \b[67]\b"),
    "heads of v": (one_shaped("v", (2, 7, 4, 24)), ValueError, r"\bv\b & \b[24]\b"),
    "head_dim of k": (one_shaped("k", (2, 7, 2, 24)), ValueError, r"\bk\b & \b(16|24)\b"),
    "heads no multiple": (one_shaped("q", (2, 5, 3, 16)), ValueError, r"heads & multiple"),
    "fewer heads than kv heads": (one_shaped("q", (2, 5, 1, 16)), ValueError, r"heads & multiple"),
    "axes of the other layout": (transposed_heads, ValueError, r"heads"),
    "head_dim 0": (
        lambda xp, a: {"q": a["q"][..., :0], "k": a["k"][..., :0]},
        ValueError,
        r"head_dim & \b0\b & \b1\b & \b256\b",
    ),
    "head_dim 257": (
        lambda xp, a: {"q": xp.ones((2, 5, 4, 257), np.float16), "k": xp.ones((2, 7, 2, 257), np.float16)},
        ValueError,
        r"head_dim & \b257\b",
    ),
    "head_dim_v 0": (lambda xp, a: {"v": a["v"][..., :0]}, ValueError, r"(\bv\b|head_dim_v) & \b0\b"),
    "head_dim_v 264": (one_shaped("v", (2, 7, 2, 264)), ValueError, r"(\bv\b|head_dim_v) & \b264\b"),
    # options
    "scale nan": (option(softmax_scale=np.nan), ValueError, r"softmax_scale & nan"),
    "scale inf": (option(softmax_scale=np.inf), ValueError, r"softmax_scale & inf"),
    "scale minus inf": (option(softmax_scale=-np.inf), ValueError, r"softmax_scale & -inf"),
    "scale beyond float32": (option(softmax_scale=1e300), ValueError, r"softmax_scale"),
    "scale bool": (option(softmax_scale=True), TypeError, r"softmax_scale & bool"),
    "scale complex": (option(softmax_scale=1j), TypeError, r"softmax_scale & complex"),
    "scale string": (option(softmax_scale="0.125"), TypeError, r"softmax_scale & str"),
    "scale an array": (option(softmax_scale=np.ones(4)), TypeError, r"softmax_scale"),
    "align unknown": (option(align="bottom"), ValueError, r"align & bottom & bottom-right & top-left"),
    "align float": (option(align=1.5), TypeError, r"align & float"),
    "align None": (option(align=None), TypeError, r"align"),
    "align bool": (option(align=True), TypeError, r"align & bool"),
    "align too long": ((lambda xp, a: {"align": xp.asarray(np.array([0, 1, 2]))}), ValueError, r"align & \b3\b"),
    "align too short": ((lambda xp, a: {"align": xp.asarray(np.array([0]))}), ValueError, r"align & \b1\b"),
    "align of rank 2": ((lambda xp, a: {"align": xp.asarray(np.zeros((2, 1), np.int32))}), ValueError, r"align"),
    "align of floats": ((lambda xp, a: {"align": xp.asarray(np.zeros(2))}), TypeError, r"align & float64"),
    "layout unknown": (option(layout="sbhd"), ValueError, r"layout & sbhd & bshd & bhsd"),
    "layout None": (option(layout=None), (TypeError, ValueError), r"layout & None"),
    "causal a string": (option(causal="no"), TypeError, r"causal & str"),
    "causal None": (option(causal=None), TypeError, r"causal & None"),
    "causal an array": (option(causal=np.ones(2, np.bool_)), TypeError, r"causal"),
    "unknown option": (option(dropout=0.1), TypeError, r"dropout"),
    "window an int": (option(window=3), TypeError, r"window & pair & \b3\b"),
    "window of three": (option(window=(1, 2, 3)), TypeError, r"window & pair"),
    "window negative": (option(window=(-1, 0)), ValueError, r"window & left & -1 & None"),
    "window negative right": (option(window=(None, -5)), ValueError, r"window & right & -5 & None"),
    "window of floats": (option(window=(1.0, 0)), TypeError, r"window & left & float"),
    "window of bools": (option(window=(1, True)), TypeError, r"window & right & bool"),
    "window a string": (option(window="ab"), TypeError, r"window & str"),
    "softcap 0": (option(softcap=0.0), ValueError, r"softcap & positive & \b0 & None"),
    "softcap negative": (option(softcap=-3), ValueError, r"softcap & -3"),
    "softcap nan": (option(softcap=np.nan), ValueError, r"softcap & nan"),
    "softcap inf": (option(softcap=np.inf), ValueError, r"softcap & inf"),
    "softcap beyond float32": (option(softcap=10**400), ValueError, r"softcap & float32"),
    "softcap below float32": (option(softcap=1e-40), ValueError, r"softcap & float32"),
    "softcap bool": (option(softcap=True), TypeError, r"softcap & bool"),
    "softcap string": (option(softcap="30"), TypeError, r"softcap & str"),
    "slopes a number": (option(alibi_slopes=0.5), TypeError, r"alibi_slopes & float32 & float"),
    "slopes float64": (array_as("alibi_slopes", (4,), np.float64), TypeError, r"alibi_slopes & float32 & float64"),
    "slopes float16": (array_as("alibi_slopes", (4,), np.float16), TypeError, r"alibi_slopes & float32 & float16"),
    "slopes of kv heads": (array_as("alibi_slopes", (2,)), ValueError, r"alibi_slopes & \(4,\) & \(2, 4\) & \(2,\)"),
    "slopes of one batch": (array_as("alibi_slopes", (1, 4)), ValueError, r"alibi_slopes & \(1, 4\)"),
    "slopes ragged": (option(alibi_slopes=[[1.0], [1.0, 2.0]]), ValueError, r"alibi_slopes & list"),
    "slopes of words": (option(alibi_slopes=["a"] * 4), TypeError, r"alibi_slopes & float32"),
    "bias a number": (option(bias=1.0), TypeError, r"\bbias & array & float"),
    "bias a list": (option(bias=[[1.0]]), TypeError, r"\bbias & array & list"),
    "bias float64": (array_as("bias", (5, 7), np.float64), TypeError, r"\bbias & float16 & float32 & float64"),
    "bias of the other half": (array_as("bias", (5, 7), BFLOAT16), TypeError, r"\bbias & float16 & bfloat16"),
    "bias bool": (array_as("bias", (5, 7), np.bool_), TypeError, r"\bbias & bool"),
    "bias too long": (array_as("bias", (5, 8)), ValueError, r"\bbias & broadcast & \(2, 4, 5, 7\) & \(5, 8\)"),
    "bias of no key": (array_as("bias", (5, 0)), ValueError, r"\bbias & broadcast"),
    "bias of kv heads": (array_as("bias", (2, 5, 7)), ValueError, r"\bbias & broadcast & \(2, 5, 7\)"),
    "bias transposed": (array_as("bias", (2, 5, 4, 7)), ValueError, r"\bbias & broadcast & \(2, 5, 4, 7\)"),
    "bias of five axes": (array_as("bias", (1, 1, 1, 5, 7)), ValueError, r"\bbias & broadcast"),
    "mask uint8": (array_as("mask", (5, 7), np.uint8), TypeError, r"\bmask & bool & uint8 & view"),
    "mask of floats": (array_as("mask", (5, 7)), TypeError, r"\bmask & bool & float32"),
    "mask too short": (array_as("mask", (2, 1, 1, 6), np.bool_), ValueError, r"\bmask & broadcast & \(2, 1, 1, 6\)"),
    "mask a bool": (option(mask=True), TypeError, r"\bmask & array & bool"),
    "sinks of kv heads": (array_as("sinks", (2,)), ValueError, r"sinks & \(4,\) & \(2,\)"),
    "sinks of rank 2": (array_as("sinks", (2, 4)), ValueError, r"sinks & \(2, 4\)"),
    "sinks float16": (array_as("sinks", (4,), np.float16), TypeError, r"sinks & float32 & float16"),
    "sinks a number": (option(sinks=0.0), TypeError, r"sinks & array & float"),
    "lengths a number": (option(seqlens_k=5), TypeError, r"seqlens_k & array & \bint\b"),
    "lengths of floats": (array_as("seqlens_q", (2,)), TypeError, r"seqlens_q & integers & float32"),
    "lengths bool": (option(seqlens_k=[True, True]), TypeError, r"seqlens_k & integers & bool"),
    "lengths too few": (array_as("seqlens_k", (1,), np.int32), ValueError, r"seqlens_k & \(2,\) & \(1,\)"),
    "lengths of rank 0": (array_as("seqlens_k", (), np.int32), ValueError, r"seqlens_k & \(\)"),
    "lengths cumulative": (option(seqlens_k=[0, 3, 7]), ValueError, r"seqlens_k & \(3,\)"),
    "length of keys too long": (option(seqlens_k=[7, 8]), ValueError, r"seqlens_k & \b0 to 7\b & \b8\b"),
    "length of queries too long": (option(seqlens_q=np.array([6, 0])), ValueError, r"seqlens_q & \b0 to 5\b & \b6\b"),
    "length negative": (option(seqlens_k=[7, -1]), ValueError, r"seqlens_k & -1"),
    "dropout 1": (option(dropout_p=1.0, dropout_seed=1), ValueError, r"dropout_p & \b1\b"),
    "dropout negative": (option(dropout_p=-0.1, dropout_seed=1), ValueError, r"dropout_p & -0\.1"),
    "dropout nan": (option(dropout_p=np.nan, dropout_seed=1), ValueError, r"dropout_p & nan"),
    "dropout nearly 1": (option(dropout_p=1 - 2**-18, dropout_seed=1), ValueError, r"dropout_p & 2\*\*-17"),
    "dropout a string": (option(dropout_p="0.1", dropout_seed=1), TypeError, r"dropout_p & str"),
    "dropout None": (option(dropout_p=None), TypeError, r"dropout_p & None"),
    "dropout without a seed": (option(dropout_p=0.1), TypeError, r"dropout_seed & None & int"),
    "seed a float": (option(dropout_p=0.1, dropout_seed=1.0), TypeError, r"dropout_seed & float & int"),
    "seed a bool": (option(dropout_p=0.1, dropout_seed=True), TypeError, r"dropout_seed & bool"),
    "seed negative": (option(dropout_p=0.1, dropout_seed=-1), ValueError, r"dropout_seed & -1"),
    "seed too large": (option(dropout_p=0.1, dropout_seed=2**64), ValueError, r"dropout_seed & 2\*\*64"),
    "seed of rank 1": (array_as("dropout_seed", (1,), np.int64), TypeError, r"dropout_seed & 0-d & \(1,\)"),
    "seed int32": (array_as("dropout_seed", (), np.int32), TypeError, r"dropout_seed & int64 & int32"),
    "seed of floats": (array_as("dropout_seed", (), np.float64), TypeError, r"dropout_seed & uint64 & float64"),
    "seed a float that is not used": (option(dropout_seed=1.0), TypeError, r"dropout_seed & float"),
    "out_dtype float64": (option(out_dtype=np.float64), TypeError, r"out_dtype & float64"),
    "out_dtype the other half": (option(out_dtype=BFLOAT16), TypeError, r"out_dtype & bfloat16"),
    "out_dtype int": (option(out_dtype="int32"), TypeError, r"out_dtype & int32"),
    "out_dtype unknown": (option(out_dtype="half-ish"), TypeError, r"out_dtype & half-ish"),
}


@pytest.mark.parametrize("scale", [10**400, -(10**400)])
def test_scale_beyond_any_float(scale):
    q = np.ones((1, 4, 1, 8), np.float16)
    with pytest.raises(ValueError, match="softmax_scale must be finite"):
        cupy_fa2.flash_attention(q, q, q, softmax_scale=scale)


def test_unknown_simulated_device():
    for device in ("A1000", [], None):
        with pytest.raises(ValueError, match="device must be one of A100"), cupy_fa2.simulator(device):
            pass


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(xp, name):
    change, kind, pattern = WRONG[name]
    given = arguments(xp)
    given["out"] = xp.full((2, 5, 4, 24), 7, np.float16)
    given |= change(xp, arguments(xp))
    refused(
        lambda: cupy_fa2.flash_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given),
        kind,
        pattern,
    )
    assert bool((given["out"] == 7).all()), "out was written"


@pytest.mark.parametrize("change", ["q", "k", "v"])
def test_byte_swapped_arrays(change):
    """CuPy has no such arrays; `cupy.asarray` keeps the bytes and so turns the numbers into others."""
    given = arguments(np)
    given[change] = given[change].astype(">f2")
    refused(lambda: cupy_fa2.flash_attention(**given), TypeError, rf"\b{change}\b & byte")


def test_options_go_by_name(xp):
    q, k, v = arguments(xp).values()
    with pytest.raises(TypeError, match="positional"):
        cupy_fa2.flash_attention(q, k, v, True)


def test_too_long_for_32_bit_rows(xp):
    """2^31 keys, all the same one."""
    given = arguments(xp)
    given["k"], given["v"] = (xp.broadcast_to(given[n][:, :1], (2, 2**31, *given[n].shape[2:])) for n in "kv")
    refused(lambda: cupy_fa2.flash_attention(**given), ValueError, r"\bk\b & length|seqlen & 2147483648")


def test_simulator_refuses_what_would_take_long():
    """Above 1e9 multiply-adds it says where to go, unless asked for; this call sees no key and is quick."""
    q = np.ones((1, 8192, 1, 8), np.float16)
    call = {"causal": True, "align": -(10**6), "return_lse": True}
    refused(
        lambda: cupy_fa2.flash_attention(q, q, q, **call),
        ValueError,
        r"simulator & cupy|GPU",
    )
    with cupy_fa2.simulator(device="A100"):
        out, lse = cupy_fa2.flash_attention(q, q, q, **call)
    assert not out.any()
    assert np.all(lse == -np.inf)
    refused(lambda: cupy_fa2.flash_attention(q, q, q, **call), ValueError, "simulator")


def test_simulator_refuses_a_device_it_does_not_know():
    with (
        pytest.raises((ValueError, TypeError), match=r"(?i)device.*A100"),
        cupy_fa2.simulator(device="Voodoo 2"),
    ):
        pass


@pytest.mark.parametrize("host_one", ["q", "k", "v", "out"])
def test_mixed_numpy_and_cupy(cp, host_one):
    given = arguments(cp) | {"out": cp.full((2, 5, 4, 24), 7, np.float16)}
    given[host_one] = given[host_one].get()
    refused(lambda: cupy_fa2.flash_attention(**given), (TypeError, ValueError), rf"\b{host_one}\b|numpy")
    assert bool((given["out"] == 7).all())


def test_scale_on_a_device(cp):
    """Its value would have to be waited for."""
    refused(
        lambda: cupy_fa2.flash_attention(**arguments(cp), softmax_scale=cp.array(0.5)),
        TypeError,
        "softmax_scale & float",
    )


@pytest.mark.skipif(gpu_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("other", ["q", "k", "v", "out"])
def test_arrays_on_different_devices(cp, other):
    given = arguments(cp) | {"out": cp.full((2, 5, 4, 24), 7, np.float16)}
    with cp.cuda.Device(1):
        given[other] = given[other].copy() if other != "out" else cp.full((2, 5, 4, 24), 7, np.float16)
    refused(lambda: cupy_fa2.flash_attention(**given), ValueError, r"device & \b1\b")
    assert bool((given["out"].get() == 7).all())
