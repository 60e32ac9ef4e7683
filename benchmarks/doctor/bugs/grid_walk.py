import forge
import torch
import torch.nn.functional as F
from forge.data import Splits, TensorLoader
from torch import nn


class Task(forge.TaskModule):
    """Values of moves on a grid."""

    def __init__(self, hidden: int = 64, lr: float = 1e-3, discount: float = 0.9):
        super().__init__()
        self.lr = lr
        self.discount = discount
        self.online = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 4))
        self.target = self.online

    def training_step(self, batch):
        state, action, reward, following = batch
        value = self.online(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            wanted = reward + self.discount * self.target(following).max(1).values
        return {"loss": F.smooth_l1_loss(value, wanted)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.online.parameters(), lr=self.lr)


def data() -> Splits:
    g = torch.Generator().manual_seed(54)
    state = torch.randn(1200, 6, generator=g)
    action = torch.randint(4, (1200,), generator=g)
    following = state + 0.3 * torch.randn(4, 6, generator=g)[action] + 0.05 * torch.randn(1200, 6, generator=g)
    reward = following[:, 0].tanh()
    rows = (state, action, reward, following)
    return Splits(
        train=TensorLoader(*(x[:960] for x in rows), batch_size=32, shuffle=True),
        val=TensorLoader(*(x[960:] for x in rows), batch_size=48),
    )
