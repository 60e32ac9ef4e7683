"""Statistics of a model, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import nn

import forge
from forge.errors import ForgeError, RecipeError
from forge.util.patterns import MANY, listed
from forge_plugins.monitor import shapes
from forge_plugins.monitor.alarms import Judge
from forge_plugins.monitor.modules import watchable
from forge_plugins.monitor.step_statistics import StepStatistics

logger = logging.getLogger("forge")

OFTEN, LOOKS = 100, 20
"""Updates between two looks, and looks at a shorter run."""


class Monitor(forge.Plugin):
    """Log gradients, weights and activations by layer at an interval, and warn of problems.

    When to use it: if the loss does not fall, or to watch a new architecture.

    What you see: by parameter and by layer, `monitor/grad_norm/…`, `grad_mean/…`, `grad_std/…` (unscaled, before
    clipping), `weight_norm/…` (after the update) and `update_ratio/…`, the size of the update relative to the weight;
    around 1e-3 is usual. `monitor/grad_norm`, `weight_norm` and `update_ratio` alone are over all parameters. By
    module: `monitor/activation/…/mean`, `std` and `zeros` (the share of values that are 0), of its first call. With
    several optimizers the optimizer's name comes after `monitor/`.

    A layer whose gradient vanishes, explodes or is missing gives one warning, with advice, once it was so at three
    looks in a row. Small and large gradients count only where a layer hardly moves or the loss does not fall; a missing
    gradient, only where it was missing at every look. Nothing is judged in the first ten updates. `forge doctor` names
    dead and saturated units.

    At the start a table of modules with output shapes, parameters and memory is logged, and shown by TensorBoard under
    TEXT. It is made in the first micro-batch, without an extra forward pass.

    At an interval, PyTorch hooks are placed on the modules for that update, and one copy of the weights is kept during
    the optimizer step; the device is read once, at its end. Between intervals it does nothing. Training does not
    change, bit for bit.

    Together with: inside code compiled by `compile` hooks are not called, so activations and shapes of compiled modules
    are missing, which is logged once. With `pipeline` and with `zero.stage=2`, where ranks hold different gradients,
    those of rank 0 are logged, and its layers alone make up the totals.

    ::

        forge fit quickstart -p monitor monitor.every="50 updates"
        forge fit quickstart -p monitor monitor.histograms=true trainer.max_epochs=2
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        every: str | None = None
        "How often to record statistics; null: twenty times in a run, but at least every 100 updates."
        weights: bool = True
        "Record weights and how far updates move them; holds one copy of them during a recorded update."
        activations: bool = True
        "Record the outputs of modules."
        histograms: bool = False
        "Draw histograms of all recorded tensors."
        shapes: bool = True
        "Show the table of modules at the start."
        alarms: bool = True
        "Warn of layers whose gradient vanishes, explodes or is missing."

    config: Config
    observer = True
    charts = {
        "gradient norm/of all parameters": r"monitor/([^/]+/)?grad_norm",
        "size of an update/as a share of the weights": r"monitor/([^/]+/)?update_ratio",
    }

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        self._set_interval(None)
        self._begin()

    def _set_interval(self, planned: int | None) -> None:
        """Fix how often to look, in a run of so many updates."""
        usual = OFTEN if planned is None else min(OFTEN, max(1, planned // LOOKS))
        try:
            self._every = forge.Interval(self.config.every or f"{usual} updates")
        except ForgeError as error:
            raise RecipeError(f"monitor.every: {error}") from error

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._judge: Judge | None = None
        self._shown = not self.config.shapes
        self._table: shapes.Shapes | None = None
        self._look: StepStatistics | None = None
        self._looks: list[StepStatistics] = []
        self._warned_of_compiled = False

    def due(self, step: forge.Step) -> bool:
        return not self._shown or self._every.due(step)

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._begin()
        self._set_interval(trainer.planned_updates)
        self._judge = Judge(trainer.task)
        elsewhere = [name for name, parameter in trainer.task.named_parameters() if parameter.is_meta]
        if elsewhere and trainer.env.is_main:
            text = "monitor: other ranks hold %s, so their layers are left out, also of totals."
            logger.warning(text, listed(elsewhere, MANY))

    # -- one update ---------------------------------------------------------------------------------------------------

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        if not self.due(step):
            return (yield)
        self._watch(step)
        try:
            result = yield
        finally:
            look, self._look = self._look, None
            for watching in filter(None, (look, self._table)):
                watching.close()
        if look is not None:
            look.finish(step)
            self._looks.append(look)
        return result

    def _watch(self, step: forge.Step) -> None:
        """Place hooks on the modules if this update is recorded."""
        if not self._shown:
            self._table = self._table or shapes.Shapes(step)
            self._table.watch(self._modules(step.trainer))
        if self._every.due(step):
            modules = self._modules(step.trainer) if self.config.activations else []
            self._look = StepStatistics(step, self.config, modules)

    @forge.hookimpl
    def forge_inspect_grads(self) -> None:
        if self._look is not None:
            self._look.inspect()

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        trainer = step.trainer
        if self._table is not None:
            self._show(trainer, self._table)
        looks, self._looks = self._looks, []
        for look in looks:
            self._tell(trainer, look)

    def _tell(self, trainer: forge.Run, look: StepStatistics) -> None:
        """Publish the numbers of a look, and log alarms."""
        assert self._judge is not None
        metrics, alarms = look.read(self._judge)
        for text in alarms if self.config.alarms and trainer.env.is_main else ():
            logger.warning("monitor: after update %d: %s", trainer.progress.update, text)
        trainer.publish(metrics)

    def _modules(self, trainer: forge.Run) -> list[tuple[str, nn.Module]]:
        modules, compiled = watchable(trainer.task, trainer.model)
        if compiled and not self._warned_of_compiled:
            self._warned_of_compiled = True
            text = "monitor: compiled code calls no hooks: activations and shapes inside of %s are left out."
            logger.warning(text, listed(compiled, MANY) if compiled != [""] else "the model")
        return modules

    def _show(self, trainer: forge.Run, table: shapes.Shapes) -> None:
        self._shown, self._table = True, None
        text = table.as_text()
        if trainer.env.is_main:
            logger.info("monitor: the model in its first micro-batch\n%s", text)
        trainer.publish({"model": forge.Text(f"```\n{text}\n```")})

    # -- state and end ------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"shown": self._shown}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self._shown = state["shown"] or not self.config.shapes
        self._looks = []  # of an abandoned attempt

    @forge.hookimpl
    def forge_end(self) -> None:
        self._begin()
