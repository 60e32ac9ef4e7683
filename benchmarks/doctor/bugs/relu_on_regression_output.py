import forge
import torch
import torch.nn.functional as F
from forge.data import Splits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self, features: int, hidden: int = 64):
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, 1)

    def forward(self, x):
        for layer in (self.fc1, self.fc2, self.fc3):
            x = F.relu(layer(x))
        return x.squeeze(-1)


class Task(forge.TaskModule):
    """Predict the anomaly of a monthly temperature from eight indices."""

    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = Regressor(8)

    def forward(self, indices):
        return self.net(indices)

    def training_step(self, batch):
        indices, anomaly = batch
        predicted = self(indices)
        return {"loss": F.mse_loss(predicted, anomaly), "mae": F.l1_loss(predicted, anomaly)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def data(batch_size: int = 32) -> Splits:
    g = torch.Generator().manual_seed(15)
    indices = torch.randn(1200, 8, generator=g)
    anomaly = torch.sin(1.5 * indices[:, 0]) + 0.8 * indices[:, 1] + 0.4 * indices[:, 2] * indices[:, 4]
    anomaly = anomaly + 0.2 * torch.randn(1200, generator=g)
    anomaly = (anomaly - anomaly[:960].mean()) / anomaly[:960].std()
    return Splits(
        train=DataLoader(TensorDataset(indices[:960], anomaly[:960]), batch_size=batch_size, shuffle=True),
        val=DataLoader(TensorDataset(indices[960:], anomaly[960:]), batch_size=80),
    )
