"""Rollouts, Replay and Environments: as a loop by hand, resumed anywhere to the same bits, and divided among ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forge
from forge.data import Environments, Replay, Rollouts, epoch_order
from forge.errors import CheckpointError, DataError, ForgeError, PeerFailed
from forge.rng import seed_rank
from forge.testing import assert_same
from forge_plugins import AMP, DDP, FSDP, Checkpoint, Limit
from tests.forge.snapshot.test_resume import PowerCut, cut_at
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some


class Actor(forge.TaskModule):
    """Imitates its own answers of a while ago, with noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.replay: Replay | None = None

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        errors = (self.net(batch["x"]) - batch["y"]) ** 2
        if self.replay is not None and "index" in batch:
            self.replay.prioritise(batch["index"], errors.detach().mean(1))
            return (errors.mean(1) * batch["weight"]).mean()
        return errors.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Drift:
    """A walk that ends after a while; its state is what its seed and its actions make it."""

    def reset(self, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        self.np_random, self.age = np.random.default_rng(seed), 0
        self.place = self.np_random.normal(size=4).astype(np.float32)
        return self.place.copy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.age += 1
        self.place = self.place + np.float32(action) * 0.1 + self.np_random.normal(size=4).astype(np.float32)
        return self.place.copy(), float(self.place.sum()), self.age == 7, self.age == 5 and self.place[0] > 1, {}


class Leaky(Drift):
    """One that draws from numpy's global generator."""

    def step(self, action: Any) -> Any:
        return super().step(action + np.random.normal())


class Saved(Leaky):
    """One that cannot be repeated, but has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": torch.tensor(self.place), "age": self.age, "rng": self.np_random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.age = state["place"].numpy(), state["age"]
        self.np_random.bit_generator.state = state["rng"]


def answers(task: Any) -> dict[str, Tensor]:
    assert not task.training
    assert not torch.is_grad_enabled()
    x = torch.randn(20, 4)
    return {"x": x, "y": task.net(x) + torch.randn(20, 2)}


def in_environments(make: Callable[[], Any] = Drift, count: int = 4, steps: int = 5) -> Callable[[Any], Any]:
    envs = Environments(make, count, seed=1)

    def collect(task: Any) -> dict[str, Tensor]:
        seen, made = [], []
        for _ in range(steps):
            action = task.net(envs.observations).argmax(1)
            seen.append(envs.observations)
            _, rewards, _, _ = envs.step(action)
            made.append(torch.stack([rewards, torch.randn(len(envs))], 1))
        return {"x": torch.cat(seen), "y": torch.cat(made)}

    return collect


LOADERS: dict[str, Callable[[], Any]] = {
    "minibatches": lambda: Rollouts(answers, batch_size=8, epochs=2),
    "whole": lambda: Rollouts(answers),
    "every": lambda: Rollouts(answers, batch_size=8, every=4),
    "samples": lambda: Rollouts(as_samples, batch_size=6, drop_last=True),
    "data set": lambda: Rollouts(lambda task: NamedTensors(*answers(task).values()), batch_size=6),
    "batches": lambda: Rollouts(lambda task: iter([answers(task) for _ in range(3)])),
    "environments": lambda: Rollouts(in_environments(), batch_size=8),
    "own state": lambda: Rollouts(in_environments(Saved), batch_size=8),
    "replay": lambda: Replay(50, answers, batch_size=8, every=3, warmup=30, epoch=7),
    "priorities": lambda: Replay(50, in_environments(), batch_size=8, every=2, epoch=7, alpha=0.6),
}

FIRST = ("minibatches", "environments", "priorities", "batches")


class NamedTensors(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return dict(zip("xy", super().__getitem__(index), strict=True))


def as_samples(task: Any) -> list[dict[str, Tensor]]:
    made = answers(task)
    return [{"x": x, "y": y} for x, y in zip(made["x"], made["y"], strict=True)]


def life(folder: Path | bool, loader: Any, *plugins: Any, updates: int = 22, **options: Any) -> Actor:
    task = Actor()
    if isinstance(loader, Replay):
        task.replay = loader
    settings = {"max_updates": updates, "seed": 3, "device": "cpu", "resume": "auto" if folder else None, **options}
    forge.Trainer(plugins=[*plugins], run_dir=folder, **settings).fit(task, loader)
    return task


# -- as a loop by hand ------------------------------------------------------------------------------------------------


def test_rollouts_are_a_loop_by_hand() -> None:
    task = life(False, Rollouts(answers, batch_size=8, epochs=2), max_epochs=3)
    other = Actor()
    optimizer, passes = other.configure_optimizers(), 0
    seed_rank(3, 0)
    for _ in range(3):
        other.eval()
        with torch.no_grad():
            made = answers(other)
        other.train()
        for _ in range(2):
            order, passes = epoch_order(20, 3, passes), passes + 1
            for at in order.split(8):
                optimizer.zero_grad()
                other.training_step({name: x[at] for name, x in made.items()}).backward()
                optimizer.step()
    assert_same(task, other)


def test_a_replay_is_a_loop_by_hand() -> None:
    task = life(False, Replay(50, answers, batch_size=8, every=3, epoch=5), updates=14)
    other = Actor()
    optimizer = other.configure_optimizers()
    kept: list[dict[str, Tensor]] = []
    seed_rank(3, 0)
    for update in range(14):
        if update % 3 == 0:
            other.eval()
            with torch.no_grad():
                made = answers(other)
            other.train()
            kept += [{"x": x, "y": y} for x, y in zip(made["x"], made["y"], strict=True)]
        # a ring: the newest take the places of the oldest
        ring: list[Any] = [None] * min(50, len(kept))
        for place, sample in enumerate(kept):
            ring[place % 50] = sample
        at = torch.randint(len(ring), (8,)).tolist()
        optimizer.zero_grad()
        other.training_step({name: torch.stack([ring[i][name] for i in at]) for name in "xy"}).backward()
        optimizer.step()
    assert_same(task, other)


def test_a_collection_is_made_by_the_weights_of_its_time_and_not_ahead() -> None:
    seen: list[int] = []

    def collect(task: Any) -> dict[str, Tensor]:
        seen.append(task.trainer.progress.update)
        return answers(task)

    life(False, Rollouts(collect, batch_size=5, epochs=2), updates=17)
    assert seen == [0, 8, 16]
    seen.clear()
    life(False, Replay(50, collect, batch_size=4, every=6, epoch=4), updates=14)
    assert seen == [0, 6, 12]


def test_amp_reaches_what_collects() -> None:
    seen: list[torch.dtype] = []

    def collect(task: Any) -> dict[str, Tensor]:
        x = torch.randn(8, 4)
        seen.append(task.net(x).dtype)
        return {"x": x, "y": torch.randn(8, 2)}

    life(False, Rollouts(collect), AMP("bf16"), updates=2)
    assert seen == [torch.bfloat16] * 2


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", some(sorted(LOADERS, key=lambda kind: kind not in FIRST), quick=len(FIRST)))
@pytest.mark.parametrize("update", some([5, 8, 1, 3, 12, 17, 21], quick=1))
def test_a_run_cut_anywhere_ends_in_the_same_bits(kind: str, update: int, tmp_path: Path) -> None:
    straight = life(tmp_path / "straight", LOADERS[kind](), Checkpoint(every="1 update"))
    with pytest.raises(PowerCut):
        life(tmp_path / "cut", LOADERS[kind](), Checkpoint(every="2 updates"), cut_at(update))
    assert_same(life(tmp_path / "cut", LOADERS[kind](), Checkpoint(every="2 updates")), straight)


# -- short epochs -----------------------------------------------------------------------------------------------------


def seen_with(limit: Limit, loader: Any, updates: int = 9) -> tuple[list[Tensor], list[int]]:
    """What a limited run trained on, and the updates before which it collected."""
    seen, collected, collect = [], [], loader.collect

    def noted(task: Any) -> Any:
        collected.append(task.trainer.progress.update)
        return collect(task)

    def note(step: forge.Step) -> None:
        seen.extend(batch["x"] for batch in step.window)

    loader.collect = noted
    life(False, loader, limit, forge.on("step_end")(note), updates=updates)
    return seen, collected


def test_a_short_epoch_is_the_beginning_of_a_collection() -> None:
    loader = Rollouts(answers, batch_size=8, epochs=2)
    assert seen_with(Limit(train=4), loader)[1] == [0, 4, 8]
    assert seen_with(Limit(train=4), Replay(50, answers, batch_size=8, every=6, epoch=7))[1] == [0, 6]


@pytest.mark.parametrize("kind", some(sorted(LOADERS, key=lambda kind: kind not in FIRST), quick=len(FIRST)))
def test_overfitting_a_batch_stays_with_the_batch(kind: str) -> None:
    seen, collected = seen_with(Limit(overfit=1), LOADERS[kind]())
    assert set(collected) == {0}
    assert all(torch.equal(batch, seen[0]) for batch in seen)


def test_overfitting_some_batches_repeats_them_in_order() -> None:
    for kind, length in {"minibatches": 2, "replay": 2, "batches": 3}.items():
        seen, collected = seen_with(Limit(overfit=length), LOADERS[kind]())
        assert set(collected) == {0}
        assert not torch.equal(seen[0], seen[1])
        assert all(torch.equal(batch, seen[n % length]) for n, batch in enumerate(seen))


@pytest.mark.parametrize("kind", some(["minibatches", "replay", "whole", "priorities", "environments"], quick=2))
@pytest.mark.parametrize("limit", some([{"overfit": 2}, {"train": 2}, {"overfit": 9}], quick=2))
@pytest.mark.parametrize("update", some([5, 6, 8], quick=1))
def test_a_short_epoch_that_is_cut_ends_in_the_same_bits(kind: str, limit: Any, update: int, tmp_path: Path) -> None:
    plugins = lambda: [Limit(**limit), Checkpoint(every="1 update")]  # noqa: E731
    straight = life(tmp_path / "straight", LOADERS[kind](), *plugins())
    with pytest.raises(PowerCut):
        life(tmp_path / "cut", LOADERS[kind](), *plugins(), cut_at(update))
    assert_same(life(tmp_path / "cut", LOADERS[kind](), *plugins()), straight)


# -- environments -----------------------------------------------------------------------------------------------------


def test_an_environment_that_draws_from_elsewhere_is_refused() -> None:
    envs = Environments(Leaky, 2)
    envs.step([0, 1])
    state = envs.state_dict()
    with pytest.raises(DataError, match=r"Environment 0 does not come back .* state_dict\(\)"):
        Environments(Leaky, 2).load_state_dict(state)


def test_another_number_of_environments_is_refused() -> None:
    with pytest.raises(DataError, match=r"environments \[0, 1\], and here are \[0, 1, 2\]"):
        Environments(Drift, 3).load_state_dict(Environments(Drift, 2).state_dict())


def test_episodes_follow_each_other_in_the_same_step() -> None:
    envs = Environments(Drift, 1)
    firsts = [envs.observations.clone()]
    for step in range(1, 15):
        observations, _, terminated, truncated = envs.step([0])
        if bool(terminated | truncated):
            assert len(envs.finished) == 1
            assert not torch.equal(envs.last, observations)
            firsts.append(observations.clone())
        else:
            assert envs.finished == []
            assert torch.equal(envs.last, observations)
        assert step
    assert len({tuple(first.flatten().tolist()) for first in firsts}) == len(firsts) >= 3


def test_another_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PowerCut):
        life(tmp_path, Rollouts(answers, batch_size=8), Checkpoint(every="2 updates"), cut_at(4))
    with pytest.raises(CheckpointError, match="the global batch size was 8 and is 4"):
        life(tmp_path, Rollouts(answers, batch_size=4), Checkpoint(every="2 updates"))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rollouts(7), "Rollouts takes a function of the task, not a int"),
        (lambda: Rollouts(answers, epochs=0), "epochs is 0"),
        (lambda: Replay(5, batch_size=2, warmup=6), "warmup=6 never comes: the buffer holds 5"),
        (lambda: list(Rollouts(answers)), r"has none yet: pass it to fit\(task, ...\)"),
        (lambda: life(False, Rollouts(lambda task: 3)), "returned a int. Return a batch"),
        (lambda: life(False, Rollouts(lambda task: {"x": 3})), "without a tensor that has a row per sample"),
        (
            lambda: life(False, Rollouts(answers, batch_size=32, drop_last=True)),
            "20 samples, which make no batch of 32",
        ),
        (lambda: life(False, Replay(50, batch_size=2)), "The replay buffer is empty"),
        (lambda: life(False, Replay(50, as_tuple, batch_size=2, alpha=0.5)), "collect dicts of tensors"),
        (
            lambda: life(False, Replay(50, changing(), batch_size=2)),
            r"holds torch.float32 \(4,\) per sample at \['x'\]",
        ),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ForgeError, match=said):
        make()


def as_tuple(task: Any) -> Any:
    return tuple(answers(task).values())


def changing() -> Callable[[Any], Any]:
    widths = iter([4, 5])
    return lambda task: {"x": torch.randn(2, next(widths)), "y": torch.randn(2, 2)}


def test_a_buffer_keeps_the_newest() -> None:
    replay = Replay(5, batch_size=3)
    for first in (0, 3, 6):
        replay.add(torch.arange(first, first + 3))
    assert sorted(set(replay.draw(200).tolist())) == [4, 5, 6, 7, 8]
    replay.add(torch.arange(100, 120))
    assert sorted(set(replay.draw(200).tolist())) == [115, 116, 117, 118, 119]


def test_priorities_say_how_often_a_sample_is_drawn() -> None:
    replay = Replay(4, batch_size=1, alpha=1.0, beta=1.0)
    replay.add({"x": torch.arange(4.0)})
    replay.prioritise(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    drawn = replay.draw(20_000)
    counts = torch.bincount(drawn["index"], minlength=4) / 20_000
    torch.testing.assert_close(counts, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.015, rtol=0)
    # weighted, each counts the same
    sums = torch.zeros(4).index_add_(0, drawn["index"], drawn["weight"])
    torch.testing.assert_close(sums / sums.mean(), torch.ones(4), atol=0.08, rtol=0)


def test_a_large_buffer_is_a_file_that_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.data.replay.LARGE", 100)
    replay = Replay(50, batch_size=3)
    replay.add({"x": torch.arange(60.0).view(30, 2), "y": torch.arange(30)})
    assert Path("/proc/self/maps").read_text().count(" (deleted)") >= 1
    drawn = replay.draw(9)
    assert torch.equal(drawn["x"][:, 0], 2.0 * drawn["y"])


# -- several ranks ----------------------------------------------------------------------------------------------------


def on_ranks(kind: str, strategy: str, folder: str, cut: int | None) -> dict[str, Any]:
    loader = LOADERS[kind]()
    collect, seen = loader.collect, []

    def noted(task: Any) -> Any:
        made = collect(task)
        seen.append(float(torch.cat([x.flatten() for x in made.values()]).sum()))
        return made

    loader.collect = noted
    plugins = [{"ddp": DDP, "fsdp": FSDP}[strategy](), Checkpoint(every="2 updates"), *([cut_at(cut)] if cut else [])]
    try:
        task = life(Path(folder), loader, *plugins, updates=10)
    except (PowerCut, PeerFailed):
        return {}
    weights = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in task.state_dict().items()}
    return {"weights": weights, "seen": seen}


@pytest.mark.parametrize("strategy", some(["ddp", "fsdp"], quick=1))
@pytest.mark.parametrize("kind", some(["environments", "minibatches", "replay"], quick=1))
def test_each_rank_collects_its_share(kind: str, strategy: str, tmp_path: Path) -> None:
    first, second = ranks(2)(on_ranks, kind, strategy, str(tmp_path / "straight"), None)
    assert first["seen"] != second["seen"]
    assert all(torch.equal(first["weights"][name], x) for name, x in second["weights"].items())
    ranks(2)(on_ranks, kind, strategy, str(tmp_path / "cut"), 5)
    again, _ = ranks(2)(on_ranks, kind, strategy, str(tmp_path / "cut"), None)
    assert all(torch.equal(first["weights"][name], x) for name, x in again["weights"].items())


def same_as_one_process(folder: str) -> dict[str, Tensor]:
    def collect(task: Any) -> dict[str, Tensor]:
        """Rows that do not depend on who makes them."""
        made = [torch.sin(torch.arange(4.0) + number) for number in envs._numbers]
        x = torch.stack(made).double()
        return {"x": x, "y": task.net(x) + 1}

    envs = Environments(Drift, 8)
    loader = Rollouts(collect, batch_size=8, epochs=2, shuffle=False)
    task = Actor().double()
    task.net[1] = nn.Identity()
    plugins = [DDP()] if "RANK" in os.environ else []
    forge.Trainer(plugins=plugins, max_updates=6, seed=0, device="cpu", run_dir=False).fit(task, loader)
    return {name: x.detach() for name, x in task.state_dict().items()}


def test_ranks_together_are_one_process() -> None:
    alone = same_as_one_process("")
    for found in ranks(2)(same_as_one_process, ""):
        for name, x in alone.items():
            torch.testing.assert_close(found[name], x, atol=1e-12, rtol=0)
