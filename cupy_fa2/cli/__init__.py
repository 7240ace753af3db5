"""``python -m cupy_fa2`` and what it measures."""
