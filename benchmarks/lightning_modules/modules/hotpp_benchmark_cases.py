"""hotpp-benchmark."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.lightning_modules.draw import Batches, classes, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package(
    "hotpp-benchmark==0.7.0",
    needs=("pytorch-lifestream", "pymonad", "duckdb", "pyarrow", "torch-linear-assignment", "torchaudio"),
    alone=True,
)


def hotpp_next_item() -> Any:
    """NextItemModule: times and labels of events, by a GRU; batches are PaddedBatch objects."""
    import torch
    from hotpp.data import PaddedBatch
    from hotpp.losses import CrossEntropyLoss, NextItemLoss, TimeMAELoss
    from hotpp.modules import NextItemModule
    from hotpp.nn import GRU, Embedder, Head, RnnEncoder

    embedder = Embedder(embeddings={"labels": {"in": 5, "out": 4}}, numeric_values={"timestamps": "identity"})
    module = NextItemModule(
        RnnEncoder(embedder, partial(GRU, hidden_size=8), max_time_delta=3),
        NextItemLoss({"timestamps": TimeMAELoss(), "labels": CrossEntropyLoss(5)}),
        head_partial=Head,
        optimizer_partial=partial(torch.optim.Adam, lr=1e-2),
        lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
    )

    def batch(seed: int) -> Any:
        times = numbers(4, 6, seed=seed).abs().cumsum(1)
        events = PaddedBatch({"timestamps": times, "labels": classes(5, 4, 6, seed=seed)}, torch.tensor([6, 5, 6, 3]))
        return events, None

    return module, Batches([batch(0), batch(1)]), Batches([batch(2)])
