"""Reinforcement learning, on small worlds that are computed on the spot and on recorded transitions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from benchmarks.doctor.zoo.common import Classify, Entry, accuracy, adamw, generator, mlp, tensor_loaders
from forge.data import Splits

MODELS: dict[str, Entry] = {}


def entry(function: Entry) -> Entry:
    MODELS[function.__name__] = function
    return function


def pushed(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """A point on a line with a speed; push left or right to stay near the middle. Next state and reward."""
    place, speed = state[:, 0], state[:, 1]
    speed = 0.9 * speed + 0.3 * (2 * action.float() - 1)
    place = (place + 0.3 * speed).clamp(-3, 3)
    return torch.stack([place, speed], 1), 1 - place.abs()


def starts(count: int = 320) -> Tensor:
    return torch.randn(count, 2, generator=generator(1))


class Reinforce(forge.TaskModule):
    """REINFORCE: sampled episodes, rewards to go, a baseline from the batch. The loss itself means little."""

    def __init__(self, steps: int = 12, lr: float = 1e-2):
        super().__init__()
        self.steps, self.lr = steps, lr
        self.policy = mlp(2, 32, 2, activation=nn.Tanh)

    def forward(self, state: Tensor) -> Tensor:
        return self.policy(state)

    def training_step(self, batch):
        (state,) = batch
        scores, rewards = [], []
        for _ in range(self.steps):
            choice = torch.distributions.Categorical(logits=self(state))
            action = choice.sample()
            scores.append(choice.log_prob(action))
            state, reward = pushed(state, action)
            rewards.append(reward)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        advantage = returns - returns.mean(1, keepdim=True)
        loss = -(torch.stack(scores) * advantage / advantage.std()).mean()
        return {"loss": loss, "return": returns[0].mean()}

    def validation_step(self, batch):
        (state,) = batch
        total = torch.zeros(len(state))
        for _ in range(self.steps):
            state, reward = pushed(state, self(state).argmax(1))
            total = total + reward
        return {"return": total.mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def reinforce() -> tuple[forge.TaskModule, Splits]:
    return Reinforce(), tensor_loaders(starts(), batch_size=32)


class ActorCritic(Reinforce):
    """Advantage actor-critic: one trunk, the value learns from returns, the policy from detached advantages."""

    def __init__(self):
        super().__init__(lr=5e-3)
        del self.policy
        self.trunk = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state: Tensor) -> Tensor:
        return self.actor(self.trunk(state))

    def training_step(self, batch):
        (state,) = batch
        scores, rewards, values, entropies = [], [], [], []
        for _ in range(self.steps):
            hidden = self.trunk(state)
            choice = torch.distributions.Categorical(logits=self.actor(hidden))
            action = choice.sample()
            scores.append(choice.log_prob(action))
            entropies.append(choice.entropy())
            values.append(self.critic(hidden).squeeze(1))
            state, reward = pushed(state, action)
            rewards.append(reward)
        with torch.no_grad():
            last = self.critic(self.trunk(state)).squeeze(1)
        returns = []
        for reward in reversed(rewards):
            last = reward + 0.9 * last
            returns.append(last)
        target, value = torch.stack(returns[::-1]), torch.stack(values)
        advantage = (target - value).detach()
        actor = -(torch.stack(scores) * advantage).mean()
        critic = F.mse_loss(value, target)
        return {"loss": actor + 0.5 * critic - 0.01 * torch.stack(entropies).mean(), "critic": critic}


@entry
def actor_critic() -> tuple[forge.TaskModule, Splits]:
    return ActorCritic(), tensor_loaders(starts(), batch_size=32)


def recorded(count: int = 480) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Transitions of random actions: state, action, reward, next state, whether it ended."""
    g = generator(2)
    state = 1.5 * torch.randn(count, 2, generator=g)
    action = torch.randint(2, (count,), generator=g)
    later, reward = pushed(state, action)
    return state, action, reward, later, (later[:, 0].abs() > 2.5).float()


class DQN(forge.TaskModule):
    """Double Q-learning with a target network that follows slowly and is in no optimizer."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.values = mlp(2, 48, 48, 2)
        self.target = mlp(2, 48, 48, 2)
        self.target.load_state_dict(self.values.state_dict())
        self.target.requires_grad_(False)

    def forward(self, state: Tensor) -> Tensor:
        return self.values(state)

    def training_step(self, batch):
        state, action, reward, later, ended = batch
        value = self(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = self(later).argmax(1, keepdim=True)
            goal = reward + 0.9 * (1 - ended) * self.target(later).gather(1, best).squeeze(1)
        return {"loss": F.smooth_l1_loss(value, goal), "value": value.mean()}

    validation_step = training_step

    @forge.hookimpl
    def forge_step_end(self, step):
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.values.parameters(), strict=True):
                old.lerp_(new, 0.05)

    def configure_optimizers(self):
        return torch.optim.Adam(self.values.parameters(), lr=self.lr)


@entry
def double_dqn_target_network() -> tuple[forge.TaskModule, Splits]:
    return DQN(), tensor_loaders(*recorded(), batch_size=32)


class Conservative(DQN):
    """CQL: offline Q-learning with a penalty on actions that were not taken."""

    def training_step(self, batch):
        state, action, reward, later, ended = batch
        values = self(state)
        taken = values.gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            goal = reward + 0.9 * (1 - ended) * self.target(later).max(1).values
        penalty = (values.logsumexp(1) - taken).mean()
        return {"loss": F.mse_loss(taken, goal) + 0.5 * penalty, "penalty": penalty}

    validation_step = training_step


@entry
def conservative_q_learning() -> tuple[forge.TaskModule, Splits]:
    return Conservative(), tensor_loaders(*recorded(), batch_size=32)


class PPO(forge.TaskModule):
    """The clipped loss on recorded episodes; the policy begins as the one that acted: ratios are one at first."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.policy = mlp(2, 32, 2, activation=nn.Tanh)
        self.critic = mlp(2, 32, 1, activation=nn.Tanh)
        nn.init.orthogonal_(self.policy[-1].weight, gain=0.01)
        nn.init.zeros_(self.policy[-1].bias)

    def forward(self, state: Tensor) -> Tensor:
        return self.policy(state)

    def training_step(self, batch):
        state, action, score, returns = batch
        choice = torch.distributions.Categorical(logits=self(state))
        value = self.critic(state).squeeze(1)
        advantage = (returns - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (choice.log_prob(action) - score).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = -gain + 0.5 * F.mse_loss(value, returns) - 0.01 * choice.entropy().mean()
        return {"loss": loss, "clipped": ((ratio - 1).abs() > 0.2).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def ppo_clipped() -> tuple[forge.TaskModule, Splits]:
    g = generator(3)
    state, states, actions, rewards = torch.randn(64, 2, generator=g), [], [], []
    for _ in range(8):
        action = torch.randint(2, (64,), generator=g)
        states.append(state)
        actions.append(action)
        state, reward = pushed(state, action)
        rewards.append(reward)
    returns, last = [], torch.zeros(64)
    for reward in reversed(rewards):
        last = reward + 0.9 * last
        returns.append(last)
    returns = torch.cat(returns[::-1])
    order = torch.randperm(512, generator=g)
    score = torch.full((512,), math.log(0.5))
    data = (torch.cat(states)[order], torch.cat(actions)[order], score, (returns / returns.std())[order])
    return PPO(), tensor_loaders(*data, batch_size=32, val=64)


@entry
def behaviour_cloning() -> tuple[forge.TaskModule, Splits]:
    g = generator(4)
    states = torch.randn(400, 2, generator=g)
    expert = (states[:, 0] + states[:, 1] < 0).long()
    slips = torch.rand(400, generator=g) < 0.05
    return Classify(mlp(2, 32, 2), 5e-3), tensor_loaders(states, torch.where(slips, 1 - expert, expert))


class DDPG(forge.TaskModule):
    """Two optimizers: the critic learns values, the actor climbs them through the fixed critic."""

    def __init__(self):
        super().__init__()
        self.actor, self.old_actor = self.make_actor(), self.make_actor()
        self.critic, self.old_critic = mlp(3, 48, 48, 1), mlp(3, 48, 48, 1)
        self.old_actor.load_state_dict(self.actor.state_dict())
        self.old_critic.load_state_dict(self.critic.state_dict())
        self.old_actor.requires_grad_(False)
        self.old_critic.requires_grad_(False)

    @staticmethod
    def make_actor() -> nn.Module:
        return nn.Sequential(*mlp(2, 32, 1), nn.Tanh())

    def forward(self, state: Tensor) -> Tensor:
        return self.actor(state)

    def training_step(self, batch, name):
        state, action, reward, later = batch
        if name == "actor":
            return -self.critic(torch.cat([state, self.actor(state)], 1)).mean()
        with torch.no_grad():
            ahead = self.old_critic(torch.cat([later, self.old_actor(later)], 1))
            goal = reward[:, None] + 0.9 * ahead
        return F.mse_loss(self.critic(torch.cat([state, action], 1)), goal)

    def validation_step(self, batch):
        state = batch[0]
        push = self.actor(state).squeeze(1)
        speed = 0.9 * state[:, 1] + 0.3 * push
        return {"distance": (state[:, 0] + 0.3 * speed).abs().mean()}

    @forge.hookimpl
    def forge_step_end(self, step):
        with torch.no_grad():
            for old, new in ((self.old_actor, self.actor), (self.old_critic, self.critic)):
                for a, b in zip(old.parameters(), new.parameters(), strict=True):
                    a.lerp_(b, 0.05)

    def configure_optimizers(self):
        return {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=3e-3),
            "actor": torch.optim.Adam(self.actor.parameters(), lr=1e-3),
        }


@entry
def ddpg_two_optimizers() -> tuple[forge.TaskModule, Splits]:
    g = generator(5)
    state = 1.5 * torch.randn(480, 2, generator=g)
    action = 2 * torch.rand(480, 1, generator=g) - 1
    speed = 0.9 * state[:, 1] + 0.3 * action[:, 0]
    later = torch.stack([(state[:, 0] + 0.3 * speed).clamp(-3, 3), speed], 1)
    return DDPG(), tensor_loaders(state, action, 1 - later[:, 0].abs(), later, batch_size=32)


class SAC(forge.TaskModule):
    """Discrete soft actor-critic: twin critics, and a temperature with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.policy = mlp(2, 32, 2)
        self.critics = nn.ModuleList(mlp(2, 32, 2) for _ in range(2))
        self.old = nn.ModuleList(mlp(2, 32, 2) for _ in range(2))
        self.old.load_state_dict(self.critics.state_dict())
        self.old.requires_grad_(False)
        self.log_heat = nn.Parameter(torch.tensor(-1.0))

    def forward(self, state: Tensor) -> Tensor:
        return self.policy(state)

    def training_step(self, batch, name):
        state, action, reward, later, ended = batch
        heat = self.log_heat.exp().detach()
        logs = self(state).log_softmax(1)
        if name == "heat":
            entropy = -(logs.exp() * logs).sum(1).detach()
            return (self.log_heat.exp() * (entropy - 0.3)).mean()
        if name == "policy":
            with torch.no_grad():
                value = torch.minimum(*(critic(state) for critic in self.critics))
            return (logs.exp() * (heat * logs - value)).sum(1).mean()
        with torch.no_grad():
            after = self(later).log_softmax(1)
            value = torch.minimum(*(critic(later) for critic in self.old))
            goal = reward + 0.9 * (1 - ended) * (after.exp() * (value - heat * after)).sum(1)
        return sum(F.mse_loss(c(state).gather(1, action[:, None]).squeeze(1), goal) for c in self.critics)

    def validation_step(self, batch):
        state, action, reward, later, ended = batch
        logs = self(state).log_softmax(1)
        wise = (state.sum(1) < 0).long()
        return {"entropy": -(logs.exp() * logs).sum(1).mean(), "wise": accuracy(logs, wise)}

    @forge.hookimpl
    def forge_step_end(self, step):
        with torch.no_grad():
            for a, b in zip(self.old.parameters(), self.critics.parameters(), strict=True):
                a.lerp_(b, 0.05)

    def configure_optimizers(self):
        return {
            "critics": torch.optim.Adam(self.critics.parameters(), lr=3e-3),
            "policy": torch.optim.Adam(self.policy.parameters(), lr=1e-3),
            "heat": torch.optim.Adam([self.log_heat], lr=1e-2),
        }


@entry
def soft_actor_critic_three_optimizers() -> tuple[forge.TaskModule, Splits]:
    return SAC(), tensor_loaders(*recorded(), batch_size=32)


class Bandit(forge.TaskModule):
    """Learning from logged choices: rewards weighted by inverse propensities, clipped."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.policy = mlp(4, 32, 3)

    def forward(self, context: Tensor) -> Tensor:
        return self.policy(context)

    def training_step(self, batch):
        context, action, chance, reward = batch
        mine = self(context).softmax(1).gather(1, action[:, None]).squeeze(1)
        weight = (mine / chance).clamp(max=10)
        return {"loss": -(weight * (reward - 0.5)).mean()}

    def validation_step(self, batch):
        context, action, chance, reward = batch
        mine = self(context).softmax(1).gather(1, action[:, None]).squeeze(1)
        weight = mine / chance
        return {"value": (weight * reward).sum() / weight.sum()}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def bandit_from_logs() -> tuple[forge.TaskModule, Splits]:
    g = generator(6)
    context = torch.randn(480, 4, generator=g)
    chances = (context @ torch.randn(4, 3, generator=g) / 4).softmax(1)
    action = torch.multinomial(chances, 1, generator=g).squeeze(1)
    best = (context @ torch.randn(4, 3, generator=g)).argmax(1)
    reward = (torch.rand(480, generator=g) < torch.where(action == best, 0.9, 0.2)).float()
    return Bandit(), tensor_loaders(context, action, chances.gather(1, action[:, None]).squeeze(1), reward)
