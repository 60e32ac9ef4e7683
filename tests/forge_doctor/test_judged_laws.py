"""What a loss must ask, and where: its lowest value, steps, padding that is stored, rates and copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import forge
from forge_doctor.experiments import (
    columns,
    equivariance,
    held_out,
    influence,
    lossy,
    motion,
    partners,
    reachable,
    values,
)
from forge_doctor.probes import data, start
from tests.support.patients import Healthy, found, loader, numbers, splits

# -- the lowest loss --------------------------------------------------------------------------------------------------


class Measures(Healthy):
    """Measures one number, and writes its squared error by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, 0]

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return (scores - y).square().mean()

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.loss(self(batch[0]), batch[1])}


class EachWithEach(Measures):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return (scores[:, None] - y[None]).square().mean()


class BehindRelu(Measures):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class TwoHeads(Healthy):
    """Tells a class, and measures a number behind a ReLU: most of the loss can be had all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Linear(8, 1)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        kind = y.gt(0).long()
        return 4 * F.cross_entropy(self(x), kind) + (self.number(x)[:, 0].relu() - y).square().mean()

    validation_step = training_step


def measured() -> Any:
    x, _ = numbers()
    y = x[:, 0] - 0.5 * x[:, 1]
    return loader(x[:112], y[:112]), loader(x[112:], y[112:])


@pytest.mark.parametrize(
    ("task", "words"),
    [(EachWithEach, "one answer for all samples"), (BehindRelu, "Relu"), (TwoHeads, "does not see them")],
)
def test_a_loss_that_right_answers_do_not_lower(task: type[Healthy], words: str) -> None:
    assert words in found(task(), reachable.bounds, data=measured())["loss_floor"].message


class CountsOneClass(Healthy):
    """Forgets what it is to say of the other class."""

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return -(y.gt(0) * F.logsigmoid(scores[:, 0])).mean()


def test_a_loss_that_one_answer_for_all_brings_to_zero() -> None:
    assert "though their targets differ" in found(CountsOneClass(), reachable.bounds)["loss_floor"].message


class TwiceNothing(Healthy):
    """Two factors of a product begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        for p in self.net.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x)


def test_weights_of_which_none_can_begin() -> None:
    assert "No weight has a gradient" in found(TwiceNothing(), influence.weights)["no_gradient"].message


def test_a_loss_that_right_answers_lower() -> None:
    assert found(Measures(), reachable.bounds, data=measured()) == {}
    assert found(Healthy(), reachable.bounds) == {}


# -- steps ------------------------------------------------------------------------------------------------------------


class Tags(Healthy):
    """Tells a kind of each step."""

    reshapes = False

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x))

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        size, steps, kinds = scores.shape
        return F.cross_entropy(scores.view(size, kinds, steps) if self.reshapes else scores.transpose(1, 2), y)

    validation_step = Healthy.training_step


class ReshapedTags(Tags):
    reshapes = True


def tagged() -> Any:
    x = torch.randint(0, 9, (160, 20), generator=torch.Generator().manual_seed(0))
    return loader(x[:112], x[:112] % 5), loader(x[112:], x[112:] % 5)


def test_a_reshape_in_place_of_a_transpose() -> None:
    told = found(ReshapedTags(), partners.steps, data=tagged())["compared_with_others"]
    assert "do not stand together" in told.message
    assert found(Tags(), partners.steps, data=tagged()) == {}


def test_steps_that_see_no_other() -> None:
    assert "no other" in found(Tags(), equivariance.blocks, data=tagged())["positions_ignored"].message


class Forecasts(Healthy):
    """Writes four numbers, each from the one before it. `given`: what validation gives it as the ones before."""

    given = False

    def __init__(self) -> None:
        super().__init__()
        self.next = nn.Linear(9, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        written = [x[:, :1]]
        for t in range(4):
            last = y[:, t - 1 : t] if y is not None and t else written[-1]
            written.append(self.next(torch.cat([x, last], 1)))
        return torch.cat(written[1:], 1)

    def training_step(self, batch: Any) -> Any:
        return F.mse_loss(self(*batch), batch[1])

    def validation_step(self, batch: Any) -> Any:
        return {"loss": F.mse_loss(self(batch[0], batch[1] if self.given else None), batch[1])}


class ForecastsOneStep(Forecasts):
    given = True


def test_validation_that_is_given_what_it_is_to_predict() -> None:
    x, _ = numbers()
    given = loader(x, x[:, :4].cumsum(1)), loader(x, x[:, :4].cumsum(1))
    assert "is given what" in found(ForecastsOneStep(), equivariance.fed, data=given)["sees_the_future"].message
    assert found(Forecasts(), equivariance.fed, data=given) == {}


# -- padding that is stored -------------------------------------------------------------------------------------------


class Writes(Healthy):
    """Predicts each next symbol of rows that end in zeros; knows no more than sixteen places."""

    ignored = 0

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(9, 8), nn.Embedding(16, 8), nn.Linear(8, 9)

    def training_step(self, batch: Any) -> Any:
        (text,) = batch
        scores = self.out(self.words(text[:, :-1]) + self.places.weight[: text.shape[1] - 1])
        return F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten(), ignore_index=self.ignored)

    validation_step = training_step


class WritesPadding(Writes):
    ignored = -100


def test_padding_that_is_stored_with_the_samples() -> None:
    g = torch.Generator().manual_seed(0)
    text = torch.randint(1, 9, (160, 16), generator=g)
    text[torch.arange(16) >= torch.randint(6, 15, (160, 1), generator=g)] = 0
    given = loader(text[:112]), loader(text[112:])
    assert "padding_in_loss" in found(WritesPadding(), equivariance.padded, data=given)
    assert found(Writes(), equivariance.padded, data=given) == {}


class Sorts(Healthy):
    """Tells a kind of rows that end in zeros. `masks`: by the mean of their symbols, and not of the zeros."""

    masks = True

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        real = (x != 0) if self.masks else torch.ones_like(x)
        return self.out((self.words(x) * real[..., None]).sum(1) / real.sum(1, keepdim=True))

    validation_step = Healthy.training_step


class SortsWithPadding(Sorts):
    masks = False


def test_padding_that_is_cut_off_says_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    text = torch.randint(1, 9, (160, 16), generator=g)
    text[torch.arange(16) >= torch.randint(3, 17, (160, 1), generator=g)] = 0
    given = loader(text, text[:, 0] % 4, batch=32), None
    assert (
        "padding reaches" in found(SortsWithPadding(), equivariance.cropped, data=given)["depends_on_company"].message
    )
    assert found(Sorts(), equivariance.cropped, data=given) == {}


# -- statistics by hand -----------------------------------------------------------------------------------------------


class Scales(Healthy):
    """Brings inputs to a mean of 0, by a mean over what training has seen; `mixes`: by that of the batch instead."""

    mixes = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0.0))
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.total / self.count.clamp_min(1)
        return self.net(x - (x.mean(0) if self.mixes else seen))

    def training_step(self, batch: Any) -> Any:
        self.count, self.total = self.count + len(batch[0]), self.total + batch[0].sum(0)
        return super().training_step(batch)


class ScalesByBatch(Scales):
    mixes = True


def test_statistics_that_training_gathers_are_no_mistake() -> None:
    assert found(Scales(), equivariance.samples, equivariance.state) == {}
    assert set(found(ScalesByBatch(), equivariance.samples)) == {"batch_dependence"}


# -- what a cast takes away -------------------------------------------------------------------------------------------


class Halves(Dataset[Any]):
    """Maps of classes, made smaller; `mode`: how."""

    def __init__(self, mode: str):
        self.mode = mode

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        kinds = torch.zeros(1, 1, 16, 16)
        kinds[..., 3 : 8 + index % 5, 5:12] = 3.0
        return torch.randn(8), F.interpolate(kinds, size=(7, 7), mode=self.mode)[0, 0].long().amax()


@pytest.mark.parametrize(("mode", "kinds"), [("bilinear", {"truncation"}), ("nearest", set())])
def test_classes_between_classes(mode: str, kinds: set[str]) -> None:
    told = found(Healthy(), lossy.reading, data=(DataLoader(Halves(mode), 16), None))
    assert {finding.evidence["kind"] for finding in told.values()} == kinds


class Prices(Healthy):
    """Predicts the logarithm of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(scores[:, 0], y.log())

    validation_step = Healthy.training_step


def test_a_number_of_the_input_that_says_nearly_all_of_the_target() -> None:
    x, _ = numbers(400)
    noise = torch.randn(400, generator=torch.Generator().manual_seed(1))
    price = (x.sum(1) / 4 + 0.1 * noise).exp()
    duty = price**3 * (1 + 0.01 * noise)
    told = found(Prices(), values.giveaway, data=(loader(torch.cat([x, duty[:, None]], 1), price), None))
    assert "Number 8 of 9" in told["label_in_features"].message
    known = found(Prices(), values.giveaway, data=(loader(torch.cat([x, noise[:, None]], 1), price), None))
    assert known == {}


def test_a_value_that_stands_for_what_is_missing() -> None:
    x, y = numbers(400)
    gaps = x.clone()
    gaps[::9, 3] = -999
    assert (
        "far from it" in found(Healthy(), columns.compared, data=(loader(gaps, y), loader(x, y)))["bad_values"].message
    )
    cut = loader(x.clamp_min(-1), y)  # an end of a scale
    assert found(Healthy(), columns.compared, data=(cut, cut)) == {}


class Loud(Healthy):
    """Begins far from anything."""

    def forward(self, x: Tensor) -> Tensor:
        return 30 * super().forward(x)


def test_a_first_loss_that_is_some_times_that_of_chance() -> None:
    told = found(Loud(), reachable.bounds)["initial_loss"]
    assert told.level == "note"
    assert "initial_loss" not in found(Healthy(), reachable.bounds)


class CountsErrors(Healthy):
    """Says how many are wrong; `seen`: of how many classes it looks at."""

    seen = 4

    def validation_step(self, batch: Any) -> Any:
        scores = self(batch[0])
        wrong = scores[:, : self.seen].argmax(1) != batch[1]
        return {"loss": F.cross_entropy(scores, batch[1]), "error": wrong.float().mean()}


class CountsErrorsOfThree(CountsErrors):
    seen = 2


def test_errors_that_right_answers_have() -> None:
    assert "though the loss is nearly 0" in found(CountsErrorsOfThree(), reachable.metrics)["metric_blind"].message
    assert found(CountsErrors(), reachable.metrics) == {}


class KeepsACopy(Healthy):
    """Has a copy of its net in the optimizer, too, where it has no gradient; `follows`: it is brought up to date."""

    follows = False

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net)

    @forge.hookimpl
    def forge_step_end(self) -> None:
        if self.follows:
            self.target.load_state_dict(self.net.state_dict())


class KeepsACopyUpToDate(KeepsACopy):
    follows = True


def test_a_copy_that_nothing_brings_up_to_date() -> None:
    assert "average_stands_still" in found(KeepsACopy(), motion.averages, after=5)
    assert "average_stands_still" not in found(KeepsACopyUpToDate(), motion.averages, after=5)


class TopOfTwo(Healthy):
    """Counts how often the right class is among the best two; `first`: which number its classes begin with."""

    first = 0

    def validation_step(self, batch: Any) -> Any:
        scores = self(batch[0])
        best = scores.topk(2).indices + self.first
        return {"loss": F.cross_entropy(scores, batch[1]), "found": (best == batch[1][:, None]).any(1).float().mean()}


class CountsFromOne(TopOfTwo):
    first = 1


def test_a_metric_that_is_for_right_answers_as_for_others() -> None:
    assert "does not tell which" in found(CountsFromOne(), reachable.metrics)["metric_blind"].message
    assert found(TopOfTwo(), reachable.metrics) == {}


class Matches(Healthy):
    """Finds the half of each sample among those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2))

    def training_step(self, batch: Any) -> Any:
        scores = self.one(batch[0]) @ self.other(batch[1]).T
        return F.cross_entropy(scores, torch.arange(len(scores)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)

    validation_step = training_step


@pytest.mark.parametrize(("shift", "names"), [(0, set()), (1, {"labels_no_easier"})])
def test_pairs_of_which_one_side_moved_on(shift: int, names: set[str]) -> None:
    x = torch.randn(160, 4, generator=torch.Generator().manual_seed(0))
    y = torch.tanh(x).roll(shift, 0)
    given = loader(x, y, shuffle=True), loader(x[:48], y[:48])
    assert set(found(Matches(), held_out.generalises, data=given, last=True)) == names


class Follows(Healthy):
    """Keeps a copy of its net; `back`: copies it the wrong way."""

    back = False

    def __init__(self) -> None:
        super().__init__()
        self.copy = copy.deepcopy(self.net).requires_grad_(False)

    @forge.hookimpl
    def forge_step_end(self) -> None:
        one, other = (self.net, self.copy) if self.back else (self.copy, self.net)
        one.load_state_dict(other.state_dict())


class IsOverwritten(Follows):
    back = True


def test_trained_weights_that_a_copy_overwrites() -> None:
    told = {kind: forge.doctor(kind(), *splits()).findings for kind in (Follows, IsOverwritten)}
    (lost,) = [found for found in told[IsOverwritten] if found.name == "weights_overwritten"]
    assert "net.0.weight is copy.0.weight then" in lost.message
    assert lost.level == "warning"
    assert "weights_overwritten" not in {found.name for found in told[Follows]}


# -- rates, orders and copies -----------------------------------------------------------------------------------------


class Scheduled(Healthy):
    rate, factor = 1e-3, 1.0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.rate)
        return optimizer, LambdaLR(optimizer, lambda step: self.factor * min(1.0, (step + 1) / 10))


class RateAsFactor(Scheduled):
    factor = Scheduled.rate


def test_a_schedule_that_returns_a_rate() -> None:
    told = found(RateAsFactor(), start.schedules)["schedule_still"]
    assert "0.001 of the rate" in told.message
    assert found(Scheduled(), start.schedules) == {}


def test_a_symbol_of_the_input_that_is_the_target() -> None:
    g = torch.Generator().manual_seed(0)
    items, kinds = torch.randint(0, 99, (160, 6), generator=g), torch.randint(0, 99, (160,), generator=g)
    leaks = torch.cat([items, kinds[:, None]], 1)
    told = found(Choosing(), values.giveaway, data=(loader(leaks, kinds), None))["label_in_features"]
    assert "Number 6 of 7" in told.message
    assert found(Choosing(), values.giveaway, data=(loader(items, kinds), None)) == {}


class Choosing(Healthy):
    """Chooses one of a hundred symbols after a few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(99, 8), nn.Linear(8, 99)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).mean(1))

    validation_step = Healthy.training_step


class ByHand(Healthy):
    """Has a loss of classes of its own, from which nothing says what a class is."""

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return -(scores.log_softmax(1) * F.one_hot(y, 4)).sum(1).mean()


def test_rows_that_were_repeated_before_the_split() -> None:
    x, y = numbers(400)
    rows = torch.cat([torch.arange(400), (y == 1).nonzero().flatten().repeat(4)])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    cut = 3 * len(rows) // 4
    train, val = (loader(x[part], y[part]) for part in (rows[:cut], rows[cut:]))
    assert {"leakage", "val_is_train"} & set(found(ByHand(), data.copies, data=(train, val)))


class TurnsInPlace(Dataset[Any]):
    """Turns the sign of a number at random, and in some readings turns it back."""

    def __init__(self) -> None:
        self.x, self.y = numbers()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        if torch.rand(()) < 0.5:
            x[0] = -x[0]
        return x, self.y[index]


@pytest.mark.parametrize("seed", [0, 1, 20])
def test_a_change_in_place_that_the_next_reading_turns_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_doctor.probes.serving.SEED", seed)
    assert "dataset_changed" in found(Healthy(), data=(DataLoader(TurnsInPlace(), 16), None))


class Steep(Healthy):
    """Moves its matrices by more than their size, and learns."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.net[2].parameters():
            nn.init.zeros_(p)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_a_rate_at_which_a_batch_is_learnt_is_not_too_high() -> None:
    report = forge.doctor(Steep(), loader(*numbers()), loader(*numbers(48, seed=5)))
    assert report.one_batch is not None
    assert report.one_batch.is_learnt
    assert "learning_rate_high" not in {finding.name for finding in report.findings}


# -- targets that are missing -----------------------------------------------------------------------------------------


class ManyTargets(Healthy):
    """Measures four numbers, of which some are not known; `masks`: leaves these out."""

    masks = True

    def training_step(self, batch: Any) -> Any:
        x, y, known = batch
        errors = (self(x) - y.nan_to_num(0.0)).square()
        return (errors * known).sum() / known.sum() if self.masks else errors.mean()

    validation_step = training_step


class FilledIn(ManyTargets):
    masks = False


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_targets_that_a_mask_says_are_missing(value: float) -> None:
    x, _ = numbers()
    known = torch.rand(160, 4, generator=torch.Generator().manual_seed(0)) < 0.6
    given = loader(x, (x[:, :4] * 2).masked_fill(~known, value), known), None
    assert "targets_filled_in" in found(FilledIn(), values.finite, data=given)
    assert "targets_filled_in" not in found(ManyTargets(), values.finite, data=given)
