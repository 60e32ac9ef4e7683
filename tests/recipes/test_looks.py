"""What an evaluation shows of a classifier is what a loop over the samples finds: counts, mistakes, points."""

from __future__ import annotations

import pytest
import torch

from forge.env import Env
from forge.metrics import drawing
from forge_recipes.looks import Looks

NAMES = ["ant", "bee", "cat"]


def evaluated(looks: Looks, samples: int = 90, batch: int = 40) -> tuple[torch.Tensor, ...]:
    images, labels = torch.rand(samples, 1, 8, 8), torch.randint(3, (samples,))
    logits, hidden = torch.randn(samples, 3), torch.randn(samples, 5)
    for start in range(0, samples, batch):
        looks.add(*(tensor[start : start + batch] for tensor in (images, labels, logits, hidden)))
    return images, labels, logits, hidden


def test_the_confusion_matrix_counts_every_sample() -> None:
    looks = Looks(NAMES)
    _, labels, logits, _ = evaluated(looks)
    expected = torch.zeros(3, 3, dtype=torch.int64)
    for label, said in zip(labels.tolist(), logits.argmax(1).tolist(), strict=True):
        expected[label, said] += 1
    assert looks._counts is not None
    assert torch.equal(looks._counts.view(3, 3), expected)
    shown = looks.finish(Env("cpu"))["confusion"]
    assert torch.equal(shown.data, drawing.confusion(expected, NAMES).data)


def test_the_mistakes_are_those_it_was_surest_of() -> None:
    looks = Looks(NAMES, shown=6)
    images, labels, logits, _ = evaluated(looks)
    sure, said = logits.softmax(1).max(1)
    wrong = [i for i in sure.argsort(descending=True).tolist() if said[i] != labels[i]][:6]
    captions = [f"{NAMES[int(labels[i])]}\nnot {NAMES[int(said[i])]}" for i in wrong]
    expected = drawing.grid(images[wrong], captions)
    assert torch.equal(looks.finish(Env("cpu"))["mistakes"].data, expected.data)


def test_without_pillow_there_are_points_but_no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_recipes.looks.find_spec", lambda name: None)
    looks = Looks(NAMES)
    evaluated(looks)
    assert looks.finish(Env("cpu")).keys() == {"embedding"}
