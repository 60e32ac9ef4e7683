"""What must hold of a step: answers and loss, steps, padding, copies of weights, draws, and a queue that advances."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge_doctor.experiments import edges, equivariance, loopholes, partners, reachable, stages, tables, values
from forge_doctor.patient import FEWEST, Patient
from tests.support.patients import Healthy, found, loader, numbers, splits


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """A finding depends on the first weights."""
    torch.manual_seed(0)


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


def test_answers_that_are_compared_with_the_target_of_another_sample() -> None:
    assert set(found(SwappedMix(), partners.partners)) == {"compared_with_others"}
    assert found(Mixed(), partners.partners) == {}


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


def test_a_loss_that_can_be_lowered_without_answers() -> None:
    assert "log_var alone" in found(Free(), loopholes.given_up)["loss_gives_up"].message
    assert found(Weighed(), loopholes.given_up) == {}


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

    def __init__(self, masked: bool) -> None:
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


def test_a_target_that_is_another_tensors_next_step_is_not_seen() -> None:
    letters = torch.randint(9, (64, 11), generator=torch.Generator().manual_seed(0))
    follows, backwards = (letters[:, :-1], letters[:, 1:]), (letters, letters.flip(1))
    for masked, pair, where in ((False, follows, ["attend"]), (True, follows, []), (False, backwards, [])):
        served = loader(*pair), loader(*(x[:32] for x in pair))
        told = found(NextLetter(masked), equivariance.answers_seen, data=served)
        assert [(name, finding.where) for name, finding in told.items()] == [("sees_the_future", at) for at in where]


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


def test_a_large_model_is_examined_on_fewer_samples() -> None:
    patient = Patient(Healthy(), cast(Any, None), None, None, [numbers(64)] * 2, [numbers(64)])
    patient.lighten(2.0)
    assert not patient.whole
    patient.lighten(0.25)
    assert [len(x) for x, _ in (*patient.batches, *patient.val_batches)] == [16, 16, 16]
    assert len(patient.whole[0][0]) == 64
    patient.lighten(0.01)
    assert len(patient.batches[0][0]) == FEWEST


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


def measured() -> Any:
    x, _ = numbers()
    y = x[:, 0] - 0.5 * x[:, 1]
    return loader(x[:112], y[:112]), loader(x[112:], y[112:])


def test_a_loss_that_right_answers_do_not_lower() -> None:
    told = found(EachWithEach(), reachable.bounds, data=measured())["loss_floor"]
    assert "one answer for all samples" in told.message


def test_a_loss_that_right_answers_lower() -> None:
    assert found(Measures(), reachable.bounds, data=measured()) == {}
    assert found(Healthy(), reachable.bounds) == {}


# -- steps ------------------------------------------------------------------------------------------------------------


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


# -- what a cast takes away -------------------------------------------------------------------------------------------


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


class Thinned(Healthy):
    """Drops features and does not scale up what is left."""

    kept = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.drop = Drop(self.kept)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


class Drop(nn.Module):
    def __init__(self, share: float):
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.4) / self.share if self.training else x


class Scaled(Thinned):
    kept = 0.6


def test_what_is_random_gives_on_average_what_it_gives_in_evaluation() -> None:
    assert "0.60 times" in found(Thinned(), stages.on_average)["modes_differ"].message
    assert found(Scaled(), stages.on_average) == {}


class Queued(Healthy):
    """Keeps the last scores, in a queue whose place advances or not."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(64, 8))
        self.place = 0

    def training_step(self, batch: Any) -> Any:
        rows = torch.arange(self.place, self.place + 4) % 64
        self.get_buffer("queue")[rows] = batch[0][:4].detach()
        self.place += self.step
        return super().training_step(batch)


class Advancing(Queued):
    step = 4


def test_a_queue_whose_place_does_not_advance() -> None:
    train = [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(8)]
    report = forge.doctor(Queued(), train, budget=0)
    assert "4 of the 64 rows of queue" in next(f.message for f in report.findings if f.name == "same_rows_written")
    assert not [f for f in forge.doctor(Advancing(), train, budget=0).findings if f.name == "same_rows_written"]
