"""PINA: SupervisedSolver."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("pina-mathlab")


def make() -> Any:
    from pina.model import FeedForward
    from pina.problem.zoo import SupervisedProblem
    from pina.solver import SupervisedSolver

    from benchmarks.lightning_modules.draw import Batches, numbers

    problem = SupervisedProblem(numbers(32, 3), numbers(32, 1, seed=1))
    module = SupervisedSolver(problem, FeedForward(3, 1, inner_size=16), optimizer=None, use_lt=False)
    batches = [[("data", {"input": numbers(8, 3, seed=i), "target": numbers(8, 1, seed=i + 9)})] for i in range(6)]
    return module, Batches(batches), None
