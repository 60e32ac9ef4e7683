"""Arguments from Lightning and Hugging Face are answered with what does the same here."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import forge
from forge import options, registry
from forge.config.trainer_defaults import Settings
from forge.testing import TinyTask
from forge_lightning.hints import INSTEAD, TRAINER, VERBS
from tests.forge.diagnose.test_explain import notes_of
from tests.support.tasks import Classifier, fit

ROOT = Path(__file__).resolve().parents[2]
OURS = {field.name for field in dataclasses.fields(Settings)} | {"recipe", "plugins"}


def test_every_argument_of_lightnings_trainer_is_answered() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    theirs = [*inspect.signature(lightning.Trainer).parameters]
    assert "gradient_clip_val" in theirs
    for name in theirs:
        if name not in OURS:
            given: dict[str, Any] = {name: 1}
            with pytest.raises(TypeError, match=rf"takes no argument '{name}'\. Use .+ \(docs/.+\.md\)\."):
                forge.Trainer(**given)


def test_every_argument_of_lightnings_verbs_is_answered() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    for verb in ("fit", "validate", "test", "predict"):
        for name in [*inspect.signature(getattr(lightning.Trainer, verb)).parameters][1:]:
            given: dict[str, Any] = {name: None}
            with pytest.raises(TypeError, match=rf"Trainer\.{verb} takes no argument '{name}'\. Use .+ \(docs/"):
                getattr(forge.Trainer(plugins=[]), verb)(**given)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gradient_clip_val", r"plugins=\{'clip': \{'max_norm': \.\.\.\}\} \(docs/plugins/clip\.md\)"),
        ("per_device_train_batch_size", r"on the loader .* \(docs/data\.md\)"),
        ("fast_dev_run", "smoke=True"),
    ],
)
def test_an_answer_names_the_plugin_and_the_page(name: str, answer: str) -> None:
    given: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=answer):
        forge.Trainer(**given)


def test_answers_name_pages_and_options_that_exist() -> None:
    for name, (answer, page) in {**TRAINER, **VERBS}.items():
        assert (ROOT / page).is_file(), f"{name}: {page}"
        for plugin, option in re.findall(r"plugins=\{'(\w+)': \{'(\w+)'", answer):
            known = [o.name for o in options.of_config(registry.load("plugin", plugin).Config)]
            assert option in known, f"{name}: {plugin}.{option}"
        for plugin in re.findall(r"plugins=\['(\w+)'", answer):
            assert plugin in registry.installed("plugin")


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_each_attribute_of_a_lightning_module_is_no_ones_here(name: str) -> None:
    assert not hasattr(TinyTask, name)


def test_self_log_is_answered_with_what_to_write() -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any) -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)  # pyright: ignore[reportCallIssue]
            return loss

    task = Logs()
    assert not hasattr(task, "log")
    assert getattr(task, "log", None) is None
    where, instead = notes_of(lambda: fit(task))
    assert where.startswith("forge: raised in Logs.training_step")
    assert instead.startswith('forge: A TaskModule has no self.log: return {"loss": loss, "name": value} from the step')


def test_save_hyperparameters_is_answered_where_the_task_is_made() -> None:
    class Saves(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()  # pyright: ignore[reportCallIssue]

    (instead,) = notes_of(Saves)
    assert "A TaskModule has no self.save_hyperparameters: leave it out: `self.init_args`" in instead
