"""Evaluation of a LightningModule: its steps, the hooks around them, and logged values."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from forge.contract.hooks import hookimpl
from forge.contract.run import Run
from forge.data.accumulation_windows import batch_size
from forge.metrics.means import Means
from forge.metrics.torchmetrics import TaskMetrics, is_metric
from forge.rng import RNGState
from forge_lightning import compatibility
from forge_lightning.data_draws import draw_as_iterators
from forge_lightning.log_calls import LogCall, Reductions, computed, split
from forge_lightning.module_methods import ModuleMethods
from forge_lightning.names import short

WORDS = {"val": "validation", "test": "test", "predict": "predict"}
"""Lightning's names of the stages, as in its methods."""


class Evaluates(ModuleMethods):
    """The task's methods for validation, test and predict."""

    @hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: Run, stage: str) -> Generator[None, Any, Any]:
        fits = trainer.verb == "fit"
        if fits and (self.is_manual or self._defines("on_validation_model_zero_grad")):
            getattr(self.module, "on_validation_model_zero_grad", self.module.zero_grad)()
        self.stage, self._loader = stage, -1
        self.validations += stage == "val"
        self._eval_means = Means(trainer.env.device, trainer.env)
        self._eval_metrics, self._eval_reductions = TaskMetrics(self, ""), Reductions()
        draw_as_iterators(trainer.given_loaders.get(stage))
        try:
            result = yield
            if stage == "predict":
                self._call("on_predict_epoch_end")
                self._call("on_predict_end")
            if fits and self._rng_after is not None:
                self._rng_after.restore(trainer.env.device)  # as under Lightning, a validation may draw numbers
            self._call_module(f"on_{WORDS[stage]}_model_train")
            return result
        finally:
            self.stage, self._loader, self._eval_means, self._calls = None, 0, None, None
            self._eval_metrics, self.fresh, self._rng_after = None, {}, None

    def _begin_loader(self) -> None:
        self._loader += 1
        self._weight = 1
        if self._loader == 0:
            assert self.stage is not None
            self._call_module(f"on_{WORDS[self.stage]}_model_eval")
            self._call(f"on_{WORDS[self.stage]}_start")
            self._call(f"on_{WORDS[self.stage]}_epoch_start")

    def validation_step(self, batch: Any) -> Any:
        return self._evaluate(batch, "val")

    def test_step(self, batch: Any) -> Any:
        return self._evaluate(batch, "test")

    def predict_step(self, batch: Any) -> Any:
        if not hasattr(self.module, "predict_step"):
            return super().predict_step(batch)
        return self._run(batch, "predict")

    def _evaluate(self, batch: Any, stage: str) -> dict[str, Any]:
        if self.stage is None or self._step is None:
            return self._apart(stage, getattr(self.module, f"{WORDS[stage]}_step"), batch)
        weight = 0 if self._step.is_padding else batch_size(batch) or 1
        output, calls = self._run_and_collect(weight, self._run, batch, stage)
        loss, extra = split(output)
        extra |= {"loss": loss} if isinstance(loss, Tensor) and loss.numel() == 1 else {}
        taken = {short(call.name, stage) for call in calls}
        calls += [LogCall(n, v, True, False, None, True) for n, v in extra.items() if short(n, stage) not in taken]
        return self._add_evaluated(calls)

    def _run(self, batch: Any, stage: str) -> Any:
        step, word = self._step, WORDS[stage]
        assert step is not None
        place = (step.micro, self._loader) if self._several() else (step.micro,)
        self._call(f"on_{word}_batch_start", batch, *place)
        output = compatibility.call(getattr(self.module, f"{word}_step"), batch, *place)
        self._call(f"on_{word}_batch_end", output, batch, *place)
        return output

    def _add_evaluated(self, calls: list[LogCall]) -> dict[str, Any]:
        """Add logged values to the evaluation's means. With several loaders, return accumulating metrics: forge
        computes them after each loader."""
        assert self.stage is not None
        assert self._eval_means is not None
        returned: dict[str, Any] = {}
        for call in calls:
            name = short(call.name, self.stage)
            if is_metric(call.value):
                if self._several():
                    self._note(call, name)
                    returned[name] = call.value
                else:
                    self._count_metric(call)
                continue
            if call.add_dataloader_idx and self._loader >= 0:
                name = "/".join([*self._several()[self._loader : self._loader + 1], name])
            self._note(call, name)
            if call.reduce == "mean":
                self._eval_means.add(name, call.value, self._weigh(call))
            else:
                self._eval_reductions.add(name, call.reduce, call.value)
        return returned

    def _count_metric(self, call: LogCall) -> None:
        assert self.stage is not None
        assert self._eval_metrics is not None
        name = short(call.name, self.stage)
        self._note(call, name)
        self._eval_metrics.add_name(name, call.value)

    def _count_between(self, call: LogCall) -> None:
        """Handle `self.log` in a hook of an evaluation; in an end hook `callback_metrics` gets the value at once."""
        assert self.trainer is not None
        if not is_metric(call.value):
            self._add_evaluated([call])
            if self._loader < 0:
                self.fresh[self.names[call.name]] = self.latest[call.name] = float(call.value)
            return
        self._count_metric(call)
        if self._loader < 0:
            assert self._eval_metrics is not None
            values = computed(self._eval_metrics, self.trainer.env)
            self.fresh |= {f"{self.stage}/{name}": value for name, value in values.items()}
            self._keep_latest()

    def _note(self, call: LogCall, name: str) -> None:
        of_loader = self._several() and call.add_dataloader_idx and self._loader >= 0  # end hooks belong to no loader
        index = f"/dataloader_idx_{self._loader}" if of_loader else ""
        self.names[call.name + index] = self._logged[call.name + index] = f"{self.stage}/{name}"
        if call.on_epoch and call.on_step and call.steps_named:
            self._logged[f"{call.name}_epoch{index}"] = f"{self.stage}/{name}"

    def _several(self) -> list[str]:
        """Return the names of several loaders; empty for one."""
        assert self.trainer is not None
        assert self.stage is not None
        return [name for name in self.trainer.loaders[self.stage] if name is not None]

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        """Call the module's end hooks, which can read the results; return the results with the values that they log."""
        if self.stage is None:
            return {}  # no evaluation is under way: an experiment runs steps alone, and each returns what it logs
        self._weight, self._loader = 1, -1
        values = self._results()
        self.fresh = {f"{stage}/{name}": value for name, value in values.items()}
        self._keep_latest()
        self._call(f"on_{WORDS[stage]}_epoch_end")
        self._call(f"on_{WORDS[stage]}_end")
        assert self.trainer is not None
        self._rng_after = RNGState.capture(self.trainer.env.device)
        return {**values, **self._results()}

    def _keep_latest(self) -> None:
        """Put the results into callback_metrics, under the names that the module gave them."""
        self.latest |= {own: self.fresh[name] for own, name in self._logged.items() if name in self.fresh}

    def _results(self) -> dict[str, float]:
        assert self.trainer is not None
        assert self._eval_means is not None
        assert self._eval_metrics is not None
        means = self._eval_means.read().result()
        return {**means, **self._eval_reductions.read(), **computed(self._eval_metrics, self.trainer.env)}
