"""The benches: a file of rows each."""

from __future__ import annotations

from harness.bench import Bench

from rows.forward import Forward
from rows.options import OptionCosts

__all__ = ["BENCHES"]

#: Kind -> bench. README shows them in this order, and the first is what ``bench.py`` measures without a word.
BENCHES: dict[str, Bench] = {bench.kind: bench for bench in (Forward(), OptionCosts())}
