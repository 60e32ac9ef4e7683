"""A step with any set of kernels: contexts in which a trial runs it."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import forge
from forge_kernels import patch
from forge_kernels.call_pattern import pattern_of
from forge_kernels.contract import Functional, Module, Subgraph
from forge_kernels.graph_rewriting import GraphRewriting
from forge_kernels.patch import StandIns, SwappedModules
from forge_kernels.selection import Candidate, KernelChoice
from forge_speed.kernels.judgement import Context, StepTrial

logger = logging.getLogger("forge")


def rewriting_graphs(rewriting: GraphRewriting) -> AbstractContextManager[Any]:
    """Return a context in which compiled graphs get kernels."""
    from forge_kernels import inductor_pass  # imports torch's compiler

    return inductor_pass.rewriting_graphs(rewriting)


class StepVariants:
    """The step with each set of kernels, with compiled functions of its own where the run compiles."""

    def __init__(
        self, trainer: forge.Run, candidates: Sequence[Candidate], choices: Sequence[KernelChoice], compiler: Any
    ):
        self._trainer, self._candidates, self._choices, self._compiler = trainer, candidates, choices, compiler
        self._graphs: dict[frozenset[str], AbstractContextManager[Any]] = {}
        self._rewritings: dict[frozenset[str], GraphRewriting] = {}

    def found(self, trial: StepTrial, patterns: Sequence[str]) -> set[str]:
        """Return which of these kernels replace something in the step's graphs."""
        if not patterns:
            return set()
        calls = {choice.kernel for choice in self._choices if choice.kernel is not None}
        every = frozenset(patterns) | calls
        why_not = trial.fails(self.get(every))
        if why_not:
            logger.warning("kernels: the step could not be compiled with kernels in its graphs: %s", why_not)
            return set()
        found = set(self._rewritings[every].found)
        self._graphs[frozenset(found) | calls] = self._graphs[every]  # the same graphs
        return found

    def get(self, names: frozenset[str]) -> Context:
        """Return what makes the context of a step with these kernels."""
        return partial(self._entered, names)

    @contextmanager
    def _entered(self, names: frozenset[str]) -> Generator[None, None, None]:
        modules = SwappedModules()
        functions: dict[str, list[patch.Chosen]] = {}
        for choice in self._choices:
            for candidate in self._of(names, Functional, Module):
                if candidate.kernel.name != choice.kernel or candidate.target != choice.call.target:
                    continue
                if isinstance(candidate.replaces, Functional):
                    entry = pattern_of(choice.call), candidate.replaces.call
                    functions.setdefault(candidate.target, []).append(entry)
                elif isinstance(candidate.replaces, Module):
                    modules.replace(self._trainer.task, choice.paths, candidate.replaces.swap, candidate.kernel.name)
        stand_ins = {target: patch.where_chosen(target, entries) for target, entries in functions.items()}
        try:
            with ExitStack() as stack:
                stack.enter_context(StandIns(stand_ins))
                if self._compiler is not None:
                    if names not in self._graphs:
                        self._graphs[names] = self._compiler.another()
                        kernels = {c.kernel.name: c.kernel for c in self._of(names, Subgraph)}
                        self._rewritings[names] = GraphRewriting(list(kernels.values()))
                    if self._rewritings.get(names):
                        stack.enter_context(rewriting_graphs(self._rewritings[names]))
                    stack.enter_context(self._graphs[names])
                yield
        finally:
            modules.restore()

    def _of(self, names: frozenset[str], *kinds: type) -> list[Candidate]:
        return [c for c in self._candidates if c.kernel.name in names and isinstance(c.replaces, kinds)]
