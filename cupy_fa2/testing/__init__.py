"""Tools to test an attention kernel with, this package's or another's.

- the tolerance rule: `tolerance`, `lse_tolerance`, `assert_attention_close`;
- inputs: `random_qkv`, and arrays that lie in memory in every odd way with NaN all around them: `poisoned`;
- `random_bias` and `random_mask`, broadcast in every way;
- `attention_examples`, a Hypothesis strategy of whole calls;
- `OPTION_EXAMPLES`, the one list of the options, and `with_options`, which turns them on.

Arrays are NumPy's, or CuPy's where `xp` is the module `cupy`.
"""

from cupy_fa2.reference import host

from .examples import Example, attention_examples
from .options import EVERYTHING, OPTION_EXAMPLES, OPTION_SIZES, OPTION_VARIANTS, with_options
from .score_arrays import SCORE_ARRAY_AXES, SCORE_ARRAY_STORAGES, random_bias, random_mask
from .storage import DTYPES, STORAGES, Storage, assert_poison_intact, poisoned, random_qkv
from .tolerance import assert_attention_close, lse_tolerance, sample_rows, tolerance, ulp

__all__ = [
    "DTYPES",
    "EVERYTHING",
    "OPTION_EXAMPLES",
    "OPTION_SIZES",
    "OPTION_VARIANTS",
    "SCORE_ARRAY_AXES",
    "SCORE_ARRAY_STORAGES",
    "STORAGES",
    "Example",
    "Storage",
    "assert_attention_close",
    "assert_poison_intact",
    "attention_examples",
    "host",
    "lse_tolerance",
    "poisoned",
    "random_bias",
    "random_mask",
    "random_qkv",
    "sample_rows",
    "tolerance",
    "ulp",
    "with_options",
]
