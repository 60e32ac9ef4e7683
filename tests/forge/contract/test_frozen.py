"""forge.frozen: a module that a task uses, and that is not the task's to train or save."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import forge
from forge.planning.dry_run import run_dry
from forge.snapshot.copies import without_hooks
from forge.snapshot.sandbox import kept_buffers
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge.util.frozen import Frozen, every_module, frozen_in
from forge_plugins import DDP, EMA, FSDP, Checkpoint, Remat, Spans
from tests.forge.snapshot.test_resume import die, live, resumes
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some


class Counting(nn.Module):
    """A teacher that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x)


def teacher(seed: int = 7, kind: type[nn.Module] | None = None) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)) if kind is None else kind()


class Student(TinyTask):
    """Learns what its teacher says."""

    def __init__(self, seed: int = 7, kind: type[nn.Module] | None = None, file: str | None = None):
        super().__init__()
        self.teacher: Any = forge.frozen(teacher(seed, kind), file=file)

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, _ = batch
        return {"loss": F.mse_loss(self(x), self.teacher(x))}

    validation_step = training_step


class Registered(Student):
    """The same with the teacher as a part of the task, as a plain loop has it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = self.teacher.module

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr, momentum=0.9)


def nets(task: Any) -> dict[str, Tensor]:
    return {name: value for name, value in task.state_dict().items() if name.startswith("net.")}


# -- the holder -------------------------------------------------------------------------------------------------------


def test_the_holder_is_no_module_and_passes_calls_and_attributes_on() -> None:
    module = teacher()
    held: Any = forge.frozen(module)
    x = torch.randn(4, 6)
    assert not isinstance(held, nn.Module)
    assert held.module is module
    assert not held.training
    assert not any(p.requires_grad for p in held.parameters())
    assert torch.equal(held(x), module(x))
    held.temperature = 2.0
    assert module.temperature == 2.0
    del held.temperature
    assert not hasattr(module, "temperature")
    assert held.train() is held
    assert module.training
    assert held.eval().requires_grad_(False).to(torch.float64) is held
    assert held.state_dict()["0.weight"].dtype is torch.float64
    assert "state_dict" in dir(held)
    assert repr(held).startswith("frozen(Sequential(")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
def test_the_holder_is_copied_with_its_module(copied: Any) -> None:
    held: Any = forge.frozen(teacher())
    twin = copied(held)
    assert type(twin) is Frozen
    assert twin.module is not held.module
    assert_same(twin.module.state_dict(), held.module.state_dict())
    task = copied(Student())
    assert_same(task.teacher.module.state_dict(), Student().teacher.state_dict())


def test_a_gradient_flows_through_it_to_its_input() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    forge.frozen(teacher())(x).sum().backward()
    assert x.grad is not None


def test_holders_are_found_at_any_depth_and_follow_the_task() -> None:
    task: Any = Student()
    task.net.inner = forge.frozen(teacher(1))
    task.several = [forge.frozen(teacher(2)), {"far": forge.frozen(teacher(3))}]
    task.again = task.teacher
    task.teacher.module.own = forge.frozen(teacher(4))
    assert list(frozen_in(task)) == ["teacher", "several[0]", "several[1]['far']", "net.inner", "teacher.own"]
    task.double()
    assert {p.dtype for held in frozen_in(task).values() for p in held.parameters()} == {torch.float64}
    assert len(list(every_module(task))) == len(list(task.modules())) + 5 * 4


# -- what it stays out of ---------------------------------------------------------------------------------------------


def test_it_trains_as_a_teacher_that_a_plain_loop_keeps_in_eval_mode() -> None:
    task, _ = fit_tiny(task=Student())
    by_hand: Any = Registered()
    optimizer = by_hand.configure_optimizers()
    torch.manual_seed(0)
    for _ in range(2):
        for batch in tiny_batches():
            by_hand.train()
            by_hand.teacher.eval()
            loss = by_hand.training_step(batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(nets(task), nets(by_hand))


def test_it_is_in_no_checkpoint_average_count_or_weights_file(tmp_path: Path, caplog: Any) -> None:
    ema = EMA(0.5)
    task, _ = live(tmp_path, [Checkpoint(every="2 updates"), ema], task=Student())
    names = {f"{name}" for name in TinyTask().state_dict()}
    assert set(task.state_dict()) == names
    assert set(forge.load_weights(TinyTask(), tmp_path).loaded) == names
    assert set(ema._average.tensors) <= names
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["task"]["parameters"] == sum(p.numel() for p in TinyTask().parameters())
    assert list(card["frozen"]) == ["teacher"]
    assert card["frozen"]["teacher"]["sha256"][:12] in (tmp_path / "card.md").read_text()
    for file in (tmp_path / "checkpoints").rglob("*.safetensors"):
        assert b"teacher" not in file.read_bytes()


def test_it_keeps_its_mode() -> None:
    task: Any = Student()
    task.teacher.module[1].train()
    fit_tiny(task=task)
    assert [module.training for module in task.teacher.module] == [False, True, False]


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_a_cut_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    resumes(tmp_path, lambda: {"task": Student()}, lambda updates: [4])


def with_another_teacher(**more: Any) -> Student:
    task = Student()
    task.teacher = forge.frozen(teacher(8))
    vars(task).update({name: forge.frozen(value) for name, value in more.items()})
    return task


def test_another_teacher_is_refused_by_name_with_a_cure(tmp_path: Path, caplog: Any) -> None:
    die(tmp_path, [Checkpoint(every="1 update")], 4, task=Student())
    with pytest.raises(forge.CheckpointError) as caught:
        live(tmp_path, [Checkpoint(every="1 update")], task=with_another_teacher())
    said = str(caught.value)
    assert "the frozen module 'teacher' has other weights than when the run began" in said
    assert "forge.frozen(module, file=...)" in said
    with caplog.at_level(logging.WARNING, "forge"):
        live(tmp_path, [Checkpoint(every="1 update")], task=with_another_teacher(), allow_inexact=True)
    assert "has other weights" in caplog.text


def test_a_teacher_that_came_or_went_is_refused(tmp_path: Path) -> None:
    die(tmp_path / "one", [Checkpoint(every="1 update")], 4, task=Student())
    with pytest.raises(forge.CheckpointError, match=r"the frozen module 'second' is new"):
        live(tmp_path / "one", [Checkpoint(every="1 update")], task=with_another_teacher(second=teacher(9)))
    die(tmp_path / "two", [Checkpoint(every="1 update")], 4, task=with_another_teacher(second=teacher(9)))
    with pytest.raises(forge.CheckpointError, match=r"the frozen module 'second' is not in this task"):
        live(tmp_path / "two", [Checkpoint(every="1 update")], task=with_another_teacher())


def test_what_changes_in_it_is_said_and_goes_on_where_it_was(tmp_path: Path, caplog: Any) -> None:
    """As the statistics of a batch norm in training mode."""

    def make() -> Any:
        task: Any = Student()
        task.teacher.train()
        return task

    with caplog.at_level(logging.INFO, "forge"):
        straight, _ = live(tmp_path / "straight", [Checkpoint(every="1 update")], task=make())
    assert caplog.text.count("The frozen module 'teacher' changes while the run trains: ") == 1
    die(tmp_path / "cut", [Checkpoint(every="1 update")], 7, task=make())
    resumed, _ = live(tmp_path / "cut", [Checkpoint(every="1 update")], task=make())
    assert not torch.equal(straight.teacher.module[1].running_mean, teacher()[1].running_mean)  # pyright: ignore
    assert_same(resumed.teacher.module.state_dict(), straight.teacher.module.state_dict())
    assert_same(resumed, straight)


# -- from a file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_its_weights_may_come_from_a_file_whose_hash_is_in_the_card(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"teacher.{suffix}"
    state = teacher(3).state_dict()
    save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    task: Any = Student(file=str(file))
    fit_tiny(task=task, run_dir=tmp_path / "run")
    assert_same(task.teacher.module.state_dict(), state)
    noted = json.loads((tmp_path / "run" / "card.json").read_text())["frozen"]["teacher"]
    assert noted["file"] == str(file)
    assert len(noted["file_sha256"]) == 64
    assert "teacher" in (tmp_path / "run" / "card.md").read_text()


def test_a_task_on_the_meta_device_needs_the_file(tmp_path: Path) -> None:
    file = tmp_path / "teacher.pt"
    torch.save(teacher(3).state_dict(), file)
    with torch.device("meta"):
        held: Any = forge.frozen(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), file=file)
        bare: Any = forge.frozen(nn.Linear(6, 3))
    assert_same(held.module.state_dict(), teacher(3).state_dict())
    task: Any = Student()
    task.teacher = bare
    with pytest.raises(forge.TaskError, match=r"frozen module 'teacher' of Student was made on the meta device"):
        fit_tiny(task=task)


# -- beside other rooms and plugins -----------------------------------------------------------------------------------


def test_copies_for_probes_carry_no_hooks_of_it_and_buffers_are_put_back() -> None:
    task: Any = Student(kind=Counting)
    called: list[int] = []
    task.teacher.register_forward_hook(lambda *_: called.append(1))
    without_hooks(task).teacher(torch.zeros(2, 6))
    assert not called
    with kept_buffers(task):
        task.teacher(torch.zeros(2, 6))
    assert called
    assert int(task.teacher.calls) == 0


@pytest.mark.slow
def test_the_dry_run_counts_its_memory() -> None:
    class Wide(Student):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = forge.frozen(nn.Linear(6, 3 * 2**16))

        def training_step(self, batch: Any) -> dict[str, Tensor]:
            return {"loss": self(batch[0]).mean() + self.teacher(batch[0]).mean()}

    batch = tiny_batches()[0]
    more = run_dry(Wide, batch).parameters - run_dry(TinyTask, batch).parameters
    assert more >= 7 * 3 * 2**16 * 4
    assert run_dry(Wide, batch).gradients == run_dry(TinyTask, batch).gradients


@pytest.mark.parametrize("plugins", [[Spans(rates=True)], [Remat(modules="net")]], ids=["rates", "remat"])
def test_plugins_that_copy_or_wrap_the_task_leave_it_alone(plugins: list[Any]) -> None:
    expected, _ = fit_tiny(task=Student())
    task: Any = fit_tiny(plugins, task=Student())[0]
    assert_same(nets(task), nets(expected))
    assert_same(task.teacher.module.state_dict(), teacher().state_dict())


def test_a_lightning_module_has_one_too(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)
            self.teacher = forge.frozen(teacher())

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.mse_loss(self.net(batch[0]), self.teacher(batch[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task = forge.LightningAdapter(Module())
    trainer = forge.Trainer(
        plugins=[Checkpoint(every="1 update")], max_epochs=1, run_dir=tmp_path, device="cpu", seed=0
    )
    trainer.fit(task, tiny_batches())
    assert list(task.state_dict()) == ["net.weight", "net.bias"]
    assert list(json.loads((tmp_path / "card.json").read_text())["frozen"]) == ["teacher"]
    assert list(frozen_in(task)) == ["teacher"]
    for move in (lambda: task.to(torch.float64), lambda: task.double()):
        task.float()
        move()
        assert frozen_in(task)["teacher"].module[0].weight.dtype is torch.float64  # pyright: ignore


def fitted_on_ranks(strategy: str, run: str) -> dict[str, Any]:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    task: Any = Student(seed=int(torch.randint(100, ())) if strategy == "ddp" else 7)
    first = task.teacher.state_dict()["0.weight"].clone()
    plugin = DDP() if strategy == "ddp" else FSDP()
    forge.Trainer(plugins=[plugin, Checkpoint(every="2 updates")], max_epochs=1, seed=0, device="cpu", run_dir=run).fit(
        task, tiny_batches((8, 8)), tiny_batches((8,), seed=1)
    )
    held = task.teacher.state_dict()
    return {"plain": all(type(t) is Tensor for t in held.values()), "weight": held["0.weight"], "first": first}


@pytest.mark.parametrize("strategy", some(["ddp", "fsdp"], quick=1))
def test_ranks_neither_divide_it_nor_reduce_its_gradients(strategy: str, tmp_path: Path) -> None:
    one, two = ranks(2)(fitted_on_ranks, strategy, str(tmp_path / "run"))
    assert one["plain"]
    assert torch.equal(one["weight"], two["weight"])
    assert torch.equal(one["weight"], one["first"])


# -- adapters ---------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """LoRA by hand: a frozen layer and a trained product beside it."""

    def __init__(self, seed: int = 7):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.base = nn.Linear(6, 3).requires_grad_(False)
            self.norm = nn.BatchNorm1d(6, affine=False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.base(x) + self.up(self.down(x))


class Adapted(TinyTask):
    def __init__(self, saves_all: bool = False):
        super().__init__()
        self.net = LowRank() if saves_all else forge.adapter(LowRank())


def test_of_a_model_with_adapters_only_what_is_trained_is_saved(tmp_path: Path) -> None:
    task, _ = live(tmp_path, [Checkpoint(every="2 updates")], task=Adapted())
    assert list(task.state_dict()) == ["net.down.weight", "net.up.weight"]
    assert set(forge.load_weights(Adapted(), tmp_path).loaded) == {"net.down.weight", "net.up.weight"}
    assert list(json.loads((tmp_path / "card.json").read_text())["frozen"]) == ["net"]
    whole, _ = fit_tiny(task=Adapted(saves_all=True), max_epochs=3, seed=3)
    assert_same(dict(task.named_parameters()), dict(whole.named_parameters()))
    again = copy.deepcopy(task)
    again.load_state_dict(task.state_dict())
    assert list(again.state_dict()) == list(task.state_dict())
    assert again.load_state_dict(Adapted(saves_all=True).state_dict(), strict=True)


def test_a_run_with_adapters_is_resumed_with_the_statistics_that_changed(tmp_path: Path) -> None:
    straight, _ = live(tmp_path / "straight", [Checkpoint(every="1 update")], task=Adapted())
    die(tmp_path / "cut", [Checkpoint(every="1 update")], 4, task=Adapted())
    resumed, _ = live(tmp_path / "cut", [Checkpoint(every="1 update")], task=Adapted())
    assert_same(dict(resumed.named_parameters()), dict(straight.named_parameters()))
    assert_same(dict(resumed.named_buffers()), dict(straight.named_buffers()))
