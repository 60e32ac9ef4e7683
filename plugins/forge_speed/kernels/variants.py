"""A step with any set of kernels: contexts in which a trial runs it."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from forge_kernels import patch
from forge_kernels.contract import Functional, Kernel, Subgraph
from forge_kernels.graph_rewriting import GraphRewriting
from forge_kernels.torch_internals import rewriting_graphs
from forge_speed.kernels.judgement import Context, StepTrial
from forge_speed.kernels.observation import Candidate

logger = logging.getLogger("forge")


def stand_ins(candidates: Iterable[Candidate], names: Iterable[str]) -> patch.StandIns:
    """Return the replaced functions of these kernels; of several for one function the first by name counts."""
    functions: dict[str, Any] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.kernel.name):
        if candidate.kernel.name in names and isinstance(candidate.replaces, Functional):
            functions.setdefault(candidate.target, patch.always(candidate.target, candidate.replaces.call))
    return patch.StandIns(functions)


def in_graphs(candidates: Iterable[Candidate], names: Iterable[str]) -> list[Kernel]:
    """Return those of these kernels that replace patterns in compiled graphs."""
    found = {c.kernel.name: c.kernel for c in candidates if c.kernel.name in names and isinstance(c.replaces, Subgraph)}
    return list(found.values())


class StepVariants:
    """The step with each set of kernels, with compiled functions of its own where the run compiles."""

    def __init__(self, candidates: Sequence[Candidate], compiler: Any):
        self._candidates, self._compiler = candidates, compiler
        self._graphs: dict[frozenset[str], Context] = {}
        self._rewritings: dict[frozenset[str], GraphRewriting] = {}

    def found(self, trial: StepTrial, functions: set[str]) -> set[str]:
        """Return the kernels that replace something in the step's graphs, beside those of functions."""
        patterns = {candidate.kernel.name for candidate in self._candidates if isinstance(candidate.replaces, Subgraph)}
        if self._compiler is None or not patterns:
            return set()
        every = frozenset(patterns | functions)
        why_not = trial.fails(self.get(every))
        if why_not:
            logger.warning("kernels: the step could not be compiled with kernels in its graphs: %s", why_not)
            return set()
        found = set(self._rewritings[every].found)
        self._graphs[frozenset(found | functions)] = self._graphs[every]  # the same graphs
        return found

    def get(self, names: frozenset[str]) -> Context:
        """Return what makes the context of a step with these kernels."""
        return partial(self._entered, names)

    @contextmanager
    def _entered(self, names: frozenset[str]) -> Generator[None, None, None]:
        with ExitStack() as stack:
            stack.enter_context(stand_ins(self._candidates, names))
            if self._compiler is not None:
                if names not in self._graphs:
                    self._graphs[names] = self._compiler.another()
                    self._rewritings[names] = GraphRewriting(in_graphs(self._candidates, names))
                rewriting = self._rewritings.get(names)
                if rewriting is not None and rewriting.kernels:
                    stack.enter_context(rewriting_graphs(rewriting))
                stack.enter_context(self._graphs[names]())
            yield
