"""`forge.load`: a run's trained task in plain code, with the weights that one wants."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import forge
from forge.runs.trained_task import find
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import EMA, Checkpoint
from forge_recipes.digits import DigitsMLP, digits
from tests.forge.contract.test_frozen import Adapted, Student, teacher
from tests.support import forked
from tests.support.patience import PATIENCE
from tests.support.ships import Classifier, batches, trained_run


class Unique(Classifier):
    """A task of this module; no other is called so."""


def test_a_run_is_loaded_in_eval_mode_with_its_weights(tmp_path: Path) -> None:
    task = trained_run(tmp_path / "run").eval()
    loaded = forge.load(tmp_path / "run", Classifier)
    images = batches(5)[0][0]
    assert not loaded.training
    assert torch.equal(loaded(images), task(images))


def test_of_a_folder_of_runs_the_newest_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained_run(tmp_path / "group" / "first", Checkpoint(every="2 updates"))
    task = trained_run(tmp_path / "group" / "second", Checkpoint(every="2 updates"))
    with caplog.at_level("INFO", "forge"):
        source = find(tmp_path / "group", Classifier)
    assert (source.run, source.path) == ("second", tmp_path / "group" / "second")
    assert torch.equal(source.task.last.weight, task.last.weight)
    assert "the newest is taken" in caplog.text


def test_the_best_checkpoint_and_its_average_come_first(tmp_path: Path) -> None:
    best = {"monitor": "val/loss", "mode": "min"}
    task = trained_run(tmp_path / "run", EMA(0.5), Checkpoint(every="2 updates", best=best))
    found = {weights: find(tmp_path / "run", Classifier, weights) for weights in (None, "raw", "ema", "best")}
    assert {str(key): source.weights for key, source in found.items()} == {
        "None": "best, ema",
        "raw": "raw",
        "ema": "ema",
        "best": "best, ema",
    }
    raw, average = (found[name].task.last.weight for name in ("raw", "ema"))
    assert torch.equal(raw, task.last.weight)
    assert not torch.equal(raw, average)
    assert torch.equal(found["best"].task.last.weight, average)  # the last update is the best here
    checkpoint = find(tmp_path / "run" / "checkpoints" / "latest", Classifier, "raw")
    assert torch.equal(checkpoint.task.last.weight, raw)


def test_a_link_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    trained_run(tmp_path / "run", Checkpoint(every="2 updates", best={"monitor": "val/loss", "mode": "min"}))
    trained_run(tmp_path / "other", Checkpoint(every="2 updates"))
    link = tmp_path / "run" / "checkpoints" / "best"
    link.unlink()
    link.symlink_to(next((tmp_path / "other" / "checkpoints").glob("update-*")).resolve())
    assert find(tmp_path / "run", Classifier).weights == "raw"


@pytest.mark.parametrize(
    ("weights", "said"), [("best", "no best checkpoint"), ("ema", "'ema'"), ("nothing", "'nothing'")]
)
def test_weights_that_are_not_there_are_refused(weights: str, said: str, tmp_path: Path) -> None:
    trained_run(tmp_path / "run", Checkpoint(every="2 updates"))
    with pytest.raises(forge.ForgeError, match=said):
        forge.load(tmp_path / "run", Classifier, weights=weights)


def test_a_task_that_is_unknown_here_must_be_named(tmp_path: Path) -> None:
    class Local(Classifier):
        """No module holds it."""

    trained_run(tmp_path / "run", task=Local())
    with pytest.raises(forge.ForgeError, match=r"The task Local .* task=Local\), or add --task FILE.py:Task"):
        forge.load(tmp_path / "run")
    assert isinstance(forge.load(tmp_path / "run", task=Local), Local)


def test_an_imported_class_is_found_by_name(tmp_path: Path) -> None:
    trained_run(tmp_path / "run", task=Unique())
    assert type(forge.load(tmp_path / "run")) is Unique


def test_a_class_defined_again_is_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_run(tmp_path / "run", task=Unique())
    again = type("Unique", (Classifier,), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Unique", again)
    assert type(forge.load(tmp_path / "run")) is again


def test_two_classes_of_one_name_must_be_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_run(tmp_path / "run", task=Unique())
    other = types.ModuleType("another_module")
    other.Unique = type("Unique", (Classifier,), {"__module__": other.__name__})  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, other.__name__, other)
    with pytest.raises(
        forge.ForgeError, match=r"tests.forge.runs.test_load.Unique and another_module.Unique: pass the class"
    ):
        forge.load(tmp_path / "run")


def test_a_task_fitted_from_python_is_found_where_installed(tmp_path: Path) -> None:
    """In a process that has not imported it."""
    data = digits().train
    forge.Trainer(max_updates=2, device="cpu", run_dir=tmp_path / "run").fit(DigitsMLP(hidden=8), data)
    code = """if True:
        import sys
        for name in [name for name in sys.modules if name.startswith("forge_recipes")]:
            del sys.modules[name]
        import forge
        assert forge.load("run").net[1].out_features == 8
    """
    done = forked.run([sys.executable, "-c", code], cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def test_a_strangers_module_is_not_imported(tmp_path: Path) -> None:
    """The class in a run folder is a name, whatever it looks like."""
    trained_run(tmp_path / "run", task=Unique())
    for file in ("card.json", "weights.safetensors"):
        path = tmp_path / "run" / file
        path.write_bytes(path.read_bytes().replace(b"Unique", b"os.sys"))
    with pytest.raises(forge.ForgeError, match=r"The task os.sys"):
        forge.load(tmp_path / "run")


# -- what the run did not save ----------------------------------------------------------------------------------------


class Taught(Student):
    """Of this module, so that a load finds it by name."""


class DrawnBySeed(TinyTask):
    """Its teacher has weights by chance, as that of random network distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = forge.frozen(torch.nn.Linear(6, 3))


def test_a_teacher_whose_file_has_changed_is_refused_by_name(tmp_path: Path) -> None:
    file, run = tmp_path / "teacher.safetensors", tmp_path / "run"
    save_file(teacher(3).state_dict(), file)
    task, _ = fit_tiny([Checkpoint(every="2 updates")], task=Taught(file=str(file)), run_dir=run)
    assert_same(forge.load(run), task)
    save_file(teacher(4).state_dict(), file)
    for path in (run, run / "weights.safetensors", run / "checkpoints" / "latest"):
        with pytest.raises(forge.CheckpointError) as caught:
            forge.load(path)
        said = str(caught.value)
        assert "the frozen module 'teacher' has other weights than when the run began (its file: " in said
        assert "Taught.from_checkpoint(...)" in said
    assert_same(Taught.from_checkpoint(run), task)


def test_an_adapter_on_another_base_is_refused_and_statistics_that_changed_come_back(tmp_path: Path) -> None:
    task, _ = fit_tiny([Checkpoint(every="2 updates")], task=Adapted(), run_dir=tmp_path)
    loaded = forge.load(tmp_path, Adapted)
    assert_same(dict(loaded.named_buffers()), dict(task.named_buffers()))
    x = tiny_batches()[0][0]
    assert torch.equal(loaded(x), task.eval()(x))

    class Doubled(Adapted):
        def __init__(self, saves_all: bool = False) -> None:
            super().__init__(saves_all)
            self.net.base.weight.mul_(2.0)  # pyright: ignore

    with pytest.raises(forge.CheckpointError, match=r"the frozen module 'net' has other weights"):
        forge.load(tmp_path, Doubled)


def test_a_teacher_that_the_seed_of_the_run_has_drawn_is_drawn_again(tmp_path: Path) -> None:
    trainer = forge.Trainer(seed=5, plugins=[], max_epochs=1, device="cpu", run_dir=tmp_path)
    task = DrawnBySeed()
    trainer.fit(task, tiny_batches())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(forge.load(tmp_path).teacher.weight, task.teacher.weight)  # pyright: ignore
    assert torch.equal(torch.get_rng_state(), before)
