"""One call, validated and normalised: the only place that does either."""

from cupy_fa2.problem.problem import Problem

__all__ = ["Problem"]
