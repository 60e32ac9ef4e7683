"""pipeline beside metrics of torchmetrics, `monitor` and the checks of a first evaluation: what one process logs."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import forge
from forge_cluster.pipeline import Pipeline
from forge_plugins import JSONL, Monitor
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


class Said(logging.Handler):
    """Collects warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def logged(kind: type[Deeper], folder: str, plugins: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The metrics of all logs of a fit, and its warnings."""
    stack = [*plugins, *([Pipeline(**options)] if "RANK" in os.environ else [])]
    trainer = forge.Trainer(plugins=[JSONL(), *stack], max_epochs=2, seed=0, device="cpu", run_dir=folder, log_every=2)
    said = Said()
    logging.getLogger("forge").addHandler(said)
    try:
        trainer.fit(deep(kind), wide(), wide(1))
    finally:
        logging.getLogger("forge").removeHandler(said)
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {"lines": [{k: v for k, v in line.items() if k != "time"} for line in lines], "said": said.texts}


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
    one = logged(Measured, str(tmp_path / "one"), [], {})["lines"]
    assert {"train/f1", "train/kept"} <= one[0].keys()
    assert {"val/f1", "val/both/p", "val/both/r", "val/area"} <= one[-1].keys()
    several = ranks(count)(logged, Measured, str(tmp_path / "several"), [], options)[0]["lines"]
    assert several == [pytest.approx(line, abs=1e-6) for line in one]


@pytest.mark.slow
def test_a_validation_does_not_seem_to_draw_numbers(tmp_path: Path) -> None:
    said = ranks(2)(logged, Deeper, str(tmp_path), [], {})[0]["said"]
    assert not [text for text in said if "drew random numbers" in text]


@pytest.mark.slow
def test_monitor_logs_the_layers_of_the_first_rank(tmp_path: Path) -> None:
    one = logged(Deeper, str(tmp_path / "one"), [Monitor("2 updates")], {})["lines"]
    first, other = ranks(2)(logged, Deeper, str(tmp_path / "several"), [Monitor("2 updates")], {"microbatches": 2})
    assert "other ranks hold blocks.4.norm.weight" in " ".join(first["said"])
    assert not other["said"]
    names = [f"monitor/{what}/blocks.{n}.fc1.weight" for what in ("grad_norm", "update_ratio") for n in range(8)]
    assert set(names) <= {name for line in one for name in line}
    for ours, theirs in zip(first["lines"], one, strict=True):
        own = {name: value for name, value in ours.items() if name in names}
        assert own == pytest.approx({name: theirs[name] for name in own}, rel=1e-5)
    seen = {name for line in first["lines"] for name in line} & set(names)
    assert seen == {name for name in names if int(name.split(".")[1]) < 4}
