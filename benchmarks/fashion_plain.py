"""The usual FashionMNIST lab: a perceptron in plain PyTorch, the baseline of `forge fit fashion_mlp`.

python -m benchmarks.fashion_plain --data FOLDER    # FOLDER/FashionMNIST/raw, uncompressed; downloaded if missing
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 256),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(256, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def train_epoch(
    model: nn.Module, loader: DataLoader, criterion: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    model.train()
    total_loss, correct, seen = 0.0, 0, 0
    for images, labels in loader:
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * len(labels)
        correct += (outputs.argmax(1) == labels).sum().item()
        seen += len(labels)
    return total_loss / seen, correct / seen


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, criterion: nn.Module) -> tuple[float, float]:
    model.eval()
    total_loss, correct, seen = 0.0, 0, 0
    for images, labels in loader:
        outputs = model(images)
        total_loss += criterion(outputs, labels).item() * len(labels)
        correct += (outputs.argmax(1) == labels).sum().item()
        seen += len(labels)
    return total_loss / seen, correct / seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fashion_plain")
    parser.add_argument("--data", default="data")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fused", action="store_true", help="Adam in one kernel")
    options = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(options.seed)

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.2860,), (0.3530,))])
    train_set = datasets.FashionMNIST(options.data, train=True, download=True, transform=transform)
    test_set = datasets.FashionMNIST(options.data, train=False, download=True, transform=transform)
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=1000)

    model = MLP()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=options.fused or None)
    test_accuracy = 0.0
    for epoch in range(options.epochs):
        train_loss, train_accuracy = train_epoch(model, train_loader, criterion, optimizer)
        test_loss, test_accuracy = evaluate(model, test_loader, criterion)
        print(
            f"epoch {epoch + 1}  train loss {train_loss:.4f} accuracy {train_accuracy:.4f}  "
            f"test loss {test_loss:.4f} accuracy {test_accuracy:.4f}",
            flush=True,
        )
    print(f"seconds {time.perf_counter() - start:.2f}  test accuracy {test_accuracy:.4f}")


if __name__ == "__main__":
    main()
