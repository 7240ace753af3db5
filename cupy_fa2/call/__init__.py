"""From arrays to launches: where they live, what has to be copied, what is allocated."""

from cupy_fa2.call.run import bind, run

__all__ = ["bind", "run"]
