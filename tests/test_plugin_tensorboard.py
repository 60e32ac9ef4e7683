"""tensorboard: what TensorBoard reads back is what was logged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore[reportAttributeAccessIssue]

import forge
from forge.env import Env
from forge_plugins import JSONL, Clip, Progress, Schedule, Tensorboard
from tests.conftest import Run
from tests.tasks import Classifier, fit, make_batches


def read(folder: Path) -> EventAccumulator:
    """The run as TensorBoard sees it."""
    events = EventAccumulator(str(folder / "tensorboard"))
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


def test_one_fit_is_one_run_in_one_file(tmp_path: Path) -> None:
    fit(val=make_batches(1), plugins=[Tensorboard()], run_dir=tmp_path)
    assert len([path for path in (tmp_path / "tensorboard").rglob("*") if path.is_file()]) == 1


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
    assert text_of(read(tmp_path), "run card") == (tmp_path / "card.md").read_text()


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

    def test_what_was_not_set_and_what_only_observes_is_left_out(self, tmp_path: Path) -> None:
        fit(plugins=[Tensorboard(), JSONL(), Progress()], run_dir=tmp_path)
        values = hyperparameters_of(tmp_path)["_hparams_/session_start_info"].session_start_info.hparams
        assert not [name for name in values if name.startswith(("progress", "tensorboard", "jsonl"))]
        assert "trainer.max_updates" not in values

    def test_every_metric_of_the_fit_is_a_column(self, tmp_path: Path) -> None:
        result = fit(val=make_batches(1), plugins=[Tensorboard()], run_dir=tmp_path)
        infos = hyperparameters_of(tmp_path)["_hparams_/experiment"].experiment.metric_infos
        assert {info.name.tag for info in infos} == result.metrics.keys()

    def test_a_value_of_any_type_becomes_one_that_can_be_shown(self, tmp_path: Path) -> None:
        class Odd(Classifier):
            def __init__(self, sizes: tuple[int, ...] = (1, 2), act: type = torch.nn.ReLU):
                super().__init__()

        fit(Odd(), plugins=[Tensorboard()], run_dir=tmp_path)
        values = hyperparameters_of(tmp_path)["_hparams_/session_start_info"].session_start_info.hparams
        assert values["task.sizes"].string_value == "[1, 2]"
        assert "ReLU" in values["task.act"].string_value

    def test_a_failed_run_has_them_too_but_no_end(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(Fails(), train=make_batches(6), plugins=[Tensorboard()], run_dir=tmp_path, log_every=1)
        assert set(hyperparameters_of(tmp_path)) == {"_hparams_/experiment", "_hparams_/session_start_info"}


def test_a_failed_run_keeps_what_it_logged_and_closes_its_file(tmp_path: Path) -> None:
    plugin = Tensorboard()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Fails(), train=make_batches(6), plugins=[plugin], run_dir=tmp_path, log_every=1)
    assert [event.step for event in read(tmp_path).Scalars("train/loss")] == [1, 2, 3]
    assert plugin._writer is None


def test_one_plugin_serves_several_runs(tmp_path: Path) -> None:
    plugin = Tensorboard()
    for name in ("first", "second"):
        fit(train=make_batches(2), plugins=[plugin], run_dir=tmp_path / name)
        assert [event.step for event in read(tmp_path / name).Scalars("train/loss")] == [2]


def test_a_test_writes_its_metrics_but_no_hyperparameters(tmp_path: Path) -> None:
    forge.Trainer(plugins=[Tensorboard()], run_dir=tmp_path, device="cpu").test(Classifier(), make_batches(2))
    assert read(tmp_path).Tags()["scalars"] == ["test/loss", "test/accuracy"]
    assert hyperparameters_of(tmp_path) == {}


def test_without_a_run_folder_nothing_is_written(empty_folder: Path) -> None:
    fit(plugins=[Tensorboard()], run_dir=False)
    assert list(empty_folder.iterdir()) == []


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    class SecondRank(forge.Plugin):
        @forge.hookimpl
        def forge_setup_env(self) -> Env:
            return Env("cpu", rank=1, world=2)

    fit(plugins=[Tensorboard(), SecondRank()], run_dir=tmp_path)
    assert not (tmp_path / "tensorboard").exists()


def test_importing_the_plugin_does_not_import_tensorboard(run_python: Run) -> None:
    code = "import sys, forge_plugins.tensorboard; print('tensorboard' in sys.modules)"
    done = run_python("-c", code, paths=[Path(path) for path in sys.path if path])
    assert done.stdout == "False\n", done.stderr


class Fails(Classifier):
    """Fails in its fourth update."""

    def training_step(self, batch: Any) -> Any:
        if self.trainer is not None and self.trainer.progress.update == 3:
            raise RuntimeError("on purpose")
        return super().training_step(batch)
