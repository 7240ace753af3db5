"""Times of kernels on this card, in turn; needs a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from cupy_fa2.compile import Binary
from cupy_fa2.device import Device
from cupy_fa2.kernel.forward import FwdSpec
from tuner.sizes import Sizes
from tuner.tools import DTYPES, Arrays, bare, compile_all, first_line, interleaved, log

__all__ = ["Search", "compiled", "halvings"]

_MAX_SPILL = 16  # bytes; what the compile gate allows


def compiled(specs: list[FwdSpec], device: Device) -> list[FwdSpec]:
    """Those that compile with next to no spills."""
    built = compile_all(specs, device)
    for spec, binary in built.items():
        if isinstance(binary, str):
            log(f"  {spec.name}: {binary}")
    return [s for s, b in built.items() if isinstance(b, Binary) and b.spill_bytes <= _MAX_SPILL]


def halvings(specs: list[FwdSpec], measure: Any) -> Iterator[tuple[FwdSpec, float]]:
    """The specs with their milliseconds, slowest first; the survivors of each round are timed again, for longer."""
    seconds, left = 0.004, specs
    while left:
        times = measure(left, seconds)
        ranked = sorted((spec for spec in left if spec in times), key=times.__getitem__)
        keep = len(ranked) // 2 if len(ranked) > 4 else 0
        for spec in reversed(ranked[keep:]):
            yield spec, times[spec]
        left, seconds = ranked[:keep], seconds * 2


class Search:
    """Measures specs of one call's sizes, with the arrays of some features."""

    def __init__(self, device: Device, sizes: Sizes, features: Iterable[str] = ()) -> None:
        import cupy

        self.device, self.causal, self.dtype = device, sizes.causal, DTYPES[sizes.dtype]
        rng = np.random.default_rng(0)

        def array(dim: int) -> Any:
            base = rng.standard_normal(1_048_583, np.float32).astype(self.dtype)
            flat = np.resize(base.view(np.uint16), int(np.prod(sizes.shape(dim))))
            return cupy.asarray(flat).view(self.dtype).reshape(sizes.shape(dim))

        self.q, self.k, self.v = array(sizes.head_dim), array(sizes.head_dim), array(sizes.head_dim_v)
        self.out = cupy.empty_like(self.v)
        self.given = sizes.given(Arrays(cupy), features)
        self.flop = sizes.flop(self.given.get("window"))
        self.references: dict[Any, Any] = {}
        self.calls: dict[FwdSpec, Any] = {}

    def __call__(self, specs: Iterable[FwdSpec], seconds: float) -> dict[FwdSpec, float]:
        """Milliseconds of each spec that runs and gives the result of the first one with its features."""
        calls = {}
        for spec in specs:
            try:
                if spec not in self.calls:
                    arrays = {"q": self.q, "k": self.k, "v": self.v, "out": self.out}
                    arrays |= {name: x for name, x in self.given.items() if hasattr(x, "shape")}
                    others = {name: x for name, x in self.given.items() if name not in arrays}
                    _, call = bare(self.device, arrays, spec, causal=self.causal, **others)
                    self.out.view(np.uint16).fill(0x7FFF)
                    call()
                    self._check(spec)
                    self.calls[spec] = call
                calls[spec.name] = self.calls[spec]
            except Exception as error:  # of one kernel: the others are measured all the same
                log(f"  {spec.name}: {first_line(error)}")
        if not calls:
            return {}
        times = interleaved(calls, seconds=seconds * len(calls), min_rounds=2, max_rounds=12)
        return {spec: float(np.median(times[spec.name])) for spec in specs if spec.name in times}

    def _check(self, spec: FwdSpec) -> None:
        bits = self.out.view(np.uint16)[:1, :: max(self.out.shape[1] // 512, 1), :2].get()
        rows = bits.view(self.dtype).astype(np.float32)
        if np.isnan(rows).any():
            raise RuntimeError("gives NaN")
        expected = self.references.setdefault(spec.features, rows)
        if np.linalg.norm(rows - expected) > 0.02 * np.linalg.norm(expected):  # rounding gives some 0.005
            raise RuntimeError("gives another result than the first spec")
