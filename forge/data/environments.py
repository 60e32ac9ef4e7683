"""Environments: many copies of one environment, stepped together, whose state can be saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge.errors import DataError
from forge.rng import combine_seeds


class Environments:
    """`count` environments of gymnasium's kind (`reset(seed=)`, `step(action)`), stepped together.

    ::

        envs = Environments(lambda: gymnasium.make("CartPole-v1"), 8)
        observations, rewards, terminated, truncated = envs.step(actions)

    An environment whose episode is over begins its next one in the same step: `observations` has its first observation,
    `last` the one that ended the old episode, `finished` the returns of the episodes that ended in this step.

    Episode n of environment i begins from a seed that depends on `seed`, i and n alone. So a state is the episode and
    the actions in it: to restore one, the episode is begun again and its actions are repeated. What comes back is
    compared with what was seen; an environment that draws from elsewhere is refused. One with `state_dict` and
    `load_state_dict` is asked instead. On several ranks each steps its share of the environments.
    """

    def __init__(self, make: Callable[[], Any], count: int, seed: int = 0):
        if count < 1:
            raise DataError(f"Environments: count is {count}; it must be at least 1.")
        self.make, self.seed = make, seed
        self._numbers, self._is_shared = list(range(count)), False
        self._begin()

    def _begin(self) -> None:
        self.envs = [self.make() for _ in self._numbers]
        bare = [getattr(env, "unwrapped", env) for env in self.envs]
        self._stateful = [env if hasattr(env, "state_dict") else None for env in bare]
        self._episodes = [0] * len(self.envs)
        self._actions: list[list[Any]] = [[] for _ in self.envs]
        self._returns = [0.0] * len(self.envs)
        self.finished: list[float] = []
        self._observe([self._reset(place) for place in range(len(self.envs))])
        self.last: Tensor = self.observations

    def __len__(self) -> int:
        return len(self.envs)

    def share(self, rank: int, world: int) -> None:
        """Keep every `world`-th environment, from `rank` on; does nothing the second time."""
        if world > 1 and not self._is_shared:
            if len(self._numbers) < world:
                raise DataError(f"{len(self._numbers)} environments cannot be shared by {world} ranks. Make more.")
            self._is_shared = True
            self._numbers = self._numbers[rank::world]
            self._begin()

    def step(self, actions: Tensor | Sequence[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Do one action in each; return observations, rewards, and whether episodes terminated or were truncated."""
        chosen = actions.cpu().numpy() if isinstance(actions, Tensor) else actions
        self.finished, seen, rewards = [], [], []
        terminated, truncated, last = [], [], dict[int, Any]()
        for place, (env, action) in enumerate(zip(self.envs, chosen, strict=True)):
            observation, reward, over, cut, _ = env.step(action)
            if self._stateful[place] is None:
                self._actions[place].append(action)
            self._returns[place] += float(reward)
            rewards.append(reward)
            terminated.append(over)
            truncated.append(cut)
            if over or cut:
                last[place] = observation
                self.finished.append(self._returns[place])
                self._episodes[place] += 1
                observation = self._reset(place)
            seen.append(observation)
        self._observe(seen)
        self.last = self.observations.clone() if last else self.observations
        for place, observation in last.items():
            self.last[place] = torch.as_tensor(np.asarray(observation))
        flags = torch.tensor([terminated, truncated])
        return self.observations, torch.tensor(rewards, dtype=torch.float32), flags[0], flags[1]

    def state_dict(self) -> dict[str, Any]:
        """Return each environment's episode, and the actions in it or its own state."""
        done = [torch.from_numpy(np.stack(actions)) if actions else None for actions in self._actions]
        return {
            "environments": list(self._numbers),
            "episodes": list(self._episodes),
            "returns": list(self._returns),
            "actions": done,
            "own": [None if env is None else env.state_dict() for env in self._stateful],
            "observations": self.observations.clone(),
            "last": self.last.clone(),
            "finished": list(self.finished),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring each environment back to where it was."""
        if list(state["environments"]) != self._numbers:
            raise DataError(
                f"The state is that of the environments {list(state['environments'])}, and here are {self._numbers}. "
                "Resume with as many environments, on as many ranks."
            )
        self._episodes = list(state["episodes"])
        seen = []
        for place, env in enumerate(self.envs):
            observation = self._reset(place)
            bare = self._stateful[place]
            if bare is not None:
                bare.load_state_dict(state["own"][place])
                observation = state["observations"][place].numpy()
            elif state["actions"][place] is not None:
                for action in state["actions"][place].numpy():
                    self._actions[place].append(action)
                    observation = env.step(action)[0]
            seen.append(observation)
        self._observe(seen)
        pairs = zip(self._numbers, self.observations, state["observations"], strict=True)
        differ = [number for number, now, then in pairs if not torch.equal(now, then)]
        if differ:
            raise DataError(
                f"Environment {differ[0]} does not come back to its state from its seed and its actions: it draws from "
                "elsewhere, or keeps something between episodes. Give it state_dict() and load_state_dict(state), or "
                "have it draw from self.np_random alone."
            )
        self.last, self.finished, self._returns = state["last"].clone(), list(state["finished"]), list(state["returns"])

    def _reset(self, place: int) -> Any:
        seed = combine_seeds(self.seed, self._numbers[place], self._episodes[place]) % 2**31
        self._actions[place], self._returns[place] = [], 0.0
        return self.envs[place].reset(seed=seed)[0]

    def _observe(self, seen: list[Any]) -> None:
        self.observations = torch.from_numpy(np.stack(seen))
