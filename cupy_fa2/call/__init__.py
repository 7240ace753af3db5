"""From arrays to launches: where they live, what has to be copied, what is allocated."""

from cupy_fa2.call.bound import bind, run

__all__ = ["bind", "run"]
