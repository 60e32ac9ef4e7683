"""Optimizers as a LightningModule handles them: several of its own in manual optimization, or none."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from forge_lightning.strategy_proxy import packages_of


def _nothing() -> None:
    pass


class OptimizerProxy:
    """An optimizer as `self.optimizers()` returns it: a step calls the hooks around it. All else is the optimizer's."""

    def __init__(self, optimizer: Any, module: Any, before: Callable[[Any], None], after: Callable[[], None]):
        self._optimizer, self._module, self._before = optimizer, module, before
        self._on_before_step, self._on_after_step = (
            _nothing,
            after,
        )  # a module may replace them: the step does not count
        files = [importlib.import_module(f"{package}.core.optimizer") for package in packages_of(module)]
        bases = (*(file.LightningOptimizer for file in files), type(optimizer))
        self._kind = type(f"Lightning{type(optimizer).__name__}", bases, {})

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] # isinstance holds of the optimizer's class and of Lightning's wrapper
        return self._kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    @property
    def optimizer(self) -> Any:
        """The optimizer itself."""
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step the optimizer, with on_before_optimizer_step after the closure, as Lightning does."""

        def evaluate() -> Any:
            loss = None if closure is None else closure()
            self._before(self._optimizer)
            return loss

        self._on_before_step()
        result = self._optimizer.step(closure=evaluate, **options)
        self._on_after_step()
        return result

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Train only this optimizer's parameters inside the `with`."""
        self._module.toggle_optimizer(self)
        try:
            yield
        finally:
            self._module.untoggle_optimizer(self)


class ModuleOptimizers(Optimizer):
    """All optimizers of a module with manual optimization, or none of one without an optimizer, as one to forge."""

    def __init__(self, optimizers: list[Any]):
        self.optimizers = optimizers
        self.trains_nothing = not optimizers
        self.defaults = {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of all, each parameter in the first that has it."""
        seen: set[int] = set()
        groups = []
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            new = [p for p in group["params"] if id(p) not in seen and not seen.add(id(p))]
            groups.append(group if len(new) == len(group["params"]) else {**group, "params": new})
        return groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing: the module steps its optimizers itself."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the module drops its gradients itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def __repr__(self) -> str:
        return f"ModuleOptimizers({self.optimizers})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__init__(state["optimizers"])  # pyright: ignore[reportCallIssue]
