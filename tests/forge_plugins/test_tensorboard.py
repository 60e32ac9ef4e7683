"""tensorboard: what TensorBoard reads back is what was logged."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore[reportAttributeAccessIssue]

import forge
from forge.errors import StackError
from forge.testing import TinyTask, tiny_batches
from forge_plugins import Checkpoint, Clip, Guard, Schedule, Tensorboard
from tests.forge.snapshot.test_resume import PowerCut, cut_at
from tests.support.tasks import Classifier, fit, make_batches

hparams_api: Any = api_pb2  # whose classes are made as it is imported
Status = hparams_api.Status
EVERYTHING = {"scalars": 0, "images": 0, "histograms": 0, "text": 0, "hparams": 0}
"""No thinning out."""


def read(folder: Path) -> EventAccumulator:
    """The run as TensorBoard sees it."""
    events = EventAccumulator(
        str(folder / "tensorboard"), size_guidance=dict.fromkeys(["scalars", "images", "histograms"], 0)
    )
    events.Reload()
    return events


def hyperparameters_of(folder: Path) -> dict[str, HParamsPluginData]:
    """What the HPARAMS page reads, by tag."""
    found = read(folder).summary_metadata
    return {
        tag: HParamsPluginData.FromString(metadata.plugin_data.content)
        for tag, metadata in found.items()
        if metadata.plugin_data.plugin_name == "hparams"
    }


def text_of(events: EventAccumulator, tag: str) -> str:
    return events.Tensors(tag)[0].tensor_proto.string_val[0].decode()


class Board:
    """The runs below a folder as TensorBoard's pages get them, read anew with every `reload`."""

    def __init__(self, folder: Path):
        self._runs = EventMultiplexer(tensor_size_guidance=EVERYTHING).AddRunsFromDirectory(str(folder))
        self._provider = MultiplexerDataProvider(self._runs, str(folder))
        self.reload()

    def reload(self) -> None:
        self._runs.Reload()

    @property
    def provider(self) -> Any:
        return self._provider

    def shown(self) -> dict[str, list[tuple[int, Any]]]:
        """(update, content) of everything that is drawn or printed, by tag; of the only run there is."""
        here: dict[str, Any] = {"experiment_id": "", "downsample": 10**6}
        found: dict[str, list[tuple[int, Any]]] = {}
        scalars = self._provider.read_scalars(RequestContext(), plugin_name="scalars", **here)
        for points in scalars.values():
            found |= {tag: [(point.step, point.value) for point in series] for tag, series in points.items()}
        for kind in ("histograms", "text"):
            for points in self._provider.read_tensors(RequestContext(), plugin_name=kind, **here).values():
                found |= {tag: [(p.step, p.numpy.tolist()) for p in series] for tag, series in points.items()}
        images = self._provider.read_blob_sequences(RequestContext(), plugin_name="images", **here)
        for points in images.values():
            for tag, series in points.items():
                found[tag] = [(p.step, [self._blob(reference) for reference in p.values]) for p in series]
        return found

    def _blob(self, reference: Any) -> Any:
        return self._provider.read_blob(RequestContext(), blob_key=reference.blob_key)


@dataclass
class Session:
    """A row of the HPARAMS page."""

    values: dict[str, Any]
    metrics: dict[str, float]
    status: int


class Page:
    """The HPARAMS page of all runs below a folder."""

    def __init__(self, folder: Path):
        board = Board(folder)
        context = backend_context.Context(TBContext(data_provider=board.provider, logdir=str(folder)))
        everyone = [Status.STATUS_UNKNOWN, Status.STATUS_SUCCESS, Status.STATUS_FAILURE, Status.STATUS_RUNNING]
        request = hparams_api.ListSessionGroupsRequest(start_index=0, slice_size=100, allowed_statuses=everyone)
        answer = list_session_groups.Handler(RequestContext(), context, "", request).run()
        self.sessions: dict[str, Session] = {}
        for group in answer.session_groups:
            (session,) = group.sessions
            values = {name: value.number_value or value.string_value for name, value in group.hparams.items()}
            metrics = {metric.name.tag: metric.value for metric in session.metric_values}
            self.sessions[session.name] = Session(values, metrics, session.status)
        self.columns = {name for session in self.sessions.values() for name in session.values}
        self.metrics = {name for session in self.sessions.values() for name in session.metrics}


class Pictures(Classifier):
    """Logs more than numbers."""

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        return {
            "colour": forge.Image(torch.rand(3, 4, 5), "three channels"),
            "grey": forge.Image(torch.rand(4, 5, dtype=torch.bfloat16)),
            "bytes": forge.Image(torch.zeros(1, 4, 5, dtype=torch.uint8)),
            "note": forge.Text("**bold**"),
        }


def test_scalars_are_drawn_over_updates(tmp_path: Path) -> None:
    logged: dict[str, list[tuple[int, float]]] = {}

    class Keep(forge.Plugin):
        @forge.hookimpl
        def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
            for name, value in metrics.items():
                logged.setdefault(name, []).append((update, value))

    plugins = [Tensorboard(), Keep(), Clip()]
    fit(train=make_batches(6), val=make_batches(1), plugins=plugins, run_dir=tmp_path, log_every=2)
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == logged.keys()
    for name, points in logged.items():
        assert [(e.step, e.value) for e in events.Scalars(name)] == [(u, pytest.approx(v)) for u, v in points]


def test_images_of_every_form_arrive_with_their_size(tmp_path: Path) -> None:
    fit(Pictures(), val=make_batches(1), plugins=[Tensorboard()], run_dir=tmp_path)
    events = read(tmp_path)
    assert set(events.Tags()["images"]) == {"val/colour", "val/grey", "val/bytes"}
    assert {(e.height, e.width) for tag in events.Tags()["images"] for e in events.Images(tag)} == {(4, 5)}


def test_texts_and_captions_are_under_their_own_names(tmp_path: Path) -> None:
    fit(Pictures(), val=make_batches(1), plugins=[Tensorboard()], run_dir=tmp_path)
    events = read(tmp_path)
    assert text_of(events, "val/note") == "**bold**"
    assert text_of(events, "val/colour/caption") == "three channels"
    assert "val/grey/caption" not in events.Tags()["tensors"]


def test_the_run_card_is_there_as_text(tmp_path: Path) -> None:
    fit(plugins=[Tensorboard()], run_dir=tmp_path)
    shown = text_of(read(tmp_path), "card")
    for key, value in re.findall(r"^\| (.+?) \| (.+) \|$", (tmp_path / "card.md").read_text(), re.MULTILINE):
        assert f"- **{key}**: {value}\n" in shown
    assert "- **optimizer**: SGD" in shown
    assert "|" not in shown
    assert "1. **tensorboard**(flush_seconds=10)" in shown


def test_a_number_that_is_not_finite_is_written(tmp_path: Path) -> None:
    class Broken(Classifier):
        def training_step(self, batch: Any) -> Any:
            return {**super().training_step(batch), "odd": float("inf")}

    fit(Broken(), plugins=[Tensorboard()], run_dir=tmp_path)
    assert read(tmp_path).Scalars("train/odd")[0].value == float("inf")


class TestHyperparameters:
    def test_they_have_the_names_that_a_recipe_gives_them(self, tmp_path: Path) -> None:
        plugins = [Tensorboard(), Clip(0.5), Schedule("constant")]
        fit(Classifier(hidden=4, lr=0.25), plugins=plugins, run_dir=tmp_path, seed=3)
        values = hyperparameters_of(tmp_path)["_hparams_/session_start_info"].session_start_info.hparams
        assert values["task.hidden"].number_value == 4
        assert values["task.lr"].number_value == 0.25
        assert values["clip.max_norm"].number_value == 0.5
        assert values["schedule.kind"].string_value == "constant"
        assert values["trainer.seed"].number_value == 3

    def test_every_metric_of_the_fit_is_a_column(self, tmp_path: Path) -> None:
        result = fit(val=make_batches(1), plugins=[Tensorboard()], run_dir=tmp_path)
        (session,) = Page(tmp_path).sessions.values()
        assert session.metrics == pytest.approx(result.metrics)

    def test_a_fit_that_reached_its_end_was_a_success(self, tmp_path: Path) -> None:
        fit(plugins=[Tensorboard()], run_dir=tmp_path)
        (session,) = Page(tmp_path).sessions.values()
        assert session.status == Status.STATUS_SUCCESS


def test_a_failed_run_keeps_what_it_logged_and_closes_its_file(tmp_path: Path) -> None:
    plugin = Tensorboard()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Fails(), train=make_batches(6), plugins=[plugin], run_dir=tmp_path, log_every=1)
    assert [event.step for event in read(tmp_path).Scalars("train/loss")] == [1, 2, 3]
    assert plugin.opened is None


# ---------------------------------------------------------------------------------------------------------------------
# A run that was cut off


class Draws(TinyTask):
    """Logs everything that can be drawn, made of the weights, so that another course would show."""

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        weight = self.net[0].weight.detach()  # pyright: ignore[reportIndexIssue, reportAttributeAccessIssue]
        return {"picture": forge.Image(weight.sigmoid(), "weights"), "sum": forge.Text(f"{weight.sum():.9f}")}


@forge.on("step_end", every="2 updates")
def draws(step: forge.Step) -> None:
    step.trainer.publish({"weights": forge.Histogram.of(step.parameters()[0], 8)})


def live(folder: Path, *plugins: forge.Plugin, updates: int = 12, every: int = 3, **options: Any) -> None:
    """One life of a run, the first or one that continues it; it ends at the power cut or at its end."""
    options.setdefault("resume", "auto" if folder.exists() else None)
    saves = Checkpoint(every=f"{every} updates", background=False)
    settings: dict[str, Any] = {"max_updates": updates, "log_every": 1, "validate_every": "2 updates", **options}
    trainer = forge.Trainer(
        plugins=[Tensorboard(), saves, draws, *plugins], run_dir=folder, seed=0, device="cpu", **settings
    )
    with suppress(PowerCut):
        trainer.fit(Draws(), tiny_batches(), tiny_batches(seed=1))


def without_card(shown: dict[str, list[tuple[int, Any]]]) -> dict[str, list[tuple[int, Any]]]:
    return {tag: series for tag, series in shown.items() if tag != "card"}


@pytest.mark.parametrize(
    ("cuts", "every"),
    [
        pytest.param([8], 3, id="between two", marks=pytest.mark.slow),
        pytest.param([2], 3, id="before the first", marks=pytest.mark.slow),
        pytest.param([7, 8], 3, id="twice after one", marks=pytest.mark.slow),
        pytest.param([11, 5, 11], 4, id="again and again"),
        pytest.param([6], 6, id="right after one", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_cut_off_shows_every_update_once(tmp_path: Path, cuts: list[int], every: int) -> None:
    """A board that was open all the time shows a run of many lives as it shows one that never stopped."""
    live(tmp_path / "straight", every=every)
    for cut in cuts:
        live(tmp_path / "cut", cut_at(cut), every=every)
    watched = Board(tmp_path / "cut")
    live(tmp_path / "cut", every=every)
    watched.reload()
    expected, read_later = Board(tmp_path / "straight").shown(), Board(tmp_path / "cut").shown()
    assert [step for step, _ in expected["train/loss"]] == list(range(1, 13))
    assert without_card(read_later) == without_card(expected)
    assert without_card(watched.shown()) == without_card(expected)
    # the class that scripts read with shows the same, but never takes texts back
    events = read(tmp_path / "cut")
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))
    assert [event.step for event in events.Histograms("weights")] == [2, 4, 6, 8, 10, 12]
    assert [event.step for event in events.Images("val/picture")] == [2, 4, 6, 8, 10, 12]


def test_a_file_that_a_kill_has_torn_is_read_up_to_there(tmp_path: Path) -> None:
    live(tmp_path / "straight")
    live(tmp_path / "cut", cut_at(8))
    (file,) = (tmp_path / "cut" / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    live(tmp_path / "cut")
    cut, straight = (Board(tmp_path / name).shown() for name in ("cut", "straight"))
    assert without_card(cut) == without_card(straight)


def test_a_test_in_the_folder_of_a_fit_leaves_its_curves_alone(tmp_path: Path) -> None:
    fit(train=make_batches(3), plugins=[Tensorboard()], run_dir=tmp_path, log_every=1)
    forge.Trainer(plugins=[Tensorboard()], run_dir=tmp_path, device="cpu").test(Classifier(), make_batches(2))
    shown = Board(tmp_path).shown()
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3]
    assert [step for step, _ in shown["test/loss"]] == [3]


def test_a_rewind_takes_back_what_was_drawn_since(tmp_path: Path) -> None:
    class NotOften(Draws):
        def training_step(self, batch: Any) -> Any:
            assert self.trainer is not None
            out = super().training_step(batch)
            bad = self.trainer.progress.update == 7 and not self.trainer.skipped_windows
            return {**out, "loss": out["loss"] * math.nan} if bad else out

    saves = Checkpoint(every="5 updates", background=False)
    fit(
        NotOften(),
        tiny_batches(),
        tiny_batches(seed=1),
        plugins=[Tensorboard(), saves, draws, Guard("rewind")],
        run_dir=tmp_path,
        max_epochs=None,
        max_updates=12,
        log_every=1,
        validate_every="2 updates",
    )
    shown = Board(tmp_path).shown()
    # a window that is left out has nothing to log
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]
    assert all(math.isfinite(loss) for _, loss in shown["train/loss"])
    assert [step for step, _ in shown["val/picture"]] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in shown["val/sum"]] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in shown["weights"]] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in shown["card"]] == [0]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


class Fails(Classifier):
    """Fails in its fourth update."""

    def training_step(self, batch: Any) -> Any:
        if self.trainer is not None and self.trainer.progress.update == 3:
            raise RuntimeError("on purpose")
        return super().training_step(batch)


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
