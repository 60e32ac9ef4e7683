"""task.averaged: the average of a part inside the step, as a target network or a mean teacher."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import EMA, FSDP, SWA, Accumulate, Checkpoint
from tests.forge.snapshot.test_resume import resumes
from tests.support.ddp_kit import Plain, train
from tests.support.fsdp_kit import Block, close
from tests.support.fsdp_kit import train as train_sharded
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

DECAY = 0.9


class MeanTeacher(TinyTask):
    """Learns the labels and what its own average says."""

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y) + F.mse_loss(logits, self.averaged(self.net)(x))}

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self(batch[0]), batch[1])}


class InEval(MeanTeacher):
    """Asks for its average before the network runs, and has it in evaluation mode."""

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        target = self.averaged(self.net).eval()(x)
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y) + F.mse_loss(logits, target)}


class Later(MeanTeacher):
    """Asks for its average, in evaluation mode, after the network has changed its statistics."""

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y) + F.mse_loss(logits, self.averaged(self.net).eval()(x))}


def by_hand(evaluates: bool, epochs: int = 2, window: int = 1) -> TinyTask:
    """The loop as people write it: a deep copy that follows the network after each update."""
    task = TinyTask()
    target = copy.deepcopy(task.net).requires_grad_(False)
    optimizer: Any = task.configure_optimizers()
    torch.manual_seed(0)
    for _ in range(epochs):
        batches = tiny_batches((8, 8, 8, 8))
        for first in range(0, 4, window):
            task.train()
            target.train(not evaluates)
            for x, y in batches[first : first + window]:
                said = target(x) if evaluates else None
                logits = task(x)
                loss = F.cross_entropy(logits, y) + F.mse_loss(logits, target(x) if said is None else said)
                (loss / window).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, own in zip(target.parameters(), task.net.parameters(), strict=True):
                    mine.lerp_(own, 1 - DECAY)
                for mine, own in zip(target.buffers(), task.net.buffers(), strict=True):
                    mine.copy_(own)
    return task


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", [MeanTeacher, InEval])
def test_a_task_trains_as_with_a_target_network_by_hand(kind: type[TinyTask], window: int) -> None:
    plugins = [EMA(DECAY), *([Accumulate(window)] if window > 1 else [])]
    task, _ = fit_tiny(plugins, task=kind(), train=tiny_batches((8, 8, 8, 8)))
    assert_same(task, by_hand(kind is InEval, window=window))


@pytest.mark.parametrize("kind", some([MeanTeacher, InEval, Later], quick=1))
@pytest.mark.parametrize("cut", some([1, 6], quick=1))
def test_a_cut_run_ends_as_one_that_was_not(kind: type[TinyTask], cut: int, tmp_path: Path) -> None:
    resumes(tmp_path, lambda: {"task": kind()}, lambda updates: [cut], plugins=lambda: [EMA(DECAY)])


def test_the_target_has_no_gradient_shares_the_average_and_follows_the_modes() -> None:
    class Looks(MeanTeacher):
        def training_step(self, batch: Any) -> dict[str, Tensor]:
            target = self.averaged(self.net)
            assert target is self.averaged(self.net)
            assert target is not self.net
            assert not any(p.requires_grad for p in target.parameters())
            assert [m.training for m in target.modules()] == [m.training for m in self.net.modules()]
            held = {p.data_ptr() for p in ema._average.tensors.values()}
            assert held == {p.data_ptr() for p in target.parameters()}
            return super().training_step(batch)

    ema = EMA(DECAY)
    task, _ = fit_tiny([ema], task=Looks())
    assert set(task.state_dict()) == set(TinyTask().state_dict())


def test_weights_of_low_precision_have_a_target_in_theirs() -> None:
    class Low(MeanTeacher):
        def training_step(self, batch: Any) -> dict[str, Tensor]:
            x, y = batch
            logits, target = self(x.bfloat16()), self.averaged(self.net)(x.bfloat16())
            held = dict(self.averaged(self.net).named_parameters())
            for name, mean in ema._average.tensors.items():
                assert mean.dtype is torch.float32
                assert torch.equal(held[name.removeprefix("net.")], mean.bfloat16())
            return {"loss": F.cross_entropy(logits.float(), y) + F.mse_loss(logits, target).float()}

        def validation_step(self, batch: Any) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self(batch[0].bfloat16()).float(), batch[1])}

    ema = EMA(DECAY)
    fit_tiny([ema], task=Low().bfloat16())


def test_before_start_the_target_is_the_network() -> None:
    class Looks(MeanTeacher):
        def training_step(self, batch: Any) -> dict[str, Tensor]:
            target = self.averaged(self.net).parameters()
            same = [torch.equal(mine, own) for mine, own in zip(target, self.net.parameters(), strict=True)]
            seen.append(all(same))
            return super().training_step(batch)

    seen: list[bool] = []
    fit_tiny([EMA(DECAY, start=4)], task=Looks())
    assert seen == [True] * 6 + [False] * 4  # after the fifth update the average is a copy of the weights


def test_without_a_plugin_that_averages_the_error_names_one() -> None:
    with pytest.raises(forge.TaskError, match=r"MeanTeacher asks for averaged weights, .* Train with -p ema\."):
        fit_tiny(task=MeanTeacher())


def test_outside_a_fit_it_is_the_part_itself() -> None:
    task = MeanTeacher()
    assert task.averaged(task.net) is task.net


def test_swa_keeps_one_too_and_a_name_chooses() -> None:
    class Second(MeanTeacher):
        def training_step(self, batch: Any) -> Any:
            seen.append(self.averaged(self.net, "swa") is self.averaged(self.net, "ema"))
            return super().training_step(batch)

    seen: list[bool] = []
    fit_tiny([EMA(DECAY, evaluate=False), SWA(start=0)], task=Second())
    assert not any(seen)


class OnRanks(Plain):
    training_step = MeanTeacher.training_step  # pyright: ignore[reportAssignmentType]
    validation_step = MeanTeacher.validation_step  # pyright: ignore[reportAssignmentType]


def on_ranks() -> dict[str, Any]:
    return train(OnRanks(), [EMA(DECAY)])


def test_two_ranks_train_what_one_process_trains() -> None:
    alone = on_ranks()
    for rank in ranks(2)(on_ranks):
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, alone["weights"][name], rtol=0, atol=1e-12)


class Shared(MeanTeacher):
    """Its network is there under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Sequential(self.net)

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y) + F.mse_loss(logits, self.averaged(self.again)(x))}


def test_a_part_by_its_second_name_has_the_average_too() -> None:
    task, _ = fit_tiny([EMA(DECAY)], task=Shared(), train=tiny_batches((8, 8, 8, 8)))
    assert_same(dict(task.net.named_parameters()), dict(by_hand(evaluates=False).net.named_parameters()))


# -- sharded ----------------------------------------------------------------------------------------------------------


class Sharded(forge.TaskModule):
    """Blocks that FSDP gathers one by one; a step asks for the average of all, and of one block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ModuleList([Block(8) for _ in range(3)]), nn.Linear(8, 3)).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def run(self, net: Any, x: Tensor) -> Tensor:
        first, blocks, last = net
        x = first(x)
        for block in blocks:
            x = block(x)
        return last(x) * self.scale

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self.run(self.net, x)
        hidden = torch.cat([logits, x[:, :5]], 1)
        near = F.mse_loss(self.net[1][1](hidden), self.averaged(self.net[1][1])(hidden))  # pyright: ignore
        far = F.mse_loss(logits, self.run(self.averaged(self.net), x))
        return {"loss": F.cross_entropy(logits, y) + near + far}

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.run(self.averaged(self.net), batch[0]), batch[1])}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def sharded(options: dict[str, Any], run: str | None = None, updates: int = 8) -> dict[str, Any]:
    options = dict(options)
    plugins: list[Any] = [EMA(DECAY, **options.pop("ema", {})), *([Accumulate(2)] if options.pop("window", 0) else [])]
    plugins += [FSDP(**options)] if "RANK" in os.environ else []
    plugins += [Checkpoint(every="1 update")] if run else []
    more: dict[str, Any] = {"run_dir": run, "resume": "auto"} if run else {}
    return train_sharded(Sharded(), plugins, max_epochs=None, max_updates=updates, **more)


SHARDED: list[dict[str, Any]] = [
    {},
    {"reshard": False, "window": 2},
    {"ema": {"start": 3}},
    {"blocks": "Linear"},
    {"replicate": 2},
]


@pytest.mark.parametrize("options", some(SHARDED))
def test_shards_train_what_one_process_trains(options: dict[str, Any]) -> None:
    alone = sharded({name: value for name, value in options.items() if name in ("ema", "window")})
    for rank in ranks(2)(sharded, options):
        close(rank, alone)


@pytest.mark.slow
def test_shards_that_are_resumed_end_in_the_same_bits(tmp_path: Path) -> None:
    straight = ranks(2)(sharded, {}, str(tmp_path / "straight"))[0]
    ranks(2)(sharded, {}, str(tmp_path / "cut"), 3)
    for rank in ranks(2)(sharded, {}, str(tmp_path / "cut")):
        assert_same(rank["weights"], straight["weights"])
