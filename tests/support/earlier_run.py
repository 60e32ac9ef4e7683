"""A run whose numbers are exact in float32 on every machine: sums, products and halves of small integers.

`tests/fixtures/earlier_run` is such a run, saved and stopped after 6 of 12 updates by forge as of 2026-11-15, before
the rooms were built; `expected.json` has the weights at the end of the same run, uninterrupted, with the same code.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import forge
from forge.data import TensorLoader
from forge_plugins import EMA, JSONL, Accumulate, Checkpoint, Guard

FOLDER = Path(__file__).resolve().parent.parent / "fixtures" / "earlier_run"


class Exact(forge.TaskModule):
    """Draws from every generator in its step, and keeps a buffer."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(width, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any) -> Any:
        (x,) = batch
        self.seen += len(x)
        noise = torch.randint(0, 4, x.shape) + random.randrange(4) + int(np.random.randint(4))
        return {"loss": ((x + noise) * self.weight + self.bias).mean(), "mean": x.mean()}

    def configure_optimizers(self) -> Any:
        head = torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.5)
        return head, torch.optim.lr_scheduler.StepLR(head, 4, gamma=0.5)


def fit(run_dir: Path, stop_after: int | None = None, **settings: Any) -> tuple[Exact, forge.FitResult]:
    """Train 12 updates over 3 epochs; `stop_after` stops after so many."""

    @forge.on("step_end", mutates=True)
    def stop(step: Any) -> None:
        if step.index + 1 == stop_after:
            step.trainer.request_stop("halfway")

    task = Exact()
    loader = TensorLoader(torch.arange(128.0).reshape(32, 4) % 7, batch_size=4, shuffle=True)
    plugins = [Accumulate(2), EMA(decay=0.5), Guard(), JSONL(), Checkpoint(every="2 updates"), stop]
    trainer = forge.Trainer(
        max_epochs=3,
        seed=5,
        plugins=plugins,
        run_dir=run_dir,
        device="cpu",
        validate_every=None,
        log_every=3,
        **settings,
    )
    return task, trainer.fit(task, loader)


def result_of(task: Exact, run_dir: Path) -> dict[str, Any]:
    """The trained weights, the exported average and the logged metrics, as plain data."""
    from safetensors.torch import load_file

    exported = {name: value.tolist() for name, value in load_file(run_dir / "weights.safetensors").items()}
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # the means of epochs came later
    logged = [{k: value for k, value in line.items() if k != "time" and not k.endswith("_epoch")} for line in lines]
    trained = {name: value.tolist() for name, value in task.state_dict().items()}
    return {"trained": trained, "exported": exported, "logged": logged}
