"""ddp over NCCL with one rank: what one device trains by itself, levers included; nothing waits for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forge
from forge.checkpoint import StoredCheckpoint as Saved
from forge_plugins import AMP, DDP, EMA, Accumulate, Checkpoint, Clip, Compile, Schedule
from tests.support.tasks import Classifier, make_batches

pytestmark = pytest.mark.gpu


class Fused(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def trained(plugins: list[Any], **options: Any) -> Fused:
    torch.manual_seed(0)
    task = Fused()
    options = {"max_epochs": 2, "seed": 0, "device": "cuda", "run_dir": False, **options}
    forge.Trainer(plugins=plugins, **options).fit(task, make_batches(9), make_batches(2, seed=1))
    return task


STACKS: dict[str, Any] = {
    "nothing": list,
    "levers": lambda: [AMP("bf16"), Accumulate(2), Clip(0.5), EMA(0.9, warmup=True), Schedule("cosine")],
    "compiled": lambda: [AMP("bf16"), Compile(), Clip(0.5)],
}


@pytest.mark.parametrize("name", STACKS)
def test_one_rank_over_nccl_trains_what_the_device_trains_alone(name: str) -> None:
    ours, theirs = trained([*STACKS[name](), DDP()]), trained(STACKS[name]())
    assert dist.get_backend() == "nccl"
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_of_ddp_is_saved_and_goes_on_without_it(tmp_path: Path) -> None:
    trained([Checkpoint(every="3 updates"), DDP()], run_dir=tmp_path, max_epochs=None, max_updates=6)
    trained([Checkpoint(every="3 updates")], run_dir=tmp_path, resume="auto", max_epochs=None, max_updates=12)
    alone = trained([], max_epochs=None, max_updates=12)
    last = Saved(tmp_path / "checkpoints" / "update-00000012").weights()
    assert all(torch.equal(last[name].cuda(), value) for name, value in alone.state_dict().items())
