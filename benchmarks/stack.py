"""A stack of levers on a tiny step, against a hand-written loop; and the cost of each plugin alone.

    python -m benchmarks.stack                                     # both tables, about 12 minutes
    python -m benchmarks.stack --table stack --rounds 40           # accumulation 4 + clip + bf16 + schedule + log
    python -m benchmarks.stack --table alone --peers none          # forge with each of its plugins, one at a time
    python -m benchmarks.stack --json > stack.jsonl                # one JSON object per line: machine, then rows
    python -m benchmarks.stack --peers none --updates 20 --rounds 1 --json     # smoke test

The network is an MLP 16-16-4 on batches of 4: the smallest step with all levers, in which a framework's share is
largest. `benchmarks.overhead` describes the method and the columns: one process, in turn, one thread, oneDNN off, CPU
time between two batches.

"stack": every contender accumulates 4 micro-batches under bf16 autocast, clips to a norm of 1.0, steps Adam and a
schedule, and logs the mean loss, the gradient norm and the learning rate every 50 updates. "alone": the bare loop is
the plain one, without any of that, and each row is forge with one plugin; it includes a lever's own arithmetic (a
second pass for sam, casts for amp). "over forge" is the cost of the plugin itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import forge
from benchmarks import machine, overhead, peers
from benchmarks.cases import Batch, Batches, Case, loss_of
from benchmarks.command_line import some_of
from benchmarks.contenders import BARE, Contender
from benchmarks.ours import Classifier
from forge.registry import load
from forge_plugins import AMP, JSONL, Accumulate, Clip

LOG_EVERY = 50


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def _batch() -> Batch:
    return torch.randn(4, 16), torch.randint(4, (4,))


STACK = Case(
    "stack", "MLP 16-16-4, batch 4, Adam: accumulation 4 + clip + bf16 + schedule + log", _mlp, _batch, 4, 1.0, True
)
ALONE = Case("alone", "MLP 16-16-4, batch 4, Adam: forge with one plugin at a time", _mlp, _batch)

EACH: dict[str, dict[str, Any]] = {
    "accumulate": {"window": 1},
    "amp": {"dtype": "bf16"},
    "anomaly": {},
    "checkpoint": {"every": "1 epoch"},
    "clip": {"max_norm": 1.0},
    "early_stop": {"monitor": "val/loss"},
    "ema": {"decay": 0.999},
    "freeze": {"modules": "network.0.*"},
    "guard": {},
    "jsonl": {},
    "ledger": {},
    "monitor": {"every": "100 updates"},
    "prefetch": {},
    "profiler": {},
    "progress": {},
    "remat": {"modules": "network.0"},
    "sam": {},
    "schedule": {"kind": "cosine"},
    "swa": {"every": "10 updates"},
    "system": {},
    "tensorboard": {},
    "throughput": {},
}
"""The plugins of the rows, with options that enable their work."""
NEEDS_VALIDATION = ("early_stop",)


# ---------------------------------------------------------------------------------------------------------------------
# The whole stack


def by_hand(case: Case, batches: Batches, folder: Path) -> nn.Module:
    """Train as forge's contender does, with a hand-written loop."""
    network = case.build()
    optimizer = case.optimizer(network)
    schedule, micro, max_norm = case.schedule(optimizer), case.accumulate, case.clip or 0.0
    losses, norms, updates = 0.0, 0.0, 0
    with (folder / "metrics.jsonl").open("w") as log:
        for index, batch in enumerate(batches, 1):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(network, batch)
            (loss / micro).backward()
            losses += loss.item()
            if index % micro:
                continue
            norms += clip_grad_norm_(network.parameters(), max_norm).item()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            updates += 1
            if updates % LOG_EVERY == 0:
                means = {"loss": losses / LOG_EVERY / micro, "grad_norm": norms / LOG_EVERY}
                log.write(json.dumps({"update": updates, **means, "lr": schedule.get_last_lr()[0]}) + "\n")
                losses = norms = 0.0
    return network


def forge_stack(case: Case, batches: Batches, folder: Path) -> nn.Module:
    plugins = [AMP("bf16"), Accumulate(case.accumulate), Clip(case.clip), JSONL()]
    trainer = forge.Trainer(max_updates=batches.updates, plugins=plugins, run_dir=folder, log_every=LOG_EVERY)
    task = Classifier(case)
    trainer.fit(task, batches)
    return task.network


def ignite_stack() -> list[Contender]:
    """Train with ignite's Engine around a hand-written update function, as its users do."""
    from ignite.engine import Engine, Events
    from ignite.handlers import LRScheduler
    from ignite.handlers.tensorboard_logger import TensorboardLogger

    def train(case: Case, batches: Batches, folder: Path) -> nn.Module:
        network = case.build()
        optimizer = case.optimizer(network)

        def update(engine: Any, batch: Batch) -> float:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(network, batch)
            (loss / case.accumulate).backward()
            if engine.state.iteration % case.accumulate == 0:
                clip_grad_norm_(network.parameters(), case.clip or 0.0)
                optimizer.step()
                optimizer.zero_grad()
            return loss.item()

        engine = Engine(update)
        schedule = LRScheduler(case.schedule(optimizer), use_legacy=True)
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=case.accumulate), schedule)
        every = Events.ITERATION_COMPLETED(every=LOG_EVERY * case.accumulate)
        with TensorboardLogger(log_dir=str(folder)) as logger:
            logger.attach_output_handler(engine, every, tag="train", output_transform=lambda loss: {"loss": loss})
            engine.run(batches, max_epochs=1)
        return network

    return [Contender("ignite", train, "Engine, own update function, TensorBoard every 50")]


def fabric_stack() -> list[Contender]:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import TensorBoardLogger

    def train(case: Case, batches: Batches, folder: Path) -> nn.Module:
        logger = TensorBoardLogger(folder)
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed", loggers=logger)
        network = case.build()
        model, optimizer = fabric.setup(network, case.optimizer(network))
        schedule = case.schedule(optimizer)  # pyright: ignore[reportArgumentType]
        for index, batch in enumerate(batches, 1):
            loss = loss_of(model, batch)
            fabric.backward(loss / case.accumulate)
            if index % case.accumulate:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=case.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if index // case.accumulate % LOG_EVERY == 0:
                fabric.log("loss", loss, step=index // case.accumulate)
        logger.finalize("success")
        return network

    return [Contender("fabric", train, "setup(model, optimizer), bf16-mixed, TensorBoard every 50")]


def lightning_stack() -> list[Contender]:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self, case: Case):
            super().__init__()
            self.case, self.network = case, case.build()

        def training_step(self, batch: Batch) -> Tensor:
            loss = loss_of(self.network, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = self.case.optimizer(self.network)
            schedule = {"scheduler": self.case.schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    def train(case: Case, batches: Batches, folder: Path) -> nn.Module:
        module = Module(case)
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            precision="bf16-mixed",
            accumulate_grad_batches=case.accumulate,
            gradient_clip_val=case.clip,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, train_dataloaders=batches)
        return module.network

    return [Contender("lightning", train, "bf16-mixed, self.log, logger; no bar, no checkpoint")]


PEERS: dict[str, Callable[[], list[Contender]]] = {
    "ignite": ignite_stack,
    "fabric": fabric_stack,
    "lightning": lightning_stack,
}


def stack_contenders(names: list[str], talk: Console) -> list[Contender]:
    found = [
        Contender("bare", by_hand, "hand-written loop, JSON lines every 50"),
        Contender("bare again", by_hand, "the same once more: what differs is noise"),
        Contender("forge", forge_stack, "amp, accumulate, clip, jsonl; the schedule is the task's"),
    ]
    for name in names:
        if peers.installed(name):
            found += peers.imported(name, PEERS[name])
        else:
            talk.print(f"{name}: not installed, left out")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# One plugin at a time


class Validated(Classifier):
    def validation_step(self, batch: Batch) -> Tensor:
        return self.training_step(batch)


def alone(name: str, options: dict[str, Any]) -> Contender:
    def train(case: Case, batches: Batches, folder: Path) -> nn.Module:
        plugins = [load("plugin", name)(**options)] if name else []
        trainer = forge.Trainer(
            max_updates=batches.updates, plugins=plugins, run_dir=folder if name else False, allow_inexact=True
        )
        task = Validated(case)
        trainer.fit(task, batches, batches.pool[:1] if name in NEEDS_VALIDATION else None)
        return task.network

    note = ", ".join(f"{key}={value}" for key, value in options.items())
    return Contender(name or "forge", train, note or ("its defaults" if name else "plugins=[]"))


# ---------------------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    talk = Console(stderr=True)
    if options.json:
        print(json.dumps({"machine": machine.describe()}), flush=True)
    else:
        print(machine.sentence())
    for name in options.table:
        if name == "stack":
            case, contenders = STACK, stack_contenders(options.peers, talk)
        else:
            case, contenders = ALONE, [*BARE, alone("", {}), *(alone(each, EACH[each]) for each in options.plugins)]
        rows = overhead.run_case(case, contenders, options.updates, options.rounds, talk)
        if options.json:
            for row in rows:
                print(json.dumps(asdict(row)), flush=True)
        else:
            Console(width=None if sys.stdout.isatty() else 120).print(
                overhead.table(case, rows) if name == "stack" else table_alone(rows)
            )
    return 0


def table_alone(rows: list[overhead.Row]) -> Table:
    """Return a table of the cost that each plugin adds to forge without plugins."""
    forge_alone = next(row for row in rows if row.contender == "forge")
    shown = Table(title=f"{ALONE.note}\n{rows[0].rounds} rounds of {rows[0].updates} updates")
    shown.add_column("", no_wrap=True)
    for heading in ("µs/update", "over bare", "±", "over forge", "quiet over forge"):
        shown.add_column(heading, justify="right")
    shown.add_column("same weights")
    shown.add_column("options", style="dim")
    for row in rows:
        over = row.us_over_bare - forge_alone.us_over_bare
        quiet = row.us_over_bare_quiet - forge_alone.us_over_bare_quiet
        price = ("", "") if row.contender.startswith("bare") else (f"{over:+,.0f}", f"{quiet:+,.0f}")
        figures = f"{row.us_per_update:,.0f}", f"{row.us_over_bare:+,.0f}", f"{row.us_spread:,.0f}"
        shown.add_row(row.contender, *figures, *price, "yes" if row.weights_identical else "no", row.note)
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stack", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of tables")
    tables, plugins = some_of(["stack", "alone"]), some_of(EACH, all=list(EACH))
    parser.add_argument("--table", type=tables, default="stack,alone", help="of stack,alone")
    parser.add_argument("--plugins", type=plugins, default="all", help="rows of the table alone: names, or all")
    peer_names = some_of(PEERS, all=list(PEERS), none=[])
    parser.add_argument("--peers", type=peer_names, default="all", help=f"{','.join(PEERS)}, all or none")
    parser.add_argument("--updates", type=int, default=300, help="updates timed in each run (default 300)")
    parser.add_argument("--rounds", type=int, default=25, help="runs of each contender (default 25)")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TERM", "xterm-256color")
    sys.exit(main())
