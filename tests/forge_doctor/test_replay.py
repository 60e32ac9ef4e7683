"""forge replay: the same window, the same finding, and nothing run that the bundle only names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.checkpoint import StoredCheckpoint as SavedState
from forge.checkpoint import write_checkpoint
from forge.cli import main
from forge.config import load_recipe
from forge.errors import NonFiniteError
from forge.testing import tiny_batches
from forge_plugins import Accumulate, Anomaly, Clip, Guard

TASK = """
import torch
from torch import nn
import torch.nn.functional as F
import forge

class Unlucky(forge.TaskModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 3))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def training_step(self, batch):
        x, y = batch
        self.scale.mul_(0.5)
        lucky = torch.rand(len(x), 1) > 0.03
        return F.cross_entropy(self.net(x) / (lucky * self.scale), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Players(Unlucky):
    def training_step(self, batch, name):
        loss = super().training_step(batch)
        return loss if name == "second" else self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return {"first": torch.optim.SGD(self.net[:2].parameters(), lr=0.1),
                "second": torch.optim.SGD(self.net[3].parameters(), lr=0.1)}

class Wrapped(Unlucky):
    def __init__(self, net):
        super().__init__(5)
        self.net = net

def wrapped():
    return Wrapped(Unlucky(5).net)
"""


def task_class(name: str = "Unlucky") -> Any:
    from forge.cli import target

    Path("unlucky.py").write_text(TASK)
    return target.task_maker(f"unlucky.py:{name}")[0]


def make_bundle(task: Any = None, plugins: list[Any] | None = None, train: Any = None, **options: Any) -> Path:
    """Train until it fails; the bundle it leaves."""
    anomaly = Anomaly()
    stack = [*(plugins or []), anomaly]
    trainer = forge.Trainer(plugins=stack, **{"max_epochs": 9, "seed": 1, "run_dir": "run", "device": "cpu", **options})
    with pytest.raises(NonFiniteError):
        trainer.fit(task or task_class()(width=5), train or tiny_batches([8] * 5))
    (bundle,) = Path("run/anomaly").iterdir()
    return bundle


def change(bundle: Path, **parts: Any) -> None:
    write_checkpoint(bundle, {**SavedState(bundle).load(), **parts})


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the verb: (exit code, everything it printed)."""

    def run(*words: str) -> tuple[int, str]:
        code = main(["replay", *words])
        out, err = capsys.readouterr()
        return code, out + err

    return run


@pytest.mark.parametrize("window", [1, 3])
def test_the_same_window_gives_the_same_finding(replay: Any, window: int) -> None:
    bundle = make_bundle(plugins=[Guard(), Accumulate(window), Clip(1.0)])
    finding = SavedState(bundle).load()["finding"]
    code, text = replay(str(bundle), "--task", "unlucky.py:Unlucky")
    assert code == 0
    assert "Reproduced exactly." in text
    assert f"update {finding['update']} (epoch {finding['epoch']}): the loss is" in text
    assert "infinity from div in the task (Unlucky)" in text
    assert "unlucky.py:17 in training_step" in text


def test_the_turn_of_one_of_several_optimizers_is_run_again(replay: Any) -> None:
    bundle = make_bundle(task_class("Players")())
    assert SavedState(bundle).load()["turn"] == "second"
    code, text = replay(str(bundle), "--task", "unlucky.py:Players")
    assert code == 0, text
    assert "optimizer 'second'" in text


def test_a_function_makes_a_task_that_no_file_can_hold(replay: Any) -> None:
    bundle = make_bundle(task_class("wrapped")())
    code, text = replay(str(bundle), "--task", "unlucky.py:Wrapped")
    assert (code, "a function that makes it" in text) == (2, True)
    code, text = replay(str(bundle), "--task", "unlucky.py:wrapped")
    assert (code, "Reproduced exactly." in text) == (0, True), text


def test_samples_are_those_of_the_run_not_places_in_the_window(replay: Any) -> None:
    inputs, labels = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(40, dtype=torch.long)
    inputs[33] = math.nan
    loader = forge.data.Loader(torch.utils.data.TensorDataset(inputs, labels), 4, shuffle=True, seed=3)
    bundle = make_bundle(train=loader)
    if SavedState(bundle).load()["finding"]["kind"] != "batch":
        pytest.fail("the task's own bad luck came first: choose another seed")
    code, text = replay(str(bundle), "--task", "unlucky.py:Unlucky")
    assert code == 0
    assert "index 33 of the dataset" in text


def test_a_task_that_is_installed_needs_no_file(replay: Any) -> None:
    recipe = load_recipe("quickstart", ["task.hidden=8", "trainer.seed=0"], remove=["progress", "jsonl", "tensorboard"])
    images, labels = torch.zeros(4, 8, 8), torch.zeros(4, dtype=torch.long)
    images[2] = math.inf
    anomaly = Anomaly()
    trainer = forge.Trainer(recipe=recipe, plugins=[anomaly], run_dir="run", device="cpu")
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(recipe.make_task(), [(images, labels)])
    bundle = "run/anomaly/update-00000000"
    assert f"forge replay {bundle}" in caught.value.__notes__[0]
    assert "--task" not in caught.value.__notes__[0]
    code, text = replay(bundle)
    assert code == 0, text


def test_other_weights_are_not_the_same_finding(replay: Any) -> None:
    bundle = make_bundle()
    weights = SavedState(bundle).load()["model"]
    change(bundle, model={name: value * 2 for name, value in weights.items()})
    code, text = replay(str(bundle), "--task", "unlucky.py:Unlucky")
    assert code == 1
    assert "Not reproduced exactly. Recorded:" in text


def test_a_window_that_is_finite_now_is_not_reproduced(replay: Any) -> None:
    bundle = make_bundle()
    Path("unlucky.py").write_text(TASK.replace("> 0.03", "> -1.0"))
    from forge.cli import target

    target._imported.clear()
    code, text = replay(str(bundle), "--task", "unlucky.py:Unlucky")
    assert code == 1
    assert "This time everything is finite." in text


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_task_of_ones_own_must_be_named(replay: Any) -> None:
    code, text = replay(str(make_bundle()))
    assert code == 2
    assert "'Unlucky' is not installed by name: add --task FILE.py:Task" in text


def test_a_bundle_that_was_tampered_with_is_refused(replay: Any) -> None:
    bundle = make_bundle()
    state = bundle / "state.json"
    state.chmod(0o600)
    state.write_text(state.read_text().replace("Unlucky", "Lucky"))
    code, text = replay(str(bundle), "--task", "unlucky.py:Unlucky")
    assert code == 2
    assert "error:" in text


def test_a_checkpoint_is_no_bundle(replay: Any) -> None:
    write_checkpoint(Path("update-00000001"), {"model": {"w": torch.zeros(1)}, "progress": {"update": 1}})
    code, text = replay("update-00000001")
    assert code == 2
    assert "is no replay bundle" in text


def test_a_bundle_without_batches_says_so(replay: Any) -> None:
    bundle = make_bundle()
    change(bundle, window=None, indices=[[4, 2]])
    code, text = replay(str(bundle), "--task", "unlucky.py:Unlucky")
    assert code == 2
    assert "has no batches" in text
    assert "[[4, 2]]" in text


def test_another_task_is_told_that_the_weights_do_not_fit(replay: Any) -> None:
    bundle = make_bundle()
    change(bundle, task={**SavedState(bundle).load()["task"], "options": {"width": 7}})
    code, text = replay(str(bundle), "--task", "unlucky.py:Unlucky")
    assert code == 2
    assert "do not fit Unlucky" in text


def test_names_in_a_bundle_are_looked_up_never_imported(replay: Any) -> None:
    Path("evil.py").write_text("open('ran', 'w').close()")
    bundle = make_bundle()
    tree = SavedState(bundle).load()
    names = ["evil", "evil:Plugin", "unlucky.py:Unlucky", "os.system"]
    evil = [{"name": name, "observer": False, "options": {}} for name in names]
    change(bundle, stack=[*tree["stack"], *evil], task={**tree["task"], "class": "evil:Task"})
    code, text = replay(str(bundle), "--task", "unlucky.py:Unlucky")
    assert code == 0, text
    assert all(f"{name!r} is not installed: it is left out" in text for name in names)
    change(bundle, recipe={"task": {"name": "evil:Task"}})
    code, text = replay(str(bundle))
    assert code == 2
    assert "No task is called 'evil:Task'" in text
    assert not Path("ran").exists()


@pytest.mark.parametrize("folder", ["run", "run/anomaly"])
def test_a_run_folder_is_answered_with_its_bundles(replay: Any, folder: str) -> None:
    bundle = make_bundle()
    code, text = replay(folder)
    assert code == 2
    assert f"{folder} is no replay bundle. Bundles in run/anomaly:\n  {bundle}" in text
    assert f"  {bundle}\n" in text


def test_a_bundle_that_is_not_there_is_called_one(replay: Any) -> None:
    code, text = replay("nosuch")
    assert code == 2
    assert "No replay bundle nosuch. Bundles are RUN/anomaly/update-XXXXXXXX, written by the plugin anomaly." in text
    bundle = make_bundle()
    code, text = replay("run/anomaly/update-99999999")
    assert code == 2
    assert f"No replay bundle run/anomaly/update-99999999. Bundles in run/anomaly:\n  {bundle}\n" in text
    code, text = replay("unlucky.py")
    assert code == 2
    assert "unlucky.py is a file, no replay bundle." in text


def test_a_run_folder_without_bundles_says_so(replay: Any, empty_folder: Path) -> None:
    (empty_folder / "run").mkdir()
    code, text = replay("run")
    assert code == 2
    assert "run is no replay bundle. Bundles are RUN/anomaly/update-XXXXXXXX" in text
