"""The stand-in of Lightning's Trainer and logger, and what the adapter refuses or warns of before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forge
from forge.errors import TaskError
from forge_plugins import Clip

L = pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchmetrics")

from lightning.pytorch.callbacks import (  # noqa: E402
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: E402

from tests.forge_lightning.both import Subject, forge_trainer, lightning_trainer, loader  # noqa: E402
from tests.forge_lightning.manual_scenarios import Manual  # noqa: E402


def fit(module: Any, val: Any = None, callbacks: Any = (), **options: Any) -> forge.FitResult:
    task = forge.LightningAdapter(module, callbacks=callbacks)
    return forge_trainer(max_epochs=2, **options).fit(task, loader(), val)


READ = (
    *("max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "num_training_batches", "num_val_batches"),
    *("estimated_stepping_batches", "datamodule", "is_global_zero", "world_size", "global_rank", "local_rank"),
    *("accumulate_grad_batches", "sanity_checking", "fast_dev_run", "current_epoch", "global_step", "is_last_batch"),
    *("check_val_every_n_epoch", "training", "validating", "testing", "predicting", "evaluating", "should_stop"),
    *("num_nodes", "gradient_clip_val", "overfit_batches", "num_sanity_val_steps", "barebones", "node_rank"),
    *("state.fn", "state.stage", "strategy.root_device", "strategy.world_size", "strategy.is_global_zero"),
    *("fit_loop.max_epochs", "fit_loop.epoch_loop.batch_idx", "fit_loop.epoch_loop.global_step"),
    "fit_loop.epoch_loop.batch_progress.is_last_batch",
)


class Reads(Subject):
    """Notes what it reads of the Trainer, in training and in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("train")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("val")

    def note(self, stage: str) -> None:
        for path in READ:
            value: Any = self.trainer
            for name in path.split("."):
                value = getattr(value, name)
            self.heard.append((stage, path, value))


@pytest.mark.filterwarnings("ignore")
def test_the_stand_in_answers_as_lightnings_trainer() -> None:
    theirs, ours = Reads(), Reads()
    lightning_trainer(max_epochs=2).fit(theirs, loader(), loader(10, seed=1))
    fit(ours, loader(10, seed=1))
    assert ours.heard == theirs.heard


def test_callbacks_that_rewrite_the_loops_are_refused() -> None:
    with pytest.raises(TaskError, match=r"StochasticWeightAveraging rewrites Lightning's loops. Use the plugin swa"):
        forge.LightningAdapter(Subject(), callbacks=StochasticWeightAveraging(swa_lrs=0.1))
    with pytest.warns(UserWarning, match="TQDMProgressBar is not run: the plugin progress"):
        forge.LightningAdapter(Subject(), callbacks=[TQDMProgressBar()])


def test_manual_optimization_refuses_plugins_that_edit_gradients() -> None:
    with pytest.raises(TaskError, match=r"Manual has automatic_optimization = False, so the plugin clip"):
        fit(Manual(), plugins=[Clip(1.0)])


def test_every_property_of_lightnings_trainer_is_answered() -> None:
    """What the stand-in does not define itself is Lightning's own definition over what it does."""
    names = [name for name in dir(L.Trainer) if isinstance(getattr(L.Trainer, name), property) and name[0] != "_"]
    refused: dict[str, Any] = {}

    class Asks(Subject):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for name in names:
                try:
                    getattr(self.trainer, name)
                except Exception as error:
                    refused[name] = error
            return self.loss(batch)

    fit(Asks(), loader(10, seed=1))
    assert len(names) > 50
    assert not refused


@pytest.mark.parametrize("hook", ["training_epoch_end", "validation_epoch_end"])
def test_a_hook_that_lightning_has_removed_is_refused_rather_than_never_called(hook: str) -> None:
    kind = type("Old", (Subject,), {hook: lambda self, outputs: None})
    with pytest.raises(TaskError, match=f"Support for `{hook}` has been removed"):
        fit(kind())


@pytest.mark.filterwarnings("ignore")
def test_optimizers_are_lightnings_own_kind_and_a_step_can_be_left_uncounted() -> None:
    seen: list[Any] = []

    class Asks(Subject):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(self.loss(batch))
            before, counted = self.global_step, optimizer._on_after_step
            optimizer._on_after_step = lambda: None
            optimizer.step()
            optimizer._on_after_step, uncounted = counted, self.global_step - before
            optimizer.step()
            kinds = isinstance(optimizer, LightningOptimizer), isinstance(optimizer, torch.optim.Adam)
            seen.append((*kinds, uncounted, self.global_step - before))

    fit(Asks())
    assert set(seen) == {(True, True, 0, 1)}
