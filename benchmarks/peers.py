"""The peers, each with everything off ("least") and with its defaults and a logged loss ("default").

Every peer trains the same network from the same batches in the same order. Batches are passed in the cheapest way that
the peer accepts: any iterable if possible, else `cases.as_dataloader`. If the user writes the loop (Fabric,
accelerate), "default" logs the loss to TensorBoard every 50 updates, as Lightning and forge do.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.cases import Batch, Batches, Case, as_dataloader, loss_of
from benchmarks.contenders import Contender

LOG_EVERY = 50


def lightning() -> list[Contender]:
    """A LightningModule under `Trainer.fit`; Lightning accepts any iterable with a length."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self, case: Case, logs: bool):
            super().__init__()
            self.case, self.logs, self.network = case, logs, case.build()

        def training_step(self, batch: Batch) -> Tensor:
            loss = loss_of(self.network, batch)
            if self.logs:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = self.case.optimizer(self.network)
            if not self.case.scheduled:
                return optimizer
            schedule = {"scheduler": self.case.schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    def fit(case: Case, batches: Batches, logs: bool, **options: Any) -> nn.Module:
        module = Module(case, logs)
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=case.accumulate,
            gradient_clip_val=case.clip,
            **options,
        )
        trainer.fit(module, train_dataloaders=batches)
        return module.network

    def least(case: Case, batches: Batches, folder: Path) -> nn.Module:
        return fit(case, batches, logs=False, barebones=True)

    def default(case: Case, batches: Batches, folder: Path) -> nn.Module:
        return fit(case, batches, logs=True, default_root_dir=folder)

    return [
        Contender("lightning least", least, "barebones=True; batches unchanged"),
        Contender("lightning default", default, "progress bar, logger, checkpoint, self.log(prog_bar=True)"),
    ]


def fabric() -> list[Contender]:
    """Lightning's Fabric: the user's loop, `fabric.setup` and `fabric.backward`."""
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import TensorBoardLogger

    def loop(case: Case, fabric: Fabric, batches: Any, log_every: int) -> nn.Module:
        network = case.build()
        model, optimizer = fabric.setup(network, case.optimizer(network))
        schedule = case.schedule(optimizer) if case.scheduled else None
        for index, batch in enumerate(batches, 1):
            loss = loss_of(model, batch)
            fabric.backward(loss / case.accumulate if case.accumulate > 1 else loss)
            if index % case.accumulate:
                continue
            if case.clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=case.clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
            update = index // case.accumulate
            if log_every and update % log_every == 0:
                fabric.log("loss", loss, step=update)
        return network

    def least(case: Case, batches: Batches, folder: Path) -> nn.Module:
        return loop(case, Fabric(accelerator="cpu", devices=1), batches, log_every=0)

    def default(case: Case, batches: Batches, folder: Path) -> nn.Module:
        logger = TensorBoardLogger(folder)
        own = Fabric(accelerator="cpu", devices=1, loggers=logger)
        network = loop(case, own, own.setup_dataloaders(as_dataloader(batches)), LOG_EVERY)
        logger.finalize("success")
        return network

    return [
        Contender("fabric least", least, "setup(model, optimizer); batches unchanged"),
        Contender("fabric default", default, "also setup_dataloaders(DataLoader), TensorBoard every 50"),
    ]


def accelerate() -> list[Contender]:
    """Hugging Face accelerate: the user's loop, `prepare` and `accelerator.backward`."""
    from accelerate import Accelerator

    def loop(case: Case, accelerator: Any, batches: Any, log_every: int) -> nn.Module:
        network = case.build()
        optimizer = case.optimizer(network)
        schedules = [case.schedule(optimizer)] if case.scheduled else []
        model, optimizer, batches, *schedules = accelerator.prepare(network, optimizer, batches, *schedules)
        # accumulate() is used only if needed; inside it the prepared optimizer and schedule act on the last micro-batch
        # only
        window = accelerator.accumulate if case.accumulate > 1 else contextlib.nullcontext
        update = 0
        for batch in batches:
            with window(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if case.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                for schedule in schedules:
                    schedule.step()
                optimizer.zero_grad()
            update += accelerator.sync_gradients
            if log_every and accelerator.sync_gradients and update % log_every == 0:
                accelerator.log({"loss": loss.item()}, step=update)
        return network

    def least(case: Case, batches: Batches, folder: Path) -> nn.Module:
        _forget_accelerate()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulate)
        return loop(case, accelerator, batches, log_every=0)

    def default(case: Case, batches: Batches, folder: Path) -> nn.Module:
        _forget_accelerate()
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=case.accumulate, log_with="tensorboard", project_dir=folder
        )
        accelerator.init_trackers("run")
        network = loop(case, accelerator, as_dataloader(batches), LOG_EVERY)
        accelerator.end_training()
        return network

    return [
        Contender("accelerate least", least, "prepare(model, optimizer); batches unchanged"),
        Contender("accelerate default", default, "also prepare(DataLoader), TensorBoard every 50"),
    ]


def ignite() -> list[Contender]:
    """PyTorch-Ignite: its Engine around an update function; "default" uses ignite's own if possible.

    Ignite's own update function cannot clip, so the `stack` case writes one by hand in both rows.
    """
    from ignite.engine import Engine, Events, create_supervised_trainer
    from ignite.handlers import LRScheduler, ProgressBar
    from ignite.handlers.tensorboard_logger import TensorboardLogger
    from ignite.metrics import RunningAverage

    def engine_by_hand(case: Case, network: nn.Module, optimizer: Any, output: Callable[[Tensor], Any]) -> Any:
        def update(engine: Any, batch: Batch) -> Any:
            loss = loss_of(network, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return output(loss)

        def update_window(engine: Any, batch: Batch) -> Any:
            loss = loss_of(network, batch)
            (loss / case.accumulate).backward()
            if engine.state.iteration % case.accumulate == 0:
                clip_grad_norm_(network.parameters(), case.clip or 0.0)
                optimizer.step()
                optimizer.zero_grad()
            return output(loss)

        return Engine(update if case.accumulate == 1 else update_window)

    def add_schedule(case: Case, engine: Any, optimizer: Any) -> None:
        if case.scheduled:
            # use_legacy belongs with ITERATION_COMPLETED; without it the first rate is used twice
            schedule = LRScheduler(case.schedule(optimizer), use_legacy=True)
            engine.add_event_handler(Events.ITERATION_COMPLETED(every=case.accumulate), schedule)

    def least(case: Case, batches: Batches, folder: Path) -> nn.Module:
        network = case.build()
        optimizer = case.optimizer(network)
        engine = engine_by_hand(case, network, optimizer, output=lambda loss: None)
        add_schedule(case, engine, optimizer)
        engine.run(batches, max_epochs=1)
        return network

    def default(case: Case, batches: Batches, folder: Path) -> nn.Module:
        network = case.build()
        optimizer = case.optimizer(network)
        if case.clip is None:
            engine = create_supervised_trainer(
                network, optimizer, F.cross_entropy, gradient_accumulation_steps=case.accumulate
            )
        else:
            engine = engine_by_hand(case, network, optimizer, output=lambda loss: loss.item())
        add_schedule(case, engine, optimizer)
        RunningAverage(output_transform=lambda loss: loss).attach(engine, "loss")
        ProgressBar().attach(engine, ["loss"])
        every = Events.ITERATION_COMPLETED(every=LOG_EVERY * case.accumulate)
        with TensorboardLogger(log_dir=str(folder)) as logger:
            logger.attach_output_handler(engine, every, tag="training", metric_names=["loss"])
            engine.run(batches, max_epochs=1)
        return network

    return [
        Contender("ignite least", least, "Engine, own update function; batches unchanged"),
        Contender("ignite default", default, "create_supervised_trainer, RunningAverage, bar, TensorBoard every 50"),
    ]


def hf() -> list[Contender]:
    """The Trainer of transformers, with the user's `compute_loss`.

    `max_grad_norm` is the case's, not HF's default of 1.0, because clipping would train other weights. HF always steps
    a schedule; a constant one if the case has none. It logs and saves a checkpoint every 500 updates by default, more
    than the default number of timed updates.
    """
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        batches: Any

        def get_train_dataloader(self) -> Any:
            return self.batches

        def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Tensor:
            return loss_of(model, inputs)

    def fit(case: Case, batches: Any, updates: int, prepare: bool, folder: Path, **options: Any) -> nn.Module:
        _forget_accelerate()
        network = case.build()
        optimizer = case.optimizer(network)
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=updates,
            use_cpu=True,
            gradient_accumulation_steps=case.accumulate,
            max_grad_norm=case.clip or 0.0,
            **options,
        )
        trainer = Own(network, arguments, optimizers=(optimizer, case.schedule(optimizer)))
        trainer.batches = trainer.accelerator.prepare(as_dataloader(batches)) if prepare else batches
        trainer.train()
        return network

    def least(case: Case, batches: Batches, folder: Path) -> nn.Module:
        off = {"disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "report_to": "none"}
        return fit(case, batches, batches.updates, False, folder, logging_nan_inf_filter=False, **off)

    def default(case: Case, batches: Batches, folder: Path) -> nn.Module:
        return fit(case, batches, batches.updates, True, folder)

    return [
        Contender("hf least", least, "no bar, log, save or NaN filter; batches unchanged"),
        Contender("hf default", default, "bar, NaN filter, log and checkpoint every 500, prepared DataLoader"),
    ]


def _forget_accelerate() -> None:
    """Reset accelerate's process-wide state, which all Accelerators share."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


PEERS: dict[str, tuple[str, Callable[[], list[Contender]]]] = {
    "lightning": ("lightning", lightning),
    "fabric": ("lightning", fabric),
    "accelerate": ("accelerate", accelerate),
    "ignite": ("ignite", ignite),
    "hf": ("transformers", hf),
}
"""Peer → its module, and a function that makes its contenders: importing this file imports no peer."""


def installed(name: str) -> bool:
    return find_spec(PEERS[name][0]) is not None


def contenders(name: str) -> list[Contender]:
    return imported(name, PEERS[name][1])


def imported(name: str, make: Callable[[], list[Contender]]) -> list[Contender]:
    """Import a peer, and keep environment variables that its import sets for its own runs: Lightning sets
    PYTORCH_NVML_BASED_CUDA_CHECK, which slows every optimizer step of the process, also the bare loop's."""
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make()
    found = {key: value for key, value in os.environ.items() if before.get(key) != value}
    for key in found:
        del os.environ[key]
    os.environ.update(before)
    own = _IMPORTED.setdefault(PEERS[name][0], found)
    return [replace(contender, environ=own) for contender in made]


_IMPORTED: dict[str, dict[str, str]] = {}
"""Module → variables set by its first import; a second peer of the module imports nothing new."""
