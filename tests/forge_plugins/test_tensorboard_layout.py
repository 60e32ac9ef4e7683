"""The layout of TensorBoard's CUSTOM SCALARS page: what belongs together stands in one chart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin

import forge
from forge.errors import StackError
from forge_plugins import Tensorboard
from tests.support.tasks import Classifier, fit, make_batches

Shown = dict[str, dict[str, list[str]]]


def page(folder: Path) -> dict[str, dict[str, str]]:
    """Sections, titles and patterns as TensorBoard's page gets them, of all runs below a folder."""
    runs = EventMultiplexer().AddRunsFromDirectory(str(folder))
    runs.Reload()
    provider = MultiplexerDataProvider(runs, str(folder))
    answer: Any = CustomScalarsPlugin(TBContext(data_provider=provider)).layout_impl(RequestContext(), "")
    answer = json.loads(answer) if isinstance(answer, str) else answer
    return {
        section["title"]: {chart["title"]: "".join(chart["multiline"]["tag"]) for chart in section["chart"]}
        for section in answer.get("category", [])
    }


def drawn(folder: Path) -> Shown:
    """The names that are drawn in each chart, found as TensorBoard finds them."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    return {
        section: {title: [name for name in names if re.match(pattern, name)] for title, pattern in charts.items()}
        for section, charts in page(folder).items()
    }


def test_a_metric_of_both_stages_has_one_chart_loss_first(tmp_path: Path) -> None:
    fit(val=make_batches(1), plugins=[Tensorboard()], run_dir=tmp_path)
    shown = drawn(tmp_path)["training and validation"]
    assert list(shown) == ["loss", "accuracy"]
    assert shown["loss"] == ["train/loss", "val/loss"]
    assert shown["accuracy"] == ["train/accuracy", "val/accuracy"]


def test_a_metric_of_one_stage_alone_has_no_such_chart(tmp_path: Path) -> None:
    class Own(Classifier):
        def training_step(self, batch: Any) -> Any:
            return {**super().training_step(batch), "entropy (bits)": 1.0}

        def validation_step(self, batch: Any) -> Any:
            return {"f1": 0.5}

    fit(Own(), val=make_batches(1), plugins=[Tensorboard()], run_dir=tmp_path)
    assert "training and validation" not in drawn(tmp_path)


def test_a_plugin_of_a_third_party_declares_charts_of_its_own(tmp_path: Path) -> None:
    class Noise(forge.Plugin):
        """Log a number."""

        observer = True
        charts = {"noise/how loud": r"noise/(low|high)"}

        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            for name in ("low", "high", "higher"):
                step.record(f"noise/{name}", 1.0)

    fit(plugins=[Noise(), Tensorboard()], run_dir=tmp_path)
    assert drawn(tmp_path)["noise"] == {"how loud": ["noise/low", "noise/high"]}


@pytest.mark.parametrize(
    ("charts", "said"),
    [({"loud": "x"}, "write its section and its title"), ({"noise/loud": "("}, "which is no regular expression: ")],
)
def test_a_chart_that_cannot_be_drawn_is_refused_before_the_run(charts: dict[str, str], said: str) -> None:
    class Noise(forge.Plugin):
        """Nothing."""

    Noise.charts = charts
    with pytest.raises(StackError, match=said):
        fit(plugins=[Noise()])
