"""The table in docs/debugging.md of what forge refuses is true: each mistake is made, and the message compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.data import TensorLoader
from forge.testing import fit_tiny, tiny_batches
from forge_plugins import Accumulate, Checkpoint, Clip, Guard
from tests.support.docs_pages import read


class Classifier(forge.TaskModule):
    """Does everything right; each mistake below changes one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def classifier(**changed: Any) -> forge.TaskModule:
    """A Classifier with some methods replaced."""
    return type("Classifier", (Classifier,), changed)()


def fit(task: forge.TaskModule | None = None, train: Any = None, *plugins: forge.Plugin) -> None:
    fit_tiny(plugins, task=task or Classifier(), train=tiny_batches([4] * 3) if train is None else train)


def fit_step(step: Callable[[Any, Any], Any]) -> None:
    fit(classifier(training_step=step))


def plugin(name: str, **members: Any) -> forge.Plugin:
    return type(name, (forge.Plugin,), members)()


def forget_super() -> None:
    classifier(__init__=lambda self: setattr(self, "net", nn.Linear(6, 3)))


def hide_layers() -> None:
    task = Classifier()
    task.layers = [nn.Linear(2, 2), nn.Linear(2, 2)]  # pyright: ignore[reportArgumentType]
    fit(task)


def train_nothing() -> None:
    task = Classifier()
    task.requires_grad_(False)
    fit(task)


def train_another_model() -> None:
    fit(classifier(configure_optimizers=lambda self: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)))


def with_optimizer(make: Callable[[Any], Any]) -> None:
    fit(classifier(configure_optimizers=make))


def train_twice() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own word on it
        with_optimizer(lambda self: torch.optim.SGD([*self.parameters(), *self.net.parameters()], lr=0.1))


def cycle_too_short() -> None:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)

    with_optimizer(configure_optimizers)


def drop_the_schedule() -> None:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    with_optimizer(configure_optimizers)


def keep_a_tensor() -> None:
    task = Classifier()
    task.scale = torch.ones(3, requires_grad=True)
    fit(task)


def train_a_part() -> None:
    task = classifier(configure_optimizers=lambda self: torch.optim.SGD(self.other.parameters(), lr=0.1))
    task.other = nn.Linear(2, 2)
    type(task).expected = {"unused_parameters"}
    fit(task)


def make_layers_late() -> None:
    def training_step(self: Any, batch: Any) -> Any:
        self.late = nn.Linear(3, 3)
        return F.cross_entropy(self.late(self.net(batch[0])), batch[1])

    fit_step(training_step)


def squash_twice() -> None:
    def training_step(self: Any, batch: Any) -> Any:
        scores = self.net(batch[0]).repeat(2, 1).sigmoid()
        return F.binary_cross_entropy_with_logits(scores, torch.ones(8, 3))

    fit_step(training_step)


def raise_stop_iteration() -> None:
    def training_step(self: Any, batch: Any) -> Any:
        return next(iter(()))

    fit_step(training_step)


class ShortLoader:
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_batches([4, 4]))


class Stream:
    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_batches([4, 4]))


def save(seed: int, train: Any = None, **options: Any) -> None:
    """A saved fit in the folder "run"."""
    train = tiny_batches([4] * 3) if train is None else train
    fit_tiny([Checkpoint()], task=Classifier(), train=train, seed=seed, run_dir="run", **options)


def become_nan() -> None:
    step = classifier(training_step=lambda s, b: F.cross_entropy(s.net(b[0]), b[1]) * float("nan"))
    fit(step, None, Guard())


def both_behind_each_other() -> None:
    fit(None, None, plugin("First", after=("second",)), plugin("Second", after=("first",)))


def own_the_window_twice() -> None:
    bigger = plugin("Bigger", forge_plan_step=forge.hookimpl(lambda self: 8))
    fit(None, None, Accumulate(2), bigger)


@forge.hookimpl
def on_step(self: Any, step: forge.Step) -> None: ...


MISTAKES: dict[str, Callable[[], Any]] = {
    "a misspelt hook": lambda: fit(None, None, plugin("Watcher", forge_step_ended=on_step)),
    "a hook without its mark": lambda: fit(None, None, plugin("Watcher", forge_step_end=lambda self: None)),
    "an unknown option": lambda: Clip(max_nrom=1.0),
    "an option of the wrong type": lambda: Accumulate(window="4"),  # pyright: ignore[reportArgumentType]
    "an unknown recipe": lambda: forge.recipe("quikstart"),
    "two owners of one action": own_the_window_twice,
    "a missing requirement": lambda: fit(None, None, plugin("Needy", requires=("grad_scaler",))),
    "plugins that wait for each other": both_behind_each_other,
    "a forgotten `super().__init__()`": forget_super,
    "layers in a plain list": hide_layers,
    "a step that wants an index": lambda: fit(classifier(training_step=lambda self, batch, batch_idx: None)),
    "nothing to train": train_nothing,
    "an optimizer over another model": train_another_model,
    "a parameter twice in an optimizer": train_twice,
    "a OneCycleLR that ends before the run": cycle_too_short,
    "a loss that is no scalar": lambda: fit_step(lambda self, batch: self.net(batch[0]).sum(1)),
    "a loss without gradient": lambda: fit_step(lambda self, batch: self.net(batch[0]).sum().detach()),
    "softmax before cross-entropy": lambda: fit_step(lambda s, b: F.cross_entropy(s.net(b[0]).softmax(1), b[1])),
    "probabilities into `kl_div`": lambda: fit_step(lambda s, b: F.kl_div(s.net(b[0]).softmax(1), torch.ones(4, 3))),
    "labels out of range": lambda: fit_step(lambda s, b: F.cross_entropy(s.net(b[0]), torch.full((4,), 3))),
    "negative labels": lambda: fit_step(lambda s, b: F.cross_entropy(s.net(b[0]), torch.full((4,), -1))),
    "float labels": lambda: fit_step(lambda s, b: F.cross_entropy(s.net(b[0]), b[1].float())),
    "shapes that broadcast": lambda: fit_step(lambda s, b: F.mse_loss(s.net(b[0])[:, :1], b[1].float())),
    "a dataset instead of a loader": lambda: fit(None, torch.utils.data.TensorDataset(torch.zeros(4, 6))),
    "a list of train loaders": lambda: fit(None, [TensorLoader(torch.zeros(4, 6), batch_size=2)] * 2),
    "a loader shorter than its length": lambda: fit(None, ShortLoader()),
    "`StopIteration` out of a step": raise_stop_iteration,
    "another seed, batch, data or model on resume": lambda: [save(3), save(4, resume="auto")],
    "continuing over a loader that cannot be": lambda: [save(3, Stream()), save(3, Stream(), resume="auto")],
    "training over another run": lambda: [save(3), save(3)],
    "a loss that becomes NaN": become_nan,
    "no end": lambda: forge.Trainer(plugins=[]).fit(Classifier(), tiny_batches()),
}


SUSPICIONS: dict[str, Callable[[], Any]] = {
    "a tensor that is no parameter": keep_a_tensor,
    "parameters in no optimizer": train_a_part,
    "parameters made in the step": make_layers_late,
    "a schedule that was not returned": drop_the_schedule,
    "a target that is repeated": lambda: fit_step(lambda s, b: F.mse_loss(s.net(b[0]), torch.ones(1, 3))),
    "logits into `nll_loss`": lambda: fit_step(lambda s, b: F.nll_loss(s.net(b[0]).exp(), b[1])),
    "sigmoid before a loss with logits": squash_twice,
}


def table(head: str) -> dict[str, str]:
    """One of the page's tables: mistake -> message."""
    rows = read("docs/debugging.md").partition(f"{head}")[2].partition("\n\n")[0].splitlines()[2:]
    pairs = [row.strip("| ").split(" | ")[:2] for row in rows]
    return {mistake: message.strip("`") for mistake, message in pairs}


REFUSALS, WARNINGS = table("| mistake | what forge says |"), table("| suspicion | what forge warns of |")


def test_every_mistake_in_the_tables_is_made_here() -> None:
    assert list(REFUSALS) == list(MISTAKES)
    assert list(WARNINGS) == list(SUSPICIONS)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_forge_refuses_a_mistake_as_the_page_says(mistake: str) -> None:
    with pytest.raises(forge.ForgeError) as refused:
        MISTAKES[mistake]()
    assert REFUSALS[mistake] in str(refused.value)


@pytest.mark.parametrize("suspicion", SUSPICIONS)
def test_forge_warns_of_a_suspicion_as_the_page_says(suspicion: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        SUSPICIONS[suspicion]()
    told = [each for each in said if "Using a target size" not in str(each.message)]  # torch's own, from the second on
    assert len(told) == 1, [str(each.message) for each in told]
    assert WARNINGS[suspicion] in str(told[0].message)
