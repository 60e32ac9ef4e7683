"""The recipe `default` on a CUDA device, in float32 and bf16: between two logs nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge_plugins import AMP, Clip, Schedule
from tests.support.tasks import Classifier, make_batches

pytestmark = pytest.mark.gpu

LOG_EVERY = 10


class Fused(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@pytest.fixture
def strict() -> Iterator[forge.Plugin]:
    """Every host sync is an error, except in the first update (which is looked at) and in those that a log follows."""

    class Strict(forge.Plugin):
        """Errors instead of waiting."""

        observer = True
        steps = 0

        @forge.hookimpl(wrapper=True)
        def forge_train_step(self, step: forge.Step) -> Any:
            quiet = step.index > 0 and not step.ends_interval
            self.steps += quiet
            torch.cuda.set_sync_debug_mode("error" if quiet else "default")
            return (yield)

        @forge.hookimpl
        def forge_boundary(self) -> None:
            torch.cuda.set_sync_debug_mode("default")

    yield Strict()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("extra", [[], ["bf16"], ["bf16", "clip", "schedule"]], ids=["fp32", "bf16", "more"])
def test_a_step_makes_no_host_sync_outside_log_intervals(extra: list[str], strict: Any, tmp_path: Path) -> None:
    makers = {"bf16": lambda: AMP("bf16"), "clip": lambda: Clip(1.0), "schedule": lambda: Schedule("cosine", warmup=5)}
    plugins = [*(makers[name]() for name in extra), strict]
    trainer = forge.Trainer(
        max_epochs=1, seed=0, device="cuda", recipe="default", plugins=plugins, run_dir=tmp_path, log_every=LOG_EVERY
    )
    pinned = [(x.pin_memory(), y.pin_memory()) for x, y in make_batches(35)]
    result = trainer.fit(Fused(), pinned)
    assert result.updates == 35
    assert strict.steps == 35 - 1 - 4
