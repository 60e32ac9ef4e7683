import gymnasium
import lightning as L
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset


def perceptron(outputs: int, last: float):
    layers = [nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class CartPole(L.LightningModule):
    def __init__(self, steps: int = 32, gamma: float = 0.98, trace: float = 0.8, clip: float = 0.2, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.policy, self.critic = perceptron(2, 0.01), perceptron(1, 1.0)
        self.register_buffer("returns", torch.zeros(20))  # of the last episodes
        one = [lambda: gymnasium.make("CartPole-v1")] * 8
        self.envs = RecordEpisodeStatistics(SyncVectorEnv(one, autoreset_mode=AutoresetMode.SAME_STEP))
        self.observations = torch.from_numpy(self.envs.reset(seed=0)[0])

    def collect(self):
        seen = {name: [] for name in ("observation", "action", "logp", "value", "reward", "end")}
        for _ in range(self.hparams.steps):
            observation = self.observations.to(self.device)
            chances = Categorical(logits=self.policy(observation))
            action, value = chances.sample(), self.critic(observation).squeeze(1)
            after, reward, terminated, truncated, said = self.envs.step(action.cpu().numpy())
            self.observations, reward = torch.from_numpy(after), torch.from_numpy(reward).float().to(self.device)
            ended = torch.from_numpy(terminated | truncated).to(self.device)
            for place in truncated.nonzero()[0]:  # it would have gone on: the critic says how
                last = torch.from_numpy(said["final_obs"][place]).to(self.device)
                reward[place] += self.hparams.gamma * self.critic(last)[0]
            if ended.any():
                finished = torch.from_numpy(said["episode"]["r"]).float().to(self.device)[ended]
                self.returns = torch.cat([self.returns, finished])[-20:]
            row = observation, action, chances.log_prob(action), value, reward, ended.float()
            for made, x in zip(seen.values(), row):
                made.append(x)
        made = {name: torch.stack(x) for name, x in seen.items()}
        value, going = made["value"], 1 - made.pop("end")
        following = torch.cat([value[1:], self.critic(self.observations.to(self.device)).T])
        errors = made.pop("reward") + self.hparams.gamma * following * going - value
        advantages, last = [], 0
        for error, goes_on in zip(errors.flip(0), going.flip(0)):  # generalised advantage estimation
            last = error + self.hparams.gamma * self.hparams.trace * goes_on * last
            advantages.insert(0, last)
        made["advantage"] = torch.stack(advantages)
        made["target"] = made["advantage"] + value
        return {name: x.flatten(0, 1) for name, x in made.items()}

    def training_step(self, batch, batch_idx):
        chances = Categorical(logits=self.policy(batch["observation"]))
        ratio = (chances.log_prob(batch["action"]) - batch["logp"]).exp()
        better = batch["advantage"]
        better = (better - better.mean()) / (better.std() + 1e-8)
        clipped = ratio.clamp(1 - self.hparams.clip, 1 + self.hparams.clip)
        gain = torch.min(ratio * better, clipped * better).mean()
        miss = (self.critic(batch["observation"]).squeeze(1) - batch["target"]).square().mean()
        loss = 0.5 * miss - gain
        self.log_dict({"train/loss": loss, "train/return": self.returns.mean()})
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr, eps=1e-5)


class Played(IterableDataset):
    def __init__(self, task, batch_size: int = 256, epochs: int = 20):
        self.task, self.batch_size, self.epochs = task, batch_size, epochs

    def __iter__(self):
        self.task.eval()
        with torch.no_grad():
            made = self.task.collect()
        self.task.train()
        for _ in range(self.epochs):
            for rows in torch.randperm(len(made["action"]), device=self.task.device).split(self.batch_size):
                yield {name: x[rows] for name, x in made.items()}


L.seed_everything(1)
task = CartPole()
trainer = L.Trainer(max_epochs=40, gradient_clip_val=0.5, default_root_dir="runs/cart-pole")
trainer.fit(task, DataLoader(Played(task), batch_size=None))
