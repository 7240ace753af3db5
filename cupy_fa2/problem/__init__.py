"""One call, validated and normalised: the only place that does either."""

from cupy_fa2.problem.options import Options
from cupy_fa2.problem.problem import Problem
from cupy_fa2.problem.structure import Structure

__all__ = ["Options", "Problem", "Structure"]
