"""Nothing that is not finite is written as a checkpoint or as weights, with and without guard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge
from forge.checkpoint import Checkpoints
from forge.checkpoint.weights import read_weights
from forge.cli.ckpt import _export as export
from forge.errors import CheckpointError, NonFiniteError
from forge.testing import TinyTask, tiny_batches
from forge_plugins import EMA, Checkpoint, Guard


class Half(forge.TaskModule):
    """float16 weights with Adam, whose eps is zero in float16: a gradient of zero gives 0 / 0."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 8).half()
        self.head = nn.Linear(8, 3).half()

    def training_step(self, batch: Any) -> Tensor:
        hidden = torch.relu(self.net(batch[0].half()))
        return nn.functional.cross_entropy(self.head(hidden).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Broken(torch.optim.SGD):
    """Writes a value into one place at one step."""

    at, value, where = 3, math.nan, "weight"

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        parameter = self.param_groups[0]["params"][0]
        if self.steps == self.at:
            with torch.no_grad():
                (parameter if self.where == "weight" else self.state[parameter]["momentum_buffer"]).view(-1)[0] = (
                    self.value
                )
        return result


class Task(forge.TaskModule):
    """One weight is not used in the loss, so no loss and no gradient shows what happens to it."""

    def __init__(self, at: int = 3, value: float = math.nan, where: str = "weight", used: bool = False):
        super().__init__()
        self.options = {"at": at, "value": value, "where": where}
        self.table, self.net = nn.Embedding(4, 6), nn.Linear(6, 3)
        self.used = used
        self.register_buffer("mask", torch.full((3,), -math.inf))
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Any) -> Tensor:
        rows = torch.zeros_like(batch[1]) if self.used else batch[1] % 3 + 1
        return nn.functional.cross_entropy(self.net(batch[0] + self.table(rows)), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = Broken(self.parameters(), lr=0.1, momentum=0.9)
        vars(optimizer).update(self.options)
        return optimizer


class NaNBuffer(Task):
    def __init__(self) -> None:
        super().__init__(at=99)

    def training_step(self, batch: Any) -> Tensor:
        self.get_buffer("seen")[0] = math.nan
        return super().training_step(batch)


def fit(task: forge.TaskModule, folder: Path | bool, *plugins: Any, updates: int = 8, **options: Any) -> Any:
    torch.manual_seed(0)
    settings = {"max_updates": updates, "seed": 0, "device": "cpu", "run_dir": folder, **options}
    return forge.Trainer(plugins=list(plugins), **settings).fit(task, tiny_batches([8] * 8))


def saving() -> Checkpoint:
    return Checkpoint(every="1 updates", keep=20, background=False)


def written(folder: Path) -> list[Any]:
    """Every tensor of every file that a run wrote."""
    files = [*Checkpoints(folder / "checkpoints").all()]
    files += [folder / "weights.safetensors"] if (folder / "weights.safetensors").exists() else []
    return [tensor for file in files for tensor in read_weights(file, None).tensors.values()]


def assert_good(folder: Path, mask: bool = True) -> None:
    found = [tensor for tensor in written(folder) if tensor.is_floating_point()]
    assert not any(tensor.isnan().any() for tensor in found)
    assert not any(tensor.isposinf().any() for tensor in found)


@pytest.mark.parametrize("plugins", [[], [Guard], [saving], [Guard, saving]])
def test_half_precision_with_adam_is_never_written(plugins: list[Any], tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"not finite.*float16.*eps"):
        fit(Half(), tmp_path, *[make() for make in plugins], updates=1)
    assert not (tmp_path / "weights.safetensors").exists()
    assert written(tmp_path) == []


@pytest.mark.parametrize("where", ["weight", "momentum"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("guard", [[], [Guard], [lambda: Guard("skip")]])
def test_what_an_optimizer_breaks_is_not_saved(where: str, value: float, guard: list[Any], tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"After update [23]: .*table\.weight is not finite.*update-00000002"):
        fit(Task(value=value, where=where), tmp_path, saving(), *[make() for make in guard])
    assert [path.name for path in Checkpoints(tmp_path / "checkpoints").all()] == ["update-00000001", "update-00000002"]
    assert not (tmp_path / "weights.safetensors").exists()
    assert_good(tmp_path)


class Wrapper:
    """No torch Optimizer: hands everything to the one inside, as wrapping optimizers of other packages do."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in {"param_groups", "step", "zero_grad", "state_dict", "load_state_dict"}:
            return getattr(self.inner, name)
        raise AttributeError(name)


def test_the_state_of_a_wrapped_optimizer_is_looked_at(tmp_path: Path) -> None:
    class Wrapped(Task):
        def configure_optimizers(self) -> Any:
            return Wrapper(super().configure_optimizers())

    with pytest.raises(NonFiniteError, match=r"the optimizer's momentum_buffer of table\.weight"):
        fit(Wrapped(where="momentum"), tmp_path, saving())


def test_an_average_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    class Mends(Task):
        """The weight is finite again one update later; the average never is."""

        def training_step(self, batch: Any) -> Tensor:
            with torch.no_grad():
                self.table.weight.nan_to_num_()
            return super().training_step(batch)

    task = Mends()
    with pytest.raises(NonFiniteError, match=r"table\.weight in the average of ema"):
        fit(task, tmp_path, Checkpoint(every="5 updates", background=False), EMA())


def test_a_buffer_that_was_finite_must_stay_so(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="seen is not finite"):
        fit(NaNBuffer(), tmp_path, saving())


def test_a_mask_of_infinities_is_saved_and_exported(tmp_path: Path) -> None:
    fit(Task(at=99), tmp_path, saving(), Guard())
    assert any(tensor.isneginf().all() for tensor in written(tmp_path))
    assert_good(tmp_path)


def test_a_parameter_with_infinities_from_the_start_is_trained(tmp_path: Path) -> None:
    class Masked(TinyTask):
        """Logits of which one is forbidden, as in a transition matrix."""

        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.tensor([0.0, -math.inf, 1.0]))

        def training_step(self, batch: Any) -> Any:
            return {"loss": super().training_step(batch)["loss"] - self.logits.softmax(0)[0]}

    fit(Masked(), tmp_path, saving(), Guard())
    result = fit(Masked(), tmp_path, saving(), Guard(), updates=10, resume="auto")
    assert result.updates == 10


def test_lazy_layers_are_looked_at_once_they_have_values(tmp_path: Path) -> None:
    class Lazy(Task):
        def __init__(self) -> None:
            super().__init__(at=99)
            self.net = nn.LazyLinear(3)  # pyright: ignore[reportAttributeAccessIssue]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert fit(Lazy(), tmp_path, Guard(), updates=3).updates == 3


def test_weights_that_are_nan_at_the_start_are_refused(tmp_path: Path) -> None:
    task = Task(at=99)
    with torch.no_grad():
        task.table.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"table\.weight"):
        fit(task, tmp_path, saving())


def test_guard_finds_a_broken_weight_within_16_updates() -> None:
    """No loss shows it, and nothing is saved: the weights are looked at in every 16th update."""
    task = Task(at=2)
    with pytest.raises(NonFiniteError, match=r"After update 15: table\.weight is not finite"):
        fit(task, False, Guard(), updates=20)


def test_guard_names_the_weights_behind_a_bad_loss() -> None:
    with pytest.raises(NonFiniteError, match=r"After update 2: table\.weight.*from finite gradients"):
        fit(Task(at=3, used=True), False, Guard())


def test_guard_rewinds_from_broken_weights(tmp_path: Path) -> None:
    task = Task(at=3, used=True)
    result = fit(task, tmp_path, saving(), Guard("rewind"))
    assert result.updates == 8
    assert torch.isfinite(task.table.weight).all()
    assert_good(tmp_path)


def test_a_file_with_nan_is_not_exported_again(tmp_path: Path) -> None:
    torch.save({"net.weight": torch.tensor([1.0, math.nan])}, tmp_path / "old.pt")
    with pytest.raises(CheckpointError, match=r"net\.weight hold NaN.*--force"):
        export(tmp_path / "old.pt", tmp_path / "out.safetensors", None, False)
    assert export(tmp_path / "old.pt", tmp_path / "out.safetensors", None, True) == 0
