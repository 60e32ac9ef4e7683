"""On a CUDA device too a run that was cut off ends in the same bits: dropout, means on the device, prefetch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.data import Loader
from forge.testing import TinyTask
from forge_plugins import JSONL, Accumulate, Checkpoint, Clip, Guard, Prefetch, Schedule
from tests.forge.snapshot.test_resume import Noisy, PowerCut, cut_at, ends_as_if_it_had_not_been_cut

pytestmark = pytest.mark.gpu


class OnTheGPU(TinyTask):
    """Fused Adam, and dropout drawn on the device."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def live(folder: Path, *more: Any, **options: Any) -> nn.Module:
    plugins = [
        Accumulate(2),
        Clip(0.5),
        Schedule("cosine", warmup=3),
        Guard(),
        Prefetch(),
        Checkpoint(every="3 updates"),
        JSONL(),
        *more,
    ]
    settings: dict[str, Any] = {"seed": 3, "device": "cuda", "log_every": 2, "max_epochs": 3, **options}
    task = OnTheGPU()
    trainer = forge.Trainer(plugins=plugins, run_dir=folder, resume="auto", deterministic=True, **settings)
    trainer.fit(task, Loader(Noisy(), 8, shuffle=True, pin_memory=True), Loader(Noisy(20), 8))
    return task


@pytest.mark.parametrize("update", [2, 4, 7])
def test_a_run_that_was_cut_off_ends_in_the_same_weights_and_log(tmp_path: Path, update: int) -> None:
    ends_as_if_it_had_not_been_cut(live, tmp_path, update)


def test_a_checkpoint_from_the_gpu_goes_on_on_the_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PowerCut):
        live(tmp_path, cut_at(4))
    live(tmp_path, device="cpu")
    assert "device cuda -> cpu" in caplog.text
