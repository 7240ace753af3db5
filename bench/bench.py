"""Measure this card, beside its peers, in one run.

    python bench/bench.py             the plain forward
    python bench/bench.py options     what each option costs
    python bench/bench.py KIND --help

Calls take turns in an order that is shuffled in each round. Peers that cannot be imported, and rows that fail, leave a
message in their place. What is measured, and how, is in `rows`; everything else in `harness`.
"""

import sys

from harness.run import main
from rows import BENCHES

if __name__ == "__main__":
    sys.exit(main(BENCHES))
