"""Where the tests run: in the simulator with NumPy arrays and, where there is a device, there with CuPy's."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from dataclasses import replace
from typing import Any

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # one process per core already: with BLAS's threads they only wait for each other
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from sampling import FULL, implies

import cupy_fa2
from cupy_fa2.testing import Example, assert_attention_close, host

# The same examples in every run: a failure on one machine is a failure on all.
# `--hypothesis-profile=explore` draws new ones each time.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "print_blob": True,
}
settings.register_profile("few", derandomize=True, max_examples=4, **_COMMON)
settings.register_profile("suite", derandomize=True, max_examples=40, **_COMMON)
settings.register_profile("gpu", derandomize=True, max_examples=250, **_COMMON)
settings.register_profile("explore", max_examples=300, **_COMMON)

# Then the end of an array is the end of an allocation, so that compute-sanitizer sees what is read beyond it.
WITHOUT_POOL = os.environ.get("CUPY_FA2_NO_POOL") == "1"


@functools.cache
def gpu_count() -> int:
    """CUDA devices that CuPy can use."""
    try:
        import cupy
    except ImportError:
        return 0
    return cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0


def pytest_configure(config: pytest.Config) -> None:
    # Parsed kernels are millions of objects that stay. Walking them again and again took half of the suite's time.
    gc.set_threshold(200_000, 20, 100)
    if config.getoption("--hypothesis-profile", None) is None:
        expression = config.getoption("markexpr")
        few = "few" if implies(expression, "full", False) else "suite"
        settings.load_profile("gpu" if implies(expression, "gpu") else few)
    if WITHOUT_POOL and gpu_count():
        import cupy

        cupy.cuda.set_allocator(None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    if WITHOUT_POOL:  # under a tool that watches the GPU
        others = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("gpu")]
    more = not implies(config.getoption("markexpr"), "full", False)
    for item in items:
        if more and getattr(item.obj, "is_hypothesis_test", False):  # draws more examples than by default
            item.add_marker(FULL)
        if item.get_closest_marker("gpu") and gpu_count() == 0:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", params=["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    """The array module: `numpy`, whose arrays run in the simulator, or `cupy`."""
    if request.param == "simulator":
        return np
    import cupy

    return cupy


@pytest.fixture(scope="session", params=[pytest.param("gpu", marks=pytest.mark.gpu)])
def cp(request: pytest.FixtureRequest) -> Any:
    """`cupy`, for tests of what only a device has."""
    import cupy

    return cupy


class Checks:
    """What the tests of the forward share; `xp` decides where it happens and how big, `card` what is simulated."""

    def __init__(self, xp: Any, card: str | None = None) -> None:
        self.xp = xp
        self.on_gpu = xp is not np
        self.card = card

    def size(self, simulator: Any, gpu: Any) -> Any:
        """One of two sizes."""
        return gpu if self.on_gpu else simulator

    def call(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        """Out and lse, given that the dtypes, shapes and kind of both are right."""
        if isinstance(options.get("align"), np.ndarray):
            options["align"] = self.xp.asarray(options["align"])
        with cupy_fa2.simulator(self.card) if self.card else contextlib.nullcontext():
            out, lse = cupy_fa2.flash_attention(q, k, v, return_lse=True, **options)
        assert isinstance(out, self.xp.ndarray)
        assert isinstance(lse, self.xp.ndarray)
        assert out.shape == (*q.shape[:3], v.shape[3])
        assert out.dtype == np.dtype(options.get("out_dtype") or q.dtype)
        assert lse.dtype == np.float32
        batch, num_heads, seqlen_q = (q.shape[i] for i in ((0, 1, 2) if options.get("layout") == "bhsd" else (0, 2, 1)))
        assert lse.shape == (batch, num_heads, seqlen_q)
        return out, lse

    def check(self, example: Example, *, rows: int | None = None, **options: Any) -> tuple[Any, Any]:
        """Run an example, hold it to the tolerance rule, return out and lse."""
        q, k, v = example.arrays(self.xp)
        out, lse = self.call(q, k, v, **example.options | example.option_arrays(self.xp), **options)
        assert_attention_close(out, lse, q, k, v, rows=rows, **example.options)
        return out, lse

    def hold(self, example: Example, *, out_dtype: Any = None, out: Any = None, **options: Any) -> tuple[Any, Any]:
        """`check`, with more options than an `Example` has: NumPy arrays among them are moved to where `xp` is.

        Rows without any weight are exact zeros, too.
        """
        q, k, v = example.arrays(self.xp)
        moved = {name: self.xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        given: dict[str, Any] = {**example.options, **example.option_arrays(self.xp), **moved}
        out, lse = self.call(q, k, v, **given, out_dtype=out_dtype, out=out)
        assert_attention_close(out, lse, q, k, v, **{**example.options, **options})
        rows = host(out) if example.layout == "bhsd" else host(out).transpose(0, 2, 1, 3)
        assert not rows[host(lse) == -np.inf].any()
        return out, lse

    def bits(self, *arrays: Any) -> list[bytes]:
        """The bytes of arrays, for comparisons that allow no rounding."""
        return [np.ascontiguousarray(host(x)).tobytes() for x in arrays]

    def same_bits(self, a: Any, b: Any) -> None:
        """Assert that two outputs, or two (out, lse), are one and the same bit for bit."""
        pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
        for name, (x, y) in zip(("out", "lse"), pairs, strict=False):
            x, y = np.ascontiguousarray(host(x)), np.ascontiguousarray(host(y))
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            integer = np.dtype(f"u{x.dtype.itemsize}")
            different = np.argwhere(x.view(integer) != y.view(integer))
            assert len(different) == 0, f"{name} differs in {len(different)} elements, first at {different[0]}"


@pytest.fixture(scope="session")
def fa(xp: Any) -> Checks:
    """`Checks` for each `xp`."""
    return Checks(xp)


@pytest.fixture(scope="session", params=["A100", "H200", pytest.param("gpu", marks=pytest.mark.gpu)])
def cards(request: pytest.FixtureRequest) -> Checks:
    """`Checks` for the kernels of two simulated cards, and for those of the GPU."""
    if request.param != "gpu":
        return Checks(np, request.param)
    import cupy

    return Checks(cupy)


def example(
    dtype: str = "float16",
    batch: int = 1,
    seqlen_q: int = 40,
    seqlen_k: int = 70,
    num_heads: int = 2,
    head_dim: int = 64,
    **fields: Any,
) -> Example:
    """An `Example` of which only the interesting fields are named."""
    fields.setdefault("num_heads_k", num_heads)
    fields.setdefault("head_dim_v", head_dim)
    return replace(Example(dtype, batch, seqlen_q, seqlen_k, num_heads, num_heads, head_dim, head_dim), **fields)


def some(cards: Checks, index: int, choices: list[Any]) -> list[Any]:
    """On a GPU all of the choices, of a simulated card the one whose turn it is."""
    turn = index + {"A100": 0, "H200": 3}.get(cards.card, 0)
    return choices if cards.on_gpu else [choices[turn % len(choices)]]
