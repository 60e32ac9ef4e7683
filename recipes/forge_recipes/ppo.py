"""Proximal policy optimisation: a policy learns from what it does in an environment of gymnasium.

`collect` plays a few steps in every environment and returns them with their advantages; `training_step` is the clipped
loss on minibatches of them. `forge.data.Rollouts` calls the one and cuts the other's batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import forge
from forge.data import Environments, Rollouts, Splits
from forge.errors import ForgeError

Batch = dict[str, Tensor]


class PPO(forge.TaskModule):
    """A policy and a value for observations that are vectors and actions that are numbers."""

    def __init__(
        self,
        observations: int = 4,
        actions: int = 2,
        hidden: int = 64,
        steps: int = 128,
        gamma: float = 0.99,
        trace: float = 0.95,
        clip: float = 0.2,
        entropy: float = 0.0,
        value: float = 0.5,
        lr: float = 1e-3,
    ):
        super().__init__()
        self.steps, self.gamma, self.trace = steps, gamma, trace
        self.clip, self.entropy, self.value, self.lr = clip, entropy, value, lr
        self.policy = perceptron(observations, hidden, actions, last=0.01)
        self.critic = perceptron(observations, hidden, 1, last=1.0)
        self.register_buffer("returns", torch.zeros(20))
        "Of the last episodes that ended."

    def collect(self, envs: Environments) -> Batch:
        """Play `steps` steps in every environment."""
        device = self.returns.device
        seen: dict[str, list[Tensor]] = {name: [] for name in ("observation", "action", "logp", "value")}
        rewards, ends, beyond = [], [], []
        for _ in range(self.steps):
            observation = envs.observations.to(device)
            chances = Categorical(logits=self.policy(observation), validate_args=False)
            action = chances.sample()
            value = self.critic(observation).squeeze(1)
            for name, x in zip(seen, (observation, action, chances.log_prob(action), value), strict=True):
                seen[name].append(x)
            _, reward, terminated, truncated = envs.step(action)
            if envs.finished:
                ended = torch.tensor(envs.finished, device=device)
                self.returns = torch.cat([self.returns, ended])[-len(self.returns) :]
            # an episode that was cut short would have gone on: the critic says how
            after = torch.zeros(len(envs), device=device)
            if bool(truncated.any()):
                after = self.critic(envs.last.to(device)).squeeze(1) * truncated.to(device)
            rewards.append(reward.to(device) + self.gamma * after)
            ends.append((terminated | truncated).float().to(device))
        beyond = self.critic(envs.observations.to(device)).squeeze(1)
        made = {name: torch.stack(x) for name, x in seen.items()}
        values = made.pop("value")
        advantages = self._advantages(values, torch.stack(rewards), torch.stack(ends), beyond)
        made |= {"advantage": advantages, "target": advantages + values}
        return {name: x.flatten(0, 1) for name, x in made.items()}

    def _advantages(self, values: Tensor, rewards: Tensor, ends: Tensor, beyond: Tensor) -> Tensor:
        """Return how much better each action was than its state's value, as an average over horizons (GAE)."""
        following = torch.cat([values[1:], beyond[None]])
        errors = rewards + self.gamma * following * (1 - ends) - values
        found, last = [], torch.zeros_like(beyond)
        for error, end in zip(errors.flip(0), ends.flip(0), strict=True):
            last = error + self.gamma * self.trace * (1 - end) * last
            found.append(last)
        return torch.stack(found[::-1])

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        chances = Categorical(logits=self.policy(batch["observation"]), validate_args=False)
        ratio = (chances.log_prob(batch["action"]) - batch["logp"]).exp()
        better = batch["advantage"]
        better = (better - better.mean()) / (better.std() + 1e-8)
        gain = torch.min(ratio * better, ratio.clamp(1 - self.clip, 1 + self.clip) * better).mean()
        miss = (self.critic(batch["observation"]).squeeze(1) - batch["target"]).square().mean()
        entropy = chances.entropy().mean()
        loss = -gain + self.value * miss - self.entropy * entropy
        return {"loss": loss, "return": self.returns.mean(), "value_loss": miss, "entropy": entropy}

    def play(self, envs: Environments, episodes: int) -> Batch:
        """Play whole episodes, the likeliest action each time; return what each brought."""
        found: list[float] = []
        while len(found) < episodes:
            envs.step(self.policy(envs.observations.to(self.returns.device)).argmax(1))
            found += envs.finished
        return {"return": torch.tensor(found[:episodes])}

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        return {"return": batch["return"].mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr, eps=1e-5)


def perceptron(inputs: int, hidden: int, outputs: int, last: float) -> nn.Sequential:
    """Return two hidden layers of tanh, with orthogonal weights; those of the last layer are scaled."""
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def environment(name: str) -> Any:
    """Return an environment of gymnasium."""
    try:
        import gymnasium
    except ImportError as error:
        raise ForgeError("Environments are gymnasium's: pip install 'forge-trainer[rl]'.") from error
    return gymnasium.make(name, disable_env_checker=True)


def rollouts(
    name: str = "CartPole-v1", environments: int = 8, batch_size: int = 256, epochs: int = 10, episodes: int = 20
) -> Splits:
    """Play in `environments` at once; `epochs` passes over each collection; validate on whole `episodes`."""
    envs = Environments(lambda: environment(name), environments)

    def evaluate(task: PPO) -> Batch:
        return task.play(Environments(lambda: environment(name), episodes, seed=1), episodes)

    return Splits(
        train=Rollouts(lambda task: task.collect(envs), batch_size=batch_size, epochs=epochs),
        val=Rollouts(evaluate),
    )
