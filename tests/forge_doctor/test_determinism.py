"""forge determinism: planted nondeterminism is found, and the first tensor that differs is named."""

from __future__ import annotations

import os
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main, subprocesses, target
from forge.twin.compare import Difference, Distance
from forge_doctor.commands import determinism
from tests.conftest import Run
from tests.support.profiles import some

TASK = """
import os, time, uuid
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
import forge
from forge.data import Loader, Splits

def noise():
    return int.from_bytes(os.urandom(4), "little") / 2**32

class Sound(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(self.look(x)), y)

    def look(self, x):
        return x

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

class Random(Sound):
    def look(self, x):
        return x + noise()

class Clock(Sound):
    def training_step(self, batch):
        self.seen = time.time_ns()
        return super().training_step(batch) * (1 + 1e-9 * (self.seen % 1_000_000_007))

class Starts(Sound):
    def __init__(self):
        super().__init__()
        self.register_buffer("salt", torch.from_numpy(np.random.default_rng().normal(size=4)).float())

class Gradient(Sound):
    def __init__(self):
        super().__init__()
        self.net[0].bias.register_hook(lambda g: g + noise())

class Steps(Sound):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: self.net[4].bias.data.add_(noise()))
        return optimizer

class Reseeds(Sound):
    def training_step(self, batch):
        loss = super().training_step(batch)
        np.random.seed(int.from_bytes(os.urandom(3), "little"))
        return loss

class SetOrder(Sound):
    def look(self, x):
        names = {f"name {i}" for i in range(50)}
        return x * (1 + [*names].index("name 3"))

def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return Splits(train=Loader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), 8, shuffle=True))

def noisy():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) + noise()
    return Splits(train=Loader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), 8, shuffle=True))
"""


@pytest.fixture
def file(empty_folder: Path) -> Path:
    path = empty_folder / f"task_{empty_folder.name}.py"  # modules are kept by their name
    path.write_text(TASK)
    return path


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Both runs happen here, which is quick; what a process of its own would add is left to the long tests."""
    calls = []

    def run_verb(verb: str, args: Namespace, words: list[str], environment: dict[str, str], expected: int = 0) -> None:
        given = [*target.same_target(args), *words, "-p", "no:tensorboard", "-p", "no:progress"]
        calls.append((given, environment))
        assert determinism.run(determinism.parser().parse_intermixed_args(given)) == 0

    monkeypatch.setattr(subprocesses, "run_verb", run_verb)
    return calls


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """(exit code, output, messages), each on one line."""
    code = main(["determinism", *words])
    out, err = capsys.readouterr()
    return code, " ".join(out.split()), " ".join(err.split())


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("task", "found"),
    some(
        [
            ("Random", "at update 1, the output of net.0 (Linear) is the first value that differs, by about"),
            ("Clock", "at update 1, the loss (micro-batch 0) is the first value that differs: "),
            ("Starts", "before the first update, the initial buffer salt is the first value that differs"),
            ("Gradient", "at update 1, the gradient of net.0.bias is the first value that differs, by about"),
            ("Steps", "at update 1, the parameter net.4.bias after the update is the first value that differs"),
            (
                "Reseeds",
                "at update 1, the state of numpy's random numbers after the update is the first value that differs",
            ),
        ],
        quick=3,
    ),
)
def test_the_first_tensor_that_differs_is_named(capsys: Any, file: Path, task: str, found: str) -> None:
    code, out, _ = ask(capsys, f"{file}:{task}", "--updates", "3")
    assert code == 1
    assert f"Not the same: {found}" in out
    assert "Likely causes - " in out


@pytest.mark.usefixtures("in_this_process")
def test_data_that_differ_are_named_as_the_batch(capsys: Any, file: Path) -> None:
    code, out, _ = ask(capsys, f"{file}:Sound", "--data", f"{file}:noisy", "--updates", "2")
    assert code == 1
    assert "at update 1, the batch (micro-batch 0, batch[0]) is the first value that differs" in out
    assert "in the dataset, its transforms or the collate function" in out


@pytest.mark.usefixtures("in_this_process")
def test_an_attribute_that_differs_as_well_is_a_hint(capsys: Any, file: Path) -> None:
    _, out, _ = ask(capsys, f"{file}:Clock", "--updates", "2")
    assert "Attributes of the task outside its state_dict that differ as well: task.seen." in out


@pytest.mark.usefixtures("in_this_process")
def test_a_sound_task_is_told_what_was_compared(capsys: Any, file: Path) -> None:
    code, out, err = ask(capsys, f"{file}:Sound", "--updates", "5")
    assert code == 0
    assert "Bit for bit the same: two runs of 5 updates, each in a process of its own. Compared " in out
    assert "the recipe sets no seed, so every fit differs. Both runs use trainer.seed=0 here." in err


@pytest.mark.slow
def test_both_runs_get_the_same_words_and_another_order_of_sets(
    capsys: Any, file: Path, in_this_process: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    words = [f"{file}:Sound", "trainer.seed=7", "--updates", "1", "trainer.deterministic=true", "-p", "clip"]
    code, _, err = ask(capsys, *words, "--keep", "kept")
    assert code == 0
    assert "no seed" not in err
    (one, first), (other, second) = in_this_process
    assert one[:5] == other[:5] == [words[0], "trainer.seed=7", "trainer.deterministic=true", "-p", "clip"]
    assert first["PYTHONHASHSEED"] != second["PYTHONHASHSEED"]
    assert {path.name for path in Path("kept").iterdir()} == {"1", "2"}
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    ask(capsys, f"{file}:Sound", "--updates", "1")
    assert [environment["PYTHONHASHSEED"] for _, environment in in_this_process[2:]] == ["5", "5"]


def test_nothing_is_left_behind(capsys: Any, file: Path, in_this_process: list[Any]) -> None:
    ask(capsys, f"{file}:Sound", "--updates", "1")
    assert {path.name for path in Path.cwd().iterdir() if path.name != "__pycache__"} == {file.name}
    folder = Path(in_this_process[0][0][in_this_process[0][0].index("--life") + 1])
    assert not folder.parent.exists()


def test_a_mistake_is_told_before_anything_runs(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *words, **more: pytest.fail("a run began"))
    for words, said in (
        (["quickstart", "--updates", "0"], "--updates must be at least 1"),
        (["quickstart", "task.hiden=3"], "Did you mean 'hidden'?"),
    ):
        code, _, err = ask(capsys, *words)
        assert code == 2
        assert said in err


# -- likely causes ----------------------------------------------------------------------------------------------------


def causes(kind: str, apart: float, device: str = "cuda", deterministic: bool = False) -> list[str]:
    return determinism.causes(Difference(1, "x", Distance("", apart), kind), device, deterministic)


def test_a_tiny_difference_is_most_likely_a_kernel_and_a_large_one_something_that_is_not_seeded() -> None:
    assert causes("output", 1e-7)[0] == determinism.KERNEL
    assert causes("output", 1e-7, deterministic=True)[0] == determinism.EXTERNAL_KERNEL
    assert "os.urandom" in causes("output", 0.5)[0]


# -- in processes of their own ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("task", "code"), [("Sound", 0), ("SetOrder", 1)])
def test_only_a_process_of_its_own_shows_the_order_of_a_set(run_forge: Run, file: Path, task: str, code: int) -> None:
    os.environ.pop("PYTHONHASHSEED", None)
    done = run_forge("determinism", f"{file}:{task}", "--updates", "3")
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert "at update 1, the output of net.0 (Linear) is the first value that differs" in done.stdout
        assert "The order of a set" in done.stdout


@pytest.mark.slow
def test_a_run_that_fails_is_quoted(run_forge: Run, file: Path) -> None:
    file.write_text(TASK.replace("return x\n", "return x.clone().put_(torch.tensor([0]), torch.zeros(1))\n"))
    done = run_forge("determinism", f"{file}:Sound", "trainer.deterministic=true")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "This run ended with exit code 2" in done.stderr
    assert "deterministic=True, but put_ has no deterministic implementation." in done.stderr
