"""What must hold of a step: answers and loss, steps, padding, copies of weights, draws, and a queue that advances."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_doctor.experiments import equivariance, reachable
from forge_doctor.patient import FEWEST, Patient
from tests.support.patients import Healthy, found, loader, numbers


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """A finding depends on the first weights."""
    torch.manual_seed(0)


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


def sequences() -> Any:
    x = torch.randint(0, 12, (160, 17), generator=torch.Generator().manual_seed(0))
    return loader(x[:112, :-1], x[:112, 1:]), loader(x[112:, :-1], x[112:, 1:])


def test_targets_that_are_shifted_twice() -> None:
    told = found(ShiftedTwice(), equivariance.steps_ahead, data=sequences())["skips_a_step"]
    assert "2 steps after it" in told.message
    assert found(NextStep(), equivariance.steps_ahead, data=sequences()) == {}


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
    assert len(patient.batches[0][0]) == 64
    patient.lighten(0.25)
    assert [len(x) for x, _ in (*patient.batches, *patient.val_batches)] == [16, 16, 16]
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


# -- padding that is stored -------------------------------------------------------------------------------------------


# -- what a cast takes away -------------------------------------------------------------------------------------------
