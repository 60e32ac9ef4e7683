"""checkpoint: what is saved when, what is kept, and what a failed write does."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.checkpoint import Checkpoints, publish, wait_until_written
from forge.checkpoint import StoredCheckpoint as SavedState
from forge_plugins.checkpoint import Checkpoint
from forge_plugins.checkpoint.kept import ranking
from tests.support.patience import PATIENCE
from tests.support.ranks import in_threads
from tests.support.tasks import Classifier, fit, make_batches


def kept(run: Path) -> list[int]:
    """The updates that a run has checkpoints of, each of them valid."""
    found = [SavedState(path) for path in Checkpoints(run / "checkpoints").all()]
    for checkpoint in found:
        checkpoint.verify()
    return [checkpoint.update for checkpoint in found]


def target(run: Path, name: str) -> int:
    """The update that a pointer leads to."""
    return SavedState.find(run / "checkpoints" / name).update


class Scores(Classifier):
    """Validates to a given row of scores, one after the other."""

    def __init__(self, scores: list[float]):
        super().__init__()
        self.scores = list(scores)

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        return {"score": self.scores.pop(0)}


def fit_scores(scores: list[float], run: Path, **options: Any) -> None:
    """Two updates an epoch, a validation after each, and nothing but the checkpoint plugin."""
    settings = {"every": None, "best": {"monitor": "val/score", "mode": "max"}, **options}
    fit(
        Scores(scores),
        train=make_batches(2),
        val=make_batches(1),
        max_epochs=len(scores),
        plugins=[Checkpoint(**settings)],
        run_dir=run,
    )


# -- when -------------------------------------------------------------------------------------------------------------


def test_by_default_epoch_ends_are_saved_and_two_kept(tmp_path: Path) -> None:
    fit(train=make_batches(3), max_epochs=4, plugins=[Checkpoint()], run_dir=tmp_path)
    assert kept(tmp_path) == [9, 12]
    assert target(tmp_path, "latest") == 12


def test_several_intervals_are_all_kept_to_and_the_end_is_saved(tmp_path: Path) -> None:
    plugin = Checkpoint(["3 updates", "1 epoch"], keep=9)
    fit(train=make_batches(5), max_updates=8, max_epochs=None, plugins=[plugin], run_dir=tmp_path)
    assert kept(tmp_path) == [3, 5, 6, 8]


def test_without_an_interval_only_the_end_is_saved(tmp_path: Path) -> None:
    fit(train=make_batches(3), max_epochs=2, plugins=[Checkpoint(every=None)], run_dir=tmp_path)
    assert kept(tmp_path) == [6]


def test_a_checkpoint_holds_the_state_of_its_update(tmp_path: Path) -> None:
    weights: dict[int, torch.Tensor] = {}

    @forge.on("boundary")
    def keep(trainer: forge.Trainer) -> None:
        weights[trainer.progress.update] = trainer.task.state_dict()["net.0.weight"].clone()

    plugins = [Checkpoint("1 updates", keep=9), keep]
    fit(train=make_batches(4), plugins=plugins, run_dir=tmp_path)
    for update in kept(tmp_path):
        tree = SavedState(Checkpoints(tmp_path / "checkpoints").path(update)).load()
        assert tree["progress"]["update"] == update
        assert torch.equal(tree["model"]["net.0.weight"], weights[update])


def test_without_a_run_folder_fit_warns_once(empty_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(train=make_batches(3), max_epochs=3, plugins=[Checkpoint()], run_dir=False)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "checkpoint: this fit has no run folder, so nothing will be saved."
    ]
    caplog.clear()
    forge.Trainer(plugins=[Checkpoint()], device="cpu").validate(Classifier(), make_batches(1))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert list(empty_folder.iterdir()) == []


def test_ranks_without_a_store_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(forge.StackError, match="2 ranks save their state together"):
        Play(Checkpoint(), tmp_path, rank=1, world=2)


@pytest.mark.parametrize("background", [True, False])
def test_all_ranks_decide_alike_and_only_rank_0_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    store, looked = torch.distributed.HashStore(), []
    from_rank_0: queue.Queue[Any] = queue.Queue()
    everything = Checkpoints.all
    monkeypatch.setattr(Checkpoints, "all", lambda self: looked.append(threading.get_ident()) or everything(self))
    scores = [0.5, 0.9, 0.1, 0.7]
    best = {"monitor": "val/score", "mode": "max"}
    # its options are read from their source once, and Python 3.11 parses badly in two threads at once
    Checkpoint(best=best)

    def live(rank: int) -> tuple[list[bool], dict[str, Any]]:
        def broadcast(value: Any) -> Any:
            if rank == 0:
                from_rank_0.put(value)
                return value
            return from_rank_0.get(timeout=PATIENCE)

        plugin = Checkpoint(every=None, keep=1, best=best, background=background)
        play = Play(plugin, tmp_path, rank=rank, world=2, store=store, broadcast=broadcast)
        plugin.forge_load_state_dict({**best, "best": [{"update": 1, "value": 9.0}]})  # of another folder
        asked = []
        for update, score in enumerate(scores, start=2):
            play.go_to(update)
            asked.append(play.validate(score))
            play.save()
        play.end()
        if rank == 1:
            assert threading.get_ident() not in looked
        return asked, plugin.forge_state_dict()

    def announced(rank: int) -> tuple[list[bool], dict[str, Any]]:
        try:
            return live(rank)
        except BaseException as error:
            store.set("forge/failure", f"rank {rank}: {error}")  # or the other rank would wait for it for half an hour
            raise

    first, second = in_threads(2, announced)
    assert first == second
    assert first[0] == [True, True, False, False]
    assert kept(tmp_path) == [3, 5]
    assert (target(tmp_path, "best"), target(tmp_path, "latest")) == (3, 5)


# -- best -------------------------------------------------------------------------------------------------------------


EACH = {"every": "1 epoch", "keep": 1}
SMALLEST = {"monitor": "val/score", "mode": "min"}
TWO = {"monitor": "val/score", "mode": "max", "keep": 2}


@pytest.mark.parametrize(
    ("scores", "options", "expected", "best"),
    [
        ([0.1, 0.9, 0.2, 0.3, 0.4], EACH, [4, 10], 4),
        ([0.3, 0.1, 0.2], {"keep": 1, "best": SMALLEST}, [4, 6], 4),
        ([0.5, 0.9, 0.1, 0.7, 0.2], {**EACH, "best": TWO}, [4, 8, 10], 4),
        ([0.5, 0.5, 0.5], {"keep": 1}, [2, 6], 2),
        ([math.nan, 0.1, math.inf, math.nan], {"keep": 1}, [4, 8], 4),
    ],
    ids=["however old", "the smallest", "several", "of equals the earlier", "never what is not finite"],
)
def test_the_best_is_kept(
    scores: list[float], options: dict[str, Any], expected: list[int], best: int, tmp_path: Path
) -> None:
    fit_scores(scores, tmp_path, **options)
    assert kept(tmp_path) == expected
    assert (target(tmp_path, "best"), target(tmp_path, "latest")) == (best, expected[-1])


def test_a_run_without_a_finite_value_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit_scores([math.nan, math.inf], tmp_path)
    assert [text for text in caplog.messages if "val/score" in text] == [
        "At update 2 val/score is nan. Such a value is never the best one.",
        "checkpoint.best compared nothing: val/score was never a finite number, so there is no best checkpoint.",
    ]
    assert not (tmp_path / "checkpoints" / "best").exists()


def test_an_absent_monitor_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(forge.RecipeError, match=r"'val/scor'.*Did you mean 'val/score'.*val/accuracy, val/loss"):
        fit_scores([0.1], tmp_path, best={"monitor": "val/scor", "mode": "max"})


def test_best_without_a_val_loader_is_refused_before_training(tmp_path: Path) -> None:
    plugin = Checkpoint(best={"monitor": "val/loss", "mode": "min"})
    with pytest.raises(forge.StackError, match="'val/loss', but this fit has no val loader"):
        fit(plugins=[plugin], run_dir=tmp_path)


def test_a_best_that_no_validation_can_give_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin = Checkpoint(best={"monitor": "val/loss", "mode": "min"})
    data: dict[str, Any] = {"train": make_batches(2), "val": make_batches(1), "plugins": [plugin]}
    fit(**data, validate_every="9 updates", run_dir=tmp_path / "short")
    assert caplog.messages == ["checkpoint.best compared nothing: this run ended before its first validation."]
    caplog.clear()
    fit(**data, validate_every=None, run_dir=tmp_path / "never")
    assert caplog.messages[0].startswith("checkpoint.best: validate_every is null")
    caplog.clear()
    fit(**data, validate_every="1 epoch", run_dir=tmp_path / "compared")
    assert caplog.messages == []


def test_a_best_of_another_life_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any) -> Any:
            raise RuntimeError("on purpose")

    plugin = Checkpoint(best={"monitor": "val/loss", "mode": "min"})
    data: dict[str, Any] = {"train": make_batches(2), "val": make_batches(1), "plugins": [plugin], "seed": 0}
    fit(**data, max_updates=2, max_epochs=None, run_dir=tmp_path)
    fit(**data, max_updates=3, max_epochs=None, run_dir=tmp_path, resume="auto")
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Fails(), **data, run_dir=tmp_path / "failed")
    assert "compared nothing" not in caplog.text


def test_the_best_so_far_is_carried_over_a_resume(tmp_path: Path) -> None:
    settings = {"every": "1 epoch", "keep": 1, "best": {"monitor": "val/score", "mode": "max"}}
    data: dict[str, Any] = {"train": make_batches(2), "val": make_batches(1), "run_dir": tmp_path}
    fit(Scores([0.9, 0.1]), max_epochs=2, seed=0, plugins=[Checkpoint(**settings)], **data)
    data["allow_inexact"] = True  # other scores are another job
    fit(Scores([0.5, 0.6]), max_epochs=4, seed=0, plugins=[Checkpoint(**settings)], resume="auto", **data)
    assert kept(tmp_path) == [2, 8]
    assert target(tmp_path, "best") == 2


def test_values_of_another_metric_are_not_carried_over(tmp_path: Path) -> None:
    data: dict[str, Any] = {"train": make_batches(2), "val": make_batches(1), "run_dir": tmp_path, "seed": 0}
    first = Checkpoint(every=None, best={"monitor": "val/score", "mode": "max"})
    fit(Scores([0.9]), max_epochs=1, plugins=[first], **data)
    second = Checkpoint(every=None, keep=1, best={"monitor": "val/score", "mode": "min"})
    fit(Scores([1.5]), max_epochs=2, plugins=[second], resume="auto", allow_inexact=True, **data)
    assert target(tmp_path, "best") == 4


def test_best_values_whose_checkpoint_is_gone_are_forgotten(tmp_path: Path) -> None:
    plugin, folder = Checkpoint(best={"monitor": "val/score", "mode": "max"}), Checkpoints(tmp_path / "checkpoints")
    run = Play(plugin, tmp_path)
    run.go_to(5)
    run.validate(0.9)
    run.save()
    run.end()
    state = plugin.forge_state_dict()
    folder.remove(folder.path(5))
    again = Play(Checkpoint(best={"monitor": "val/score", "mode": "max"}), tmp_path, resumed_from=5)
    again.plugin.forge_load_state_dict(state)
    again.go_to(6)
    assert again.validate(0.2)


# -- what is kept -----------------------------------------------------------------------------------------------------


class Play:
    """Drives a plugin through saves and validations as a Trainer would, without training anything."""

    def __init__(
        self,
        plugin: Checkpoint,
        run: Path,
        resumed_from: int | None = None,
        rank: int = 0,
        world: int = 1,
        store: Any = None,
        broadcast: Any = None,
    ):
        self.plugin, self.asked = plugin, False
        self.trainer: Any = SimpleNamespace(
            verb="fit",
            run_dir=run,
            loaders={"val": {}},
            validate_every=forge.Interval("1 epoch"),
            env=SimpleNamespace(is_main=rank == 0, rank=rank, world=world, store=store, broadcast=broadcast),
            progress=SimpleNamespace(update=0),
            resumed_from=resumed_from,
            request_checkpoint=self._ask,
        )
        plugin.forge_start(self.trainer)

    def _ask(self, reason: str, everywhere: bool, by: str) -> None:
        assert everywhere  # every rank comes to the same decision by itself
        self.asked = True

    def go_to(self, update: int) -> None:
        self.trainer.progress.update = update

    def validate(self, value: float) -> bool:
        """Whether a checkpoint was asked for."""
        self.asked = False
        around = self.plugin.forge_evaluate(self.trainer, "val")
        next(around)
        with pytest.raises(StopIteration):
            around.send({"val/score": value})
        return self.asked

    def save(self) -> None:
        update = self.trainer.progress.update
        self.plugin.forge_save(self.trainer, {"model": {"w": torch.full((2,), float(update))}})

    def wait(self) -> None:
        """Until the last save is on disk or has failed, which the plugin hears."""
        publisher = self.plugin._publisher
        assert publisher is not None
        self.plugin._hear(publisher.writer.wait)

    def end(self) -> None:
        self.plugin.forge_end(self.trainer)


MOMENTS = st.lists(
    st.tuples(
        st.integers(1, 3),  # updates that pass
        st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan, math.inf])),  # what a validation gives
        st.booleans(),  # whether an interval is due
        st.sampled_from([False, False, False, True]),  # whether the write fails
    ),
    max_size=12,
)


@given(
    MOMENTS,
    st.integers(1, 3),
    st.sampled_from([None, ("max", 1), ("min", 1), ("max", 2)]),
    st.booleans(),
)
def test_exactly_the_last_and_the_best_remain_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory,
    moments: list[tuple[int, float | None, bool, bool]],
    keep: int,
    best: tuple[str, int] | None,
    background: bool,
) -> None:
    run = tmp_path_factory.mktemp("run")
    wanted = {"monitor": "val/score", "mode": best[0], "keep": best[1]} if best else None
    plugin = Checkpoint(every=None, keep=keep, best=wanted, on_failure="warn", background=background)
    saved: list[int] = []
    values: dict[int, float] = {}

    def is_best(candidates: dict[int, float]) -> set[int]:
        return set(ranking(candidates, best[0])[: best[1]]) if best else set()

    with pytest.MonkeyPatch.context() as patch:
        broken = Broken(patch)
        watch_removals(patch, lambda: saved)
        play = Play(plugin, run)
        for passed, value, due, fails in moments:
            update = play.trainer.progress.update + passed
            play.go_to(update)
            asked = False
            if value is not None and best is not None:
                asked = play.validate(value)
                candidate = {**values, update: value} if math.isfinite(value) else {}
                assert asked == (update in is_best(candidate))
            if not (due or asked):
                continue
            broken.now = fails
            play.save()
            play.wait()
            if not fails:
                saved.append(update)
                if value is not None and math.isfinite(value):
                    values[update] = value
            assert set(kept(run)) == {*saved[-keep:], *is_best(values)}
        play.end()
    if saved:
        assert target(run, "latest") == saved[-1]
    if is_best(values):
        assert target(run, "best") == ranking(values, best[0] if best else "")[0]


class Broken:
    """A disk that is full for the checkpoints of some updates, or for all while `now` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, *updates: int):
        self.now = False
        write = publish.write_file

        def fail(path: Path, pieces: Any) -> Any:
            update = int(path.parent.name.split("-")[1].split(".")[0])
            if path.name == "model.safetensors" and (self.now or update in updates):
                raise OSError(28, "No space left on device")
            return write(path, pieces)

        patch.setattr(publish, "write_file", fail)


def watch_removals(patch: pytest.MonkeyPatch, published_before: Callable[[], list[int]]) -> None:
    """Fail when a checkpoint is removed before a newer one is there, whole."""
    remove = Checkpoints.remove

    def watched(self: Checkpoints, path: Path) -> None:
        newest = SavedState(self.all()[-1])
        newest.verify()
        assert newest.update > SavedState(path).update
        assert newest.update not in published_before(), "something was removed before the new one was published"
        remove(self, path)

    patch.setattr(Checkpoints, "remove", watched)


def test_what_a_resume_passed_over_neither_counts_nor_stays(tmp_path: Path) -> None:
    play = Play(Checkpoint(every=None, keep=2), tmp_path)
    for update in (10, 20, 30):
        play.go_to(update)
        play.save()
    play.end()
    assert kept(tmp_path) == [20, 30]
    again = Play(Checkpoint(every=None, keep=2), tmp_path, resumed_from=20)  # 30 was damaged, say
    again.go_to(35)
    again.save()
    again.end()
    assert kept(tmp_path) == [20, 35]


def test_leftovers_of_a_killed_run_are_swept_at_the_start(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".update-00000005.tmp-999999999-0123456789ab"
    left.mkdir(parents=True)
    Play(Checkpoint(), tmp_path)
    assert not left.exists()


# -- failed writes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_a_failed_write_stops_the_run_and_names_path_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    Broken(monkeypatch, 3)
    with pytest.raises(forge.CheckpointError, match=r"update-00000003 could not be written: No space left") as error:
        fit(train=make_batches(50), plugins=[Checkpoint("1 updates", background=background)], run_dir=tmp_path)
    assert "The checkpoint of update 3" in str(error.value)
    assert kept(tmp_path) == [1, 2]


def test_a_failed_write_stops_the_run_at_the_next_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Broken(monkeypatch, 3)
    plugin, seen = Checkpoint("3 updates"), []

    @forge.on("step_end")
    def wait(step: forge.Step) -> None:
        seen.append(step.index)
        wait_until_written()

    with pytest.raises(forge.CheckpointError, match="The checkpoint of update 3"):
        fit(train=make_batches(6), plugins=[plugin, wait], run_dir=tmp_path)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("background", [True, False])
def test_with_warn_a_failed_write_is_logged_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    Broken(monkeypatch, 3)
    plugin = Checkpoint("1 updates", background=background, on_failure="warn")
    result = fit(train=make_batches(5), plugins=[plugin], run_dir=tmp_path)
    assert result.updates == 5
    assert kept(tmp_path) == [4, 5]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert any("The checkpoint of update 3" in text and "No space left" in text for text in errors)


def test_a_write_that_fails_at_the_end_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Broken(monkeypatch).now = True
    with pytest.raises(forge.CheckpointError, match="The checkpoint of update 4"):
        fit(plugins=[Checkpoint(every=None)], run_dir=tmp_path)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("error", [OSError(13, "Permission denied"), forge.CheckpointError("It could not be removed.")])
def test_an_old_one_that_stays_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    background: bool,
    error: Exception,
) -> None:
    def refuse(self: Checkpoints, path: Path) -> None:
        raise error

    monkeypatch.setattr(Checkpoints, "remove", refuse)
    fit(train=make_batches(3), plugins=[Checkpoint("1 updates", keep=1, background=background)], run_dir=tmp_path)
    assert kept(tmp_path) == [1, 2, 3]
    assert "The checkpoint of update 2 is saved, but older ones could not be removed" in caplog.text
    assert "There is no checkpoint" not in caplog.text


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "checkpoint.keep is 0; it must be at least 1"),
        ({"best": {"monitor": "a", "mode": "max", "keep": 0}}, "checkpoint.best.keep is 0"),
        ({"best": {"monitor": "a"}}, "Best needs a value for 'mode'"),
        ({"best": {"monitor": "a", "mode": "biggest"}}, "mode is 'biggest'"),
        ({"every": "soon"}, "'soon' is not an interval"),
        ({"every": ["1 epoch", "now"]}, "'now' is not an interval"),
        ({"on_failure": "ignore"}, "'stop' or 'warn'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(forge.ForgeError, match=message):
        Checkpoint(**options)


def test_a_stack_without_best_wraps_nothing() -> None:
    assert Checkpoint().forge_evaluate is None


@pytest.mark.parametrize(("metric", "mode"), [("val/loss", "min"), ("val/accuracy", "max")])
def test_a_metric_alone_for_best_is_answered_with_the_right_form(metric: str, mode: str) -> None:
    form = rf"best: {{monitor: {metric}, mode: {mode}}}"
    with pytest.raises(forge.RecipeError, match=form):
        Checkpoint(best=metric)
    with pytest.raises(forge.RecipeError, match=form):
        forge.recipe("quickstart", [f"checkpoint.best={metric}"])
