"""A loss whose minimum is not at the target, and metrics that a perfect prediction does not bring to 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_doctor.experiments import reachable, reading
from tests.support.patients import Healthy, found, loader
from tests.support.profiles import some


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """A finding depends on the first weights; how often one is missed is measured by benchmarks.doctor."""
    torch.manual_seed(1)


class Numbers(Healthy):
    """One or more numbers for each sample; subclasses say how the loss is made."""

    outputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, self.outputs))

    def forward(self, x: Tensor) -> Any:
        return self.net(x).squeeze(-1)

    def loss(self, scores: Any, y: Tensor) -> Tensor:
        return F.mse_loss(scores, y)

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self(x)
        return {"loss": self.loss(scores, y), **self.metrics(scores, y)}

    def metrics(self, scores: Any, y: Tensor) -> dict[str, Tensor]:
        return {}


def data(make: Any, count: int = 64) -> Any:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))
    y = make(x)
    return loader(x, y), loader(x.flip(0), y.flip(0), shuffle=False)


def real_numbers() -> Any:
    return data(lambda x: x[:, 0] + x[:, 1])


def sides() -> Any:
    return data(lambda x: (x[:, 0] > 0).float())


def vectors() -> Any:
    return data(lambda x: x[:, :3].contiguous())


# -- the loss ---------------------------------------------------------------------------------------------------------


class Away(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return -F.cross_entropy(scores, y)


class Apart(Numbers):
    outputs = 3

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cosine_similarity(scores, y, dim=1).mean()


class Together(Apart):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return 1 - super().loss(scores, y)


class OneSided(Numbers):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return -(y * F.logsigmoid(scores)).mean()


class BothSides(Numbers):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return -(y * F.logsigmoid(scores) + (1 - y) * F.logsigmoid(-scores)).mean()


class EasyFocus(Numbers):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(scores, y, reduction="none")
        return (torch.exp(-each) ** 2 * each).mean()


class HardFocus(Numbers):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(scores, y, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()


@pytest.mark.parametrize(
    ("task", "given"),
    some([(Away, None), (Apart, vectors), (OneSided, sides), (EasyFocus, sides)], quick=2),
    ids=lambda x: x.__name__ if x else "",
)
def test_a_loss_that_leads_away(task: type[Healthy], given: Any) -> None:
    assert "loss_misaligned" in found(task(), reading.leads, reading.errors, data=given() if given else None)


@pytest.mark.parametrize(
    ("task", "given"),
    some(
        [(Healthy, None), (Numbers, real_numbers), (Together, vectors), (BothSides, sides), (HardFocus, sides)], quick=2
    ),
    ids=lambda x: x.__name__ if x else "",
)
def test_a_loss_that_leads_to_its_target(task: type[Healthy], given: Any) -> None:
    assert found(task(), reading.leads, reachable.metrics, data=given() if given else None) == {}


class Rates(Numbers):
    """The logarithm of a rate from waiting times: the longer, the lower."""

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return (scores.exp() * y - scores).mean()


class Risk(Numbers):
    """Cox's partial likelihood: a sample's loss depends on the times of the others."""

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        order = y.argsort(descending=True)
        return (torch.logcumsumexp(scores[order], 0) - scores[order]).mean()


def test_times_and_rates_go_apart_rightly() -> None:
    assert found(Rates(), reading.leads, data=data(lambda x: x[:, 0].exp())) == {}
    assert found(Risk(), reading.leads, data=data(lambda x: x[:, 0])) == {}


class Imputed(Numbers):
    """A mask says which samples count; it is no target."""

    def training_step(self, batch: Any) -> Any:
        x, known = batch
        return ((self(x) - x[:, 1]).square() * known).mean()


def test_a_mask_is_no_target() -> None:
    assert found(Imputed(), reading.leads, data=(sides()[0], None)) == {}


class Policy(Numbers):
    """Actions with an advantage are made likelier or less likely."""

    outputs = 4

    def training_step(self, batch: Any) -> Any:
        x, action, advantage = batch
        return (F.cross_entropy(self(x), action, reduction="none") * advantage).mean()


def test_a_policy_has_no_target() -> None:
    x, action = torch.randn(64, 8), torch.arange(64) % 4
    rows = loader(x, action, -torch.rand(64))
    assert found(Policy(), reading.leads, data=(rows, None)) == {}


# -- metrics ----------------------------------------------------------------------------------------------------------


class FixedSize(Healthy):
    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        return {"accuracy": (self(x).argmax(1) == y).sum() / 5}


class InPerCent(Healthy):
    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        return {"accuracy": 100 * (self(x).argmax(1) == y).float().mean()}


class ThresholdOfZero(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.net(x).squeeze(-1))

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(scores, y)

    def metrics(self, scores: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"accuracy": ((scores > self.threshold) == y.bool()).float().mean()}

    threshold = 0.0


class ThresholdOfHalf(ThresholdOfZero):
    threshold = 0.5


class Upside(Numbers):
    def metrics(self, scores: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"r2": 1 - (y - y.mean()).square().sum() / (y - scores).square().sum()}


class Determination(Numbers):
    def metrics(self, scores: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"r2": 1 - (y - scores).square().sum() / (y - y.mean()).square().sum()}


@pytest.mark.parametrize(
    ("task", "given", "name"),
    [
        *((FixedSize, None, "metric_wrong"), (ThresholdOfZero, sides, "metric_blind")),
        (Upside, real_numbers, "metric_wrong"),
    ],
)
def test_a_metric_that_is_wrong(task: type[Healthy], given: Any, name: str) -> None:
    assert name in found(task(), reachable.metrics, data=given() if given else None)


@pytest.mark.parametrize(
    ("task", "given"),
    [(InPerCent, None), (ThresholdOfHalf, sides), (Determination, real_numbers)],
)
def test_a_metric_that_is_right(task: type[Healthy], given: Any) -> None:
    assert found(task(), reachable.metrics, data=given() if given else None) == {}


# -- spreads, quantiles and penalties ---------------------------------------------------------------------------------


class Spread(Numbers):
    outputs = 2
    sign = -1.0

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        mean, log_var = scores.unbind(1)
        return (log_var + (y - mean).square() * torch.exp(self.sign * log_var)).mean()


class TwoHeads(Spread):
    def forward(self, x: Tensor) -> Any:
        mean, spread = self.net(x).unbind(1)
        return mean, F.softplus(spread)

    def loss(self, scores: Any, y: Tensor) -> Tensor:
        return -torch.distributions.Normal(*scores).log_prob(y).mean()


class LikelihoodAsLoss(TwoHeads):
    def loss(self, scores: Any, y: Tensor) -> Tensor:
        return -super().loss(scores, y)


def test_a_likelihood_that_is_minimised() -> None:
    assert "loss_misaligned" in found(LikelihoodAsLoss(), reading.errors, data=real_numbers())
    assert found(TwoHeads(), reading.errors, data=real_numbers()) == {}
    assert found(Spread(), reading.errors, data=real_numbers()) == {}


class Code(Numbers):
    """A variational autoencoder of eight numbers."""

    outputs = 4

    def __init__(self) -> None:
        super().__init__()
        self.decode = nn.Linear(2, 8)

    def divergence(self, mean: Tensor, log_var: Tensor) -> Tensor:
        return -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()

    def training_step(self, batch: Any) -> Any:
        mean, log_var = self(batch[0]).chunk(2, 1)
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        return F.mse_loss(self.decode(z), batch[0]) + 0.1 * self.divergence(mean, log_var)


class OtherOrder(Code):
    def divergence(self, mean: Tensor, log_var: Tensor) -> Tensor:
        return 0.5 * torch.mean(mean**2 + log_var.exp() - 1 - log_var)


class WrongSign(Code):
    def divergence(self, mean: Tensor, log_var: Tensor) -> Tensor:
        return 0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()


class OtherWrongSign(OtherOrder):
    def divergence(self, mean: Tensor, log_var: Tensor) -> Tensor:
        return -super().divergence(mean, log_var)


@pytest.mark.parametrize("task", [WrongSign, OtherWrongSign])
def test_a_divergence_with_the_wrong_sign(task: type[Healthy]) -> None:
    assert "loss_misaligned" in found(task(), reading.endless, data=vectors())


@pytest.mark.parametrize("task", [Code, OtherOrder])
def test_a_divergence_with_the_right_sign(task: type[Healthy]) -> None:
    assert found(task(), reading.endless, data=vectors()) == {}


class Overlap(Numbers):
    """Dice's overlap of a mask and a prediction."""

    outputs = 3

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        p = scores.sigmoid()
        return 1 - self.overlap(p, y)

    def overlap(self, p: Tensor, y: Tensor) -> Tensor:
        return (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


class OverlapAsLoss(Overlap):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return self.overlap(scores.sigmoid(), y)


def test_an_overlap_that_is_minimised() -> None:
    masks = data(lambda x: (x[:, :3] > 0).float())
    assert "loss_misaligned" in found(OverlapAsLoss(), reading.leads, data=masks)
    assert found(Overlap(), reading.leads, data=masks) == {}
