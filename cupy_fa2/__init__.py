"""FlashAttention-2 for CuPy arrays, and for NumPy arrays in a PTX simulator.

Importing this package imports neither CuPy nor a driver: both wait for the first call that needs them.
"""

from cupy_fa2.api import flash_attention
from cupy_fa2.call.simulated import simulator
from cupy_fa2.compile import CompileError
from cupy_fa2.dropout import dropout_mask

__all__ = ["CompileError", "__version__", "dropout_mask", "flash_attention", "simulator"]
__version__ = "0.1.0"
