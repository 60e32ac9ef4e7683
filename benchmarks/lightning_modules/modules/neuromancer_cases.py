"""neuromancer."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from benchmarks.lightning_modules.draw import numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package(
    "neuromancer==1.5.6",
    needs=(
        "torchdiffeq",
        "torchsde",
        "plum-dispatch==1.7.3",
        "pydot==1.4.2",
        "pyts",
        "cvxpy",
        "casadi",
        "dill",
        "toml",
    ),
    alone=True,
)


def neuromancer_problem() -> Any:
    """LitProblem: a parametric optimization problem with a constraint."""
    from neuromancer.constraint import variable
    from neuromancer.dataset import DictDataset
    from neuromancer.loss import PenaltyLoss
    from neuromancer.modules import blocks
    from neuromancer.problem import LitProblem, Problem
    from neuromancer.system import Node

    node = Node(blocks.MLP(2, 1, hsizes=[8, 8]), ["p"], ["x"], name="map")
    x, p = variable("x"), variable("p")
    objective = ((x - p[:, [0]]) ** 2).minimize(weight=1.0, name="objective")
    loss = PenaltyLoss([objective], [10.0 * (x >= 0.1)])
    train, dev = (DictDataset({"p": numbers(n, 2, seed=n)}, name=name) for n, name in ((16, "train"), (8, "dev")))
    module = LitProblem(Problem([node], loss), dev_metric="dev_loss")
    return (
        module,
        DataLoader(train, batch_size=8, collate_fn=train.collate_fn),
        DataLoader(dev, batch_size=8, collate_fn=dev.collate_fn),
    )
