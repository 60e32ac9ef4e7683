"""Sweeps: trials are runs, the same after a kill; failures are reported; several processes share one."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

import forge
from forge.data import Splits
from forge.errors import ForgeError, RecipeError
from forge.runs.find import runs_in
from forge_sweep.space import parse_spaces
from forge_sweep.study import SweepPlan, SweepStudy
from forge_sweep.sweep import SweepResult
from tests.conftest import REPO
from tests.support import forked
from tests.support.logger_runs import bytes_below
from tests.support.patience import PATIENCE
from tests.support.tasks import Classifier, make_batches

optuna = pytest.importorskip("optuna")
SPACE = {"task.lr": "log(1e-3,1)", "task.hidden": "choice(4,8)"}
REMOVE = ["progress", "tensorboard"]
FAILS = 0.9


class Odd(Classifier):
    """Fails above a learning rate; is killed where a file says so, once."""

    def __init__(self, hidden: int = 8, lr: float = 0.1, fails: bool = False):
        super().__init__(hidden, lr)
        if fails and lr > FAILS:
            raise RuntimeError("the rate is too high")

    def training_step(self, batch: Any) -> Any:
        order = Path("kill.json")
        if order.exists() and self.trainer is not None and self.trainer.run_dir is not None:
            trial, update = json.loads(order.read_text())
            if self.trainer.run_dir.name == f"trial-{trial:04d}" and self.trainer.progress.update == update:
                order.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch)


def data() -> Splits:
    return Splits(train=make_batches(4), val=make_batches(2, seed=1))


OVERRIDES = ["trainer.max_epochs=3", "trainer.seed=3", "checkpoint.every=2 updates", "checkpoint.background=false"]


def sweep(folder: Path, space: Any = None, **options: Any) -> SweepResult:
    settings: dict[str, Any] = {"metric": "val/loss", "mode": "min", "trials": 4, "overrides": OVERRIDES, **options}
    return forge.sweep("default", space or SPACE, folder=folder, task=Odd, data=data, remove=REMOVE, **settings)


def table(result: SweepResult) -> list[tuple[Any, ...]]:
    return [(row.number, row.state, row.params, row.value, row.user_attrs) for row in result.trials]


def states(trials: list[Any]) -> str:
    return " ".join(trial.state.name for trial in trials)


def weights(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob("trial-*/weights.safetensors")}


def test_a_grid_tries_everything_and_trials_are_runs(tmp_path: Path) -> None:
    space = {"task.lr": "choice(0.1,0.01)", "task.hidden": "choice(4,8)"}
    found = sweep(tmp_path, space, trials=100, sampler="grid")
    assert [tuple(row.params.values()) for row in found.trials] == [(0.1, 4), (0.1, 8), (0.01, 4), (0.01, 8)]
    assert {run.path.name: run.status for run in runs_in(tmp_path)} == {f"trial-{n:04d}": "finished" for n in range(4)}
    for row in found.trials:  # the same by hand
        trainer = forge.Trainer(max_epochs=3, seed=3, run_dir=False)
        by_hand = trainer.fit(
            Odd(**{key.removeprefix("task."): v for key, v in row.params.items()}), data().train, data().val
        )
        assert row.value == by_hand.metrics["val/loss"]
    assert found.best == min(found.trials, key=lambda row: row.value or 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("prune", [False, True])
def test_a_killed_sweep_goes_on_with_the_same_trials(tmp_path: Path, empty_folder: Path, prune: bool) -> None:
    options: dict[str, Any] = {"trials": 13, "prune": prune}
    straight = sweep(tmp_path / "straight", **options)
    complete = [row.number for row in straight.trials if row.state.name == "COMPLETE"]
    assert (len(complete) < 13) is prune
    assert complete[-1] >= 10, "beyond the first ten, which are random"
    for order in ((2, 3), (complete[-1], 5)):
        Path("kill.json").write_text(json.dumps(order))
        gone = forked.call(partial(sweep, tmp_path / "cut", **options))
        assert gone.returncode == -signal.SIGKILL, gone.stderr
    cut = sweep(tmp_path / "cut", **options)
    assert table(cut) == table(straight)
    assert len({row.params["task.lr"] for row in cut.trials}) == 13
    assert weights(tmp_path / "cut") == weights(tmp_path / "straight")
    resumed = {run.path.name: run.card["resumed_from"] for run in runs_in(tmp_path / "cut")}
    assert resumed[f"trial-{complete[-1]:04d}"] == 4


def test_a_trial_killed_while_it_is_pruned_stays_pruned(tmp_path: Path) -> None:
    """The process dies after the decision, before the end of the trial is recorded."""
    plan = SweepPlan(parse_spaces(SPACE), "val/loss", "min", prune=True)
    study = SweepStudy(tmp_path, plan)
    for value in (1.0, 1.0, 1.0):
        claim = study.claim(4)
        assert claim is not None
        assert not study.report(claim, 4, value)
        study.finish(claim, value)
    claim = study.claim(4)
    assert claim is not None
    assert study.report(claim, 4, 5.0) == "pruned: val/loss is 5 at update 4"
    study.leave(claim)
    again = SweepStudy(tmp_path, plan).claim(4)
    assert again is not None
    assert (again.number, again.params, again.pruned) == (3, claim.params, True)
    study.finish(again, None)
    assert states(study.trials()) == "COMPLETE COMPLETE COMPLETE PRUNED"
    assert [trial.value for trial in study.trials()] == [1.0, 1.0, 1.0, 5.0]


@pytest.mark.slow
def test_a_trial_that_fails_is_reported_and_the_sweep_goes_on(tmp_path: Path) -> None:
    space = {"task.lr": "choice(0.1,0.95)", "task.hidden": "choice(4,8)"}
    found = sweep(tmp_path, space, trials=9, sampler="grid", overrides=[*OVERRIDES, "task.fails=true"])
    assert states(found.trials) == "COMPLETE COMPLETE FAIL FAIL"
    assert {row.user_attrs["reason"] for row in found.trials[2:]} == {"RuntimeError: the rate is too high"}
    assert 'raise RuntimeError("the rate' in (tmp_path / "trial-0002" / "output.txt").read_text()


@pytest.mark.slow
def test_a_complete_sweep_grows_and_repeats_nothing(tmp_path: Path) -> None:
    first = sweep(tmp_path, trials=2)
    again = sweep(tmp_path, trials=2)
    more = sweep(tmp_path, trials=3)
    assert table(again) == table(first) == table(more)[:2]
    assert len(more.trials) == 3


def test_a_metric_that_is_not_logged_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"no metric 'val/los'\. Did you mean 'val/loss'\?"):
        sweep(tmp_path, metric="val/los")
    assert len(list(tmp_path.glob("trial-*"))) == 1


def test_an_option_that_does_not_exist_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Did you mean 'hidden'"):
        sweep(tmp_path, {"task.hiden": "choice(4,8)"})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_sweep_is_refused(tmp_path: Path) -> None:
    sweep(tmp_path, trials=1)
    with pytest.raises(ForgeError, match="its seed is 0, not 1"):
        sweep(tmp_path, trials=1, seed=1)


def test_a_value_that_is_not_finite_is_a_failure(tmp_path: Path) -> None:
    plan = SweepPlan(parse_spaces(SPACE), "val/loss", "min")
    study = SweepStudy(tmp_path, plan)
    claim = study.claim(1)
    assert claim is not None
    study.finish(claim, float("nan"))
    assert states(study.trials()) == "FAIL"
    assert study.trials()[0].user_attrs["reason"] == "val/loss is nan"
    assert study.best() is None


def test_a_trial_is_taken_on_by_one_process_alone(tmp_path: Path) -> None:
    plan = SweepPlan(parse_spaces(SPACE), "val/loss", "min")
    here, there = SweepStudy(tmp_path, plan), SweepStudy(tmp_path, plan)
    one, other = here.claim(2), there.claim(2)
    assert one is not None
    assert other is not None
    assert (one.number, other.number) == (0, 1)
    assert here.claim(2) is None
    there.leave(other)  # as a process that died leaves it
    again = here.claim(2)
    assert again is not None
    assert (again.number, again.params) == (1, other.params)


@pytest.mark.slow
def test_two_processes_share_the_trials_of_a_sweep(tmp_path: Path, empty_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.forge_sweep.test_sweep import sweep\n"
        f"sweep(Path({str(tmp_path)!r}), trials=10)"
    )
    paths = os.pathsep.join([str(REPO), *sys.path])
    both = [forked.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}) for _ in range(2)]
    assert [process.wait(PATIENCE) for process in both] == [0, 0]
    found = sweep(tmp_path, trials=10)
    assert [(row.number, row.state.name) for row in found.trials] == [(n, "COMPLETE") for n in range(10)]
    holders = {run.path.name: len(run.attempts) for run in runs_in(tmp_path)}
    assert holders == {f"trial-{n:04d}": 0 for n in range(10)}, "no trial ran twice"


@pytest.mark.slow
def test_a_database_takes_the_trials_and_its_address_stays_out(tmp_path: Path, empty_folder: Path) -> None:
    url = f"sqlite:///{empty_folder / 'verysecret.db'}"
    found = sweep(tmp_path / "sweep", trials=2, storage=url)
    assert states(found.trials) == "COMPLETE COMPLETE"
    assert len(optuna.load_study(study_name="sweep", storage=url).trials) == 2
    assert b"verysecret" not in bytes_below(tmp_path / "sweep")


def test_the_dashboard_reads_a_sweep_as_it_is(tmp_path: Path) -> None:
    dashboard = pytest.importorskip("optuna_dashboard")
    found = sweep(tmp_path, {"task.lr": "choice(0.1,0.95)"}, sampler="grid", overrides=[*OVERRIDES, "task.fails=true"])
    before = found.journal.read_bytes()
    backend = optuna.storages.journal.JournalFileBackend(str(found.journal))
    app = dashboard.wsgi(optuna.storages.JournalStorage(backend))

    def get(path: str) -> Any:
        said: list[str] = []
        asked = {"PATH_INFO": path}
        setup_testing_defaults(asked)
        body = b"".join(app(asked, lambda status, *_: said.append(status)))
        assert said[0].startswith("200"), (path, said)
        return json.loads(body)

    (listed,) = get("/api/studies")["study_summaries"]
    trials = get(f"/api/studies/{listed['study_id']}")["trials"]
    assert [(trial["state"], trial.get("values")) for trial in trials] == [
        ("Complete", [found.trials[0].value]),
        ("Fail", None),
    ]
    assert found.journal.read_bytes() == before


def test_without_optuna_the_line_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ForgeError, match=r"pip install 'forge-trainer\[sweep\]'"):
        sweep(tmp_path)
