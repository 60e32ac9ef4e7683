"""The small recipes: what they compute against plain PyTorch and plain counting, and that they learn."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import forge
from forge.data import Splits, TensorLoader, pad_collate
from forge.testing import assert_same
from forge_recipes import gan, regression, sentiment
from forge_recipes.digits import digits


def fit(task: Any, splits: Splits, **options: Any) -> forge.FitResult:
    settings: dict[str, Any] = {"seed": 0, "device": "cpu", "plugins": [], "run_dir": False, **options}
    return forge.Trainer(**settings).fit(task, splits.train, splits.val)


def whole(loader: Any) -> tuple[Tensor, Tensor]:
    """The tensors of a loader, all of them."""
    assert isinstance(loader, TensorLoader)
    return loader.tensors[0], loader.tensors[1]


# -- gan_digits -------------------------------------------------------------------------------------------------------


def test_the_gan_trains_as_a_plain_loop_that_takes_turns() -> None:
    torch.manual_seed(0)
    task, plain = gan.DigitsGAN(hidden=16), gan.DigitsGAN(hidden=16)
    plain.load_state_dict(task.state_dict())
    splits = digits()
    assert isinstance(splits.train, TensorLoader)
    fit(task, Splits(splits.train), max_updates=3)

    torch.manual_seed(0)
    critic = torch.optim.Adam(plain.critic.parameters(), lr=5e-4, betas=(0.5, 0.999))
    generator = torch.optim.Adam(plain.generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    batches = TensorLoader(*splits.train.tensors, batch_size=64, shuffle=True, seed=0)
    for real, _ in itertools.islice(batches, 3):
        fake = plain.generator(torch.randn(64, 32)).detach()
        critic.zero_grad()
        real_loss, fake_loss = F.softplus(-plain.critic(real)), F.softplus(plain.critic(fake))
        (real_loss + fake_loss).mean().backward()
        critic.step()
        generator.zero_grad()
        F.softplus(-plain.critic(plain.generator(torch.randn(64, 32)))).mean().backward()
        generator.step()
    assert_same(task, plain)


# -- sentiment --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> sentiment.Reviews:
    return sentiment.Reviews(400, seed=5)


def test_labels_follow_from_the_words(texts: sentiment.Reviews) -> None:
    def opinion(part: str) -> int:
        turned = any(word in part.split() for word in ("not", "nobody", "far"))
        good, bad = (any(word in part.split() for word in words) for words in (sentiment.GOOD, sentiment.BAD))
        return (good - bad) * (-1 if turned else 1)

    for text, label in zip(texts.texts, texts.labels, strict=True):
        assert label == int(sum(opinion(part) for part in text.split(" , ")) > 0), text
    assert 0.4 < sum(texts.labels) / len(texts) < 0.6
    assert sentiment.Reviews(400, seed=5).texts == texts.texts


def test_a_review_alone_gets_what_it_gets_among_longer_ones(texts: sentiment.Reviews) -> None:
    task = sentiment.Sentiment(width=16).eval()
    together, _ = pad_collate([texts[i] for i in range(20)])
    for i, logits in enumerate(task(together)):
        alone, _ = pad_collate([texts[i]])
        torch.testing.assert_close(task(alone)[0], logits)
    other = together._replace(values=together.values.masked_fill(~together.mask, 7))  # whatever stands in the padding
    assert torch.equal(task(other), task(together))


# -- regression -------------------------------------------------------------------------------------------------------


def test_figures_of_regression_are_those_of_the_whole_set() -> None:
    torch.manual_seed(0)
    splits = regression.waves(1500)  # the last batch is smaller than the first
    task = regression.Regression(mean=100.0, std=9.8)
    fit(task, splits, max_epochs=1, validate_every=None)
    trainer = forge.Trainer(plugins=[], run_dir=False, device="cpu")
    metrics = trainer.validate(task, splits.val)
    points, truths = whole(splits.val)
    with torch.no_grad():
        errors = (task.eval()(points) - truths).tolist()
    n, mean = len(errors), truths.double().mean().item()
    squares = sum(error * error for error in errors)
    assert metrics["val/mae"] == pytest.approx(sum(map(abs, errors)) / n)
    assert metrics["val/rmse"] == pytest.approx((squares / n) ** 0.5)
    assert metrics["val/r2"] == pytest.approx(1 - squares / sum((y - mean) ** 2 for y in truths.tolist()))
    assert metrics["val/loss"] == pytest.approx(squares / n / 9.8**2, rel=1e-5)
    assert "val/fit" not in metrics  # a picture is logged, and the result has the numbers
    assert trainer.metrics["val/fit"].data.shape == (96, 96)
