"""pipeline beside metrics of torchmetrics: what one process logs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import forge
from forge_cluster.pipeline import Pipeline
from forge_plugins import JSONL
from tests.forge_cluster.test_pipeline import Deeper
from tests.support.fsdp_kit import deep, wide
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

torchmetrics = pytest.importorskip("torchmetrics")
kinds: Any = torchmetrics.classification


class Measured(Deeper):
    """Returns metrics in training and in validation: one, a collection, one of lists; and keeps one."""

    def __init__(self) -> None:
        super().__init__()
        self.f1, self.kept, self.val_f1 = (kinds.MulticlassF1Score(3) for _ in range(3))
        self.area = kinds.MulticlassAUROC(3, thresholds=None)
        self.both = torchmetrics.MetricCollection({"p": kinds.MulticlassPrecision(3), "r": kinds.MulticlassRecall(3)})

    def training_step(self, batch: Any) -> dict[str, Any]:
        logits, y = self(batch[0]), batch[1]
        self.f1.update(logits, y)
        self.kept.update(logits, y)
        return {"loss": F.cross_entropy(logits, y), "f1": self.f1}

    def validation_step(self, batch: Any) -> dict[str, Any]:
        logits, y = self(batch[0]), batch[1]
        self.val_f1.update(logits, y)
        self.both.update(logits, y)
        self.area.update(logits.softmax(-1).float(), y)
        return {"loss": F.cross_entropy(logits, y), "f1": self.val_f1, "both": self.both, "area": self.area}


def logged(folder: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics of all logs of a fit."""
    stack = [Pipeline(**options)] if "RANK" in os.environ else []
    trainer = forge.Trainer(plugins=[JSONL(), *stack], max_epochs=2, seed=0, device="cpu", run_dir=folder, log_every=2)
    trainer.fit(deep(Measured), wide(), wide(1))
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "options"),
    some(
        [
            (2, {"microbatches": 4}),
            (2, {"schedule": "interleaved_1f1b", "microbatches": 4}),
            (4, {"stages": 2, "microbatches": 3}),
        ]
    ),
)
def test_metrics_of_torchmetrics_are_those_of_one_process(count: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Batches of 5 and of 1 samples: parts that only fill the schedule do not count."""
    one = logged(str(tmp_path / "one"), {})
    assert {"train/f1", "train/kept"} <= one[0].keys()
    assert {"val/f1", "val/both/p", "val/both/r", "val/area"} <= one[-1].keys()
    several = ranks(count)(logged, str(tmp_path / "several"), options)[0]
    assert several == [pytest.approx(line, abs=1e-6) for line in one]
