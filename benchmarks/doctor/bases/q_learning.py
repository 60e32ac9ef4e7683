import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    """Values of moves, from a log of them."""

    def __init__(self, hidden: int = 64, lr: float = 1e-3, discount: float = 0.9):
        super().__init__()
        self.lr, self.discount = lr, discount
        self.online = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 4))
        self.target = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 4)).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())

    def training_step(self, batch):
        state, action, reward, following = batch
        value = self.online(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            wanted = reward + self.discount * self.target(following).max(1).values
        return {"loss": F.smooth_l1_loss(value, wanted)}

    validation_step = training_step

    @forge.hookimpl
    def forge_step_end(self, step):
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
                old.lerp_(new, 0.05)

    def configure_optimizers(self):
        return torch.optim.Adam(self.online.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(54)
    state, action = torch.randn(1200, 6, generator=g), torch.randint(4, (1200,), generator=g)
    following = state + 0.3 * torch.randn(4, 6, generator=g)[action] + 0.05 * torch.randn(1200, 6, generator=g)
    rows = (state, action, following[:, 0].tanh(), following)
    return Splits(
        train=TensorLoader(*(x[:960] for x in rows), batch_size=32, shuffle=True),
        val=TensorLoader(*(x[960:] for x in rows), batch_size=48),
    )
