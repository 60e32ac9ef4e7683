"""The small recipes: what they compute against plain PyTorch and plain counting, and that they learn."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import forge
from forge.data import Loader, Splits, TensorLoader, pad_collate
from forge.metrics import drawing
from forge.testing import assert_same
from forge_recipes import gan, multilabel, regression, sentiment
from forge_recipes.digits import digits


def fit(task: Any, splits: Splits, **options: Any) -> forge.FitResult:
    settings: dict[str, Any] = {"seed": 0, "device": "cpu", "plugins": [], "run_dir": False, **options}
    return forge.Trainer(**settings).fit(task, splits.train, splits.val)


def evaluate(task: Any, splits: Splits) -> dict[str, Any]:
    """Return everything that a validation logs, pictures too."""
    seen: dict[str, Any] = {}

    @forge.on("log")
    def keep(metrics: dict[str, Any]) -> None:
        seen.update(metrics)

    forge.Trainer(plugins=[keep], run_dir=False, device="cpu").validate(task, splits.val)
    return seen


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


@pytest.mark.slow
def test_the_gan_comes_closer_to_the_digits_and_shows_them() -> None:
    torch.manual_seed(0)
    task, splits = gan.DigitsGAN(hidden=128), digits()
    before = evaluate(task, splits)
    assert evaluate(task, splits)["val/distance"] == before["val/distance"]  # the same noise each time
    fit(task, splits, max_updates=120, validate_every=None)
    after = evaluate(task, splits)
    assert after["val/distance"] < 4 < before["val/distance"]
    noise = torch.randn(len(whole(splits.val)[0]), 32, generator=torch.Generator().manual_seed(1998))
    with torch.no_grad():
        shown = drawing.grid(task.eval()(noise)[:32])
    assert torch.equal(after["val/digits"].data, shown.data)


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


@pytest.mark.slow
def test_a_gru_learns_to_turn_what_is_denied() -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    task = sentiment.Sentiment(width=32, dropout=0.0, lr=1e-2)
    short = [(sentiment.opinion(is_good, draw), int(is_good)) for is_good in 500 * [True, False]]
    samples = [(torch.tensor([sentiment.TOKENS[word] for word in text.split()]), label) for text, label in short]
    loader = Loader(samples, 50, shuffle=True, collate_fn=pad_collate, pure=True)
    result = fit(task, Splits(loader, loader), max_epochs=4)
    assert result.metrics["val/accuracy"] > 0.95


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


@pytest.mark.slow
def test_regression_learns_what_can_be_learned() -> None:
    torch.manual_seed(0)
    task, splits = forge.Trainer(recipe="regression").build()
    _, targets = whole(splits.train)
    assert isinstance(task, regression.Regression)
    assert task.mean == pytest.approx(float(targets.mean()), rel=0.01)
    assert task.std == pytest.approx(float(targets.std()), rel=0.05)
    result = fit(task, splits, max_epochs=10, plugins={"schedule": {"kind": "cosine"}})
    assert result.metrics["val/rmse"] < 3  # noise alone is 2
    assert result.metrics["val/r2"] > 0.9


# -- multilabel -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_multilabel_learns() -> None:
    torch.manual_seed(0)
    splits = multilabel.digit_pairs(2000, 300)
    task = multilabel.Multilabel(width=16, lr=1e-2)
    fit(task, splits, max_updates=120, validate_every=None)
    assert 0.6 < evaluate(task, splits)["val/f1"] < 1
