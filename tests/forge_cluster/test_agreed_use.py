"""Parameters with a gradient on some ranks only: experts that no sample of a rank chose."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.distributed.agreed_use import AgreedUse
from forge.errors import RecipeError, TaskError
from forge_cluster.pipeline import Pipeline
from forge_cluster.zero import Zero
from forge_plugins import DDP, FSDP, Accumulate
from forge_plugins.fsdp import COUNTS_UNUSED
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some
from tests.support.strangers_kit import EXACT, apart

WIDTH = 4


class Experts(nn.Module):
    """Each sample goes to one of three layers; the last one is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        y, out = self.norm(x), torch.zeros_like(x)
        for number in choice.unique().tolist():
            rows = (choice == number).nonzero()[:, 0]
            out = out.index_put((rows,), self.experts[number](y[rows]))
        return x + out


class Choosing(forge.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Experts() for _ in range(2)), nn.Linear(WIDTH, 3)
        self.double()

    def training_step(self, batch: Any) -> Tensor:
        x, choice, y = batch
        for block in self.blocks:
            x = block(x, choice)
        return F.cross_entropy(self.head(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)  # which moves zero gradients too


STRATEGIES = {
    "fsdp": lambda: [FSDP()],
    "fsdp that asks": lambda: [FSDP(find_unused=True)],
    "hybrid that asks": lambda: [FSDP(find_unused=True, replicate=2)],
    "windows": lambda: [FSDP(find_unused=True), Accumulate(2)],
    "ddp, windows": lambda: [DDP(find_unused=True), Accumulate(2)],
    "zero, windows": lambda: [Zero(find_unused=True), Accumulate(2)],
    "pipeline": lambda: [Pipeline(2)],
    "two pipelines": lambda: [Pipeline(2, stages=2)],
    "sharded pipelines": lambda: [Pipeline(2, stages=2, shard=True)],
}
ASKING = ("fsdp that asks", "hybrid that asks", "windows")
ALTERNATING = [[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]]
"""Both experts on different ranks, then one alone, then both on all, then on different ranks."""


def fit(strategy: str, choices: list[list[int]]) -> dict[str, Tensor]:
    task, generator = Choosing(), torch.Generator().manual_seed(1)
    data = [
        (
            torch.randn(4, WIDTH, generator=generator, dtype=torch.float64),
            torch.tensor(each),
            torch.tensor([0, 1, 2, 0]),
        )
        for each in choices
    ]
    plugins = STRATEGIES[strategy]()
    if "RANK" not in os.environ:
        plugins = [plugin for plugin in plugins if isinstance(plugin, Accumulate)]
    forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=False, plugins=plugins).fit(task, data)
    return {name: value.detach().clone() for name, value in task.state_dict().items()}


@pytest.mark.parametrize(
    ("count", "strategy", "choices"),
    [
        pytest.param(2, "fsdp that asks", ALTERNATING, marks=pytest.mark.slow),
        pytest.param(2, "windows", ALTERNATING, marks=pytest.mark.slow),
        (2, "ddp, windows", ALTERNATING),
        (2, "ddp, windows", [[0, 0, 0, 0], [1, 1, 1, 1]] * 2),
        (2, "zero, windows", [[0, 0, 0, 0], [1, 1, 1, 1]] * 2),
        pytest.param(2, "pipeline", ALTERNATING, marks=pytest.mark.slow),
        pytest.param(4, "hybrid that asks", ALTERNATING, marks=pytest.mark.slow),
        pytest.param(2, "fsdp", [[0, 1, 0, 1]] * 3, marks=pytest.mark.slow),
        pytest.param(4, "two pipelines", [[0, 0, 0, 0]] * 3, marks=pytest.mark.slow),
        pytest.param(4, "sharded pipelines", [[0, 0, 0, 0]] * 3, marks=pytest.mark.slow),
    ],
)
def test_experts_train_as_in_one_process(count: int, strategy: str, choices: list[list[int]]) -> None:
    if strategy in ASKING and not COUNTS_UNUSED:
        with pytest.raises(RecipeError, match=r"fsdp.find_unused needs torch 2.15"):
            STRATEGIES[strategy]()
        return
    alone = fit(strategy, choices)
    for weights in ranks(count)(fit, strategy, choices):
        assert apart(weights, alone) <= EXACT


@pytest.mark.parametrize(
    ("count", "strategy", "cure"),
    [
        (2, "fsdp", f"{'Set fsdp' if COUNTS_UNUSED else 'Use ddp with ddp'}.find_unused=true, or freeze them."),
        pytest.param(4, "two pipelines", "Use ddp with ddp.find_unused=true", marks=pytest.mark.slow),
        pytest.param(4, "sharded pipelines", "Use ddp with ddp.find_unused=true", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("choices", some([ALTERNATING, ALTERNATING[2:]], quick=1), ids=["at once", "later"])
def test_gradients_of_some_ranks_are_refused(count: int, strategy: str, cure: str, choices: list[list[int]]) -> None:
    errors = ranks(count).errors(fit, strategy, choices)
    assert any(".experts." in error and cure in error for error in errors)
    assert all(errors)


class Skipping(Choosing):
    """Every rank leaves out another block."""

    def training_step(self, batch: Any) -> Tensor:
        x, choice, y = batch
        for number, block in enumerate(self.blocks):
            if number != int(os.environ["RANK"]):
                x = block(x, choice)
        return F.cross_entropy(self.head(x), y)


def skip(options: dict[str, Any]) -> None:
    data = [(torch.ones(4, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1, 2, 0]))]
    trainer = forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[FSDP(**options)])
    trainer.fit(Skipping(), data)


@pytest.mark.parametrize("options", some([{}, *([{"find_unused": True}] if COUNTS_UNUSED else [])], quick=1))
def test_ranks_that_call_different_blocks_are_refused(options: dict[str, Any]) -> None:
    for error in ranks(2).errors(skip, options):
        assert "fsdp: call 2 of a block is blocks.1 on rank 0 and blocks.0 on rank 1." in error
        assert "ddp.find_unused=true" in error


def fit_once(strategy: str) -> None:
    plugin = {"ddp": DDP, "zero": Zero}[strategy]
    data = [(torch.ones(4, WIDTH, dtype=torch.float64), torch.zeros(4, dtype=torch.long), torch.tensor([0, 1, 2, 0]))]
    forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[plugin()]).fit(Choosing(), data)


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_what_was_not_averaged_never_reaches_the_weights(strategy: str) -> None:
    for error in ranks(2).errors(fit_once, strategy):
        assert f"TaskError: {strategy}: blocks.0.experts.1.weight, " in error
        assert f"Set {strategy}.find_unused=true, or freeze them." in error


def test_ranks_are_asked_once_for_what_is_trained() -> None:
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    named, asked = [("one", one), ("other", other)], []
    use = AgreedUse("fsdp", "Freeze them.")
    for _ in range(3):
        use.check(named, {id(one)}, lambda own: [asked.append(own) or own, own])
    assert asked == [[True, False]]
    other.requires_grad_(False)
    use.check(named, {id(one)}, lambda own: [asked.append(own) or own, own])
    assert asked[1:] == [[True]]
    with pytest.raises(TaskError, match="fsdp: one got a gradient on some ranks, or in some updates, only"):
        use.check(named, set(), lambda own: [own])
