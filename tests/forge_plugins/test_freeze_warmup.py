"""freeze.warmup: the rate of thawed parameters rises, as that of a parameter group of their own would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.testing import TinyTask, assert_same_weights, fit_tiny, tiny_batches
from forge_plugins import Checkpoint, Freeze
from tests.forge.snapshot.test_resume import die, live


class Plain(TinyTask):
    """Without what draws random numbers, in double precision."""

    def __init__(self, kind: str = "sgd"):
        super().__init__(dropout=0.0)
        self.kind = kind
        self.double()

    def training_step(self, batch: Any) -> Any:
        return super().training_step((batch[0].double(), batch[1]))

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        if self.kind == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def by_hand(task: Plain, thaw: int, warmup: int) -> Plain:
    """A loop with a group of its own for the layer that thaws."""
    late, optimizer = task.get_submodule("net.0"), task.configure_optimizers()
    others = [p for p in task.parameters() if all(p is not own for own in late.parameters())]
    options = {name: value for name, value in optimizer.defaults.items() if name != "decoupled_weight_decay"}
    optimizer = type(optimizer)([{"params": others}, {"params": [*late.parameters()]}], **options)
    late.requires_grad_(False)
    task.train()
    for index, batch in enumerate(tiny_batches() * 2):
        late.requires_grad_(index >= thaw)
        factor = min(1.0, (index - thaw + 1) / warmup)
        optimizer.param_groups[1]["lr"] = options["lr"] * max(0.0, factor)
        optimizer.zero_grad()
        task.training_step(batch)["loss"].backward()
        optimizer.step()
    late.requires_grad_(True)
    return task


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("warmup", [1, 4])
def test_a_warm_up_is_that_of_a_group_of_its_own(kind: str, warmup: int) -> None:
    task, _ = fit_tiny([Freeze("net.0", thaw="3 updates", warmup=warmup)], task=Plain(kind))
    expected = by_hand(Plain(kind), 3, warmup)
    torch.testing.assert_close(task.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_run_cut_within_a_warm_up_resumes(tmp_path: Path) -> None:
    plugins = lambda: [  # noqa: E731
        Freeze("net.*", keep="net.4.*", thaw={"net.0": "2 updates", "net.1": "4 updates"}, warmup=5),
        Checkpoint("1 updates", background=False),
    ]
    straight, _ = live(tmp_path / "straight", plugins())
    for update in (4, 6, 9):
        die(tmp_path / "cut", plugins(), update)
    assert_same_weights(live(tmp_path / "cut", plugins())[0], straight)


def test_a_step_between_warm_ups_can_be_captured() -> None:
    due: list[bool] = []
    freeze = Freeze("net.0", thaw="3 updates", warmup=3)

    @forge.on("step_end")
    def ask(step: forge.Step) -> None:
        due.append(freeze.due(step))

    fit_tiny([ask, freeze], max_epochs=2)
    assert due == [False, False, False, True, True, False, False, False, False, False]
