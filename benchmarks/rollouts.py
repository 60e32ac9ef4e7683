"""What `forge.data.Rollouts` costs: PPO on a pole, forge beside the same algorithm in loops by hand, in one process.

    python -m benchmarks.rollouts                          # about 3 minutes
    python -m benchmarks.rollouts --rounds 1 --collections 2         # smoke test

Both have four environments, 128 steps, four passes of four minibatches. `forge` is `forge.Trainer(plugins=[])` over the
recipe's task and `Rollouts`; `by hand` is a loop over the same task and the same environments, so it shows what the
framework adds. `vector` is that loop over gymnasium's SyncVectorEnv, as single-file versions of PPO are written.

Contenders take turns, round after round. The figure is CPU time (`time.process_time`) per environment step; the ratio
is the median over rounds of that to the same round's loop by hand, and the ratio of the fastest rounds, because other
users of a machine only add time. "identical" is whether weights are those of the loop by hand, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import forge
from forge.data import Environments, Rollouts, epoch_order
from forge.rng import seed_rank
from forge_recipes.ppo import PPO, environment

ENVIRONMENTS, STEPS, PASSES, MINIBATCH = 4, 128, 4, 128
NAME = "CartPole-v1"
Weights = dict[str, Tensor]


class SteppedVector:
    """gymnasium's SyncVectorEnv with the face that the task's `collect` uses."""

    def __init__(self) -> None:
        import gymnasium
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        def make() -> Any:
            return gymnasium.wrappers.RecordEpisodeStatistics(environment(NAME))

        self.envs = SyncVectorEnv([make] * ENVIRONMENTS, autoreset_mode=AutoresetMode.SAME_STEP)
        self.observations = torch.from_numpy(self.envs.reset(seed=0)[0])
        self.finished: list[float] = []

    def __len__(self) -> int:
        return ENVIRONMENTS

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        seen, rewards, terminated, truncated, more = self.envs.step(action.numpy())
        self.observations = self.last = torch.from_numpy(seen)
        ended = more.get("final_info", {}).get("episode")
        self.finished = [] if ended is None else [float(r) for r in ended["r"][ended["_r"]]]
        flags = torch.from_numpy(terminated), torch.from_numpy(truncated)
        return self.observations, torch.from_numpy(rewards).float(), *flags


def by_hand(collections: int, envs: Any) -> Weights:
    torch.manual_seed(5)
    task, passes = PPO(steps=STEPS), 0
    optimizer = task.configure_optimizers()
    seed_rank(3, 0)
    for _ in range(collections):
        task.eval()
        with torch.no_grad():
            made = task.collect(envs)
        task.train()
        for _ in range(PASSES):
            order, passes = epoch_order(ENVIRONMENTS * STEPS, 3, passes), passes + 1
            for at in order.split(MINIBATCH):
                loss = task.training_step({name: x[at] for name, x in made.items()})["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return task.state_dict()


def by_forge(collections: int) -> Weights:
    torch.manual_seed(5)
    task, envs = PPO(steps=STEPS), Environments(lambda: environment(NAME), ENVIRONMENTS)
    data = Rollouts(lambda task: task.collect(envs), batch_size=MINIBATCH, epochs=PASSES)
    forge.Trainer(plugins=[], seed=3, max_epochs=collections, device="cpu", run_dir=False).fit(task, data)
    return task.state_dict()


CONTENDERS: dict[str, Callable[[int], Weights]] = {
    "by hand": lambda n: by_hand(n, Environments(lambda: environment(NAME), ENVIRONMENTS)),
    "forge": by_forge,
    "vector": lambda n: by_hand(n, SteppedVector()),
}


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.rollouts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--collections", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for run in CONTENDERS.values():
        run(1)
    steps = args.collections * ENVIRONMENTS * STEPS
    spent: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    weights: dict[str, Weights] = {}
    for _ in range(args.rounds):
        for name, run in CONTENDERS.items():
            began = time.process_time()
            weights[name] = run(args.collections)
            spent[name].append((time.process_time() - began) / steps)
    hand = spent["by hand"]
    print(f"{'':10} {'µs a step':>10} {'steps/s':>9} {'ratio':>7} {'fastest':>8}  identical")
    for name, taken in spent.items():
        middle = statistics.median(taken)
        ratio = statistics.median(a / b for a, b in zip(taken, hand, strict=True))
        same = all(torch.equal(a, b) for a, b in zip(weights[name].values(), weights["by hand"].values(), strict=True))
        fastest = min(taken) / min(hand)
        print(
            f"{name:10} {1e6 * middle:10.1f} {1 / middle:9,.0f} {ratio:7.3f} {fastest:8.3f}  {'yes' if same else 'no'}"
        )


if __name__ == "__main__":
    main()
