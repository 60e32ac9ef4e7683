"""PPO, DQN and GRPO: what they compute by hand; as plain loops bit for bit, killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.cli import main
from forge.data import Environments, Rollouts, epoch_order
from forge.rng import seed_rank
from forge.testing import assert_same
from forge_plugins import Checkpoint
from forge_recipes.dqn import DQN, replay
from forge_recipes.grpo import END, LETTERS, PROMPT, is_right, until_end
from forge_recipes.ppo import PPO, environment, rollouts
from tests.forge.snapshot.test_resume import PowerCut, cut_at
from tests.support.profiles import some

pytest.importorskip("gymnasium")


def test_advantages_are_sums_over_all_horizons() -> None:
    task, steps = PPO(gamma=0.9, trace=0.7), 6
    values, rewards = torch.randn(steps, 2), torch.randn(steps, 2)
    ends, beyond = (torch.rand(steps, 2) < 0.3).float(), torch.randn(2)
    found = task._advantages(values, rewards, ends, beyond)
    for env in range(2):
        for first in range(steps):
            expected, factor = 0.0, 1.0
            for step in range(first, steps):
                after = beyond[env] if step == steps - 1 else values[step + 1, env]
                error = rewards[step, env] + 0.9 * after * (1 - ends[step, env]) - values[step, env]
                expected = expected + factor * error
                factor = factor * 0.9 * 0.7 * (1 - ends[step, env])
            torch.testing.assert_close(found[first, env], expected)


def ppo_by_hand(collections: int) -> PPO:
    torch.manual_seed(5)
    task, passes = PPO(steps=16), 0
    envs = Environments(lambda: environment("CartPole-v1"), 4)
    optimizer = task.configure_optimizers()
    seed_rank(3, 0)
    for _ in range(collections):
        with torch.no_grad():
            made = task.eval().collect(envs)
        task.train()
        for _ in range(2):
            order, passes = epoch_order(64, 3, passes), passes + 1
            for at in order.split(32):
                optimizer.zero_grad()
                task.training_step({name: x[at] for name, x in made.items()})["loss"].backward()
                optimizer.step()
    return task


def ppo_by_forge(folder: Path | bool, collections: int, *plugins: Any) -> PPO:
    torch.manual_seed(5)
    task = PPO(steps=16)
    resume = "auto" if folder else None
    trainer = forge.Trainer(
        plugins=[*plugins], seed=3, max_epochs=collections, device="cpu", run_dir=folder, resume=resume
    )
    trainer.fit(task, rollouts(environments=4, batch_size=32, epochs=2).train)
    return task


def test_ppo_is_a_loop_by_hand() -> None:
    assert_same(ppo_by_forge(False, 6), ppo_by_hand(6))


@pytest.mark.parametrize("update", some([7, 1, 4, 12, 18, 22], quick=1))
def test_ppo_cut_anywhere_ends_in_the_same_bits(update: int, tmp_path: Path) -> None:
    often = Checkpoint(every="3 updates")
    with pytest.raises(PowerCut):
        ppo_by_forge(tmp_path, 6, often, cut_at(update))
    assert_same(ppo_by_forge(tmp_path, 6, often), ppo_by_hand(6))


def dqn_by_forge(folder: Path | bool, *plugins: Any) -> DQN:
    torch.manual_seed(5)
    task = DQN(hidden=16, steps=8)
    data = replay(environments=2, batch_size=16, every=4, warmup=40, epoch=10)
    settings: Any = {"seed": 3, "max_updates": 24, "device": "cpu", "resume": "auto" if folder else None}
    forge.Trainer(plugins=[*plugins], run_dir=folder, **settings).fit(task, data.train)
    return task


def test_dqn_is_a_loop_by_hand_and_cut_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(5)
    task = DQN(hidden=16, steps=8)
    optimizer = task.configure_optimizers()
    envs = Environments(lambda: environment("CartPole-v1"), 2)
    kept: dict[str, torch.Tensor] = {}
    seed_rank(3, 0)
    for update in range(24):
        while update % 4 == 0 or not kept or len(kept["action"]) < 40:
            with torch.no_grad():
                made = task.eval().collect(envs)
            task.train()
            kept = {name: torch.cat([kept[name], x]) if kept else x for name, x in made.items()}
            if len(kept["action"]) >= 40:
                break
        at = torch.randint(len(kept["action"]), (16,))
        optimizer.zero_grad()
        task.training_step({name: x[at] for name, x in kept.items()})["loss"].backward()
        optimizer.step()
    assert_same(dqn_by_forge(False), task)
    often = Checkpoint(every="5 updates")
    with pytest.raises(PowerCut):
        dqn_by_forge(tmp_path, often, cut_at(13))
    assert_same(dqn_by_forge(tmp_path, often), task)


def test_an_answer_is_right_if_it_is_the_sum_and_ends() -> None:
    def written(text: str) -> torch.Tensor:
        return torch.tensor([[LETTERS.index(letter) for letter in text]])

    for text, total, right in [
        ("3+4=7.0", 7, True),
        ("3+4=7..", 7, True),
        ("3+4=77.", 7, False),
        ("3+4=70.", 7, False),
        ("9+8=17.", 17, True),
        ("9+8=170", 17, False),
        ("9+8=18.", 17, False),
    ]:
        assert bool(is_right(written(text), torch.tensor([total]))) is right, text
    assert until_end(written("3+4=7.0")[:, PROMPT:]).tolist() == [[True, True, False]]
    assert LETTERS[END] == "."


DATA = """
import torch, forge
from forge.data import Rollouts, Splits
from forge.testing import TinyTask


class Mine(TinyTask):
    scale = 2.0


def data(task, size: int = 8):
    x = torch.randn(size, 6)
    return Splits(train=Rollouts(lambda other: (x * task.scale, other(x).argmax(1)), batch_size=4))
"""


def test_a_data_function_gets_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(DATA)
    assert main(["fit", "mine.py", "trainer.max_epochs=2", "data.size=12"]) == 0, capsys.readouterr().err
    assert main(["fit", "mine.py", "data.task=3"]) != 0
    assert "data.task (command line) is no option of data" in capsys.readouterr().err


def test_live_data_need_a_task_only_when_they_are_read() -> None:
    loader = Rollouts(lambda task: torch.ones(4, 1))
    assert loader
    loader.attach(torch.nn.Linear(1, 1))
    assert [len(batch) for batch in loader] == [4]
