"""torchmetrics: what a task holds is computed over all samples once, in training, in evaluation and over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.checkpoint import StoredCheckpoint
from forge.errors import TaskError
from forge.metrics.means import Means
from forge.metrics.torchmetrics import TaskMetrics, is_metric
from forge_plugins import DDP, FSDP, JSONL, SAM, TensorParallel
from forge_plugins import Checkpoint as Saves
from tests.support.lasting_ranks import ranks
from tests.support.ranks import Pair
from tests.support.tasks import Classifier, fit

pytest.importorskip("torchmetrics")

from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAveragePrecision,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

SIZES = (8, 8, 5, 1)
"""On two ranks five samples are uneven, and one leaves a rank without any."""


def batches(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)) for size in sizes
    ]


class Measured(Classifier):
    """Holds a metric of every kind: a ratio, one that keeps all samples, a plain count, a collection."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        self.f1 = MulticlassF1Score(num_classes=3, average="macro")
        self.auroc = BinaryAUROC()
        self.seen = SumMetric()
        self.both = MetricCollection([MulticlassPrecision(3), MulticlassRecall(3)])

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self(x)
        self.f1(logits, y)
        self.auroc.update(logits.softmax(1)[:, 0], (y == 0).long())
        self.seen.update(torch.ones(len(y)))
        self.both.update(logits, y)
        return {"loss": F.cross_entropy(logits, y), "quality": self.f1, "auroc": self.auroc}

    validation_step = training_step


def by_hand(task: Measured, data: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """torchmetrics on all samples at once."""
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    with torch.no_grad():
        logits = task(x)
    scores = logits.softmax(1)[:, 0]
    return {
        "quality": float(MulticlassF1Score(num_classes=3, average="macro")(logits, y)),
        "auroc": float(BinaryAUROC()(scores, (y == 0).long())),
        "seen": float(len(y)),
        "both/MulticlassPrecision": float(MulticlassPrecision(3)(logits, y)),
        "both/MulticlassRecall": float(MulticlassRecall(3)(logits, y)),
    }


def validate(task: forge.TaskModule, data: Any) -> dict[str, Any]:
    return forge.Trainer(plugins=[], device="cpu").validate(task, data)


def without_loss(metrics: dict[str, Any], prefix: str = "val/") -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in metrics.items() if not name.endswith("loss")}


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def test_an_evaluation_logs_each_metric_over_all_samples() -> None:
    task = Measured()
    first, second = validate(task, batches()), validate(task, batches())
    assert without_loss(first) == pytest.approx(by_hand(task, batches()), rel=1e-6)
    assert first == second
    mean = sum(len(y) * float(MulticlassF1Score(3, average="macro")(task(x), y)) for x, y in batches()) / sum(SIZES)
    assert first["val/quality"] != pytest.approx(mean)


def test_each_of_several_loaders_is_counted_for_itself() -> None:
    task = Measured()
    metrics = validate(task, {"a": batches(1), "b": batches(2)})
    for name, seed in (("a", 1), ("b", 2)):
        expected = by_hand(task, batches(seed))
        assert metrics[f"val/{name}/quality"] == pytest.approx(expected["quality"], rel=1e-6)
        assert metrics[f"val/{name}/auroc"] == pytest.approx(expected["auroc"], rel=1e-6)
    assert metrics["val/seen"] == 2 * sum(SIZES)  # nobody returned it: over all loaders


def test_a_metric_counts_in_place_of_its_batch_means() -> None:
    class Loose(Measured):
        def validation_step(self, batch: Any) -> Any:
            return {"f1": self.f1(self(batch[0]), batch[1])}

    task = Loose()
    assert validate(task, batches())["val/f1"] == pytest.approx(by_hand(task, batches())["quality"], rel=1e-6)


def test_members_of_a_collection_may_have_other_names() -> None:
    class Named(Measured):
        def validation_step(self, batch: Any) -> Any:
            self.both.update(self(batch[0]), batch[1])
            return {name.removeprefix("Multiclass").lower(): metric for name, metric in self.both.items()}

    task = Named()
    expected = by_hand(task, batches())
    assert validate(task, batches()) == pytest.approx(
        {
            "val/precision": expected["both/MulticlassPrecision"],
            "val/recall": expected["both/MulticlassRecall"],
        },
        rel=1e-6,
    )


def test_what_evaluation_end_computes_is_left_to_it() -> None:
    class Own(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.confusion = MulticlassConfusionMatrix(3)
            self.accuracy = MulticlassAccuracy(3, average="micro")

        def validation_step(self, batch: Any) -> Any:
            logits = self(batch[0])
            self.confusion.update(logits, batch[1])
            self.accuracy.update(logits, batch[1])
            return {}

        def evaluation_end(self, stage: str) -> dict[str, Any]:
            value = self.accuracy.compute()
            self.accuracy.reset()
            return {"right": self.confusion.compute().diagonal().sum(), "own": value}

    task = Own()
    metrics = validate(task, batches())
    right = sum(int((task(x).argmax(1) == y).sum()) for x, y in batches())
    assert metrics == {"val/right": right, "val/own": pytest.approx(right / sum(SIZES))}
    assert task.confusion.update_count == 0


def test_a_metric_without_a_number_or_a_holder_is_refused() -> None:
    class Matrix(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.confusion = MulticlassConfusionMatrix(3)

        def validation_step(self, batch: Any) -> Any:
            self.confusion.update(self(batch[0]), batch[1])
            return {"confusion": self.confusion}

    class Stray(Classifier):
        def training_step(self, batch: Any) -> Any:
            metric = MeanMetric()
            metric.update(1.0)
            return {"loss": super().training_step(batch)["loss"], "stray": metric}

    with pytest.raises(TaskError, match=r"'val/confusion', a MulticlassConfusionMatrix, computes a tensor of shape"):
        validate(Matrix(), batches())
    with pytest.raises(TaskError, match="'train/stray' is a MeanMetric that is no attribute of Stray"):
        fit(Stray(), batches())


# ---------------------------------------------------------------------------------------------------------------------
# Training


def logged(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def run_of(task: forge.TaskModule, folder: str, *more: Any, **options: Any) -> list[dict[str, Any]]:
    """Fit over six batches with a log every three updates and a validation in the middle of an interval."""
    options = {"max_updates": 6, "log_every": 3, "validate_every": "2 updates", "seed": 0, "run_dir": folder, **options}
    forge.Trainer(plugins=[JSONL(), Saves("2 updates"), *more], **options).fit(
        task, batches(0, (4, 4, 4, 4, 4, 2)), batches(1)
    )
    return logged(Path(folder))


@forge.on("step_end")
def power_cut(step: forge.Step) -> None:
    if step.index == 4:
        raise RuntimeError("power cut")


class Still(Measured):
    """Does not learn, so that a whole interval is one set of samples under one set of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.0


def test_training_logs_a_metric_over_its_log_interval() -> None:
    lines = run_of(Still(), "run")
    train = {line["update"]: line for line in lines if "train/quality" in line}
    data = batches(0, (4, 4, 4, 4, 4, 2))
    assert sorted(train) == [3, 6]
    for update, part in ((3, data[:3]), (6, data[3:])):
        for name, value in by_hand(Still(), part).items():
            assert train[update][f"train/{name}"] == pytest.approx(value, rel=1e-6), name
    assert {line["val/seen"] for line in lines if "val/seen" in line} == {float(sum(SIZES))}


@pytest.mark.slow
def test_a_run_cut_in_an_interval_logs_the_same() -> None:
    whole = run_of(Measured(), "whole")
    with pytest.raises(RuntimeError, match="power"):
        run_of(Measured(), "cut", power_cut)
    saved = StoredCheckpoint(sorted(Path("cut/checkpoints").iterdir())[-1]).load()
    assert set(saved["means"]["held"]) == {"f1", "auroc", "seen", "both"}
    assert set(saved["model"]) == set(Classifier().state_dict())
    assert run_of(Measured(), "cut", resume="auto") == whole


def test_a_step_that_is_run_twice_counts_once() -> None:
    results = [
        forge.Trainer(plugins=plugins, max_epochs=1, run_dir=False, log_every=100, device="cpu").fit(Still(), batches())
        for plugins in ([], [SAM()])
    ]
    assert results[1].metrics["train/seen"] == results[0].metrics["train/seen"] == sum(SIZES)


def test_metrics_go_back_with_the_means_to_a_mark() -> None:
    task = Measured()
    means = Means(torch.device("cpu"))
    means.track(task)
    task.seen.update(1.0)
    means.add("loss", 2.0)
    savepoint = means.savepoint()
    for _ in range(2):
        task.seen.update(5.0)
        task.auroc.update(torch.tensor([0.5]), torch.tensor([1]))
        means.add("loss", 7.0)
        means.rollback(savepoint)
    assert means.read().result() == {"train/seen": 1.0, "loss": 2.0}
    assert means.empty


class Extremes(Classifier):
    """Holds what wraps another metric: one that remembers the lowest and the highest value of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.range = MinMaxMetric(MeanMetric())
        self.each = ClasswiseWrapper(MulticlassAccuracy(3, average=None))


def held_by(task: nn.Module) -> Means:
    means = Means(torch.device("cpu"))
    means.track(task)
    return means


def test_what_a_wrapper_remembers_is_saved_and_goes_back() -> None:
    task = Extremes()
    means = held_by(task)
    for value in (1.0, 9.0):
        task.range.update(value)
        assert means.read().result()["train/range/raw"] == value
    assert means.empty
    saved = means.state_dict()
    task.range.update(4.0)
    expected = {"train/range/raw": 4.0, "train/range/min": 1.0, "train/range/max": 9.0}
    assert means.read().result() == expected

    resumed = Extremes()
    means = held_by(resumed)
    means.load_state_dict(saved)
    savepoint = means.savepoint()
    resumed.range(100.0)
    means.rollback(savepoint)
    resumed.range.update(4.0)
    assert means.read().result() == expected


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


SINGLE = (1,) * 12
"""On two ranks one of them has no sample at all."""


def counted(plugins: list[Any], sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """What a fit and a validation log; on two ranks one of them has no share of the last batch."""
    options: dict[str, Any] = {"plugins": plugins, "device": "cpu"}
    trainer = forge.Trainer(**options, max_epochs=1, seed=0, log_every=100, run_dir=False)
    trained = trainer.fit(Still(), batches(0, sizes)).metrics
    return {**trained, **forge.Trainer(**options).validate(Still(), batches(1, sizes))}


class Kept(Classifier):
    """Holds metrics that keep all samples: rows, single numbers, and lists that are never joined."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = MulticlassAveragePrecision(3)
        self.median = CatMetric()
        self.ranking = RetrievalMAP()


def nine() -> tuple[Tensor, Tensor]:
    return batches(0, (9,))[0][0], torch.arange(9) % 3


def of_one_rank(rank: int) -> dict[str, Any]:
    """What both ranks compute where only rank 1 has anything."""
    task, (x, y) = Kept(), nine()
    held = TaskMetrics(task, "val/")
    if rank == 1:
        task.rows.update(x[:, :3].softmax(1), y)
        task.median.update(5.0)
    for query in range(1 + rank):
        task.ranking.update(x[:, query], (y == query).long(), indexes=torch.full((9,), 2 * rank + query))
    return {name: float(value) for name, value in held.compute(Pair("cpu")).items()}


def on_a_rank() -> dict[str, Any]:
    between_them = [FSDP(), TensorParallel(2, plan={"net.0": "column", "net.2": "row"})]
    torch.distributed.init_process_group("gloo")
    try:
        results = {"kept": of_one_rank(torch.distributed.get_rank()), "single": counted([DDP()], SINGLE)}
        return results | {"shares": counted([DDP()]), "one model": counted(between_them)}
    finally:
        torch.distributed.destroy_process_group()


def test_two_ranks_count_every_sample_once() -> None:
    alone, single = counted([]), counted([], SINGLE)
    assert alone["train/seen"] == alone["val/seen"] == sum(SIZES)
    x, y = nine()
    for results in ranks(2)(on_a_rank):
        assert results["shares"] == pytest.approx(alone, rel=1e-6)
        assert results["one model"] == pytest.approx(alone, rel=1e-5)
        assert results["single"] == pytest.approx(single, rel=1e-6)  # one rank only kept company
        rows = MulticlassAveragePrecision(3)(x[:, :3].softmax(1), y)
        ranking = RetrievalMAP()  # of which the ranks have one list and two
        for index, query in ((0, 0), (2, 0), (3, 1)):
            ranking.update(x[:, query], (y == query).long(), indexes=torch.full((9,), index))
        expected = {"val/rows": float(rows), "val/median": 5.0, "val/ranking": float(ranking.compute())}
        assert results["kept"] == pytest.approx(expected)


def test_only_torchmetrics_classes_are_taken_for_metrics() -> None:
    class Metric(nn.Module): ...

    assert is_metric(MeanMetric())
    assert is_metric(MetricCollection([SumMetric()]))
    assert not is_metric(Metric())
    assert not is_metric(nn.Linear(1, 1))
    assert not is_metric(torch.tensor(1.0))
