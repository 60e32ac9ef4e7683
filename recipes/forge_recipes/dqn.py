"""Deep Q-learning: a network learns what actions bring, from a buffer of what was done before.

`collect` plays and hands what happened to `forge.data.Replay`; `training_step` learns from draws of it. The target
network is the network as it was at the last collection.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.data import Environments, Replay, Rollouts, Splits
from forge_recipes.ppo import environment

Batch = dict[str, Tensor]


class DQN(forge.TaskModule):
    """The values of actions that are numbers, for observations that are vectors."""

    def __init__(
        self,
        observations: int = 4,
        actions: int = 2,
        hidden: int = 256,
        steps: int = 32,
        gamma: float = 0.99,
        curious: float = 0.04,
        curious_for: int = 8_000,
        lr: float = 2.3e-3,
    ):
        super().__init__()
        self.actions, self.steps, self.gamma, self.lr = actions, steps, gamma, lr
        self.curious, self.curious_for = curious, curious_for
        self.net = nn.Sequential(
            nn.Linear(observations, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, actions)
        )
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("played", torch.zeros((), dtype=torch.int64))
        self.register_buffer("returns", torch.zeros(20))

    def collect(self, envs: Environments) -> Batch:
        """Play `steps` steps in every environment; the share of random actions falls over the first ones."""
        self.target.load_state_dict(self.net.state_dict())
        device, found = self.returns.device, []
        for _ in range(self.steps):
            chance = max(self.curious, 1 - (1 - self.curious) * int(self.played) / self.curious_for)
            before = envs.observations
            best = self.net(before.to(device)).argmax(1).cpu()
            any_ = torch.randint(self.actions, (len(envs),))
            action = torch.where(torch.rand(len(envs)) < chance, any_, best)
            _, reward, terminated, _ = envs.step(action)
            # an episode that was cut short would have gone on, so only `terminated` ends the future
            found.append((before, action, reward, envs.last, terminated))
            self.played += len(envs)
            if envs.finished:
                ended = torch.tensor(envs.finished, device=device)
                self.returns = torch.cat([self.returns, ended])[-len(self.returns) :]
        names = ("before", "action", "reward", "after", "over")
        return {name: torch.cat(x) for name, x in zip(names, zip(*found, strict=True), strict=True)}

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            future = self.target(batch["after"]).max(1).values * ~batch["over"]
        value = self.net(batch["before"]).gather(1, batch["action"][:, None]).squeeze(1)
        loss = F.smooth_l1_loss(value, batch["reward"] + self.gamma * future)
        return {"loss": loss, "return": self.returns.mean(), "value": value.mean()}

    def play(self, envs: Environments, episodes: int) -> Batch:
        """Play whole episodes, the best action each time; return what each brought."""
        found: list[float] = []
        while len(found) < episodes:
            envs.step(self.net(envs.observations.to(self.returns.device)).argmax(1))
            found += envs.finished
        return {"return": torch.tensor(found[:episodes])}

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        return {"return": batch["return"].mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=self.lr)


def replay(
    name: str = "CartPole-v1",
    environments: int = 8,
    capacity: int = 100_000,
    batch_size: int = 64,
    every: int = 128,
    warmup: int = 1_000,
    epoch: int = 1_280,
    episodes: int = 20,
) -> Splits:
    """Keep the last `capacity` steps; play again after every `every` updates; validate on whole `episodes`."""
    envs = Environments(lambda: environment(name), environments)

    def evaluate(task: DQN) -> Batch:
        return task.play(Environments(lambda: environment(name), episodes, seed=1), episodes)

    return Splits(
        train=Replay(
            capacity, lambda task: task.collect(envs), batch_size=batch_size, every=every, warmup=warmup, epoch=epoch
        ),
        val=Rollouts(evaluate),
    )
