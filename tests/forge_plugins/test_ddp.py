"""ddp: several ranks train what one process trains, and what plain DistributedDataParallel trains, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import forge
from forge.data import TensorLoader
from forge.errors import DataError, RecipeError
from forge.testing import TinyTask, tiny_batches
from forge_plugins import AMP, DDP, EMA, FSDP, SAM, SWA, Accumulate, Clip, EarlyStop, Freeze, Remat, Schedule
from tests.support.ddp_kit import Plain, Reader, options, train, wide
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some
from tests.support.ranks import heard
from tests.support.tasks import PlainGAN

EXACT = 1e-12
"""The tolerance in float64: sums over samples are taken in another order, and nothing else."""


class Weighs(Plain):
    """Counts only samples of class 0, and means over those: what padding does to tokens."""

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        picked = y == 0
        loss = F.cross_entropy(self(x), y, reduction="none")
        return {"loss": (loss * picked).sum() / picked.sum().clamp(min=1)}

    validation_step = training_step

    def num_items(self, batch: Any) -> int:
        return int((batch[1] == 0).sum())


class CountsOnDevice(Weighs):
    """The same counts as tensors, which nothing reads."""

    def num_items(self, batch: Any) -> Any:
        return (batch[1] == 0).sum()


class Fractions(Plain):
    """Samples with weights that are no whole numbers."""

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        weights = self.weights(batch)
        return {"loss": (F.cross_entropy(self(x), y, reduction="none") * weights).sum() / weights.sum()}

    validation_step = training_step

    def weights(self, batch: Any) -> Tensor:
        return 0.3 + 0.1 * batch[0][:, 0].abs()

    def num_items(self, batch: Any) -> Tensor:
        return self.weights(batch).sum()


class Searches(Plain):
    """An optimizer that decides by the loss how often to look."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


def close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = EXACT) -> None:
    assert ours["updates"] == theirs["updates"]
    for name, value in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=tolerance, atol=tolerance)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-6)


def stacks() -> dict[str, Any]:
    """What is compared: by name, how to make a task and its plugins."""
    return {
        "nothing": lambda: (Plain(), []),
        "window 3": lambda: (Plain(), [Accumulate(3)]),
        "levers": lambda: (Plain(), [Accumulate(3), Clip(0.5), EMA(0.9), Remat("net"), Schedule("linear")]),
        "items": lambda: (Weighs(), [Accumulate(2)]),
        "items in tensors": lambda: (CountsOnDevice(), [Accumulate(2)]),
        "batches without an item": lambda: (Weighs(), []),
        "fractions of items": lambda: (Fractions(), [Accumulate(2)]),
        "sam": lambda: (Plain(), [SAM(0.05), Accumulate(2)]),
        "two optimizers": lambda: (PlainGAN().double(), [Accumulate(2), Clip(0.5)]),
        "line search": lambda: (Searches(), []),
        "thaw": lambda: (Plain(), [Freeze("net.0", thaw="1 epoch")]),
    }


def each_stack() -> dict[str, Any]:
    return {name: train(*make()) for name, make in stacks().items()}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks_train_what_one_process_trains(count: int) -> None:
    alone, together = each_stack(), ranks(count)(each_stack)
    for name in stacks():
        tolerance = 1e-9 if name == "line search" else EXACT  # it decides by sums, and so makes more of their last bits
        for rank in together:
            close(rank[name], alone[name], tolerance)
        assert all(
            torch.equal(value, rank[name]["weights"][key])
            for rank in together
            for key, value in together[0][name]["weights"].items()
        ), f"{name}: the ranks have different weights"


# -- against plain DDP ------------------------------------------------------------------------------------------------


class Small(TinyTask):
    """Without dropout; in float32, with batch statistics."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)


def levers() -> dict[str, Any]:
    options = {"run_dir": False, "max_epochs": 2, "validate_every": None}
    return train(Small(), [AMP("bf16"), Accumulate(3), Clip(0.5)], tiny_batches((8,) * 6), **options)


def levers_by_hand() -> dict[str, Tensor]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    task = Small()
    model, optimizer = DistributedDataParallel(task.net), torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        batches = [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in tiny_batches((8,) * 6)]
        for first in (0, 3):
            for x, y in batches[first : first + 2]:
                with model.no_sync():
                    backward(model, x, y)
            backward(model, *batches[first + 2])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in task.state_dict().items()}


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    (loss / 3).backward()


def test_a_stack_is_plain_ddp_written_by_hand_bit_for_bit() -> None:
    ours, theirs = ranks(2)(levers), ranks(2)(levers_by_hand)
    for rank in range(2):
        for name, value in theirs[rank].items():
            if "running" not in name and "tracked" not in name:  # these are each rank's own there
                assert torch.equal(ours[rank]["weights"][name], value), name


class CountCollectives(forge.Plugin):
    """How many collectives of the gradients' group each update takes."""

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self) -> Any:
        group: Any = dist.distributed_c10d._get_default_group()
        before = group._get_sequence_number_for_group()
        result = yield
        self.counts.append(group._get_sequence_number_for_group() - before)
        return result


def collectives() -> list[int]:
    count = CountCollectives()
    train(Plain(), [Accumulate(3), count], log_every=1000, validate_every=None)
    return count.counts


def test_an_update_takes_one_round_of_gradients() -> None:
    for counts in ranks(2)(collectives):
        assert counts[0] == 1
        assert counts[2:] == [1] * 2  # in the second, torch lays its buckets out anew


# -- requests, signals, random numbers --------------------------------------------------------------------------------


def stop_on_one_rank(asker: int) -> dict[str, Any]:
    @forge.on("boundary")
    def ask(trainer: forge.Trainer, step: forge.Step) -> None:
        if trainer.env.rank == asker and step.index == 4:
            trainer.request_stop("enough")

    return train(Plain(), [ask], max_epochs=100, log_every=3)


def test_a_stop_of_one_rank_ends_all_at_the_same_update() -> None:
    stopped = ranks(2)(stop_on_one_rank, 1)
    assert stopped[0]["updates"] == stopped[1]["updates"] in (5, 6)
    assert [rank["stop"] for rank in stopped] == ["ask: enough"] * 2


def signal_on_one_rank(folder: str) -> tuple[int, int]:
    from forge_plugins import Checkpoint

    @forge.on("step_end")
    def hit(step: forge.Step) -> None:
        if step.trainer.env.rank == 1 and step.index == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = forge.Trainer(
        max_epochs=100, seed=0, device="cpu", run_dir=folder, log_every=3, plugins=[hit, Checkpoint(), DDP()]
    )
    try:
        trainer.fit(Plain(), wide())
    except forge.Interrupted as leaving:
        return leaving.EXIT_CODE, trainer.progress.update
    return 0, 0


def test_a_signal_one_rank_sees_has_all_save_and_leave(tmp_path: Path) -> None:
    left = ranks(2)(signal_on_one_rank, str(tmp_path))
    assert left[0] == left[1]
    assert left[0][0] == 85
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("update-*"))] == [f"update-{left[0][1]:08d}"]


def stop_and_signal() -> dict[str, Any]:
    @forge.on("boundary")
    def ask(trainer: forge.Trainer, step: forge.Step) -> None:
        if step.index == 4:
            if trainer.env.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            trainer.request_stop("enough", everywhere=True)

    return train(Plain(), [ask], max_epochs=100, log_every=50)


def test_a_signal_to_one_rank_as_all_stop_does_not_part_them() -> None:
    stopped = ranks(2)(stop_and_signal)
    assert [rank["updates"] for rank in stopped] == [5, 5]


def stops_early() -> dict[str, Any]:
    """The second validation is worse than the first, long before ranks would meet again."""
    watch = EarlyStop("val/loss", patience=1)
    return train(Plain(lr=3.0), [watch], wide(0, (8,) * 60), validate_every="3 updates", log_every=500)


def test_a_validation_ends_the_run_where_one_process_ends() -> None:
    alone = stops_early()
    assert alone["updates"] == 6
    for rank in ranks(2)(stops_early):
        close(rank, alone)
        assert rank["stop"] == alone["stop"]


class Counts(Plain):
    """Counts samples in a validation, over all ranks."""

    def on_all(self) -> int:
        assert self.trainer is not None
        return sum(self.trainer.env.gather(self.seen))

    def validation_step(self, batch: Any) -> Any:
        self.seen = getattr(self, "seen", 0) + (0 if self.is_padding else len(batch[1]))
        return super().training_step(batch)

    def evaluation_end(self, stage: str) -> dict[str, float]:
        seen, self.seen = self.on_all(), 0
        assert self.trainer is not None
        return {"seen": float(seen), **({} if self.trainer.env.is_main else {"mine": 1.0})}


def counts() -> dict[str, Any]:
    data = [(x, y) for x, y in wide(1, (8, 6, 4, 1))]  # the last sample runs on both ranks, and counts on one
    trainer = forge.Trainer(plugins=[DDP()], device="cpu")
    return trainer.validate(Counts(), data)


def test_what_a_task_keeps_in_validation_can_be_gathered() -> None:
    first, second = ranks(2)(counts)
    assert first == second  # what rank 0 does not know is nobody's
    assert first["val/seen"] == 19.0


class Series(forge.TaskModule):
    """BatchNorm along a series, so that one sample is enough for it; in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(12, 1)).double()

    def training_step(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def averaged_alone(strategy: type[forge.Plugin]) -> dict[str, float]:
    """Batches of one sample: all ranks but the last only ever borrow."""
    several = [strategy()] if "RANK" in os.environ else []
    noise = torch.Generator().manual_seed(0)
    data = TensorLoader(*(torch.randn(4, *size, generator=noise).double() for size in ((2, 6), (1,))), batch_size=1)
    options: dict[str, Any] = {"device": "cpu", "run_dir": False, "seed": 0, "validate_every": "2 updates"}
    trainer = forge.Trainer(max_epochs=2, plugins=[SWA(0, every="2 updates"), *several], **options)
    return trainer.fit(Series(), data, data).metrics


@pytest.mark.parametrize("strategy", some([DDP, FSDP]))
def test_a_rank_without_samples_helps_to_estimate(strategy: type[forge.Plugin]) -> None:
    alone = averaged_alone(strategy)
    for rank in ranks(2)(averaged_alone, strategy):
        assert rank == pytest.approx(alone, rel=1e-9)


def draw() -> list[float]:
    drawn: list[float] = []

    @forge.on("step_end", mutates=True)
    def take(step: forge.Step) -> None:
        drawn.append(float(torch.rand(())))

    train(Plain(), [take], max_epochs=1)
    return drawn


def test_every_rank_draws_its_own_random_numbers() -> None:
    alone, (first, second) = draw(), ranks(2)(draw)
    assert first == alone
    assert not set(first) & set(second)


# -- one process, options ---------------------------------------------------------------------------------------------


def test_one_process_with_ddp_is_one_process_without(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrapped = Plain(), Plain()
    options: dict[str, Any] = {"max_epochs": 2, "seed": 0, "device": "cpu", "run_dir": False}
    forge.Trainer(plugins=[Accumulate(2)], **options).fit(plain, wide(), wide(1))
    forge.Trainer(plugins=[Accumulate(2), DDP(compress=None)], **options).fit(wrapped, wide(), wide(1))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True))


@pytest.mark.parametrize("option", ["bucket_mb", "watchdog"])
def test_an_option_that_makes_no_sense_is_refused_by_name(option: str) -> None:
    with pytest.raises(RecipeError, match=f"ddp.{option} is 0; it must be above 0"):
        DDP(**{option: 0})


@pytest.mark.slow
def test_options_reach_torch_and_leave_the_result_alone() -> None:
    compressed, static, small = ranks(2)(options)[0]
    assert static == pytest.approx(small, rel=1e-12)
    assert compressed != static
    assert compressed == pytest.approx(static, rel=1e-2)


def shares_told() -> list[str]:
    with heard() as lines:
        for size in (4, 5):
            data = TensorLoader(torch.zeros(8, 1), torch.zeros(8, 1), batch_size=size)
            forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[DDP()]).fit(Reader(), data)
    return [line for line in lines if "global batch" in line]


def test_the_batch_of_each_rank_is_told() -> None:
    (even, uneven), others = ranks(2)(shares_told)
    assert others == []
    assert even == "A global batch of 4 samples is 2 on each of 2 ranks."
    assert uneven.startswith("A global batch of 5 samples on 2 ranks is 2 or 3 each")


def test_a_batch_that_cannot_be_divided_is_refused_by_name() -> None:
    from forge.data.sharding import RankLoader

    with pytest.raises(DataError, match="yields a str, which cannot be divided among 2 ranks"):
        list(RankLoader(["text"], 0, 2, "train"))


def in_detail() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        train(Plain(), [])
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_a_debug_level_that_crashes_torch_is_refused() -> None:
    for error in ranks(2).errors(in_detail):
        assert "StackError: TORCH_DISTRIBUTED_DEBUG=DETAIL crashes" in error
        assert "TORCH_DISTRIBUTED_DEBUG=INFO" in error
