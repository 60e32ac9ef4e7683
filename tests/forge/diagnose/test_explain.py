"""Where an error came from: the stage that ran, whatever its method is called; and what to write for a habit."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

import forge
from forge_plugins import Accumulate
from tests.support.tasks import Classifier, fit, make_batches


def notes_of(call: Any) -> list[str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value.__notes__


def where_of(call: Any) -> str:
    """The note that names stage and update, which is the first."""
    return notes_of(call)[0]


def breaks_at(batch: int, count: int = 3) -> Any:
    """Batches of which one has a wrong width."""
    batches = make_batches(count)
    batches[batch] = (batches[batch][0][:, :5], batches[batch][1])
    return batches


def trainer(**options: Any) -> forge.Trainer:
    return forge.Trainer(max_epochs=1, plugins=[], run_dir=False, **options)


def test_an_error_in_validation_is_named_after_its_stage() -> None:
    where = (
        "forge: raised in Classifier.validation_step (which is training_step), in validation after update 4, batch 2."
    )
    assert where_of(lambda: fit(val=breaks_at(1))) == where


def test_it_names_the_loader_and_outside_a_fit_no_update() -> None:
    def validate() -> None:
        trainer().validate(Classifier(), {"easy": make_batches(), "hard": breaks_at(2)})

    where = "forge: raised in Classifier.validation_step (which is training_step), in validation, batch 3 of 'hard'."
    assert where_of(validate) == where
    assert where_of(lambda: trainer().predict(Classifier(), breaks_at(0))) == (
        "forge: raised in Classifier.predict_step, in prediction, batch 1."
    )


def test_training_is_named_where_self_has_another_name() -> None:
    class Short(Classifier):
        def training_step(s, batch: Any) -> Any:  # pyright: ignore[reportSelfClsParameterName]
            return F.cross_entropy(s.net(batch[0]), batch[1])

    nameless = type("Nameless", (Classifier,), {"training_step": lambda s, b: F.cross_entropy(s(b[0]), b[1])})
    for task in (Short(), nameless()):
        assert where_of(lambda task=task: fit(task, breaks_at(3, 4), plugins=[Accumulate(2)])) == (
            f"forge: raised in {type(task).__name__}.training_step, at update 1, epoch 0, micro-batch 2 of 2."
        )
