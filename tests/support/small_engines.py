"""Small engines for the tests of serving: modules behind the protocol of `forge_ship.engine`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from forge_ship.engine import Port
from tests.support.patience import PATIENCE


class LinearEngine:
    """batch × 4 → batch × 3."""

    inputs: Sequence[Port] = (Port("x", "float32", ("batch", 4)),)
    outputs: Sequence[Port] = (Port("y", "float32", ("batch", 3)),)

    def __init__(self) -> None:
        self.model = nn.Linear(4, 3).eval()
        self.sizes: list[int] = []

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.sizes.append(len(inputs["x"]))
        return {"y": self.model(inputs["x"])}


class GatedEngine(LinearEngine):
    """Computes only while its gate is open, and says when it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = threading.Event(), threading.Event()

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.begun.set()
        assert self.gate.wait(PATIENCE)
        return super().__call__(inputs)


class PickyEngine(LinearEngine):
    """Fails on every batch that holds a row whose first number is 13."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.sizes.append(len(inputs["x"]))
        if (inputs["x"][:, 0] == 13).any():
            raise IndexError("secret/path.py: 13 is out of range")
        return {"y": self.model(inputs["x"]).detach()}


class TokensEngine:
    """Token ids of any length, and a mask: the number of tokens that count, and each doubled."""

    inputs: Sequence[Port] = (
        Port("ids", "int64", ("batch", "length"), {"length": (2, 6)}),
        Port("mask", "bool", ("batch", "length")),
    )
    outputs: Sequence[Port] = (Port("count", "int64", ("batch",)), Port("twice", "int64", ("length", "batch")))

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.shapes.append(tuple(inputs["ids"].shape))
        return {"count": inputs["mask"].sum(1), "twice": inputs["ids"].T * 2}


class MeanEngine:
    """An output without the axis "batch": the mean of all rows."""

    inputs: Sequence[Port] = (Port("x", "float32", ("batch", 2)),)
    outputs: Sequence[Port] = (Port("mean", "float32", ()),)

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.sizes.append(len(inputs["x"]))
        return {"mean": inputs["x"].mean()}
