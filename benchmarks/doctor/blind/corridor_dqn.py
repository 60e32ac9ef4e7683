"""Deep Q-learning from a fixed log of transitions in a corridor, with a target network synced every 50 updates."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

CELLS = 12


class Task(forge.TaskModule):
    def __init__(self, gamma=0.9, sync_every=50):
        super().__init__()
        self.gamma, self.sync_every = gamma, sync_every
        self.online = nn.Sequential(nn.Linear(CELLS, 48), nn.ReLU(), nn.Linear(48, 2))
        self.target = self.online
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    def forward(self, state):
        return self.online(state)

    def td_loss(self, batch):
        state, action, reward, following, done = batch
        q = self.online(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.target(following).max(1).values
            wanted = reward + self.gamma * (1 - done) * best
        return F.smooth_l1_loss(q, wanted)

    def training_step(self, batch):
        if self.updates % self.sync_every == 0:
            self.target.load_state_dict(self.online.state_dict())
        self.updates += 1
        return {"loss": self.td_loss(batch)}

    def validation_step(self, batch):
        greedy = self(batch[0]).argmax(1)
        return {"loss": self.td_loss(batch), "goes_right": (greedy == 1).float().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.online.parameters(), lr=3e-3)


def data():
    g = torch.Generator().manual_seed(13)
    place = torch.randint(CELLS - 1, (1200,), generator=g)
    action = torch.randint(2, (1200,), generator=g)
    after = (place + 2 * action - 1).clamp(min=0)
    done = (after == CELLS - 1).float()
    columns = F.one_hot(place, CELLS).float(), action, done.clone(), F.one_hot(after, CELLS).float(), done
    return SimpleNamespace(
        train=DataLoader(TensorDataset(*(c[:960] for c in columns)), batch_size=32, shuffle=True),
        val=DataLoader(TensorDataset(*(c[960:] for c in columns)), batch_size=32),
    )
