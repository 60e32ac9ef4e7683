"""Calls of a module that holds experts, of which this rank has a part."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import forge
from forge.errors import TaskError
from forge.optim.sharded import is_distributed, whole
from forge.snapshot.sandbox import without_side_effects
from forge.twin.compare import Difference, first_difference
from forge_cluster.expert_parallel.routing import Ranks, route

FEW = 64
"""Tokens that are compared."""
NUMBER = "num_experts"
"""The attribute in which a module may write down how many experts it has."""
LAW = (
    "A module of experts is called as experts(tokens, chosen, weights): a row for each token, the numbers of the "
    "experts that it chose, and as many weights. It returns the sum of what they make of each token alone, and reads "
    f"how many experts there are from its parameters, or from self.{NUMBER}."
)


class ExpertCalls:
    """Stands for the `forward` of a module with experts: sends tokens to the experts, wherever they are."""

    def __init__(self, name: str, module: nn.Module, count: int, ranks: Ranks, check: forge.Run | None):
        self.module, self.count, self.ranks = module, count, ranks
        self.loads: list[Tensor] = []
        "The choices of each expert in the calls since the last update; cleared by the reader."
        self._name, self._check = name, check
        self._forward = module.forward
        self._had = vars(module).get("forward")
        self._run: Any = self.run

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertCalls:
        """Stand for the copy of the module in a copy of the task, in the same run."""
        memo[id(self)] = made = copy.copy(self)
        made.module, made._forward = copy.deepcopy((self.module, self._forward), memo)
        made.loads, made._run = [], made.run
        return made

    def install(self, compiled: bool) -> None:
        if compiled:
            self._run = torch.compiler.disable(self.run)
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        vars(self.module).pop("forward", None)
        if self._had is not None:
            vars(self.module)["forward"] = self._had

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the experts that tokens have chosen."""
        tokens, chosen, weights = self._given(args, kwargs)
        flat = tokens.reshape(-1, tokens.shape[-1])
        shape = (len(flat), *chosen.shape[tokens.ndim - 1 :])
        chosen, weights = chosen.reshape(shape), weights.reshape(shape)
        if self._check is not None:
            trainer, self._check = self._check, None
            self._compare(trainer, flat, chosen, weights)
        output, loads = route(self._here, self.count, self.ranks, flat, chosen, weights)
        if torch.is_grad_enabled():
            self.loads.append(loads)
        return output.view(*tokens.shape[:-1], output.shape[-1])

    def _given(self, args: Any, kwargs: Any) -> list[Tensor]:
        values = list(inspect.signature(self._forward).bind(*args, **kwargs).arguments.values()) if kwargs else args
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(values) == 3 == len(tensors):
            tokens, chosen, weights = tensors
            alike = chosen.shape == weights.shape and tokens.shape[:-1] in (chosen.shape, chosen.shape[:-1])
            if alike and [each.is_floating_point() for each in tensors] == [True, False, True]:
                return tensors
        shown = ", ".join(f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else type(v).__name__ for v in values)
        raise TaskError(f"expert_parallel: {self._name} is called with {shown}. {LAW}")

    # -- parts --------------------------------------------------------------------------------------------------------

    def _here(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Call the experts of this rank."""
        with self._holding(lambda part: part.to_local(), self.count // self.ranks.size):
            return self._forward(tokens, chosen, weights)

    @contextmanager
    def _holding(self, make: Any, count: int) -> Iterator[None]:
        """Let the module's parameters be plain tensors, and its experts so many."""
        held: list[tuple[dict[str, Any], str, Any]] = [
            (inner._parameters, name, parameter)
            for inner in self.module.modules()
            for name, parameter in inner._parameters.items()
            if is_distributed(parameter)
        ]
        own = vars(self.module)
        counts = own.get(NUMBER) == self.count
        try:
            for owner, name, parameter in held:
                owner[name] = make(parameter)
            if counts:
                own[NUMBER] = count
            yield
        finally:
            for owner, name, parameter in held:
                owner[name] = parameter
            if counts:
                own[NUMBER] = self.count

    # -- the comparison -----------------------------------------------------------------------------------------------

    def _compare(self, trainer: forge.Run, tokens: Tensor, chosen: Tensor, weights: Tensor) -> None:
        """Refuse a module that does not compute the same where its experts are divided."""
        few = tokens[:FEW].detach(), chosen[:FEW], weights[:FEW].detach()
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        found: Difference | Exception | None = None
        try:
            with without_side_effects(trainer), torch.no_grad():
                with self._holding(whole, self.count):
                    expected = self._forward(*few)
                try:
                    own = route(self._here, self.count, self.ranks, *few)[0]
                    near = torch.finfo(expected.dtype).eps ** 0.5
                    found = first_difference({"its outputs": own}, {"its outputs": expected}, near)
                except Exception as raised:
                    found = raised
        finally:
            for module, mode in modes:
                module.training = mode
        if trainer.env.all_max([found is not None])[0]:
            raise TaskError(
                f"expert_parallel: {self._name} ({type(self.module).__name__}) does not compute the same with "
                f"1/{self.ranks.size} of its experts on each rank{f': {found}' if found else ''}. {LAW}"
            ) from (found if isinstance(found, Exception) else None)
