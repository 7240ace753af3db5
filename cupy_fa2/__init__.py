"""FlashAttention-2 for CuPy arrays, and for NumPy arrays in a PTX simulator."""

__version__ = "0.1.0"
