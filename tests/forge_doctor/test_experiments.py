"""Experiments on the whole task: each finds a planted mistake, and says nothing about the healthy twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, WeightedRandomSampler

import forge
from forge_doctor.experiments import (
    equivariance,
    held_out,
    influence,
    motion,
    pairs,
    reachable,
    stages,
    values,
)
from forge_doctor.probes import data as probes_of_data
from forge_doctor.probes import losses
from tests.support.patients import Healthy, Made, found, loader, numbers, random, splits


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


class Validates(Healthy):
    """A class whose validation step is the function that it is given."""

    def __init__(self, step: Callable[[Any, Tensor, Tensor], dict[str, Any]]) -> None:
        super().__init__()
        self.step = step

    def validation_step(self, batch: Any) -> Any:
        return self.step(self, *batch)


class Quick(Healthy):
    rate = 0.03

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.rate)


# -- influence --------------------------------------------------------------------------------------------------------


class Codes(Healthy):
    """Codes of -1 and 1, with the gradient of what they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.net = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.code(self.encoder(x)))

    def code(self, x: Tensor) -> Tensor:
        return x + (x.sign() - x).detach()


class CodesWithoutSlope(Codes):
    def code(self, x: Tensor) -> Tensor:
        return x.sign()


def test_weights_without_a_slope() -> None:
    assert "encoder" in found(CodesWithoutSlope(), influence.later_weights, after=3)["no_gradient"].message
    assert "no_gradient" not in found(Codes(), influence.later_weights, after=3)


class Ignores(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.net((x // 100).abs().clamp(max=0))


def test_an_input_that_is_not_read() -> None:
    assert set(found(Ignores(), influence.unread, after=2)) == {"input_ignored"}
    assert found(Healthy(), influence.unread, after=2) == {}


class Towers(Healthy):
    """Two views of a sample find each other among those of the others."""

    scale = 10.0

    def training_step(self, batch: Any) -> Any:
        left, right = (F.normalize(self(x), dim=1) for x in batch)
        return F.cross_entropy(self.scale * left @ right.T, self.labels(len(left)))

    def labels(self, count: int) -> Tensor:
        return torch.arange(count)


class AllToTheFirst(Towers):
    def labels(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.long)


def views() -> Any:
    x = random(64, 8)
    return loader(x, x + 0.1 * random(64, 8, seed=1)), None


def test_every_view_is_told_to_match_one() -> None:
    assert "broadcast_loss" in found(AllToTheFirst(), influence.inputs, data=views())
    assert found(Towers(), influence.inputs, data=views()) == {}


class Intent(Healthy):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.embed, self.gru, self.out = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(self.embed(x))[0][:, self.step])


def test_a_result_of_the_first_step_alone() -> None:
    ids = torch.randint(3, 20, (48, 8), generator=torch.Generator().manual_seed(0))
    data = loader(ids, torch.arange(48) % 4), None
    assert "all but index 0" in found(Intent(0), influence.slices, data=data)["positions_ignored"].message
    assert found(Intent(-1), influence.slices, data=data) == {}


# -- equivariance and company -----------------------------------------------------------------------------------------


class Carries(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x + self.last)
        self.last = x.detach().mean(0)
        return y


def test_what_is_carried_from_batch_to_batch() -> None:
    assert "state_between_batches" in found(Carries(), equivariance.state)
    assert found(Healthy(), equivariance.state) == {}


class Fills(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        scores[:, 3] = -1e4  # what is never right
        return F.cross_entropy(scores, y)


def test_a_step_may_write_into_its_answers() -> None:
    x, y = numbers()
    data = loader(x, y % 3), loader(x, y % 3)
    assert found(Fills(), equivariance.answers_seen, reachable.bounds, data=data) == {}


class TwoSources(Healthy):
    def training_step(self, batch: Any) -> Any:
        (x, y), (other,) = batch["known"], batch["unknown"]
        return self.loss(self(x), y) + self(other).square().mean()


def test_several_sources_are_served_as_a_fit_serves_them() -> None:
    x, y = numbers()
    data = {"known": loader(x, y), "unknown": loader(x + 1)}, splits()[1]
    probes = losses.reduction, equivariance.samples, influence.inputs, probes_of_data.dropped
    assert found(TwoSources(), *probes, reachable.metrics, data=data) == {}  # batches of val are no batches of train
    with pytest.raises(AssertionError, match="'val b': 'experiments take the first of several loaders'"):
        found(Healthy(), data=(splits()[0], {"a": splits()[1], "b": splits()[1]}))


# -- what can be reached ----------------------------------------------------------------------------------------------


def test_a_first_loss_far_above_chance() -> None:
    huge = Healthy()
    nn.init.normal_(huge.net[2].get_parameter("weight"), std=100.0)
    assert "initial_loss" in found(huge, reachable.bounds)


def accuracy(task: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    return {"accuracy": (task(x).argmax(1) == y).float().mean()}


def of_itself(task: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    answers = task(x).argmax(1)
    return {"accuracy": (answers == answers).float().mean()}


def test_a_metric_that_does_not_see_answers() -> None:
    assert "metric_blind" in found(Validates(of_itself), reachable.metrics)
    assert found(Validates(accuracy), reachable.metrics) == {}


# -- stages -----------------------------------------------------------------------------------------------------------


class Tagger(Healthy):
    """Tags of words, of which one kind is known and the other is not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding.from_pretrained(torch.tensor([[5.0, 0, 0, 0], [0.0] * 4]), freeze=False))

    def training_step(self, batch: Any) -> Any:
        ids, tags = batch
        return {"loss": F.cross_entropy(self(ids).movedim(2, 1), tags)}

    validation_step = training_step


class Counted(Tagger):
    def num_items(self, batch: Any) -> Tensor:
        return (batch[1] >= 0).sum()


def test_batches_of_many_and_of_few_words() -> None:
    ids, tags = torch.arange(16)[:, None].ge(8).long().expand(16, 8).contiguous(), torch.zeros(16, 8).long()
    tags[:8, 2:] = -100
    rows = [(ids, tags)] * 3
    assert "metric_by_batch" in found(Tagger(), stages.whole_and_parts, data=(rows, rows))
    assert found(Counted(), stages.whole_and_parts, data=(rows, rows)) == {}


class Gathers(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.hits: list[float] = []

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        self.hits += (self(x).argmax(1) == y).float().tolist()

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        mean = sum(self.hits) / len(self.hits)
        self.reset()
        return {"accuracy": mean}

    def reset(self) -> None:
        self.hits = []


class NeverResets(Gathers):
    def reset(self) -> None:
        pass


def test_an_evaluation_that_goes_on_with_the_one_before() -> None:
    assert "state_between_batches" in found(NeverResets(), stages.evaluated_twice)
    assert found(Gathers(), stages.evaluated_twice) == {}


class Average(Healthy):
    """A slow copy of the weights is validated."""

    share, copies = 0.01, True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any) -> Any:
        for mine, own in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            mine.data.lerp_(own.data, self.share)
        if self.copies:
            self.slow.load_state_dict(dict(self.net.named_buffers()), strict=False)
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": F.cross_entropy(self.slow(x), y)}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


class QuickAverage(Average):
    share = 0.99


class NoAverage(Average):
    share = 0.0


# -- motion -----------------------------------------------------------------------------------------------------------


def test_averages_that_are_none() -> None:
    assert set(found(QuickAverage(), motion.averages, after=6)) == {"average_too_close"}
    assert set(found(NoAverage(), motion.averages, after=6)) == {"average_stands_still"}
    assert found(Average(), motion.averages, after=6) == {}


class HalfAsleep(Healthy):
    def configure_optimizers(self) -> Any:
        first, last = self.net[0].parameters(), self.net[2].parameters()
        return torch.optim.Adam([{"params": first, "lr": 0.0}, {"params": last, "lr": 1e-3}])


def test_weights_that_stand_still() -> None:
    assert "net.0.weight" in found(HalfAsleep(), motion.still, after=4)["weights_stand_still"].message
    assert found(Healthy(), motion.still, after=4) == {}


# -- scale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_train", "in_val", "names"),
    [
        (lambda y: y, lambda y: y, set()),
        (lambda y: y, lambda y: (y + 1) % 4, {"splits_disagree"}),
        (lambda y: torch.arange(len(y)) // 100, lambda y: y, {"labels_no_easier"}),
    ],
)
def test_what_is_learnt_holds_for_other_samples_and_says_more_than_one_answer_for_all(
    in_train: Any, in_val: Any, names: set[str]
) -> None:
    (x, y), (a, b) = numbers(400), numbers(64, seed=5)
    given = loader(x, in_train(y)), loader(a, in_val(b), shuffle=False)
    task = Quick()
    for p in task.net[2].parameters():
        nn.init.zeros_(p)  # begins at chance
    assert set(found(task, held_out.generalises, data=given, last=True)) == names


# -- values -----------------------------------------------------------------------------------------------------------


class Pixels(Healthy):
    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.moves = moves
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(400, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.permute(0, 3, 1, 2) if self.moves else x.reshape(len(x), 3, 12, 12))


def test_pixels_that_are_viewed_instead_of_moved() -> None:
    slopes = random(32, 2, 1, 1, 1).cumsum(1)
    place = torch.linspace(-1, 1, 12)
    smooth = slopes[:, 0] * place[:, None, None] + slopes[:, 1] * place[None, :, None] + random(3)
    data = loader(smooth, torch.arange(32) % 4), None
    assert "pixels_scrambled" in found(Pixels(False), values.layout, data=data)
    assert found(Pixels(True), values.layout, data=data) == {}


@pytest.mark.parametrize(("count", "names"), [(10, {"dropped_data"}), (160, set())])
def test_how_many_samples_an_epoch_draws(count: int, names: set[str]) -> None:
    sampler = WeightedRandomSampler(torch.ones(160).tolist(), count)
    train = loader(*numbers(), shuffle=False, batch=8, sampler=sampler)
    assert set(found(Healthy(), values.coverage, data=(train, None))) == names


def test_values_of_the_splits() -> None:
    x, y = numbers(200)
    broken = x.clone()
    broken[7, 2] = torch.inf
    assert "bad_values" in found(Healthy(), values.finite, data=(loader(x, y), loader(broken, y)))
    assert "values_unseen" in found(Healthy(), values.unseen, data=(loader(x, y % 3), loader(x, y)))
    assert found(Healthy(), values.finite, values.unseen) == {}


# -- what is read, and what is lost -----------------------------------------------------------------------------------


def read(make: Callable[[Tensor], Any]) -> DataLoader[Any]:
    """Samples that a function makes of eight numbers, when they are read."""
    x = random(48, 8)
    return DataLoader(Made(lambda index: make(x[index]), 48), 16)


def test_a_metric_that_meets_each_with_each() -> None:
    wide = Validates(lambda task, x, y: {"error": (task(x)[:, :1] - y).abs().mean()})
    right = Validates(lambda task, x, y: {"error": (task(x)[:, 0] - y).abs().mean()})
    assert "broadcast_loss" in found(wide, losses.evaluation_inputs)
    assert found(right, losses.evaluation_inputs) == {}


class Masks(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(1, 1, 3, padding=1)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.mse_loss(self(x), y)

    validation_step = training_step


def flipped(both: bool) -> Callable[[Tensor], Any]:
    def make(x: Tensor) -> Any:
        picture = x[:, None] * torch.linspace(0.1, 1, 8)
        other = picture.flip(-1) if torch.rand(()) < 0.5 else picture
        return other[None], (other if both else picture)[None].abs()

    return make


@pytest.mark.parametrize("both", [True, False])
def test_a_mask_follows_its_picture(both: bool) -> None:
    data = read(flipped(both)), None
    assert set(found(Masks(), pairs.follow, data=data)) == (set() if both else {"pairs_broken"})


def test_samples_of_val_that_change() -> None:
    noisy = read(lambda x: (x + torch.randn(8), 1))
    fixed = read(lambda x: (x, 1))
    assert "random_validation_data" in found(Healthy(), pairs.fixed, data=(fixed, noisy))
    assert found(Healthy(), pairs.fixed, data=(noisy, fixed)) == {}


class Padded(forge.TaskModule):
    """A transformer as torch makes it, which takes its fast path in evaluation where there is padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.embed, self.encoder, self.out = nn.Embedding(12, 16), nn.TransformerEncoder(layer, 1), nn.Linear(16, 3)

    def training_step(self, batch: Any) -> Any:
        words, kind = batch
        seen = self.encoder(self.embed(words), src_key_padding_mask=words == 0)
        return F.cross_entropy(self.out(seen[:, 0]), kind)

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def test_a_transformer_as_torch_makes_it_is_examined() -> None:
    words = torch.randint(1, 12, (64, 9), generator=torch.Generator().manual_seed(0))
    words[::3, 6:] = 0
    kind = words[:, 0] % 3
    report = forge.doctor(Padded(), loader(words, kind), loader(words[:32], kind[:32]))
    assert {"samples apart", "influence of weights"} <= set(report.good), report.skipped
    assert torch.backends.mha.get_fastpath_enabled()


class Passes(Healthy):
    """Means over several passes with dropout in validation, on purpose."""

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        scores = torch.stack([F.dropout(self(x), 0.2, training=True) for _ in range(8)]).mean(0)
        return {"loss": F.cross_entropy(scores, y)}


def test_dropout_in_many_passes_of_a_validation_is_a_note() -> None:
    assert found(Passes(), stages.drawn)["random_evaluation"].level == "note"


class InTime(Healthy):
    """Its rows are steps of one series: what comes later depends on what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16))
        self.rnn, self.last = nn.GRU(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(self.net(x))[0])


class Across(Healthy):
    """Each sample gets the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - x.mean(0))


@pytest.mark.parametrize(
    ("task", "is_read", "names"),
    [(InTime, False, set()), (InTime, True, {"batch_dependence"}), (Across, False, {"batch_dependence"})],
)
def test_rows_of_ready_batches_may_be_steps_of_time(task: type[Healthy], is_read: bool, names: set[str]) -> None:
    rows = DataLoader(torch.utils.data.TensorDataset(*numbers()), 16)
    data = [rows, rows] if is_read else [list(rows), list(rows)]
    assert set(found(task(), equivariance.samples, data=data)) == names


class OfTheBatch(Healthy):
    """Draws noise by a generator that the batch seeds."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(x.detach().abs().sum() * 1e4))
        return self.net(x + 0.1 * torch.randn(x.shape, generator=generator))


def test_numbers_that_a_batch_seeds_are_others_with_another_batch() -> None:
    assert found(OfTheBatch(), stages.same_draws) == {}
