"""What must hold between answers and loss: partners, a loss that cannot give up, a gradient that explains it."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge_doctor.experiments import (
    company,
    edges,
    equivariance,
    loopholes,
    motion,
    partners,
    reachable,
    tables,
    values,
)
from forge_doctor.patient import FEWEST, Patient
from forge_doctor.probes import data, start
from tests.support.patients import Healthy, found, loader, numbers, splits


class Mixed(Healthy):
    """Mixes each sample with another; `swapped`: the targets with the weights of the other one."""

    swapped = False

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        order, share = torch.randperm(len(x)), 0.8
        scores = self(share * x + (1 - share) * x[order])
        weight = 1 - share if self.swapped else share
        return weight * F.cross_entropy(scores, y) + (1 - weight) * F.cross_entropy(scores, y[order])


class SwappedMix(Mixed):
    swapped = True


class Turned(Healthy):
    """Answers in one order, targets in the other."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self(x).roll(3, 0), y)


class InTurns(Healthy):
    """Four answers of each sample, laid out as (answer, sample) and compared as (sample, answer)."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = torch.stack([self(x) * k for k in (1.0, 0.9, 1.1, 1.2)])
        return F.cross_entropy(scores.flatten(0, 1), y[:, None].expand(-1, 4).flatten())


@pytest.mark.parametrize("kind", [SwappedMix, Turned, InTurns])
def test_answers_that_are_compared_with_the_target_of_another_sample(kind: type[Healthy]) -> None:
    assert set(found(kind(), partners.partners)) == {"compared_with_others"}


@pytest.mark.parametrize("kind", [Healthy, Mixed])
def test_partners_that_belong_together(kind: type[Healthy]) -> None:
    assert found(kind(), partners.partners) == {}


class Weighed(Healthy):
    """Learns how much its loss counts. `costs`: whether that is free."""

    costs = True

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return torch.exp(-self.log_var) * F.cross_entropy(self(x), y) + self.costs * self.log_var


class Free(Weighed):
    costs = False


class Scaled(Healthy):
    """A temperature that is learnt may make all answers alike, and pays for it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.scale * self(x), y)


def test_a_loss_that_can_be_lowered_without_answers() -> None:
    assert "log_var alone" in found(Free(), loopholes.given_up)["loss_gives_up"].message


@pytest.mark.parametrize("kind", [Healthy, Weighed, Scaled])
def test_a_loss_that_must_see_its_answers(kind: type[Healthy]) -> None:
    assert found(kind(), loopholes.given_up) == {}


class Counted(Healthy):
    """Half of the loss counts wrong answers, which has no gradient."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self(x)
        wrong = (scores.argmax(1) != y).float().mean()
        return F.cross_entropy(scores, y) + wrong


class Hinged(Healthy):
    """Has corners, and a gradient all the same."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.multi_margin_loss(self(x), y)


def test_a_part_of_the_loss_without_a_gradient() -> None:
    finding = found(Counted(), loopholes.explained)["gradient_is_cut"]
    assert "argmax() at" in finding.message


@pytest.mark.parametrize("kind", [Healthy, Hinged])
def test_a_gradient_that_explains_its_loss(kind: type[Healthy]) -> None:
    assert found(kind(), loopholes.explained) == {}


class TwoViews(Healthy):
    """`again`: draws a second view, rather than repeating the first."""

    again = False

    def training_step(self, batch: Any) -> Any:
        x, _ = batch
        views = [x + torch.randn_like(x) for _ in range(2)] if self.again else [x + torch.randn_like(x)] * 2
        one, other = self(torch.cat(views)).chunk(2)
        return -F.cosine_similarity(one, other).mean()


class DrawnViews(TwoViews):
    again = True


def test_views_that_are_one_and_the_same() -> None:
    assert "net.0 is given each sample" in found(TwoViews(), values.equal)["equal_tensors"].message
    assert found(DrawnViews(), values.equal) == {}


class Forecast(Healthy):
    def training_step(self, batch: Any) -> Any:
        past, future = batch
        return F.mse_loss(self(past), future)

    validation_step = training_step


def windows(overlap: int) -> Any:
    series = torch.randn(300, generator=torch.Generator().manual_seed(0))
    pasts = series.unfold(0, 8, 1)[:200]
    futures = series.unfold(0, 4, 1)[8 - overlap :][:200]
    return loader(pasts, futures), loader(pasts[:48], futures[:48])


def test_a_target_that_begins_in_the_input() -> None:
    finding = found(Forecast(), values.giveaway, data=windows(1))["label_in_features"]
    assert "number 0 is number 7 of the input" in finding.message
    assert found(Forecast(), values.giveaway, data=windows(0)) == {}


class Normed(Healthy):
    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


def test_statistics_that_outlast_the_run() -> None:
    """The planned run has 100 updates: at 0.001 they keep nine tenths of what they began with."""
    assert set(found(Normed(0.001), start.layers)) == {"batch_norm_momentum"}
    assert found(Normed(0.01), start.layers) == {}


def test_the_first_column_in_another_unit() -> None:
    (train, _), (x, y) = splits(), numbers(48, seed=5)
    moved = x.clone()
    moved[:, 2] = 240 + 20 * moved[:, 2]
    told = found(Healthy(), data.splits, data=(train, loader(moved, y)))["split_statistics"]
    assert told.level == "warning"
    assert "most in number 2" in told.message


class NextStep(Healthy):
    """Predicts each next step of a sequence. `shifts`: by how many steps the loss shifts the targets again."""

    shifts, parts = 0, 1

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(12, 8), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.embed(x).chunk(self.parts, 1)
        return self.out(torch.cat([self.rnn(piece)[0] for piece in pieces], 1))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self(x)
        return F.cross_entropy(scores[:, : scores.shape[1] - self.shifts].flatten(0, 1), y[:, self.shifts :].flatten())

    validation_step = training_step


class ShiftedTwice(NextStep):
    shifts = 1


class InBlocks(NextStep):
    parts = 4


def sequences() -> Any:
    x = torch.randint(0, 12, (160, 17), generator=torch.Generator().manual_seed(0))
    return loader(x[:112, :-1], x[:112, 1:]), loader(x[112:, :-1], x[112:, 1:])


def test_targets_that_are_shifted_twice() -> None:
    told = found(ShiftedTwice(), equivariance.steps_ahead, data=sequences())["skips_a_step"]
    assert "2 steps after it" in told.message
    assert found(NextStep(), equivariance.steps_ahead, data=sequences()) == {}


def test_steps_that_are_cut_into_blocks() -> None:
    told = found(InBlocks(), equivariance.blocks, data=sequences())["positions_ignored"]
    assert "up to step 3 of 16" in told.message
    assert found(NextStep(), equivariance.blocks, data=sequences()) == {}


class Messages(Healthy):
    """Adds up what the other end of each edge holds; `to_itself`: what the same end holds."""

    to_itself = False

    def training_step(self, batch: Any) -> Any:
        x, (one, other) = batch["x"], batch["edges"]
        got = torch.zeros_like(x).index_add(0, one if self.to_itself else other, x[one])
        return F.cross_entropy(self(x + got), batch["y"])

    validation_step = training_step


class ToItself(Messages):
    to_itself = True


def test_edges_that_join_nothing() -> None:
    x, y = numbers(32)
    ring = torch.stack([torch.arange(32), torch.arange(32).roll(1)])
    graphs = [{"x": x, "y": y, "edges": ring}] * 6
    assert set(found(ToItself(), edges.joined, data=(graphs, graphs))) == {"edges_join_nothing"}
    assert found(Messages(), edges.joined, data=(graphs, graphs)) == {}


class Bags(Healthy):
    """Classifies the mean of embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.embed(x).mean(1))


def texts(first: int) -> Any:
    """Words from a number on, behind which some samples are padded."""
    x = torch.randint(first, 12, (160, 9), generator=torch.Generator().manual_seed(0))
    x[::2, 6:] = 0
    return loader(x[:112], x[:112, 0] % 4), loader(x[112:], x[112:, 0] % 4)


def test_a_word_that_has_the_number_of_padding() -> None:
    assert set(found(Bags(), tables.padding_between, data=texts(0))) == {"padding_is_a_word"}
    assert found(Bags(), tables.padding_between, data=texts(1)) == {}
    by_time = Bags()
    by_time.forward = lambda x: by_time.net(by_time.embed(x.T).mean(0))  # pyright: ignore[reportAttributeAccessIssue]
    assert found(by_time, tables.padding_between, data=texts(1)) == {}


class NextLetter(Healthy):
    """Says of each letter which follows; unless it is masked, it may look."""

    def __init__(self, masked: bool, other: bool = False) -> None:
        super().__init__()
        self.masked, self.embed, self.out = masked, nn.Embedding(9, 16), nn.Linear(16, 9)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.masked else None
        return self.out(x + self.attend(x, x, x, attn_mask=hidden)[0])

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())

    validation_step = training_step


class GivenUnshifted(NextLetter):
    """Gives the model what it is to write, at the very step."""

    def training_step(self, batch: Any) -> Any:
        return super().training_step((batch[1], batch[1]))

    validation_step = training_step


def test_what_is_seen_is_said_with_its_way() -> None:
    letters = torch.randint(9, (64, 11), generator=torch.Generator().manual_seed(0))
    pair = loader(letters[:, :-1], letters[:, 1:]), None
    later = found(NextLetter(masked=False), equivariance.answers_seen, data=pair)["sees_the_future"]
    assert "changes with later steps, too. It shows first in what attend returns" in later.message
    assert later.where == "attend"
    written = found(GivenUnshifted(masked=True, other=True), equivariance.answers_seen, data=pair)
    assert "sees_the_future" not in written  # the answer is given at its own step: the model can copy it


def test_a_target_that_is_another_tensors_next_step_is_not_seen() -> None:
    letters = torch.randint(9, (64, 11), generator=torch.Generator().manual_seed(0))
    follows, backwards = (letters[:, :-1], letters[:, 1:]), (letters, letters.flip(1))
    for masked, pair, names in (
        (False, follows, {"sees_the_future"}),
        (True, follows, set()),
        (False, backwards, set()),
    ):
        served = loader(*pair), loader(*(x[:32] for x in pair))
        assert set(found(NextLetter(masked), equivariance.answers_seen, data=served)) == names


class AsksTwice(Healthy):
    """Asks its model for the metric, and again for the loss. `wrong`: counts the right ones among the next samples."""

    wrong = 0

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        guess = self(x).argmax(1)
        return {"loss": self.training_step(batch), "accuracy": (guess.roll(self.wrong) == y).float().mean()}


class CountsOthers(AsksTwice):
    wrong = 3


def test_a_model_that_is_asked_twice_gives_the_same_answers_twice() -> None:
    assert found(AsksTwice(), reachable.metrics) == {}
    assert set(found(CountsOthers(), reachable.metrics)) == {"metric_wrong"}


class Collects(Healthy):
    """Collects its answers until the end of a validation."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        self.kept.append(self(x).argmax(1) == y)
        return {"loss": self.training_step(batch)}

    def evaluation_end(self, stage: str) -> Any:
        Collects.most = max(Collects.most, sum(map(len, self.kept)))
        right, self.kept = torch.cat(self.kept), []
        return {"accuracy": right.float().mean()}


def test_what_steps_collect_is_let_go_of() -> None:
    assert found(Collects(), reachable.metrics) == {}
    assert Collects.most == 16  # a batch, though a hundred steps looked for the best answers


class NoisyByPlace(Healthy):
    """Validates with noise of a fixed seed."""

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        noise = torch.from_numpy(np.random.default_rng(0).normal(size=tuple(x.shape))).to(x)
        return {"loss": F.cross_entropy(self(x + noise), y)}


def test_noise_of_a_fixed_seed_is_no_company_and_no_mistake_of_the_model() -> None:
    assert found(NoisyByPlace(), company.alone) == {}
    levels = {finding.level for finding in found(NoisyByPlace(), equivariance.samples).values()}
    assert levels <= {"note"}


class SlowAverage(Healthy):
    """Follows its weights, by so much in each step."""

    share = 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any) -> Any:
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(weight, self.share)
        return super().training_step(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


class FitAverage(SlowAverage):
    share = 0.05


def test_an_average_that_outlasts_the_run() -> None:
    (told,) = found(SlowAverage(), motion.averages, after=6).values()
    assert (told.name, told.level) == ("average_stands_still", "warning")
    assert found(FitAverage(), motion.averages, after=6) == {}


class WarmsUp(Healthy):
    """Its rate rises over 60 steps."""

    every: str | None = "1 epoch"

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, (step + 1) / 60))
        return (adam, schedule) if self.every is None else (adam, schedule, self.every)


class WarmsUpInTime(WarmsUp):
    every = None


def test_a_schedule_whose_peak_lies_far_behind_the_end() -> None:
    assert set(found(WarmsUp(), start.schedules)) == {"schedule_still"}
    assert found(WarmsUpInTime(), start.schedules) == {}


def test_a_large_model_is_examined_on_fewer_samples() -> None:
    patient = Patient(Healthy(), cast(Any, None), None, None, [numbers(64)] * 2, [numbers(64)])
    patient.lighten(2.0)
    assert not patient.whole
    patient.lighten(0.25)
    assert [len(x) for x, _ in (*patient.batches, *patient.val_batches)] == [16, 16, 16]
    assert len(patient.whole[0][0]) == 64
    patient.lighten(0.01)
    assert len(patient.batches[0][0]) == FEWEST


class SyncsLate(SlowAverage):
    """Copies its weights once in a while. `works`: not into something that is let go of."""

    works = True

    def training_step(self, batch: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps % 30 == 0:
            other = self.average if self.works else copy.deepcopy(self.average)
            other.load_state_dict(self.net.state_dict())
        return Healthy.training_step(self, batch)


class SyncsNothing(SyncsLate):
    works = False


def test_a_copy_that_follows_once_in_a_while_does_not_stand_still() -> None:
    names = [{f.name for f in forge.doctor(kind(), *splits()).findings} for kind in (SyncsLate, SyncsNothing)]
    assert ["average_stands_still" in found for found in names] == [False, True]
